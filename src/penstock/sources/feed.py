"""`feed+https://…`: an event for every new or updated entry of an RSS, Atom or JSON feed. How feeds
are read is in feed_reading.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

import msgspec

from penstock.authoring.pipeline import SourceSpec
from penstock.errors import SourceDown
from penstock.model import mint
from penstock.ports import Batch, Finding
from penstock.rules.masking import mask
from penstock.sources.base import BATCH, SourceContext, options
from penstock.sources.feed_parser import MAX_ENTRIES, Feed, FeedEntry, FeedError, Hints, parse
from penstock.sources.polling import Kept, Memory, Polling, one_of, pack, short, target, unpack

__all__ = ["Feed", "FeedEntry", "FeedError", "Hints", "open_source", "parse"]

EVERY = 900.0
ROOM = (
    2 * MAX_ENTRIES
)  # entries that are remembered: those of the feed, and as many that are gone from it
ACCEPT = "application/atom+xml, application/rss+xml, application/feed+json, application/rdf+xml, application/xml;q=0.9, application/json;q=0.8, */*;q=0.5"


class _State(msgspec.Struct, array_like=True):
    version: int
    etag: str | None
    modified: str | None
    not_before: float  # by the feed's own hints
    hints: Hints
    memory: Kept


class FeedSource(Polling):
    def __init__(self, spec: SourceSpec, context: SourceContext) -> None:
        super().__init__(spec, context, every=EVERY)
        given = options(spec, {"first": "all", "hints": True})
        self._url = target(spec, "feed")
        self._first: str = one_of(spec, "first", given["first"], ("all", "latest", "none"))
        self._heeds: bool = given["hints"]

    async def read(self, cursor: bytes | None) -> AsyncGenerator[Batch, None]:
        state = unpack(cursor, _State) if cursor is not None else None
        now = self.context.clock.now()
        if state is not None and self._heeds and now < state.not_before < now + 8 * 86400:
            self.looks_at = state.not_before
            yield Batch(idle=True)
            return
        response = await self.context.web.get(
            self._url,
            etag=state.etag if state else None,
            last_modified=state.modified if state else None,
            headers={"accept": ACCEPT},
        )
        now = self.context.clock.now()
        if response.status == 304 and state is not None:
            state.not_before = self._plan(state.hints, now)
            yield Batch(cursor=pack(state) if state.not_before else None, idle=True)
            return
        try:
            feed = await asyncio.to_thread(
                parse, response.body, response.headers.get("content-type")
            )
        except FeedError as e:
            raise SourceDown(f"{mask(self._url)} is no feed: it {e.reason}", hint=e.hint) from None
        memory = Memory(state.memory if state else Kept(), ROOM)
        found = self._news(feed, memory, response.url)
        if state is None and self._first != "all":
            newest = max(feed, key=lambda e: e.updated or e.published or 0.0, default=None)
            found = [
                f
                for f in found
                if self._first == "latest" and newest is not None and f.cause == newest.id
            ]
        for n in range(0, len(found), BATCH):
            yield Batch(findings=found[n : n + BATCH])
        etag, modified = (
            value if value and len(value) <= 1000 else None
            for value in map(response.headers.get, ("etag", "last-modified"))
        )
        yield Batch(
            cursor=pack(
                _State(1, etag, modified, self._plan(feed.hints, now), feed.hints, memory.kept())
            ),
            idle=True,
        )

    def _news(self, feed: Feed, memory: Memory, base: str) -> list[Finding]:
        """Oldest first, as they happened: feeds begin with the newest."""
        found = []
        for entry in reversed(feed):
            version = f"{entry.updated:.3f}" if entry.updated is not None else entry.hash
            times = memory.sees(entry.id, short(version))
            if times is None:
                continue
            payload = {
                name: value for name, value in msgspec.to_builtins(entry).items() if name != "hash"
            }
            id_ = mint("feed", self._url, entry.id, version, *([str(times)] if times else []))
            found.append(
                Finding(
                    id=id_,
                    url=entry.url,
                    base=base,
                    cause=entry.id,
                    payload=payload,
                    at=entry.updated or entry.published,
                )
            )
        return found

    def _plan(self, hints: Hints, now: float) -> float:
        """When the feed wants to be looked at again, if that is later than we would; else 0."""
        at = hints.next_look(now, self.interval) if self._heeds else 0.0
        self.looks_at = at if at > now + self.interval else None
        return self.looks_at or 0.0

    async def preview(self, cursor: bytes | None, limit: int) -> Sequence[Finding]:
        """A person asks: the feed's wish to be left alone for a while is not for them."""
        state = unpack(cursor, _State) if cursor is not None else None
        if state is not None:
            state.not_before = 0.0
        return await super().preview(pack(state) if state is not None else None, limit)

    def describe(self, cursor: bytes | None) -> str:
        state = unpack(cursor, _State) if cursor is not None else None
        return "at the start" if state is None else f"{len(state.memory.known) // 16} entries known"


def open_source(spec: SourceSpec, context: SourceContext) -> FeedSource:
    return FeedSource(spec, context)
