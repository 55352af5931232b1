"""Reading a page: parsel's surface over turbohtml, charsets, JSON-LD, links. Not which extractor
runs, nor what becomes of a record.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from re import Pattern
from typing import Any, NoReturn, Protocol, overload

import msgspec
import turbohtml.detect as charsets  # importing it registers the whatwg-* codecs
from turbohtml import Document, Element, Node
from turbohtml import parse as parse_html

from penstock.authoring import queries
from penstock.authoring.prefix import SMALLEST, Beginning, beginning
from penstock.authoring.queries import Found, Path, Query, string
from penstock.rules.identity import BadUrl, canonical_url, join

# -- the surface -----------------------------------------------------------------------------------


class Selector:
    """A node of the page, or a string found in it. The names and answers are parsel's."""

    __slots__ = ("root",)

    def __init__(self, root: Found) -> None:
        self.root = root

    def css(self, query: str) -> SelectorList:
        return SelectorList(self, queries.css(query))

    def xpath(self, query: str, **variables: Any) -> SelectorList:
        """Variables stand for `$name` in the query."""
        path = queries.xpath(query)
        return SelectorList(self, Path(query, path.path, variables) if variables else path)

    def first(self, query: Query) -> str | None:
        """What the first match below gives; below a string there is nothing."""
        return query.first(self.root) if isinstance(self.root, Node) else None

    def get(self) -> str:
        """An element's outer HTML; a text or an attribute as it is."""
        return string(self.root)

    def getall(self) -> list[str]:
        return [self.get()]

    @property
    def text(self) -> str:
        """All text inside, tags left out."""
        return self.root.text if isinstance(self.root, Node) else string(self.root)

    @property
    def attrib(self) -> dict[str, str]:
        root = self.root
        return (
            {name: root.attr(name) or "" for name in root.attrs}
            if isinstance(root, Element)
            else {}
        )

    def re(self, regex: str | Pattern[str]) -> list[str]:
        """Groups if it has some (a group named `extract` alone), else whole matches; on what
        `get()` gives.
        """
        pattern = re.compile(regex)
        text = self.get()
        if isinstance(self.root, Node):
            text = (
                text.replace("&nbsp;", "\xa0").replace("&gt;", ">").replace("&quot;", '"')
            )  # entities, as parsel: all but &lt; and &amp;
        if "extract" in pattern.groupindex:
            return [m["extract"] for m in pattern.finditer(text) if m["extract"] is not None]
        return [
            g for m in pattern.finditer(text) for g in (m.groups("") if pattern.groups else (m[0],))
        ]

    @overload
    def re_first(self, regex: str | Pattern[str], default: str) -> str: ...
    @overload
    def re_first(self, regex: str | Pattern[str], default: None = None) -> str | None: ...
    def re_first(self, regex: str | Pattern[str], default: str | None = None) -> str | None:
        return next(iter(self.re(regex)), default)

    extract = get

    def __bool__(self) -> bool:
        return bool(self.get())

    def __repr__(self) -> str:
        return f"<Selector {self.get()[:60]!r}>"


class SelectorList:
    """What a query found, found when it is asked for: `.get()` stops at the first."""

    __slots__ = ("_items", "_of", "_query")

    def __init__(
        self, of: Selector | None, query: Query | None, items: list[Selector] | None = None
    ) -> None:
        self._of, self._query, self._items = of, query, items

    def _all(self) -> list[Selector]:
        if self._items is None:
            root = self._of.root  # type: ignore[union-attr]
            found = self._query.found(root) if isinstance(root, Node) else []  # type: ignore[union-attr]
            self._items = [Selector(n) for n in found]
        return self._items

    @overload
    def get(self, default: str) -> str: ...
    @overload
    def get(self, default: None = None) -> str | None: ...
    def get(self, default: str | None = None) -> str | None:
        if self._items is None:
            value = self._of.first(self._query)  # type: ignore[union-attr, arg-type]
            return default if value is None else value
        return self._items[0].get() if self._items else default

    def getall(self) -> list[str]:
        if self._items is None and isinstance(root := self._of.root, Node):  # type: ignore[union-attr]
            return self._query.all(root)  # type: ignore[union-attr]
        return [s.get() for s in self._all()]

    extract, extract_first = getall, get

    @property
    def first(self) -> Selector | None:
        return next(iter(self._all()), None)

    def css(self, query: str) -> SelectorList:
        return SelectorList(None, None, [found for s in self._all() for found in s.css(query)])

    def xpath(self, query: str, **variables: Any) -> SelectorList:
        return SelectorList(
            None, None, [found for s in self._all() for found in s.xpath(query, **variables)]
        )

    def re(self, regex: str | Pattern[str]) -> list[str]:
        return [found for s in self._all() for found in s.re(regex)]

    @overload
    def re_first(self, regex: str | Pattern[str], default: str) -> str: ...
    @overload
    def re_first(self, regex: str | Pattern[str], default: None = None) -> str | None: ...
    def re_first(self, regex: str | Pattern[str], default: str | None = None) -> str | None:
        return next((found for s in self._all() for found in s.re(regex)), default)

    @property
    def attrib(self) -> dict[str, str]:
        """Of the first element."""
        return next((s.attrib for s in self._all()), {})

    def __iter__(self) -> Iterator[Selector]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    @overload
    def __getitem__(self, index: int) -> Selector: ...
    @overload
    def __getitem__(self, index: slice) -> SelectorList: ...
    def __getitem__(self, index: int | slice) -> Selector | SelectorList:
        return (
            SelectorList(None, None, self._all()[index])
            if isinstance(index, slice)
            else self._all()[index]
        )

    def __bool__(self) -> bool:
        return bool(self._all())

    def __repr__(self) -> str:
        return repr(self._all())


# -- documents -------------------------------------------------------------------------------------

FORGETTING = 64  # after about two thirds as many pages, half of what was needed is tried
_CHARSET = re.compile(r"""charset\s*=\s*["']?([^\s"';,]+)""", re.IGNORECASE)


@lru_cache(1024)
def _header_charset(content_type: str | None) -> str | None:
    """The header's charset if the web knows it; a wrong label is no better than none."""
    match = _CHARSET.search(content_type or "")
    if match is None or not match[1].isascii():
        return None
    try:
        b"".decode("whatwg-" + match[1])
        parse_html(b"", encoding=match[1])
    except (LookupError, ValueError):
        return None
    return match[1]


class Whole(Selector):
    """A page, parsed as far as it is asked: `.get()` is often answered by its beginning. How long
    that has to be is learned from page to page, by the query that comes first on each.
    """

    __slots__ = ("_beginning", "_body", "_encoding", "_opener", "_parsed", "_size", "_tried")

    def __init__(self, body: bytes, encoding: str | None) -> None:
        self._body, self._encoding, self._size, self._tried = body, encoding, 0, False
        self._beginning: Beginning | None = None
        self._opener: Query | None = None
        self._parsed: Document | None = None

    @property
    def root(self) -> Document:  # type: ignore[override]
        if self._parsed is None:
            if self._opener is not None and self._tried:  # in vain
                self._opener.reach = len(self._body)
            self._parsed = parse_html(
                self._body,
                encoding=self._encoding,
                detect_encoding=self._encoding is None,
                positions=False,
            )
            self._beginning = None
        return self._parsed

    def first(self, query: Query) -> str | None:
        if self._parsed is None and query.steady:
            opener = self._opener
            if opener is None:
                opener = self._opener = query
                self._begin(opener, max(SMALLEST, query.reach - query.reach // FORGETTING))
            while self._beginning is not None:
                if (value := self._beginning.first(query)) is not None:
                    return value
                self._begin(opener, min(2 * self._size, max(len(self._body) // 2, self._size + 1)))
        return query.first(self.root)

    def _begin(self, opener: Query, size: int) -> None:
        self._size = opener.reach = size
        self._beginning = beginning(self._body, self._encoding, size)
        self._tried = self._tried or self._beginning is not None


def parse(body: bytes, content_type: str | None = None) -> Selector:
    """Byte-order mark, header, `<meta>`, UTF-8 if it is, then what the bytes look like. Never
    fails.
    """
    return Whole(body, _header_charset(content_type))


def charset(body: bytes, content_type: str | None = None) -> str:
    """The codec by which a body is read, by the same order of evidence as `parse`; empty where
    nothing tells.
    """
    if body.startswith(b"\xef\xbb\xbf"):
        return "utf-8-sig"
    if not body.startswith((b"\xff\xfe", b"\xfe\xff")) and (label := _header_charset(content_type)):
        return "whatwg-" + label
    return charsets.detect(body).codec or ""


def decode(body: bytes, content_type: str | None = None) -> str:
    """The body as text; what is malformed becomes U+FFFD."""
    codec = charset(body, content_type)
    return body.decode(codec, "replace") if codec else ""


def jsonld(document: Selector) -> list[dict[str, Any]]:
    """Every object of every block, lists and `@graph` flattened, in order. A broken block is left
    out.
    """
    found: list[dict[str, Any]] = []
    if not isinstance(document.root, Node):
        return found
    for script in document.root.select('script[type^="application/ld+json" i]'):
        text = script.text.strip()
        try:
            pending = [msgspec.json.decode(text)]
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            try:  # what shops really write: raw line breaks in strings, comment or CDATA wrappers
                text = (
                    text.removeprefix("<!--")
                    .removeprefix("//<![CDATA[")
                    .removesuffix("-->")
                    .removesuffix("//]]>")
                )
                pending = [json.loads(text, strict=False, parse_constant=_no_constant)]
            except (ValueError, RecursionError):
                continue
        while pending:
            item = pending.pop()
            if isinstance(item, list):
                pending.extend(reversed(item))
            elif isinstance(item, dict):
                if "@graph" in item:
                    pending.append(item["@graph"])
                    item = {k: v for k, v in item.items() if k != "@graph"}
                if item.keys() - {"@context"}:
                    found.append(item)
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def base_url(document: Selector, url: str) -> str:
    """Where relative links start: `<base href>` if the page has a usable one, else its own URL."""
    base = document.root.select_one("base[href]") if isinstance(document.root, Node) else None
    href = base.attr("href") if base is not None else None
    if not href:
        return url
    try:
        joined = join(url, href)
    except BadUrl:
        return url
    return joined if joined.startswith(("http://", "https://")) else url


_URL = re.compile(r"\s*(?:https?:|/)", re.IGNORECASE)


class Linking(Protocol):
    """What `links_of` needs of a page."""

    followed: set[str]

    @property
    def base_url(self) -> str: ...

    def css(self, query: str) -> SelectorList: ...


def links_of(page: Linking, links: str | Iterable[Any]) -> Iterator[str]:
    """Absolute canonical http(s) URLs, each once, in order. `links`: a CSS selector, or URLs (or
    what `page.css` found).

    References into the page itself (`#top`, an empty href) are no links; what is no http(s) URL is
    left out.
    """
    if isinstance(links, str):
        links = (
            (links,) if _URL.match(links) else _targets(page.css(links))
        )  # no CSS selector begins like a URL
    base, seen, followed = page.base_url, set(), page.followed
    for link in links:
        if isinstance(link, Selector):
            link = link.root.attr("href") if isinstance(link.root, Element) else link.root
        if not isinstance(link, str) or not (link := link.strip()) or link[0] == "#":
            continue
        try:
            url = canonical_url(link, base)
        except BadUrl:
            continue
        if url not in seen:
            seen.add(url)
            followed.add(url)
            yield url


def _targets(found: SelectorList) -> Iterable[Any]:
    """Where a selector's matches point, without a Selector for each: pages have links by the
    hundred.
    """
    query, root = found._query, found._of.root if found._of is not None else None
    if query is None or not isinstance(root, Node):
        return found
    return (
        query.all(root)
        if query.strings
        else [n.attr("href") if isinstance(n, Element) else n for n in query.found(root)]
    )
