"""Breakers on a real ledger: hosts, extractors and topics that are paused, and their events."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.embedded.test_books import Rig, assert_books_balance

from penstock.model import Reason
from penstock.operate.hosts import Domains
from penstock.operate.waiting import resume_extractor, stuck_in, waits_in
from penstock.ports import End
from penstock.rules import breaker
from penstock.rules.events import event_of
from penstock.rules.reasons import code_of
from penstock.rules.waiting import HOST_RECHECK

FEW = breaker.Limits(at_least=3, dead_share=0.5)
A, B = "a.example", "b.example"


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path, breaker=FEW)


def domains(rig: Rig) -> Domains:
    return Domains(rig.uow, rig.clock, rig.limits, "penstock")


async def accept(rig: Rig, host: str, n: int, prefix: str = "e") -> list[str]:
    ids = [f"{prefix}-{host}-{i}" for i in range(n)]
    await rig.lifecycle.accept([event_of(f"http://{host}/{id_}", id_=id_) for id_ in ids])
    return ids


async def end_all(rig: Rig, make: Callable[[End], dict[str, Any]]) -> list[End]:
    """Start everything that may start, and end it in one transaction."""
    ends = []
    for d, e, a, fence in await rig.begin(await rig.admit()):
        end = End(event=e, delivery=d, fence=fence, row=a.row, outcome="success", stage="fetch")
        for name, value in make(end).items():
            setattr(end, name, value)
        ends.append(end)
    if ends:
        await rig.lifecycle.conclude(ends)
    assert_books_balance(rig)
    return ends


def dies(*hosts: str, **more: Any) -> Callable[[End], dict[str, Any]]:
    """Let events of these hosts end dead, and all others succeed."""
    how = {"outcome": "dead", "reason": "HTTP 403", "error_class": "blocked"} | more
    return lambda end: (
        how if end.event.key in hosts else {"extractors": "product@1#x", "extracted": True}
    )


def opened(rig: Rig) -> list[str]:
    return [b.what for b in rig.uow.snapshot(lambda tx: tx.breakers.opened())]


def paused_topics(rig: Rig) -> dict[str, str]:
    return rig.uow.snapshot(lambda tx: tx.queue.paused())


async def test_a_failing_host_is_paused_and_another_host_continues(rig: Rig) -> None:
    await accept(rig, A, 3)
    await accept(rig, B, 3)
    await end_all(rig, dies(A))
    assert opened(rig) == [f"host:{A}"]
    assert paused_topics(rig) == {}
    assert rig.claims.blocked_until(A) == math.inf
    assert rig.claims.blocked_until(B) == 0.0

    waiting = await accept(rig, A, 5, "later")
    good = await accept(rig, B, 2, "later")
    ends = await end_all(rig, dies(A))
    assert sorted(end.event.id for end in ends) == good
    assert {rig.status(id_) for id_ in waiting} == {"delayed"}
    assert {rig.row(id_)["waits_for"] for id_ in waiting} == {f"host:{A}"}
    assert {code_of(rig.row(id_)["reason"]) for id_ in waiting} == {Reason.HOST_PAUSED}


async def test_resuming_a_host_makes_its_events_due_and_counts_from_zero(rig: Rig) -> None:
    await accept(rig, A, 3)
    await end_all(rig, dies(A))
    waiting = await accept(rig, A, 5, "later")
    assert await end_all(rig, dies(A)) == []
    assert domains(rig).resume(A) == 5
    assert opened(rig) == []
    rig.clock.advance(0.2)
    await rig.claims.refresh()
    ends = await end_all(rig, dies())
    assert sorted(end.event.id for end in ends) == waiting
    await accept(rig, A, 2, "again")
    await end_all(rig, dies(A))
    assert opened(rig) == [], "two dead events after the resume are below the limit"


async def test_the_reason_of_a_pause_names_the_counts_and_an_example(rig: Rig) -> None:
    await accept(rig, A, 4)
    await end_all(rig, dies(A))
    (found,) = rig.uow.snapshot(waits_in)
    assert found.cause == f"host:{A}"
    assert found.reason == (
        "breaker: 4 of 4 events ended dead within 60 s: blocked, for example HTTP 403"
    )
    assert found.next_step == f"penstock domains resume {A}"


async def test_events_that_were_not_found_never_pause_their_host(rig: Rig) -> None:
    await accept(rig, A, 20)
    await end_all(rig, dies(A, error_class="not_found", reason="HTTP 404"))
    assert opened(rig) == []
    await accept(rig, A, 3, "later")
    await end_all(rig, dies(A))
    assert opened(rig) == [], "three of 23 ends: URLs that were not found count as answers"


async def test_a_failed_extraction_counts_against_its_extractor_only(rig: Rig) -> None:
    await accept(rig, A, 3)
    how = dies(A, stage="extract", error_class="permanent", failed_extractors=("product",))
    await end_all(rig, how)
    assert opened(rig) == ["extractor:product"]
    await rig.lifecycle.breakers.refresh()
    assert rig.lifecycle.breakers.extractors == {"product"}
    await accept(rig, A, 1, "later")
    assert len(await end_all(rig, dies())) == 1, "the host is still fetched"


async def test_an_unchanged_page_does_not_count_for_its_extractor(rig: Rig) -> None:
    await accept(rig, A, 20)
    await end_all(rig, lambda end: {"extractors": "product@1#x", "reason": "unchanged"})
    await accept(rig, A, 3, "later")
    how = dies(A, stage="extract", error_class="permanent", failed_extractors=("product",))
    await end_all(rig, how)
    assert opened(rig) == ["extractor:product"], "all three pages that were extracted failed"


async def test_dead_events_outside_the_window_are_not_counted(rig: Rig) -> None:
    for i in range(4):
        await accept(rig, A, 1, f"{i}")
        await end_all(rig, dies(A))
        rig.clock.advance(70.0)
    assert opened(rig) == []


@pytest.mark.parametrize(
    ("hosts", "good", "expected"), [(1, 1, False), (2, 3, False), (2, 2, True), (5, 20, True)]
)
async def test_the_topic_is_paused_if_many_hosts_are_paused_for_the_same_cause(
    rig: Rig, hosts: int, good: int, expected: bool
) -> None:
    failing = [f"f{i}.example" for i in range(hosts)]
    for host in [f"g{i}.example" for i in range(good)]:
        await accept(rig, host, 1)
    for host in failing:
        await accept(rig, host, 3)
    await end_all(rig, dies(*failing))
    assert len(opened(rig)) == hosts
    assert bool(paused_topics(rig)) is expected
    if expected:
        assert code_of(paused_topics(rig)["requests"]) is Reason.BREAKER_HOSTS


async def test_hosts_that_are_paused_for_different_causes_do_not_pause_the_topic(rig: Rig) -> None:
    await accept(rig, A, 3)
    await end_all(rig, dies(A))
    await accept(rig, B, 3)
    await end_all(rig, dies(B, error_class="transient", reason="HTTP 500"))
    assert opened(rig) == [f"host:{A}", f"host:{B}"]
    assert paused_topics(rig) == {}


async def test_a_retry_at_a_paused_host_waits_for_the_host(rig: Rig) -> None:
    await accept(rig, A, 5)
    begun = await rig.begin(await rig.admit())
    until = rig.clock.now() + 600.0
    retry: dict[str, Any] = {
        "reason": "HTTP 500",
        "error_class": "transient",
        "stage": "fetch",
        "until": until,
    }
    await rig.conclude(begun[0], "retry", **retry)
    for start in begun[1:4]:
        await rig.die(start)
    await rig.conclude(begun[4], "retry", **retry)
    ids = [begun[0][1].id, begun[4][1].id]
    assert [rig.row(id_)["waits_for"] for id_ in ids] == [f"host:{A}"] * 2
    assert [found.cause for found in rig.uow.snapshot(stuck_in)] == [f"host:{A}"]
    rig.clock.advance(700.0)
    await rig.maintenance.release_due()
    assert rig.status(*ids) == "delayed delayed", "the end of the back-off does not resume the host"
    assert domains(rig).resume(A) == 2
    await rig.claims.refresh()
    assert sorted(e.id for _, e, _, _ in await rig.start()) == sorted(ids)


async def park_pages(rig: Rig, begun: Sequence[Any]) -> None:
    for start in begun:
        await rig.conclude(
            start,
            "park",
            body=b"page",
            stage="extract",
            reason="paused",
            until=rig.clock.now() + 86400.0,
            waits_for="extractor:product",
        )


async def test_pages_of_a_paused_extractor_are_kept_and_become_due(rig: Rig) -> None:
    await accept(rig, A, 3)
    how = dies(A, stage="extract", error_class="permanent", failed_extractors=("product",))
    await end_all(rig, how)
    ids = await accept(rig, A, 2, "later")
    await park_pages(rig, await rig.begin(await rig.admit()))
    assert {rig.row(id_)["waits_for"] for id_ in ids} == {"extractor:product"}
    assert [w.events for w in rig.uow.snapshot(stuck_in)] == [2]

    assert resume_extractor(rig.uow, "product", rig.clock) == 2
    assert rig.uow.snapshot(stuck_in) == []
    rig.clock.advance(0.1)
    held = await rig.admit()
    assert [bool(a.page) for _, _, a in held] == [True, True], "no page is fetched again"
    assert resume_extractor(rig.uow, "product", rig.clock) is None


async def test_a_page_that_is_delayed_after_its_extractor_was_resumed_is_released(
    rig: Rig,
) -> None:
    await accept(rig, A, 1)
    await park_pages(rig, await rig.begin(await rig.admit()))
    assert rig.status(f"e-{A}-0") == "pending"
    assert len(await rig.receive()) == 1


async def test_an_event_that_is_delayed_after_its_host_was_resumed_is_tried_again_soon(
    rig: Rig,
) -> None:
    await accept(rig, A, 3)
    await accept(rig, B, 1)
    begun = await rig.begin(await rig.admit())
    for start in begun[:3]:
        await rig.die(start)
    domains(rig).resume(A)
    day = rig.clock.now() + 86400.0
    # This request was refused before the resume, for example after a redirect to the paused host.
    await rig.conclude(begun[3], "park", stage="fetch", until=day, waits_for=f"host:{A}")
    assert rig.status(f"e-{B}-0") == "delayed"
    rig.clock.advance(HOST_RECHECK + 1.0)
    await rig.start(f"e-{B}-0")


async def test_after_a_topic_is_resumed_its_paused_hosts_do_not_pause_it_again(rig: Rig) -> None:
    await accept(rig, A, 3)
    await accept(rig, B, 3)
    await end_all(rig, dies(A, B))
    assert paused_topics(rig)

    def resume(tx: Any) -> None:
        tx.queue.pause("requests", None)
        tx.breakers.stop_counting()

    rig.uow.write_now(resume)
    await accept(rig, "c.example", 3)
    await end_all(rig, dies("c.example"))
    assert len(opened(rig)) == 3
    assert paused_topics(rig) == {}


async def test_old_ends_are_deleted(rig: Rig) -> None:
    await accept(rig, A, 2)
    await end_all(rig, dies(A))
    assert rig.sql("SELECT count(*) FROM ends")[0][0] > 0
    now = rig.clock.now() + 1000.0
    rig.uow.write_now(lambda tx: tx.breakers.prune(now))
    assert rig.sql("SELECT count(*) FROM ends") == [(0,)]
