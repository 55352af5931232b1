"""Reading of a page: a parsel-like API over turbohtml, charsets, JSON-LD and links."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from re import Pattern
from typing import TYPE_CHECKING, Any, NoReturn, overload

import msgspec
import turbohtml.detect as charsets  # importing it registers the whatwg-* codecs
from turbohtml import Document, Element, Node
from turbohtml import parse as parse_html

from penstock.authoring import queries
from penstock.authoring.prefix import SMALLEST, Beginning, beginning
from penstock.authoring.queries import Found, Path, Query, string
from penstock.rules.identity import BadUrl, canonical_url, join

if TYPE_CHECKING:
    from penstock.authoring.page import Page

# -- the API of users ------------------------------------------------------------------------------


class Selector:
    """A node of the page, or a string found in it. Names and results are the same as in parsel."""

    __slots__ = ("root",)

    def __init__(self, root: Found) -> None:
        self.root = root

    def css(self, query: str) -> SelectorList:
        return SelectorList(self, queries.css(query))

    def xpath(self, query: str, **variables: Any) -> SelectorList:
        """Run an XPath query. `variables` are the values of `$name` in the query."""
        path = queries.xpath(query)
        return SelectorList(self, Path(query, path.path, variables) if variables else path)

    def first(self, query: Query) -> str | None:
        """Return the text of the first match, or None. A string has no matches."""
        return query.first(self.root) if isinstance(self.root, Node) else None

    def get(self) -> str:
        """Return the outer HTML of an element, or a text or attribute unchanged."""
        return string(self.root)

    def getall(self) -> list[str]:
        return [self.get()]

    @property
    def text(self) -> str:
        """All text inside, without tags."""
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
        """Return all matches of a regular expression in the text of `get()`.

        With groups, return the groups, or only a group named `extract`.
        """
        pattern = re.compile(regex)
        text = self.get()
        if isinstance(self.root, Node):
            # Entities, as in parsel: all but &lt; and &amp;.
            text = text.replace("&nbsp;", "\xa0").replace("&gt;", ">").replace("&quot;", '"')
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
    """Matches of a query. The query runs when they are used, and `.get()` stops at the first."""

    __slots__ = ("_items", "_of", "_query")

    def __init__(self, of: Selector, query: Query, items: list[Selector] | None = None) -> None:
        self._of, self._query, self._items = of, query, items

    @classmethod
    def _with_items(cls, items: list[Selector]) -> SelectorList:
        """Return a list whose query has already run."""
        return cls(_NO_NODE, _NO_QUERY, items)

    def _all(self) -> list[Selector]:
        if self._items is None:
            root = self._of.root
            found = self._query.found(root) if isinstance(root, Node) else []
            self._items = [Selector(n) for n in found]
        return self._items

    @overload
    def get(self, default: str) -> str: ...
    @overload
    def get(self, default: None = None) -> str | None: ...
    def get(self, default: str | None = None) -> str | None:
        if self._items is None:
            value = self._of.first(self._query)
            return default if value is None else value
        return self._items[0].get() if self._items else default

    def getall(self) -> list[str]:
        if self._items is None and isinstance(root := self._of.root, Node):
            return self._query.all(root)
        return [s.get() for s in self._all()]

    extract, extract_first = getall, get

    @property
    def first(self) -> Selector | None:
        return next(iter(self._all()), None)

    def css(self, query: str) -> SelectorList:
        return self._with_items([found for s in self._all() for found in s.css(query)])

    def xpath(self, query: str, **variables: Any) -> SelectorList:
        return self._with_items(
            [found for s in self._all() for found in s.xpath(query, **variables)]
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
        """Attributes of the first element."""
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
            self._with_items(self._all()[index]) if isinstance(index, slice) else self._all()[index]
        )

    def __bool__(self) -> bool:
        return bool(self._all())

    def __repr__(self) -> str:
        return repr(self._all())


_NO_NODE, _NO_QUERY = Selector(""), queries.css("*")


# -- documents -------------------------------------------------------------------------------------

# The prefix shrinks by 1/64 with each page. So after about 44 pages, half of the size that was
# needed is tried.
FORGETTING = 64
_CHARSET = re.compile(r"""charset\s*=\s*["']?([^\s"';,]+)""", re.IGNORECASE)


@lru_cache(1024)
def _header_charset(content_type: str | None) -> str | None:
    """Return the charset of the header, or None if browsers do not know it."""
    match = _CHARSET.search(content_type or "")
    if match is None or not match[1].isascii():
        return None
    try:
        b"".decode("whatwg-" + match[1])
        parse_html(b"", encoding=match[1])
    except (LookupError, ValueError):
        return None
    return match[1]


class LazyDocument(Selector):
    """A page that is parsed as far as needed. A prefix of it is often enough for `.get()`.

    The length of the prefix is learned from page to page, by the first query on each page.
    """

    __slots__ = (
        "_beginning",
        "_body",
        "_encoding",
        "_first_query",
        "_parsed",
        "_prefix_size",
        "_tried_prefix",
    )

    def __init__(self, body: bytes, encoding: str | None) -> None:
        self._body, self._encoding, self._prefix_size, self._tried_prefix = body, encoding, 0, False
        self._beginning: Beginning | None = None
        self._first_query: Query | None = None
        self._parsed: Document | None = None

    @property
    def root(self) -> Document:  # type: ignore[override]
        if self._parsed is None:
            if self._first_query is not None and self._tried_prefix:  # a prefix was not enough
                self._first_query.reach = len(self._body)
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
            first_query = self._first_query
            if first_query is None:
                first_query = self._first_query = query
                self._begin(first_query, max(SMALLEST, query.reach - query.reach // FORGETTING))
            while self._beginning is not None:
                if (value := self._beginning.first(query)) is not None:
                    return value
                self._begin(
                    first_query,
                    min(2 * self._prefix_size, max(len(self._body) // 2, self._prefix_size + 1)),
                )
        return query.first(self.root)

    def _begin(self, first_query: Query, size: int) -> None:
        self._prefix_size = first_query.reach = size
        self._beginning = beginning(self._body, self._encoding, size)
        self._tried_prefix = self._tried_prefix or self._beginning is not None


def parse(body: bytes, content_type: str | None = None) -> Selector:
    """Parse a page. Never raises.

    The charset is taken from the byte-order mark, the header, `<meta>`, then UTF-8 if the bytes are
    valid, then a guess.
    """
    return LazyDocument(body, _header_charset(content_type))


def charset(body: bytes, content_type: str | None = None) -> str:
    """Return the codec of a body, by the same order as `parse`, or "" if it is unknown."""
    if body.startswith(b"\xef\xbb\xbf"):
        return "utf-8-sig"
    if not body.startswith((b"\xff\xfe", b"\xfe\xff")) and (label := _header_charset(content_type)):
        return "whatwg-" + label
    return charsets.detect(body).codec or ""


def decode(body: bytes, content_type: str | None = None) -> str:
    """Return the body as text. Malformed bytes become U+FFFD."""
    codec = charset(body, content_type)
    return body.decode(codec, "replace") if codec else ""


def jsonld(document: Selector) -> list[dict[str, Any]]:
    """Return all JSON-LD objects of the page in order, with lists and `@graph` flattened.

    An invalid block is ignored.
    """
    found: list[dict[str, Any]] = []
    if not isinstance(document.root, Node):
        return found
    for script in document.root.select('script[type^="application/ld+json" i]'):
        text = script.text.strip()
        try:
            pending = [msgspec.json.decode(text)]
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            # Common mistakes of shops: raw line breaks in strings, comment or CDATA wrappers.
            try:
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
    """Return the base of relative links: a usable `<base href>`, or else the page's URL."""
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


def links_of(page: Page, links: str | Iterable[Any]) -> Iterator[str]:
    """Yield absolute canonical http(s) URLs, each once, in order.

    `links` is a CSS selector, a URL, several URLs, or a result of `page.css`. References into the
    page itself (`#top`, an empty href) and other URLs than http(s) are ignored.
    """
    if isinstance(links, str):
        # A CSS selector never begins like a URL.
        links = (links,) if _URL.match(links) else _link_targets(page.css(links))
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


def _link_targets(found: SelectorList) -> Iterable[Any]:
    """Return the href or text of each match, without creating Selectors for hundreds of links."""
    query, root = found._query, found._of.root
    if found._items is not None or not isinstance(root, Node):
        return found
    return (
        query.all(root)
        if query.strings
        else [n.attr("href") if isinstance(n, Element) else n for n in query.found(root)]
    )
