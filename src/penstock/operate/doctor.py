"""What doctor looks at. Each check is a finding: ok, warn (mends itself, or is worth knowing) or fail (something is not as it must be)."""

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
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, TypeVar

from penstock import locks
from penstock.errors import PenstockError
from penstock.operate.figures import joined, lasting, plural, short, size
from penstock.ports.reports import SCAN

if TYPE_CHECKING:
    from penstock.authoring.pipeline import Pipeline
    from penstock.config.files import Loaded
    from penstock.config.schema import Config
    from penstock.ports import Clock, StoreFacts, Transaction, UnitOfWork
    from penstock.ports.reports import Audit

T = TypeVar("T")
LOW, VERY_LOW = 1 << 30, 64 << 20  # free disk space
PROBE = 'from penstock import Pipeline\np = Pipeline("doctor")\n@p.extract\ndef probe(page):\n    yield {"url": page.url}\n'


class Finding(NamedTuple):
    check: str
    result: Literal["ok", "warn", "fail"]
    found: str
    fix: str = ""


class Probe(Protocol):
    """A sandbox, as far as it is needed to see that it starts."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...


class StoreFile(Protocol):
    """The store of the ledger, as `doctor` and a starting worker look at it."""

    @property
    def path(self) -> str:
        """Its name in messages. Contains no password."""

    @property
    def file(self) -> Path | None:
        """Its file on this machine, or None for a server."""

    def check(self) -> list[str]:
        """Return what is damaged, in sentences."""


class OpenStores(Protocol):
    """What `doctor` needs of the open stores."""

    @property
    def uow(self) -> UnitOfWork: ...

    @property
    def db(self) -> StoreFile: ...

    @property
    def clock(self) -> Clock: ...


def ask(stores: OpenStores, question: Callable[[Transaction], T]) -> T:
    """One moment, however many statements the question takes."""
    return stores.uow.snapshot(question)


# -- the machine -----------------------------------------------------------------------------------


def machine(config: Config, facts_of: Callable[[Path], StoreFacts]) -> Iterator[Finding]:
    there = _existing(config.state.dir)
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
            f"{config.state.dir} is on {kind}, where SQLite's locks do not hold",
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
    encoding = (sys.stdout.encoding or "").lower().replace("-", "")
    file_encoding = sys.getfilesystemencoding().lower().replace("-", "")
    if "utf8" in (encoding, file_encoding) and file_encoding == "utf8":
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
            f"the clock says {time.strftime('%Y-%m-%d', time.gmtime(now))}",
            "set it, e.g. with NTP: leases and windows depend on it",
        )


def _existing(path: Path) -> Path:
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _space(there: Path) -> Finding:
    free = shutil.disk_usage(there).free
    if free < VERY_LOW:
        return Finding(
            "disk",
            "fail",
            f"{size(free)} free under {there}",
            "free some: without room nothing is accepted or ended (nothing is lost either)",
        )
    if free < LOW:
        return Finding(
            "disk",
            "warn",
            f"{size(free)} free under {there}",
            "free some, or lower pages.max_bytes and pages.keep",
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
                from penstock.authoring.load import load

                pipeline = load(path)
                open_sinks(pipeline, Path.cwd())
                yield Finding(
                    "pipeline",
                    "ok",
                    f"{chosen}: {plural(len(pipeline.extractors), 'extractor')}, {plural(len(pipeline.sinks), 'sink')}",
                )
            except PenstockError as e:
                yield Finding("pipeline", "fail", e.message, e.hint)
                return
        else:
            path.write_text(PROBE)
        yield asyncio.run(_sandbox(open_sandbox(path)))


async def _sandbox(sandbox: Probe) -> Finding:
    """A child process that loads the pipeline, as a worker would have it."""
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


def store(stores: OpenStores, workers: Path) -> Iterator[Finding]:
    problems = stores.db.check()
    if problems:
        yield Finding(
            "integrity",
            "fail",
            joined(problems, 3),
            "stop all workers, keep a copy, restore a backup or use the sqlite3 shell's .recover",
        )
        return
    file = stores.db.file
    yield Finding(
        "integrity",
        "ok",
        stores.db.path if file is None else f"{file.name}, {size(file.stat().st_size)}",
    )
    now = stores.clock.now()
    audit = ask(
        stores,
        lambda tx: tx.reports.audit(tx.queue_reports.audit(now), entered=tx.counters.entered()),
    )
    yield _accounting(audit)
    yield _queue(audit)
    yield from _workers(stores, workers, audit)
    yield from _sinks(stores, audit)
    yield from _pages(stores)
    if audit.future > now + 5:
        yield Finding(
            "clock",
            "fail",
            f"events were accepted {lasting(audit.future - now)} in the future",
            "set the clocks of all machines by NTP",
        )
    else:
        yield Finding("clock", "ok", "not behind what is in the books")
    for topic, reason in ask(stores, lambda tx: tx.queue.paused()).items():
        yield Finding("paused", "warn", f"{topic}: {reason}", f"penstock topics resume {topic}")


def _accounting(a: Audit) -> Finding:
    """I10, from both sides. Retention forgets ended events and leaves their counts, so those may only be larger."""
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
            f"{a.entered:,} events were entered, {accepted:,} are counted, {sum(a.rows.values()):,} are there"
        )
    if wrong:
        return Finding(
            "accounting",
            "fail",
            joined(wrong, 3),
            "please report it; keep a copy of the state directory",
        )
    more = f" ({forgotten:,} of them forgotten by retention)" if forgotten else ""
    return Finding(
        "accounting", "ok", f"{accepted:,} accepted, and every one is accounted for{more}"
    )


def _queue(a: Audit) -> Finding:
    wrong = [
        f"{topic}/{group} notes {noted} ready, leased, delayed and has {counted}"
        for topic, group, noted, counted in a.queue.groups
        if noted != counted
    ]
    if a.queue.unqueued_count:
        wrong.append(
            f"{plural(a.queue.unqueued_count, 'open event')} in no queue: {joined(short(i) for i in a.queue.unqueued)}"
        )
    if a.letterless:
        wrong.append(f"{plural(a.letterless, 'dead letter')} of events that are not dead")
    if wrong:
        return Finding(
            "queue",
            "fail",
            joined(wrong, 3),
            "please report it; penstock push --force queues a URL again",
        )
    if a.queue.lingering_count:
        return Finding(
            "queue",
            "warn",
            f"{plural(a.queue.lingering_count, 'queued message')} of events that have ended",
            "a worker removes them when it meets them",
        )
    return Finding("queue", "ok", "every open event is queued once")


def _workers(stores: OpenStores, directory: Path, a: Audit) -> Iterator[Finding]:
    held = ask(stores, lambda tx: tx.queue_reports.leases_by_worker(SCAN))
    dead = {worker: n for worker, n in held.items() if not locks.worker_alive(directory, worker)}
    alive = [sign for sign in directory.glob("*.alive") if locks.holder_alive(sign)]
    if dead:
        yield Finding(
            "leases",
            "warn",
            f"{plural(sum(dead.values()), 'lease')} of {plural(len(dead), 'worker')} that is gone",
            "the next `penstock run` takes the work back",
        )
    elif a.queue.expired and not alive:
        yield Finding(
            "leases",
            "warn",
            f"{plural(a.queue.expired, 'lease')} that ran out",
            "the next `penstock run` takes the work back",
        )
    else:
        yield Finding(
            "leases", "ok", f"{plural(len(alive), 'worker')} running, no lease without its worker"
        )


def _sinks(stores: OpenStores, a: Audit) -> Iterator[Finding]:
    for name, noted, rows in a.outbox:
        if noted != rows:
            yield Finding(
                "outbox",
                "fail",
                f"{name}: {noted:,} rows should wait and {rows:,} do",
                "please report it; keep a copy of the state directory",
            )
    for sink in ask(stores, lambda tx: tx.reports.sinks()):
        waiting = f", {plural(sink.backlog, 'row')} waiting" if sink.backlog else ""
        path = _file_of(sink.name)
        end = (
            _noted_end(sink.mark)
            if stores.db.file is not None or path is None
            else _noted_end_here(sink.mark, path)
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
                f"{sink.name}: the file is not there; {size(end)} were written to it{waiting}",
                "it was moved or removed; the next rows begin a new one" if end else "",
            )
            continue
        if there < end:
            yield Finding(
                "sink",
                "fail",
                f"{sink.name}: has {there:,} bytes, {end:,} were written",
                "it was cut or replaced; restore it, or replay what is missing with push --force",
            )
        elif there > end:
            yield Finding(
                "sink",
                "warn",
                f"{sink.name}: {there - end:,} bytes beyond what is noted{waiting}",
                "a write was interrupted, or is under way; the next `penstock run` puts it right",
            )
        else:
            yield Finding(
                "sink",
                "ok",
                f"{sink.name}: {plural(sink.flushed, 'row')}, at its noted end{waiting}",
            )


def _noted_end_here(mark: str, path: Path) -> int | None:
    """Of the files that the machines of a fleet wrote, the one that lies here; None where none does."""
    with contextlib.suppress(OSError, ValueError):
        ino, host, noted = path.stat().st_ino, socket.gethostname(), json.loads(mark)
        known = [noted, *noted.get("others", ())] if isinstance(noted, dict) else []
        here = [each for each in known if each.get("ino") == ino]
        return int(max(here, key=lambda each: each.get("host") == host)["at"]) if here else None
    return None


def _noted_end(mark: str) -> int | None:
    """The byte after the last one that is noted as written; None where the mark is not one of a file."""
    try:
        found = json.loads(mark)
    except ValueError:
        return None
    end = found.get("at") if isinstance(found, dict) else found
    return end if isinstance(end, int) else None


def _file_of(name: str) -> Path | None:
    scheme, _, path = name.partition(":")
    return Path(path.partition("?")[0]) if scheme in ("jsonl", "csv") and path else None


def _pages(stores: OpenStores) -> Iterator[Finding]:
    (pages, total), problems = ask(stores, lambda tx: (tx.pages.totals(), tx.pages.problems()))
    if problems:
        yield Finding(
            "pages",
            "fail",
            joined(problems, 3),
            "restore them from a backup; their URLs can be pushed again with --force",
        )
    else:
        yield Finding("pages", "ok", f"{plural(pages, 'page')}, {size(total)}")
