"""Batches: their size, and how long the first item waits for more items."""

from __future__ import annotations

import asyncio

from penstock.engine.batching import Batcher


async def test_full_batches_start_immediately_and_a_partial_one_after_its_wait() -> None:
    done: list[list[int]] = []
    third = asyncio.Event()

    async def work(group: list[int]) -> None:
        done.append(group)
        if len(done) == 3:
            third.set()

    group: Batcher[int] = Batcher(3, lambda: 0.01, work)
    for n in range(7):
        group.add(n)
    await asyncio.sleep(0)
    assert done == [[0, 1, 2], [3, 4, 5]]
    assert group.waiting == [6]
    await third.wait()
    assert (done[2], group.waiting) == ([6], [])


async def test_a_flush_starts_a_partial_batch_and_the_next_batch_has_its_own_timer() -> None:
    done: list[list[int]] = []

    async def work(group: list[int]) -> None:
        done.append(group)

    lingers = iter([0.01, 3600.0])
    group: Batcher[int] = Batcher(10, lambda: next(lingers), work)
    group.flush()
    assert not group.under_way, "an empty batch does not start"
    group.add(1)
    group.flush()
    group.add(2)
    await asyncio.sleep(0.05)
    assert (done, group.waiting) == ([[1]], [2]), (
        "the timer of the first batch does not start the second"
    )


async def test_several_batches_run_together_and_are_removed_when_done() -> None:
    free = asyncio.Event()

    async def work(group: list[int]) -> None:
        await free.wait()

    group: Batcher[int] = Batcher(1, lambda: 0.0, work)
    group.add(1)
    group.add(2)
    assert len(group.under_way) == 2
    free.set()
    await asyncio.gather(*group.under_way)
    await asyncio.sleep(0)
    assert not group.under_way
