"""Checks of `penstock doctor`.

Each check returns findings: ok, warn (repairs itself, or is worth knowing) or fail.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from penstock import locks
from penstock.errors import PenstockError
from penstock.operate.figures import joined, lasting, plural, short, size
from penstock.operate.waiting import waits_in
from penstock.ports.reports import SCAN
from penstock.rules.waiting import EXTRACTOR, HOST, TOPIC

if TYPE_CHECKING:
    from penstock.authoring.pipeline import Pipeline
    from penstock.config.files import Loaded
    from penstock.config.schema import Config
    from penstock.ports import Clock, StoreFacts, UnitOfWork
    from penstock.ports.reports import Audit

LOW, VERY_LOW = 1 << 30, 64 << 20  # bytes of free disk space: below them warn, and fail
PROBE = (
    'from penstock import Pipeline\np = Pipeline("doctor")\n@p.extract\n'
    'def probe(page):\n    yield {"url": page.url}\n'
)


class Finding(NamedTuple):
    check: str
    result: Literal["ok", "warn", "fail"]
    found: str
    fix: str = ""


class Probe(Protocol):
    """The methods of a sandbox that `doctor` uses to check that it starts."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...


class StoreFile(Protocol):
    """The store of the ledger, with the methods that `doctor` uses."""

    @property
    def path(self) -> str:
        """The store's name in messages. Contains no password."""

    @property
    def file(self) -> Path | None:
        """The store's file on this machine, or None for a server."""

    def check(self) -> list[str]:
        """Return a sentence about each damage that was found."""


# -- the machine -----------------------------------------------------------------------------------


def machine(config: Config, facts_of: Callable[[Path], StoreFacts]) -> Iterator[Finding]:
    folder = config.state.dir
    there = next(path for path in (folder, *folder.parents) if path.exists())
    facts = facts_of(there)
    shown = ".".join(map(str, facts.sqlite))
    if facts.wal_reset_bug:
        yield Finding(
            "sqlite",
            "warn",
            f"SQLite {shown} has the WAL-reset bug, so only one process may write",
            "pip install --upgrade apsw (3.51.3 or newer)",
        )
    else:
        yield Finding("sqlite", "ok", f"SQLite {shown}, free of the WAL-reset bug")
    kind = facts.file_system
    if facts.network:
        yield Finding(
            "file system",
            "fail",
            f"{config.state.dir} is on {kind}, and SQLite's locks do not work there",
            "put the state on a local disk: PENSTOCK_STATE=/var/lib/penstock",
        )
    else:
        yield Finding("file system", "ok", f"{kind or 'unknown kind'}, under {there}")
    yield _space(there)
    if not os.access(there, os.W_OK):
        yield Finding(
            "permissions",
            "fail",
            f"{there} is not writable for this user",
            f"chown it, or run as its owner ({there.owner()})"
            if hasattr(there, "owner")
            else "chown it",
        )
    if sys.getfilesystemencoding().lower().replace("-", "") == "utf8":
        yield Finding("locale", "ok", "UTF-8")
    else:
        yield Finding(
            "locale",
            "warn",
            f"output is {sys.stdout.encoding}, file names are {sys.getfilesystemencoding()}",
            "export LANG=C.UTF-8",
        )
    now = time.time()
    if now < 1_700_000_000:
        yield Finding(
            "clock",
            "fail",
            f"the clock shows {time.strftime('%Y-%m-%d', time.gmtime(now))}",
            "set the clock, e.g. with NTP: leases and windows depend on it",
        )


def _space(there: Path) -> Finding:
    free = shutil.disk_usage(there).free
    if free < VERY_LOW:
        return Finding(
            "disk",
            "fail",
            f"{size(free)} free under {there}",
            "free some space: without it, no event can be accepted or end (no event is lost)",
        )
    if free < LOW:
        return Finding(
            "disk",
            "warn",
            f"{size(free)} free under {there}",
            "free some space, or lower pages.max_bytes and pages.keep",
        )
    return Finding("disk", "ok", f"{size(free)} free")


# -- settings and the pipeline ---------------------------------------------------------------------


def settings(
    loaded: Loaded,
    file: str | None,
    *,
    open_sinks: Callable[[Pipeline, Path], object],
    open_sandbox: Callable[[Path], Probe],
) -> Iterator[Finding]:
    yield Finding(
        "configuration",
        "ok",
        str(loaded.file)
        if loaded.file
        else "no penstock.toml: defaults, environment, command line",
    )
    chosen = file or loaded.config.pipeline
    with tempfile.TemporaryDirectory(prefix="penstock-doctor-") as scratch:
        path = Path(chosen) if chosen else Path(scratch) / "probe.py"
        if chosen:
            try:
                from penstock.authoring.load import load_to_run

                pipeline = load_to_run(path)
                open_sinks(pipeline, Path.cwd())
                yield Finding(
                    "pipeline",
                    "ok",
                    f"{chosen}: {plural(len(pipeline.extractors), 'extractor')}, "
                    f"{plural(len(pipeline.sinks), 'sink')}",
                )
            except PenstockError as e:
                yield Finding("pipeline", "fail", e.message, e.hint)
                return
        else:
            path.write_text(PROBE)
        yield asyncio.run(_sandbox(open_sandbox(path)))


async def _sandbox(sandbox: Probe) -> Finding:
    """Start a child process that loads the pipeline, as a worker does."""
    try:
        started = time.monotonic()
        await sandbox.start()
        return Finding(
            "extraction", "ok", f"child processes start ({lasting(time.monotonic() - started)})"
        )
    except PenstockError as e:
        return Finding("extraction", "fail", e.message, e.hint)
    except OSError as e:
        return Finding(
            "extraction",
            "fail",
            f"no child process can be started: {e}",
            'check limits on processes (ulimit -u), or extract.isolation = "none"',
        )
    finally:
        await sandbox.close()


# -- the store -------------------------------------------------------------------------------------


def store(uow: UnitOfWork, db: StoreFile, clock: Clock, workers: Path) -> Iterator[Finding]:
    problems = db.check()
    if problems:
        yield Finding(
            "integrity",
            "fail",
            joined(problems, 3),
            "stop all workers, keep a copy, restore a backup or use the sqlite3 shell's .recover",
        )
        return
    file = db.file
    yield Finding(
        "integrity",
        "ok",
        db.path if file is None else f"{file.name}, {size(file.stat().st_size)}",
    )
    now = clock.now()  # after the check, which takes long for a large store
    audit = uow.snapshot(
        lambda tx: tx.status_reports.audit(
            tx.queue_reports.audit(now), entered=tx.counters.entered()
        )
    )
    yield _accounting(audit)
    yield _queue(audit)
    yield from _workers(uow, workers, audit)
    yield from _sinks(uow, audit, one_machine=file is not None)
    yield from _pages(uow)
    if audit.future > now + 5:
        yield Finding(
            "clock",
            "fail",
            f"events were accepted {lasting(audit.future - now)} in the future",
            "set the clocks of all machines by NTP",
        )
    else:
        yield Finding("clock", "ok", "not behind the newest event in the ledger")
    yield from _waits(uow)


def _waits(uow: UnitOfWork) -> Iterator[Finding]:
    """Report open breakers, and other causes that only an operator ends."""
    for w in uow.snapshot(waits_in):
        kind = "paused" if w.cause.startswith((TOPIC, HOST, EXTRACTOR)) else "waiting"
        waiting = f", {plural(w.events, 'event')} waiting" if w.events else ""
        why = f": {w.reason}" if w.reason else ""
        yield Finding(kind, "warn", f"{w.what}{waiting}{why}", w.next_step)


def _accounting(a: Audit) -> Finding:
    """Compare the counters with the rows (I10).

    Retention deletes ended events and keeps their counts, so these counts may be larger.
    """
    wrong = []
    forgotten = 0
    for key in sorted(a.counters.keys() | a.rows.keys()):
        noted, counted = a.counters.get(key, 0), a.rows.get(key, 0)
        if key[1] in ("success", "duplicate") and noted > counted:
            forgotten += noted - counted
        elif noted != counted:
            wrong.append(f"{key[0]}: {noted:,} {key[1]} in the counters, {counted:,} in the rows")
    accepted = sum(a.counters.values())
    if a.entered is not None and (
        accepted != a.entered or forgotten != a.entered - sum(a.rows.values())
    ):
        wrong.append(
            f"{a.entered:,} events were inserted, {accepted:,} are counted, "
            f"{sum(a.rows.values()):,} are stored"
        )
    if wrong:
        return Finding(
            "accounting",
            "fail",
            joined(wrong, 3),
            "keep a copy of the state directory, and report this",
        )
    more = f" ({forgotten:,} of them deleted by retention)" if forgotten else ""
    return Finding(
        "accounting", "ok", f"{accepted:,} accepted, and every one is accounted for{more}"
    )


def _queue(a: Audit) -> Finding:
    wrong = [
        f"{topic}/{group} counts {noted} ready, leased, delayed and has {counted}"
        for topic, group, noted, counted in a.queue.groups
        if noted != counted
    ]
    if a.queue.unqueued_count:
        wrong.append(
            f"{plural(a.queue.unqueued_count, 'open event')} in no queue: "
            f"{joined(short(i) for i in a.queue.unqueued)}"
        )
    if a.letterless:
        wrong.append(f"{plural(a.letterless, 'dead letter')} of events that are not dead")
    if wrong:
        return Finding(
            "queue",
            "fail",
            joined(wrong, 3),
            "report this (`penstock push --force` queues a URL again)",
        )
    if a.queue.lingering_count:
        return Finding(
            "queue",
            "warn",
            f"{plural(a.queue.lingering_count, 'queued message')} of events that have ended",
            "a worker removes them when it receives them",
        )
    return Finding("queue", "ok", "every open event is queued once")


def _workers(uow: UnitOfWork, directory: Path, a: Audit) -> Iterator[Finding]:
    held = uow.snapshot(lambda tx: tx.queue_reports.leases_by_worker(SCAN))
    dead = {worker: n for worker, n in held.items() if not locks.worker_alive(directory, worker)}
    alive = [sign for sign in directory.glob("*.alive") if locks.holder_alive(sign)]
    if dead:
        yield Finding(
            "leases",
            "warn",
            f"{plural(sum(dead.values()), 'lease')} of {plural(len(dead), 'worker')} that ended",
            "the next `penstock run` takes over the work",
        )
    elif a.queue.expired and not alive:
        yield Finding(
            "leases",
            "warn",
            f"{plural(a.queue.expired, 'expired lease')}",
            "the next `penstock run` takes over the work",
        )
    else:
        yield Finding(
            "leases", "ok", f"{plural(len(alive), 'worker')} running, every lease has a live worker"
        )


def _sinks(uow: UnitOfWork, a: Audit, *, one_machine: bool) -> Iterator[Finding]:
    for name, noted, rows in a.outbox:
        if noted != rows:
            yield Finding(
                "outbox",
                "fail",
                f"{name}: {noted:,} rows should be waiting, {rows:,} are",
                "keep a copy of the state directory, and report this",
            )
    for sink in uow.snapshot(lambda tx: tx.status_reports.sinks()):
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
            result: Literal["ok", "warn"] = "warn" if end else "ok"
            yield Finding(
                "sink",
                result,
                f"{sink.name}: the file does not exist, {size(end)} were written to it{waiting}",
                "it was moved or removed, and the next rows start a new file" if end else "",
            )
            continue
        if there < end:
            yield Finding(
                "sink",
                "fail",
                f"{sink.name}: the file has {there:,} bytes, {end:,} were written",
                "the file was cut or replaced: restore it,"
                " or write the missing rows again with push --force",
            )
        elif there > end:
            yield Finding(
                "sink",
                "warn",
                f"{sink.name}: {there - end:,} bytes after the recorded mark{waiting}",
                "a write was interrupted or is running, and the next `penstock run` repairs it",
            )
        else:
            yield Finding(
                "sink",
                "ok",
                f"{sink.name}: {plural(sink.flushed, 'row')}, ends at the mark{waiting}",
            )


def _local_recorded_end(mark: str, path: Path) -> int | None:
    """Return the recorded end of this machine's file, or None if the mark does not contain it.

    The mark of a fleet's sink has one entry for each machine's file.
    """
    with contextlib.suppress(OSError, ValueError):
        ino, host, noted = path.stat().st_ino, socket.gethostname(), json.loads(mark)
        known = [noted, *noted.get("others", ())] if isinstance(noted, dict) else []
        here = [each for each in known if each.get("ino") == ino]
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


def _pages(uow: UnitOfWork) -> Iterator[Finding]:
    (pages, total), problems = uow.snapshot(lambda tx: (tx.pages.totals(), tx.pages.problems()))
    if problems:
        yield Finding(
            "pages",
            "fail",
            joined(problems, 3),
            "restore them from a backup, or push their URLs again with --force",
        )
    else:
        yield Finding("pages", "ok", f"{plural(pages, 'page')}, {size(total)}")
