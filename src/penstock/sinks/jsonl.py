"""Records as JSON lines in one file, in the order of the outbox. See `engine.flusher`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.ports import Row
from penstock.sinks.append_file import AppendingSink, read_mark
from penstock.sinks.common import file_url


class JsonLinesSink(AppendingSink):
    """JSON lines sink."""

    def open(self, position: int, mark: str) -> str:
        """Truncate the file to the mark.

        If the file is not the one of the mark (shorter, replaced, edited), it is kept and continued
        at its end.
        """
        self.notice = ""
        self._file.open()
        recorded = read_mark(mark)
        own_mark = self._file.find_mark(recorded)
        if own_mark is not None:
            self._file.truncate(own_mark.at)
        else:
            if recorded is not None and recorded.at > 0:
                self.notice = self._file.changed(recorded, position)
            self._file.continue_at_end()
        return self._file.mark()

    def write(self, rows: Sequence[Row]) -> str:
        self._file.check()
        self._file.append(b"".join([_line(row.body) for row in rows]))
        return self._file.mark()


def _line(body: bytes) -> bytes:
    # Raw line breaks are only between JSON tokens, so a space has the same meaning.
    if b"\n" in body or b"\r" in body:
        body = body.replace(b"\n", b" ").replace(b"\r", b" ")
    return body + b"\n"


def open_sink(url: str, options: Mapping[str, Any], base: Path) -> JsonLinesSink:
    """Create the sink of `jsonl:products.jsonl`. Opens no file yet.

    Raise ConfigError if the URL or an option is not valid.
    """
    path, _ = file_url(url, options, base, scheme="jsonl", known=())
    return JsonLinesSink(url, path)
