"""Tests of fair hand-out: shares of priority classes, rotation of keys, ordered topics, delays."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.rules.handout import Backlog, allot
from penstock.rules.priority import WEIGHTS


class Message(msgspec.Struct, eq=False):
    key: str
    n: int = 0
    priority: int = 1
    due: float = 0.0


def backlog(*messages: Message, ordered: bool = False) -> Backlog[Message]:
    made: Backlog[Message] = Backlog(ordered=ordered)
    for message in messages:
        made.put(message)
    return made


def flood(key: str, n: int, priority: int = 1) -> list[Message]:
    return [Message(key, i, priority) for i in range(n)]


# -- allot -----------------------------------------------------------------------------------------


def test_keys_share_a_batch_evenly() -> None:
    counts = allot([[], [("a", 90), ("b", 90), ("c", 90)], []], 0, 30, 30).values()
    # Each of the two passes, by share and without, may give one message more to the first keys.
    assert sum(counts) == 30
    assert max(counts) - min(counts) <= 2


def test_places_that_a_short_key_leaves_go_to_the_other_keys() -> None:
    assert allot([[], [("a", 1), ("b", 90)], []], 0, 9, 9) == {(1, "a"): 1, (1, "b"): 8}


def test_the_longest_waiting_key_gets_the_last_place() -> None:
    assert allot([[], [("a", 5), ("b", 5)], []], 0, 3, 3) == {(1, "a"): 2, (1, "b"): 1}


def test_classes_get_their_shares_and_idle_classes_leave_theirs() -> None:
    full = [[("h", 100)], [("n", 100)], [("l", 100)]]
    assert allot(full, 0, 21, 21) == {(0, "h"): 16, (1, "n"): 4, (2, "l"): 1}
    assert allot([[], [("n", 100)], [("l", 100)]], 0, 21, 21) == {(1, "n"): 20, (2, "l"): 1}


def test_a_class_that_is_reached_in_single_places_is_not_starved() -> None:
    full = [[("h", 100)], [("n", 100)], [("l", 100)]]
    counts = Counter(prio for first in range(21) for prio, _ in allot(full, first, 1, 1))
    assert tuple(counts[prio] for prio in range(len(WEIGHTS))) == WEIGHTS


_KEYS = st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(1, 9)), unique_by=lambda x: x[0])


@given(st.tuples(_KEYS, _KEYS, _KEYS), st.integers(0, 50), st.integers(1, 40), st.integers(1, 40))
def test_allot_fills_the_batch_and_exceeds_no_limit(
    keys: tuple[list[tuple[str, int]], ...], first: int, limit: int, per_key: int
) -> None:
    allotted = allot(keys, first, limit, per_key)
    most = {(prio, k): min(n, per_key) for prio, some in enumerate(keys) for k, n in some}
    assert sum(allotted.values()) == min(limit, sum(most.values()))
    assert all(0 < n <= most[at] for at, n in allotted.items())


# -- the backlog -----------------------------------------------------------------------------------


def test_a_key_with_many_messages_does_not_delay_another_key() -> None:
    b = backlog(*flood("a", 50), Message("b"))
    got = b.take(4)
    assert Counter(m.key for m in got) == {"a": 3, "b": 1}
    assert [m.n for m in got if m.key == "a"] == [0, 1, 2]
    assert b.ready == 47


def test_a_batch_has_at_most_per_key_messages_of_a_key_across_classes() -> None:
    b = backlog(*flood("a", 5, 0), *flood("a", 5, 2), Message("b"))
    assert Counter(m.key for m in b.take(10, 2)) == {"a": 2, "b": 1}


def test_the_backlog_shares_single_places_between_classes() -> None:
    b = backlog(*(m for priority in range(3) for m in flood("k", 30, priority)))
    counts = Counter(b.take(1)[0].priority for _ in range(21))
    assert tuple(counts[prio] for prio in range(len(WEIGHTS))) == WEIGHTS


def test_available_counts_what_one_take_finds() -> None:
    b = backlog(*flood("a", 5), *flood("b", 1), *flood("c", 3, 0))
    assert [b.available(priority, 2) for priority in range(3)] == [2, 3, 0]
    assert len(b.take(100, 2)) == 5


def test_a_delayed_message_is_taken_only_after_it_was_released() -> None:
    late = Message("a", due=5.0)
    b = backlog(late, Message("b"))
    assert [m.key for m in b.take(9)] == ["b"]
    assert b.next_due() == 5.0
    assert list(b) == [late]
    assert list(b.pop_due(4.9)) == []
    assert list(b.pop_due(5.0)) == [late]
    assert b.next_due() is None


def test_an_ordered_key_is_skipped_until_its_message_is_settled() -> None:
    b = backlog(*flood("a", 2), *flood("b", 1), ordered=True)
    assert [(m.key, m.n) for m in b.take(9)] == [("a", 0), ("b", 0)]
    assert b.take(9) == []
    b.free_key("a")
    assert [(m.key, m.n) for m in b.take(9)] == [("a", 1)]


def test_an_ordered_key_waits_for_its_first_message_to_be_due() -> None:
    b = backlog(Message("a", 0, due=5.0), Message("a", 1), ordered=True)
    assert b.take(9, now=1.0) == []
    assert list(b.pop_due(5.0)) == []
    assert [m.n for m in b.take(9, now=5.0)] == [0]


def test_a_message_that_is_put_first_keeps_its_place() -> None:
    b = backlog(*flood("a", 3))
    (m,) = b.take(1)
    b.put(m, first=True)
    assert [m.n for m in b.take(9)] == [0, 1, 2]


@pytest.mark.parametrize("ordered", [False, True])
def test_drop_removes_ready_and_delayed_messages(ordered: bool) -> None:
    b = backlog(*flood("a", 3), Message("b", due=5.0), Message("c", due=5.0), ordered=ordered)
    assert sorted(m.key for m in b.drop(lambda m: m.key != "c")) == ["a", "a", "a", "b"]
    assert [m.key for m in b] == ["c"]
    assert b.take(9, now=1.0) == []
    b.put(Message("b"))
    assert [m.key for m in b.take(9, now=1.0)] == ["b"]
