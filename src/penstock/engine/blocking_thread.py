"""Thread for the blocking calls of one sink, one call at a time."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

T = TypeVar("T")
log = logging.getLogger("penstock.flusher")


class BlockingThread:
    """A daemon thread: a call that never returns does not hold the end of the process.

    The threads of `concurrent.futures` are joined at the end of the process.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def call(self, work: Callable[..., T], *args: object) -> asyncio.Future[T]:
        """Run `work` after all earlier calls. Await the result in the event loop of the caller."""
        future: Future[T] = Future()

        def perform() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = work(*args)
            except StopIteration as e:  # a future cannot hold it
                future.set_exception(_wrapped(e))
            except Exception as e:
                future.set_exception(e)
            except BaseException as e:  # SystemExit of a plug-in must not end the worker
                future.set_exception(_wrapped(e))
            else:
                future.set_result(result)

        self._calls.put(perform)
        return asyncio.wrap_future(future)

    def stop(self, *last: Callable[[], None]) -> None:
        """End the thread after all earlier calls and then `last`. Does not wait.

        All of `last` run, also if one of them raises an exception.
        """
        for work in last:
            self._calls.put(partial(_try, work))
        self._calls.put(None)

    def _run(self) -> None:
        while (perform := self._calls.get()) is not None:
            perform()


def _try(work: Callable[[], None]) -> None:
    try:
        work()
    except Exception:
        log.exception("the last call of a stopped thread failed")


def _wrapped(error: BaseException) -> RuntimeError:
    wrapped = RuntimeError(f"{type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
