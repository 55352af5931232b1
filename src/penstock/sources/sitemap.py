"""`sitemap+https://…`: an event for every URL that is new, changed or removed in sitemaps.

See `sitemap_parser` for how a sitemap is parsed.
"""

from __future__ import annotations

import logging
import struct
from collections import deque
from collections.abc import AsyncGenerator, Iterator

import msgspec

from penstock.authoring.pipeline import SourceSpec
from penstock.errors import ConfigError, SourceDown
from penstock.model import ErrorClass, Failure, mint
from penstock.ports import Batch, Finding, Response
from penstock.rules import robots
from penstock.rules.identity import BadUrl, authority, canonical_url, origin, registrable_domain
from penstock.rules.masking import mask
from penstock.sources.base import BATCH, SourceContext, options
from penstock.sources.parser_thread import in_parser_thread
from penstock.sources.polling import (
    PastVersions,
    Polling,
    integer,
    one_of,
    pack,
    target,
    unpack,
    validators,
)
from penstock.sources.sitemap_parser import Sitemap, SitemapEntry, SitemapError, parse

__all__ = ["Sitemap", "SitemapEntry", "SitemapError", "open_source", "parse"]

log = logging.getLogger("penstock.sources")
DEFAULT_INTERVAL = 3600.0  # seconds between two rounds
MAX_URL_SIZE = 128  # characters of a URL, on average over the `max_urls` of a round
MAX_FAILURES = 10  # failed sitemaps after which the rest is left for the next round
CHANGES = ("new", "changed", "removed")
NO_LASTMOD = struct.pack("<d", -1.0)  # stored for an entry without lastmod


class _Document(msgspec.Struct, array_like=True):
    """State of a sitemap when it was last read."""

    url: str
    etag: str | None = None
    modified: str | None = None
    children: list[str] = []
    locs: str = ""  # URLs, each on a line, needed to report removed URLs
    marks: bytes = b""  # lastmod of each URL, 8 bytes

    def entries(self) -> Iterator[tuple[str, bytes]]:
        for n, loc in enumerate(self.locs.split("\n") if self.locs else ()):
            yield loc, self.marks[n * 8 : n * 8 + 8]


class _State(msgspec.Struct, array_like=True):
    version: int = 1
    documents: list[_Document] = []
    left: bytes = b""


class SitemapSource(Polling):
    def __init__(self, spec: SourceSpec, context: SourceContext) -> None:
        super().__init__(spec, context, every=DEFAULT_INTERVAL)
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
                f"source {spec.name}: emit is {self._emit!r}",
                hint=f"use a list of {', '.join(CHANGES)}",
            )
        self._first: str = one_of(spec, "first", given["first"], ("all", "none"))
        self._depth = integer(spec, "max_depth", given["max_depth"], 1, 20)
        self._max_documents = integer(spec, "max_sitemaps", given["max_sitemaps"], 1, 50_000)
        self._max_urls = integer(spec, "max_urls", given["max_urls"], 1, 2_000_000)
        self._site = registrable_domain(authority(self._url).host) if given["same_site"] else None
        self._root = (
            origin(self._url) + "/robots.txt"
            if self._url.removeprefix(origin(self._url)) in ("/", "/robots.txt")
            else self._url
        )

    async def read(self, cursor: bytes | None) -> AsyncGenerator[Batch, None]:
        """Read all sitemaps once. The last batch has the cursor.

        The ids depend on the cursor at the start. So an interrupted round is repeated with the same
        ids, and reports no change twice.
        """
        comparison = await in_parser_thread(_Comparison, cursor, self._max_urls)
        waiting = deque([(self._root, 0)])
        queued = {self._root}
        silent = not comparison.before and self._first == "none"
        while waiting:
            url, depth = waiting.popleft()
            document, entries = comparison.before.get(url), None
            # After throttling or too many failures, the other sitemaps keep their stored state.
            if comparison.pause is None:
                try:
                    document, entries = await self._fetch(url, document)
                except (Failure, SitemapError) as e:
                    if url == self._root:
                        raise self._down(e) from None
                    comparison.record_failure(url, e)
            if document is None:
                continue
            changes = comparison.compare(document, entries)
            while (findings := await in_parser_thread(next, changes, None)) is not None:
                wanted = (
                    [] if silent else [f for f in findings if f.payload["change"] in self._emit]
                )
                yield Batch(findings=wanted)
            for child in document.children:
                if child in queued:
                    continue
                if depth + 1 > self._depth or len(queued) > self._max_documents:
                    comparison.cut_off(
                        f"more than {self._max_documents} sitemaps, or deeper than {self._depth}"
                    )
                    break
                queued.add(child)
                waiting.append((child, depth + 1))
        removed = comparison.removed()
        while (findings := await in_parser_thread(next, removed, None)) is not None:
            yield Batch(findings=[f for f in findings if "removed" in self._emit])
        packed = await in_parser_thread(lambda: pack(comparison.state()))
        yield Batch(cursor=packed if packed != cursor else None, idle=True)
        if comparison.failures:
            message = (
                f"{len(comparison.failures)} of {len(queued)} sitemaps could not be read, "
                f"so no URL is reported as removed: {comparison.failures[0]}"
            )
            raise SourceDown(
                message,
                hint="the other sitemaps were read",
                after=max(self.interval, comparison.pause or 0.0),
            )

    async def _fetch(
        self, url: str, before: _Document | None
    ) -> tuple[_Document, tuple[SitemapEntry, ...] | None]:
        """Return the document and its entries. The entries are None if they have not changed."""
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
        etag, modified = validators(response)
        if by_robots:
            named = await in_parser_thread(self._sitemaps, response)
            return _Document(
                url, etag, modified, named[: self._max_documents] or [origin(url) + "/sitemap.xml"]
            ), ()
        children, entries = await in_parser_thread(self._parsed, response)
        return _Document(url, etag, modified, children), entries

    def _parsed(self, response: Response) -> tuple[list[str], tuple[SitemapEntry, ...]]:
        """Return the sitemaps and the entries that a sitemap names. Raises SitemapError."""
        made = parse(response.body, response.url)
        entries = tuple(e for e in made.entries if self._is_same_site(e.loc))
        children = [e.loc for e in made.children if self._is_same_site(e.loc)]
        left_out = dict(made.left_out)
        if others := len(made.entries) + len(made.children) - len(entries) - len(children):
            left_out["on another site"] = others
        if left_out:
            log.info(
                "source %s: skipped in %s: %s",
                self.name,
                mask(response.url),
                "; ".join(f"{n} × {reason}" for reason, n in left_out.items()),
            )
        return children, entries

    def _sitemaps(self, response: Response) -> list[str]:
        """Return the URLs of the sitemaps that a robots.txt names."""
        found = robots.parse(response.body).sitemaps
        return [child for text in found if (child := self._sitemap(text, response.url))]

    def _sitemap(self, text: str, base: str) -> str | None:
        """Return the URL of a sitemap in robots.txt, or None if it is invalid.

        It may be on another site: with the entry in robots.txt, the site confirms it.
        """
        try:
            return canonical_url(text, base)
        except BadUrl:
            return None

    def _is_same_site(self, loc: str) -> bool:
        return self._site is None or registrable_domain(authority(loc).host) == self._site

    def _down(self, error: Failure | SitemapError) -> Exception:
        if isinstance(error, Failure):
            return error
        return SourceDown(
            f"{mask(self._root)} is not a sitemap: it {error.reason}", hint=error.hint
        )

    def describe(self, cursor: bytes | None) -> str:
        state = unpack(cursor, _State)
        if state is None:
            return "at the start"
        urls = sum(len(d.marks) // 8 for d in state.documents)
        return f"{urls:,} URLs in {sum(1 for d in state.documents if d.url)} documents"


class _Comparison:
    """Comparison of one round with the last: changes of each document, and removed URLs."""

    def __init__(self, cursor: bytes | None, max_urls: int) -> None:
        state = unpack(cursor, _State) or _State()
        self.before = {d.url: d for d in state.documents if d.url}
        self._known = {loc: mark for d in state.documents for loc, mark in d.entries()}
        self._past, self._max_urls = PastVersions(state.left), max_urls
        self._seen: set[str] = set()
        self._size = 0  # characters of the seen URLs
        self._documents: list[_Document] = []
        self._is_cut_off = False
        self.failures: list[str] = []
        # None while sitemaps are requested. A failure that stops the requests of this round sets it
        # to the least number of seconds until the next round.
        self.pause: float | None = None

    def record_failure(self, url: str, error: Failure | SitemapError) -> None:
        self.failures.append(
            f"{mask(url)}: it {error.reason}"
            if isinstance(error, SitemapError)
            else f"{mask(url)}: {error.reason}"
        )
        if isinstance(error, Failure) and (
            error.kind in (ErrorClass.THROTTLED, ErrorClass.BLOCKED)
            or len(self.failures) >= MAX_FAILURES
        ):
            self.pause = error.after or 0.0

    def cut_off(self, reason: str) -> None:
        """Record that not all sitemaps are read, and log the reason once."""
        if not self._is_cut_off:
            log.warning(
                "the rest of the sitemaps is not read: %s. No URL is reported as removed.", reason
            )
        self._is_cut_off = True

    def compare(
        self, document: _Document, entries: tuple[SitemapEntry, ...] | None
    ) -> Iterator[list[Finding]]:
        """Yield new and changed entries of a document in batches.

        `entries` is None if the document has not changed or could not be requested.
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
            if len(self._seen) >= self._max_urls:
                self.cut_off(f"more than {self._max_urls} URLs")
                break
            self._size += len(entry.loc)
            if self._size > (limit := max(1 << 20, self._max_urls * MAX_URL_SIZE)):
                self.cut_off(f"more than {limit} characters of URLs")
                break
            self._seen.add(entry.loc)
            before, mark = (
                self._known.get(entry.loc),
                NO_LASTMOD if entry.lastmod is None else struct.pack("<d", entry.lastmod),
            )
            # An entry without a date is not a change. It keeps the last date.
            if before is not None and mark == NO_LASTMOD:
                mark = before
            locs.append(entry.loc)
            marks.append(mark)
            if mark == before:
                continue
            if before is not None:
                self._past.add(entry.loc, before)
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
        # How often this version was replaced or removed before.
        count = self._past.count(entry.loc, mark)
        payload = msgspec.to_builtins(entry)
        payload |= {"url": payload.pop("loc"), "change": change, "sitemap": sitemap}
        payload.setdefault("lastmod", None)
        return Finding(
            id=mint("sitemap", entry.loc, _text(mark), *([str(count)] if count else [])),
            url=entry.loc,
            cause=f"{change} {_text(mark)}".strip(),
            payload=payload,
            at=entry.lastmod,
        )

    def removed(self) -> Iterator[list[Finding]]:
        """Yield URLs that no document has any longer as removed, if all documents were read.

        Otherwise the URLs are kept for the next round.
        """
        missing = [loc for loc in self._known if loc not in self._seen]
        if self.failures or self._is_cut_off:
            # Limit the number, because many rounds in a row may be incomplete.
            if missing := missing[: self._max_urls]:
                self._documents.append(
                    _Document(
                        "",
                        locs="\n".join(missing),
                        marks=b"".join(self._known[loc] for loc in missing),
                    )
                )
            return
        for at in range(0, len(missing), BATCH):
            yield [self._removal(loc) for loc in missing[at : at + BATCH]]

    def _removal(self, loc: str) -> Finding:
        mark = self._known[loc]
        count = self._past.count(loc, mark)
        self._past.add(loc, mark)
        return Finding(
            id=mint("sitemap", loc, _text(mark), "removed", str(count)),
            url=loc,
            cause=f"removed {_text(mark)}".strip(),
            payload={
                "url": loc,
                "change": "removed",
                "lastmod": None if mark == NO_LASTMOD else struct.unpack("<d", mark)[0],
            },
        )

    def state(self) -> _State:
        return _State(1, self._documents, self._past.stored())


def _text(mark: bytes) -> str:
    """Return a lastmod as text for ids. It does not depend on how the sitemap writes the date."""
    return "" if mark == NO_LASTMOD else f"{struct.unpack('<d', mark)[0]:.3f}"


open_source = SitemapSource
