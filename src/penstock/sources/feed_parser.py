"""Feeds as values: RSS 0.9x, 1.0 and 2.0, Atom 0.3 and 1.0, JSON Feed, well-formed or not. No
network, no clock, no memory of what was read before.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from hashlib import blake2b
from typing import Any
from urllib.parse import urljoin

import msgspec
from lxml import etree

from penstock.errors import PenstockError
from penstock.sources.markup import Unreadable, mended, text_of, unpacked, when

MAX_BYTES = 16 << 20  # decoded
MAX_LOOSE = 256 << 10  # characters of a feed that only guessing can read
MAX_ENTRIES = 10_000  # the first ones: feeds begin with the newest
MAX_TEXT = 4000  # characters of a summary that go along; the hash knows all of it
MAX_NAME = 1000  # … of a title, a tag, an author
MAX_ID = 4000
LONGEST_HINT = 86400.0  # no feed keeps us away for longer
HOUR = 3600.0

_PREFIXES = {
    "http://www.w3.org/2005/Atom": "atom", "http://purl.org/atom/ns#": "atom", "http://www.w3.org/1999/02/22-rdf-syntax-ns#": "rdf",
    "http://purl.org/dc/elements/1.1/": "dc", "http://purl.org/dc/terms/": "dcterms", "http://purl.org/rss/1.0/modules/content/": "content",
    "http://purl.org/rss/1.0/modules/syndication/": "sy", "http://search.yahoo.com/mrss/": "media",
    "http://www.itunes.com/dtds/podcast-1.0.dtd": "itunes", "http://www.w3.org/1999/xhtml": "xhtml",
}  # fmt: skip
_PERIODS = {
    "hourly": HOUR,
    "daily": 86400.0,
    "weekly": 7 * 86400.0,
    "monthly": 30 * 86400.0,
    "yearly": 365 * 86400.0,
}
_DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
_BASE = "{http://www.w3.org/XML/1998/namespace}base"
_PLAIN = {"resolve_relative_uris": False, "sanitize_html": False}
_beginning = re.compile(r"<(?:\?xml|(?:[\w-]{1,20}:)?(?:rss|feed|rdf|channel)\b)", re.I)
_ending = re.compile(r"</(?:[\w-]{1,20}:)?(?:rss|feed|rdf|channel)\s{0,9}>", re.I)


class FeedError(PenstockError):
    """What was given is no feed that can be read; the reason finishes the sentence "it …"."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"no feed: it {reason}",
            hint="look at the address in a browser: it should show RSS, Atom or JSON Feed",
        )
        self.reason = reason


class FeedEntry(msgspec.Struct, frozen=True, kw_only=True):
    """`updated` and `published` in epoch seconds. A URL may still be relative to the feed's own
    address.
    """

    id: str  # its own, else its link, else made from its content
    url: str | None = None
    title: str = ""
    updated: float | None = None
    published: float | None = None
    summary: str = ""
    author: str = ""
    tags: tuple[str, ...] = ()
    enclosures: tuple[str, ...] = ()
    hash: str = ""  # of title, link, dates and the whole text


class Hints(msgspec.Struct, frozen=True, array_like=True):
    """What a feed says about when to look again."""

    least: float = 0.0  # seconds between two looks: ttl, or sy:updatePeriod / sy:updateFrequency
    skip_hours: tuple[int, ...] = ()  # 0 to 23, UTC
    skip_days: tuple[int, ...] = ()  # 0 is Monday

    def next_look(self, now: float, every: float) -> float:
        """The first moment that is far enough away and in no hour and on no day to be skipped."""
        at = now + max(every, min(self.least, LONGEST_HINT))
        for _ in range(7 * 24):
            moment = datetime.fromtimestamp(at, UTC)
            if moment.hour not in self.skip_hours and moment.weekday() not in self.skip_days:
                return at
            at = (at // HOUR + 1) * HOUR
        return now + max(
            every, min(self.least, LONGEST_HINT)
        )  # every hour of the week is to be skipped: it cannot mean that


class Feed(list[FeedEntry]):
    """The entries in their order, and what the feed says of itself."""

    def __init__(
        self,
        entries: Iterator[FeedEntry],
        *,
        kind: str,
        title: str = "",
        hints: Hints | None = None,
    ) -> None:
        super().__init__(entries)
        self.kind, self.title, self.hints = kind, title, hints or Hints()


def parse(body: bytes, content_type: str | None) -> Feed:
    """Raises FeedError, and nothing else, for any bytes."""
    try:
        text = text_of(unpacked(body, MAX_BYTES), content_type, MAX_BYTES)
        start = text.lstrip()[:1]
        if not start:
            raise Unreadable("is empty")
        return _json(text) if start in "{[" else _xml(text)
    except Unreadable as e:
        raise FeedError(e.reason) from None


# -- XML -------------------------------------------------------------------------------------------


def _xml(text: str) -> Feed:
    root = _tree(text)
    name = _local(root)
    if name == "html":
        raise Unreadable("is an HTML page")
    atom = name == "feed"
    head = (
        root
        if name in ("feed", "channel")
        else next((e for e in root if _local(e) == "channel"), root)
    )
    wanted = "entry" if atom else "item"
    items = [e for place in dict.fromkeys((head, root)) for e in place if _local(e) == wanted]
    if not items and (found := _loosely(text)):
        return Feed(iter(_apart(iter(found))), kind="rss")
    if name not in ("feed", "rss", "rdf", "channel") and not items:
        raise Unreadable(f"begins with <{name[:40]}>, which is neither RSS nor Atom")
    about = _fields(head, atom)
    entries = (_atom_entry(e) if atom else _rss_item(e) for e in items[:MAX_ENTRIES])
    kind = "atom" if atom else "rdf" if name == "rdf" else "rss"
    return Feed(
        iter(_apart(entries)),
        kind=kind,
        title=_first(about, "title")[:MAX_NAME],
        hints=_hints(about),
    )


def _tree(text: str) -> Any:
    """Strictly first. What is ill-formed is mended where that is safe to do, then read as far as it
    makes sense.
    """
    try:
        return etree.fromstring(text.encode("utf-8", "replace"), _parser(False))
    except (etree.XMLSyntaxError, ValueError):
        pass
    begin = _beginning.search(text[:65536])
    if begin is None:
        raise Unreadable(
            "is an HTML page"
            if re.search(r"<(?:html|head|body)\b", text[:4096], re.I)
            else "is no XML"
        )
    whole = re.sub(r"^<\?xml[^>]{0,300}\?>\s*", "", mended(text[begin.start() :]))
    parser = _parser(True)
    try:
        root = etree.fromstring(whole.encode("utf-8", "replace"), parser)
    except (etree.XMLSyntaxError, ValueError) as e:
        raise Unreadable(f"is no XML: {' '.join(str(e).split())[:200]}") from None
    if root is None:
        raise Unreadable("is no XML")
    if deep := next(
        (
            e
            for e in parser.error_log
            if "depth" in e.message.lower() or "huge" in e.message.lower()
        ),
        None,
    ):
        raise Unreadable(
            f"is nested too deeply, or has a text that is too long ({' '.join(deep.message.split())[:100]})"
        )
    if not _ending.search(whole[-4096:]):
        _drop_last(root)
    return root


def _drop_last(root: Any) -> None:
    """A feed that was cut off ends in half an entry, which would pass for a changed one."""
    place = root
    while len(place):
        place = place[-1]
        if _local(place) in ("item", "entry"):
            place.getparent().remove(place)
            return


def _parser(recover: bool) -> Any:
    """UTF-8 whatever the document declares: it was decoded already. Deeper than 256 is an error by
    libxml2's own limit.
    """
    return etree.XMLParser(
        encoding="utf-8", recover=recover, resolve_entities=False, load_dtd=False, no_network=True, huge_tree=False, remove_comments=True, remove_pis=True
    )  # fmt: skip


def _loosely(text: str) -> list[FeedEntry]:
    """For what is no XML even with good will: feedparser reads feeds as browsers read pages. It
    takes its time, so only what is short.
    """
    if len(text) > MAX_LOOSE or not re.search(r"<(?:item|entry)\b", text, re.I):
        return []
    import feedparser  # here: it is slow to import, and hardly ever needed

    try:  # a stream, and never a string: that it would take for an address, and open it
        found = feedparser.parse(
            io.BytesIO(text.encode("utf-8", "replace")),
            response_headers={"content-type": "text/xml; charset=utf-8"},
            **_PLAIN,
        )
    except Exception as e:  # it has been seen to raise anything
        raise Unreadable(
            f"is no XML, and no feed that can be guessed at ({type(e).__name__})"
        ) from None
    return [
        _entry(
            id_=_word(e, "id"), url=_word(e, "link") or None, title=_word(e, "title"), updated=_word(e, "updated"), published=_word(e, "published"),
            summary=_word(e, "summary"), content="", author=_word(e, "author"), tags=[], enclosures=[],
        )
        for e in found.get("entries", ())[:MAX_ENTRIES]
    ]  # fmt: skip


def _local(element: Any) -> str:
    tag = element.tag
    return tag.rpartition("}")[2].rpartition(":")[2].lower() if isinstance(tag, str) else ""


def _fields(element: Any, atom: bool) -> dict[str, list[Any]]:
    """Children by name: plain for the format's own, `dc:date` for the modules we know, whatever
    prefix they came with.
    """
    found: dict[str, list[Any]] = {}
    for child in element:
        tag = child.tag
        if not isinstance(tag, str):
            continue
        space, _, name = tag.rpartition("}")
        prefix = _PREFIXES.get(space[1:], "") if space else ""
        name = name.lower()
        found.setdefault(
            f"{prefix}:{name}" if prefix and not (atom and prefix == "atom") else name, []
        ).append(child)
    return found


def _text(element: Any) -> str:
    return "".join(element.itertext()).strip()


def _first(fields: dict[str, list[Any]], *names: str) -> str:
    """The first of these that says something."""
    return next(
        (text for name in names for element in fields.get(name, ()) if (text := _text(element))), ""
    )


def _atom_entry(element: Any) -> FeedEntry:
    f = _fields(element, True)
    links = [
        (e.get("rel", "alternate").lower(), e.get("type", ""), _joined(e, e.get("href", "")))
        for e in f.get("link", ())
        if e.get("href")
    ]
    pages = [
        url
        for rel, kind, url in links
        if rel == "alternate" and kind in ("", "text/html", "application/xhtml+xml")
    ]
    others = [url for rel, _, url in links if rel == "alternate"] + [
        _joined(e, e.get("src")) for e in f.get("content", ()) if e.get("src")
    ]
    return _entry(
        id_=_first(f, "id"), url=next(iter(pages + others), None), title=_first(f, "title"), updated=_first(f, "updated", "modified"),
        published=_first(f, "published", "issued", "created"), summary=_first(f, "summary"), content=_first(f, "content"),
        author=next((_first(_fields(e, True), "name") or _text(e) for e in f.get("author", ())), ""),
        tags=[e.get("term") or e.get("label") or _text(e) for e in f.get("category", ())], enclosures=[url for rel, _, url in links if rel == "enclosure"],
    )  # fmt: skip


def _rss_item(element: Any) -> FeedEntry:
    f = _fields(element, False)
    guid = next(iter(f.get("guid", ())), None)
    id_ = _text(guid) if guid is not None else ""
    links = [
        (_text(e) or e.get("href", ""), e)
        for e in (*f.get("link", ()), *f.get("atom:link", ()))
        if e.get("rel", "alternate") == "alternate"
    ]
    url = next((_joined(e, link) for link, e in links if link), None)
    if (
        url is None
        and guid is not None
        and re.match(r"https?://", id_, re.I)
        and guid.get("isPermaLink", "true").lower() != "false"
    ):
        url = id_
    about = element.get("{http://www.w3.org/1999/02/22-rdf-syntax-ns#}about", "")
    return _entry(
        id_=id_ or _first(f, "atom:id") or about, url=url or (about if re.match(r"https?://", about) else None), title=_first(f, "title", "dc:title"),
        updated=_first(f, "atom:updated", "dcterms:modified"), published=_first(f, "pubdate", "dc:date", "dcterms:created", "dcterms:issued"),
        summary=_first(f, "description", "dc:description", "itunes:summary"), content=_first(f, "content:encoded"),
        author=_first(f, "author", "dc:creator", "itunes:author"), tags=[_text(e) for e in (*f.get("category", ()), *f.get("dc:subject", ()))],
        enclosures=[_joined(e, e.get("url")) for e in f.get("enclosure", ()) if e.get("url")],
    )  # fmt: skip


def _joined(element: Any, url: str) -> str:
    """Against every xml:base above it; what is still relative then is relative to the feed's
    address.
    """
    url, place = url.strip(), element
    while place is not None and not re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", url):
        if base := place.get(_BASE):
            try:
                url = urljoin(base.strip(), url)
            except ValueError:
                break
        place = place.getparent()
    return url


def _hints(about: dict[str, list[Any]]) -> Hints:
    least = 0.0
    ttl = _first(about, "ttl")
    if ttl.isascii() and ttl.isdigit() and len(ttl) < 10:
        least = int(ttl) * 60.0
    elif (period := _PERIODS.get(_first(about, "sy:updateperiod").lower())) is not None:
        often = _first(about, "sy:updatefrequency")
        least = period / max(
            1, int(often) if often.isascii() and often.isdigit() and len(often) < 10 else 1
        )
    hours = {
        int(t) % 24
        for e in about.get("skiphours", ())
        for h in e
        if (t := _text(h)).isascii() and t.isdigit() and len(t) < 3
    }
    days = {
        _DAYS.index(t)
        for e in about.get("skipdays", ())
        for d in e
        if (t := _text(d).lower()) in _DAYS
    }
    return Hints(least, tuple(sorted(hours)), tuple(sorted(days)))


# -- JSON Feed -------------------------------------------------------------------------------------


def _json(text: str) -> Feed:
    try:
        found = msgspec.json.decode(text)
    except (msgspec.MsgspecError, ValueError, RecursionError) as e:
        raise Unreadable(f"is no JSON: {' '.join(str(e).split())[:200]}") from None
    items = found.get("items") if isinstance(found, dict) else None
    if (
        not isinstance(items, list)
        or not isinstance(version := found.get("version"), str)
        or "jsonfeed.org" not in version
    ):
        raise Unreadable("is JSON, but no JSON Feed")
    entries = (_json_item(item) for item in items[:MAX_ENTRIES] if isinstance(item, dict))
    return Feed(iter(_apart(entries)), kind="json", title=_word(found, "title")[:MAX_NAME])


def _json_item(item: dict[str, Any]) -> FeedEntry:
    authors = item.get("authors") if isinstance(item.get("authors"), list) else [item.get("author")]
    tags = item.get("tags") if isinstance(item.get("tags"), list) else []
    attachments = item.get("attachments") if isinstance(item.get("attachments"), list) else []
    return _entry(
        id_=_word(item, "id"), url=_word(item, "url") or _word(item, "external_url") or None, title=_word(item, "title"),
        updated=_word(item, "date_modified"), published=_word(item, "date_published"), summary=_word(item, "summary"),
        content=_word(item, "content_text") or _word(item, "content_html"),
        author=next((_word(a, "name") for a in authors or () if isinstance(a, dict)), ""), tags=[t for t in tags or () if isinstance(t, str)],
        enclosures=[_word(a, "url") for a in attachments or () if isinstance(a, dict) and _word(a, "url")],
    )  # fmt: skip


def _word(table: dict[str, Any], name: str) -> str:
    value = table.get(name)
    return (
        value.strip()
        if isinstance(value, str)
        else str(value)
        if isinstance(value, int | float) and not isinstance(value, bool)
        else ""
    )


# -- entries ---------------------------------------------------------------------------------------


def _entry(
    *,
    id_: str,
    url: str | None,
    title: str,
    updated: str,
    published: str,
    summary: str,
    content: str,
    author: str,
    tags: list[str],
    enclosures: list[str],
) -> FeedEntry:
    digest = blake2b(digest_size=16)
    for part in (title, url or "", updated, published, summary, content, *enclosures):
        raw = part.encode("utf-8", "replace")
        digest.update(len(raw).to_bytes(8, "big") + raw)
    url = url.strip() if url else None
    return FeedEntry(
        id=(id_ or url or f"content:{digest.hexdigest()}")[:MAX_ID], url=url or None, title=" ".join(title.split())[:MAX_NAME], updated=when(updated),
        published=when(published), summary=(summary or content)[:MAX_TEXT], author=" ".join(author.split())[:MAX_NAME],
        tags=tuple(t.strip()[:MAX_NAME] for t in tags if t and t.strip())[:50], enclosures=tuple(enclosures[:20]), hash=digest.hexdigest(),
    )  # fmt: skip


def _apart(entries: Iterator[FeedEntry]) -> list[FeedEntry]:
    """Feeds that give all their entries the same id mean the link by it; an entry that is there
    twice is there once.
    """
    found = list(entries)
    links: dict[str, set[str | None]] = {}
    for e in found:
        links.setdefault(e.id, set()).add(e.url)
    kept: dict[str, FeedEntry] = {}
    for e in found:
        entry = (
            e
            if len(links[e.id]) == 1
            else msgspec.structs.replace(e, id=f"{e.id} {e.url or e.hash}")
        )
        kept.setdefault(entry.id, entry)
    return list(kept.values())
