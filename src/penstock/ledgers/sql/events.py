"""Transitions of events in SQL."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from penstock.ledgers.sql.dead_letters import SqlDeadLetters
from penstock.ledgers.sql.ledger import LedgerTable, SqlLedger
from penstock.model import Event, Reason
from penstock.ports import OPEN, DeadLetter, End, EventState, NewEvent, Start
from penstock.rules.reasons import sentence
from penstock.stores.sql import Rows, Tx

_FETCHED = (
    "INSERT INTO fetched VALUES(?,?,?) ON CONFLICT(event) DO UPDATE"
    " SET page=excluded.page, meta=excluded.meta"
)
# `crashes` counts this start as crashed until it ends. A recorded end subtracts it again.
_BEGIN = (
    "UPDATE event SET status=?, starts=starts+1, crashes=crashes+1, fence=?, worker=?,"
    " dispatched_at=?, asked_at=coalesce(?, asked_at) WHERE n=?"
)
_FENCE = "SELECT fence FROM event WHERE n=? AND status IN ('in_flight','writing')"
_ENDED = "crashes=CASE WHEN crashes>0 THEN crashes-1 ELSE 0 END"
# Condition: the fence belongs to the current start, which has not ended.
_CURRENT = "n=? AND fence=? AND status IN ('in_flight','writing')"
_FORGET = "DELETE FROM redirect WHERE event=?"
_encode = msgspec.msgpack.Encoder().encode


class SqlEvents(LedgerTable):
    """Transitions of events. `engine.lifecycle` decides which follows which."""

    def __init__(self, tx: Tx, ledger: SqlLedger) -> None:
        super().__init__(tx, ledger)
        self._fences: dict[int, Rows] = {}  # row -> answer of `prefetch_fences`

    def enter(self, rows: Sequence[NewEvent], now: float) -> None:
        """Insert events as pending. Their ids must be new."""
        numbers = self._tx.executemany(
            "INSERT INTO event(id, topic, position, source, trace, url, url_key, host, status,"
            " accepted_at) VALUES(?,?,?,?,?,?,?,?,'pending',?) RETURNING n",
            [
                (
                    row.event.id,
                    row.event.topic,
                    row.position,
                    row.event.source,
                    row.event.trace,
                    row.event.url,
                    self._ledger.url_key(row.event.url),
                    row.event.key,
                    row.event.accepted_at,
                )
                for row in rows
            ],
        ).fetchall()
        self._tx.executemany(
            "INSERT INTO envelope VALUES(?,?)",
            [(n, row.envelope) for (n,), row in zip(numbers, rows, strict=True)],
        )
        at = int(now * 1e6)
        self._tx.executemany(
            "INSERT INTO history(event, at, status) VALUES(?,?,'pending')",
            [(n, at) for (n,) in numbers],
        )
        for topic, n in Counter(row.event.topic for row in rows).items():
            self._count(topic, {"pending": n})

    def begin(
        self, starts: Sequence[Start], worker: str, now: float, *, writing: bool
    ) -> list[int | None]:
        """Record starts before the work. Return each event's fence, or None if it has ended."""
        status = "writing" if writing else "in_flight"
        asked = [now if start.needs_request else None for start in starts]
        pending = [i for i, start in enumerate(starts) if start.fence is not None]
        rows = [
            (status, start.fence + 1, worker, now, asked[i], start.n, start.fence)
            for i, start in enumerate(starts)
            if start.fence is not None
        ]
        fences: list[int | None] = [None] * len(starts)
        delta: Counter[tuple[str, str]] = Counter()
        current = self._tx.each(f"{_BEGIN} AND fence=? AND status='pending'", rows)
        for i, row, changed in zip(pending, rows, current, strict=True):
            if changed:
                fences[i] = row[1]
                delta[starts[i].event.topic, "pending"] -= 1
        others = [i for i, fence in enumerate(fences) if fence is None]
        found = (
            self._tx.executemany(
                "SELECT n, status, fence FROM event WHERE n=?", [(starts[i].n,) for i in others]
            ).fetchall()
            if others
            else []
        )
        states = {n: (was, fence) for n, was, fence in found}
        for i in others:
            n = starts[i].n
            was, fence = states.get(n, ("", 0))
            if was in OPEN:
                states[n] = status, fence + 1  # the batch may contain the event twice
                fences[i] = fence + 1
                delta[starts[i].event.topic, was] -= 1
        # Only a delayed event waits for something, and it is among these.
        self._tx.executemany(
            _BEGIN.replace(" WHERE", ", waits_for=NULL WHERE"),
            [
                (status, fences[i], worker, now, asked[i], starts[i].n)
                for i in others
                if fences[i] is not None
            ],
        )
        begun = [s.n for s, fence in zip(starts, fences, strict=True) if fence is not None]
        self._ledger.record_all(self._tx, begun, now, status, worker, None, None)
        for (topic, _), n in list(delta.items()):
            delta[topic, status] -= n
        self._count_all(delta)
        return fences

    def succeed(self, ends: Sequence[End], now: float) -> list[End]:
        """End these events as successes. Return those whose fence was current."""
        touched = self._tx.each(
            "UPDATE event SET status='success', finished_at=?, reason=?, response_status=?,"
            f" response_hash=?, extractors=?, result=?, {_ENDED} WHERE {_CURRENT}",
            [
                (
                    now,
                    end.reason,
                    end.response_status,
                    end.response_hash,
                    end.extractors,
                    end.result or None,
                    end.row,
                    end.fence,
                )
                for end in ends
            ],
        )
        done = [end for end, ours in zip(ends, touched, strict=True) if ours]
        self._tx.executemany(
            _FETCHED,
            [(end.row, end.meta.page, _encode(end.meta)) for end in done if end.meta is not None],
        )
        self._tx.executemany(
            "DELETE FROM needed WHERE event=?", [(end.row,) for end in done if end.restarted]
        )
        self._tx.executemany(_FORGET, [(end.row,) for end in done if end.had_progress])
        alike: dict[tuple[str, str], list[int]] = {}
        for end in done:
            alike.setdefault((end.stage, end.reason), []).append(end.row)
        for (stage, reason), events in alike.items():
            self._ledger.record_all(self._tx, events, now, "success", None, stage, reason or None)
        return done

    def postpone(self, end: End, now: float, *, status: Literal["delayed", "pending"]) -> bool:
        """Set an event back. Only a charged retry adds an attempt."""
        self._tx.execute(
            "UPDATE event SET status=?, not_before=?, reason=?, waits_for=?, attempts=attempts+?,"
            f" {_ENDED}, response_status=coalesce(?, response_status) WHERE {_CURRENT}",
            (
                status,
                end.until,
                end.reason,
                (end.waits_for or None) if status == "delayed" else None,
                int(end.outcome == "retry" and end.charged),
                end.response_status,
                end.row,
                end.fence,
            ),
        )
        return self._end(end, now, status)

    def mark_writing(self, end: End, now: float) -> bool:
        """Record that from now on only the sink write repeats."""
        # The status still belongs to a running event. Only a new fence shows that the start ended.
        self._tx.execute(
            "UPDATE event SET status='writing', fence=fence+1, finished_at=NULL, reason=?,"
            f" response_status=?, response_hash=?, extractors=?, {_ENDED} WHERE {_CURRENT}",
            (
                end.reason,
                end.response_status,
                end.response_hash,
                end.extractors,
                end.row,
                end.fence,
            ),
        )
        if not self._end(end, now, "writing"):
            return False
        # No worker has the event until the sink starts.
        self._tx.execute("UPDATE event SET worker=NULL WHERE n=?", (end.row,))
        return True

    def mark_dead(self, end: End, letter: DeadLetter, now: float) -> bool:
        """End an event as dead and store its dead letter."""
        self._tx.execute(
            "UPDATE event SET status='dead', finished_at=?, reason=?, attempts=attempts+1,"
            f" {_ENDED}, response_status=coalesce(?, response_status) WHERE {_CURRENT}",
            (now, end.reason, end.response_status, end.row, end.fence),
        )
        if not self._end(end, now, "dead"):
            return False
        SqlDeadLetters(self._tx).put(letter, now)
        return True

    def mark_duplicate(self, event: Event, was: EventState, of: str, now: float) -> None:
        """End an event as the duplicate of the event `of`. Its own duplicates follow it."""
        reason = sentence(Reason.DUPLICATE, of)
        self._tx.execute(
            "UPDATE event SET status='duplicate', duplicate_of=?, finished_at=?, reason=?,"
            " waits_for=NULL WHERE n=?",
            (of, now, reason, was.n),
        )
        self.reassign_duplicates(event.id, of)
        if was.starts:
            self._tx.execute(_FORGET, (was.n,))
        self._record(was.n, now, "duplicate", reason=reason)
        self._count(event.topic, {was.status: -1, "duplicate": 1})

    def reassign_duplicates(self, owner: str, to: str) -> None:
        """Make the duplicates of one event duplicates of another."""
        self._tx.execute(
            "UPDATE event SET duplicate_of=? WHERE duplicate_of=? AND status='duplicate'",
            (to, owner),
        )

    def delay(
        self,
        event: Event,
        was: EventState,
        until: float,
        reason: str,
        now: float,
        *,
        waits_for: str = "",
    ) -> None:
        """Delay an event that was not started."""
        self._delay(event.topic, was, until, reason, now, waits_for)

    def delay_unread(self, was: EventState, until: float, reason: str, now: float) -> None:
        """Delay an event that was not started and whose envelope only a newer release can read."""
        topic = self._tx.execute("SELECT topic FROM event WHERE n=?", (was.n,)).get
        self._delay(topic, was, until, reason, now)

    def _delay(
        self,
        topic: str,
        was: EventState,
        until: float,
        reason: str,
        now: float,
        waits_for: str = "",
    ) -> None:
        self._tx.execute(
            "UPDATE event SET status='delayed', not_before=?, reason=?, waits_for=? WHERE n=?",
            (until, reason, waits_for or None, was.n),
        )
        self._record(was.n, now, "delayed", reason=reason)
        if was.status != "delayed":  # a second delay was counted at the first
            self._count(topic, {was.status: -1, "delayed": 1})

    def reopen(
        self,
        event: Event,
        n: int,
        *,
        was: str,
        reason: str,
        envelope: bytes,
        position: int,
        now: float,
        promoted: bool,
    ) -> None:
        """Make an ended event pending, with a new budget. Its history is kept."""
        self._tx.execute(
            "UPDATE event SET status='pending', duplicate_of=NULL, finished_at=NULL,"
            " not_before=NULL, waits_for=NULL, result=NULL, attempts=0, crashes=0,"
            " promoted=CASE WHEN promoted>? THEN promoted ELSE ? END, reason=?, position=?"
            " WHERE n=?",
            (int(promoted), int(promoted), reason, position, n),
        )
        self._tx.execute("UPDATE envelope SET body=? WHERE event=?", (envelope, n))
        for table in ("fetched", "needed", "redirect"):  # the event is fetched again
            self._tx.execute(f"DELETE FROM {table} WHERE event=?", (n,))
        self._record(n, now, "pending", reason=reason)
        self._count(event.topic, {was: -1, "pending": 1})

    def set_position(self, n: int, position: int) -> None:
        """Record the position of an event's message at an external broker."""
        self._tx.execute("UPDATE event SET position=? WHERE n=?", (position, n))

    def prefetch_fences(self, ends: Iterable[End]) -> None:
        """Read the fences of events that end next, if each answer of the store is a round trip."""
        if self._ledger.db.pipelined:
            self._fences = {end.row: self._tx.execute(_FENCE, (end.row,)) for end in ends}

    def _end(self, end: End, now: float, status: str) -> bool:
        """Record the end of a start after its UPDATE. Return False if the fence was outdated."""
        known = self._fences.pop(end.row, None)
        if (known.get != end.fence) if known is not None else (self._tx.changes() != 1):
            return False
        if end.meta is not None:
            # The ledger knows the page from now on, so a redelivery does not fetch it again.
            self._tx.execute(_FETCHED, (end.row, end.meta.page, _encode(end.meta)))
            self._tx.execute(
                "INSERT INTO needed VALUES(?,?)"
                " ON CONFLICT(event) DO UPDATE SET page=excluded.page",
                (end.row, end.meta.page),
            )
        if end.progress and status == "delayed":
            self._tx.execute(
                "INSERT INTO redirect VALUES(?,?)"
                " ON CONFLICT(event) DO UPDATE SET chain=excluded.chain",
                (end.row, end.progress),
            )
        elif end.had_progress and end.outcome != "release":  # the next attempt starts again
            self._tx.execute(_FORGET, (end.row,))
        self._record(end.row, now, status, end=end)
        return True
