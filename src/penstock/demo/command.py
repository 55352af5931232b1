"""`penstock demo`: starts the shop in a separate process, runs a normal pipeline and shows it.

See `pipeline` for the scraping.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from rich.live import Live

from penstock import locks
from penstock.cli.options import SafeFormatter
from penstock.cli.output import console
from penstock.config import files as config
from penstock.demo.display import Snapshot, plain, render
from penstock.demo.monitor import Look, Watch
from penstock.demo.summary import DemoResult, summary
from penstock.errors import OK, RAN_WITH_FAILURES, PenstockError, UsageError
from penstock.locks import FileLock
from penstock.ports import Transaction
from penstock.private_files import create_file
from penstock.runtime.process import WorkerProcess
from penstock.runtime.roles import ROLES
from penstock.runtime.stores import open_stores

FRAME_INTERVAL, LINE_INTERVAL = 0.25, 2.0  # seconds between two frames, and between two lines
# Seconds in which open events may finish after the end of the run.
FINISH_TIMEOUT = 3.0
# Seconds after which the demo's time starts even if no event was accepted.
START_TIMEOUT = 60.0
# Seconds after which `--break` redesigns the shop, but at most 0.6 of `--seconds`.
REDESIGN_AFTER = 15.0
PRICE_INTERVAL = ("0.5", "2.0")  # shortest and longest seconds between two price changes
# Prefixes of the variables that name stores and servers.
STORE_VARIABLES = tuple(
    f"PENSTOCK_{name}"
    for name in ("BROKER_URL", "TOPICS_", "LEDGER_URL", "CLAIMS_URL", "PAGES_URL", "NAMESPACE")
)
SETTINGS = """\
# The demo's settings. All other options have their defaults: `penstock config show` lists them.
pipeline = "shop.py"
net.allow = {allow} # only the shop's two ports on this machine
pace.rate = 8 # requests a second to each host, the default is 1
dedup.window = "3s" # short, because prices change every other second
dedup.settle = "200ms"
retry.base = "1s"
grace = "5s"
"""


def run(seconds: float | None, break_: bool, out: Path | None, lines: bool) -> int:
    """Run until the time is over or Ctrl-C. Return 1 if no record was written.

    One dead page is expected.
    """
    cwd = Path.cwd()
    where = (cwd / (out or "penstock-demo")).absolute()
    lock = _fresh(where)
    try:
        os.chdir(where)  # sinks and hooks write to the current directory
        with _logging(where / "demo.log"):
            return asyncio.run(
                _demo(
                    where,
                    cwd,
                    seconds,
                    break_,
                    lines or not console().is_terminal or console().is_dumb_terminal,
                )
            )
    finally:
        os.chdir(cwd)
        lock.release()


# -- the directory ---------------------------------------------------------------------------------


def _fresh(where: Path) -> FileLock:
    """Lock the directory and delete the files of an earlier demo, and only those.

    Each demo starts from zero, because its shop has other ports.
    """
    state = where / ".penstock"
    lock = FileLock(state / "demo.lock")
    if where.exists() and not where.is_dir():
        raise UsageError(f"{where} exists and is not a directory", hint="--out DIR")
    if where.exists() and any(where.iterdir()) and not lock.path.exists():
        raise UsageError(
            f"{where} exists and is not from a demo",
            hint="--out DIR with a new or empty directory",
        )
    if not lock.try_acquire() or any(
        locks.holder_alive(sign) for sign in (state / "workers").glob("*.alive")
    ):
        raise UsageError(
            f"a demo or a worker is running in {where}", hint="--out DIR with another directory"
        )
    for path in state.iterdir():
        if path != lock.path:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    for name in (
        "records.jsonl",
        "products.db",
        "products.db-wal",
        "products.db-shm",
        "changes.txt",
        "shop.log",
        "demo.log",
    ):
        (where / name).unlink(missing_ok=True)
    return lock


@contextlib.contextmanager
def _logging(file: Path) -> Iterator[None]:
    """Write Penstock's log to a file, because the terminal shows the display."""
    create_file(file)
    handler = logging.FileHandler(file, encoding="utf-8")
    handler.setFormatter(SafeFormatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    log = logging.getLogger("penstock")
    before = log.level, log.propagate
    log.setLevel(logging.INFO)
    log.propagate = False
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before[0])
        log.propagate = before[1]
        handler.close()


# -- the shop --------------------------------------------------------------------------------------


class _Shop:
    def __init__(self, process: asyncio.subprocess.Process, url: str, limited: str) -> None:
        self.process, self.url, self.limited = process, url, limited

    def redesign(self) -> None:
        self.process.send_signal(signal.SIGUSR1)


@contextlib.asynccontextmanager
async def _shop(log: Path) -> AsyncIterator[_Shop]:
    """Run the shop in a separate process, so that it answers independently of the pipeline.

    Ctrl-C on the terminal does not reach it.
    """
    command = (
        sys.executable,
        "-P",
        "-m",
        "penstock.demo.shop",
        "--with-parent",
        "--every",
        *PRICE_INTERVAL,
        "--log",
        str(log),
    )
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        line = await process.stdout.readline()
        if not line:
            raise PenstockError(
                "the demo's shop did not start", hint=f"run `{' '.join(command[:4])}` to see why"
            )
        found = json.loads(line)
        yield _Shop(process, found["url"], found["limited"])
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


# -- the run ---------------------------------------------------------------------------------------


class _Screen:
    """A live display on a terminal, or lines of text without one."""

    def __init__(self, lines: bool) -> None:
        self._before: Snapshot | None = None
        self._due = 0.0
        self._live = (
            None
            if lines
            else Live(
                console=console(), auto_refresh=False, transient=True, vertical_overflow="crop"
            )
        )

    def __enter__(self) -> _Screen:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, snapshot: Snapshot, *, last: bool = False) -> None:
        if self._live is not None:
            self._live.update(render(snapshot, console().width), refresh=True)
        elif (
            last
            or snapshot.elapsed >= self._due
            or bool(snapshot.records) > bool(self._before and self._before.records)
        ):
            print(plain(snapshot, self._before), flush=True)
            self._before, self._due = snapshot, snapshot.elapsed + LINE_INTERVAL


async def _demo(where: Path, cwd: Path, seconds: float | None, break_: bool, lines: bool) -> int:
    started = time.time()
    asked_to_end = asyncio.Event()
    with _Screen(lines) as screen:
        _on_signals(asked_to_end, screen)
        async with _shop(where / "shop.log") as shop:
            settings = _settings(where, shop)
            if lines:
                print(
                    f"penstock demo: the shop is at {shop.url}, results go to {where}", flush=True
                )
            running = WorkerProcess(settings, where / "shop.py", roles=frozenset(ROLES))
            stop, opened = asyncio.Event(), asyncio.Event()
            work = asyncio.create_task(running.run(stop, opened=lambda _: opened.set()))
            try:
                await _either(work, opened)
                watch = Watch(
                    running,
                    shop=shop.url,
                    limited=shop.limited,
                    changes=where / "changes.txt",
                    started=started,
                    total=seconds,
                )
                watch.notice = "" if lines else f"results in {where.name}/ · Ctrl-C ends it"
                redesigned = await _watch(
                    watch, running, screen, work, shop, asked_to_end, seconds, break_
                )
            finally:
                stop.set()
                await work
            elapsed = time.time() - started
    stores = open_stores(settings, create=False, inline=True)
    try:
        look = stores.uow.snapshot(Look)
    finally:
        stores.close()
    result = DemoResult(
        out=where,
        cwd=cwd,
        elapsed=elapsed,
        first_row=watch.first_row,
        look=look,
        limited=shop.limited,
        redesigned=redesigned,
        requests=where / "shop.log",
    )
    results, commands = summary(result)
    if lines:
        print()
    console().print(results, end="")
    console().print(commands, soft_wrap=True)
    return OK if look.counters.get("records") else RAN_WITH_FAILURES


def _settings(where: Path, shop: _Shop) -> config.Config:
    """Write the pipeline and its settings, and load them.

    Only the variables of stores and servers are used. On servers the demo has its own namespace, so
    that it changes no other data, unless PENSTOCK_NAMESPACE is set.
    """
    given = {name: value for name, value in os.environ.items() if name.startswith(STORE_VARIABLES)}
    allow = json.dumps([url.removeprefix("http://") for url in (shop.url, shop.limited)])
    own = (
        f'namespace = "demo-{secrets.token_hex(4)}" # on servers\n'
        if given and "PENSTOCK_NAMESPACE" not in given
        else ""
    )
    pipeline = Path(__file__).with_name("pipeline.py").read_text("utf-8")
    (where / "shop.py").write_text(
        pipeline.replace('"http://127.0.0.1:8000"', json.dumps(shop.url)), encoding="utf-8"
    )
    (where / config.FILE_NAME).write_text(SETTINGS.format(allow=allow) + own, encoding="utf-8")
    return config.load({}, given, where).config


def _on_signals(asked_to_end: asyncio.Event, screen: _Screen) -> None:
    def on_signal(number: int) -> None:
        if asked_to_end.is_set():
            screen.__exit__()  # shows the cursor again
            os._exit(128 + number)
        asked_to_end.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)


async def _either(
    work: asyncio.Task[int], event: asyncio.Event, seconds: float | None = None
) -> None:
    """Wait up to `seconds` for `event`. Raise if the worker ends."""
    happens = asyncio.create_task(event.wait())
    try:
        await asyncio.wait([work, happens], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        happens.cancel()
    if work.done():
        await work
        raise PenstockError("the worker ended before the demo", hint="see demo.log")


async def _watch(
    watch: Watch,
    running: WorkerProcess,
    screen: _Screen,
    work: asyncio.Task[int],
    shop: _Shop,
    asked_to_end: asyncio.Event,
    seconds: float | None,
    break_: bool,
) -> float | None:
    """Show snapshots until the end. Return the time of the redesign, or None.

    The time starts with the first event, so a slow machine or server does not shorten the demo.
    """
    redesigned: float | None = None
    begun = float("inf")
    break_at = (
        (REDESIGN_AFTER if seconds is None else min(REDESIGN_AFTER, seconds * 0.6))
        if break_
        else float("inf")
    )
    finishing = float("inf")
    while True:
        snapshot = await watch.look()
        elapsed = snapshot.elapsed
        if begun == float("inf") and (snapshot.counts.accepted > 0 or elapsed >= START_TIMEOUT):
            begun = elapsed
            watch.total = None if seconds is None else begun + seconds
        lasted = max(0.0, elapsed - begun)
        # A redesign is visible only after a record was written.
        if redesigned is None and lasted >= break_at and snapshot.records:
            shop.redesign()
            redesigned, watch.notice = elapsed, f"the shop was redesigned after {elapsed:.0f} s"
        if seconds is not None and lasted >= seconds and finishing == float("inf"):
            await _stop_reading(running)
            finishing, watch.notice = elapsed + FINISH_TIMEOUT, "finishing open events"
        over = (
            asked_to_end.is_set()
            or elapsed >= finishing
            or (finishing < float("inf") and watch.idle)
        )
        screen.show(snapshot, last=over)
        if over:
            return redesigned
        pause = (
            min(FRAME_INTERVAL, max(0.01, seconds - lasted))
            if seconds is not None and lasted < seconds
            else FRAME_INTERVAL
        )
        await _either(work, asked_to_end, pause)


async def _stop_reading(running: WorkerProcess) -> None:
    """Pause all sources, so that accepted events finish and no new ones are accepted."""

    def work(tx: Transaction) -> None:
        for state in tx.sources.all():
            tx.sources.pause(state.name, "the demo is over")

    await running.stores.uow.write(work)
