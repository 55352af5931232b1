"""Splits an object into records with bounded memory, and parses them as text, CSV or JSON.

The object may be gzip, and a CSV record may have several lines.
"""

from __future__ import annotations

import csv
import re
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from penstock.rules.json_limits import check_values
from penstock.sources.gzip_members import BrokenGzip, GzipMembers
from penstock.sources.seeds.files import OpenObject

CHUNK: Final = 1 << 20  # bytes that are read or decompressed together
BUDGET: Final = 8  # chunks that one step may read, which takes a fraction of a second
RATIO_FREE: Final = 64 << 20  # decompressed bytes for which the ratio is not checked
# Bytes of a CSV record over several lines. Without a limit, one stray quote would make the rest of
# the object a single record.
MAX_SPAN: Final = 64 << 10
# Bytes that may be searched for the end of a quote without a result: this many, and as many times
# the bytes that were read. Without a limit, lines of five bytes would need 64 KiB of work each.
VAIN_FREE: Final = 4 << 20
VAIN_RATIO: Final = 8
LONG_SHOWN: Final = 2000  # bytes of a record that is too long, in the finding
SHOWN: Final = 500  # characters of a record that cannot be parsed, in the payload
# URL (or None) and payload of a record. A blank line or a comment has neither.
ParsedLine: TypeAlias = tuple[str | None, dict[str, Any]]
_decode = msgspec.json.Decoder().decode
_BLANK: Final = re.compile(rb"\n+")


class Record(NamedTuple):
    offset: int
    line: int
    raw: bytes  # without the newline
    wrong: str = ""  # reason if the record cannot be used


class BadLine(Exception):
    """The line cannot be parsed. The text is a readable reason."""


class SizeLimits(NamedTuple):
    max_record: int  # bytes of a record
    max_size: int  # decompressed bytes of a gzip file
    ratio: float  # decompressed bytes for each compressed byte


class Stream:
    """Bytes of an object in order, decompressed if it is gzip."""

    def __init__(
        self, opened: OpenObject, limits: SizeLimits, *, gzip: bool, offset: int = 0
    ) -> None:
        """`offset` may be set only if the object is not compressed."""
        self._opened, self._limits = opened, limits
        self._gzip = GzipMembers() if gzip else None
        self.raw = offset  # bytes of the object that were read
        self._decompressed = 0  # decompressed bytes
        self.ended = False  # True if no more bytes follow
        self.broken = ""  # reason why the stream ended early
        self.cut = False  # True if it ended early, perhaps because it is still being written

    def read(self) -> bytes:
        """Return the next bytes. There may be none before the stream has `ended`.

        Reads or decompresses at most one chunk. So gzip members without content, of which an object
        may have millions, do not make a call long. Sets `broken` if the stream ends early.
        """
        gzip = self._gzip
        if gzip is None or gzip.needs_input:
            found = self._more()
            if not found:
                self.ended = True
                if gzip is not None and gzip.in_member:
                    self.broken, self.cut = "it ends in the middle of its gzip stream", True
                return b""
            if gzip is None:
                return found
            gzip.feed(found)
        try:
            found = gzip.take(CHUNK)
        except BrokenGzip as e:
            return self._break(f"its gzip stream is damaged ({e})")
        self._decompressed += len(found)
        if self._decompressed > self._limits.max_size:
            return self._break(f"it holds more than {self._limits.max_size} bytes (max_size)")
        if self._decompressed > max(RATIO_FREE, self.raw * self._limits.ratio):
            return self._break(
                f"it becomes more than {self._limits.ratio:g} times as large as it is (max_ratio)"
            )
        return found

    def _break(self, reason: str) -> bytes:
        self.broken, self.ended = reason, True
        return b""

    def _more(self) -> bytes:
        found = self._opened.read_at(self.raw, CHUNK)
        self.raw += len(found)
        return found


class Lines:
    """Records of a stream.

    `offset` and `line` are the start of the next record. `sum` is the checksum of all before it.
    """

    def __init__(
        self,
        stream: Stream,
        limits: SizeLimits,
        *,
        delimiter: str | None,
        offset: int = 0,
        line: int = 1,
        sum: int = 0,
    ) -> None:
        """If `delimiter` is set, the records are CSV and may span several lines."""
        self.stream, self._max_record, self._delimiter = stream, limits.max_record, delimiter
        self.offset, self.line, self.ended = offset, line, False
        self._data, self._pos = b"", 0
        self._sum, self._summed = sum, 0  # checksum of all bytes before `_summed` in the data
        # Start of a line that is too long, until its end is found.
        self._long_line: Record | None = None
        self._vain = -VAIN_RATIO * offset  # searched bytes, less those that the offset allows
        self._safe = (offset, line, sum)  # last position at which reading may be resumed
        self.budget = 0

    @property
    def position(self) -> tuple[int, int, int]:
        """Position to resume at: offset, line, checksum of all bytes before it."""
        if self._long_line is None:
            self._update_sum()
            self._safe = self.offset, self.line, self._sum
        return self._safe

    def skip(self, until: int) -> bool:
        """Read towards this offset. Return True if it or the end of the stream is reached."""
        while self.offset < until:
            if self._pos == len(self._data) and not self._more():
                return self.ended
            self._advance(min(until - self.offset, len(self._data) - self._pos))
        return True

    def record(self) -> Record | None:
        """Return the next complete record.

        Return None if the budget of the step is used up, or if no complete record is left (then
        `ended` is True).
        """
        if self._long_line is not None:
            return self._skip_long_line()
        end = self._line_end(0) if self._delimiter is None else self._record_end(self._delimiter)
        if end > 0:
            return self._next_record(end)
        if end == 0:
            return None
        first = self._line_end(0)
        if first > 0:
            return self._next_record(first)._replace(
                wrong=f"a quote in it is not closed within {MAX_SPAN} bytes"
            )
        self._update_sum()
        self._safe = self.offset, self.line, self._sum
        self._long_line = Record(
            self.offset,
            self.line,
            self._data[self._pos : self._pos + LONG_SHOWN],
            f"the line has more than {self._max_record} bytes (max_line)",
        )
        return self._skip_long_line()

    def rest(self) -> Record | None:
        """Return the last line if it has no newline. Call it when the stream has ended.

        The position stays before this line, so that reading can be resumed there.
        """
        if self._long_line is not None:
            return self._long_line
        left = self._data[self._pos :]
        return Record(self.offset, self.line, left.rstrip(b"\r")) if left else None

    def unclosed(self) -> Record | None:
        """Return the next line if its quote is never closed. Call it when the stream has ended."""
        end = self._line_end(0)
        return (
            self._next_record(end)._replace(wrong="a quote in it is never closed")
            if end > 0
            else None
        )

    # -- the buffer --------------------------------------------------------------------------------

    def _more(self) -> bool:
        if self.budget <= 0 or self.ended:
            return False
        self.budget -= 1
        found = self.stream.read()
        if not found:
            self.ended = self.stream.ended
            return False
        self._update_sum()
        self._data = self._data[self._pos :] + found
        self._pos = self._summed = 0
        return True

    def _update_sum(self) -> None:
        self._sum = zlib.crc32(memoryview(self._data)[self._summed : self._pos], self._sum)
        self._summed = self._pos

    def _advance(self, count: int) -> None:
        self.line += self._data.count(b"\n", self._pos, self._pos + count)
        self._pos += count
        self.offset += count

    def _next_record(self, end: int) -> Record:
        raw = self._data[self._pos : self._pos + end]
        found = Record(self.offset, self.line, raw.rstrip(b"\r\n"))
        self._advance(end)
        # Skip empty lines together, because there may be millions.
        if (blank := _BLANK.match(self._data, self._pos)) is not None:
            self._advance(blank.end() - self._pos)
        return found

    def _skip_long_line(self) -> Record | None:
        assert self._long_line is not None
        while True:
            end = self._data.find(b"\n", self._pos)
            self._advance((end + 1 if end >= 0 else len(self._data)) - self._pos)
            if end >= 0:
                found, self._long_line = self._long_line, None
                return found
            if not self._more():
                return None

    def _line_end(self, start: int) -> int:
        """Return the distance from the current position to the end of the line at `start`.

        `start` is also a distance from the current position. The newline is included. Return 0 if
        the line is not complete, and -1 if it is too long.
        """
        seen = start
        while True:
            end = self._data.find(b"\n", self._pos + seen)
            if end >= 0:
                return -1 if end - self._pos > self._max_record else end + 1 - self._pos
            seen = len(self._data) - self._pos
            if seen > self._max_record:
                return -1
            if not self._more():
                return 0

    def _record_end(self, delimiter: str) -> int:
        end = self._line_end(0)
        if end <= 0 or self._data.find(b'"', self._pos, self._pos + end) < 0:
            return end
        missing, first = 1, end
        may_search = self._vain < VAIN_FREE + VAIN_RATIO * self.offset

        def lines() -> Iterator[str]:
            nonlocal end, missing
            start = 0
            while True:
                # Only quotes and delimiters matter here, so any encoding of single bytes is right.
                yield self._data[self._pos + start : self._pos + end].decode("latin-1")
                within = may_search and end <= MAX_SPAN
                start, following = end, self._line_end(end) if within else -1
                if following <= 0:
                    missing = following
                    return
                end = following

        try:
            next(csv.reader(lines(), delimiter=delimiter), None)
        except csv.Error:
            return end  # the parser of the format reports the error
        if missing < 0:
            self._vain += end - first
        return end if missing > 0 else missing


# -- parsing ---------------------------------------------------------------------------------------


def parse_text(text: str) -> ParsedLine | None:
    """Parse a line of text with one URL. A line that starts with # is a comment."""
    url = text.strip()
    return None if not url or url.startswith("#") else (url, {"url": url})


def parse_json(text: str) -> ParsedLine | None:
    """Parse a line with one JSON object or one URL as a JSON string. Raises BadLine."""
    if not text.strip():
        return None
    try:
        check_values(text.encode("utf-8", "replace"))
        found = _decode(text)
    except (msgspec.DecodeError, ValueError, RecursionError) as e:
        raise BadLine(f"the line is no JSON: {str(e)[:200]}") from None
    if isinstance(found, str):
        return found, {"url": found}
    if not isinstance(found, dict):
        raise BadLine(f"the line is JSON, but no object but {type(found).__name__}")
    return None, found


def parse_csv(columns: Sequence[str], url: str, delimiter: str, text: str) -> ParsedLine | None:
    """Parse a CSV record. `url` is the column with the URL. Raises BadLine.

    The columns come from the header or from the source's options.
    """
    fields = row(text, delimiter)
    if not any(fields):
        return None
    if len(fields) > len(columns):
        raise BadLine(f"the line has {len(fields)} fields, the header {len(columns)}")
    payload = dict(zip(columns, fields, strict=False))
    found = payload.get(url)
    return (found.strip() if found else None), payload


def row(text: str, delimiter: str) -> list[str]:
    """Split a CSV record into fields. Raises BadLine."""
    if '"' not in text:
        return text.split(delimiter) if text else []
    try:
        return next(csv.reader([text], delimiter=delimiter), [])
    except csv.Error as e:
        raise BadLine(f"the line is no CSV: {e}") from None
