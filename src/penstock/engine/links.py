"""Acceptance of the links that a page's extraction found, as far as there is room.

The links that find no room wait in the ledger, and `link_feeder` accepts them later.
See docs/adr/0022-links-wait-in-the-ledger.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import msgspec

from penstock.engine.budgets import LinkGate, session_tokens
from penstock.engine.claim_session import ClaimSession
from penstock.engine.publishing import insert_events
from penstock.engine.settings import LifecycleSettings
from penstock.model import Ask, Event, Link, child_id
from penstock.ports import End, Transaction
from penstock.rules.budgets import Key
from penstock.rules.identity import BadUrl, canonical_url, host_key
from penstock.rules.links import UNPACKED, PackedLinks, pack, unpack

# Links that one transaction decides, and characters of their URLs. A link needs about 0.1 ms on
# SQLite, and a character of a hostile URL up to 0.5 µs. The statements run on the event loop. So
# one transaction keeps the loop for about 50 ms.
MAX_DECIDED = UNPACKED
MAX_CHARACTERS = 100_000
# Links of a page in which session ids are searched, even if none of its links is decided now.
MIN_READ = 20
RESERVED = 10  # links never use this fraction of `max_pending`: one tenth


def room_for_links(tx: Transaction, topic: str, max_pending: int) -> int:
    """Return how many links of a topic may become events now.

    A tenth of `max_pending` is left to sources, webhooks and `push`, and at least one place, unless
    there is only one.
    """
    reserved = min(max_pending - 1, -(-max_pending // RESERVED))
    return max_pending - reserved - tx.counters.pending(topic)


def share_out(pages: Sequence[Sequence[Link]]) -> list[int]:
    """Return how many links of each page one transaction may decide, in the order of the pages.

    The last of these URLs may exceed the limit of characters.
    """
    left, characters, shares = MAX_DECIDED, MAX_CHARACTERS, []
    for links in pages:
        share = 0
        while share < min(len(links), left) and characters > 0:
            characters -= len(links[share].url)
            share += 1
        shares.append(share)
        left -= share
    return shares


class _Chunk(msgspec.Struct, frozen=True):
    """Links of one page that wait for room. Independent of the ledger row of the page's event."""

    page: Event  # without the fields that its children do not get
    links: bytes  # a list of Link, packed
    tokens: Sequence[str] = ()  # session ids in the links of the page


_decode = msgspec.msgpack.Decoder(_Chunk).decode
_encode = msgspec.msgpack.Encoder().encode


def read_chunk(body: bytes) -> tuple[Event, Sequence[Link], Sequence[str]]:
    """Return the event of the page, without its data, the links, and session ids in them."""
    chunk = _decode(body)
    return chunk.page, unpack(chunk.links), chunk.tokens


def write_chunks(
    page: Event, packed: Sequence[PackedLinks], tokens: Sequence[str]
) -> list[tuple[int, bytes]]:
    """Return the number of links and the body of each chunk."""
    short = msgspec.structs.replace(page, data={}, ask=Ask())
    return [(chunk.count, _encode(_Chunk(short, chunk.body, tokens))) for chunk in packed]


class Room:
    """Room for links in one transaction. Each topic is counted once."""

    def __init__(self, tx: Transaction, max_pending: int) -> None:
        self._tx, self._max_pending = tx, max_pending
        self._left: dict[str, int] = {}

    def left(self, topic: str) -> int:
        if topic not in self._left:
            self._left[topic] = room_for_links(self._tx, topic, self._max_pending)
        return max(0, self._left[topic])

    def use(self, topic: str, events: int) -> None:
        self._left[topic] -= events


class _OpenUrls:
    """Claims and open events of the URLs of some links.

    One query for all URLs, because each query of PostgreSQL waits for the answer of the server.
    """

    def __init__(self, tx: Transaction, session: ClaimSession, keys: Sequence[bytes]) -> None:
        self._tx, self._session = tx, session
        self._open = tx.lookup.with_open(keys)
        self._holders = session.holders(tx, keys)

    def is_fresh(self, key: bytes, since: float) -> bool:
        """Return True if the URL was requested after `since`, or if an event for it is open."""
        if key in self._open:
            return True
        if key in self._holders:
            holder = self._holders[key]
        else:
            holder = self._session.holder(self._tx, key)
        return holder is not None and self._tx.lookup.is_fresh(holder.owner, since)


class LinkAcceptor:
    """Decides which links become child events, and inserts these events."""

    def __init__(self, settings: LifecycleSettings, url_key: Callable[[str], bytes]) -> None:
        self._settings, self._url_key = settings, url_key

    def room(self, tx: Transaction) -> Room:
        """Return the room for links in a transaction."""
        return Room(tx, self._settings.max_pending)

    def keys(self, pages: Sequence[Sequence[Link]]) -> Iterator[bytes]:
        """Yield the URL keys whose claims `accept` reads."""
        for links, share in zip(pages, share_out(pages), strict=True):
            for link in links[:share]:
                try:
                    yield self._url_key(canonical_url(link.url))
                except BadUrl:
                    continue  # `accept` counts it

    def accept_or_keep(
        self,
        tx: Transaction,
        session: ClaimSession,
        end: End,
        share: int,
        room: Room,
        now: float,
        count: Counter[str],
    ) -> None:
        """Accept the first links of a page, in the transaction in which its event succeeds.

        At most `share` links are decided, and only while there is room. All other links are kept in
        the ledger.
        """
        if self._is_last(end.event):
            count["followed_too_deep"] += len(end.links) + sum(p.count for p in end.more_links)
            return
        links, more = self._first_links(end, count)
        read = links[: max(share, MIN_READ)]
        tokens = session_tokens(self._settings, end.event.url, read)
        decided = self.accept(tx, session, end.event, links[:share], tokens, room, now, count)
        rest = [*pack(links[decided:]), *more]
        if rest:
            tx.links.store(end.row, end.event.topic, write_chunks(end.event, rest, tokens))

    def _is_last(self, parent: Event) -> bool:
        """Return True if all links of a page are too deep."""
        return parent.depth + 1 > self._settings.follow_depth

    def _first_links(
        self, end: End, count: Counter[str]
    ) -> tuple[Sequence[Link], Sequence[PackedLinks]]:
        """Return the links of a page up to the limit for one page, and count the others."""
        limit, total = self._settings.budgets.links_per_page, len(end.links)
        total += sum(packed.count for packed in end.more_links)
        if not 0 < limit < total:
            return end.links, end.more_links
        count["followed_over_page"] += total - limit
        if limit <= len(end.links):
            return end.links[:limit], ()
        left, kept = limit - len(end.links), []
        for packed in end.more_links:
            if packed.count > left:
                kept += pack(unpack(packed.body)[:left])
                break
            kept.append(packed)
            left -= packed.count
        return end.links, kept

    def accept(
        self,
        tx: Transaction,
        session: ClaimSession,
        parent: Event,
        links: Sequence[Link],
        tokens: Sequence[str],
        room: Room,
        now: float,
        count: Counter[str],
    ) -> int:
        """Accept links as child events while there is room. Return how many links were decided.

        A link that is fresh, invalid, too deep, off-site or already in the trace is only counted.
        """
        decided = 0
        while decided < len(links) and (left := room.left(parent.topic)):
            some = links[decided : decided + left]
            room.use(parent.topic, self._accept(tx, session, parent, some, tokens, now, count))
            decided += len(some)
        return decided

    def _accept(
        self,
        tx: Transaction,
        session: ClaimSession,
        parent: Event,
        links: Sequence[Link],
        tokens: Sequence[str],
        now: float,
        count: Counter[str],
    ) -> int:
        """Accept these links, and return how many became events."""
        s = self._settings
        if self._is_last(parent):  # the option was lowered while the links waited
            count["followed_too_deep"] += len(links)
            return 0
        home = host_key(parent.url, by="domain") if s.follow_same_domain else None
        gate = LinkGate(tx, s, parent, tokens, now)
        candidates: list[tuple[Link, Event]] = []
        for link in links:
            try:
                url = canonical_url(link.url)
            except BadUrl:
                count["followed_bad"] += 1
                continue
            candidates.append((link, _child_of(parent, link, url, host_key(url, by=s.host_by))))
        urls = _OpenUrls(tx, session, [self._url_key(child.url) for _, child in candidates])
        known = tx.lookup.known([child.id for _, child in candidates])
        children = []
        for link, child in candidates:
            refused, charges = self._refusal(
                tx, urls, parent, link, child.url, child.key, home, gate, now
            )
            if refused is not None:
                count[refused] += 1
                continue
            if child.id not in known:
                children.append(child)
                gate.charge(charges)
                count["followed"] += 1
        gate.write()
        insert_events(tx, children, now, s.pipeline)
        return len(children)

    def _refusal(
        self,
        tx: Transaction,
        urls: _OpenUrls,
        parent: Event,
        link: Link,
        url: str,
        host: str,
        home: str | None,
        gate: LinkGate,
        now: float,
    ) -> tuple[str | None, Sequence[Key]]:
        """Return the counter of the reason why a link is not followed, or the budgets to charge.

        `url` is the link's canonical URL. `home` is the domain that links must not leave.
        """
        s = self._settings
        if home is not None and host_key(url, by="domain") != home:
            return "followed_offsite", ()
        key = self._url_key(url)
        refused, charges = gate.decide(url, host, key)
        if refused is not None:
            return refused, ()
        if not tx.lookup.add_to_trace(parent.trace, key, now):
            return "followed_seen", ()
        window = s.follow_window if link.window is None else link.window
        if url == parent.url or urls.is_fresh(key, now - window):
            return "followed_fresh", ()
        return None, charges


def _child_of(parent: Event, link: Link, url: str, host: str) -> Event:
    return Event(
        id=child_id(parent.id, link.extractor, url),
        url=url,
        key=host,
        topic=parent.topic,
        source=f"follow:{link.extractor}",
        trace=parent.trace,
        cause=parent.id,
        route=link.route or parent.route,
        priority=link.priority,
        depth=parent.depth + 1,
        parent=parent.id,
        window=link.window,
    )
