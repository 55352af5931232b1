"""Reads of events for decisions of the engine, in SQL."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.ledgers.sql.ledger import STORED, LedgerTable
from penstock.ports import Baseline, EventState, PageMeta, StoredEvent
from penstock.rules.freshness import Claim

decode_meta = msgspec.msgpack.Decoder(PageMeta).decode


class SqlEventLookup(LedgerTable):
    """Reads of events for decisions, inside one transaction."""

    def known(self, event_ids: Sequence[str]) -> set[str]:
        """Return those ids that were accepted before."""
        return {
            id_
            for (id_,) in self._tx.executemany(
                "SELECT id FROM event WHERE id=?", [(id_,) for id_ in event_ids]
            ).fetchall()
        }

    def states(self, event_ids: Sequence[str]) -> dict[str, EventState]:
        """Return the states of those events that are known."""
        found: dict[str, EventState] = {}
        for (
            id_,
            n,
            status,
            attempts,
            starts,
            crashes,
            accepted_at,
            not_before,
            fence,
        ) in self._ledger.state_rows(self._tx, event_ids):
            page, meta = (
                starts
                and self._tx.execute("SELECT page, meta FROM fetched WHERE event=?", (n,)).get
            ) or (None, None)
            found[id_] = EventState(
                n, status, attempts, starts, crashes, page, meta, accepted_at, not_before, fence
            )
        return found

    def claim_progress(self, event_id: str, next_: str | None) -> Claim | None:
        """Return the progress of a claim's owner, or None if the claim is free.

        The claim is free if the owner is dead, is a duplicate, was deleted by retention, or has not
        started a request.
        """
        row = self._tx.execute(
            "SELECT n, status, asked_at, extractors FROM event WHERE id=?", (event_id,)
        ).get
        if row is None or row[1] in ("dead", "duplicate") or row[2] is None:
            return None
        n, status, asked_at, extractors = row
        waits = (
            status in ("pending", "delayed")
            and self._tx.execute("SELECT 1 FROM fetched WHERE event=?", (n,)).get is None
        )
        ended = status == "success"
        return Claim(
            event_id,
            0.0 if waits else asked_at,
            ended,
            next_,
            (ended and extractors) or "",
        )

    def baseline(self, event_id: str) -> Baseline | None:
        """Return the result of a success, for conditional requests and change detection.

        Return None if the event is not a success or has no page.
        """
        row = self._tx.execute(
            "SELECT f.page, f.meta, e.extractors FROM event e JOIN fetched f ON f.event=e.n"
            " WHERE e.id=? AND e.status='success'",
            (event_id,),
        ).get
        if row is None:
            return None
        headers = decode_meta(row[1]).headers
        return Baseline(
            etag=headers.get("etag"),
            last_modified=headers.get("last-modified"),
            response_hash=row[0],
            page=row[0],
            extractors=row[2] or "",
            headers=headers,
        )

    def is_fresh(self, owner: str, since: float) -> bool:
        """Return True if the claim's owner is open, or succeeded with a request since then."""
        row = self._tx.execute("SELECT status, asked_at FROM event WHERE id=?", (owner,)).get
        return row is not None and (
            row[0] in ("pending", "delayed", "in_flight", "writing")
            or (row[0] == "success" and (row[1] or 0.0) >= since)
        )

    def with_open(self, keys: Sequence[bytes]) -> set[bytes]:
        """Return the URLs of which one of the 8 newest events is pending or delayed."""
        newest = "SELECT url_key, status FROM event WHERE url_key=? ORDER BY n DESC LIMIT 8"
        found = self._tx.executemany(
            f"SELECT url_key FROM ({newest}) AS newest"
            " WHERE status IN ('pending','delayed') LIMIT 1",
            [(key,) for key in keys],
        ).fetchall()
        return {bytes(key) for (key,) in found}

    def failures(self, n: int) -> dict[str, int]:
        """Return recorded failures by error class, since the event was last dead.

        A redrive gives a dead event a new budget.
        """
        since = self._tx.execute(
            "SELECT coalesce(max(at), 0) FROM history WHERE event=? AND status='dead'", (n,)
        ).get
        return dict(
            self._tx.execute(
                "SELECT class, count(*) FROM history WHERE event=? AND at>?"
                " AND status='delayed' AND class<>'' GROUP BY class",
                (n, since),
            )
        )

    def progress(self, n: int) -> bytes:
        """Return the progress of an event's delayed redirect chain, or b""."""
        return self._tx.execute("SELECT chain FROM redirect WHERE event=?", (n,)).get or b""

    def oldest_duplicate(self, owner: str) -> StoredEvent | None:
        if self._tx.execute("SELECT promoted FROM event WHERE id=?", (owner,)).get:
            return None
        return self._duplicate(owner, "e.n")

    def newest_duplicate(self, owner: str) -> StoredEvent | None:
        return self._duplicate(owner, "e.n DESC")

    def _duplicate(self, owner: str, order: str) -> StoredEvent | None:
        row = self._tx.execute(
            f"{STORED} WHERE e.duplicate_of=? AND e.status='duplicate' ORDER BY {order} LIMIT 1",
            (owner,),
        ).get
        return None if row is None else StoredEvent(*row)

    def in_trace(self, trace: str, key: bytes) -> bool:
        return (
            self._tx.execute("SELECT 1 FROM seen WHERE trace=? AND url_key=?", (trace, key)).get
            is not None
        )

    def add_to_trace(self, trace: str, key: bytes, now: float) -> bool:
        self._tx.execute(
            "INSERT INTO seen VALUES(?,?,?) ON CONFLICT(trace, url_key) DO NOTHING",
            (trace, key, now),
        )
        return self._tx.changes() == 1
