"""Records as CSV (RFC 4180) in one file, in the order of the outbox. A new field adds a column.

Cells have the extracted values, unchanged and without types. A spreadsheet treats a cell that
begins with `=`, `+`, `-` or `@` as a formula. By default the sink keeps such a cell, because a
change would change the data. With `formulas = "escape"` it writes an apostrophe before the cell.
"""

from __future__ import annotations

import contextlib
import csv
import io
import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.config import units
from penstock.config.options import read_option
from penstock.errors import Unreachable
from penstock.ports import Reopen, Row
from penstock.private_files import FILE_MODE
from penstock.sinks.append_file import AppendingSink, Mark, read_mark, sync_directory
from penstock.sinks.common import (
    DELETED,
    PROVENANCE_COLUMNS,
    REST,
    Flat,
    file_url,
    flatten,
    json_text,
    option_max_columns,
)

_HEADER_LIMIT = 4 << 20  # bytes

# Spreadsheets read a cell as a formula if its first character is one of these. Some of them first
# remove white space and characters without a width, or accept the full-width forms. A plain number
# is not a formula.
_FORMULA = re.compile(
    r"(?! *[+-]?\d[\d.,]*\Z)"
    r"(?:[\t\r\n]|[\s\x00\u200b-\u200f\u2060\ufeff]*[=+\-@\uff1d\uff0b\uff0d\uff20])"
)


class CsvSink(AppendingSink):
    """CSV sink."""

    def __init__(self, name: str, path: Path, max_columns: int, *, escape_formulas: bool) -> None:
        super().__init__(name, path)
        self._columns: tuple[str, ...] = ()
        self._max_columns = max_columns
        self._escape_formulas = escape_formulas

    def open(self, position: int, mark: str) -> str:
        self.notice = ""
        self._file.open()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._draft())  # left by a rewrite that was killed
        recorded = read_mark(mark)
        own_mark = self._file.find_mark(recorded)
        # Before the first batch, the header may be incomplete.
        if own_mark is not None and own_mark.at == 0:
            self._file.truncate(0)
            self._columns = ()
            return self._file.mark()
        self._columns = self._header()
        if own_mark is not None and self._columns == own_mark.columns:
            self._file.truncate(own_mark.at)
        else:
            if recorded is not None and recorded.at > 0 and not self._was_widened(recorded):
                self.notice = self._file.changed(recorded, position)
            self._file.continue_at_end()
        return self._file.mark(self._columns)

    def _was_widened(self, recorded: Mark) -> bool:
        # After it added a column, `write` raises Reopen, and appends no row before the mark of
        # the next `open` is recorded. So a header that extends the recorded one means that the
        # file was rewritten and has no unrecorded rows.
        return (
            len(self._columns) > len(recorded.columns) > 0
            and self._columns[: len(recorded.columns)] == recorded.columns
        )

    def write(self, rows: Sequence[Row]) -> str:
        self._file.check()
        flats = [flatten(row.body) for row in rows]
        if self._escape_formulas:
            flats = [_escaped(flat) for flat in flats]
        columns = self._columns_for(flats)
        if self._columns and columns != self._columns:
            self._widen(columns)
            raise Reopen(f"{self.path} got new columns")
        header = [] if self._columns else [columns]
        self._file.append(_encoded([*header, *(_cells(flat, columns) for flat in flats)]))
        self._columns = columns
        return self._file.mark(columns)

    # -- columns -----------------------------------------------------------------------------------

    def _columns_for(self, flats: Iterable[Flat]) -> tuple[str, ...]:
        """Return the columns, with new fields in the order of their appearance.

        Fields beyond `max_columns` move to the rest, which gets a column when it is first needed.
        """
        known, added = set(self._columns), list[str]()
        provenance = [name for name in PROVENANCE_COLUMNS if name not in known]
        columns_left = (
            self._max_columns - len(self._columns) - len(provenance) - (REST not in known)
        )
        rest = moved = False
        for flat in flats:
            for name in [name for name in flat.fields if name not in known]:
                if len(added) < columns_left:
                    added.append(name)
                    known.add(name)
                else:
                    flat.rest[name] = flat.fields.pop(name)
            rest = rest or bool(flat.rest)
            moved = moved or flat.rest.keys() > {DELETED} or (bool(flat.rest) and not flat.deleted)
        added += provenance
        if rest and REST not in known:
            added.append(REST)
        if moved and not self.notice:
            self.notice = (
                f"{self.path}: some fields have no column (max_columns = {self._max_columns}) "
                f"and are kept as JSON in {REST}"
            )
        return (*self._columns, *added)

    def _header(self) -> tuple[str, ...]:
        """Return the columns of the file's header, () if the file is empty."""
        raw, quotes = b"", 0
        lines = self._file.lines(self._file.size)
        while line := lines.line():
            raw += line
            quotes += line.count(b'"')
            if (line.endswith(b"\n") and quotes % 2 == 0) or len(raw) > _HEADER_LIMIT:
                break
        try:
            names = tuple(
                next(csv.reader(io.StringIO(raw.decode("utf-8-sig"), newline=""), strict=True), ())
            )
        except (csv.Error, UnicodeDecodeError) as e:
            raise Unreachable(
                f"{self.path} exists and is not a CSV file: {e}",
                hint="move it away, or write to another file",
            ) from e
        if raw and not names:
            raise Unreachable(
                f"{self.path} exists and has no header",
                hint="move it away, or write to another file",
            )
        return names

    def _widen(self, columns: tuple[str, ...]) -> None:
        """Rewrite the file with more columns, into a draft that then replaces the file.

        So a reader sees the complete old or the complete new file.
        """
        draft, target = self._draft(), Path(os.path.realpath(self.path))
        added = b"," * (len(columns) - len(self._columns))
        quotes, first = 0, True
        was = os.stat(target)
        try:
            lines = self._file.lines(self._file.at)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(draft)
            # Another user could have put a link there, if the directory is shared.
            fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE)
            with open(fd, "wb", buffering=1 << 18) as out:
                os.fchmod(out.fileno(), stat.S_IMODE(was.st_mode))
                with contextlib.suppress(PermissionError):
                    os.fchown(out.fileno(), was.st_uid, was.st_gid)
                while line := lines.line():
                    quotes += line.count(b'"')
                    if quotes % 2 or not line.endswith(b"\n"):  # the line break is inside a cell
                        if not first:
                            out.write(line)
                        continue
                    if first:
                        out.write(_encoded([columns]))
                        first = False
                        continue
                    end = b"\r\n" if line.endswith(b"\r\n") else b"\n"
                    out.write(line[: -len(end)] + added + end)
                out.flush()
                os.fsync(out.fileno())
            os.replace(draft, target)
            sync_directory(target.parent)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(draft)
            raise

    def _draft(self) -> Path:
        target = Path(os.path.realpath(self.path))
        return target.with_name(f".{target.name}.penstock-draft")


def _encoded(rows: Iterable[Sequence[Any]]) -> bytes:
    out = io.StringIO(newline="")
    csv.writer(out, lineterminator="\r\n").writerows(rows)
    return out.getvalue().encode()


def _cells(flat: Flat, columns: Iterable[str]) -> list[Any]:
    values = flat.fields | flat.provenance
    if flat.rest:
        values[REST] = flat.rest
    return [_cell(values.get(name)) for name in columns]


def _cell(value: Any) -> Any:
    if value is None or isinstance(value, str):
        return value
    return json_text(value)  # numbers, true, false, and nested values


def _escaped(flat: Flat) -> Flat:
    """Return the row without formulas, in its values and in its names of columns.

    A field whose escaped name is also the name of another field moves to the rest.
    """
    fields, rest = dict[str, Any](), dict(flat.rest)
    for name, value in flat.fields.items():
        column = _text(name)
        if column != name and column in flat.fields:
            rest[name] = value
        else:
            fields[column] = _text(value)
    provenance = {name: _text(value) for name, value in flat.provenance.items()}
    return flat._replace(fields=fields, provenance=provenance, rest=rest)


def _text(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and _FORMULA.match(value) else value


def open_sink(url: str, options: Mapping[str, Any], base: Path) -> CsvSink:
    """Create the sink of `csv:products.csv`. Opens no file yet.

    Raise ConfigError if the URL or an option is not valid.
    """
    path, given = file_url(url, options, base, scheme="csv", known=("max_columns", "formulas"))
    formulas = read_option(
        f"sink {url!r}", "formulas", given.get("formulas", "keep"), units.choices("keep", "escape")
    )
    max_columns = option_max_columns(url, given, limit=16_384)
    return CsvSink(url, path, max_columns, escape_formulas=formulas == "escape")
