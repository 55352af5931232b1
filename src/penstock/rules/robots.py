"""robots.txt (RFC 9309): rules per agent, crawl delay and sitemaps.

`fetching.stage` fetches and caches it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from functools import lru_cache

from penstock.rules.identity import BadUrl, canonical_url

MAX_BYTES = 500 * 1024
_BOM = b"\xef\xbb\xbf"

# -- normal form of rules and URLs -----------------------------------------------------------------

# Rules and URLs are compared in decoded form: `%62` is `b`, and in a query `%3A` is `:` (the RFC's
# own example). These stay encoded: characters that are not printable ASCII, `%`, `*` and `$` (they
# are wildcards in rules), and in a path `/` and `?`, because `%2F` differs from `/`.
# Browsers and `canonical_url` encode some of `"<>`{}^|\\`. Sites write them unencoded.
_coded = re.compile(r'%([0-9A-Fa-f]{2})|([^!-~]|[*$"<>`{}^|\\])')
_is_plain = re.compile(r"[A-Za-z0-9/._~?&=:;,+@!'()\[\]-]*").fullmatch
_STAYS_ENCODED = frozenset('%*$"<>`{}^|\\')
_STAYS_ENCODED_IN_PATH = _STAYS_ENCODED | frozenset("/?#")


def _recode(text: str, stays_encoded: frozenset[str]) -> str:
    def normal_form(m: re.Match[str]) -> str:
        c = chr(int(m[1], 16)) if m[1] else m[2]
        return c if "!" <= c <= "~" and c not in stays_encoded else f"%{ord(c):02X}"

    return _coded.sub(normal_form, text)


def _normalise(text: str, in_query: bool = False) -> str:
    """Normalise text that is ASCII or bytes as Latin-1, so that each character is one octet."""
    if _is_plain(text):
        return text
    path, question_mark, query = ("", "", text) if in_query else text.partition("?")
    path = _recode(path, _STAYS_ENCODED_IN_PATH)
    return path + question_mark + _recode(query, _STAYS_ENCODED)


# -- rules -----------------------------------------------------------------------------------------


class _WildcardRule:
    """A pattern with `*` or a final `$`.

    It is matched part by part from the left, in linear time and without backtracking.
    """

    __slots__ = ("allow", "anchored", "first", "last", "longest_part", "middle", "pattern", "size")

    def __init__(self, pattern: str, allow: bool) -> None:
        self.pattern = pattern
        self.anchored = pattern.endswith("$")
        body = pattern[:-1] if self.anchored else pattern
        parts = body.split("*")
        if not _is_plain(body.replace("*", "")):
            in_query = False
            for i, part in enumerate(parts):
                parts[i] = _normalise(part, in_query)
                in_query = in_query or "?" in part
        # The longest rule wins. The length is the octets of the normalised rule with its wildcards.
        self.size, self.allow = sum(map(len, parts)) + len(parts) - 1 + self.anchored, allow
        self.first, rest = parts[0], parts[1:]
        self.last = rest.pop() if rest and self.anchored else None
        self.middle = tuple(filter(None, rest))
        self.longest_part = max(parts, key=len)  # searched first, because most rules do not match

    def matches(self, path: str) -> bool:
        if not path.startswith(self.first):
            return False
        at = len(self.first)
        for part in self.middle:
            found = path.find(part, at)
            if found < 0:
                return False
            at = found + len(part)
        if self.last is not None:
            return len(path) - len(self.last) >= at and path.endswith(self.last)
        return not self.anchored or at == len(path)


class _Group:
    """Rules of one agent: literal rules in a dictionary, rules with wildcards sorted by length."""

    __slots__ = ("delay", "lengths", "literal", "wild")

    def __init__(self, rules: Iterable[tuple[str, bool]], delay: float | None) -> None:
        self.delay = delay
        self.literal: dict[str, bool] = {}
        wild: dict[str, _WildcardRule] = {}
        for pattern, allow in rules:
            if "*" in pattern or pattern.endswith("$"):
                known = wild.get(pattern)
                if known is None or (allow and not known.allow):
                    wild[pattern] = _WildcardRule(pattern, allow)
            else:
                text = _normalise(pattern)
                self.literal[text] = allow or self.literal.get(text, False)
        self.lengths = sorted({len(p) for p in self.literal}, reverse=True)
        self.wild = sorted(wild.values(), key=lambda w: (-w.size, not w.allow))

    def decide(self, path: str) -> tuple[bool, str]:
        """Return if the path is allowed, and the pattern that decides ("" if none matches)."""
        size, verdict = -1, True
        for n in self.lengths:
            allow = self.literal.get(path[:n])
            if allow is not None and n <= len(path):
                size, verdict = n, allow
                break
        for w in self.wild:
            if w.size < size or (w.size == size and verdict):
                break
            if w.longest_part in path and w.matches(path) and (w.size > size or w.allow):
                return w.allow, w.pattern
        return verdict, path[:size] if size >= 0 else ""


class Robots:
    """A parsed robots.txt.

    Agents are product tokens (`penstock` for `Penstock/1.0 (+…)`), compared without case.
    """

    __slots__ = ("_compiled", "_delays", "_refuse_all", "_rules", "sitemaps")

    def __init__(
        self,
        rules: dict[str, list[tuple[str, bool]]],
        delays: dict[str, float],
        sitemaps: tuple[str, ...],
        *,
        refuse_all: bool = False,
    ) -> None:
        self._rules, self._delays, self._refuse_all = rules, delays, refuse_all
        self.sitemaps = sitemaps
        self._compiled: dict[str, _Group] = {}

    def allows(self, agent: str, url: str, *, canonical: bool = False) -> bool:
        """Return True if the agent may fetch a URL or path. Return False for an invalid URL.

        Pass `canonical=True` for a result of `canonical_url`, to save the parse.
        """
        try:
            path = _normalise(url[url.index("/", 8) :]) if canonical else _path(url)
        except BadUrl:
            return False
        if path == "/robots.txt":
            return True
        return not self._refuse_all and self._group(agent).decide(path)[0]

    def deciding(self, agent: str, url: str) -> str:
        """Return the rule that decides, as a line of robots.txt, or "" if no rule matches."""
        allow, pattern = self._group(agent).decide(_path(url))
        return f"{'Allow' if allow else 'Disallow'}: {pattern}" if pattern else ""

    def crawl_delay(self, agent: str) -> float | None:
        return self._group(agent).delay

    def _group(self, agent: str) -> _Group:
        group = self._compiled.get(agent)
        if group is None:
            name = _token(agent) if _token(agent) in self._rules else "*"
            group = _Group(self._rules.get(name, ()), self._delays.get(name))
            self._compiled[agent] = group
        return group


ALLOW_ALL = Robots({}, {}, ())
DISALLOW_ALL = Robots({}, {}, (), refuse_all=True)


def _path(url: str) -> str:
    href = canonical_url(url, "http://robots.invalid/")
    return _normalise(href[href.index("/", 8) :])


# -- parsing ---------------------------------------------------------------------------------------

_token_of = re.compile(r"[A-Za-z_-]+").match
_first_word = re.compile(r"[^\s/]+").match
_KEYS = {
    "user-agent": "agent",
    "useragent": "agent",
    "user agent": "agent",
    "disallow": "disallow",
    "dissallow": "disallow",
    "dissalow": "disallow",
    "disalow": "disallow",
    "diasllow": "disallow",
    "disallaw": "disallow",
    "allow": "allow",
    "crawl-delay": "delay",
    "crawldelay": "delay",
    "sitemap": "sitemap",
    "site-map": "sitemap",
}


@lru_cache(maxsize=4096)
def _token(agent: str) -> str:
    """Return the product token in lower case, or the first word of a name with other characters."""
    agent = agent.strip()
    if agent[:1] == "*":
        return "*"
    m = _token_of(agent) or _first_word(agent)
    return m[0].lower() if m else ""


_compatible = re.compile(r"\(compatible; *([A-Za-z_-]+)", re.IGNORECASE).search


def product_token(user_agent: str) -> str:
    """Return the name for robots.txt rules: `shopbot` for `shopbot/2.1 (+https://…)` and for
    `Mozilla/5.0 (compatible; shopbot/2.1; …)`.
    """
    m = _compatible(user_agent) or _token_of(user_agent.strip()) or _first_word(user_agent.strip())
    return (m[1] if m.re.groups else m[0]) if m else ""


def parse(body: bytes) -> Robots:
    """Parse a robots.txt. Never raises.

    Only the first 500 KiB are read. An incomplete last line is ignored, since half a rule is
    another rule.
    """
    if len(body) > MAX_BYTES:
        body = body[:MAX_BYTES]
        body = body[: max(body.rfind(b"\n"), body.rfind(b"\r")) + 1]
    rules: dict[str, list[tuple[str, bool]]] = {}
    delays: dict[str, float] = {}
    sitemaps: dict[str, None] = {}
    agents: list[str] = []
    open_group = False  # True while agent lines of a group are read
    for line in body.removeprefix(_BOM).decode("latin-1").replace("\r", "\n").split("\n"):
        key, value = _record(line)
        if key == "agent":
            if not open_group:
                agents, open_group = [], True
            if name := _token(value):
                agents.append(name)
                rules.setdefault(name, [])
        elif key == "disallow" or key == "allow":
            open_group = False
            if value:
                for name in agents:
                    rules[name].append((value, key == "allow"))
        # An extension, which must not end the list of agents (RFC 9309, 2.2.4).
        elif key == "delay":
            seconds = _seconds(value)
            if seconds is not None:
                for name in agents:
                    delays[name] = max(seconds, delays.get(name, 0.0))
        elif key == "sitemap" and value:
            sitemaps[value.encode("latin-1").decode("utf-8", "replace")] = None
    return Robots(rules, delays, tuple(sitemaps))


def _record(line: str) -> tuple[str | None, str]:
    line = line.partition("#")[0].strip(" \t\x00\v\f\x1c\x1d\x1e\x1f\x85\xa0")
    key, colon, value = line.partition(":")
    if not colon:  # `Disallow /x` without a colon is common
        words = line.split()
        if len(words) != 2:
            return None, ""
        key, value = words
    return _KEYS.get(key.strip().lower()), value.strip()


def _seconds(text: str) -> float | None:
    try:
        seconds = float(text)
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) and seconds >= 0 else None


# -- policy ----------------------------------------------------------------------------------------


def from_answer(status: int | None, body: bytes = b"") -> Robots:
    """Return the rules for a response to `GET /robots.txt`.

    `status` is None if there was no response. A 3xx means that there were too many redirects.
    """
    if status is not None and 200 <= status < 300:
        return parse(body)
    if status is not None and 300 <= status < 500:
        return ALLOW_ALL
    return DISALLOW_ALL


def ttl(status: int | None, failures: int = 0) -> float:
    """Return the seconds to cache the rules, never more than a day (RFC 9309).

    For an unreachable server it is 60 s, doubled with each failure, at most an hour.
    """
    if status is not None and 200 <= status < 300:
        return 12 * 3600.0
    if status is not None and 300 <= status < 500:
        return 3600.0
    return min(60.0 * 2.0 ** min(max(failures, 0), 10), 3600.0)
