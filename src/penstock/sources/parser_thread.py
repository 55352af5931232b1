"""The thread in which a process parses the documents of its sources, one after the other.

Documents come from outside. A hostile one may take seconds and 64 MiB. With one thread they do not
take these at the same time, and the event loop and its other threads stay free.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

# The thread starts at the first document, so a process without sources has none.
_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="penstock-parser")


async def in_parser_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `work` in the thread of the parsers, and return its result."""
    return await asyncio.get_running_loop().run_in_executor(_thread, partial(work, *args, **kwargs))
