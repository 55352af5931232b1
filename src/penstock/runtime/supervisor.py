"""Processes and signals of `penstock run`: one worker, or several workers under a parent process.

The parent restarts crashed workers and forwards signals.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from penstock.clock import SystemClock
from penstock.config.schema import Config
from penstock.errors import OK, RAN_WITH_FAILURES, UNREACHABLE, PenstockError
from penstock.extraction.zygote_main import die_with, keep_freed_memory
from penstock.rules.budgets import Run
from penstock.runtime.early_signals import sigterm_received
from penstock.runtime.migrating import upgrade_files
from penstock.runtime.process import WorkerProcess
from penstock.runtime.sink_watch import SinkGaveUp
from penstock.runtime.stores import worker_id

log = logging.getLogger("penstock")
SIGNALS = (signal.SIGTERM, signal.SIGINT)
RESTART_DELAY = 1.0  # least seconds between two starts of a worker
# Exit code of a worker that gave a sink up. The run ends with UNREACHABLE, and starts no other one.
GAVE_UP = 64 + UNREACHABLE


def run_command(
    config: Config,
    pipeline_file: Path,
    *,
    roles: frozenset[str],
    workers: int = 1,
    until_idle: bool = False,
) -> int:
    """Run workers until a signal, or until idle. Return the exit code."""
    run = Run(worker_id(), SystemClock().now())
    # This checks the pipeline, so that an error is reported once and not by each worker.
    running = WorkerProcess(config, pipeline_file, roles=roles, run=run)
    upgrade_files(config)
    if workers == 1:
        return run_worker(running, until_idle=until_idle)
    return _supervise(
        lambda: run_worker(
            WorkerProcess(config, pipeline_file, roles=roles, run=run),
            until_idle=until_idle,
            supervised=True,
        ),
        workers,
    )


def run_worker(
    running: WorkerProcess,
    *,
    until_idle: bool,
    opened: Callable[[WorkerProcess], None] | None = None,
    supervised: bool = False,
) -> int:
    keep_freed_memory(trim_threshold=256 << 20)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_with_signals(running, until_idle, opened, supervised))


async def _with_signals(
    running: WorkerProcess,
    until_idle: bool,
    opened: Callable[[WorkerProcess], None] | None,
    supervised: bool,
) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        if stop.is_set():
            # A terminal or a service manager signals the whole process group, and the supervisor
            # forwards the signal. That counts as one signal.
            if supervised:
                return
            log.warning(
                "second signal: exiting now, the next worker takes over the leases of this one"
            )
            os._exit(128 + number)
        log.info("draining: finishing or releasing within %g s", running.config.grace)
        stop.set()

    for number in SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    if sigterm_received():
        return OK
    gc.collect()
    gc.freeze()  # objects of the start-up are not collected, so the collector need not visit them
    # Higher than the default: thousands of live events are in memory, and none of them is garbage.
    gc.set_threshold(100_000, 50, 50)
    return await running.run(stop, until_idle=until_idle, opened=opened)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # uvloop does not exist for Windows. asyncio is slower, but works the same.
        return None
    return uvloop.new_event_loop


# -- several workers -------------------------------------------------------------------------------


def _supervise(work: Callable[[], int], n: int) -> int:
    """Fork workers, before any file or connection is open. Return the highest exit code.

    A worker that was killed is started again. If a worker exits with an error of configuration or
    connection, the run ends with its code. A replacement that cannot reach a server is started
    again, because the server worked when the run started.
    """
    me = os.getpid()
    children: dict[int, float] = {}
    replacements: set[int] = set()
    stopping = 0
    codes: list[int] = []

    def on_signal(number: int, _: object) -> None:
        nonlocal stopping
        stopping += 1
        for pid in children:
            with contextlib.suppress(ProcessLookupError):  # ended, but not yet reaped
                os.kill(pid, signal.SIGTERM if stopping == 1 else signal.SIGKILL)

    def start(*, replaces: bool) -> None:
        # Block signals until the child is in `children`, and has reset its signal handlers.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        if not stopping:
            pid = os.fork()
            if pid == 0:
                os._exit(_child(work, me))
            children[pid] = time.monotonic()
            if replaces:
                replacements.add(pid)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    gc.collect()
    # The children share the memory of all objects loaded now, unless a garbage collector writes to
    # them.
    gc.freeze()
    before = {number: signal.signal(number, on_signal) for number in SIGNALS}
    stopping += sigterm_received()
    try:
        for _ in range(n):
            start(replaces=False)
        while children:
            pid, status = os.wait()
            started = children.pop(pid, 0.0)
            code = os.waitstatus_to_exitcode(status)
            replaced = pid in replacements and code != GAVE_UP
            code = UNREACHABLE if code == GAVE_UP else code
            if not stopping and (code < 0 or (code == UNREACHABLE and replaced)):
                log.warning(
                    "worker %d %s: starting another worker",
                    pid,
                    f"was killed by signal {-code}" if code < 0 else "could not reach a server",
                )
                time.sleep(max(0.0, RESTART_DELAY - (time.monotonic() - started)))
                start(replaces=True)
            elif code > 0:
                codes.append(code)
                # After a configuration or connection error, the other workers would fail alike.
                if not stopping and code != RAN_WITH_FAILURES:
                    on_signal(signal.SIGTERM, None)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return max(codes, default=OK)


def _child(work: Callable[[], int], parent: int) -> int:
    """Run a worker in the forked child. Return its exit code.

    On Linux, the kernel kills the worker when its supervisor ends.
    """
    die_with(parent)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    try:
        return work()
    except PenstockError as e:
        print(
            f"Error: {e.message}" + (f"\nTry:   {e.hint}" if e.hint else ""),
            file=sys.stderr,
            flush=True,
        )
        return GAVE_UP if isinstance(e, SinkGaveUp) else e.exit_code
    except KeyboardInterrupt:
        return 130
    except BaseException:
        log.exception("the worker failed")
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
