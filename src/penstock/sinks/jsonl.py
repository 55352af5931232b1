"""Records as JSON lines in one file, in the order of the outbox. See `engine.flusher`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.ports import Row
from penstock.sinks.append_file import AppendingSink
from penstock.sinks.common import file_url


class JsonLinesSink(AppendingSink):
    """JSON lines sink."""

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
