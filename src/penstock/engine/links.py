"""Acceptance of the links that a page's extraction found, in the page's success transaction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from penstock.engine.claim_session import ClaimSession
from penstock.engine.publishing import insert_events
from penstock.engine.settings import LifecycleSettings
from penstock.model import Event, Link, child_id
from penstock.ports import End, Transaction
from penstock.rules.identity import BadUrl, canonical_url, host_key


class LinkAcceptor:
    """Decides which links become child events, and inserts these events."""

    def __init__(self, settings: LifecycleSettings, url_key: Callable[[str], bytes]) -> None:
        self._settings, self._url_key = settings, url_key

    def keys(self, ends: Sequence[End]) -> Iterator[bytes]:
        """Yield the URL keys whose claims `accept` reads."""
        for end in ends:
            for link in end.links:
                try:
                    yield self._url_key(canonical_url(link.url))
                except BadUrl:
                    continue  # `accept` counts it

    def accept(
        self,
        tx: Transaction,
        session: ClaimSession,
        parent: Event,
        links: Sequence[Link],
        now: float,
        count: Counter[str],
    ) -> None:
        """Accept child events before their parent succeeds, in its transaction.

        A link that is fresh, invalid, too deep, off-site or already in the trace is only counted.
        """
        s = self._settings
        home = host_key(parent.url, by="domain") if s.follow_same_domain else None
        children = []
        for link in links:
            try:
                url = canonical_url(link.url)
            except BadUrl:
                count["followed_bad"] += 1
                continue
            refused = self._refusal(tx, session, parent, link, url, home, now)
            if refused is not None:
                count[refused] += 1
                continue
            child = _child_of(parent, link, url, host_key(url, by=s.host_by))
            if not tx.lookup.known([child.id]):
                children.append(child)
                count["followed"] += 1
        insert_events(tx, children, now, s.pipeline)

    def _refusal(
        self,
        tx: Transaction,
        session: ClaimSession,
        parent: Event,
        link: Link,
        url: str,
        home: str | None,
        now: float,
    ) -> str | None:
        """Return the counter of the reason why a link is not followed, or None to accept the link.

        `url` is the link's canonical URL. `home` is the domain that links must not leave.
        """
        s = self._settings
        if parent.depth + 1 > s.follow_depth:
            return "followed_too_deep"
        if home is not None and host_key(url, by="domain") != home:
            return "followed_offsite"
        key = self._url_key(url)
        if not tx.lookup.add_to_trace(parent.trace, key, now):
            return "followed_seen"
        window = s.follow_window if link.window is None else link.window
        if url == parent.url or _is_fresh(tx, session, key, now - window):
            return "followed_fresh"
        return None


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


def _is_fresh(tx: Transaction, session: ClaimSession, key: bytes, since: float) -> bool:
    """Return True if the URL was requested after `since`, or if an event for the URL is open."""
    holder = session.holder(tx, key)
    if holder is not None and tx.lookup.is_fresh(holder.owner, since):
        return True
    return tx.lookup.has_open(key)
