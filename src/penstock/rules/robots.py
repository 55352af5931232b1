"""robots.txt (RFC 9309): rules per agent, crawl delay and sitemaps.

`fetching.stage` fetches and caches it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from functools import lru_cache

from penstock.rules.identity import MAX_URL, BadUrl, canonical_url

MAX_BYTES = 500 * 1024
# Bytes of a file that is parsed within 10 ms. Callers parse a larger file in a thread.
QUICK_BYTES = 16 << 10
_MAX_AGENT = 256  # characters of an agent's name that are compared
_MAX_NUMBER = 100  # characters of a crawl delay
_RULE_BYTES, _WILD_BYTES = 150, 250  # memory of a rule, without its text. The second is with `*`.
_SECTION_BYTES = 400
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

# Characters of the longest normalised path: normalisation makes three characters of one at most.
# A rule that needs more literal characters matches no URL, so it is left out.
_MAX_PATH = 3 * MAX_URL
# Work of one decision, in steps of at most about a nanosecond. Rules with wildcards are tried in
# turn, so a hostile file could cost a second for each URL. Decisions with 5,000 such rules on a
# path of 100 characters need 2 million steps.
MAX_WORK = 5_000_000
_RULE_WORK = 100  # steps to try a rule whose literal start or end does not match
OUT_OF_WORK = "(more wildcard rules than one URL may be compared with)"


class _Wildcard:
    """A rule with `*`: its literal parts, which must follow each other in the path."""

    __slots__ = ("allow", "first", "last", "middle", "pattern")

    def __init__(self, pattern: str, allow: bool, parts: list[str], anchored: bool) -> None:
        self.pattern, self.allow, self.first = pattern, allow, parts[0]
        self.last = parts.pop() if anchored else ""
        self.middle = tuple(filter(None, parts[1:]))


def _split_pattern(pattern: str, anchored: bool) -> list[str] | None:
    """Return the normalised parts between the wildcards, or None if no path is long enough."""
    body = pattern[:-1] if anchored else pattern
    # `%62` becomes one character, so a normalised rule has at least a third of its characters.
    if len(body) - body.count("*") > 3 * _MAX_PATH:
        return None
    parts = body.split("*")
    if not _is_plain(body.replace("*", "")):
        in_query = False
        for i, part in enumerate(parts):
            parts[i] = _normalise(part, in_query)
            in_query = in_query or "?" in part
    return parts if sum(map(len, parts)) <= _MAX_PATH else None


class _Group:
    """Rules of one agent, so that one decision has bounded work.

    Rules without `*` are in dictionaries. Rules with `*` are sorted by length, longest first.
    """

    __slots__ = ("delay", "exact", "lengths", "literal", "wild")

    def __init__(self, sections: Iterable[tuple[_Section, int]]) -> None:
        self.delay: float | None = None
        self.literal: dict[str, bool] = {}
        self.exact: dict[str, bool] = {}  # rules that end with `$`, without it
        wild: dict[str, bool] = {}
        for section, first_delay in sections:
            if delays := section.delays[first_delay:]:
                self.delay = max(*delays, self.delay or 0.0)
            for allow, patterns in ((True, section.allow), (False, section.disallow)):
                for pattern in patterns:
                    if "*" in pattern:
                        wild[pattern] = allow or wild.get(pattern, False)
                        continue
                    anchored = pattern.endswith("$")
                    if parts := _split_pattern(pattern, anchored):
                        text, known = parts[0], self.exact if anchored else self.literal
                        known[text] = allow or known.get(text, False)
        self.lengths = sorted({len(p) for p in self.literal}, reverse=True)
        # Size -> rules. The longest rule wins. The length is the octets of the normalised rule with
        # its wildcards. Lists by size need no sort of all rules, which would hold the GIL.
        sizes: dict[int, list[_Wildcard]] = {}
        for wanted in (True, False):  # at the same length `allow` wins, so it is tried first
            for pattern, allow in wild.items():
                if allow is not wanted:
                    continue
                anchored = pattern.endswith("$")
                if parts := _split_pattern(pattern, anchored):
                    size = sum(map(len, parts)) + len(parts) - 1 + anchored
                    sizes.setdefault(size, []).append(_Wildcard(pattern, allow, parts, anchored))
        self.wild = [(size, sizes[size]) for size in sorted(sizes, reverse=True)]

    def decide(self, path: str) -> tuple[bool, str]:
        """Return if the path is allowed, and the pattern that decides ("" if none matches).

        A path is not allowed, with the pattern OUT_OF_WORK, if the decision needs more than
        MAX_WORK steps. So a rule that was not tried never permits a request.
        """
        size, verdict, decides = -1, True, ""
        for n in self.lengths:
            allow = self.literal.get(path[:n])
            if allow is not None and n <= len(path):
                size, verdict, decides = n, allow, path[:n]
                break
        if (allow := self.exact.get(path)) is not None:
            size, verdict, decides = len(path) + 1, allow, path + "$"
        return self._decide_wild(path, size, verdict) or (verdict, decides)

    def _decide_wild(self, path: str, least: int, verdict: bool) -> tuple[bool, str] | None:
        """Return the verdict of the first rule with `*` that matches and wins, else None.

        `least` and `verdict` are the length and the verdict of the best rule without `*`.
        """
        work = MAX_WORK
        counts: dict[str, int] = {}  # character -> how often the path has it
        for size, rules in self.wild:
            if size < least or (size == least and verdict):
                break
            for rule in rules:
                if size == least and not rule.allow:
                    break  # the same verdict as the rule without `*`
                if (work := work - _RULE_WORK) < 0:
                    return False, OUT_OF_WORK
                if not (path.startswith(rule.first) and path.endswith(rule.last)):
                    continue
                at, end = len(rule.first), len(path) - len(rule.last)
                if at > end:
                    continue
                for part in rule.middle:
                    # The greedy search needs no backtracking. `str.find` compares the complete part
                    # at most where the path has the last character of the part.
                    final = part[-1]
                    if (often := counts.get(final)) is None:
                        often = counts[final] = path.count(final)
                    work -= _RULE_WORK + end - at + often * len(part)
                    if work < 0:
                        return False, OUT_OF_WORK
                    at = path.find(part, at, end)
                    if at < 0:
                        break
                    at += len(part)
                else:
                    return rule.allow, rule.pattern
        return None


class _Section:
    """Rules that follow a list of agents. All agents of the list share this object."""

    __slots__ = ("allow", "delays", "disallow")

    def __init__(self) -> None:
        self.allow: list[str] = []
        self.disallow: list[str] = []
        self.delays: list[float] = []  # seconds


class Robots:
    """A parsed robots.txt.

    Agents are product tokens (`penstock` for `Penstock/1.0 (+…)`), compared without case.
    """

    __slots__ = ("_compiled", "_refuse_all", "_sections", "sitemaps")

    def __init__(
        self,
        sections: dict[str, list[tuple[_Section, int]]],
        sitemaps: tuple[str, ...],
        *,
        refuse_all: bool = False,
    ) -> None:
        self._sections, self._refuse_all = sections, refuse_all
        self.sitemaps = sitemaps
        self._compiled: dict[str, _Group] = {}

    @property
    def size(self) -> int:
        """Return about the bytes of memory that the rules take."""
        sections = {id(s): s for group in self._sections.values() for s, _ in group}.values()
        texts = [t for s in sections for part in (s.allow, s.disallow) for t in part]
        # The text of a rule with `*` is also kept in parts.
        rules = (_WILD_BYTES + 5 * len(t) if "*" in t else _RULE_BYTES + 2 * len(t) for t in texts)
        return sum(rules) + len(sections) * _SECTION_BYTES

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

    def only_for(self, agent: str) -> Robots:
        """Return the rules without sitemaps and other agents, compiled for this agent."""
        if not self._sections:
            return self
        name = self._name(agent)
        found = {name: self._sections[name]} if name in self._sections else {}
        smaller = Robots(found, (), refuse_all=self._refuse_all)
        smaller._group(agent)
        return smaller

    def _name(self, agent: str) -> str:
        return token if (token := _token(agent)) in self._sections else "*"

    def _group(self, agent: str) -> _Group:
        group = self._compiled.get(agent)
        if group is None:
            group = _Group(self._sections.get(self._name(agent), ()))
            self._compiled[agent] = group
        return group


ALLOW_ALL = Robots({}, ())
DISALLOW_ALL = Robots({}, (), refuse_all=True)


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


def _token(agent: str) -> str:
    """Return the product token in lower case, or the first word of a name with other characters."""
    return _cached_token(agent[:_MAX_AGENT])  # the cache must not keep a name of 500 KiB


@lru_cache(maxsize=4096)
def _cached_token(agent: str) -> str:
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
    """Parse a robots.txt. Never raises. Work and memory are linear in the bytes.

    Only the first 500 KiB are read. An incomplete last line is ignored, since half a rule is
    another rule.
    """
    if len(body) > MAX_BYTES:
        body = body[:MAX_BYTES]
        body = body[: max(body.rfind(b"\n"), body.rfind(b"\r")) + 1]
    # Agent -> its sections, each with the number of delays that came before the agent's line.
    sections: dict[str, list[tuple[_Section, int]]] = {}
    sitemaps: dict[str, None] = {}
    section: _Section | None = None  # None before the first agent
    open_group = False  # True while agent lines of a group are read
    for line in body.removeprefix(_BOM).decode("latin-1").replace("\r", "\n").split("\n"):
        key, value = _record(line)
        if key == "agent":
            if not open_group:
                section, open_group = None, True
            if name := _token(value):
                section = section or _Section()
                known = sections.setdefault(name, [])
                if not known or known[-1][0] is not section:
                    known.append((section, len(section.delays)))
        elif key == "disallow" or key == "allow":
            open_group = False
            if value and section is not None:
                (section.allow if key == "allow" else section.disallow).append(value)
        # An extension, which must not end the list of agents (RFC 9309, 2.2.4).
        elif key == "delay":
            seconds = _seconds(value)
            if seconds is not None and section is not None:
                section.delays.append(seconds)
        elif key == "sitemap" and value:
            sitemaps[value.encode("latin-1").decode("utf-8", "replace")] = None
    return Robots(sections, tuple(sitemaps))


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
        seconds = float(text[:_MAX_NUMBER])
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
