"""Change of a record, which an `on_change` hook gets."""

from __future__ import annotations

from typing import Any

import msgspec


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A record that differs from its last version. Argument of an `on_change` hook.

    A record that is seen for the first time is not a change.
    """

    event_id: str
    trace_id: str
    url: str
    extractor: str
    key: str
    old: dict[str, Any]
    new: dict[str, Any]
    fields: dict[str, list[Any]]  # name -> [old, new], only fields that differ
