"""Entries of a feed, with limits on each value, and the hints of a feed for the next polls."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from hashlib import blake2b

import msgspec

from penstock.sources.markup import parse_date

MAX_TEXT = 4000  # characters of a summary in the payload. The hash covers the whole summary.
MAX_NAME = 1000  # characters of a title, a tag or an author
MAX_ID = 4000  # characters
MAX_HINT = 86400.0  # seconds. A longer interval that a feed requests is shortened to this.
HOUR = 3600.0


class FeedEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Entry of a feed. `updated` and `published` are epoch seconds.

    A URL may be relative to the URL of the feed.
    """

    id: str  # the id in the feed. If it has none, the link, or a hash of the content.
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
    """Times that a feed requests for the next polls."""

    # Seconds between two polls: ttl, or sy:updatePeriod / sy:updateFrequency.
    least: float = 0.0
    skip_hours: tuple[int, ...] = ()  # 0 to 23, UTC
    skip_days: tuple[int, ...] = ()  # 0 is Monday

    def next_look(self, now: float, every: float) -> float:
        """Return the first time after the interval that is not in an hour or day to be skipped."""
        at = now + max(every, min(self.least, MAX_HINT))
        for _ in range(7 * 24):
            moment = datetime.fromtimestamp(at, UTC)
            if moment.hour not in self.skip_hours and moment.weekday() not in self.skip_days:
                return at
            at = (at // HOUR + 1) * HOUR
        # The hints would skip every hour of the week, so they are ignored.
        return now + max(every, min(self.least, MAX_HINT))


NO_HINTS = Hints()


class Feed(list[FeedEntry]):
    """Entries in the order of the feed, with the title and hints of the feed.

    Repeated entries are removed. If entries with different links have the same id, the link is
    added to the id.
    """

    def __init__(
        self, entries: list[FeedEntry], kind: str, *, title: str = "", hints: Hints = NO_HINTS
    ) -> None:
        links: dict[str, set[str | None]] = {}
        for e in entries:
            links.setdefault(e.id, set()).add(e.url)
        unique: dict[str, FeedEntry] = {}
        for e in entries:
            id_ = e.id if len(links[e.id]) == 1 else f"{e.id} {e.url or e.hash}"
            unique.setdefault(id_, msgspec.structs.replace(e, id=id_))
        super().__init__(unique.values())
        self.kind, self.title, self.hints = kind, title[:MAX_NAME], hints


def make_entry(
    *,
    id_: str,
    url: str | None,
    title: str,
    updated: str,
    published: str,
    summary: str,
    author: str,
    content: str = "",
    tags: Sequence[str] = (),
    enclosures: Sequence[str] = (),
) -> FeedEntry:
    digest = blake2b(digest_size=16)
    for part in (title, url or "", updated, published, summary, content, *enclosures):
        raw = part.encode("utf-8", "replace")
        digest.update(len(raw).to_bytes(8, "big") + raw)
    url = url.strip() if url else None
    return FeedEntry(
        id=(id_ or url or f"content:{digest.hexdigest()}")[:MAX_ID],
        url=url or None,
        title=_line(title),
        updated=parse_date(updated),
        published=parse_date(published),
        summary=(summary or content)[:MAX_TEXT],
        author=_line(author),
        tags=tuple(t.strip()[:MAX_NAME] for t in tags if t and t.strip())[:50],
        enclosures=tuple(enclosures[:20]),
        hash=digest.hexdigest(),
    )


def _line(text: str) -> str:
    """Return the text on one line. Only its beginning is split, because words take memory."""
    return " ".join(text[: 4 * MAX_NAME].split())[:MAX_NAME]
