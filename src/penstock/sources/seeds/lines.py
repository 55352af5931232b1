"""From an object's bytes to its records, in bounded memory: gzip, lines, CSV records that span
lines. What a record says is not known here.
"""

from __future__ import annotations

import csv
import re
import zlib
from collections.abc import Iterator
from typing import Final, NamedTuple

from penstock.sources.seeds.files import Opened

CHUNK: Final = 1 << 20  # bytes asked for at once
BUDGET: Final = 8  # chunks of one step: a fraction of a second
FREE: Final = 64 << 20  # bytes that any gzip may become before its ratio counts
SPAN: Final = (
    64 << 10
)  # bytes of a CSV record over several lines: with a quote too many, all that follows would be one
SHOWN: Final = 2000  # bytes of a record that is too long
_BLANK: Final = re.compile(rb"\n+")


class Record(NamedTuple):
    offset: int
    line: int
    raw: bytes  # without the end of the line
    wrong: str = ""


class Caps(NamedTuple):
    longest: int  # bytes of a record
    largest: int  # bytes of what a gzip holds
    ratio: float


class Stream:
    """An object's bytes in order, decompressed."""

    def __init__(self, opened: Opened, caps: Caps, *, gzip: bool, offset: int = 0) -> None:
        """`offset` only for what is not compressed."""
        self._opened, self._caps = opened, caps
        self._unzip = zlib.decompressobj(31) if gzip else None
        self._input = b""
        self._member = False  # inside one
        self.raw = offset  # bytes of the object that were read
        self._given = 0
        self.broken = ""  # why there is no more, though there should be
        self.cut = False  # it may only be that it is still being written

    def read(self) -> bytes:
        """Nothing: it ends here."""
        if self._unzip is None:
            return self._more()
        while not self.broken:
            if not self._input:
                self._input = self._more()
                if not self._input:
                    if self._member:
                        self.broken, self.cut = "it ends in the middle of its gzip stream", True
                    return b""
            if not self._member:
                self._input = self._input.lstrip(b"\0")  # padding behind a member
                if not self._input:
                    continue
                self._unzip, self._member = zlib.decompressobj(31), True
            try:
                found = self._unzip.decompress(self._input, CHUNK)
            except zlib.error as e:
                self.broken = f"its gzip stream is damaged ({e})"
                return b""
            self._input = self._unzip.unconsumed_tail
            if self._unzip.eof:
                self._input, self._member = self._unzip.unused_data, False
            self._given += len(found)
            if self._given > self._caps.largest:
                self.broken = f"it holds more than {self._caps.largest} bytes (max_size)"
            elif self._given > max(FREE, self.raw * self._caps.ratio):
                self.broken = (
                    f"it becomes more than {self._caps.ratio:g} times as large as it is (max_ratio)"
                )
            elif found:
                return found
        return b""

    def _more(self) -> bytes:
        found = self._opened.read_at(self.raw, CHUNK)
        self.raw += len(found)
        return found


class Lines:
    """The records of a stream. `offset`, `line` and `sum` tell where the next one begins, and what
    lies before it.
    """

    def __init__(
        self,
        stream: Stream,
        caps: Caps,
        *,
        delimiter: str | None,
        offset: int = 0,
        line: int = 1,
        sum: int = 0,
    ) -> None:
        """`delimiter`: the records are CSV, and may span lines."""
        self.stream, self._longest, self._delimiter = stream, caps.longest, delimiter
        self.offset, self.line, self.ended = offset, line, False
        self._data, self._pos = b"", 0
        self._sum, self._summed = sum, 0  # of everything before `_summed` in the data
        self._dropped: Record | None = (
            None  # the beginning of a line that is too long, until its end is found
        )
        self._safe = (offset, line, sum)
        self.budget = 0

    @property
    def at(self) -> tuple[int, int, int]:
        """(offset, line, checksum of all before): where reading may go on another time."""
        if self._dropped is None:
            self._add_up()
            self._safe = self.offset, self.line, self._sum
        return self._safe

    def skip(self, until: int) -> bool:
        """Nearer to this offset. True: there, or at the end."""
        while self.offset < until:
            if self._pos == len(self._data) and not self._more():
                return self.ended
            self._use(min(until - self.offset, len(self._data) - self._pos))
        return True

    def record(self) -> Record | None:
        """None: the step's budget is used up, or (`ended`) there is no whole one any more."""
        if self._dropped is not None:
            return self._drop()
        end = self._line_end(0) if self._delimiter is None else self._record_end(self._delimiter)
        if end > 0:
            return self._taken(end)
        if end == 0:
            return None
        first = self._line_end(0)
        if first > 0:
            return self._taken(first)._replace(
                wrong=f"a quote in it is not closed within {SPAN} bytes"
            )
        self._add_up()
        self._safe = self.offset, self.line, self._sum
        self._dropped = Record(
            self.offset,
            self.line,
            self._data[self._pos : self._pos + SHOWN],
            f"the line has more than {self._longest} bytes (max_line)",
        )
        return self._drop()

    def rest(self) -> Record | None:
        """Behind the last whole record, when all has been read: a line without an end. Reading goes
        on before it another time.
        """
        if self._dropped is not None:
            return self._dropped
        left = self._data[self._pos :]
        return Record(self.offset, self.line, left.rstrip(b"\r")) if left else None

    def give_up(self) -> Record | None:
        """When all has been read: a line with an end, and a quote in it that is never closed."""
        end = self._line_end(0)
        return self._taken(end)._replace(wrong="a quote in it is never closed") if end > 0 else None

    # -- the buffer --------------------------------------------------------------------------------

    def _more(self) -> bool:
        if self.budget <= 0 or self.ended:
            return False
        self.budget -= 1
        found = self.stream.read()
        if not found:
            self.ended = True
            return False
        self._add_up()
        self._data = self._data[self._pos :] + found
        self._pos = self._summed = 0
        return True

    def _add_up(self) -> None:
        self._sum = zlib.crc32(memoryview(self._data)[self._summed : self._pos], self._sum)
        self._summed = self._pos

    def _use(self, count: int) -> None:
        self.line += self._data.count(b"\n", self._pos, self._pos + count)
        self._pos += count
        self.offset += count

    def _taken(self, end: int) -> Record:
        raw = self._data[self._pos : self._pos + end]
        found = Record(self.offset, self.line, raw.rstrip(b"\r\n"))
        self._use(end)
        if (
            blank := _BLANK.match(self._data, self._pos)
        ) is not None:  # millions of empty lines cost nothing
            self._use(blank.end() - self._pos)
        return found

    def _drop(self) -> Record | None:
        assert self._dropped is not None
        while True:
            end = self._data.find(b"\n", self._pos)
            self._use((end + 1 if end >= 0 else len(self._data)) - self._pos)
            if end >= 0:
                found, self._dropped = self._dropped, None
                return found
            if not self._more():
                return None

    def _line_end(self, start: int) -> int:
        """Behind the newline of the line that begins there, counted from here; 0: not all of it is
        there, -1: too far.
        """
        seen = start
        while True:
            end = self._data.find(b"\n", self._pos + seen)
            if end >= 0:
                return -1 if end - self._pos > self._longest else end + 1 - self._pos
            seen = len(self._data) - self._pos
            if seen > self._longest:
                return -1
            if not self._more():
                return 0

    def _record_end(self, delimiter: str) -> int:
        end = self._line_end(0)
        if end <= 0 or self._data.find(b'"', self._pos, self._pos + end) < 0:
            return end
        missing = 1

        def lines() -> Iterator[str]:
            nonlocal end, missing
            start = 0
            while True:
                yield self._data[self._pos + start : self._pos + end].decode(
                    "latin-1"
                )  # only quotes and delimiters matter here
                start, following = end, self._line_end(end) if end <= SPAN else -1
                if following <= 0:
                    missing = following
                    return
                end = following

        try:
            next(csv.reader(lines(), delimiter=delimiter), None)
        except csv.Error:
            return end  # the format says what is wrong with it
        return end if missing > 0 else missing
