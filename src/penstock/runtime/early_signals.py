"""Holds a SIGTERM that arrives while a worker process starts.

The default action of SIGTERM would end the process with an error. This module imports only the
standard library, so that the handler is set before the heavy imports of a worker.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

_received: list[int] = []


@contextlib.contextmanager
def hold_sigterm() -> Iterator[None]:
    """Record a SIGTERM until the worker sets its own handlers. A second one ends the process."""
    before = signal.signal(signal.SIGTERM, _record)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        _received.clear()


def sigterm_received() -> bool:
    """Return True if a SIGTERM arrived during the start. Call this after setting handlers."""
    return bool(_received)


def _record(number: int, _: object) -> None:
    if _received:
        os._exit(128 + number)
    _received.append(number)
