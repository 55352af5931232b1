"""The rig of the conformance suites for ledgers, claims and pages, and the decorator of tests.

See `ledger_suite`, `claims_suite` and `pages_suite` for the tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import multiprocessing
import os
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

W = TypeVar("W")
T = TypeVar("T")
Test = Callable[[Any, Any], Awaitable[None]]


class StoreRig(Generic[W]):
    """Base class of a rig. Only `open` is required.

    A test runner makes a new instance for each test. All workers of one instance share one store,
    which is empty when the first worker opens it. Tests use real time. A store whose clock is an
    argument gets a manual clock, and its rig overrides `now` and `sleep`.
    """

    limit = 120.0  # seconds that a test may take
    _ends: contextlib.AsyncExitStack

    async def open(self) -> W:
        """Open the store for a new worker. The test calls it once for each of its workers.

        Register the function that closes the worker with `at_end`.
        """
        raise NotImplementedError

    def now(self) -> float:
        return time.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def at_end(self, close: Callable[[], object]) -> None:
        """Call `close` after the test, and await its result if that is possible."""

        async def call() -> None:
            result = close()
            if inspect.isawaitable(result):
                await result

        self._ends.push_async_callback(call)

    # -- for the decorator -------------------------------------------------------------------------

    async def _with_worker(self, work: Test) -> None:
        async with asyncio.timeout(self.limit), contextlib.AsyncExitStack() as self._ends:
            await work(self, await self.open())

    def _kill_process_after(self, work: Test) -> None:
        """Run `work` with a new worker in a child process, which SIGKILL ends."""
        # A fork would copy threads of clients in the middle of their work.
        child = multiprocessing.get_context("spawn").Process(target=_run_and_die, args=(self, work))
        child.start()
        child.join(self.limit)
        if child.exitcode is None:
            child.terminate()
        assert child.exitcode == -signal.SIGKILL, "the child process failed before it was killed"


def _run_and_die(rig: StoreRig[Any], work: Test) -> None:
    """Run `work`, then kill this process, unless `work` has killed it in the middle."""

    async def then_die(rig: Any, worker: Any) -> None:
        await work(rig, worker)
        kill_this_process()

    asyncio.run(rig._with_worker(then_die))


def kill_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60.0)  # the signal arrives while this function sleeps


def sentence(*, killed_after: Test | None = None) -> Callable[[Test], Callable[[Any], None]]:
    """Turn `async def test(self, worker)` into a plain test method with a new store.

    With `killed_after`, that function first runs with another worker of the same store in a child
    process, which is killed. The child process gets a pickled copy of the rig.
    """

    def wrap(test: Test) -> Callable[[Any], None]:
        def runner(self: StoreRig[Any]) -> None:
            if killed_after is not None:
                self._kill_process_after(killed_after)
            asyncio.run(self._with_worker(test))

        runner.__name__, runner.__doc__ = test.__name__, test.__doc__
        runner.__qualname__, runner.__module__ = test.__qualname__, test.__module__
        return runner

    return wrap
