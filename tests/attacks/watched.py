"""`penstock`, with a file that records how long each turn of its event loop keeps the CPU.

Used as a command: `python watched.py FILE run shop.py`. Names below `.test` are this machine, so
that one site can have many hosts.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TICK = 0.005  # seconds between two timers
MIN_RECORDED = 0.02  # seconds of CPU time. Shorter turns are not recorded.


def watch(loop: asyncio.AbstractEventLoop, path: Path) -> None:
    """Append a line with the time of day and the CPU seconds of each long turn of the loop.

    A timer of the loop reads the CPU time of the loop's thread. Between two timers the thread runs
    for at most one tick, unless a callback keeps the CPU.
    """
    before = [0.0]

    def tick() -> None:
        used = time.thread_time()
        if used - before[0] >= MIN_RECORDED:
            with path.open("a") as file:
                file.write(f"{time.time():.3f} {used - before[0]:.3f}\n")
        before[0] = time.thread_time()
        loop.call_later(TICK, tick)

    def start() -> None:
        before[0] = time.thread_time()
        tick()

    loop.call_soon(start)


def resolve_test_names() -> None:
    system = socket.getaddrinfo

    def getaddrinfo(host: Any, *args: Any, **more: Any) -> Any:
        local = isinstance(host, str) and host.endswith(".test")
        return system("127.0.0.1" if local else host, *args, **more)

    socket.getaddrinfo = getaddrinfo


def main() -> None:
    resolve_test_names()
    path = Path(sys.argv.pop(1))
    from penstock.cli.main import main as penstock
    from penstock.runtime import supervisor

    usual = supervisor._loop_factory()

    def watched() -> asyncio.AbstractEventLoop:
        loop = usual() if usual is not None else asyncio.new_event_loop()
        watch(loop, path)
        return loop

    def factory() -> Callable[[], asyncio.AbstractEventLoop]:
        return watched

    supervisor._loop_factory = factory
    sys.exit(penstock())


if __name__ == "__main__":
    main()
