"""Mapping of findings beside the event loop: large payloads must not stop the loop."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

from penstock.authoring.pipeline import Pipeline
from penstock.intake.accept import judge, judge_beside_the_loop
from penstock.intake.mapping import Mapping
from penstock.ports import Finding

LARGE = {"url": "http://shop.test/1", "x": [{"a": 1, "b": 2}] * 4000}  # 60 KB of JSON


def mapping(**options: Any) -> Mapping:
    pipeline = Pipeline("test")
    pipeline.source("seeds:urls.txt", **options)
    return Mapping(pipeline.sources[0])


async def longest_turn(work: Any) -> float:
    """Return the longest CPU time of the loop's thread between two turns during `work`."""
    turns, before = [0.0], time.thread_time()
    task = asyncio.ensure_future(work)
    while not task.done():
        await asyncio.sleep(0)
        now = time.thread_time()
        turns.append(now - before)
        before = now
    await task
    return max(turns)


async def test_expressions_over_large_payloads_leave_the_event_loop() -> None:
    found = [Finding(id=str(n), payload=LARGE) for n in range(50)]
    expressions = mapping(map={"url": "x[?a > `2`].b | [0] || url"})
    assert await longest_turn(judge_beside_the_loop(expressions, found)) < 0.05


async def test_a_hook_runs_on_the_loop_with_turns_in_between() -> None:
    threads: set[int] = set()

    def hook(payload: dict[str, Any]) -> dict[str, Any]:
        threads.add(threading.get_ident())
        time.sleep(0.0005)
        return {}

    found = [Finding(id=str(n), payload={"url": "http://shop.test/1"}) for n in range(500)]
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    counter = asyncio.ensure_future(count())
    taken = await judge_beside_the_loop(mapping(hook=hook), found)
    counter.cancel()
    assert (len(taken.events), threads) == (500, {threading.get_ident()})
    assert turns >= 5


async def test_the_results_are_those_of_judge_in_the_same_order() -> None:
    found = [
        Finding(id=str(n), payload={"url": f"http://shop.test/{n}" if n % 3 else 1, "n": n})
        for n in range(300)
    ]
    for options in ({}, {"where": "n != `7`"}):
        one = judge(mapping(**options), found)
        two = await judge_beside_the_loop(mapping(**options), found)
        assert [e.id for e in one.events] == [e.id for e in two.events]
        assert [(f.id, why) for f, why, _ in one.refused] == [
            (f.id, why) for f, why, _ in two.refused
        ]
        assert one.skipped == two.skipped
