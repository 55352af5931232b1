"""Route, priority and freshness window of a URL, as users write them.

Sources, links of extractors and mappings use the same checks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.config import units
from penstock.config.options import suggest
from penstock.model import Priority, Reason, Route
from penstock.rules.reasons import sentence

MAX_TEXT = 512  # maximum characters of a route value, so that it fits an index
TEXTS = ("geo", "pool", "account")
KEYS = (*TEXTS, "render")
WINDOW_MODES = ("delay", "drop")
_NAMES = tuple(name.name.lower() for name in Priority)


class WrongValue(ValueError):
    """A route, priority or window that cannot be used. The message names the value."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.message, self.hint = message, hint


def is_text(value: object) -> bool:
    """Return True if `value` is text that fits an index and that every store accepts.

    Such text has 1 to `MAX_TEXT` characters, no NUL and no unpaired surrogate.
    """
    return (
        isinstance(value, str)
        and 0 < len(value) <= MAX_TEXT
        and "\0" not in value
        and value.encode("utf-8", "replace").decode() == value
    )


def read_route(value: object) -> Route:
    """Return the route of a Route or a table. Raise WrongValue. None in a table means absent."""
    if isinstance(value, Route):
        given: dict[Any, Any] = msgspec.structs.asdict(value)
    elif isinstance(value, Mapping):
        given = dict(value)
    else:
        raise WrongValue(f"route {value!r} is not a table", 'write route={"geo": "US"}')
    for key in given:
        if key not in KEYS:
            known = f"a route has {', '.join(KEYS[:-1])} and {KEYS[-1]}"
            raise WrongValue(f"route has no {key!r}", suggest(str(key), KEYS, known))
    for key in TEXTS:
        if given.get(key) is not None and not is_text(given[key]):
            raise WrongValue(
                f"route: {key} {given[key]!r} is not a text of 1 to {MAX_TEXT} characters",
                f'write for example {key}="{"US" if key == "geo" else "main"}"',
            )
    render = given.get("render") or False
    if not isinstance(render, bool):
        raise WrongValue(f"route: render {render!r} is neither true nor false", "leave it out")
    if render:
        raise WrongValue(f"route: {sentence(Reason.RENDER)}", "leave render out")
    return Route(given.get("geo"), given.get("pool"), given.get("account"))


def read_priority(value: object) -> Priority:
    """Return the priority of high, normal, low, or of 0, 1, 2. Raise WrongValue."""
    try:
        if isinstance(value, str):
            return Priority.named(value)
        if type(value) is int or isinstance(value, Priority):
            return Priority(value)
    except (KeyError, ValueError):
        pass
    use = "use high, normal or low"
    hint = suggest(value.lower(), _NAMES, use) if isinstance(value, str) else use
    raise WrongValue(f"priority {value!r} is not known", hint)


def read_window(value: object) -> float | None:
    """Return the seconds of a number or of text such as "1h". Raise WrongValue. None stays None."""
    try:
        seconds = None if value is None else units.duration(value)
    except (ValueError, OverflowError):
        seconds = -1.0
    if seconds is not None and seconds < 0:
        raise WrongValue(
            f"window {value!r} is not a length of time",
            'write seconds, or "30s", "5m", "1h", "1d"',
        )
    return seconds


def read_window_mode(value: object) -> str | None:
    """Return "delay", "drop" or None. Raise WrongValue."""
    if value is None or (isinstance(value, str) and value in WINDOW_MODES):
        return value
    use = "use delay or drop"
    hint = suggest(value, WINDOW_MODES, use) if isinstance(value, str) else use
    raise WrongValue(f"window_mode {value!r} is not known", hint)


def check_outside_route(options: Mapping[str, object]) -> None:
    """Raise WrongValue if a part of the route is among the options of the source itself."""
    for key in KEYS:
        if key in options:
            raise WrongValue(
                f"{key} is a part of the route", f"write route={{{key!r}: {options[key]!r}}}"
            )
