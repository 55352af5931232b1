"""`feed+https://…`: an event for every new or updated entry of an RSS, Atom or JSON feed.

See `feed_parser` for how a feed is parsed.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

import msgspec

from penstock.authoring.pipeline import SourceSpec
from penstock.errors import SourceDown
from penstock.model import mint
from penstock.ports import Batch, Finding, Response
from penstock.rules.masking import mask
from penstock.sources.base import BATCH, SourceContext, options
from penstock.sources.feed_entries import Feed, FeedEntry, Hints
from penstock.sources.feed_parser import MAX_ENTRIES, FeedError, parse
from penstock.sources.parser_thread import in_parser_thread
from penstock.sources.polling import (
    Polling,
    SeenVersions,
    StoredVersions,
    one_of,
    pack,
    short_hash,
    target,
    unpack,
    validators,
)

__all__ = ["Feed", "FeedEntry", "FeedError", "Hints", "open_source", "parse"]

DEFAULT_INTERVAL = 900.0  # seconds between two rounds
# Entries in the cursor: those of the feed, and as many that the feed no longer has.
MAX_KNOWN_ENTRIES = 2 * MAX_ENTRIES
ACCEPT = (
    "application/atom+xml, application/rss+xml, application/feed+json, application/rdf+xml, "
    "application/xml;q=0.9, application/json;q=0.8, */*;q=0.5"
)


class _State(msgspec.Struct, array_like=True):
    version: int
    etag: str | None
    modified: str | None
    not_before: float  # earliest time of the next request, by the feed's hints
    hints: Hints
    memory: StoredVersions


class FeedSource(Polling):
    def __init__(self, spec: SourceSpec, context: SourceContext) -> None:
        super().__init__(spec, context, every=DEFAULT_INTERVAL)
        given = options(spec, {"first": "all", "hints": True})
        self._url = target(spec, "feed")
        self._first: str = one_of(spec, "first", given["first"], ("all", "latest", "none"))
        self._uses_hints: bool = given["hints"]

    async def read(self, cursor: bytes | None) -> AsyncGenerator[Batch, None]:
        state = unpack(cursor, _State)
        now = self.context.clock.now()
        if state is not None and self._uses_hints and now < state.not_before < now + 8 * 86400:
            self.due_at = state.not_before
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
            state.not_before = self._next_due(state.hints, now)
            yield Batch(cursor=pack(state) if state.not_before else None, idle=True)
            return
        try:
            found, new_state = await in_parser_thread(self._parsed, response, state, now)
        except FeedError as e:
            raise SourceDown(
                f"{mask(self._url)} is not a feed: it {e.reason}", hint=e.hint
            ) from None
        for n in range(0, len(found), BATCH):
            yield Batch(findings=found[n : n + BATCH])
        yield Batch(cursor=await in_parser_thread(pack, new_state), idle=True)

    def _parsed(
        self, response: Response, state: _State | None, now: float
    ) -> tuple[list[Finding], _State]:
        """Return the findings of a response, and the state after it. Raises FeedError."""
        feed = parse(response.body, response.headers.get("content-type"))
        seen_versions = SeenVersions(state.memory if state else StoredVersions(), MAX_KNOWN_ENTRIES)
        found = self._new_findings(feed, seen_versions, response.url)
        if state is None and self._first != "all":
            newest = max(feed, key=lambda e: e.updated or e.published or 0.0, default=None)
            found = [
                f
                for f in found
                if self._first == "latest" and newest is not None and f.cause == newest.id
            ]
        return found, _State(
            1,
            *validators(response),
            self._next_due(feed.hints, now),
            feed.hints,
            seen_versions.stored(),
        )

    def _new_findings(self, feed: Feed, seen_versions: SeenVersions, base: str) -> list[Finding]:
        """Return new and updated entries, oldest first. A feed starts with its newest entry."""
        found = []
        for entry in reversed(feed):
            version = f"{entry.updated:.3f}" if entry.updated is not None else entry.hash
            id_parts = seen_versions.observe(entry.id, short_hash(version))
            if id_parts is None:
                continue
            payload = {
                name: value for name, value in msgspec.to_builtins(entry).items() if name != "hash"
            }
            found.append(
                Finding(
                    id=mint("feed", self._url, entry.id, version, *id_parts),
                    url=entry.url,
                    base=base,
                    cause=entry.id,
                    payload=payload,
                    at=entry.updated or entry.published,
                )
            )
        return found

    def _next_due(self, hints: Hints, now: float) -> float:
        """Return the time that the feed requests for the next round, or 0 if `every` is later."""
        at = hints.next_look(now, self.interval) if self._uses_hints else 0.0
        self.due_at = at if at > now + self.interval else None
        return self.due_at or 0.0

    async def preview(self, cursor: bytes | None, limit: int) -> Sequence[Finding]:
        """Return the next findings, without waiting for the time that the feed requests."""
        state = unpack(cursor, _State)
        if state is not None:
            state.not_before = 0.0
        return await super().preview(pack(state) if state is not None else None, limit)

    def describe(self, cursor: bytes | None) -> str:
        state = unpack(cursor, _State)
        return "at the start" if state is None else f"{len(state.memory.known) // 16} entries known"


open_source = FeedSource
