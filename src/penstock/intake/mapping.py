"""Maps a source's finding to an event.

Values come from the user's hook, from JMESPath expressions, from `routing` in the payload and from
static values, in this order of precedence. A value that is null is absent. The worker that receives
the event does not map it again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping as Pairs
from typing import Any, Literal

import msgspec

from penstock.authoring.pipeline import SourceSpec
from penstock.authoring.routing import MAX_TEXT, is_text
from penstock.config import units
from penstock.errors import ConfigError
from penstock.model import Event, Priority, Reason, Route
from penstock.ports import Finding
from penstock.rules.events import Refused, event_of
from penstock.rules.expressions import Expression, Unfit
from penstock.rules.identity import BadUrl, canonical_url
from penstock.rules.reasons import sentence

ROUTE = ("geo", "pool", "account", "render")
KEYS = ("url", *ROUTE, "priority", "window", "window_mode", "force", "trace", "data")
MAX_DATA = 64 << 10  # maximum bytes of the data in an event
# Maximum levels of nested data. Every process that receives the event must be able to decode it.
MAX_DEPTH = 100
_encode = msgspec.json.Encoder().encode


class Mapping:
    """The mapping of one source.

    Expressions are compiled when the mapping is created. An invalid expression is a ConfigError.
    """

    def __init__(self, spec: SourceSpec, *, host_by: Literal["host", "domain"] = "host") -> None:
        self._spec, self._host_by = spec, host_by
        if unknown := sorted(set(spec.map) - set(KEYS)):
            raise ConfigError(
                f"source {spec.name}: map has no {unknown[0]!r}", hint=f"it has {', '.join(KEYS)}"
            )
        self._map = {
            key: Expression(text, f"source {spec.name}: map.{key}", "after.url")
            for key, text in spec.map.items()
        }
        self._where = (
            None
            if spec.where is None
            else Expression(spec.where, f"source {spec.name}: where", "after.active")
        )

    @property
    def has_expressions(self) -> bool:
        return bool(self._map) or self._where is not None

    @property
    def has_hook(self) -> bool:
        return self._spec.hook is not None

    def event(self, finding: Finding) -> Event | None:
        """Return the event of a finding, or None if `where` or the hook skips the finding.

        Raises Refused if the finding does not make a valid event.
        """
        if finding.refused:
            raise Refused(finding.refused)
        payload = finding.payload
        given: dict[str, Any] = {}
        try:
            if self._where is not None and not self._where.search(payload):
                return None
            for key, expression in self._map.items():
                if (value := expression.search(payload)) is not None:
                    given[key] = value
        except Unfit as e:
            raise Refused(f"its mapping cannot be applied: {e}") from None
        if self._spec.hook is not None:
            said = self._ask_hook(payload)
            if said is None:
                return None
            given |= said
        if not any(key in given for key in ROUTE):
            given |= _payload_route(payload)
        return self._made(finding, given)

    def _ask_hook(self, payload: dict[str, Any]) -> dict[str, Any] | None:
        assert self._spec.hook is not None
        try:
            said = self._spec.hook(payload)
        # The hook is the user's code. Its exception refuses this finding and does not stop the
        # source.
        except Exception as e:
            error = f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"
            raise Refused(sentence(Reason.HOOK, error), Reason.HOOK) from None
        if said is None:
            return None
        if not isinstance(said, Pairs) or (
            unknown := sorted(str(k) for k in said if k not in KEYS)
        ):
            wrong = (
                f"has no {unknown[0]!r}"
                if isinstance(said, Pairs)
                else f"is no {type(said).__name__}"
            )
            raise Refused(
                f"the hook's answer {wrong}; it is a dict with {', '.join(KEYS)}, or None"
            )
        return {key: value for key, value in said.items() if value is not None}

    def _made(self, finding: Finding, given: Pairs[str, Any]) -> Event:
        spec = self._spec
        url = given.get(
            "url", finding.url if finding.url is not None else finding.payload.get("url")
        )
        if not isinstance(url, str) or not url:
            raise Refused(
                "there is no URL in it"
                + ("" if "url" in spec.map or spec.hook else '; map = {url = "…"} says where it is')
            )
        trace = given.get("trace")
        if isinstance(trace, int) and abs(trace) < 1 << 64:
            trace = str(trace)
        if trace is not None and not is_text(trace):
            raise Refused(f"its trace is no text of 1 to {MAX_TEXT} characters")
        try:
            event = event_of(
                url if finding.base is None else canonical_url(url, finding.base),
                id_=finding.id,
                source=spec.name,
                cause=finding.cause[:MAX_TEXT]
                .replace("\0", "�")
                .encode("utf-8", "replace")
                .decode(),
                route=_route(spec.route, given),
                priority=_priority(given.get("priority", spec.priority)),
                force=_flag(given, "force"),
                window=_window(given.get("window", spec.window)),
                trace=trace,
                host_by=self._host_by,
            )
        except BadUrl as e:
            raise Refused(f"its URL: {e.reason}") from None
        mode = given.get("window_mode", spec.window_mode)
        if mode not in (None, "delay", "drop"):
            raise Refused("its window_mode is neither delay nor drop")
        return msgspec.structs.replace(event, window_mode=mode, data=self._data(finding, given))

    def _data(self, finding: Finding, given: Pairs[str, Any]) -> dict[str, Any]:
        data = given.get("data", finding.payload)
        if not isinstance(data, dict):
            raise Refused(f"its data is no object but {type(data).__name__}")
        try:
            raw = _encode(data)
        except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as e:
            raise Refused(f"its data cannot be written as JSON: {e}") from None
        if len(raw) > MAX_DATA:
            raise Refused(
                f"its data has {len(raw)} bytes, of at most {MAX_DATA}; "
                'map = {data = "{sku: sku}"} chooses less'
            )
        if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH and _deeper_than(data, MAX_DEPTH):
            raise Refused(f"its data is nested deeper than {MAX_DEPTH} levels")
        return data


def _payload_route(payload: Pairs[str, Any]) -> dict[str, Any]:
    """Return the parts of the route in `routing` of a payload: {"routing": {"geo": "US"}}.

    `routing` may be JSON text, as in a column of a CSV file or of a Debezium row. Raises Refused if
    it is neither an object nor null, or if it has a part that a route does not have.
    """
    found = payload.get("routing")
    if isinstance(found, str):
        try:
            found = msgspec.json.decode(found) if found.strip() else None
        except (msgspec.DecodeError, UnicodeError, ValueError, RecursionError):
            raise Refused("its routing is not an object but text") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise Refused(f"its routing is not an object but {type(found).__name__}")
    given = {key: value for key, value in found.items() if value is not None}
    if unknown := sorted(str(key) for key in given if key not in ROUTE):
        raise Refused(f"its routing has no {unknown[0][:100]!r}; it has {', '.join(ROUTE)}")
    return given


def _route(static: Route, given: Pairs[str, Any]) -> Route:
    found = {key: given[key] for key in ROUTE if key in given}
    if not found:
        return static
    if "render" in found:
        found["render"] = _flag(given, "render")
    for key, value in found.items():
        if key != "render" and not is_text(value):
            raise Refused(f"its {key} is no text of 1 to {MAX_TEXT} characters")
    return msgspec.structs.replace(static, **found)


def _deeper_than(value: dict[str, Any], levels: int) -> bool:
    """Return True if `value` is nested deeper than `levels`.

    The check goes level by level, so it needs no recursion.
    """
    level: list[Any] = [value]
    for _ in range(levels):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list | tuple)
        ]
        if not level:
            return False
    return True


def _flag(given: Pairs[str, Any], key: str) -> bool:
    value = given.get(key, False)
    if not isinstance(value, bool):
        raise Refused(f"its {key} is neither true nor false")
    return value


def _priority(value: Any) -> int:
    try:
        return int(Priority.named(value) if isinstance(value, str) else Priority(value))
    except (KeyError, ValueError):
        raise Refused("its priority is none of high, normal, low (or 0, 1, 2)") from None


def _window(value: Any) -> float | None:
    if value is None:
        return None
    try:
        seconds = units.duration(value) if isinstance(value, str) else float(value)
    except (ValueError, TypeError, OverflowError):
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise Refused("its window is no length of time")
    return seconds
