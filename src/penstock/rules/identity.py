"""Identity of a URL: canonical form, dedup key, host key and registrable domain.

Guard and robots.txt decide if a URL may be fetched.
"""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache
from operator import itemgetter
from typing import Literal, NamedTuple

import ada_url
from publicsuffixlist import PublicSuffixList

MAX_URL = 8192  # characters
# Characters of a host with its port. DNS knows at most 253 and a final dot. A longer name could not
# be requested, and would be too long for an index of the ledger.
_MAX_AUTHORITY = 253 + len(".:65535")

# Names of tracking parameters, compared without case. A trailing * makes a name a prefix. The list
# has only names that no site uses to choose content, so neither `ref` nor `source`.
DEFAULT_TRACKING: tuple[str, ...] = (
    "utm_*", "gclid", "gclsrc", "dclid", "gbraid", "wbraid", "gad_source", "gad_campaignid",
    "srsltid", "_ga", "_gl", "_gac", "fbclid", "fb_action_ids", "fb_action_types", "fb_source",
    "igshid", "igsh", "msclkid", "yclid", "ysclid", "_openstat", "twclid", "ttclid",
    "li_fat_id", "epik", "rdt_cid", "scclid", "mc_cid", "mc_eid", "_hsenc", "_hsmi",
    "hsctatracking", "__hssc", "__hstc", "__hsfp", "mkt_tok", "vero_id", "vero_conv",
    "oly_anon_id", "oly_enc_id", "wickedid", "rb_clickid", "s_kwcid", "ef_id", "mtm_*",
    "piwik_*", "pk_campaign", "pk_kwd", "pk_keyword", "pk_source", "pk_medium", "pk_content",
    "pk_cid", "_kx", "ml_subscriber", "ml_subscriber_hash",
)  # fmt: skip


class BadUrl(ValueError):
    """The text is not a URL that can be fetched. The reason never has the URL, which may contain a
    password.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Authority(NamedTuple):
    """Destination of a URL. An IPv6 host has no brackets."""

    scheme: str
    host: str
    port: int


# -- canonical form --------------------------------------------------------------------------------

# Fast path: if path and query contain only characters that the standard does not change, only the
# origin is parsed (by ada, cached). The lookahead excludes anything that could be a dot segment.
# All other URLs are parsed completely. A property test checks that both give the same result.
_PATH = r"/(?![^?#]*/(?:\.|%2))(?!\.|%2)[A-Za-z0-9_.~!$&'()*+,;=:@%/-]*"
_TAIL = rf"({_PATH}(?:\?[A-Za-z0-9_.~!$&()*+,;=:@%/?\[\]-]*)?)(?:#[!-~]*)?"
_absolute = re.compile(rf"(https?://[^/?#\\\s]{{1,255}}){_TAIL}").fullmatch
_rooted = re.compile(rf"(?!//){_TAIL}").fullmatch
_origin_of = re.compile(r"https?://[^/?#\\\s]{1,255}(?![^/?#\\])").match


def canonical_url(url: str, base: str | None = None) -> str:
    """Return the WHATWG serialisation without the fragment. Idempotent.

    Only http(s) URLs without user information are accepted. A base that is not a URL is ignored.
    For any invalid string, BadUrl is the only exception.
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
    """Resolve `url` as a link on the page `base`, and return it in canonical form."""
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
    destination = href[start : href.index("/", start)]
    if "@" in destination:
        raise BadUrl("a user name or password in the URL")
    if len(destination) > _MAX_AUTHORITY:
        raise BadUrl("a host name longer than 253 characters")
    href = href.partition("#")[0]
    if len(href) > MAX_URL:
        raise BadUrl(f"longer than {MAX_URL} characters")
    return href


@lru_cache(maxsize=8192)
def _origin(start: str) -> str:
    """Return `scheme://host[:port]` of the text before a URL's path.

    Return "" if it is invalid. The full parser then finds the reason.
    """
    try:
        return _parse(start)[:-1]
    except BadUrl:
        return ""


# -- destination -----------------------------------------------------------------------------------


def origin(url: str) -> str:
    """Return `scheme://host[:port]`, without the scheme's default port. Raise BadUrl."""
    if (m := _origin_of(url)) and (start := _origin(m[0])):
        return start
    href = _parse(url)
    return href[: href.index("/", 8)]


def authority(url: str) -> Authority:
    """Return scheme, host and port, by the same parser as `canonical_url`. Raise BadUrl."""
    return _authority(origin(url))


@lru_cache(maxsize=8192)
def _authority(start: str) -> Authority:
    scheme, _, rest = start.partition("://")
    host, colon, port = rest.rpartition(":")
    if not colon or port.endswith("]"):
        host, port = rest, "443" if scheme == "https" else "80"
    return Authority(scheme, host.strip("[]"), int(port))


def host_key(url: str, by: Literal["host", "domain"] = "host") -> str:
    """Return the key for rate limits, order and partitions.

    It is the `host`, with a port that is not the scheme's default, or the registrable `domain`.
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
    """Return the list in the package, without a download.

    It is read on first use: that takes 100 ms, and most processes do not need it.
    """
    return PublicSuffixList()


@lru_cache(maxsize=8192)
def registrable_domain(host: str) -> str:
    """Return the registrable domain: `example.co.uk` for `a.b.example.co.uk`.

    An address, a single label or a public suffix is returned unchanged.
    """
    host = host.strip("[]").lower().removesuffix(".")
    if ":" in host or host.rpartition(".")[2].isdigit():
        return host
    try:
        return _suffixes().privatesuffix(host) or host
    except (UnicodeError, ValueError):  # labels that IDNA rejects but WHATWG accepts
        return host


# -- the dedup key ---------------------------------------------------------------------------------

_UNRESERVED = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")
_HEX = "0123456789abcdefABCDEF"


def _normal_byte(digits: str) -> str:
    """Normalise a percent-encoded byte (RFC 3986 6.2.2): `%7e` to `~`, `%c3` to `%C3`."""
    character = chr(int(digits, 16))
    return character if character in _UNRESERVED else "%" + digits.upper()


_NORMAL_BYTES = {a + b: _normal_byte(a + b) for a in _HEX for b in _HEX}
# `shop.test.` is the same server as `shop.test`. `shop.test..` is not a valid name.
_rooted_name = re.compile(r"(https?://[^/:]*[^/:.])\.(?=[:/]|$)").match


def _normalise_percent(text: str) -> str:
    """Normalise the percent-encoded bytes of a text. A hostile URL may have 2,700 of them.

    A % without two hexadecimal digits becomes %25. Otherwise it could form a new code with decoded
    characters, which a second call would decode.
    """
    first, *others = text.split("%")
    normal = _NORMAL_BYTES.get
    return first + "".join(
        [byte + part[2:] if (byte := normal(part[:2])) else "%25" + part for part in others]
    )


def tracking(changes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the default list, plus these names, without those that have a `-` before them."""
    removed = {name[1:].lower() for name in changes if name.startswith("-")}
    return (
        *(name for name in DEFAULT_TRACKING if name not in removed),
        *(name for name in changes if not name.startswith("-")),
    )


@lru_cache(maxsize=64)
def _split_names(tracking: tuple[str, ...]) -> tuple[frozenset[str], tuple[str, ...]]:
    names = [t.lower() for t in tracking]
    return frozenset(n for n in names if not n.endswith("*")), tuple(
        n[:-1] for n in names if n.endswith("*")
    )


def dedup_key(
    url: str, *, tracking: tuple[str, ...] = DEFAULT_TRACKING, canonical: bool = False
) -> str:
    """Return one string for all spellings of a URL. Idempotent. Raise BadUrl.

    It is the canonical form with normalised percent-encoding, without tracking parameters and with
    the query sorted by name. Values of a repeated name keep their order, because `a=2&a=1` and
    `a=1&a=2` may differ. Pass `canonical=True` for a result of `canonical_url`, to save the parse.
    """
    if not canonical:
        url = canonical_url(url)
    head, question_mark, query = url.partition("?")
    if "%" in head:
        head = _normalise_percent(head)
    if m := _rooted_name(head):
        head = m[1] + head[m.end() :]
    if not question_mark:
        return head
    if "%" in query:
        query = _normalise_percent(query)
    exact, prefixes = _split_names(tracking)
    kept = []
    for pair in query.split("&"):
        name = pair.partition("=")[0]
        low = name.lower()
        if pair and low not in exact and not low.startswith(prefixes):
            kept.append((name, pair))
    if not kept:
        return head
    kept.sort(key=itemgetter(0))
    return head + "?" + "&".join([pair for _, pair in kept])


def url_key(
    url: str, *, tracking: tuple[str, ...] = DEFAULT_TRACKING, canonical: bool = False
) -> bytes:
    """Return a 16-byte hash of the dedup key, for stores."""
    return hashlib.blake2b(
        dedup_key(url, tracking=tracking, canonical=canonical).encode(), digest_size=16
    ).digest()
