"""Crawler traps: growing paths, session ids in paths, and calendars, found in the text of URLs.

A trap has a template: its URL with `{session}` or `{date}` in place of the part that changes. The
ledger counts the URLs of each template in each trace. The work is linear in the URL.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Literal, TypeAlias

import msgspec

from penstock.rules.masking import mask

Kind: TypeAlias = Literal["path", "session", "date"]
MAX_SEGMENTS = 64  # segments of a path. A longer path is a trap.
MAX_PARAMETERS = 64  # parameters of a query in which dates and session ids are searched
MAX_REPEATS = 3  # repetitions of path segments in one URL
MAX_SESSIONS = 5  # session ids with which a trace requests the same page
MAX_TEMPLATE = 300  # characters that are stored and shown

_YEAR = r"(?:19|20|21)\d\d"
_MONTH, _DAY = r"(?:0?[1-9]|1[0-2])", r"(?:0?[1-9]|[12]\d|3[01])"
_year, _month, _day = (re.compile(pattern).fullmatch for pattern in (_YEAR, _MONTH, _DAY))
# One text with a date: 2026-11, 2026-11-18, 20261118, 2026-W47, 2026-11-18T20:00
_date = re.compile(
    rf"{_YEAR}(?:-{_MONTH}(?:-{_DAY})?|(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])|-W\d\d)"
    r"(?:T[0-9:.+Z-]{0,32})?"
).fullmatch
_MONTHS, _YEARS = frozenset({"month", "mon", "m"}), frozenset({"year", "yr", "y"})
_DAYS = frozenset({"day", "d"})

_parameter = re.compile(r"(;(?:jsessionid|phpsessid|sessionid|sid)=)[^/;]*", re.I)
_asp = re.compile(r"\([A-Z]\([A-Za-z0-9]{8,}\)\)").fullmatch
_SESSION_NAMES = frozenset({"jsessionid", "phpsessid", "sessionid"})
_opaque = re.compile(
    r"(?=[^/]*[0-9])(?=[^/]*[A-Za-z])"
    r"(?:[0-9a-f]{16,}|[0-9A-Za-z]{20,}|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})",
).fullmatch


class Trap(msgspec.Struct, frozen=True):
    """A URL that may belong to a trap."""

    kind: Kind
    template: str
    limit: int  # URLs of this template that a trace may have. 0 if this URL alone shows the trap.


class _Parts(msgspec.Struct):
    origin: str
    segments: list[str]
    query: str

    def url(self, segments: Iterable[str] | None = None, query: str | None = None) -> str:
        path = "/".join(self.segments if segments is None else segments)
        query = self.query if query is None else query
        return f"{self.origin}{path}{'?' + query if query else ''}"


def _parts(url: str) -> _Parts:
    """Split a canonical URL. A long query is left out."""
    head, _, query = url.partition("?")
    start = head.find("/", 8)
    path = head[start:] if start > 0 else "/"
    query = query if query.count("&") < MAX_PARAMETERS else ""
    return _Parts(head[:start] if start > 0 else head, path.split("/", MAX_SEGMENTS + 1), query)


def session_tokens(page: str, links: Iterable[str]) -> frozenset[str]:
    """Return the new session id in the links of a page, if its URL has another one there.

    A site that gives a new session id with every answer has one id in all links of a page. A list
    of items has many. A page whose URL has no id may link to parts of one item, so its links show
    nothing.
    """
    own = _parts(page)
    at = next((i for i, segment in enumerate(own.segments) if _is_token(segment)), None)
    if at is None:
        return frozenset()
    found: Counter[str] = Counter()
    for link in set(links):
        parts = _parts(link)
        same = parts.origin == own.origin and parts.segments[:at] == own.segments[:at]
        if same and _token_at(parts.segments) == at:
            found[parts.segments[at]] += 1
    is_new = len(found) == 1 < found.total() and not found.keys() & set(own.segments)
    return frozenset(found if is_new else ())


def find_trap(url: str, tokens: Collection[str], most_dates: int) -> Trap | None:
    """Return the trap to which a link may belong. `tokens` are the session ids of its page."""
    parts = _parts(url)
    if (prefix := _growing(parts.segments)) is not None:
        return Trap("path", f"{parts.origin}{prefix}/…", 0)
    if (template := _session(parts, tokens)) is not None:
        return Trap("session", template, MAX_SESSIONS)
    if (template := _dated(parts)) is not None:
        return Trap("date", template, most_dates)
    return None


def digest_of(template: str) -> str:
    """Return the short name of a template's counter. No two templates have the same in practice."""
    return hashlib.blake2b(template.encode("utf-8", "surrogatepass"), digest_size=10).hexdigest()


def shown(template: str) -> str:
    """Return the template for output and storage: short, and without secrets."""
    template = mask(template)
    return template if len(template) <= MAX_TEMPLATE else template[: MAX_TEMPLATE - 1] + "…"


# -- growing paths ---------------------------------------------------------------------------------


def _growing(segments: list[str]) -> str | None:
    """Return the path up to the first repetition, if segments repeat too often.

    One segment may occur three times. All segments that are not numbers may repeat three times
    together. A path with more than 64 segments is too long.
    """
    if len(segments) <= MAX_REPEATS + 1:
        return None
    if len(segments) > MAX_SEGMENTS + 1:
        return "/".join(segments[:3])
    seen: Counter[str] = Counter()
    repeats, first = 0, 0
    for i, segment in enumerate(segments[1:] if segments[-1] else segments[1:-1], 1):
        seen[segment] += 1
        if seen[segment] > 1:
            first = first or i
            repeats += not segment.isdigit()
        if repeats > MAX_REPEATS or seen[segment] > MAX_REPEATS:
            return "/".join(segments[: first + 1])
    return None


# -- session ids -----------------------------------------------------------------------------------


def _token_at(segments: list[str]) -> int | None:
    """Return the index of the first opaque token that other segments follow."""
    for i, segment in enumerate(segments[:-1]):
        if _is_token(segment):
            return i if any(segments[i + 1 :]) else None
    return None


def _is_token(segment: str) -> bool:
    return len(segment) >= 16 and _opaque(segment) is not None


def _session(parts: _Parts, tokens: Collection[str]) -> str | None:
    marked = _marked(parts)
    if marked is not None or not tokens:
        return marked
    at = _token_at(parts.segments)
    if at is None or parts.segments[at] not in tokens:
        return None
    return parts.url([*parts.segments[:at], "{session}", *parts.segments[at + 1 :]])


def _marked(parts: _Parts) -> str | None:
    """Return the template of a URL with a session id that has a name, or the form of ASP.NET."""
    if not (query := parts.query) and not any("(" in s or ";" in s for s in parts.segments):
        return None
    segments = [
        "{session}" if s[:1] == "(" and _asp(s) else _parameter.sub(r"\1{session}", s)
        for s in parts.segments
    ]
    pairs = [pair.partition("=") for pair in query.split("&")] if query else []
    query = "&".join(
        name + "={session}" if name.lower() in _SESSION_NAMES else name + equals + value
        for name, equals, value in pairs
    )
    if segments == parts.segments and query == parts.query:
        return None
    return parts.url(segments, query)


# -- calendars -------------------------------------------------------------------------------------


def _dated(parts: _Parts) -> str | None:
    """Return the template of a URL with a date in its path or query."""
    segments = _dated_path(parts.segments)
    query = _dated_query(parts.query) if parts.query else None
    if segments is None and query is None:
        return None
    return parts.url(segments, query)


def _dated_path(segments: list[str]) -> list[str] | None:
    found: list[str] = []
    i, dates = 0, 0
    while i < len(segments):
        rest = segments[i + 1 : i + 3]
        if _date(segments[i]):
            length = 1
        elif _year(segments[i]) and rest and _month(rest[0]):
            length = 3 if len(rest) > 1 and _day(rest[1]) else 2
        else:
            found.append(segments[i])
            i += 1
            continue
        found.append("{date}")
        i, dates = i + length, dates + 1
    return found if dates else None


def _dated_query(query: str) -> str | None:
    pairs = [pair.partition("=") for pair in query.split("&")]
    names = {name.lower() for name, _, value in pairs if value.isdigit()}
    split = bool(names & _MONTHS and names & _YEARS)
    parts = _MONTHS | _YEARS | _DAYS if split else frozenset()
    template = "&".join(
        name + "={date}"
        if _date(value) or (name.lower() in parts and value.isdigit())
        else name + equals + value
        for name, equals, value in pairs
    )
    return template if template != query else None
