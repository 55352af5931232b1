"""Accepts links that wait in the ledger, as soon as there is room for their events."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import TypeAlias

import msgspec

from penstock.engine.claim_session import Claims, ClaimSession
from penstock.engine.links import (
    MAX_DECIDED,
    LinkAcceptor,
    read_chunk,
    room_for_links,
    share_out,
    write_chunks,
)
from penstock.errors import StoreUnavailable
from penstock.model import Event, Link
from penstock.ports import LINKS_WAITING, Clock, LinkChunk, Topics, Transaction, UnitOfWork
from penstock.rules.links import CHUNK, pack

log = logging.getLogger("penstock.worker")
# Seconds between two checks if no event of this process ends. Other workers may store links too.
LOOK_INTERVAL = 1.0
# After a transaction the feeder waits this many times as long as the transaction took. So other
# work gets at least half of the time of the event loop and of the store.
REST = 1.0

# Event of a page, its links, and session ids in them.
_Read: TypeAlias = tuple[Event, Sequence[Link], Sequence[str]]


class LinkFeeder:
    """Feeds waiting links of all pages in turn. Every worker may run one at the same time."""

    def __init__(
        self,
        uow: UnitOfWork,
        claims: Claims,
        topics: Topics,
        acceptor: LinkAcceptor,
        max_pending: int,
        clock: Clock,
    ) -> None:
        self._uow, self._claims, self._topics = uow, claims, topics
        self._acceptor, self._max_pending, self._clock = acceptor, max_pending, clock
        self._after = 0  # row number of the last page whose links were decided
        self._waiting = True  # False if the last read found no waiting links
        self._room = asyncio.Event()

    def wake(self, *, links: bool) -> None:
        """Read the ledger again, because events have ended.

        `links` is True if their pages have links.
        """
        if links:
            self._waiting = True
        if self._waiting:
            self._room.set()

    def can_feed(self, tx: Transaction) -> bool:
        """Return True if links wait and there is room for at least one event."""
        return any(room > 0 for room in self._rooms(tx))

    def _rooms(self, tx: Transaction) -> list[int]:
        """Return the room of each topic in which links wait."""
        topics = tx.counters.topics_with(LINKS_WAITING)
        return [room_for_links(tx, topic, self._max_pending) for topic in topics]

    async def run(self) -> None:
        """Accept waiting links until cancelled."""
        while True:
            began = self._clock.now()
            try:
                again = await self.feed()
            except StoreUnavailable as e:
                log.error("%s", e.message)
                await self._clock.sleep(1.0)
                continue
            if again:
                await self._clock.sleep(REST * max(0.0, self._clock.now() - began))
                continue
            try:
                async with asyncio.timeout(LOOK_INTERVAL):
                    await self._room.wait()
            except TimeoutError:
                pass

    async def feed(self) -> bool:
        """Accept the next links, in one transaction. Return True if more may be accepted now."""
        self._room.clear()
        self._waiting, chunks = await self._uow.read(self._next)
        if not chunks:
            return False
        reads = [_read(chunk) for chunk in chunks]
        links: list[Sequence[Link]] = [() if read is None else read[1] for read in reads]
        session = await self._claims.open(lambda: self._acceptor.keys(links))
        waiting = list(zip(chunks, reads, share_out(links), strict=True))
        last, topics = await self._uow.write(partial(self._feed, session, waiting))
        if last is None:
            return False
        self._after = last
        self._topics.wake(topics)
        return True

    def _next(self, tx: Transaction) -> tuple[bool, list[LinkChunk]]:
        """Return whether links wait, and the oldest chunk of each page whose turn it is."""
        rooms = self._rooms(tx)
        if not rooms:
            return False, []
        room = max(rooms)
        if room <= 0:
            return True, []
        most = min(MAX_DECIDED // CHUNK, room // CHUNK + 1)
        return True, tx.links.next_after(self._after, most) or tx.links.next_after(0, most)

    def _feed(
        self,
        session: ClaimSession,
        waiting: Sequence[tuple[LinkChunk, _Read | None, int]],
        tx: Transaction,
    ) -> tuple[int | None, set[str]]:
        """Decide as many links of each chunk as its share.

        Return the row number of the last page of which links were decided, and their topics.
        """
        now, last = self._clock.now(), None
        room = self._acceptor.room(tx)
        counts: dict[str, Counter[str]] = {}
        for chunk, read, share in waiting:
            if not tx.links.holds(chunk):
                last = chunk.page  # another worker has decided it, so read the next chunks
                continue
            if read is None:
                self._drop(tx, chunk)
                last = chunk.page
                continue
            page, links, tokens = read
            count = counts.setdefault(page.topic, Counter())
            decided = self._acceptor.accept(
                tx, session, page, links[:share], tokens, room, now, count
            )
            if decided:
                rest = write_chunks(page, pack(links[decided:]), tokens)
                tx.links.shorten(chunk, page.topic, *(rest[0] if rest else (0, b"")))
                last = chunk.page
        for topic, count in counts.items():
            tx.counters.add(topic, count)
        return last, set(counts)

    def _drop(self, tx: Transaction, chunk: LinkChunk) -> None:
        """Delete links that cannot be decoded, and count them. They would wait forever."""
        topic = tx.counters.topics_with(LINKS_WAITING)[0]
        tx.links.shorten(chunk, topic, 0, b"")
        tx.counters.add(topic, {"followed_bad": chunk.links})
        log.error(
            "%d waiting links of the event in row %d are damaged, and were dropped",
            chunk.links,
            chunk.page,
        )


def _read(chunk: LinkChunk) -> _Read | None:
    """Return the event of the page, its links and their session ids. None if they are damaged."""
    try:
        return read_chunk(chunk.body)
    except (msgspec.MsgspecError, UnicodeError):
        return None
