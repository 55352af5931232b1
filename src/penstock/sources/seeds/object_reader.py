"""Reads one object of a seed source from its last position, in bounded steps on threads.

First it verifies that the part that was read before has not changed.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

from penstock.model import mint
from penstock.ports import Finding
from penstock.rules.json_limits import memory_of
from penstock.sources.seeds.files import ObjectUnreadable, OpenObject, SeedObject, SeedPlace
from penstock.sources.seeds.lines import (
    BUDGET,
    SHOWN,
    BadLine,
    Lines,
    ParsedLine,
    Record,
    SizeLimits,
    Stream,
    parse_csv,
    parse_json,
    parse_text,
    row,
)
from penstock.sources.seeds.positions import ObjectPosition

BATCH_BYTES: Final = 4 << 20  # bytes of memory of the records in one batch
STEP_RECORDS: Final = 50_000  # most records of one step: it reaches this only if most are comments
# If more bytes than this were read before, only the last `TAIL` of them are verified when an object
# grows.
MAX_VERIFIED: Final = 64 << 20
TAIL: Final = 4096  # bytes
BOM: Final = b"\xef\xbb\xbf"


class ReadOptions(NamedTuple):
    """Options for the objects of a source."""

    kind: Callable[[str], tuple[str, bool]]  # format and whether it is gzip, by name
    limits: SizeLimits
    column: str
    columns: Sequence[str]  # for objects without a header
    delimiter: str
    needs_column: bool  # True if the URL can only be in `column`


class ObjectReader:
    """Reader of one object. Call `step` until `ended` is True. Each step updates `position`."""

    def __init__(
        self,
        place: SeedPlace,
        found: SeedObject,
        position: ObjectPosition | None,
        options: ReadOptions,
        *,
        complete: bool,
        before_line: int | None = None,
    ) -> None:
        """`complete`: the object does not grow, so its last line needs no newline.

        `before_line`: stop before this line.
        """
        self.found, self._place, self._options, self._complete = found, place, options, complete
        self._before, self._before_line = position, before_line or 1 << 62
        self.position = position or ObjectPosition(found.stamp)
        self.ended = self.is_incomplete = False
        self.step_bytes = 0  # bytes of memory of the records of the last step
        self.bytes_left = found.size
        self._kind, self._gzip = options.kind(found.name)
        self._busy, self._is_closing = threading.Lock(), False
        self._opened: OpenObject | None = None
        self._lines: Lines
        self._parse: Callable[[str], ParsedLine | None] | None = None
        self._verify_until: int | None = None  # offset up to which the content is verified first

    def step(self, limit: int) -> list[Finding]:
        """Return up to `limit` findings. Raises ObjectUnreadable and ObjectChanged."""
        found: list[Finding] = []
        with self._busy:
            if self._opened is None:
                self._open()
            self._lines.budget = BUDGET
            self.step_bytes = 0
            if self._verify_until is None or self._verify(self._verify_until):
                self._read(found, limit)
            self._update_position()
        if self._is_closing:
            self.close()
        return found

    def close(self) -> None:
        """Close the object without waiting. If a step is running, the step closes it later."""
        self._is_closing = True
        if self._busy.acquire(blocking=False):
            try:
                self._close_object()
            finally:
                self._busy.release()

    def _close_object(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened, self.ended = None, True

    # -- verification ------------------------------------------------------------------------------

    def _open(self) -> None:
        opened = self._opened = self._place.open(self.found)
        found, position = opened.found, self._before
        self.found = found
        grew = position is not None and found.size > position.size
        if position is None or (found.version is not None and position.stamp != found.stamp):
            self._restart(0)
        elif self._gzip:
            self._restart_verifying(position)
        elif position.stamp == found.stamp or (
            grew and position.offset > MAX_VERIFIED and self._tail(position.offset) == position.tail
        ):
            self._generation = position.generation
            self._lines = self._new_lines(position.offset, position.line, position.sum)
        elif found.size < position.offset or (grew and position.offset > MAX_VERIFIED):
            self._restart(position.generation + 1)
        else:
            self._restart_verifying(position)

    def _restart(self, generation: int) -> None:
        self._verify_until, self._parse = None, None
        self._generation = generation
        self._lines = self._new_lines()

    def _restart_verifying(self, position: ObjectPosition) -> None:
        """Read from the start, and verify the content up to the position."""
        self._restart(position.generation)
        self._verify_until = position.offset

    def _verify(self, until: int) -> bool:
        """Verify the content before the position. Return False if the budget is used up.

        If the content differs, the object is read from its start as a new generation.
        """
        assert self._before is not None
        if not self._lines.skip(until):
            return False
        if self._lines.position[0] == until and self._lines.position[2] == self._before.sum:
            self._verify_until = None
        else:
            self._restart(self._before.generation + 1)  # the object has other content
            self._lines.budget = BUDGET
        return True

    def _new_lines(self, offset: int = 0, line: int = 1, sum: int = 0) -> Lines:
        assert self._opened is not None
        return Lines(
            Stream(self._opened, self._options.limits, gzip=self._gzip, offset=offset),
            self._options.limits,
            delimiter=self._options.delimiter if self._kind == "csv" else None,
            offset=offset,
            line=line,
            sum=sum,
        )

    def _tail(self, offset: int) -> int:
        assert self._opened is not None
        return zlib.crc32(self._opened.read_at(max(0, offset - TAIL), min(TAIL, offset)))

    # -- records -----------------------------------------------------------------------------------

    def _read(self, found: list[Finding], limit: int) -> None:
        if self._parse is None:
            self._parse = self._make_parser()
        if self._parse is not None:
            for _ in range(STEP_RECORDS):
                if (
                    len(found) >= limit
                    or self.step_bytes >= BATCH_BYTES
                    or self._lines.line >= self._before_line
                ):
                    return
                record = self._lines.record()
                if record is None:
                    break
                self._add_finding(found, record)
            else:
                return
        if self._lines.ended:
            self._finish(found, limit)

    def _make_parser(self) -> Callable[[str], ParsedLine | None] | None:
        """Return the parser, or None if the header is not complete yet."""
        if self._kind != "csv":
            return parse_text if self._kind == "txt" else parse_json
        columns = self._options.columns
        if not columns:
            head = self._new_lines() if self._lines.offset else self._lines
            head.budget = BUDGET
            record = head.record() or (head.rest() if head.ended and self._complete else None)
            if record is None:
                return None
            columns = self._header(record)
        if self._options.needs_column and self._options.column not in columns:
            raise ObjectUnreadable(
                f"{self.found.name} has no column {self._options.column!r}, "
                f"it has {', '.join(columns)[:200]}",
                hint='set column = "…" to the column with the URL, '
                'or columns = ["url", …] for lists without a header',
            )
        return partial(parse_csv, columns, self._options.column, self._options.delimiter)

    def _header(self, record: Record) -> list[str]:
        try:
            if record.wrong:
                raise BadLine(record.wrong)
            return [
                column.strip()
                for column in row(record.raw.removeprefix(BOM).decode(), self._options.delimiter)
            ]
        except (BadLine, UnicodeDecodeError) as e:
            raise ObjectUnreadable(
                f"the header of {self.found.name} cannot be read: {e}",
                hint="save it as UTF-8, with the names of the columns in the first line",
            ) from None

    def _add_finding(self, found: list[Finding], record: Record) -> None:
        raw = record.raw.removeprefix(BOM) if record.offset == 0 else record.raw
        self.step_bytes += memory_of(raw) if self._kind == "jsonl" else len(raw)
        parsed: ParsedLine | None = None
        assert self._parse is not None
        try:
            text, wrong = raw.decode(), record.wrong
        except UnicodeDecodeError:
            text, wrong = (
                raw.decode("utf-8", "surrogateescape"),
                record.wrong or "the line is not UTF-8",
            )
        if not wrong:
            try:
                parsed = self._parse(text)
                if parsed is None:
                    return
            except BadLine as e:
                wrong = str(e)
        found.append(self._finding(record, text, parsed, wrong))

    def _finding(
        self,
        record: Record,
        text: str,
        parsed: ParsedLine | None,
        wrong: str,
    ) -> Finding:
        """Make a finding. Its id depends on the object's version, the offset and the record.

        The generation replaces the version if the object has no version.
        """
        version, name = self.found.version or str(self._generation), self.found.name
        url, payload = parsed or (
            None,
            {"line": text[:SHOWN].encode("utf-8", "replace").decode(), "error": wrong},
        )
        return Finding(
            id=mint("seeds", self._place.identity, name, version, str(record.offset), text),
            url=url,
            cause=f"{name}:{record.line}",
            payload={**payload, "_seeds": {"object": name, "line": record.line}},
            at=self.found.at,
            refused=wrong,
        )

    # -- the end -----------------------------------------------------------------------------------

    def _finish(self, found: list[Finding], limit: int) -> None:
        stream = self._lines.stream
        if not self._complete and (stream.cut or self._lines.rest() is not None):
            self.ended = self.is_incomplete = True
            return
        if self._parse is not None:
            if (record := self._lines.unclosed()) is not None:
                self._add_finding(found, record)
                return  # other lines may follow
            if len(found) >= limit:
                return
            if (record := self._lines.rest()) is not None and not stream.broken:
                self._add_finding(found, record)
        if stream.broken:
            record = Record(self._lines.offset, self._lines.line, b"", stream.broken)
            found.append(
                self._finding(record, stream.broken, None, f"{self.found.name}: {stream.broken}")
            )
        self.ended = True

    def _update_position(self) -> None:
        assert self._opened is not None
        if self._verify_until is not None:
            return  # still verifying, so the position stays
        offset, line, sum_ = self._lines.position
        self.bytes_left = max(0, self.found.size - self._lines.stream.raw)
        self.position = ObjectPosition(
            stamp=self.found.stamp,
            offset=offset,
            line=line,
            size=self.found.size,
            generation=self._generation,
            sum=sum_,
            tail=self._tail(offset) if offset > MAX_VERIFIED and not self._gzip else 0,
            done=self.ended and not self.is_incomplete,
        )
        if self.ended:
            self._close_object()
