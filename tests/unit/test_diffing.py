"""The difference of two records, field by field."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.rules.diffing import diff

SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3)
)
JSON = st.recursive(SCALARS, lambda v: st.lists(v, max_size=3), max_leaves=5)
OBJECTS = st.dictionaries(st.text(max_size=2), JSON, max_size=4)


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ({"price": 1}, {"price": 2}, {"price": (1, 2)}),
        ({"price": 1}, {"price": 1}, {}),
        ({}, {"price": 1}, {"price": (None, 1)}),
        ({"price": 1}, {}, {"price": (1, None)}),
        ({"price": None}, {}, {}),
        ({}, {"price": None}, {}),
        ({"stock": 1}, {"stock": True}, {"stock": (1, True)}),
        ({"stock": [0]}, {"stock": [False]}, {"stock": ([0], [False])}),
        ({"price": 1}, {"price": 1.0}, {}),
        ({"price": 1}, {"price": "1"}, {"price": (1, "1")}),
        ({"o": {"a": 1, "b": 2}}, {"o": {"b": 2, "a": 1}}, {}),
        ({"o": {"a": 1}}, {"o": {"a": None}}, {"o": ({"a": 1}, {"a": None})}),
        ({"o": {"a": 1}}, {"o": {}}, {"o": ({"a": 1}, {})}),
        ({"t": [1, 2]}, {"t": [2, 1]}, {"t": ([1, 2], [2, 1])}),
        ({"t": [1]}, {"t": [1, 1]}, {"t": ([1], [1, 1])}),
    ],
)
def test_a_change_has_the_field_name_and_both_values(
    old: dict[str, Any], new: dict[str, Any], changed: dict[str, Any]
) -> None:
    found = diff(old, new)
    assert found == changed
    assert [[type(v) for v in pair] for pair in found.values()] == [
        [type(v) for v in pair] for pair in changed.values()
    ]


def test_changed_fields_have_the_order_of_the_new_record_and_removed_fields_follow() -> None:
    assert list(diff({"gone": 1, "a": 1, "b": 1}, {"b": 2, "new": 1, "a": 2})) == [
        "b",
        "new",
        "a",
        "gone",
    ]


@given(OBJECTS)
def test_a_record_does_not_differ_from_itself(record: dict[str, Any]) -> None:
    assert diff(record, record) == {}


@given(OBJECTS, OBJECTS)
def test_the_reverse_difference_swaps_old_and_new(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert diff(new, old) == {
        name: (after, before) for name, (before, after) in diff(old, new).items()
    }
