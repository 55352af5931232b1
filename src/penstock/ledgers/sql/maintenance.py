"""Periodic work on events, and changes by operators, in SQL."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from penstock.ledgers.sql.absences import SqlAbsences
from penstock.ledgers.sql.budgets import SqlBudgets
from penstock.ledgers.sql.dead_letters import SqlDeadLetters
from penstock.ledgers.sql.ledger import STORED, LedgerTable
from penstock.model import Reason
from penstock.ports import MAX_CAUSES, DeadLetter, StoredEvent
from penstock.rules.gone import HOUR
from penstock.rules.reasons import sentence


class SqlEventMaintenance(LedgerTable):
    """Periodic work on events, and operators' changes."""

    def has_due(self, now: float) -> bool:
        """Return True if an event is due and the ledger still records it as delayed."""
        return (
            self._tx.execute(
                "SELECT 1 FROM event WHERE status='delayed' AND not_before<=? LIMIT 1", (now,)
            ).get
            is not None
        )

    def release_due(self, now: float) -> None:
        """Record up to 1,000 due events as pending. The broker delivers them without this call."""
        rows = self._tx.execute(
            "SELECT n, topic FROM event WHERE status='delayed' AND not_before<=? LIMIT 1000", (now,)
        ).fetchall()
        delta: Counter[tuple[str, str]] = Counter()
        for n, topic in rows:
            self._tx.execute("UPDATE event SET status='pending', waits_for=NULL WHERE n=?", (n,))
            self._record(n, now, "pending", reason=sentence(Reason.DUE))
            delta[topic, "delayed"] -= 1
            delta[topic, "pending"] += 1
        self._count_all(delta)

    def requeue_from(self, worker: str, ids: Sequence[str], now: float) -> int:
        """Record events of an ended worker as pending. Return how many were in flight.

        Their starts stay counted as crashed.
        """
        delta: Counter[tuple[str, str]] = Counter()
        for id_ in ids:
            row = self._tx.execute(
                "UPDATE event SET status='pending', fence=fence+1 WHERE id=? AND worker=?"
                " AND status='in_flight' RETURNING n, topic",
                (id_, worker),
            ).get
            if row is not None:
                n, topic = row
                self._record(n, now, "pending", reason=sentence(Reason.WORKER_GONE), worker=worker)
                delta[topic, "in_flight"] -= 1
                delta[topic, "pending"] += 1
        self._count_all(delta)
        return -sum(d for (_, status), d in delta.items() if status == "in_flight")

    def stalled(self, before: float, limit: int) -> list[tuple[int, str, bytes]]:
        """Return (number, id, envelope) of open, undelayed events without history since `before`.

        Their messages may be lost. Reads all events.
        """
        return self._tx.execute(
            "SELECT e.n, e.id, v.body FROM event e JOIN envelope v ON v.event=e.n"
            " WHERE e.status IN ('pending','in_flight','writing')"
            " AND (SELECT max(h.at) FROM history h WHERE h.event=e.n)<? ORDER BY e.n LIMIT ?",
            (int(before * 1e6), limit),
        ).fetchall()

    def note(self, n: int, status: str, reason: str, now: float) -> None:
        """Add a line to an event's history, without a change of status."""
        self._record(n, now, status, reason=reason)

    def waiting_on(self, topic: str, limit: int) -> list[StoredEvent]:
        """Return open events whose next message is on this topic. Reads all events."""
        known = "EXISTS(SELECT 1 FROM fetched f WHERE f.event=e.n)"
        which = {
            "requests": f"e.status IN ('pending','delayed') AND NOT {known}",
            "pages": f"e.status IN ('pending','delayed') AND {known}",
            "records": "e.status='writing' AND e.worker IS NULL",
        }[topic]
        rows = self._tx.execute(f"{STORED} WHERE {which} ORDER BY e.n LIMIT ?", (limit,))
        return [StoredEvent(*row) for row in rows]

    def waiting(self, id: str) -> StoredEvent | None:
        """Return the event if it is open and no worker has started it."""
        row = self._tx.execute(
            f"{STORED} WHERE e.id=? AND (e.status IN ('pending','delayed')"
            " OR (e.status='writing' AND e.worker IS NULL))",
            (id,),
        ).get
        return None if row is None else StoredEvent(*row)

    def abandon(self, event: StoredEvent, letter: DeadLetter, now: float) -> None:
        """End an event as dead for an operator. It can be redriven."""
        self._tx.execute(
            "UPDATE event SET status='dead', finished_at=?, reason=?, waits_for=NULL WHERE n=?",
            (now, letter.reason, event.n),
        )
        self._tx.execute("DELETE FROM redirect WHERE event=?", (event.n,))
        self._record(event.n, now, "dead", reason=letter.reason)
        SqlDeadLetters(self._tx).put(letter, now)
        self._count(event.topic, {event.status: -1, "dead": 1})

    def parked(self, host: str, reasons: Sequence[str]) -> list[tuple[int, int]]:
        """Return (number, position) of a host's delayed events with one of these reasons.

        Reads all delayed events, so only operators' commands call it.
        """
        wanted = ",".join("?" * len(reasons))
        return self._tx.execute(
            "SELECT n, position FROM event WHERE status='delayed' AND host=?"
            f" AND reason IN ({wanted})",
            (host, *reasons),
        ).fetchall()

    def make_due(self, rows: Sequence[int], now: float) -> None:
        """End the delay of these events now."""
        self._tx.executemany(
            "UPDATE event SET not_before=?, waits_for=NULL WHERE n=? AND status='delayed'",
            [(now, n) for n in rows],
        )

    def hold(self, host: str, waits_for: str, until: float) -> None:
        """Delay the delayed requests to a host until a time, with the cause."""
        self._tx.execute(
            "UPDATE event SET waits_for=?, not_before=? WHERE status='delayed' AND host=?"
            " AND waits_for IS NULL AND NOT EXISTS(SELECT 1 FROM fetched f WHERE f.event=event.n)",
            (waits_for, until, host),
        )

    def waiting_for(self, cause: str) -> list[tuple[int, str, int]]:
        """Return (number, host, position) of the events that wait for this cause."""
        return self._tx.execute(
            "SELECT n, host, position FROM event WHERE waits_for=?", (cause,)
        ).fetchall()

    def causes(self, kind: str, *, after: str = "") -> list[str]:
        """Return causes of `waits`, without counting. One index lookup for each."""
        next_cause = "SELECT min(waits_for) AS name FROM event WHERE waits_for>"
        found = self._tx.execute(
            f"WITH RECURSIVE cause AS ({next_cause}?"
            f" UNION ALL SELECT ({next_cause}cause.name) FROM cause WHERE name IS NOT NULL)"
            " SELECT name FROM cause WHERE name IS NOT NULL LIMIT ?",
            (max(kind, after), MAX_CAUSES),
        )
        return [cause for (cause,) in found if cause.startswith(kind)]

    def some_waiting_for(
        self, cause: str, limit: int, *, due_before: float
    ) -> list[tuple[int, str, int]]:
        return self._tx.execute(
            "SELECT n, host, position FROM event"
            " WHERE waits_for=? AND status='delayed' AND not_before<=? LIMIT ?",
            (cause, due_before, limit),
        ).fetchall()

    def waits(self) -> dict[str, int]:
        """Return how many open events wait for each cause that time alone does not end."""
        return dict(
            self._tx.execute(
                "SELECT waits_for, count(*) FROM event WHERE waits_for IS NOT NULL"
                " GROUP BY waits_for"
            ).fetchall()
        )

    def prune(self, before: float, keep: Callable[[bytes, str], bool], limit: int = 1000) -> int:
        """Delete old successes and duplicates with their history. Return how many.

        Dead events stay. The counters still include deleted events. `keep(URL key, id)` returns
        True if a success is still a baseline. Old URLs of traces, budgets
        and traps are also deleted.
        """
        # Each call reads `limit` rows, and the next call continues after them. So old rows that
        # must stay do not block the rest of the table.
        stretch = self._tx.execute(
            "SELECT n, status, finished_at, accepted_at, url_key, id, host, result FROM event"
            " WHERE n>?"
            " ORDER BY n LIMIT ?",
            (self._ledger.pruned, limit),
        ).fetchall()
        self._ledger.pruned = (
            stretch[-1][0] if len(stretch) == limit and stretch[-1][3] < before else 0
        )
        absences = SqlAbsences(self._tx, self._ledger)
        needed = absences.events_needed()
        old = [
            row
            for row in stretch
            if row[1] in ("success", "duplicate")
            and row[2] < before
            and row[0] not in needed
            and (row[1] == "duplicate" or not keep(row[4], row[5]))
        ]
        rows = [(row[0],) for row in old]
        for table in ("envelope", "fetched", "needed", "redirect"):
            self._tx.executemany(f"DELETE FROM {table} WHERE event=?", rows)
        self._ledger.forget_history(self._tx, rows, before)
        self._tx.executemany("DELETE FROM event WHERE n=?", rows)
        newest = {bytes(row[4]): row for row in old if row[1] == "success"}  # by URL key
        known = [(key, row[6]) for key, row in newest.items() if row[7] != "gone"]
        absences.prune(before, known, self._ledger.clock.now() - HOUR)
        self._tx.execute(
            "DELETE FROM seen WHERE (trace, url_key) IN (SELECT trace, url_key FROM seen"
            " WHERE at<? LIMIT ?)",
            (before, limit),
        )
        SqlBudgets(self._tx).prune(before)
        return len(rows)

    def pages_needed(self, pages: Iterable[str]) -> set[str]:
        """Return those pages that retention must keep."""
        return {
            page for (page,) in self._tx.execute("SELECT DISTINCT page FROM needed")
        }.intersection(pages)
