"""What a URL is: canonical form, dedup key, host key, registrable domain. Whether it may be fetched
is for guard and robots.
"""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache
from typing import Literal, NamedTuple

import ada_url
from publicsuffixlist import PublicSuffixList

MAX_URL = 8192

# By name, case ignored; a trailing * makes it a prefix. Only names that no site uses to choose
# content (so no `ref`, no `source`).
DEFAULT_TRACKING: tuple[str, ...] = (
    "utm_*", "gclid", "gclsrc", "dclid", "gbraid", "wbraid", "gad_source", "gad_campaignid", "srsltid", "_ga", "_gl", "_gac",
    "fbclid", "fb_action_ids", "fb_action_types", "fb_source", "igshid", "igsh", "msclkid", "yclid", "ysclid", "_openstat", "twclid", "ttclid",
    "li_fat_id", "epik", "rdt_cid", "scclid", "mc_cid", "mc_eid", "_hsenc", "_hsmi", "hsctatracking", "__hssc", "__hstc", "__hsfp", "mkt_tok",
    "vero_id", "vero_conv", "oly_anon_id", "oly_enc_id", "wickedid", "rb_clickid", "s_kwcid", "ef_id", "mtm_*", "piwik_*", "pk_campaign",
    "pk_kwd", "pk_keyword", "pk_source", "pk_medium", "pk_content", "pk_cid", "_kx", "ml_subscriber", "ml_subscriber_hash",
)  # fmt: skip


class BadUrl(ValueError):
    """No URL we would ever fetch. The reason never repeats the URL: it may hold a password."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Authority(NamedTuple):
    """Whom a URL speaks to; an IPv6 host is without its brackets."""

    scheme: str
    host: str
    port: int


# -- canonical form --------------------------------------------------------------------------------

# The short cut: where path and query hold only characters that the standard leaves alone, they need
# no parser; the origin always gets one (ada's, cached). The lookahead refuses whatever could be a
# dot segment. Every other shape takes the long way, and a property test holds the two ways equal.
_PATH = r"/(?![^?#]*/(?:\.|%2))(?!\.|%2)[A-Za-z0-9_.~!$&'()*+,;=:@%/-]*"
_TAIL = rf"({_PATH}(?:\?[A-Za-z0-9_.~!$&()*+,;=:@%/?\[\]-]*)?)(?:#[!-~]*)?"
_absolute = re.compile(rf"(https?://[^/?#\\\s]{{1,255}}){_TAIL}").fullmatch
_rooted = re.compile(rf"(?!//){_TAIL}").fullmatch
_origin_of = re.compile(r"https?://[^/?#\\\s]{1,255}(?![^/?#\\])").match


def canonical_url(url: str, base: str | None = None) -> str:
    """The WHATWG serialisation without the fragment, for an http(s) URL without user-info.
    Idempotent.

    A base that is no URL itself is no base. Raises BadUrl, and nothing else, for any string.
    """
    if len(url) <= MAX_URL:
        start = rest = ""
        if m := _absolute(url):
            start, rest = _origin(m[1]), m[2]
        elif base is not None and (m := _rooted(url)) and (o := _origin_of(base)):
            start, rest = _origin(o[0]), m[1]
        if start and len(start) + len(rest) <= MAX_URL:
            return start + rest
    return _parse(url, base)


def join(base: str, url: str) -> str:
    """`url` as a link on the page `base`, canonical."""
    return canonical_url(url, base)


def _parse(url: str, base: str | None = None) -> str:
    if len(url) > MAX_URL or (base is not None and len(base) > MAX_URL):
        raise BadUrl(f"longer than {MAX_URL} characters")
    try:
        try:
            href = ada_url.normalize_url(url) if base is None else ada_url.join_url(base, url)
        except ValueError:
            if base is None:
                raise
            href = ada_url.normalize_url(url)
    except ValueError:
        raise BadUrl("not a URL" if url.strip() else "empty") from None
    start = 8 if href.startswith("https://") else 7 if href.startswith("http://") else 0
    if not start:
        raise BadUrl("the scheme is not http or https")
    # In this serialisation a path always follows, so the first slash ends the authority.
    if "@" in href[start : href.index("/", start)]:
        raise BadUrl("a user name or password in the URL")
    href = href.partition("#")[0]
    if len(href) > MAX_URL:
        raise BadUrl(f"longer than {MAX_URL} characters")
    return href


@lru_cache(maxsize=8192)
def _origin(start: str) -> str:
    """`scheme://host[:port]` of a URL's beginning up to its path; empty where that is not the whole
    story (the long way finds the reason).
    """
    try:
        return _parse(start)[:-1]
    except BadUrl:
        return ""


# -- whom it speaks to -----------------------------------------------------------------------------


def origin(url: str) -> str:
    """`scheme://host[:port]`, the port only where it is not the scheme's own. Raises BadUrl."""
    if (m := _origin_of(url)) and (start := _origin(m[0])):
        return start
    href = _parse(url)
    return href[: href.index("/", 8)]


def authority(url: str) -> Authority:
    """Scheme, host and port as the one parser sees them. Raises BadUrl."""
    return _authority(origin(url))


@lru_cache(maxsize=8192)
def _authority(start: str) -> Authority:
    scheme, _, rest = start.partition("://")
    host, colon, port = rest.rpartition(":")
    if not colon or port.endswith("]"):
        host, port = rest, "443" if scheme == "https" else "80"
    return Authority(scheme, host.strip("[]"), int(port))


def host_key(url: str, by: Literal["host", "domain"] = "host") -> str:
    """What politeness, order and partitions go by: `host` (with a port that is not the scheme's
    own) or the registrable `domain`.
    """
    return _host_key(origin(url), by)


@lru_cache(maxsize=8192)
def _host_key(start: str, by: str) -> str:
    if by == "domain":
        return registrable_domain(_authority(start).host)
    if m := _rooted_name(start):
        start = m[1] + start[m.end() :]
    return start.partition("://")[2]


@lru_cache(maxsize=1)
def _suffixes() -> PublicSuffixList:
    """The snapshot inside the package; never a download. Read on first use: it costs 100 ms that
    most processes do not need.
    """
    return PublicSuffixList()


@lru_cache(maxsize=8192)
def registrable_domain(host: str) -> str:
    """`a.b.example.co.uk` → `example.co.uk`. An address, a single label or a bare public suffix is
    its own domain.
    """
    host = host.strip("[]").lower()
    host = host[:-1] if host.endswith(".") else host
    if ":" in host or host.rpartition(".")[2].isdigit():
        return host
    try:
        return _suffixes().privatesuffix(host) or host
    except (UnicodeError, ValueError):  # labels that IDNA refuses but WHATWG lets pass
        return host


# -- the dedup key ---------------------------------------------------------------------------------

_UNRESERVED = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")
_percent = re.compile(r"%([0-9A-Fa-f]{2})?")
_rooted_name = re.compile(
    r"(https?://[^/:]*[^/:.])\.(?=[:/]|$)"
).match  # `shop.test.` is the same server as `shop.test`; `shop.test..` is none


def _plain(m: re.Match[str]) -> str:
    """RFC 3986 6.2.2: `%7e` is `~`, `%c3` is `%C3`. A stray % becomes %25, or two rounds would
    decode what one had put together.
    """
    if not m[1]:
        return "%25"
    byte = int(m[1], 16)
    return chr(byte) if byte in _UNRESERVED else "%" + m[1].upper()


def tracking(changes: tuple[str, ...]) -> tuple[str, ...]:
    """The usual list with these beside it; without those that have a `-` before them."""
    less = {name[1:].lower() for name in changes if name.startswith("-")}
    return (
        *(name for name in DEFAULT_TRACKING if name not in less),
        *(name for name in changes if not name.startswith("-")),
    )


@lru_cache(maxsize=64)
def _listed(tracking: tuple[str, ...]) -> tuple[frozenset[str], tuple[str, ...]]:
    names = [t.lower() for t in tracking]
    return frozenset(n for n in names if not n.endswith("*")), tuple(
        n[:-1] for n in names if n.endswith("*")
    )


def dedup_key(
    url: str, *, tracking: tuple[str, ...] = DEFAULT_TRACKING, canonical: bool = False
) -> str:
    """One string for all spellings of a URL: canonical, percent-encoding normalised, tracking
    parameters gone, query sorted by name.

    Values of a repeated name keep their order (`a=2&a=1` may mean something else than `a=1&a=2`).
    Idempotent. Raises BadUrl. `canonical=True` says that the URL came out of `canonical_url` and
    saves the parse.
    """
    if not canonical:
        url = canonical_url(url)
    head, mark, query = url.partition("?")
    if "%" in head:
        head = _percent.sub(_plain, head)
    if m := _rooted_name(head):
        head = m[1] + head[m.end() :]
    if not mark:
        return head
    if "%" in query:
        query = _percent.sub(_plain, query)
    exact, prefixes = _listed(tracking)
    kept = []
    for pair in query.split("&"):
        name = pair.partition("=")[0]
        low = name.lower()
        if pair and low not in exact and not low.startswith(prefixes):
            kept.append((name, pair))
    if not kept:
        return head
    kept.sort(key=_first)
    return head + "?" + "&".join([pair for _, pair in kept])


def _first(pair: tuple[str, str]) -> str:
    return pair[0]


def url_key(
    url: str, *, tracking: tuple[str, ...] = DEFAULT_TRACKING, canonical: bool = False
) -> bytes:
    """16 bytes of the dedup key, for stores."""
    return hashlib.blake2b(
        dedup_key(url, tracking=tracking, canonical=canonical).encode(), digest_size=16
    ).digest()
