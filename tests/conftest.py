"""Settings for all tests: no PENSTOCK_ variables, and each `async def` test in a new event loop.

The hook below replaces an asyncio plugin. Each test has its own loop, which is closed when the
test ends, so a leaked task is an error of that test. Each test also has a time limit, so a hang
fails the test and does not block the run. There are no async fixtures: a test opens an async
resource with `async with`. A hypothesis test calls `asyncio.run` itself.

Hypothesis tests use the same examples in every run and have no deadline, because other processes
may slow the machine down. Search for new examples with `pytest --hypothesis-profile=search`
(20,000 examples) or `long` (2,000, part of `./dev test full`). Add a failing example to its test
as an `@example`.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import signal

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ["tests.servers", "tests.rerun"]

# A shell without job control starts background commands with SIGINT ignored, and their children
# inherit that. Tests send SIGINT to such children.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Seconds. SLOW_LIMIT is for tests marked slow. Both are much longer than any test needs, because a
# busy machine must not look like a hang.
LIMIT, SLOW_LIMIT = 180.0, 900.0

settings.register_profile(
    "search",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
    max_examples=20_000,
)
settings.register_profile(
    "same", settings.get_profile("search"), derandomize=True, database=None, max_examples=100
)
settings.register_profile("long", settings.get_profile("search"), max_examples=2_000)
settings.load_profile("same")


@pytest.fixture(autouse=True)
def _unset_penstock_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PENSTOCK_")]:
        monkeypatch.delenv(name)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {
        name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters
    }
    limit = SLOW_LIMIT if pyfuncitem.get_closest_marker("slow") else LIMIT

    async def limited() -> None:
        async with asyncio.timeout(limit):
            await pyfuncitem.obj(**arguments)

    asyncio.run(limited())
    return True
