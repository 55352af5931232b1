"""Records as JSON lines, one file, in the order of the outbox. When to write, and what was written
before, is the flusher's to know.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.ports import Row
from penstock.sinks.append_file import AppendFile, read_mark
from penstock.sinks.common import file_url


class JsonLinesSink:
    """The file belongs to the sink while it is open: what others append to it is cut off like the
    tail of a crash.
    """

    def __init__(self, name: str, path: Path) -> None:
        self.name, self.path, self.notice = name, path, ""
        self._file = AppendFile(path)

    def open(self, position: int, mark: str) -> str:
        """Cut to the mark. A file that is not the one it was noted of (shorter, replaced, edited)
        is left as it is and continued at its end.
        """
        self.notice = ""
        self._file.open()
        noted = read_mark(mark)
        own = self._file.own(noted)
        if own is not None:
            self._file.cut(own.at)
        else:
            if noted is not None and noted.at > 0:
                self.notice = f"{self.path} is not as it was left after row {position} ({noted.at} bytes then, {self._file.size} now): going on at its end"
            self._file.adopt()
        return self._file.mark()

    def write(self, rows: Sequence[Row]) -> str:
        self._file.check()
        self._file.append(b"".join([_line(row.body) for row in rows]))
        return self._file.mark()

    def restore(self, mark: str) -> None:
        self._file.restore(mark)

    def close(self) -> None:
        self._file.close()


def _line(body: bytes) -> bytes:
    if b"\n" in body or b"\r" in body:  # between JSON tokens only, so a blank says the same
        body = body.replace(b"\n", b" ").replace(b"\r", b" ")
    return body + b"\n"


def open_sink(url: str, options: Mapping[str, Any], base: Path) -> JsonLinesSink:
    """`jsonl:products.jsonl`. Checks, and opens nothing yet. Raises ConfigError."""
    path, _ = file_url(url, options, base, scheme="jsonl", known=())
    return JsonLinesSink(url, path)
