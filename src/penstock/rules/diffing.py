"""Comparison of two JSON objects, field by field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def diff(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return `{field: (old, new)}` for every top-level field that differs.

    The order is that of `new`, then the removed fields of `old`. An absent field equals null, since
    a selector that finds nothing may return either. The order inside objects does not matter.
    """
    changed = {
        name: (old.get(name), value)
        for name, value in new.items()
        if not _same(old.get(name), value)
    }
    changed.update(
        {
            name: (value, None)
            for name, value in old.items()
            if name not in new and value is not None
        }
    )
    return changed


def _same(a: Any, b: Any) -> bool:
    # In Python True == 1, but in JSON they are different values.
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_same(value, b[name]) for name, value in a.items())
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)
