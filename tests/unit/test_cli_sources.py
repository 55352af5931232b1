"""The state of a source in `penstock sources ls`, by its row in the ledger."""

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
    ("known", "expected"),
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
def test_a_source_is_shown_as_read_only_after_a_recent_heartbeat(
    known: dict[str, Any], expected: str
) -> None:
    fields = {name: getattr(NOTHING, name) for name in NOTHING.__struct_fields__}
    assert str(_state_text(SourceState(**{**fields, **known}), declared=True, now=NOW)).startswith(
        expected
    )


def test_undeclared_sources_and_sources_never_read_are_shown_as_such() -> None:
    assert str(_state_text(NOTHING, declared=False, now=NOW)) == "not in this pipeline"
    assert _state_text(None, declared=True, now=NOW) == "never read"
