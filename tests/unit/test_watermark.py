"""The offset window of a partition.

For any order of settling, no open offset is below the watermark, and no settled offset is
delivered after a restart.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.rules.priority import TURNS, WEIGHTS, class_of, shares
from penstock.rules.watermark import SPAN, Window, settled_ahead


def window(*offsets: int, start: int = 0, epoch: int = 1) -> Window[str]:
    w: Window[str] = Window(epoch, start)
    for offset in offsets:
        assert w.add(offset, f"m{offset}")
    return w


@pytest.mark.parametrize(
    ("received", "settled", "watermark"),
    [
        ([], [], 5),  # no message received: the committed offset stays
        ([5, 6, 7], [], 5),
        ([5, 6, 7], [6, 7], 5),  # the first offset is open
        ([5, 6, 7], [6, 5], 7),
        ([5, 6, 7], [7, 6, 5], 8),
        ([9, 12], [], 9),  # gaps count as settled
        ([9, 12], [9], 12),
        ([9, 12], [9, 12], 13),
    ],
)
def test_the_watermark_is_the_first_offset_that_is_not_settled(
    received: list[int], settled: list[int], watermark: int
) -> None:
    w = window(*received, start=5)
    assert all(w.settle(offset, 1) for offset in settled)
    assert w.watermark == watermark


def test_an_offset_is_settled_once_and_only_in_its_assignment() -> None:
    w = window(5, 6, start=5, epoch=3)
    assert not w.settle(6, 2)
    assert w.settle(6, 3)
    assert not w.settle(6, 3)
    assert not w.settle(4, 3)
    assert not w.settle(7, 3)
    assert (w.watermark, len(w)) == (5, 1)


def test_an_offset_that_was_received_before_is_not_added_again() -> None:
    w = window(5, 6, start=5)
    assert not w.add(5, "m")
    assert w.settle(5, 1)
    assert not w.add(5, "m")
    assert w.watermark == 6


def test_a_run_of_offsets_is_added_only_if_no_offset_in_it_may_be_settled() -> None:
    w: Window[str] = Window(1, 3)
    assert w.add_run(5, ["a", "b", "c"])
    assert (list(w.open.items()), w.next, w.watermark) == ([(5, "a"), (6, "b"), (7, "c")], 8, 5)
    assert not w.add_run(7, ["c", "d"])
    assert w.settle(5, 1)
    assert w.settle(7, 1)
    again: Window[str] = Window(2, w.watermark, settled_ahead(w.watermark, w.metadata()))
    assert not again.add_run(6, ["b", "c", "d"])
    assert (len(again), again.next) == (0, 6)
    assert [offset for offset in (6, 7, 8) if again.add(offset, "m")] == [6, 8]
    assert again.add_run(9, ["e", "f"]), "all offsets that were settled before have been received"
    assert list(again.open) == [6, 8, 9, 10]
    assert settled_ahead(again.watermark, again.metadata()) == {7} == again.ahead


def test_after_a_restart_only_unsettled_offsets_are_open() -> None:
    w = window(*range(100, 110), start=100)
    for offset in (101, 103, 104, 109):
        w.settle(offset, 1)
    again: Window[str] = Window(2, w.watermark, settled_ahead(w.watermark, w.metadata()))
    assert [offset for offset in range(100, 112) if again.add(offset, "m")] == [
        100,
        102,
        105,
        106,
        107,
        108,
        110,
        111,
    ]


def test_settled_offsets_not_yet_redelivered_are_kept_after_a_second_restart() -> None:
    w = window(0, 1, 2, 3)
    w.settle(2, 1)
    second: Window[str] = Window(2, 0, settled_ahead(0, w.metadata()))
    assert second.add(0, "m")
    assert settled_ahead(second.watermark, second.metadata()) == {2}
    second.settle(0, 2)
    third: Window[str] = Window(
        3, second.watermark, settled_ahead(second.watermark, second.metadata())
    )
    assert [offset for offset in range(1, 4) if third.add(offset, "m")] == [1, 3]


def test_the_metadata_is_limited_and_offsets_beyond_it_are_redelivered() -> None:
    w: Window[str] = Window(1, 0)
    offsets = range(4 * SPAN)
    for offset in offsets:
        w.add(offset, "m")
    dice = random.Random(7)
    settled = {offset for offset in offsets[1:] if dice.random() < 0.5}
    for offset in settled:
        w.settle(offset, 1)
    text = w.metadata()
    assert len(text) < 4096
    assert settled_ahead(0, text) == {offset for offset in settled if offset < SPAN}


@pytest.mark.parametrize(
    "text", [None, "", "leader=3", "1:", "1:!!!", "1:AAAA", "2:eJxjAAAAAQAB", "1:" + "A" * 4000]
)
def test_metadata_of_another_program_is_ignored(text: str | None) -> None:
    assert settled_ahead(10, text) == frozenset()


def test_metadata_that_decompresses_to_too_many_bytes_is_ignored() -> None:
    import base64
    import zlib

    bomb = "1:" + base64.b64encode(zlib.compress(bytes(10_000_000))).decode()
    assert settled_ahead(0, bomb) == frozenset()


@given(
    st.lists(st.integers(1, 4), max_size=60), st.randoms(use_true_random=False), st.integers(0, 60)
)
def test_for_any_order_a_restart_redelivers_only_open_offsets(
    steps: list[int], dice: random.Random, cut: int
) -> None:
    offsets, at = [], 10
    for step in steps:
        offsets.append(at)
        at += step
    w = window(*offsets, start=10)
    order = offsets[:]
    dice.shuffle(order)
    done = set(order[:cut])
    before = w.watermark
    for offset in order[:cut]:
        assert w.settle(offset, 1)
        assert w.watermark >= before, "the watermark never decreases"
        before = w.watermark
    still = [offset for offset in offsets if offset not in done]
    assert w.watermark == (still[0] if still else (offsets[-1] + 1 if offsets else 10))
    assert len(w) == len(still)
    again: Window[str] = Window(2, w.watermark, settled_ahead(w.watermark, w.metadata()))
    assert [
        offset for offset in offsets if offset >= w.watermark and again.add(offset, "m")
    ] == still
    for offset in still:
        assert again.settle(offset, 2)
    assert again.watermark == max(again.next, before)
    assert again.metadata() == ""


def test_priority_classes_share_21_places_by_weight_for_all_batch_sizes() -> None:
    assert [TURNS.count(prio) for prio in range(3)] == list(WEIGHTS)
    for size in (1, 2, 5, 7, 20, 50):
        total, first = [0, 0, 0], 0
        while first < 2100:
            for prio, n in enumerate(shares(first, size)):
                total[prio] += n
            first += size
        assert sum(total) == first
        assert total[0] > 3 * total[1] > 9 * total[2] > 0
    assert [class_of(p) for p in (-3, 0, 1, 2, 9)] == [0, 0, 1, 2, 2]
