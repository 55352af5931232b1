"""Ends the tasks of a worker process."""

from __future__ import annotations

import asyncio
import io
import logging
from collections.abc import Sequence

log = logging.getLogger("penstock")


async def wait_or_cancel(
    tasks: Sequence[asyncio.Task[None]], *, timeout: float
) -> list[BaseException | None]:
    """Wait for draining workers, and return their exceptions. Cancel a worker that is too slow.

    The deliveries of a cancelled worker are redelivered when their leases expire.
    """
    _, late = await asyncio.wait(tasks, timeout=timeout)
    for task in late:
        stack = io.StringIO()
        task.print_stack(file=stack)
        log.error(
            "%s does not end; leaving it where it stands:\n%s", task.get_name(), stack.getvalue()
        )
        task.cancel()
    return [task.exception() for task in tasks if task.done() and not task.cancelled()]


async def cancel_all(
    tasks: Sequence[asyncio.Task[None]], *, timeout: float
) -> list[BaseException | None]:
    """Cancel tasks until all have ended. Return their exceptions.

    A library may lose a cancellation, so tasks that still run are cancelled again. `wait_for`
    of Python 3.11 loses a cancellation if the awaited task finishes at the same moment.
    """
    left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=timeout)
    return [task.exception() for task in tasks if not task.cancelled()]
