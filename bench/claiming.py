"""Measured part of `claim`: slices of receive, admit, begin and conclude, on two stores in turn.

It uses the ledger code of the product.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from penstock.config import files as config
from penstock.engine.settings import SinkBinding
from penstock.errors import BadEnvelope
from penstock.intake.accept import new_id
from penstock.model import Event, Record, decode_event, page_id
from penstock.ports import Accepted, Admitted, Delivery, End, PageMeta, Subscription
from penstock.rules.events import event_of
from penstock.runtime.stores import Stores, open_stores

RECEIVE, BEGIN, CONCLUDE = 256, 16, 128  # batch sizes, as of a worker at full speed
SLICE = 2 * RECEIVE
FRESH = 1_000_000_000  # first number of URLs that are not in a backlog
STEPS = ("receive", "admit", "begin", "claim", "conclude")
BODY = b"<p>a quiet kettle for a little kitchen</p>" * 50
FIELDS = b'{"sku":"P-1","name":"Copper Lamp","price":"12.50"}'


@dataclass
class Costs:
    """CPU µs per event of each slice, by step. Slice i of `few` ran next to slice i of `many`."""

    few: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    many: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def ratio(self, step: str) -> float:
        return statistics.median(
            many / few for few, many in zip(self.few[step], self.many[step], strict=True)
        )

    def medians(self) -> dict[str, dict[str, float]]:
        return {
            step: {
                "few": round(statistics.median(self.few[step]), 2),
                "many": round(statistics.median(self.many[step]), 2),
            }
            for step in STEPS
        }


def opened(directory: Path) -> Stores:
    """Open the stores of that directory as a worker does.

    With full durability, a rate limit that is never reached, and the outbox of one file sink.
    """
    stores = open_stores(config.load({"pace.rate": "100000"}, {}, directory).config, worker="bench")
    stores.with_settings(
        msgspec.structs.replace(stores.lifecycle.settings, sinks=(SinkBinding("jsonl:bench"),))
    )
    return stores


def compare(
    few: Path, many: Path, *, slices: int, fresh: Callable[[int, int], Sequence[str]]
) -> Costs:
    """Measure both backlogs.

    `fresh(start, end)` returns new URLs by number, which replace the events that were taken.
    """
    return asyncio.run(_compare(few, many, slices, fresh))


async def _compare(
    few: Path, many: Path, slices: int, fresh: Callable[[int, int], Sequence[str]]
) -> Costs:
    costs = Costs()
    sides = [
        (opened(directory), into) for directory, into in ((few, costs.few), (many, costs.many))
    ]
    try:
        subscriptions = [
            stores.topics.subscribe("requests", "main", owner="bench", lease=600.0)
            for stores, _ in sides
        ]
        for i in range(slices + 1):
            for (stores, into), subscription in zip(sides, subscriptions, strict=True):
                measured = await _slice(stores, subscription)
                if i:  # the first slice is the warm-up
                    for step, us in measured.items():
                        into[step].append(us)
                more = [
                    event_of(url, id_=new_id())
                    for url in fresh(FRESH + i * SLICE, FRESH + (i + 1) * SLICE)
                ]  # keeps the size of the backlog
                assert await stores.lifecycle.accept(more) == [Accepted.NEW] * SLICE
    finally:
        for stores, _ in sides:
            stores.close()
    return costs


async def _slice(stores: Stores, subscription: Subscription) -> dict[str, float]:
    spent = dict.fromkeys(STEPS, 0.0)
    done = 0
    while done < SLICE:
        t0 = time.process_time()  # of all threads, because commits run on a separate thread
        got = await subscription.receive(min(RECEIVE, SLICE - done), 0.1)
        t1 = time.process_time()
        assert got, "waiting events can be received: no limit is reached"
        pairs: list[tuple[Delivery, Event | BadEnvelope]] = [(d, decode_event(d.body)) for d in got]
        t2 = time.process_time()
        admitted = await stores.admission.admit(pairs, fetches=True)
        t3 = time.process_time()
        work = [(d, decode_event(d.body), a) for d, a in zip(got, admitted, strict=True)]
        fences: list[int | None] = []
        t4 = time.process_time()
        for i in range(0, len(work), BEGIN):
            group = work[i : i + BEGIN]
            fences += await stores.admission.begin(group, asks=[True] * len(group))
        t5 = time.process_time()
        ends = [_end(d, e, a, fence) for (d, e, a), fence in zip(work, fences, strict=True)]
        t6 = time.process_time()
        for i in range(0, len(ends), CONCLUDE):
            group_of_ends = ends[i : i + CONCLUDE]
            assert all(
                await stores.lifecycle.conclude(
                    [end for end, _ in group_of_ends], [body for _, body in group_of_ends]
                )
            )
        t7 = time.process_time()
        for step, seconds in (
            ("receive", t1 - t0),
            ("admit", t3 - t2),
            ("begin", t5 - t4),
            ("conclude", t7 - t6),
        ):
            spent[step] += seconds
        done += len(got)
    spent["claim"] = spent["receive"] + spent["admit"] + spent["begin"]
    return {step: seconds / done * 1e6 for step, seconds in spent.items()}


def _end(d: Delivery, e: Event, a: Admitted, fence: int | None) -> tuple[End, tuple[str, bytes]]:
    assert a.verdict == "go", "each URL is requested once"
    assert fence is not None, "no other worker holds it"
    body = BODY + e.url.encode()
    page = page_id(body)
    meta = PageMeta(
        page=page,
        url=e.url,
        status=200,
        headers={"content-type": "text/html"},
        fetched_at=time.time(),
        size=len(body),
    )
    record = Record(
        extractor="product",
        version=1,
        key=e.url,
        index=0,
        fields=FIELDS,
        hash=bytes.fromhex(page[:32]),
    )
    return (
        End(
            event=e,
            row=a.row,
            delivery=d,
            fence=fence,
            outcome="success",
            meta=meta,
            records=[record],
            extractors="product@1",
            response_status=200,
            response_hash=page,
        ),
        (page, body),
    )
