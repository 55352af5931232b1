"""Dead letters with the same cause have the same fingerprint, and others do not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.rules.fingerprint import fingerprint


def same(a: str, b: str) -> bool:
    return fingerprint("fetch", "permanent", a) == fingerprint("fetch", "permanent", b)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("not found: https://shop.test/p/1", "not found: http://other.test/x?y=2"),
        ("field 'sku' is missing", "field 'price' is missing"),
        ('field "sku" is missing', 'field "price of things" is missing'),
        ("timed out after 10.5 s", "timed out after 3 s"),
        ("event 0123456789abcdef died", "event fedcba9876543210 died"),
    ],
)
def test_numbers_ids_urls_and_quoted_words_do_not_change_the_fingerprint(a: str, b: str) -> None:
    assert same(a, b)


@pytest.mark.parametrize(
    ("a", "b"), [("not found", "forbidden"), ("KeyError: #", "ValueError: #"), ("", "x")]
)
def test_other_words_give_another_fingerprint(a: str, b: str) -> None:
    assert not same(a, b)


def test_the_stage_and_the_error_class_are_part_of_the_fingerprint() -> None:
    prints = {
        fingerprint(stage, kind, "x")
        for stage in ("fetch", "extract")
        for kind in ("permanent", "poison")
    }
    assert len(prints) == 4


def test_a_long_reason_is_cut() -> None:
    assert same("x " * 1000, "x " * 2000)
    assert not same("y" + "x " * 1000, "x " * 1000)


@given(st.text(st.characters(), max_size=400))
def test_any_text_has_a_stable_fingerprint(reason: str) -> None:
    print_ = fingerprint("fetch", "ours", reason)
    assert len(print_) == 12
    assert print_ == fingerprint("fetch", "ours", reason)


def test_a_lone_surrogate_has_a_fingerprint() -> None:
    assert fingerprint("fetch", "ours", "\ud800")
