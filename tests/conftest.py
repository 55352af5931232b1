"""What every test gets: an environment without PENSTOCK_ variables, and `async def` tests that run
in a fresh event loop.

No asyncio plugin: the hook below is all we need of one. Each test has its own loop (closed at its
end, so a task left behind is an error of that test) and a time limit, so a hang is a failure and
not a stuck run. There are no async fixtures: a test that needs one opens it with `async with`. A
hypothesis test calls `asyncio.run` itself.

Properties are tried with the same examples every time, and with no clock: what others do on this
machine for a second is no fault of a property, and a submission is not where a new example is
looked for. Look for one with `pytest --hypothesis-profile=search` (20,000 examples) or `long`
(2,000, part of `./dev test full`), and keep what you find as an `@example`.
"""

from __future__ import annotations

import asyncio
import inspect
import os

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ["tests.servers", "tests.rerun"]

LIMIT, SLOW_LIMIT = (
    180.0,
    900.0,
)  # seconds; the second for tests marked slow. Far more than any needs: a machine that is busy with others is no hang

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
def _no_settings_of_the_developer(monkeypatch: pytest.MonkeyPatch) -> None:
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
