"""What changed between two JSON objects, field by field. Which two to compare, and who is told, is
decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def diff(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """`{field: (old, new)}` for every top-level field that differs, in the order of `new`, then
    what is gone.

    A field that is absent counts as null, since a selector that finds nothing may yield either.
    Order inside objects is no difference.
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
    # Python says True == 1; JSON, and whoever reads the change, does not.
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_same(value, b[name]) for name, value in a.items())
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)
