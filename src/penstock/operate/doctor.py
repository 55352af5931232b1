"""Checks of `penstock doctor`.

Each check returns findings: ok, warn (repairs itself, or is worth knowing) or fail.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from penstock import locks
from penstock.errors import PenstockError
from penstock.model import Reason
from penstock.operate.disk import check_disk
from penstock.operate.figures import joined, lasting, plural, short, size
from penstock.operate.findings import Finding, Opening, open_all
from penstock.operate.permissions import check_permissions
from penstock.operate.sink_files import check_sinks
from penstock.operate.waiting import waits_in
from penstock.operate.workers import SILENCE_LIMIT, is_alive, workers_in
from penstock.ports.reports import SCAN
from penstock.rules.reasons import code_of
from penstock.rules.waiting import EXTRACTOR, HOST, TOPIC

if TYPE_CHECKING:
    from penstock.authoring.pipeline import Pipeline
    from penstock.config.files import Loaded
    from penstock.config.schema import Config
    from penstock.ports import Clock, StoreFacts, Transaction, UnitOfWork
    from penstock.ports.reports import Audit

MAX_SKEW = 5.0  # seconds between two clocks
PROBE = (
    'from penstock import Pipeline\np = Pipeline("doctor")\n@p.extract\n'
    'def probe(page):\n    yield {"url": page.url}\n'
)


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

    def server_time(self) -> float | None:
        """Return the time of the server's clock, or None for a file."""


# -- the machine -----------------------------------------------------------------------------------


def machine(
    config: Config, facts_of: Callable[[Path], StoreFacts], *, repair: bool = False
) -> Iterator[Finding]:
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
    yield check_disk(folder, there, time.time())
    if not os.access(there, os.W_OK):
        yield Finding(
            "permissions",
            "fail",
            f"{there} is not writable for this user",
            f"chown it, or run as its owner ({there.owner()})"
            if hasattr(there, "owner")
            else "chown it",
        )
    if (modes := check_permissions(config, repair=repair)) is not None:
        yield modes
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


# -- settings and the pipeline ---------------------------------------------------------------------


def settings(
    loaded: Loaded,
    file: str | None,
    *,
    openings: Callable[[Config, Pipeline], Iterable[Opening]],
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
                to_open = list(openings(loaded.config, pipeline))
                yield Finding(
                    "pipeline",
                    "ok",
                    f"{chosen}: {plural(len(pipeline.extractors), 'extractor')}, "
                    f"{plural(len(pipeline.sinks), 'sink')}",
                )
            except PenstockError as e:
                yield Finding("pipeline", "fail", e.message, e.hint)
                return
            yield from open_all(to_open)
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


def store(
    uow: UnitOfWork,
    db: StoreFile,
    clock: Clock,
    workers: Path,
    *,
    lease: float,
) -> Iterator[Finding]:
    """Check the ledger. `workers` is the directory of lock files."""
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
    yield _leases(uow, workers, audit, now, on_server=file is None)
    yield from _silent_workers(workers, lease, now)
    if file is None:
        yield from _ended_workers(uow, workers, now)
    yield from check_sinks(uow, audit, one_machine=file is not None, now=now)
    yield from _pages(uow)
    yield _clock(audit, db, clock)
    yield from _waits(uow)


def _clock(audit: Audit, db: StoreFile, clock: Clock) -> Finding:
    """Compare the clock of this machine with the ledger and with the server's clock."""
    server = db.server_time()
    now = clock.now()
    wrong = None if server is None else compare_clocks(server - now, db.path)
    if wrong is not None:
        return wrong
    if audit.future > now + MAX_SKEW:
        return Finding(
            "clock",
            "fail",
            f"events were accepted {lasting(audit.future - now)} in the future",
            "set the clocks of all machines by NTP",
            "clock.behind_ledger",
        )
    return Finding("clock", "ok", "not behind the newest event in the ledger")


def compare_clocks(skew: float, server: str) -> Finding | None:
    """Return a finding if the server's clock is too far ahead (`skew` > 0) or behind, or None."""
    if abs(skew) <= MAX_SKEW:
        return None
    direction = "behind" if skew > 0 else "ahead of"
    return Finding(
        "clock",
        "fail",
        f"the clock of this machine is {lasting(abs(skew))} {direction} the clock of {server}",
        "set the clocks of all machines by NTP: leases and windows depend on them",
        "clock.differs",
    )


def _waits(uow: UnitOfWork) -> Iterator[Finding]:
    """Report open breakers (a failure), and other causes that only an operator ends."""
    for w in uow.snapshot(waits_in):
        kind = w.cause.partition(":")[0]
        check = "paused" if w.cause.startswith((TOPIC, HOST, EXTRACTOR)) else "waiting"
        opened = bool(w.reason) and code_of(w.reason) in (Reason.BREAKER, Reason.BREAKER_HOSTS)
        waiting = f", {plural(w.events, 'event')} waiting" if w.events else ""
        reason = f": {w.reason}" if w.reason else ""
        yield Finding(
            check,
            "fail" if opened else "warn",
            f"{w.what}{waiting}{reason}",
            f"read `penstock dlq ls`, mend the cause, then run `{w.next_step}`"
            if opened
            else w.next_step,
            f"breaker.{kind}" if opened else f"{check}.{kind}",
        )


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
    if a.links_waiting != a.links_stored:
        wrong.append(
            f"{a.links_waiting:,} waiting links in the counter, {a.links_stored:,} in the rows"
        )
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
    if a.unqueued_count:
        wrong.append(
            f"{plural(a.unqueued_count, 'open event')} in no queue: "
            f"{joined(short(i) for i in a.unqueued)}"
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
    if a.lingering_count:
        return Finding(
            "queue",
            "warn",
            f"{plural(a.lingering_count, 'queued message')} of events that have ended",
            "a worker removes them when it receives them",
        )
    return Finding("queue", "ok", "every open event is queued once")


def _leases(uow: UnitOfWork, directory: Path, a: Audit, now: float, *, on_server: bool) -> Finding:
    def find(tx: Transaction) -> tuple[dict[str, int], dict[str, bool]]:
        held = tx.queue_reports.leases_by_worker(SCAN)
        return held, workers_in(tx, now, directory, on_server=on_server, others=held)

    held, alive = uow.snapshot(find)
    dead = {worker: n for worker, n in held.items() if not alive[worker]}
    running = sum(alive.values())
    if dead:
        return Finding(
            "leases",
            "warn",
            f"{plural(sum(dead.values()), 'lease')} of {plural(len(dead), 'worker')} that ended",
            "the next `penstock run` takes over the work",
        )
    if a.queue.expired and not running:
        return Finding(
            "leases",
            "warn",
            f"{plural(a.queue.expired, 'expired lease')}",
            "the next `penstock run` takes over the work",
        )
    return Finding(
        "leases", "ok", f"{plural(running, 'worker')} running, every lease has a live worker"
    )


def _silent_workers(directory: Path, lease: float, now: float) -> Iterator[Finding]:
    """Report workers of this machine that run without a heartbeat within their lease."""
    for sign in sorted(directory.glob("*.alive")):
        worker, seconds = sign.name.removesuffix(".alive"), locks.silence(sign, now)
        if seconds > lease and locks.holder_alive(sign):
            yield Finding(
                "workers",
                "fail",
                f"worker {worker} runs and has been silent for {lasting(seconds)} "
                f"(lease {lasting(lease)})",
                f"look at process {_pid(worker)}: resume it if it is stopped (kill -CONT), or end "
                "it: the next worker takes over its work",
                "worker.silent",
            )


def _ended_workers(uow: UnitOfWork, directory: Path, now: float) -> Iterator[Finding]:
    """Report workers of other machines whose heartbeats have ended."""
    for worker, until in sorted(uow.snapshot(lambda tx: tx.owner.workers()).items()):
        if not is_alive(worker, until, now, directory, on_server=True):
            yield Finding(
                "workers",
                "warn",
                f"worker {worker} ended without shutdown, or is silent: its last heartbeat was "
                f"{lasting(now - until + SILENCE_LIMIT)} ago",
                "other workers take over its work. If its process still runs, end it",
                "worker.gone",
            )


def _pid(worker: str) -> str:
    """Return the process id in a worker id: HOST-PID-SUFFIX."""
    return worker.rpartition("-")[0].rpartition("-")[2]


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
