"""One object of a seed source, read on from its mark: is it what it was, and what do its records
say. Runs on threads, a bounded step at a time.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from penstock.model import mint
from penstock.ports import Finding
from penstock.sources.seeds.files import Found, Opened, Place, Unread
from penstock.sources.seeds.formats import SHOWN, Bad, Csv, Format, JsonLines, Text, row
from penstock.sources.seeds.lines import BUDGET, Caps, Lines, Record, Stream
from penstock.sources.seeds.positions import Mark

WEIGHT: Final = 4 << 20  # bytes of records in one batch
RECORDS: Final = 50_000  # of one step, most of them comments
LONG: Final = (
    64 << 20
)  # bytes before an offset that are not read again each time an object grows, only the last of them
TAIL: Final = 4096
BOM: Final = b"\xef\xbb\xbf"


class Manner(NamedTuple):
    """How the objects of a source are to be read."""

    kind: Callable[[str], tuple[str, bool]]  # format and whether it is gzip, by name
    caps: Caps
    column: str
    columns: Sequence[str]  # where the objects have no header
    delimiter: str
    needs_column: bool  # nothing else says where the URL is


class Reading:
    """`step` until it has `ended`; `mark` is right after each step."""

    def __init__(
        self,
        place: Place,
        found: Found,
        mark: Mark | None,
        manner: Manner,
        *,
        complete: bool,
        before_line: int | None = None,
    ) -> None:
        """`complete`: nobody is writing to it any more, so what comes last is a line even if it has
        no end. `before_line`: no further than that.
        """
        self.found, self._place, self._manner, self._complete = found, place, manner, complete
        self._before, self._before_line = mark, before_line or 1 << 62
        self.mark = mark or Mark(found.stamp)
        self.ended = self.waits = False
        self.weight = 0  # of the findings of the last step
        self.left = found.size  # bytes
        self._kind, self._gzip = manner.kind(found.name)
        self._busy, self._left = threading.Lock(), False
        self._opened: Opened | None = None
        self._lines: Lines
        self._format: Format | None = None
        self._until: int | None = None  # to be read again first, to see that it is what it was

    def step(self, room: int) -> list[Finding]:
        """At most so many. Raises Unread, Changed."""
        found: list[Finding] = []
        with self._busy:
            if self._opened is None:
                self._open()
            self._lines.budget = BUDGET
            self.weight = 0
            if self._until is None or self._is_what_it_was(self._until):
                self._read(found, room)
            self._note()
        if self._left:
            self.close()
        return found

    def close(self) -> None:
        """Waits for nobody: a step that is under way on its thread closes what it used."""
        self._left = True
        if self._busy.acquire(blocking=False):
            try:
                self._shut()
            finally:
                self._busy.release()

    def _shut(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened, self.ended = None, True

    # -- is it what it was -------------------------------------------------------------------------

    def _open(self) -> None:
        opened = self._opened = self._place.open(self.found)
        found, mark = opened.found, self._before
        self.found = found
        grew = mark is not None and found.size > mark.size
        if mark is None or (found.version is not None and mark.stamp != found.stamp):
            self._begin(0)
        elif self._gzip:
            self._begin_again(mark)
        elif mark.stamp == found.stamp or (
            grew and mark.offset > LONG and self._tail(mark.offset) == mark.tail
        ):
            self._go_on(mark)
        elif found.size < mark.offset or (grew and mark.offset > LONG):
            self._begin(mark.generation + 1)
        else:
            self._begin_again(mark)

    def _begin(self, generation: int) -> None:
        self._until, self._format = None, None
        self._generation = generation
        self._lines = self._new_lines()

    def _begin_again(self, mark: Mark) -> None:
        """Up to the mark only to see whether it is what it was."""
        self._begin(mark.generation)
        self._until = mark.offset

    def _go_on(self, mark: Mark) -> None:
        assert self._opened is not None
        self._generation = mark.generation
        stream = Stream(self._opened, self._manner.caps, gzip=False, offset=mark.offset)
        self._lines = Lines(
            stream,
            self._manner.caps,
            delimiter=self._delimiter,
            offset=mark.offset,
            line=mark.line,
            sum=mark.sum,
        )

    def _is_what_it_was(self, until: int) -> bool:
        assert self._before is not None
        if not self._lines.skip(until):
            return False
        if self._lines.at[0] == until and self._lines.at[2] == self._before.sum:
            self._until = None
            return True
        self._begin(self._before.generation + 1)  # another content under the same name
        self._lines.budget = BUDGET
        return True

    def _new_lines(self) -> Lines:
        assert self._opened is not None
        return Lines(
            Stream(self._opened, self._manner.caps, gzip=self._gzip),
            self._manner.caps,
            delimiter=self._delimiter,
        )

    @property
    def _delimiter(self) -> str | None:
        return self._manner.delimiter if self._kind == "csv" else None

    def _tail(self, offset: int) -> int:
        assert self._opened is not None
        return zlib.crc32(self._opened.read_at(max(0, offset - TAIL), min(TAIL, offset)))

    # -- records -----------------------------------------------------------------------------------

    def _read(self, found: list[Finding], room: int) -> None:
        if self._format is None:
            self._format = self._chosen()
        if self._format is not None:
            for _ in range(RECORDS):
                if (
                    len(found) >= room
                    or self.weight >= WEIGHT
                    or self._lines.line >= self._before_line
                ):
                    return
                record = self._lines.record()
                if record is None:
                    break
                self._say(found, record)
            else:
                return
        if self._lines.ended:
            self._finish(found, room)

    def _chosen(self) -> Format | None:
        """None: the header is not there yet."""
        if self._kind == "txt":
            return Text()
        if self._kind == "jsonl":
            return JsonLines()
        columns = self._manner.columns
        if not columns:
            head = self._new_lines() if self._lines.offset else self._lines
            head.budget = BUDGET
            record = head.record() or (head.rest() if head.ended and self._complete else None)
            if record is None:
                return None
            columns = self._header(record)
        if self._manner.needs_column and self._manner.column not in columns:
            raise Unread(
                f"{self.found.name} has no column {self._manner.column!r}, it has {', '.join(columns)[:200]}",
                hint='column = "…" names the one with the URL; columns = ["url", …] is for lists without a header',
            )
        return Csv(columns, self._manner.column, self._manner.delimiter)

    def _header(self, record: Record) -> list[str]:
        try:
            if record.wrong:
                raise Bad(record.wrong)
            return [
                column.strip()
                for column in row(record.raw.removeprefix(BOM).decode(), self._manner.delimiter)
            ]
        except (Bad, UnicodeDecodeError) as e:
            raise Unread(
                f"the header of {self.found.name} cannot be read: {e}",
                hint="save it as UTF-8, with the names of the columns in the first line",
            ) from None

    def _say(self, found: list[Finding], record: Record) -> None:
        raw = record.raw.removeprefix(BOM) if record.offset == 0 else record.raw
        self.weight += len(raw)
        said: tuple[str | None, dict[str, Any]] | None = None
        assert self._format is not None
        try:
            text, wrong = raw.decode(), record.wrong
        except UnicodeDecodeError:
            text, wrong = (
                raw.decode("utf-8", "surrogateescape"),
                record.wrong or "the line is not UTF-8",
            )
        if not wrong:
            try:
                said = self._format.read(text)
                if said is None:
                    return
            except Bad as e:
                wrong = str(e)
        found.append(self._finding(record, text, said, wrong))

    def _finding(
        self, record: Record, text: str, said: tuple[str | None, dict[str, Any]] | None, wrong: str
    ) -> Finding:
        """The cause is the object's version and the offset in it. Where no version is told, the
        generation and the record itself stand for it.
        """
        whole, name = self.found.version or str(self._generation), self.found.name
        url, payload = said or (
            None,
            {"line": text[:SHOWN].encode("utf-8", "replace").decode(), "error": wrong},
        )
        return Finding(
            id=mint("seeds", self._place.identity, name, whole, str(record.offset), text),
            url=url,
            cause=f"{name}:{record.line}",
            payload={**payload, "_seeds": {"object": name, "line": record.line}},
            at=self.found.at,
            refused=wrong,
        )

    # -- the end -----------------------------------------------------------------------------------

    def _finish(self, found: list[Finding], room: int) -> None:
        stream = self._lines.stream
        if not self._complete and (stream.cut or self._lines.rest() is not None):
            self.ended = self.waits = True
            return
        if self._format is not None:
            if (record := self._lines.give_up()) is not None:
                self._say(found, record)
                return  # there may be more behind it
            if len(found) >= room:
                return
            if (record := self._lines.rest()) is not None and not stream.broken:
                self._say(found, record)
        if stream.broken:
            record = Record(self._lines.offset, self._lines.line, b"", stream.broken)
            found.append(
                self._finding(record, stream.broken, None, f"{self.found.name}: {stream.broken}")
            )
        self.ended = True

    def _note(self) -> None:
        assert self._opened is not None
        if self._until is not None:
            return  # nothing new is known of it yet
        offset, line, sum_ = self._lines.at
        self.left = max(0, self.found.size - self._lines.stream.raw)
        self.mark = Mark(
            stamp=self.found.stamp,
            offset=offset,
            line=line,
            size=self.found.size,
            generation=self._generation,
            sum=sum_,
            tail=self._tail(offset) if offset > LONG and not self._gzip else 0,
            done=self.ended and not self.waits,
        )
        if self.ended:
            self._shut()
