"""The ledger in SQL: one row per request event, its transitions, its dead letter, and counters.
Questions are in sql_queries, sinks in sql_outbox.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any, Literal

import msgspec

from penstock.model import Event
from penstock.ports import Baseline, Clock, End, PageMeta, Status
from penstock.rules.freshness import Claim
from penstock.rules.identity import DEFAULT_TRACKING, url_key
from penstock.stores.sql import Rows, SqlStore, Tx

SCHEMA = """
CREATE TABLE event(n INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, topic TEXT NOT NULL, position INTEGER, source TEXT NOT NULL,
  trace TEXT NOT NULL, url TEXT NOT NULL, url_key BLOB NOT NULL,
  host TEXT NOT NULL, status TEXT NOT NULL, attempts INTEGER NOT NULL DEFAULT 0, starts INTEGER NOT NULL DEFAULT 0,
  crashes INTEGER NOT NULL DEFAULT 0, fence INTEGER NOT NULL DEFAULT 0,
  accepted_at REAL NOT NULL, dispatched_at REAL, asked_at REAL, finished_at REAL, not_before REAL, response_status INTEGER, response_hash TEXT,
  reason TEXT, worker TEXT, extractors TEXT,
  duplicate_of TEXT, promoted INTEGER NOT NULL DEFAULT 0);
-- Wide and written once: kept apart, so that a change of status rewrites a short row.
CREATE TABLE envelope(event INTEGER PRIMARY KEY, body BLOB NOT NULL);
CREATE TABLE fetched(event INTEGER PRIMARY KEY, page TEXT NOT NULL, meta BLOB NOT NULL);
-- Pages of events that are put off or dead: retention leaves them alone.
CREATE TABLE needed(event INTEGER PRIMARY KEY, page TEXT NOT NULL);
CREATE INDEX event_url ON event(url_key, n);
CREATE INDEX event_trace ON event(trace);
CREATE INDEX event_delayed ON event(not_before) WHERE status='delayed';
CREATE INDEX event_duplicate ON event(duplicate_of, n) WHERE duplicate_of IS NOT NULL;
CREATE TABLE counter(topic TEXT NOT NULL, name TEXT NOT NULL, n INTEGER NOT NULL, PRIMARY KEY(topic, name)) WITHOUT ROWID;
CREATE TABLE dead(n INTEGER PRIMARY KEY AUTOINCREMENT, event TEXT NOT NULL UNIQUE, topic TEXT NOT NULL, url TEXT NOT NULL, host TEXT NOT NULL,
  at REAL NOT NULL, stage TEXT NOT NULL, class TEXT NOT NULL,
  reason TEXT NOT NULL, fingerprint TEXT NOT NULL, detail TEXT NOT NULL, envelope BLOB NOT NULL, headers TEXT NOT NULL);
CREATE INDEX dead_fingerprint ON dead(fingerprint);
CREATE TABLE tally(topic TEXT NOT NULL, bucket INTEGER NOT NULL, ended INTEGER NOT NULL, dead INTEGER NOT NULL, PRIMARY KEY(topic, bucket)) WITHOUT ROWID;
CREATE TABLE seen(trace TEXT NOT NULL, url_key BLOB NOT NULL, at REAL NOT NULL, PRIMARY KEY(trace, url_key)) WITHOUT ROWID;
CREATE TABLE cursor(source TEXT PRIMARY KEY, body BLOB, at REAL NOT NULL) WITHOUT ROWID;
"""
# Append-only; the time in microseconds keeps a row's place, so one b-tree serves both writing and
# reading it.
HISTORY = """
CREATE TABLE history(event INTEGER NOT NULL, at INTEGER NOT NULL, status TEXT NOT NULL, worker TEXT, stage TEXT, class TEXT, reason TEXT,
  PRIMARY KEY(event, at, status)) WITHOUT ROWID;
"""
TALLY_SECONDS = 5
_COUNT = "INSERT INTO counter VALUES(?,?,?) ON CONFLICT(topic, name) DO UPDATE SET n=counter.n+excluded.n"
_NOTE = (
    "INSERT INTO history(event, at, status, worker, stage, class, reason) VALUES(?,?,?,?,?,?,?) ON CONFLICT(event, at, status)"
    " DO UPDATE SET worker=excluded.worker, stage=excluded.stage, class=excluded.class, reason=excluded.reason"
)
_FETCHED = "INSERT INTO fetched VALUES(?,?,?) ON CONFLICT(event) DO UPDATE SET page=excluded.page, meta=excluded.meta"
# `crashes` counts this start as lost until it ends; a recorded end takes it back.
_BEGIN = "UPDATE event SET status=?, starts=starts+1, crashes=crashes+1, fence=?, worker=?, dispatched_at=?, asked_at=coalesce(?, asked_at) WHERE n=?"
_FENCE = "SELECT fence FROM event WHERE n=? AND status IN ('in_flight','writing')"
# a recorded end takes back what its start counted as lost
_ENDED = "crashes=CASE WHEN crashes>0 THEN crashes-1 ELSE 0 END"
STANDING = (
    "e.id, e.n, e.status, e.attempts, e.starts, e.crashes, e.accepted_at, e.not_before, e.fence"
)
OPEN = frozenset({"pending", "delayed", "in_flight", "writing"})
_encode = msgspec.msgpack.Encoder().encode
decode_meta = msgspec.msgpack.Decoder(PageMeta).decode


class Standing(msgspec.Struct, frozen=True):
    """What the books know of an event that was just delivered."""

    n: int
    status: str
    attempts: int
    starts: int
    crashes: int
    page: str | None
    page_meta: bytes | None
    accepted_at: float
    not_before: float | None
    fence: int


class SqlLedger:
    """Transitions, each inside a caller's transaction. Which follows which is decided in books.py."""

    schema = SCHEMA + HISTORY

    def __init__(
        self, db: SqlStore, clock: Clock, tracking: tuple[str, ...] = DEFAULT_TRACKING
    ) -> None:
        self.db, self.clock = db, clock
        # The key of a canonical URL, the same in every row and claim. Asked at every step of an
        # event.
        self.url_key = lru_cache(1 << 13)(partial(url_key, tracking=tracking, canonical=True))
        self._pruned = 0
        self._fences: dict[int, Rows] = {}
        db.part("ledger", 1, self.schema)

    # -- entering ----------------------------------------------------------------------------------

    def knows_in(self, tx: Tx, event_id: str) -> bool:
        return bool(self.known_in(tx, [event_id]))

    def known_in(self, tx: Tx, event_ids: Sequence[str]) -> set[str]:
        """Which of these were accepted before."""
        return {
            id_
            for (id_,) in tx.executemany(
                "SELECT id FROM event WHERE id=?", [(id_,) for id_ in event_ids]
            ).fetchall()
        }

    def enter_in(
        self,
        tx: Tx,
        rows: Sequence[tuple[Event, bytes, int]],
        now: float,
        *,
        status: Status = Status.PENDING,
        not_before: float | None = None,
    ) -> None:
        """(event, envelope, position) of events that are new."""
        at = int(now * 1e6)
        numbers = tx.executemany(
            "INSERT INTO event(id, topic, position, source, trace, url, url_key, host, status, accepted_at, not_before) VALUES(?,?,?,?,?,?,?,?,?,?,?)"
            " RETURNING n",
            [
                (
                    e.id,
                    e.topic,
                    position,
                    e.source,
                    e.trace,
                    e.url,
                    self.url_key(e.url),
                    e.key,
                    status,
                    e.accepted_at,
                    not_before,
                )
                for e, _, position in rows
            ],
        ).fetchall()
        tx.executemany(
            "INSERT INTO envelope VALUES(?,?)",
            [(n, envelope) for (n,), (_, envelope, _) in zip(numbers, rows, strict=True)],
        )
        tx.executemany(
            "INSERT INTO history(event, at, status) VALUES(?,?,?)",
            [(n, at, status) for (n,) in numbers],
        )
        for topic, n in Counter(e.topic for e, _, _ in rows).items():
            self.count_in(tx, topic, {status: n})

    def pending_in(self, tx: Tx, topic: str) -> int:
        """Accepted and not yet ended; O(1)."""
        return (
            tx.execute(
                "SELECT coalesce(sum(n), 0) FROM counter WHERE topic=? AND name IN ('pending','delayed','in_flight','writing')",
                (topic,),
            ).get
            or 0
        )

    def has_open_in(self, tx: Tx, key: bytes) -> bool:
        """Is an event for this URL still to be fetched?"""
        newest = "SELECT status FROM event WHERE url_key=? ORDER BY n DESC LIMIT 8"
        return (
            tx.execute(
                f"SELECT 1 FROM ({newest}) AS newest WHERE status IN ('pending','delayed') LIMIT 1",
                (key,),
            ).get
            is not None
        )

    def owner_in(self, tx: Tx, event_id: str, next_: str | None) -> Claim | None:
        """How far the owner of a claim has come; None where it died or is forgotten, and the claim
        is free.
        """
        row = tx.execute("SELECT n, status, asked_at FROM event WHERE id=?", (event_id,)).get
        if row is None or row[1] in ("dead", "duplicate") or row[2] is None:
            return None
        n, status, asked_at = row
        waits = (
            status in ("pending", "delayed")
            and tx.execute("SELECT 1 FROM fetched WHERE event=?", (n,)).get is None
        )
        return Claim(event_id, 0.0 if waits else asked_at, status == "success", next_)

    def baseline_in(self, tx: Tx, event_id: str) -> Baseline | None:
        """What a success left behind: for conditional requests and change detection."""
        row = tx.execute(
            "SELECT f.page, f.meta, e.extractors FROM event e JOIN fetched f ON f.event=e.n WHERE e.id=? AND e.status='success'",
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
        )

    def is_fresh_in(self, tx: Tx, owner: str, since: float) -> bool:
        """Is the claim's owner still at it, or did it ask since then?"""
        row = tx.execute("SELECT status, asked_at FROM event WHERE id=?", (owner,)).get
        return row is not None and (
            row[0] in ("pending", "delayed", "in_flight", "writing")
            or (row[0] == "success" and (row[1] or 0.0) >= since)
        )

    def first_in_trace_in(self, tx: Tx, trace: str, key: bytes, now: float) -> bool:
        tx.execute(
            "INSERT INTO seen VALUES(?,?,?) ON CONFLICT(trace, url_key) DO NOTHING",
            (trace, key, now),
        )
        return tx.changes() == 1

    # -- on the way --------------------------------------------------------------------------------

    def standing_in(self, tx: Tx, event_id: str) -> Standing | None:
        return self.standings_in(tx, [event_id]).get(event_id)

    def standings_in(self, tx: Tx, event_ids: Sequence[str]) -> dict[str, Standing]:
        """Of those that are known."""
        found: dict[str, Standing] = {}
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
        ) in self._standing_rows(tx, event_ids):
            page, meta = (
                starts and tx.execute("SELECT page, meta FROM fetched WHERE event=?", (n,)).get
            ) or (None, None)
            found[id_] = Standing(
                n, status, attempts, starts, crashes, page, meta, accepted_at, not_before, fence
            )
        return found

    def _standing_rows(self, tx: Tx, event_ids: Sequence[str]) -> list[Any]:
        rows: list[Any] = tx.executemany(
            f"SELECT {STANDING} FROM event e WHERE e.id=?", [(id_,) for id_ in event_ids]
        ).fetchall()
        return rows

    def found_at_in(self, tx: Tx, n: int, position: int) -> None:
        """Where a broker apart keeps its message: known when it is handed out, not when it is
        published.
        """
        tx.execute("UPDATE event SET position=? WHERE n=?", (position, n))

    def failures_in(self, tx: Tx, n: int) -> dict[str, int]:
        """Failures put on record by class, since the event was last given a new budget."""
        since = tx.execute(
            "SELECT coalesce(max(at), 0) FROM history WHERE event=? AND status='dead'", (n,)
        ).get
        return dict(
            tx.execute(
                "SELECT class, count(*) FROM history WHERE event=? AND at>? AND status='delayed' AND class<>'' GROUP BY class",
                (n, since),
            )
        )

    def duplicate_in(self, tx: Tx, event: Event, was: Standing, of: str, now: float) -> None:
        reason = f"duplicate of {of}"
        tx.execute(
            "UPDATE event SET status='duplicate', duplicate_of=?, finished_at=?, reason=? WHERE n=?",
            (of, now, reason, was.n),
        )
        self._note(tx, was.n, now, "duplicate", reason=reason)
        self.count_in(tx, event.topic, {was.status: -1, "duplicate": 1})

    def delay_in(
        self, tx: Tx, event: Event, was: Standing, until: float, reason: str, now: float
    ) -> None:
        tx.execute(
            "UPDATE event SET status='delayed', not_before=?, reason=? WHERE n=?",
            (until, reason, was.n),
        )
        self._note(tx, was.n, now, "delayed", reason=reason)
        if was.status != "delayed":  # put off once more: it was counted when it was put off first
            self.count_in(tx, event.topic, {was.status: -1, "delayed": 1})

    def begin_in(
        self,
        tx: Tx,
        events: Sequence[tuple[int, Event, int | None]],
        worker: str,
        now: float,
        *,
        asks: Sequence[bool],
        status: str = "in_flight",
    ) -> list[int | None]:
        """Counts the start, before the work, of (number, event, its fence if it was pending a
        moment ago). The fence of each, or None where it has ended meanwhile.
        """
        asked = [now if asking else None for asking in asks]
        pending = [i for i, (_, _, fence) in enumerate(events) if fence is not None]
        rows = [
            (status, fence + 1, worker, now, asked[i], n, fence)
            for i, (n, _, fence) in enumerate(events)
            if fence is not None
        ]
        fences: list[int | None] = [None] * len(events)
        delta: Counter[tuple[str, str]] = Counter()
        for i, row, ours in zip(
            pending, rows, tx.each(f"{_BEGIN} AND fence=? AND status='pending'", rows), strict=True
        ):
            if ours:
                fences[i] = row[1]
                delta[events[i][1].topic, "pending"] -= 1
        others = [i for i, fence in enumerate(fences) if fence is None]
        seen = (
            tx.executemany(
                "SELECT n, status, fence FROM event WHERE n=?", [(events[i][0],) for i in others]
            ).fetchall()
            if others
            else []
        )
        standing = {n: (was, fence) for n, was, fence in seen}
        for i in others:
            n, e, _ = events[i]
            was, fence = standing.get(n, ("", 0))
            if was in OPEN:
                standing[n] = status, fence + 1  # it may be here twice
                fences[i] = fence + 1
                delta[e.topic, was] -= 1
        tx.executemany(
            _BEGIN,
            [
                (status, fences[i], worker, now, asked[i], events[i][0])
                for i in others
                if fences[i] is not None
            ],
        )
        self._note_all(
            tx,
            [n for (n, _, _), fence in zip(events, fences, strict=True) if fence is not None],
            now,
            status,
            worker,
            None,
            None,
        )
        for (topic, _), n in list(delta.items()):
            delta[topic, status] -= n
        self._count_all(tx, delta)
        return fences

    def writing_in(self, tx: Tx, end: End, now: float) -> bool:
        """The records are on their way to a sink in another process: from now on only the write is
        repeated.
        """
        tx.execute(
            f"UPDATE event SET status='writing', finished_at=NULL, reason=?, response_status=?, response_hash=?, extractors=?, {_ENDED}"
            " WHERE n=? AND fence=? AND status IN ('in_flight','writing')",
            (
                end.reason,
                end.response_status,
                end.response_hash,
                end.extractors,
                end.row,
                end.fence,
            ),
        )
        n = self._touched(tx, end)
        if n is None:
            return False
        self._keep_meta(tx, n, end)
        self._note(tx, n, now, "writing", end=end)
        tx.execute(
            "UPDATE event SET worker=NULL WHERE n=?", (n,)
        )  # nobody is at it until the sink begins
        return True

    # -- ending ------------------------------------------------------------------------------------

    def succeed_in(self, tx: Tx, ends: Sequence[End], now: float) -> list[End]:
        """Those whose fence is not old; of the others nothing was touched."""
        touched = tx.each(
            f"UPDATE event SET status='success', finished_at=?, reason=?, response_status=?, response_hash=?, extractors=?, {_ENDED}"
            " WHERE n=? AND fence=? AND status IN ('in_flight','writing')",
            [
                (
                    now,
                    end.reason,
                    end.response_status,
                    end.response_hash,
                    end.extractors,
                    end.row,
                    end.fence,
                )
                for end in ends
            ],
        )
        done = [end for end, ours in zip(ends, touched, strict=True) if ours]
        tx.executemany(
            _FETCHED,
            [(end.row, end.meta.page, _encode(end.meta)) for end in done if end.meta is not None],
        )
        tx.executemany(
            "DELETE FROM needed WHERE event=?", [(end.row,) for end in done if end.restarted]
        )
        alike: dict[tuple[str, str], list[int]] = {}
        for end in done:
            alike.setdefault((end.stage, end.reason), []).append(end.row)
        for (stage, reason), events in alike.items():
            self._note_all(tx, events, now, "success", None, stage, reason or None)
        return done

    def look_ahead_in(self, tx: Tx, ends: Iterable[End]) -> None:
        """These are concluded in a moment, without success; then it is known already whose fence is
        old.
        """
        self._fences = (
            {end.row: tx.execute(_FENCE, (end.row,)) for end in ends} if self.db.pipelined else {}
        )

    def _touched(self, tx: Tx, end: End) -> int | None:
        """The event's number, or None: the fence is old, and the statement before this touched
        nothing.
        """
        seen = self._fences.pop(end.row, None)
        if seen is None:
            return end.row if tx.changes() == 1 else None
        return end.row if seen.get == end.fence else None

    def _keep_meta(self, tx: Tx, n: int, end: End) -> None:
        """From now on the ledger knows the page, and no redelivery fetches it again."""
        if end.meta is not None:
            tx.execute(_FETCHED, (n, end.meta.page, _encode(end.meta)))
            tx.execute(
                "INSERT INTO needed VALUES(?,?) ON CONFLICT(event) DO UPDATE SET page=excluded.page",
                (n, end.meta.page),
            )

    def put_off_in(
        self, tx: Tx, end: End, now: float, *, status: Literal["delayed", "pending"]
    ) -> int | None:
        """Retry (charged or not), park and release: the event goes on later."""
        tx.execute(
            f"UPDATE event SET status=?, not_before=?, reason=?, attempts=attempts+?, {_ENDED}, response_status=coalesce(?, response_status)"
            " WHERE n=? AND fence=? AND status IN ('in_flight','writing')",
            (
                status,
                end.until,
                end.reason,
                int(end.outcome == "retry" and end.charged),
                end.response_status,
                end.row,
                end.fence,
            ),
        )
        n = self._touched(tx, end)
        if n is not None:
            self._keep_meta(tx, n, end)
            self._note(tx, n, now, status, end=end)
        return n

    def bury_in(self, tx: Tx, end: End, now: float, *, envelope: bytes, headers: str) -> int | None:
        tx.execute(
            f"UPDATE event SET status='dead', finished_at=?, reason=?, attempts=attempts+1, {_ENDED},"
            " response_status=coalesce(?, response_status) WHERE n=? AND fence=? AND status IN ('in_flight','writing')",
            (now, end.reason, end.response_status, end.row, end.fence),
        )
        n = self._touched(tx, end)
        if n is not None:
            self._keep_meta(tx, n, end)
            self._note(tx, n, now, "dead", end=end)
            self.letter_in(
                tx,
                event_id=end.event.id,
                topic=end.event.topic,
                url=end.event.url,
                host=end.event.key,
                now=now,
                stage=end.stage,
                kind=end.error_class,
                reason=end.reason,
                fingerprint=end.fingerprint,
                detail=end.detail,
                envelope=envelope,
                headers=headers,
            )
        return n

    def letter_in(
        self,
        tx: Tx,
        *,
        event_id: str,
        topic: str,
        url: str,
        host: str,
        now: float,
        stage: str,
        kind: str,
        reason: str,
        fingerprint: str,
        detail: str,
        envelope: bytes,
        headers: str,
    ) -> None:
        tx.execute(
            "DELETE FROM dead WHERE event=?", (event_id,)
        )  # a new letter has a new number: it is the newest
        tx.execute(
            "INSERT INTO dead(event, topic, url, host, at, stage, class, reason, fingerprint, detail, envelope, headers) VALUES(?,?,?,?,?,?,?,?,?,?,?,?)",
            (
                event_id,
                topic,
                url,
                host,
                now,
                stage,
                kind,
                reason,
                fingerprint,
                detail,
                envelope,
                headers,
            ),
        )

    def topics_in(self, tx: Tx) -> list[str]:
        """Those that events were counted on."""
        return [topic for (topic,) in tx.execute("SELECT DISTINCT topic FROM counter")]

    def total_in(self, tx: Tx, *names: str) -> int:
        """The sum of these counters over all topics."""
        return (
            tx.execute(
                f"SELECT coalesce(sum(n), 0) FROM counter WHERE name IN ({','.join('?' * len(names))})",
                names,
            ).get
            or 0
        )

    def redrivable_in(self, tx: Tx, event_id: str) -> tuple[int, bytes] | None:
        """(n, envelope) of a dead event whose letter is there."""
        found: tuple[int, bytes] | None = tx.execute(
            "SELECT e.n, d.envelope FROM dead d JOIN event e ON e.id=d.event WHERE d.event=? AND e.status='dead'",
            (event_id,),
        ).get
        return found

    def drop_letter_in(self, tx: Tx, event_id: str, *, page: bool = False) -> int:
        """1 if there was one. `page`: its page need not be kept for it any longer."""
        tx.execute("DELETE FROM dead WHERE event=?", (event_id,))
        gone = tx.changes()
        if page:
            tx.execute(
                "DELETE FROM needed WHERE event=(SELECT n FROM event WHERE id=?)", (event_id,)
            )
        return gone

    def needed_in(self, tx: Tx, pages: Iterable[str]) -> set[str]:
        """Of these, the pages that retention leaves alone."""
        return {page for (page,) in tx.execute("SELECT DISTINCT page FROM needed")}.intersection(
            pages
        )

    def has_due_in(self, tx: Tx, now: float) -> bool:
        """Has a delay ended that the books still have as one?"""
        return (
            tx.execute(
                "SELECT 1 FROM event WHERE status='delayed' AND not_before<=? LIMIT 1", (now,)
            ).get
            is not None
        )

    def has_letter_in(self, tx: Tx, event_id: str) -> bool:
        return tx.execute("SELECT 1 FROM dead WHERE event=?", (event_id,)).get is not None

    def waiting_in(
        self, tx: Tx, topic: str, limit: int
    ) -> list[tuple[int, str, str, str, str, str, bytes]]:
        """(n, id, topic, status, URL, host, envelope) of open events whose next message is on this
        topic. Looks at all events: for a purge.
        """
        known = "EXISTS(SELECT 1 FROM fetched f WHERE f.event=e.n)"
        which = {
            "requests": f"e.status IN ('pending','delayed') AND NOT {known}",
            "pages": f"e.status IN ('pending','delayed') AND {known}",
            "records": "e.status='writing' AND e.worker IS NULL",
        }[topic]
        query = f"SELECT e.n, e.id, e.topic, e.status, e.url, e.host, v.body FROM event e JOIN envelope v ON v.event=e.n WHERE {which} ORDER BY e.n LIMIT ?"
        return tx.execute(query, (limit,)).fetchall()

    def waiting_one_in(
        self, tx: Tx, event_id: str
    ) -> tuple[int, str, str, str, str, str, bytes] | None:
        """As `waiting_in`, of one event, if it is open and nobody is at it."""
        found: tuple[int, str, str, str, str, str, bytes] | None = tx.execute(
            "SELECT e.n, e.id, e.topic, e.status, e.url, e.host, v.body FROM event e JOIN envelope v ON v.event=e.n"
            " WHERE e.id=? AND (e.status IN ('pending','delayed') OR (e.status='writing' AND e.worker IS NULL))",
            (event_id,),
        ).get
        return found

    def give_up_in(
        self,
        tx: Tx,
        row: tuple[int, str, str, str, str, str, bytes],
        reason: str,
        fingerprint: str,
        now: float,
    ) -> None:
        """By hand: the event ends dead without having failed, and its letter can be redriven."""
        n, id_, topic, was, url, host, envelope = row
        tx.execute(
            "UPDATE event SET status='dead', finished_at=?, reason=? WHERE n=?", (now, reason, n)
        )
        self._note(tx, n, now, "dead", reason=reason)
        self.letter_in(
            tx, event_id=id_, topic=topic, url=url, host=host, now=now, stage="intake", kind="permanent", reason=reason, fingerprint=fingerprint, detail="",
            envelope=envelope, headers="{}",
        )  # fmt: skip
        self.count_in(tx, topic, {was: -1, "dead": 1})

    def eldest_duplicate_in(self, tx: Tx, owner: str) -> tuple[int, str, bytes] | None:
        """(n, id, envelope) of the one to promote when `owner` died; None if the owner was itself
        promoted.
        """
        if tx.execute("SELECT promoted FROM event WHERE id=?", (owner,)).get:
            return None
        row: tuple[int, str, bytes] | None = tx.execute(
            "SELECT e.n, e.id, v.body FROM event e JOIN envelope v ON v.event=e.n WHERE e.duplicate_of=? AND e.status='duplicate' ORDER BY e.n LIMIT 1",
            (owner,),
        ).get
        return row

    def reopen_in(
        self,
        tx: Tx,
        n: int,
        topic: str,
        was: str,
        reason: str,
        now: float,
        *,
        promoted: bool = False,
        envelope: bytes | None = None,
        position: int | None = None,
    ) -> None:
        """Promotion of a duplicate, and redrive of a dead letter: a new budget, the old history."""
        tx.execute(
            "UPDATE event SET status='pending', duplicate_of=NULL, finished_at=NULL, not_before=NULL, attempts=0, crashes=0,"
            " promoted=CASE WHEN promoted>? THEN promoted ELSE ? END, reason=?, position=coalesce(?, position) WHERE n=?",
            (int(promoted), int(promoted), reason, position, n),
        )
        if envelope is not None:
            tx.execute("UPDATE envelope SET body=? WHERE event=?", (envelope, n))
        for table in ("fetched", "needed"):  # a new chance asks again
            tx.execute(f"DELETE FROM {table} WHERE event=?", (n,))
        self._note(tx, n, now, "pending", reason=reason)
        self.count_in(tx, topic, {was: -1, "pending": 1})

    def lost_in(self, tx: Tx, ids: Sequence[str], worker: str, now: float) -> int:
        """A worker is gone: what it had in flight waits again, its start still counted."""
        delta: Counter[tuple[str, str]] = Counter()
        for id_ in ids:
            row = tx.execute(
                "UPDATE event SET status='pending', fence=fence+1 WHERE id=? AND worker=? AND status='in_flight' RETURNING n, topic",
                (id_, worker),
            ).get
            if row is not None:
                n, topic = row
                self._note(tx, n, now, "pending", reason="worker gone", worker=worker)
                delta[topic, "in_flight"] -= 1
                delta[topic, "pending"] += 1
        self._count_all(tx, delta)
        return -sum(d for (_, status), d in delta.items() if status == "in_flight")

    def open_in(self, tx: Tx, before: float, limit: int) -> list[tuple[int, str, bytes]]:
        """(number, id, envelope) of events that wait for nothing and that nobody has touched since
        then. Looks at all events: for when messages were lost.
        """
        return tx.execute(
            "SELECT e.n, e.id, v.body FROM event e JOIN envelope v ON v.event=e.n WHERE e.status IN ('pending','in_flight','writing')"
            " AND (SELECT max(h.at) FROM history h WHERE h.event=e.n)<? ORDER BY e.n LIMIT ?",
            (int(before * 1e6), limit),
        ).fetchall()

    def note_in(self, tx: Tx, n: int, status: str, reason: str, now: float) -> None:
        """A line of history, without a change of status."""
        self._note(tx, n, now, status, reason=reason)

    def due_in(self, tx: Tx, now: float) -> None:
        """Delays that have ended are pending again (the broker hands them out by itself)."""
        rows = tx.execute(
            "SELECT n, topic FROM event WHERE status='delayed' AND not_before<=? LIMIT 1000", (now,)
        ).fetchall()
        delta: Counter[tuple[str, str]] = Counter()
        for n, topic in rows:
            tx.execute("UPDATE event SET status='pending' WHERE n=?", (n,))
            self._note(tx, n, now, "pending", reason="its time has come")
            delta[topic, "delayed"] -= 1
            delta[topic, "pending"] += 1
        self._count_all(tx, delta)

    def parked_in(self, tx: Tx, host: str, reasons: Sequence[str]) -> list[tuple[int, int]]:
        """(number, position) of delayed events of a host that wait for one of these reasons. Looks
        at all that is delayed: for people.
        """
        wanted = ",".join("?" * len(reasons))
        return tx.execute(
            f"SELECT n, position FROM event WHERE status='delayed' AND host=? AND reason IN ({wanted})",
            (host, *reasons),
        ).fetchall()

    def hasten_in(self, tx: Tx, events: Sequence[int], now: float) -> None:
        """Their delay ends now."""
        tx.executemany(
            "UPDATE event SET not_before=? WHERE n=? AND status='delayed'",
            [(now, n) for n in events],
        )

    # -- counting ----------------------------------------------------------------------------------

    def count_in(self, tx: Tx, topic: str, deltas: dict[Any, int]) -> None:
        tx.executemany(_COUNT, [(topic, str(name), d) for name, d in deltas.items() if d])

    def _count_all(self, tx: Tx, delta: Counter[tuple[str, str]]) -> None:
        tx.executemany(_COUNT, [(*k, d) for k, d in delta.items() if d])

    def tally_in(self, tx: Tx, topic: str, ended: int, dead: int, now: float) -> None:
        tx.execute(
            "INSERT INTO tally VALUES(?,?,?,?) ON CONFLICT(topic, bucket) DO UPDATE SET ended=tally.ended+excluded.ended, dead=tally.dead+excluded.dead",
            (topic, int(now / TALLY_SECONDS), ended, dead),
        )

    def recent_in(self, tx: Tx, topic: str, seconds: float, now: float) -> tuple[int, int]:
        """(ended, dead) in the last seconds."""
        row = tx.execute(
            "SELECT coalesce(sum(ended),0), coalesce(sum(dead),0) FROM tally WHERE topic=? AND bucket>?",
            (topic, int((now - seconds) / TALLY_SECONDS)),
        ).get
        return int(row[0]), int(row[1])

    def _note(
        self,
        tx: Tx,
        n: int,
        now: float,
        status: str,
        *,
        reason: str | None = None,
        worker: str | None = None,
        end: End | None = None,
    ) -> None:
        if end is not None:
            row: Iterable[Any] = (
                n,
                int(now * 1e6),
                status,
                worker,
                end.stage,
                end.error_class or None,
                end.reason,
            )
        else:
            row = (n, int(now * 1e6), status, worker, None, None, reason)
        tx.execute(_NOTE, tuple(row))

    def _note_all(
        self,
        tx: Tx,
        events: Sequence[int],
        now: float,
        status: str,
        worker: str | None,
        stage: str | None,
        reason: str | None,
    ) -> None:
        """The same of many."""
        at = int(now * 1e6)
        tx.executemany(_NOTE, [(n, at, status, worker, stage, None, reason) for n in events])

    # -- cursors -----------------------------------------------------------------------------------

    def cursor_in(self, tx: Tx, source: str) -> bytes | None:
        body: bytes | None = tx.execute("SELECT body FROM cursor WHERE source=?", (source,)).get
        return body

    def move_cursor_in(self, tx: Tx, source: str, body: bytes | None, now: float) -> None:
        tx.execute(
            "INSERT INTO cursor VALUES(?,?,?) ON CONFLICT(source) DO UPDATE SET body=excluded.body, at=excluded.at",
            (source, body, now),
        )

    # -- retention ---------------------------------------------------------------------------------

    def prune_in(
        self, tx: Tx, before: float, keep: Callable[[bytes, str], bool], limit: int = 1000
    ) -> int:
        """Forget ended events (never dead ones) and their history; the counters keep counting them.
        `keep(URL, id)` says which success is still a baseline.
        """
        # A stretch at a time, the next call goes on behind it: what must stay at the head of the
        # table does not stop the rest.
        stretch = tx.execute(
            "SELECT n, status, finished_at, accepted_at, url_key, id FROM event WHERE n>? ORDER BY n LIMIT ?",
            (self._pruned, limit),
        ).fetchall()
        self._pruned = stretch[-1][0] if len(stretch) == limit and stretch[-1][3] < before else 0
        ended = [row for row in stretch if row[1] in ("success", "duplicate") and row[2] < before]
        rows = [
            (n,)
            for n, status, _, _, key, id_ in ended
            if status == "duplicate" or not keep(key, id_)
        ]
        for table in ("envelope", "fetched", "needed"):
            tx.executemany(f"DELETE FROM {table} WHERE event=?", rows)
        self.forget_in(tx, rows, before)
        tx.executemany("DELETE FROM event WHERE n=?", rows)
        tx.execute(
            "DELETE FROM tally WHERE bucket<?", (int((self.clock.now() - 3600) / TALLY_SECONDS),)
        )
        tx.execute(
            "DELETE FROM seen WHERE (trace, url_key) IN (SELECT trace, url_key FROM seen WHERE at<? LIMIT ?)",
            (before, limit),
        )
        return len(rows)

    def forget_in(self, tx: Tx, rows: Sequence[tuple[int]], before: float) -> None:
        """The history of events that are forgotten now."""
        tx.executemany("DELETE FROM history WHERE event=?", rows)

    def entered_in(self, tx: Tx) -> int | None:
        """Events ever entered, counted by the store itself and not by us; None where it cannot
        tell.
        """
        return int(
            tx.execute(
                "SELECT coalesce((SELECT seq FROM sqlite_sequence WHERE name='event'), 0)"
            ).get
        )
