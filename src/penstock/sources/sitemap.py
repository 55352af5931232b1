"""`sitemap+https://…`: an event for every URL that is new, changed or gone in a site's sitemaps.
How sitemaps are read is in sitemap_reading.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections import deque
from collections.abc import AsyncGenerator, Iterator

import msgspec

from penstock.authoring.pipeline import SourceSpec
from penstock.errors import ConfigError, SourceDown
from penstock.model import ErrorClass, Failure, mint
from penstock.ports import Batch, Finding
from penstock.rules import robots
from penstock.rules.identity import BadUrl, authority, canonical_url, origin, registrable_domain
from penstock.rules.masking import mask
from penstock.sources.base import BATCH, SourceContext, options
from penstock.sources.polling import Left, Polling, one_of, pack, target, unpack, whole
from penstock.sources.sitemap_parser import Sitemap, SitemapEntry, SitemapError, parse

__all__ = ["Sitemap", "SitemapEntry", "SitemapError", "open_source", "parse"]

log = logging.getLogger("penstock.sources")
EVERY = 3600.0
PATIENCE = 10  # sitemaps that cannot be read until the rest is left for the next look
CHANGES = ("new", "changed", "removed")
NONE = struct.pack("<d", -1.0)  # the mark of an entry without lastmod


class _Document(msgspec.Struct, array_like=True):
    """One sitemap as it was when it was last read."""

    url: str
    etag: str | None = None
    modified: str | None = None
    children: list[str] = []
    locs: str = ""  # one a line: what is gone must be told by its name
    marks: bytes = b""  # lastmod of each: 8 bytes

    def entries(self) -> Iterator[tuple[str, bytes]]:
        for n, loc in enumerate(self.locs.split("\n") if self.locs else ()):
            yield loc, self.marks[n * 8 : n * 8 + 8]


class _State(msgspec.Struct, array_like=True):
    version: int = 1
    documents: list[_Document] = []
    left: bytes = b""


class SitemapSource(Polling):
    def __init__(self, spec: SourceSpec, context: SourceContext) -> None:
        super().__init__(spec, context, every=EVERY)
        known = {
            "emit": list(CHANGES),
            "first": "all",
            "same_site": True,
            "max_depth": 5,
            "max_sitemaps": 500,
            "max_urls": 250_000,
        }
        given = options(spec, known)
        self._url = target(spec, "sitemap")
        self._emit: list[str] = given["emit"]
        if not self._emit or set(self._emit) - set(CHANGES):
            raise ConfigError(
                f"source {spec.name}: emit is {self._emit!r}", hint=f"some of {', '.join(CHANGES)}"
            )
        self._first: str = one_of(spec, "first", given["first"], ("all", "none"))
        self._depth = whole(spec, "max_depth", given["max_depth"], 1, 20)
        self._most_documents = whole(spec, "max_sitemaps", given["max_sitemaps"], 1, 50_000)
        self._most_urls = whole(spec, "max_urls", given["max_urls"], 1, 2_000_000)
        self._site = registrable_domain(authority(self._url).host) if given["same_site"] else None
        self._root = (
            origin(self._url) + "/robots.txt"
            if self._url.removeprefix(origin(self._url)) in ("/", "/robots.txt")
            else self._url
        )

    async def read(self, cursor: bytes | None) -> AsyncGenerator[Batch, None]:
        """One look at the whole tree. The position moves at its end; ids follow from the position,
        so a look that was cut off is repeated, not told twice.
        """
        look = await asyncio.to_thread(_Look, cursor, self._most_urls)
        waiting = deque([(self._root, 0)])
        asked = {self._root}
        silent = not look.before and self._first == "none"
        while waiting:
            url, depth = waiting.popleft()
            document, entries = look.before.get(url), None
            if (
                look.after is None
            ):  # else its host has asked us to wait: what is known of the rest stands
                try:
                    document, entries = await self._fetch(url, document)
                except (Failure, SitemapError) as e:
                    if url == self._root:
                        raise self._down(e) from None
                    look.fails(url, e)
            if document is None:
                continue
            for findings in look.takes(document, entries):
                wanted = (
                    [] if silent else [f for f in findings if f.payload["change"] in self._emit]
                )
                yield Batch(findings=wanted)
            for child in document.children:
                if child in asked:
                    continue
                if depth + 1 > self._depth or len(asked) > self._most_documents:
                    look.cuts(
                        f"more than {self._most_documents} sitemaps, or deeper than {self._depth}"
                    )
                    break
                asked.add(child)
                waiting.append((child, depth + 1))
        for findings in look.ends():
            yield Batch(findings=[f for f in findings if "removed" in self._emit])
        packed = await asyncio.to_thread(pack, look.state())
        yield Batch(cursor=packed if packed != cursor else None, idle=True)
        if look.trouble:
            message = f"{len(look.trouble)} of {len(asked)} sitemaps could not be read, so nothing counts as removed: {look.trouble[0]}"
            raise SourceDown(
                message, hint="the others were read", after=max(self.interval, look.after or 0.0)
            )

    async def _fetch(
        self, url: str, before: _Document | None
    ) -> tuple[_Document, tuple[SitemapEntry, ...] | None]:
        """The document, and its entries unless they are as they were."""
        by_robots = url == self._root and url.endswith("/robots.txt")
        try:
            response = await self.context.web.get(
                url,
                etag=before.etag if before else None,
                last_modified=before.modified if before else None,
            )
        except Failure as e:
            if by_robots and e.status in (404, 410):
                return _Document(url, children=[origin(url) + "/sitemap.xml"]), ()
            raise
        if response.status == 304 and before is not None:
            return before, None
        etag, modified = (
            value if value and len(value) <= 1000 else None
            for value in map(response.headers.get, ("etag", "last-modified"))
        )
        if by_robots:
            named = [
                child
                for text in robots.parse(response.body).sitemaps
                if (child := self._sitemap(text, response.url))
            ]
            return _Document(
                url, etag, modified, named[: self._most_documents] or [origin(url) + "/sitemap.xml"]
            ), ()
        made = await asyncio.to_thread(parse, response.body, response.url)
        entries = tuple(e for e in made.entries if self._is_ours(e.loc))
        children = [e.loc for e in made.children if self._is_ours(e.loc)]
        left_out = dict(made.left_out)
        if others := len(made.entries) + len(made.children) - len(entries) - len(children):
            left_out["on another site"] = others
        if left_out:
            log.info(
                "source %s: left out of %s: %s",
                self.name,
                mask(url),
                "; ".join(f"{n} × {why}" for why, n in left_out.items()),
            )
        return _Document(url, etag, modified, children), entries

    def _sitemap(self, text: str, base: str) -> str | None:
        """What robots.txt names may lie elsewhere: that is how a site vouches for it."""
        try:
            return canonical_url(text, base)
        except BadUrl:
            return None

    def _is_ours(self, loc: str) -> bool:
        return self._site is None or registrable_domain(authority(loc).host) == self._site

    def _down(self, error: Failure | SitemapError) -> Exception:
        if isinstance(error, Failure):
            return error
        return SourceDown(f"{mask(self._root)} is no sitemap: it {error.reason}", hint=error.hint)

    def describe(self, cursor: bytes | None) -> str:
        state = unpack(cursor, _State) if cursor is not None else None
        if state is None:
            return "at the start"
        return f"{sum(len(d.marks) // 8 for d in state.documents):,} URLs in {sum(1 for d in state.documents if d.url)} documents"


class _Look:
    """One look against the last: what each document brings, and at the end what none of them has
    any more.
    """

    def __init__(self, cursor: bytes | None, most: int) -> None:
        state = (unpack(cursor, _State) if cursor is not None else None) or _State()
        self.before = {d.url: d for d in state.documents if d.url}
        self._known = {loc: mark for d in state.documents for loc, mark in d.entries()}
        self._left, self._most = Left(state.left), most
        self._seen: set[str] = set()
        self._documents: list[_Document] = []
        self._cut = False
        self.trouble: list[str] = []
        self.after: float | None = None  # a host asked us to wait so long

    def fails(self, url: str, error: Failure | SitemapError) -> None:
        self.trouble.append(
            f"{mask(url)}: it {error.reason}"
            if isinstance(error, SitemapError)
            else f"{mask(url)}: {error.reason}"
        )
        if isinstance(error, Failure) and (
            error.kind in (ErrorClass.THROTTLED, ErrorClass.BLOCKED)
            or len(self.trouble) >= PATIENCE
        ):
            self.after = error.after or 0.0

    def cuts(self, why: str) -> None:
        if not self._cut:
            log.warning("the rest of the sitemaps is not read: %s; nothing counts as removed", why)
        self._cut = True

    def takes(
        self, document: _Document, entries: tuple[SitemapEntry, ...] | None
    ) -> Iterator[list[Finding]]:
        """What is new or changed in it, in pieces. `entries` None: it is as it was, or could not be
        asked.
        """
        if entries is None:
            self._documents.append(document)
            self._seen.update(loc for loc, _ in document.entries())
            yield []
            return
        locs, marks, found = [], [], []
        for entry in entries:
            if entry.loc in self._seen:
                continue
            if len(self._seen) >= self._most:
                self.cuts(f"more than {self._most} URLs")
                break
            self._seen.add(entry.loc)
            before, mark = (
                self._known.get(entry.loc),
                NONE if entry.lastmod is None else struct.pack("<d", entry.lastmod),
            )
            if before is not None and mark == NONE:
                mark = (
                    before  # without a date there is no change to see; the one it had still counts
                )
            locs.append(entry.loc)
            marks.append(mark)
            if mark == before:
                continue
            if before is not None:
                self._left.note(entry.loc, before)
            found.append(
                self._finding("new" if before is None else "changed", entry, mark, document.url)
            )
            if len(found) >= BATCH:
                yield found
                found = []
        document.locs, document.marks = "\n".join(locs), b"".join(marks)
        self._documents.append(document)
        yield found

    def _finding(self, change: str, entry: SitemapEntry, mark: bytes, sitemap: str) -> Finding:
        times = self._left.times(
            entry.loc, mark
        )  # it was just so before, and then gone or otherwise
        payload = {
            name: value for name, value in msgspec.to_builtins(entry).items() if name != "loc"
        }
        payload |= {"url": entry.loc, "change": change, "sitemap": sitemap}
        payload.setdefault("lastmod", None)
        id_ = mint("sitemap", entry.loc, _text(mark), *([str(times)] if times else []))
        return Finding(
            id=id_,
            url=entry.loc,
            cause=f"{change} {_text(mark)}".strip(),
            payload=payload,
            at=entry.lastmod,
        )

    def ends(self) -> Iterator[list[Finding]]:
        """What is in no document any more is removed, if all of them were read; else it waits for
        the next look.
        """
        gone = [loc for loc in self._known if loc not in self._seen]
        if self.trouble or self._cut:
            if gone := gone[: self._most]:  # bounded, also where this goes on for long
                self._documents.append(
                    _Document(
                        "", locs="\n".join(gone), marks=b"".join(self._known[loc] for loc in gone)
                    )
                )
            return
        for at in range(0, len(gone), BATCH):
            found = []
            for loc in gone[at : at + BATCH]:
                mark = self._known[loc]
                id_ = mint("sitemap", loc, _text(mark), "removed", str(self._left.times(loc, mark)))
                self._left.note(loc, mark)
                payload = {
                    "url": loc,
                    "change": "removed",
                    "lastmod": None if mark == NONE else struct.unpack("<d", mark)[0],
                }
                found.append(
                    Finding(
                        id=id_, url=loc, cause=f"removed {_text(mark)}".strip(), payload=payload
                    )
                )
            yield found

    def state(self) -> _State:
        return _State(1, self._documents, self._left.kept())


def _text(mark: bytes) -> str:
    """A lastmod for ids: the moment, however it is written."""
    return "" if mark == NONE else f"{struct.unpack('<d', mark)[0]:.3f}"


def open_source(spec: SourceSpec, context: SourceContext) -> SitemapSource:
    return SitemapSource(spec, context)
