"""Parser for sitemaps: urlset and index, as XML, text or feed, with or without gzip.

Applies the limits of the sitemap protocol. Does no I/O.
"""

from __future__ import annotations

import codecs
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from sys import getsizeof
from typing import Literal
from xml.parsers import expat

import msgspec

from penstock.errors import PenstockError
from penstock.rules.identity import BadUrl, canonical_url
from penstock.sources import feed_parser
from penstock.sources.markup import (
    MAX_REPAIRED,
    UnreadableDocument,
    chunks_of,
    encoding_of_chunks,
    parse_date,
    repair_entities,
    without_controls,
)

MAX_BYTES = 50 << 20  # bytes of a decompressed sitemap (limit of the protocol)
MAX_URLS = 50_000  # limit of the protocol
MAX_LOC = 2048  # characters (limit of the protocol)
MAX_ELEMENTS = 2_000_000
MAX_DEPTH = 32  # levels of elements: a normal sitemap has five
MAX_TEXT = 4096  # characters of any other value
MAX_MEDIA = 100  # images or videos of one entry
MAX_NAME = 100  # characters of an element's name
MAX_NAMES = 1000  # different names of elements and attributes: a normal sitemap has about thirty
# Bytes of a tag, a comment or another piece of markup. expat keeps it and scans it again with each
# chunk until it is complete.
MAX_TOKEN = 1 << 20
MAX_LOCS = 20 << 20  # bytes of memory for the URLs of one sitemap
MAX_MORE = 16 << 20  # bytes of memory for images, videos, alternates and news of one sitemap
_FREQUENCIES = ("always", "hourly", "daily", "weekly", "monthly", "yearly", "never")


class SitemapError(PenstockError):
    """The document is not a readable sitemap. The reason completes the sentence "it …"."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"not a sitemap: it {reason}",
            hint="open the URL in a browser: it should show a sitemap or a list of URLs",
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
    children: tuple[SitemapEntry, ...] = ()  # sitemaps of an index
    left_out: dict[str, int] = {}  # reasons for skipped entries, with their number


def parse(body: bytes, url: str) -> Sitemap:
    """Parse the sitemap at `url`. Relative URLs in it are relative to `url`.

    Raises SitemapError, and no other exception, for any bytes.
    """
    try:
        if len(body) > MAX_BYTES:
            raise UnreadableDocument(f"has {len(body)} bytes, of at most {MAX_BYTES}")
        read = chunks_of(body, MAX_BYTES)
        encoding = encoding_of_chunks(read, None)
        start = next(read(), b"")[:8192]
        head = without_controls(codecs.decode(start, encoding, "replace")).lstrip("\ufeff \t\r\n")
        if not head:
            raise UnreadableDocument("is empty")
        if re.match(r"<(!doctype\s+)?html\b", head, re.I):
            raise UnreadableDocument("is an HTML page")
        if head[0] in "{[":
            return _feed(body, url)
        if head[0] != "<":
            return _text(_decoded(read(), encoding), url)
        try:
            return _xml(_decoded(read(), encoding), url)
        except _IllFormed as e:
            # A bare ampersand in a URL is the most common error.
            if not any(b"&" in chunk for chunk in read()):
                raise UnreadableDocument(e.reason) from None
            return _xml(_repair_chunks(_decoded(read(), encoding)), url)
        except _OtherRoot:
            return _feed(body, url)
    except UnreadableDocument as e:
        raise SitemapError(e.reason) from None


# -- XML -------------------------------------------------------------------------------------------


class _OtherRoot(Exception):
    """The root element is that of a feed."""


class _IllFormed(UnreadableDocument):
    """The document is not well-formed XML."""


class _Reader:
    """Handler of expat events. It holds one entry at a time.

    Namespace prefixes are ignored, because many sitemaps do not declare them.
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
        ) = self._start, self._end, self._characters
        # Called at the name of the DTD, before its declarations are parsed.
        self.parser.StartDoctypeDeclHandler = self._doctype

    def close(self) -> None:
        """Break the cycle of references between the parser and its handlers.

        The cycle would keep all entries of the sitemap until a garbage collection, which is rare.
        """
        (
            self.parser.StartElementHandler,
            self.parser.EndElementHandler,
            self.parser.CharacterDataHandler,
            self.parser.StartDoctypeDeclHandler,
        ) = None, None, None, None

    def _doctype(self, name: str, *_: object) -> None:
        raise UnreadableDocument(
            "is an HTML page"
            if name.lower() == "html"
            else "has a document type declaration (DTD), which is not allowed"
        )

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        if len(name) > MAX_NAME:
            raise UnreadableDocument(f"has an element whose name is over {MAX_NAME} characters")
        if len(self.parser.intern) > MAX_NAMES:
            raise UnreadableDocument(f"has more than {MAX_NAMES} names of elements and attributes")
        name = name.rpartition(":")[2].lower()
        self._path.append(name)
        depth = len(self._path) - 1
        self._elements += 1
        if self._elements > MAX_ELEMENTS:
            raise UnreadableDocument(f"has more than {MAX_ELEMENTS} elements")
        if depth > MAX_DEPTH:
            raise UnreadableDocument(f"is nested more than {MAX_DEPTH} deep")
        if depth == 1:
            self.root = name
            if name in ("rss", "feed", "rdf"):
                raise _OtherRoot
            if name not in ("urlset", "sitemapindex"):
                raise UnreadableDocument(
                    "is an HTML page"
                    if name == "html"
                    else f"begins with <{name[:40]}>, which is neither urlset nor sitemapindex"
                )
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

    def _characters(self, data: str) -> None:
        # A longer text is rejected or cut later, so the rest is not needed.
        if self._entry is not None and self._size <= MAX_TEXT:
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


_SHORT = {"loc", "lastmod", "changefreq", "priority"}  # elements of an entry that are always used


class _Entries:
    """Entries of the sitemap at `url`, and the reasons for entries that are left out."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.made: list[SitemapEntry] = []
        self.left_out: Counter[str] = Counter()
        self._tried = self._locs = self._more = 0  # entries, and bytes of memory

    def sitemap(
        self, kind: Literal["urlset", "index"], form: Literal["xml", "text", "feed"] = "xml"
    ) -> Sitemap:
        made = tuple(self.made)
        return Sitemap(
            url=self._url,
            kind=kind,
            form=form,
            entries=made if kind == "urlset" else (),
            children=made if kind == "index" else (),
            left_out=dict(self.left_out),
        )

    def add(self, fields: dict[str, list[str]]) -> None:
        # Checked first, so that entries beyond the limit take no time.
        self._tried += 1
        if len(self.made) >= MAX_URLS or self._tried > 2 * MAX_URLS:
            self.left_out[f"more than the {MAX_URLS} URLs that the protocol allows"] += 1
            return
        if not (loc := self.loc(fields.get("loc", [""])[0])):
            return
        self._locs += getsizeof(loc)
        if self._locs > MAX_LOCS:
            raise UnreadableDocument(f"has URLs of more than {MAX_LOCS} bytes")
        more = {name: fields[name] for name in fields.keys() - _SHORT}
        self._more += sum(getsizeof(text) for texts in more.values() for text in texts)
        if more and self._more > MAX_MORE:
            self.left_out["more images, videos and news than fit (the entry is used without)"] += 1
            fields = {name: fields[name] for name in fields.keys() & _SHORT}
        lastmod = parse_date(given) if (given := _one(fields, "lastmod")) else None
        if given and lastmod is None:
            self.left_out["a lastmod that is not a date (the entry is used without it)"] += 1
        frequency, priority = (
            (_one(fields, "changefreq") or "").lower(),
            _one(fields, "priority") or "",
        )
        self.made.append(
            SitemapEntry(
                loc=loc,
                lastmod=lastmod,
                changefreq=frequency if frequency in _FREQUENCIES else None,
                priority=float(priority)
                if re.fullmatch(r"[01](\.[0-9]{1,9})?", priority)
                else None,
                images=tuple(fields.get("image/loc", ())),
                videos=tuple(fields.get("video/content_loc", fields.get("video/player_loc", ()))),
                alternates=tuple(
                    (language, href)
                    for language, _, href in (
                        link.partition(" ") for link in fields.get("link", ())
                    )
                ),
                news_title=_one(fields, "news/title"),
                news_date=parse_date(_one(fields, "news/publication_date")),
            )
        )

    def loc(self, text: str) -> str:
        """Return the canonical URL, or "" if it is invalid. Count the reason then."""
        if not text:
            reason = "no loc"
        elif len(text) > MAX_LOC:
            reason = f"a loc of more than {MAX_LOC} characters"
        else:
            try:
                return canonical_url(text, self._url)
            except BadUrl as e:
                reason = f"a loc that cannot be fetched: {e.reason}"
        self.left_out[reason] += 1
        return ""


def _xml(chunks: Iterable[str], url: str) -> Sitemap:
    """Parse XML. Raises _IllFormed, _OtherRoot and UnreadableDocument."""
    entries = _Entries(url)
    reader = _Reader(entries.add)
    parsed = 0  # bytes that the parser has received
    try:
        for chunk in chunks:
            data = chunk.encode()
            reader.parser.Parse(data, False)
            parsed += len(data)
            if parsed - reader.parser.CurrentByteIndex > MAX_TOKEN:
                raise UnreadableDocument(f"has a tag or a comment of more than {MAX_TOKEN} bytes")
        reader.parser.Parse(b"", True)
    except expat.ExpatError as e:
        raise _IllFormed(f"is ill-formed XML: {e}") from None
    finally:
        reader.close()
    return entries.sitemap("index" if reader.root == "sitemapindex" else "urlset")


def _decoded(chunks: Iterable[bytes], encoding: str) -> Iterator[str]:
    """Decode chunks, without characters that XML does not allow."""
    decoder = codecs.getincrementaldecoder(encoding)("replace")
    first = True
    for data in chain(chunks, (b"",)):
        chunk = without_controls(decoder.decode(data, not data))
        if first:
            # XML does not allow whitespace before the declaration, but some servers send it.
            chunk = chunk.lstrip("\ufeff \t\r\n")
            first = not chunk
        if chunk:
            yield chunk


def _repair_chunks(chunks: Iterator[str]) -> Iterator[str]:
    """Repair entities in chunks of text. An entity is never split between two chunks."""
    rest, left = "", MAX_REPAIRED
    for chunk in chunks:
        chunk = rest + chunk
        at = chunk.rfind("&", max(0, len(chunk) - 40))
        chunk, rest = (chunk[:at], chunk[at:]) if at >= 0 else (chunk, "")
        left -= chunk.count("&")
        if left < 0:
            raise UnreadableDocument(f"is ill-formed, and has more than {MAX_REPAIRED} entities")
        yield repair_entities(chunk)
    yield repair_entities(rest)


def _one(fields: dict[str, list[str]], name: str) -> str | None:
    values = fields.get(name)
    return values[0][:MAX_TEXT] if values else None


# -- other forms -----------------------------------------------------------------------------------


def _text(chunks: Iterable[str], url: str) -> Sitemap:
    """Parse a list with one URL per line. Raises UnreadableDocument if it has no URL."""
    entries = _Entries(url)
    for line in _lines(chunks):
        if re.match(r"https?://", line, re.I):
            entries.add({"loc": [line]})
        else:
            entries.left_out["a line that is not a URL"] += 1
            left_out = entries.left_out.total()
            if left_out > 2 * MAX_URLS or (left_out >= 100 and not entries.made):
                break
    if not entries.made:
        raise UnreadableDocument("is neither XML nor a list of URLs")
    return entries.sitemap("urlset", "text")


def _lines(chunks: Iterable[str]) -> Iterator[str]:
    rest = ""
    for chunk in chunks:
        *lines, rest = (rest + chunk).replace("\r", "\n").split("\n")
        yield from (line for text in lines if (line := text.strip()))
        rest = rest[: MAX_LOC * 2]  # a longer line is rejected, so its end is not needed
    if rest.strip():
        yield rest.strip()


def _feed(body: bytes, url: str) -> Sitemap:
    try:
        feed = feed_parser.parse(body, None)
    except feed_parser.FeedError as e:
        raise UnreadableDocument(e.reason) from None
    entries = _Entries(url)
    found = {loc: e for e in feed if (loc := entries.loc(e.url or ""))}
    entries.made += [
        SitemapEntry(loc=loc, lastmod=e.updated if e.updated is not None else e.published)
        for loc, e in found.items()
    ]
    return entries.sitemap("urlset", "feed")
