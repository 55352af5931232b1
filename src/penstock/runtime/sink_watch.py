"""Waits for the sinks of a worker process: at its start, when it is idle, and at its end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from penstock.engine.flusher import Flusher
from penstock.errors import Unreachable

# Seconds for which a start waits for its sinks. A run ends within 10 s if a sink cannot be opened.
OPEN_TIMEOUT = 6.0
log = logging.getLogger("penstock")


class SinkGaveUp(Unreachable):
    """A sink made no progress for `sink.give_up_after`. Its rows stay in the outbox."""


async def wait_until_open(flushers: Sequence[Flusher], stop: asyncio.Event) -> None:
    """Wait until every sink is open, here or in another process. Return early if `stop` is set.

    Raises ConfigError or Unreachable if a sink cannot be opened.
    """
    opening = asyncio.gather(*(f.wait_until_open(OPEN_TIMEOUT) for f in flushers))
    stopped = asyncio.ensure_future(stop.wait())
    waiting: list[asyncio.Future[Any]] = [opening, stopped]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if opening.done():
            opening.result()
    finally:
        stopped.cancel()
        opening.cancel()
        # Read its result. Otherwise the loop logs the cancellation as an error.
        await asyncio.gather(opening, return_exceptions=True)


def stuck_sink(flushers: Sequence[Flusher], seconds: float) -> SinkGaveUp | None:
    """Return an error about the first sink without progress for `seconds`, or None."""
    for f in flushers:
        if f.stuck_for > seconds:
            return SinkGaveUp(
                f"sink {f.sink.name} took no rows for {seconds:g} s: {f.down or 'no answer'}",
                hint="mend the sink and run again: its rows wait in the outbox, none is lost",
            )
    return None


async def drain(flushers: Sequence[Flusher], grace: float) -> None:
    """Write the last rows within the grace. A sink that is down or does not answer is skipped."""

    async def one(f: Flusher) -> None:
        if not await f.drain(grace, patient=False):
            log.warning(
                "sink %s: %s. They stay in the outbox for the next run",
                f.sink.name,
                f.down or "rows are still waiting",
            )

    await asyncio.gather(*(one(f) for f in flushers))
