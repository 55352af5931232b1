"""Processes and signals of `penstock run`: one worker, or several under a parent that restarts the
dead and forwards what it is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from penstock.config.schema import Config
from penstock.errors import OK, RAN_WITH_FAILURES, UNREACHABLE, PenstockError
from penstock.runtime.process import Running

log = logging.getLogger("penstock")
SIGNALS = (signal.SIGTERM, signal.SIGINT)
RESTART_DELAY = 1.0
PR_SET_PDEATHSIG = 1


def run_command(
    config: Config,
    pipeline_file: Path,
    *,
    roles: frozenset[str],
    workers: int = 1,
    until_idle: bool = False,
) -> int:
    """Until a signal, or until idle. Returns the exit code."""
    running = Running(
        config, pipeline_file, roles=roles
    )  # checks first: a bad pipeline must not fail once per worker
    if workers == 1:
        return run_worker(running, until_idle=until_idle)
    return _supervise(
        lambda: run_worker(
            Running(config, pipeline_file, roles=roles), until_idle=until_idle, supervised=True
        ),
        workers,
    )


def run_worker(
    running: Running,
    *,
    until_idle: bool,
    opened: Callable[[Running], None] | None = None,
    supervised: bool = False,
) -> int:
    _keep_freed_memory()
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_with_signals(running, until_idle, opened, supervised))


async def _with_signals(
    running: Running, until_idle: bool, opened: Callable[[Running], None] | None, supervised: bool
) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        if stop.is_set():
            # a terminal or a service manager signals the whole group, and our supervisor says it
            # again: that is one signal
            if supervised:
                return
            log.warning("second signal: leaving at once; leases are taken back by the next worker")
            os._exit(128 + number)
        log.info("draining: finishing or releasing within %g s", running.config.grace)
        stop.set()

    for number in SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    gc.collect()
    gc.freeze()  # what start-up made stays; the collector need not walk it again for every page
    gc.set_threshold(
        100_000, 50, 50
    )  # thousands of events are held at once, and none of them is garbage
    return await running.run(stop, until_idle=until_idle, opened=opened)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # not to be had on Windows; slower, not different
        return None
    return uvloop.new_event_loop


def _keep_freed_memory() -> None:
    """glibc gives memory back after every large body; keeping it saved a fifth of the time a page
    takes.
    """
    if sys.platform == "linux":
        try:
            mallopt = ctypes.CDLL(None).mallopt
        except (OSError, AttributeError):
            return
        for option, value in (
            (-3, 1 << 30),
            (-1, 256 << 20),
            (-2, 16 << 20),
        ):  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_TOP_PAD
            mallopt(option, value)


# -- several workers -------------------------------------------------------------------------------


def _supervise(work: Callable[[], int], n: int) -> int:
    """Forks before anything is open. A worker that dies is started again; one that ends by itself
    ends the run with its code.

    What cannot be reached when the run starts is the user's to mend; what went away later comes
    back, and a replacement waits for it.
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
            with contextlib.suppress(ProcessLookupError):  # it ended, and that is not noted yet
                os.kill(pid, signal.SIGTERM if stopping == 1 else signal.SIGKILL)

    def start(*, replaces: bool) -> None:
        signal.pthread_sigmask(
            signal.SIG_BLOCK, SIGNALS
        )  # a signal waits until the child is noted here, and has shed our handlers there
        if not stopping:
            pid = os.fork()
            if pid == 0:
                os._exit(_child(work, me))
            children[pid] = time.monotonic()
            if replaces:
                replacements.add(pid)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    gc.collect()
    # what is loaded by now the children share, as long as nobody's collector walks over it
    gc.freeze()
    before = {number: signal.signal(number, on_signal) for number in SIGNALS}
    try:
        for _ in range(n):
            start(replaces=False)
        while children:
            pid, status = os.wait()
            started = children.pop(pid, 0.0)
            code = os.waitstatus_to_exitcode(status)
            if not stopping and (code < 0 or (code == UNREACHABLE and pid in replacements)):
                log.warning(
                    "worker %d %s; starting another",
                    pid,
                    f"was killed by signal {-code}" if code < 0 else "could not reach a server",
                )
                time.sleep(max(0.0, RESTART_DELAY - (time.monotonic() - started)))
                start(replaces=True)
            elif code > 0 and not stopping:
                codes.append(code)
                if (
                    code != RAN_WITH_FAILURES
                ):  # configuration, unreachable: the others would say the same
                    on_signal(signal.SIGTERM, None)
            elif code > 0:
                codes.append(code)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return max(codes, default=OK)


def _child(work: Callable[[], int], parent: int) -> int:
    """A worker must not outlive its supervisor, however that one ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            return 1
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
        return e.exit_code
    except KeyboardInterrupt:
        return 130
    except BaseException:
        log.exception("the worker failed")
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
