"""Parser for RSS 0.9x, 1.0 and 2.0, Atom 0.3 and 1.0, and JSON Feed, well-formed or not.

Does no I/O.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any
from urllib.parse import urljoin

from lxml import etree

from penstock.errors import PenstockError
from penstock.sources.feed_entries import HOUR, MAX_NAME, Feed, FeedEntry, Hints, make_entry
from penstock.sources.json_documents import decode_json
from penstock.sources.markup import (
    UnreadableDocument,
    check_memory,
    gunzip,
    repair_entities,
    text_of,
)

MAX_BYTES = 16 << 20  # bytes of a decompressed feed
MAX_ENTRIES = 10_000  # the first entries are used, because a feed starts with its newest entry
MAX_BASE = 2048  # characters of an xml:base, and of a URL that is joined with it
MAX_FIELDS = 100  # elements with the same name in one entry

_PREFIXES = {
    "http://www.w3.org/2005/Atom": "atom",
    "http://purl.org/atom/ns#": "atom",
    "http://www.w3.org/1999/02/22-rdf-syntax-ns#": "rdf",
    "http://purl.org/dc/elements/1.1/": "dc",
    "http://purl.org/dc/terms/": "dcterms",
    "http://purl.org/rss/1.0/modules/content/": "content",
    "http://purl.org/rss/1.0/modules/syndication/": "sy",
    "http://search.yahoo.com/mrss/": "media",
    "http://www.itunes.com/dtds/podcast-1.0.dtd": "itunes",
    "http://www.w3.org/1999/xhtml": "xhtml",
}
_PERIODS = {
    "hourly": HOUR,
    "daily": 86400.0,
    "weekly": 7 * 86400.0,
    "monthly": 30 * 86400.0,
    "yearly": 365 * 86400.0,
}
_DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
_CONTROLS = bytes({*range(32)} - {*b"\t\n\r"})
_BASE = "{http://www.w3.org/XML/1998/namespace}base"
_beginning = re.compile(r"<(?:\?xml|(?:[\w-]{1,20}:)?(?:rss|feed|rdf|channel)\b)", re.I)
# Start tag of the root element, its attributes, and an attribute with or without quotes.
_root_tag = re.compile(r"<((?:[\w-]{1,20}:)?(?:rss|feed|rdf|channel))\b([^<>]{0,4096})>", re.I)
_attribute = re.compile(r"""([\w:.-]{1,100})\s{0,9}=\s{0,9}(?:"([^"]*)"|'([^']*)'|([^\s"']+))""")
_ending = re.compile(r"</(?:[\w-]{1,20}:)?(?:rss|feed|rdf|channel)\s{0,9}>", re.I)
_digits = re.compile(r"[0-9]{1,9}").fullmatch


class FeedError(PenstockError):
    """The document is not a readable feed. The reason completes the sentence "it …"."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"not a feed: it {reason}",
            hint="open the URL in a browser: it should show RSS, Atom or JSON Feed",
        )
        self.reason = reason


def parse(body: bytes, content_type: str | None) -> Feed:
    """Parse a feed. Raises FeedError, and no other exception, for any bytes."""
    try:
        body = gunzip(body, MAX_BYTES)
        if body[:64].lstrip(b"\xef\xbb\xbf\xff\xfe\0 \t\r\n")[:1] in (b"{", b"["):
            return _json(body)
        text = text_of(body, content_type, MAX_BYTES)
        if not text.strip():
            raise UnreadableDocument("is empty")
        return _xml(text, len(body))
    except UnreadableDocument as e:
        raise FeedError(e.reason) from None


# -- XML -------------------------------------------------------------------------------------------


def _xml(text: str, size: int) -> Feed:
    root = _tree(text, size)
    if "xml:base" in text:
        # Every link below reads it, so a long one would cost its length for each link.
        for element in root.xpath(f"//*[string-length(@xml:base) > {MAX_BASE}]"):
            del element.attrib[_BASE]
    name = _local(root)
    if name == "html":
        raise UnreadableDocument("is an HTML page")
    atom = name == "feed"
    head = (
        root
        if name in ("feed", "channel")
        else next((e for e in root if _local(e) == "channel"), root)
    )
    wanted = "entry" if atom else "item"
    items = [e for place in dict.fromkeys((head, root)) for e in place if _local(e) == wanted]
    if name not in ("feed", "rss", "rdf", "channel") and not items:
        raise UnreadableDocument(f"begins with <{name[:40]}>, which is neither RSS nor Atom")
    about = _fields(head, atom)
    return Feed(
        [_atom_entry(e) if atom else _rss_item(e) for e in items[:MAX_ENTRIES]],
        "atom" if atom else "rdf" if name == "rdf" else "rss",
        title=_first(about, "title"),
        hints=_hints(about),
    )


def _tree(text: str, size: int) -> Any:
    """Parse XML strictly. If that fails, repair entities and parse with error recovery."""
    with suppress(etree.XMLSyntaxError, ValueError):
        return etree.fromstring(text.encode("utf-8", "replace"), _parser(False))
    begin = _beginning.search(text[:65536])
    if begin is None:
        raise UnreadableDocument(
            "is an HTML page"
            if re.search(r"<(?:html|head|body)\b", text[:4096], re.I)
            else "is not XML"
        )
    check_memory(text, size, copies=3)
    repaired = re.sub(r"^<\?xml[^>]{0,300}\?>\s*", "", repair_entities(text[begin.start() :]))
    repaired = _root_tag.sub(_quote_attributes, repaired, count=1)
    parser = _parser(True)
    try:
        root = etree.fromstring(repaired.encode("utf-8", "replace"), parser)
    except (etree.XMLSyntaxError, ValueError) as e:
        raise UnreadableDocument(f"is not XML: {' '.join(str(e).split())[:200]}") from None
    if root is None:
        raise UnreadableDocument("is not XML")
    if deep := next(
        (
            e
            for e in parser.error_log
            if "depth" in e.message.lower() or "huge" in e.message.lower()
        ),
        None,
    ):
        raise UnreadableDocument(
            "is nested too deeply, or has a text that is too long "
            f"({' '.join(deep.message.split())[:100]})"
        )
    if not _ending.search(repaired[-4096:]):
        _drop_last(root)
    return root


def _quote_attributes(m: re.Match[str]) -> str:
    """Return a start tag with its attributes in quotes, without what is no attribute.

    lxml's recovery loses the whole content of a root element with an ill-formed start tag.
    """
    attributes = (
        f' {name}="{(double or single or bare).replace(chr(34), "&quot;")}"'
        for name, double, single, bare in _attribute.findall(m[2])
    )
    return f"<{m[1]}{''.join(attributes)}>"


def _drop_last(root: Any) -> None:
    """Remove the last entry of a feed that was cut off.

    The entry is incomplete, and would look like a changed entry.
    """
    place = root
    while len(place):
        place = place[-1]
        if _local(place) in ("item", "entry"):
            place.getparent().remove(place)
            return


def _parser(recover: bool) -> Any:
    """Return a parser for UTF-8. A declared encoding is ignored, because the text was decoded.

    More than 256 levels are an error, by libxml2's own limit.
    """
    return etree.XMLParser(
        encoding="utf-8",
        recover=recover,
        resolve_entities=False,
        load_dtd=False,
        no_network=True,
        huge_tree=False,
        remove_comments=True,
        remove_pis=True,
    )


def _local(element: Any) -> str:
    tag = element.tag
    return tag.rpartition("}")[2].rpartition(":")[2].lower() if isinstance(tag, str) else ""


def _fields(element: Any, atom: bool) -> dict[str, list[Any]]:
    """Return child elements by name.

    Elements of known modules get a fixed prefix, as in `dc:date`, even if the feed uses another.
    """
    found: dict[str, list[Any]] = {}
    for child in element:
        tag = child.tag
        if not isinstance(tag, str):
            continue
        space, _, name = tag.rpartition("}")
        prefix = _PREFIXES.get(space[1:], "") if space else ""
        name = name[:MAX_NAME].lower()
        same = found.setdefault(
            f"{prefix}:{name}" if prefix and not (atom and prefix == "atom") else name, []
        )
        if len(same) < MAX_FIELDS:
            same.append(child)
    return found


def _text(element: Any) -> str:
    return "".join(element.itertext()).strip()


def _first(fields: dict[str, list[Any]], *names: str) -> str:
    """Return the text of the first of these fields that is not empty."""
    return next(
        (text for name in names for element in fields.get(name, ()) if (text := _text(element))), ""
    )


def _atom_entry(element: Any) -> FeedEntry:
    f = _fields(element, True)
    links = [
        (e.get("rel", "alternate").lower(), e.get("type", ""), _absolute(e, e.get("href", "")))
        for e in f.get("link", ())
        if e.get("href")
    ]
    pages = [
        url
        for rel, kind, url in links
        if rel == "alternate" and kind in ("", "text/html", "application/xhtml+xml")
    ]
    others = [url for rel, _, url in links if rel == "alternate"] + [
        _absolute(e, e.get("src")) for e in f.get("content", ()) if e.get("src")
    ]
    return make_entry(
        id_=_first(f, "id"),
        url=next(iter(pages + others), None),
        title=_first(f, "title"),
        updated=_first(f, "updated", "modified"),
        published=_first(f, "published", "issued", "created"),
        summary=_first(f, "summary"),
        content=_first(f, "content"),
        author=next(
            (_first(_fields(e, True), "name") or _text(e) for e in f.get("author", ())), ""
        ),
        tags=[e.get("term") or e.get("label") or _text(e) for e in f.get("category", ())],
        enclosures=[url for rel, _, url in links if rel == "enclosure"],
    )


def _rss_item(element: Any) -> FeedEntry:
    f = _fields(element, False)
    guid = next(iter(f.get("guid", ())), None)
    id_ = _text(guid) if guid is not None else ""
    links = [
        (_text(e) or e.get("href", ""), e)
        for e in (*f.get("link", ()), *f.get("atom:link", ()))
        if e.get("rel", "alternate") == "alternate"
    ]
    url = next((_absolute(e, link) for link, e in links if link), None)
    if (
        url is None
        and guid is not None
        and re.match(r"https?://", id_, re.I)
        and guid.get("isPermaLink", "true").lower() != "false"
    ):
        url = id_
    about = element.get("{http://www.w3.org/1999/02/22-rdf-syntax-ns#}about", "")
    return make_entry(
        id_=id_ or _first(f, "atom:id") or about,
        url=url or (about if re.match(r"https?://", about) else None),
        title=_first(f, "title", "dc:title"),
        updated=_first(f, "atom:updated", "dcterms:modified"),
        published=_first(f, "pubdate", "dc:date", "dcterms:created", "dcterms:issued"),
        summary=_first(f, "description", "dc:description", "itunes:summary"),
        content=_first(f, "content:encoded"),
        author=_first(f, "author", "dc:creator", "itunes:author"),
        tags=[_text(e) for e in (*f.get("category", ()), *f.get("dc:subject", ()))],
        enclosures=[_absolute(e, e.get("url")) for e in f.get("enclosure", ()) if e.get("url")],
    )


def _absolute(element: Any, url: str) -> str:
    """Resolve a URL against every xml:base above its element.

    If the result is still relative, it is relative to the URL of the feed.
    """
    url, place = url.strip(), element
    # A long URL is not joined: its work would be the length of both for each link.
    while (
        place is not None
        and len(url) <= MAX_BASE
        and not re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", url)
    ):
        if base := place.get(_BASE):
            try:
                url = urljoin(base.strip(), url)
            except ValueError:
                break
        place = place.getparent()
    return url


def _hints(about: dict[str, list[Any]]) -> Hints:
    least = 0.0
    if ttl := _digits(_first(about, "ttl")):
        least = int(ttl[0]) * 60.0
    elif (period := _PERIODS.get(_first(about, "sy:updateperiod").lower())) is not None:
        often = _digits(_first(about, "sy:updatefrequency"))
        least = period / max(1, int(often[0]) if often else 1)
    hours = {
        int(t) % 24
        for e in about.get("skiphours", ())
        for h in e
        if _digits(t := _text(h)) and len(t) < 3
    }
    days = {
        _DAYS.index(t)
        for e in about.get("skipdays", ())
        for d in e
        if (t := _text(d).lower()) in _DAYS
    }
    return Hints(least, tuple(sorted(hours)), tuple(sorted(days)))


# -- JSON Feed -------------------------------------------------------------------------------------


def _json(body: bytes) -> Feed:
    # Some feeds have control characters in their strings, which JSON does not allow.
    found = decode_json(body if b"\0" in body else body.translate(None, _CONTROLS))
    items = found.get("items") if isinstance(found, dict) else None
    if (
        not isinstance(items, list)
        or not isinstance(version := found.get("version"), str)
        or "jsonfeed.org" not in version
    ):
        raise UnreadableDocument("is JSON, but not a JSON Feed")
    entries = [_json_item(item) for item in items[:MAX_ENTRIES] if isinstance(item, dict)]
    return Feed(entries, "json", title=_string(found, "title"))


def _json_item(item: dict[str, Any]) -> FeedEntry:
    authors = item.get("authors") if isinstance(item.get("authors"), list) else [item.get("author")]
    tags = item.get("tags") if isinstance(item.get("tags"), list) else []
    attachments = item.get("attachments") if isinstance(item.get("attachments"), list) else []
    return make_entry(
        id_=_string(item, "id"),
        url=_string(item, "url") or _string(item, "external_url") or None,
        title=_string(item, "title"),
        updated=_string(item, "date_modified"),
        published=_string(item, "date_published"),
        summary=_string(item, "summary"),
        content=_string(item, "content_text") or _string(item, "content_html"),
        author=next((_string(a, "name") for a in authors or () if isinstance(a, dict)), ""),
        tags=[t for t in tags or () if isinstance(t, str)],
        enclosures=[
            _string(a, "url")
            for a in attachments or ()
            if isinstance(a, dict) and _string(a, "url")
        ],
    )


def _string(table: dict[str, Any], name: str) -> str:
    value = table.get(name)
    return (
        value.strip()
        if isinstance(value, str)
        else str(value)
        if isinstance(value, int | float) and not isinstance(value, bool)
        else ""
    )
