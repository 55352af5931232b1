"""Waits of a worker process for its sinks."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any, cast

from penstock.clock import SystemClock
from penstock.engine.flusher import Flusher
from penstock.locks import FileLock
from penstock.runtime.sink_watch import wait_until_open


async def test_a_stop_during_the_start_of_a_sink_logs_no_error(tmp_path: Path) -> None:
    logged: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context))
    nothing = cast(Any, None)
    # The flusher does not run, so its sink is never opened.
    flusher = Flusher(nothing, nothing, FileLock(tmp_path / "sink.lock"), SystemClock())
    flusher.sink = cast(Any, type("NamedSink", (), {"name": "slow"}))
    stop = asyncio.Event()
    asyncio.get_running_loop().call_later(0.05, stop.set)
    await wait_until_open([flusher], stop)
    await asyncio.sleep(0.05)
    gc.collect()
    assert logged == []
