"""Thread for the blocking calls of one sink, one call at a time."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


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
        """End the thread after all earlier calls and then `last`. Does not wait."""
        for work in last:
            self._calls.put(work)
        self._calls.put(None)

    def _run(self) -> None:
        while (perform := self._calls.get()) is not None:
            perform()


def _wrapped(error: BaseException) -> RuntimeError:
    wrapped = RuntimeError(f"{type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
