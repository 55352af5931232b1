"""Sitemaps as values: urlset and index, XML, text and feeds, gzipped or not, within the protocol's
limits. No network, no memory of what was read before.
"""

from __future__ import annotations

import codecs
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Literal
from xml.parsers import expat

import msgspec

from penstock.errors import PenstockError
from penstock.rules.identity import BadUrl, canonical_url
from penstock.sources.feed_parser import FeedError
from penstock.sources.feed_parser import parse as parse_feed
from penstock.sources.markup import (
    MAX_MENDED,
    Unreadable,
    encoding_of,
    mended,
    unpacked,
    when,
    without_controls,
)

MAX_BYTES = 50 << 20  # decoded: the protocol's
MAX_URLS = 50_000  # the protocol's
MAX_LOC = 2048  # characters: the protocol's
MAX_ELEMENTS = 2_000_000
MAX_DEPTH = 32  # of elements; an honest sitemap has five
MAX_TEXT = 4096  # characters of any other value
MAX_MEDIA = 100  # images or videos of one entry
_PIECE = 1 << 16
_FREQUENCIES = ("always", "hourly", "daily", "weekly", "monthly", "yearly", "never")


class SitemapError(PenstockError):
    """What was given is no sitemap that can be read; the reason finishes the sentence "it …"."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"no sitemap: it {reason}",
            hint="look at the address in a browser: it should show a sitemap, or a list of URLs",
        )
        self.reason = reason


class SitemapEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    loc: str  # canonical
    lastmod: float | None = None  # epoch seconds
    changefreq: str | None = None
    priority: float | None = None
    images: tuple[str, ...] = ()
    videos: tuple[str, ...] = ()
    alternates: tuple[tuple[str, str], ...] = ()  # language, URL
    news_title: str | None = None
    news_date: float | None = None


class Sitemap(msgspec.Struct, frozen=True, kw_only=True):
    url: str
    kind: Literal["urlset", "index"]
    form: Literal["xml", "text", "feed"] = "xml"
    entries: tuple[SitemapEntry, ...] = ()
    children: tuple[SitemapEntry, ...] = ()  # of an index: where its sitemaps are
    left_out: dict[str, int] = {}  # why, and how many


def parse(body: bytes, url: str) -> Sitemap:
    """`url` is where it came from: relative addresses are relative to it. Raises SitemapError, and
    nothing else, for any bytes.
    """
    try:
        body = unpacked(body, MAX_BYTES)
        encoding = encoding_of(body, None)
        head = without_controls(codecs.decode(body[:8192], encoding, "replace")).lstrip(
            "\ufeff \t\r\n"
        )
        if not head:
            raise Unreadable("is empty")
        if re.match(r"<(!doctype\s+)?html\b", head, re.I):
            raise Unreadable("is an HTML page")
        if head[0] in "{[":
            return _feed(body, url)
        return _xml(body, encoding, url) if head[0] == "<" else _text(body, encoding, url)
    except Unreadable as e:
        raise SitemapError(e.reason) from None


# -- XML -------------------------------------------------------------------------------------------


class _Rooted(Exception):
    """The root is not a sitemap's."""


class _Reader:
    """Takes expat's events; holds one entry at a time. Prefixes are not looked at: many sitemaps
    forget to declare theirs.
    """

    def __init__(self, add: Callable[[dict[str, list[str]]], None]) -> None:
        self._add, self._path, self._text, self._size = add, [""], [""], 0
        self._entry: dict[str, list[str]] | None = None
        self.root, self._elements = "", 0
        self.parser = expat.ParserCreate("utf-8")
        self.parser.buffer_text = True
        (
            self.parser.StartElementHandler,
            self.parser.EndElementHandler,
            self.parser.CharacterDataHandler,
        ) = self._start, self._end, self._words
        self.parser.StartDoctypeDeclHandler = (
            self._doctype
        )  # called at its name, before anything in it can be declared

    def _doctype(self, name: str, *_: object) -> None:
        raise Unreadable(
            "is an HTML page"
            if name.lower() == "html"
            else "has a document type declaration (DTD), and none is read"
        )

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        name = name.rpartition(":")[2].lower()
        self._path.append(name)
        depth = len(self._path) - 1
        self._elements += 1
        if self._elements > MAX_ELEMENTS:
            raise Unreadable(f"has more than {MAX_ELEMENTS} elements")
        if depth > MAX_DEPTH:
            raise Unreadable(f"is nested more than {MAX_DEPTH} deep")
        if depth == 1:
            self.root = name
            if name not in ("urlset", "sitemapindex"):
                raise _Rooted(name)
        elif depth == 2:
            self._entry = {} if name in ("url", "sitemap") else None
        elif (
            self._entry is not None
            and name == "link"
            and depth == 3
            and "hreflang" in attributes
            and "href" in attributes
        ):
            self._keep("link", f"{attributes['hreflang'][:40]} {attributes['href'][:MAX_LOC]}")
        self._text, self._size = [], 0

    def _words(self, data: str) -> None:
        if (
            self._entry is not None and self._size <= MAX_TEXT
        ):  # the rest says only that it is too long
            self._text.append(data)
            self._size += len(data)

    def _end(self, name: str) -> None:
        depth = len(self._path) - 1
        if self._entry is not None and depth > 2 and self._text:
            self._keep("/".join(self._path[3:]), "".join(self._text))
        if depth == 2 and self._entry is not None:
            self._add(self._entry)
            self._entry = None
        self._path.pop()
        self._text = []

    def _keep(self, name: str, value: str) -> None:
        assert self._entry is not None
        values = self._entry.setdefault(name, [])
        if len(values) < MAX_MEDIA and len(self._entry) < 64 and (value := value.strip()):
            values.append(value)


def _xml(body: bytes, encoding: str, url: str, *, mend: bool = False) -> Sitemap:
    made: list[SitemapEntry] = []
    left_out: Counter[str] = Counter()
    reader = _Reader(lambda fields: _take(made, left_out, fields, url))
    try:
        for piece in _whole_entities(_pieces(body, encoding)) if mend else _pieces(body, encoding):
            reader.parser.Parse(piece, False)
        reader.parser.Parse("", True)
    except _Rooted as e:
        if str(e) == "html":
            raise Unreadable("is an HTML page") from None
        if str(e) in ("rss", "feed", "rdf"):
            return _feed(body, url)
        raise Unreadable(
            f"begins with <{str(e)[:40]}>, which is neither urlset nor sitemapindex"
        ) from None
    except expat.ExpatError as e:
        if (
            not mend and b"&" in body
        ):  # a raw ampersand in an address is the commonest slip there is
            return _xml(body, encoding, url, mend=True)
        raise Unreadable(f"is ill-formed XML: {e}") from None
    if reader.root == "sitemapindex":
        return Sitemap(url=url, kind="index", children=tuple(made), left_out=dict(left_out))
    return Sitemap(url=url, kind="urlset", entries=tuple(made), left_out=dict(left_out))


def _pieces(body: bytes, encoding: str) -> Iterator[str]:
    """Decoded, and clean of what XML cannot hold; never the whole at once."""
    decoder = codecs.getincrementaldecoder(encoding)("replace")
    first = True
    for at in range(0, len(body), _PIECE):
        piece = without_controls(decoder.decode(body[at : at + _PIECE], at + _PIECE >= len(body)))
        if first:
            piece = piece.lstrip(
                "\ufeff \t\r\n"
            )  # blanks before the declaration are an error that nobody means
            first = not piece
        if piece:
            yield piece


def _whole_entities(pieces: Iterator[str]) -> Iterator[str]:
    """Mended, and no entity is cut in two."""
    rest, room = "", MAX_MENDED
    for piece in pieces:
        piece = rest + piece
        at = piece.rfind("&", max(0, len(piece) - 40))
        piece, rest = (piece[:at], piece[at:]) if at >= 0 else (piece, "")
        room -= piece.count("&")
        if room < 0:
            raise Unreadable(f"is ill-formed, and has more than {MAX_MENDED} entities")
        yield mended(piece)
    yield mended(rest)


def _take(
    made: list[SitemapEntry], left_out: Counter[str], fields: dict[str, list[str]], url: str
) -> None:
    if len(made) >= MAX_URLS:  # first: what does not count must not cost
        left_out[f"beyond the {MAX_URLS} that the protocol allows"] += 1
        return
    if not (loc := _loc(fields.get("loc", [""])[0], url, left_out)):
        return
    lastmod = when(given) if (given := _one(fields, "lastmod")) else None
    if given and lastmod is None:
        left_out["a lastmod that is no date (the entry counts as without)"] += 1
    frequency, priority = (_one(fields, "changefreq") or "").lower(), _one(fields, "priority") or ""
    made.append(
        SitemapEntry(
            loc=loc, lastmod=lastmod, changefreq=frequency if frequency in _FREQUENCIES else None,
            priority=float(priority) if re.fullmatch(r"[01](\.[0-9]{1,9})?", priority) else None,
            images=tuple(fields.get("image/loc", ())), videos=tuple(fields.get("video/content_loc", fields.get("video/player_loc", ()))),
            alternates=tuple((language, href) for language, _, href in (link.partition(" ") for link in fields.get("link", ()))),
            news_title=_one(fields, "news/title"), news_date=when(_one(fields, "news/publication_date")),
        )
    )  # fmt: skip


def _one(fields: dict[str, list[str]], name: str) -> str | None:
    values = fields.get(name)
    return values[0][:MAX_TEXT] if values else None


def _loc(text: str, url: str, left_out: Counter[str]) -> str:
    """Canonical, or "" and counted."""
    if not text:
        left_out["no loc"] += 1
        return ""
    if len(text) > MAX_LOC:
        left_out[f"a loc of more than {MAX_LOC} characters"] += 1
        return ""
    try:
        return canonical_url(text, url)
    except BadUrl as e:
        left_out[f"a loc that is no URL we would fetch: {e.reason}"] += 1
        return ""


# -- other forms -----------------------------------------------------------------------------------


def _text(body: bytes, encoding: str, url: str) -> Sitemap:
    """One URL a line. What has none is no list."""
    made: list[SitemapEntry] = []
    left_out: Counter[str] = Counter()
    for line in _lines(body, encoding):
        if not re.match(r"https?://", line, re.I):
            left_out["a line that is no URL"] += 1
            if not made and left_out.total() >= 100:
                break
        elif loc := _loc(line, url, left_out):
            if len(made) < MAX_URLS:
                made.append(SitemapEntry(loc=loc))
            else:
                left_out[f"beyond the {MAX_URLS} that the protocol allows"] += 1
    if not made:
        raise Unreadable("is neither XML nor a list of URLs")
    return Sitemap(
        url=url, kind="urlset", form="text", entries=tuple(made), left_out=dict(left_out)
    )


def _lines(body: bytes, encoding: str) -> Iterator[str]:
    rest = ""
    for piece in _pieces(body, encoding):
        *lines, rest = (rest + piece).replace("\r", "\n").split("\n")
        yield from (line for text in lines if (line := text.strip()))
        rest = rest[: MAX_LOC * 2]  # a line without an end is too long long before it ends
    if rest.strip():
        yield rest.strip()


def _feed(body: bytes, url: str) -> Sitemap:
    try:
        feed = parse_feed(body, None)
    except FeedError as e:
        raise Unreadable(e.reason) from None
    left_out: Counter[str] = Counter()
    found = {loc: e for e in feed if (loc := _loc(e.url or "", url, left_out))}
    made = [
        SitemapEntry(loc=loc, lastmod=e.updated if e.updated is not None else e.published)
        for loc, e in found.items()
    ]
    return Sitemap(
        url=url, kind="urlset", form="feed", entries=tuple(made[:MAX_URLS]), left_out=dict(left_out)
    )
