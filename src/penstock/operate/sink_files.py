"""Checks of the sinks for `penstock doctor`: outages, the outbox, and files against their marks."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.operate.figures import lasting, plural, size
from penstock.operate.findings import Finding, Result

if TYPE_CHECKING:
    from penstock.ports import UnitOfWork
    from penstock.ports.reports import Audit


def check_sinks(uow: UnitOfWork, a: Audit, *, one_machine: bool, now: float) -> Iterator[Finding]:
    for name, noted, rows in a.outbox:
        if noted != rows:
            yield Finding(
                "outbox",
                "fail",
                f"{name}: {noted:,} rows should be waiting, {rows:,} are",
                "keep a copy of the state directory, and report this",
            )
    for sink in uow.snapshot(lambda tx: tx.status_reports.sinks()):
        if sink.outage:
            since = f" for {lasting(now - sink.outage_since)}" if sink.outage_since else ""
            yield Finding(
                "sink",
                "fail",
                f"{sink.name} has taken no rows{since}: {sink.outage}",
                f"mend it: the next run writes {plural(sink.backlog, 'waiting row')}",
                "sink.down",
            )
        waiting = f", {plural(sink.backlog, 'row')} waiting" if sink.backlog else ""
        path = _file_of(sink.name)
        end = (
            _recorded_end(sink.mark)
            if one_machine or path is None
            else _local_recorded_end(sink.mark, path)
        )
        if path is None or end is None:
            yield Finding(
                "sink", "ok", f"{sink.name}: {plural(sink.flushed, 'row')} written{waiting}"
            )
            continue
        try:
            there = path.stat().st_size
        except OSError:
            result: Result = "fail" if end else "ok"
            yield Finding(
                "sink",
                result,
                f"{sink.name}: the file does not exist, {size(end)} were written to it{waiting}",
                "restore the file, or write its rows again with push --force. If you moved it, "
                "the next rows start a new file"
                if end
                else "",
                "sink.file_missing" if end else "",
            )
            continue
        if there < end:
            yield Finding(
                "sink",
                "fail",
                f"{sink.name}: the file has {there:,} bytes, {end:,} were written",
                "the file was cut or replaced: restore it,"
                " or write the missing rows again with push --force",
                "sink.file_short",
            )
        elif there > end:
            yield Finding(
                "sink",
                "warn",
                f"{sink.name}: {there - end:,} bytes after the recorded mark{waiting}",
                "a write was interrupted or is running, and the next `penstock run` repairs it",
                "sink.file_long",
            )
        else:
            yield Finding(
                "sink",
                "ok",
                f"{sink.name}: {plural(sink.flushed, 'row')}, ends at the mark{waiting}",
            )


def _local_recorded_end(mark: str, path: Path) -> int | None:
    """Return the recorded end of this machine's file, or None if the mark does not contain it.

    The mark of a fleet's sink has one entry for each machine's file. A file that was deleted or
    replaced has another inode than its entry. Then the machine and the path identify the entry.
    """
    with contextlib.suppress(ValueError):
        noted, host = json.loads(mark), socket.gethostname()
        known = [noted, *noted.get("others", ())] if isinstance(noted, dict) else []
        try:
            ino = path.stat().st_ino
        except OSError:
            ino = None
        here = [each for each in known if each.get("ino") == ino]
        here = here or [
            each
            for each in known
            if (each.get("host"), each.get("path")) == (host, os.path.abspath(path))
        ]
        return int(max(here, key=lambda each: each.get("host") == host)["at"]) if here else None
    return None


def _recorded_end(mark: str) -> int | None:
    """Return the recorded size of the file, or None if the mark does not describe a file."""
    try:
        found = json.loads(mark)
    except ValueError:
        return None
    end = found.get("at") if isinstance(found, dict) else found
    return end if isinstance(end, int) else None


def _file_of(name: str) -> Path | None:
    scheme, _, path = name.partition(":")
    return Path(path.partition("?")[0]) if scheme in ("jsonl", "csv") and path else None
