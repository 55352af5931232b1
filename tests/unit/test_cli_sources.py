"""What `penstock sources ls` says of a source, by what the books know of it."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.cli.sources import _state_text
from penstock.ports import SourceState

NOW = 1_800_000_000.0
NOTHING = SourceState(
    "list",
    "seeds:list",
    None,
    0,
    "w",
    None,
    None,
    None,
    None,
    0,
    0,
    0,
    0,
    None,
    None,
    None,
    None,
    None,
)


@pytest.mark.parametrize(
    ("known", "said"),
    [
        ({"settled_at": NOW - 2}, "read"),
        ({"settled_at": NOW - 7200, "looked_at": NOW - 1}, "read"),
        ({"settled_at": NOW - 7200, "looked_at": NOW - 9000}, "no reader since"),
        ({}, "not read yet"),
        ({"url": "webhook:shop", "looked_at": NOW - 7200}, "read"),
        ({"paused": "holidays", "settled_at": NOW - 7200}, "paused: holidays"),
        ({"error": "no feed", "settled_at": NOW - 7200}, "failing"),
    ],
)
def test_a_source_is_read_only_if_somebody_gave_a_word_lately(
    known: dict[str, Any], said: str
) -> None:
    fields = {name: getattr(NOTHING, name) for name in NOTHING.__struct_fields__}
    assert str(_state_text(SourceState(**{**fields, **known}), declared=True, now=NOW)).startswith(
        said
    )


def test_what_the_pipeline_does_not_declare_and_what_was_never_read_are_called_that() -> None:
    assert str(_state_text(NOTHING, declared=False, now=NOW)) == "not in this pipeline"
    assert _state_text(None, declared=True, now=NOW) == "never read"
