"""robots.txt by RFC 9309: what a site allows whom, its crawl delay and sitemaps. Fetching and
caching it is done elsewhere.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from functools import lru_cache

from penstock.rules.identity import BadUrl, canonical_url

MAX_BYTES = 500 * 1024
_BOM = b"\xef\xbb\xbf"

# -- one form for rules and URLs -------------------------------------------------------------------

# Both sides are compared with everything decoded that may be: `%62` is `b`, and in a query `%3A` is
# `:` (the RFC's own example). Kept encoded: what is not printable ASCII, `%` itself, `*` and `$`
# (elsewhere they are wildcards), and in a path `/` and `?`, where `%2F` names something else than
# `/`.
_coded = re.compile(r"%([0-9A-Fa-f]{2})|([^!-~]|[*$])")
_KEPT = frozenset('%*$"<>`{}^|\\')
_KEPT_IN_PATH = _KEPT | frozenset("/?#")


def _in_path(m: re.Match[str]) -> str:
    return _one(m, _KEPT_IN_PATH)


def _in_query(m: re.Match[str]) -> str:
    return _one(m, _KEPT)


def _one(m: re.Match[str], kept: frozenset[str]) -> str:
    c = chr(int(m[1], 16)) if m[1] else m[2]
    return c if "!" <= c <= "~" and c not in kept else f"%{ord(c):02X}"


def _norm(text: str, in_query: bool = False) -> str:
    """`text` holds bytes as Latin-1 or is ASCII already, so that each character is an octet."""
    if _plain(text):
        return text
    path, mark, query = ("", "", text) if in_query else text.partition("?")
    path = _coded.sub(_in_path, _unsafe.sub(_encode, path))
    return path + mark + _coded.sub(_in_query, _unsafe.sub(_encode, query))


_plain = re.compile(r"[A-Za-z0-9/._~?&=:;,+@!'()\[\]-]*").fullmatch
_unsafe = re.compile(
    r'["<>`{}^|\\]'
)  # browsers and our canonical URLs encode some of these, sites write them raw


def _encode(m: re.Match[str]) -> str:
    return f"%{ord(m[0]):02X}"


# -- rules -----------------------------------------------------------------------------------------


class _Wild:
    """A pattern with `*` or a final `$`, matched piece by piece from the left: linear, nothing to
    back-track into.
    """

    __slots__ = ("allow", "anchored", "first", "last", "middle", "need", "pattern", "size")

    def __init__(self, pattern: str, allow: bool) -> None:
        self.pattern = pattern
        self.anchored = pattern.endswith("$")
        body = pattern[:-1] if self.anchored else pattern
        pieces = body.split("*")
        if not _plain(body.replace("*", "")):
            in_query = False
            for i, piece in enumerate(pieces):
                pieces[i] = _norm(piece, in_query)
                in_query = in_query or "?" in piece
        # Length decides between rules: octets of the rule as compared, wildcards included.
        self.size, self.allow = sum(map(len, pieces)) + len(pieces) - 1 + self.anchored, allow
        self.first, rest = pieces[0], pieces[1:]
        self.last = rest.pop() if rest and self.anchored else None
        self.middle = tuple(filter(None, rest))
        self.need = max(pieces, key=len)  # looked for first: most rules are about other pages

    def matches(self, path: str) -> bool:
        if not path.startswith(self.first):
            return False
        at = len(self.first)
        for piece in self.middle:
            found = path.find(piece, at)
            if found < 0:
                return False
            at = found + len(piece)
        if self.last is not None:
            return len(path) - len(self.last) >= at and path.endswith(self.last)
        return not self.anchored or at == len(path)


class _Group:
    """What one agent is told: literal rules by dictionary, the few with wildcards in order of
    length.
    """

    __slots__ = ("delay", "lengths", "literal", "wild")

    def __init__(self, rules: Iterable[tuple[str, bool]], delay: float | None) -> None:
        self.delay = delay
        self.literal: dict[str, bool] = {}
        wild: dict[str, _Wild] = {}
        for pattern, allow in rules:
            if "*" in pattern or pattern.endswith("$"):
                known = wild.get(pattern)
                if known is None or (allow and not known.allow):
                    wild[pattern] = _Wild(pattern, allow)
            else:
                text = _norm(pattern)
                self.literal[text] = allow or self.literal.get(text, False)
        self.lengths = sorted({len(p) for p in self.literal}, reverse=True)
        self.wild = sorted(wild.values(), key=lambda w: (-w.size, not w.allow))

    def decide(self, path: str) -> tuple[bool, str]:
        """The verdict, and the rule's pattern that it comes from ("": none matches)."""
        size, verdict = -1, True
        for n in self.lengths:
            allow = self.literal.get(path[:n])
            if allow is not None and n <= len(path):
                size, verdict = n, allow
                break
        for w in self.wild:
            if w.size < size or (w.size == size and verdict):
                break
            if w.need in path and w.matches(path) and (w.size > size or w.allow):
                return w.allow, w.pattern
        return verdict, path[:size] if size >= 0 else ""


class Robots:
    """A parsed robots.txt. Agents are product tokens (`Penstock/1.0 (+…)` is `penstock`), compared
    without case.
    """

    __slots__ = ("_anyone", "_compiled", "_delays", "_refuse_all", "_rules", "sitemaps")

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
        self._anyone = _Group((), None)

    def allows(self, agent: str, url: str, *, canonical: bool = False) -> bool:
        """Of a URL (or a path). A URL that is none is not allowed. `canonical=True` says that it
        came out of `canonical_url` and saves the parse.
        """
        try:
            path = _norm(url[url.index("/", 8) :]) if canonical else _path(url)
        except BadUrl:
            return False
        if path == "/robots.txt":
            return True
        return not self._refuse_all and self._group(agent).decide(path)[0]

    def deciding(self, agent: str, url: str) -> str:
        """The rule behind `allows`, as a line of robots.txt; "" where none matches."""
        allow, pattern = self._group(agent).decide(_path(url))
        return f"{'Allow' if allow else 'Disallow'}: {pattern}" if pattern else ""

    def crawl_delay(self, agent: str) -> float | None:
        return self._group(agent).delay

    def _group(self, agent: str) -> _Group:
        name = _token(agent)
        if name not in self._rules:
            name = "*"
            if name not in self._rules:
                return self._anyone
        group = self._compiled.get(name)
        if group is None:
            group = self._compiled[name] = _Group(self._rules[name], self._delays.get(name))
        return group


ALLOW_ALL = Robots({}, {}, ())
DISALLOW_ALL = Robots({}, {}, (), refuse_all=True)


def _path(url: str) -> str:
    href = canonical_url(url, "http://robots.invalid/")
    return _norm(href[href.index("/", 8) :])


# -- parsing ---------------------------------------------------------------------------------------

_token_of = re.compile(r"[A-Za-z_-]+").match
_word_of = re.compile(r"[^\s/]+").match
_KEYS = {
    "user-agent": "agent", "useragent": "agent", "user agent": "agent", "disallow": "disallow", "dissallow": "disallow", "dissalow": "disallow",
    "disalow": "disallow", "diasllow": "disallow", "disallaw": "disallow", "allow": "allow", "crawl-delay": "delay", "crawldelay": "delay",
    "sitemap": "sitemap", "site-map": "sitemap",
}  # fmt: skip


@lru_cache(maxsize=4096)
def _token(agent: str) -> str:
    """The product token, lower case; a name outside the RFC's letters counts by its first word."""
    agent = agent.strip()
    if agent[:1] == "*":
        return "*"
    m = _token_of(agent) or _word_of(agent)
    return m[0].lower() if m else ""


_compatible = re.compile(r"\(compatible; *([A-Za-z_-]+)", re.IGNORECASE).search


def product_token(user_agent: str) -> str:
    """The name that robots.txt knows us by: of `shopbot/2.1 (+https://…)` and of `Mozilla/5.0
    (compatible; shopbot/2.1; …)` it is `shopbot`.
    """
    m = _compatible(user_agent) or _token_of(user_agent.strip()) or _word_of(user_agent.strip())
    return (m[1] if m.re.groups else m[0]) if m else ""


def parse(body: bytes) -> Robots:
    """Never raises. What is over 500 KiB is not read, and a line cut there is left out, since half
    a rule is another rule.
    """
    if len(body) > MAX_BYTES:
        body = body[:MAX_BYTES]
        body = body[: max(body.rfind(b"\n"), body.rfind(b"\r")) + 1]
    rules: dict[str, list[tuple[str, bool]]] = {}
    delays: dict[str, float] = {}
    sitemaps: dict[str, None] = {}
    agents: list[str] = []
    open_group = False  # still naming agents
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
        elif key == "delay":  # an extension: it must not end the list of agents (RFC 9309, 2.2.4)
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
    if not colon:  # `Disallow /x` is common enough
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
    """What the answer to `GET /robots.txt` means. None: no answer at all. A 3xx here is one
    redirect too many.
    """
    if status is not None and 200 <= status < 300:
        return parse(body)
    if status is not None and 300 <= status < 500:
        return ALLOW_ALL
    return DISALLOW_ALL


def ttl(status: int | None, failures: int = 0) -> float:
    """Seconds to keep it (never over a day, by the RFC). A server that is down is asked again soon,
    then ever less often, up to hourly.
    """
    if status is not None and 200 <= status < 300:
        return 12 * 3600.0
    if status is not None and 300 <= status < 500:
        return 3600.0
    return min(60.0 * 2.0 ** min(max(failures, 0), 10), 3600.0)
