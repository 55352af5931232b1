"""The thread of a sink: its last calls run although one of them fails."""

from __future__ import annotations

import threading

from penstock.engine.blocking_thread import BlockingThread


def test_a_sink_that_fails_to_close_does_not_keep_its_lock() -> None:
    released = threading.Event()

    def close() -> None:
        raise OSError("the target is gone")

    BlockingThread("flush-test").stop(close, released.set)
    assert released.wait(5.0)
