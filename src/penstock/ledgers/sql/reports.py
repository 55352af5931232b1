"""Reports from the ledger: reads inside a transaction, without changes.

Each read uses an index or has a stated limit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec

from penstock.ledgers.sql.dead_letters import SqlDeadLetterReports
from penstock.ports import LINKS_WAITING, OPEN, QueueAudit, QueueReports, Status
from penstock.ports.reports import (
    SCAN,
    Audit,
    EventRow,
    Listing,
    SinkState,
    Sizes,
    Standing,
    Step,
    Waiting,
)
from penstock.stores.sql import Tx

_STATUSES = frozenset(status.value for status in Status)
STATES = ("pending", "in_flight", "delayed", "success", "duplicate", "dead")
# Maximum number of leased events in one statement. A fleet holds fewer, and a statement of
# PostgreSQL takes at most 65,535 values.
LEASES = 30_000
STRETCH = 500  # fetched events that `paged_events` reads in one statement
SAMPLE = 1000  # maximum number of delayed events, messages or lines of history in one report
_END = "\U0010ffff"  # sorts after every character of an id


def counts_of(row: dict[str, int]) -> dict[str, int]:
    """Return the counters by status. Events in `writing` are counted as in flight."""
    states = {
        name: row.get(name, 0) + (row.get("writing", 0) if name == "in_flight" else 0)
        for name in STATES
    }
    return {"accepted": sum(states.values()), **states}


_FIELDS = tuple(f.name for f in msgspec.structs.fields(EventRow))
_ELSEWHERE = {"page": "f.page", "page_meta": "f.meta", "envelope": "v.body"}
_COLUMNS = ", ".join(_ELSEWHERE.get(name, f"e.{name}") for name in _FIELDS)
_JOINED = "LEFT JOIN fetched f ON f.event=e.n LEFT JOIN envelope v ON v.event=e.n"


def _event_row(row: Sequence[Any]) -> EventRow:
    fields = dict(zip(_FIELDS, row, strict=True))
    fields["envelope"] = fields["envelope"] or b""
    return EventRow(**fields)


class SqlReports(SqlDeadLetterReports):
    """Implements ports.Reports, inside one transaction."""

    def __init__(self, tx: Tx, queues: QueueReports, paused: Callable[[], dict[str, str]]) -> None:
        super().__init__(tx)
        self._queues, self._paused = queues, paused

    def standing(self) -> Standing:
        """Return the figures of `penstock status`. Reads counters and never counts events."""
        per_topic: dict[str, dict[str, int]] = {"requests": {}}
        for topic, name, n in self._tx.execute("SELECT topic, name, n FROM counter"):
            per_topic.setdefault(topic, {})[name] = n
        others: Counter[str] = Counter()
        for row in per_topic.values():
            others.update(
                {name: n for name, n in row.items() if name not in STATES and name != "writing"}
            )
        waiting, seen = self.delays()
        return Standing(
            topics={topic: counts_of(row) for topic, row in per_topic.items()},
            counters=dict(others),
            paused=self._paused(),
            waiting=waiting,
            waiting_seen=seen,
            causes=self.causes(),
            sinks=self.sinks(),
            running=self._queues.leases_by_worker(SCAN),
            changes_waiting=self._tx.execute("SELECT 1 FROM change WHERE tries<5 LIMIT 1").get
            is not None,
            oldest=self._queues.oldest(SAMPLE),
        )

    def audit(self, queue: QueueAudit, *, entered: int | None) -> Audit:
        """Count the ledger's figures that must agree. `queue` contains the figures of the broker.

        Whole tables are counted, so the audit is slow.
        """
        unqueued: list[str] = []
        lingering = 0
        if queue.queued is not None:
            marks = ",".join("?" * len(OPEN))
            open_ = {
                id_
                for (id_,) in self._tx.execute(
                    f"SELECT id FROM event WHERE status IN ({marks})", tuple(OPEN)
                )
            }
            unqueued, lingering = sorted(open_ - queue.queued), len(queue.queued - open_)
        return Audit(
            counters={
                (t, s): n
                for t, s, n in self._tx.execute("SELECT topic, name, n FROM counter")
                if s in _STATUSES
            },
            rows={
                (t, s): n
                for t, s, n in self._tx.execute(
                    "SELECT topic, status, count(*) FROM event GROUP BY topic, status"
                )
            },
            links_waiting=int(
                self._tx.execute(
                    "SELECT coalesce(sum(n), 0) FROM counter WHERE name=?", (LINKS_WAITING,)
                ).get
            ),
            links_stored=int(
                self._tx.execute("SELECT coalesce(sum(links), 0) FROM waiting_links").get
            ),
            entered=entered,
            queue=queue,
            unqueued=unqueued[:5],
            unqueued_count=len(unqueued),
            lingering_count=lingering,
            letterless=int(
                self._tx.execute(
                    "SELECT count(*) FROM dead d JOIN event e ON e.id=d.event"
                    " WHERE e.status<>'dead'"
                ).get
            ),
            outbox=self._tx.execute(
                "SELECT s.name, s.next-1-s.flushed, (SELECT count(*) FROM outbox o"
                " WHERE o.sink=s.id) FROM sink s"
            ).fetchall(),
            future=(
                self._tx.execute(
                    "SELECT max(accepted_at) FROM event WHERE n>(SELECT max(n) FROM event)-1000"
                ).get
                or 0.0
            ),
        )

    def delays(self) -> tuple[list[Waiting], int]:
        """Return (reasons of delayed events, number of events read).

        The most frequent reason is first. The `SAMPLE` events that are due next are read.
        """
        found: dict[str, tuple[int, float]] = {}
        seen = 0
        for reason, at in self._tx.execute(
            "SELECT reason, not_before FROM event WHERE status='delayed'"
            " ORDER BY not_before LIMIT ?",
            (SAMPLE,),
        ):
            seen += 1
            n, first = found.get(reason or "", (0, at))
            found[reason or ""] = (n + 1, min(first, at))
        rows = [Waiting(reason=reason, events=n, next_at=at) for reason, (n, at) in found.items()]
        return sorted(rows, key=lambda w: -w.events), seen

    def sinks(self) -> list[SinkState]:
        return [
            SinkState(
                name=name,
                flushed=flushed,
                backlog=next_ - 1 - flushed,
                mark=mark,
                outage=outage,
                outage_since=since,
            )
            for name, next_, flushed, mark, outage, since in self._tx.execute(
                "SELECT name, next, flushed, mark, outage, outage_since FROM sink ORDER BY id"
            )
        ]

    def _rows(self, where: str, bindings: Sequence[Any] = (), *, index: str = "") -> list[EventRow]:
        rows = self._tx.execute(
            f"SELECT {_COLUMNS} FROM event e {index} {_JOINED} {where}", tuple(bindings)
        )
        return [_event_row(row) for row in rows]

    def event(self, id_: str) -> EventRow | None:
        return next(iter(self._rows("WHERE e.id=?", (id_,))), None)

    def ids_like(self, prefix: str, most: int = 6) -> list[str]:
        """Return event ids that start with `prefix`."""
        return [
            i
            for (i,) in self._tx.execute(
                "SELECT id FROM event WHERE id>=? AND id<? ORDER BY id LIMIT ?",
                (prefix, prefix + _END, most),
            )
        ]

    def traces_like(self, prefix: str, most: int = 6) -> list[str]:
        """Return trace ids that start with `prefix`.

        Steps from one trace to the next in the index, because a trace may have a million events.
        """
        found: list[str] = []
        after = self._tx.execute("SELECT min(trace) FROM event WHERE trace>=?", (prefix,)).get
        while after is not None and after.startswith(prefix) and len(found) < most:
            found.append(after)
            after = self._tx.execute("SELECT min(trace) FROM event WHERE trace>?", (after,)).get
        return found

    def newest(self) -> EventRow | None:
        return next(iter(self._rows("WHERE e.n=(SELECT max(n) FROM event)")), None)

    def of_url(self, key: bytes, most: int) -> list[EventRow]:
        """Return events of a URL, newest first."""
        return self._rows("WHERE e.url_key=? ORDER BY e.n DESC LIMIT ?", (key, most))

    def of_trace(self, trace: str, most: int) -> list[EventRow]:
        """Return events of a trace, in the order in which they were accepted."""
        return self._rows("WHERE e.trace=? ORDER BY e.n LIMIT ?", (trace, most))

    def trace_size(self, trace: str) -> int:
        return int(
            self._tx.execute(
                "SELECT count(*) FROM (SELECT 1 FROM event WHERE trace=? LIMIT ?) AS found",
                (trace, SCAN),
            ).get
        )

    def history(self, n: int) -> list[Step]:
        rows = self._tx.execute(
            "SELECT at, status, worker, stage, class, reason FROM history WHERE event=?"
            " ORDER BY at LIMIT ?",
            (n, SAMPLE),
        )
        return [
            Step(
                at=at / 1e6,
                status=status,
                worker=worker,
                stage=stage,
                error_class=kind,
                reason=reason,
            )
            for at, status, worker, stage, kind, reason in rows
        ]

    def duplicates_of(self, id_: str, most: int = 20) -> list[tuple[str, str]]:
        """Return (event, trace) of events that ended as duplicates of this event."""
        return self._tx.execute(
            "SELECT id, trace FROM event WHERE duplicate_of=? ORDER BY n LIMIT ?", (id_, most)
        ).fetchall()

    def records_of(self, events: Iterable[int]) -> dict[int, list[tuple[str, str]]] | None:
        """Return event number -> (extractor, record key) of records last written by the event.

        Return None if more than `SCAN` records were ever sent to sinks.
        """
        if (
            self._tx.execute("SELECT coalesce(sum(n), 0) FROM counter WHERE name='records'").get
            or 0
        ) > SCAN:
            return None
        wanted = list(events)
        found: dict[int, list[tuple[str, str]]] = {}
        for start in range(0, len(wanted), 500):
            some = wanted[start : start + 500]
            for n, extractor, key in self._tx.execute(
                f"SELECT n, extractor, key FROM record WHERE n IN ({','.join('?' * len(some))})",
                some,
            ):
                found.setdefault(n, []).append((extractor, key))
        return found

    def events(
        self,
        *,
        status: str | None = None,
        host: str | None = None,
        source: str | None = None,
        result: str | None = None,
        url_key: bytes | None = None,
        limit: int = 50,
        everything: bool = False,
    ) -> Listing:
        """Return events, newest first. Delayed events are sorted by their due time.

        Filters without an index read only the newest `SCAN` events, unless `everything` is true.
        """
        conditions, bindings = ["1=1"], []
        wanted = {"host": host, "source": source, "result": result, "url_key": url_key}
        for column, value in wanted.items():
            if value is not None:
                conditions.append(f"e.{column}=?")
                bindings.append(value)
        order, index, indexed, bounded = "e.n DESC", "", url_key is not None, False
        if url_key is None and status == "in_flight":  # every event in flight has a lease
            leased = self._queues.leased_ids(LEASES)
            conditions.append(
                f"e.status='in_flight' AND e.id IN ({','.join('?' * len(leased)) or 'NULL'})"
            )
            bindings += leased
            indexed = True
        elif url_key is None and status == "delayed":
            conditions.append("e.status='delayed'")  # the exact condition of the partial index
            index, order, indexed = "INDEXED BY event_delayed", "e.not_before", True
        elif status is not None:
            conditions.append("e.status=?")
            bindings.append(status)
        if not indexed and not everything and len(conditions) > 1:
            first = (self._tx.execute("SELECT max(n) FROM event").get or 0) - SCAN
            bounded = first > 0
            conditions.append(f"e.n>{first}")
        found = self._rows(
            f"WHERE {' AND '.join(conditions)} ORDER BY {order} LIMIT ?",
            (*bindings, limit),
            index=index,
        )
        return Listing(found, len(found) == limit or not bounded)

    def page_of_url(self, key: bytes, sizes: Sizes) -> str | None:
        """Return the newest page of a URL that is still stored."""
        found = self._tx.execute(
            "SELECT f.page FROM event e JOIN fetched f ON f.event=e.n WHERE e.url_key=?"
            " ORDER BY e.n DESC LIMIT 100",
            (key,),
        ).fetchall()
        pages = [str(page) for (page,) in found]
        stored = sizes(list(dict.fromkeys(pages)))
        return next((page for page in pages if page in stored), None)

    def event_of_page(self, page: str) -> EventRow | None:
        """Return the newest event that fetched this page, among the newest `SCAN` events."""
        found = self._rows(
            "WHERE e.n=(SELECT max(event) FROM fetched WHERE page=?"
            " AND event>(SELECT max(event) FROM fetched)-?)",
            (page, SCAN),
        )
        return found[0] if found else None

    def paged_events(
        self, limit: int, sizes: Sizes, host: str | None = None
    ) -> Iterator[tuple[EventRow, int | None]]:
        """Yield the newest events with a page, and the size of the page.

        Each page is returned once. The size is None if retention has deleted the page. At most the
        newest `SCAN` fetched events are read.
        """
        condition, bindings = ("", ()) if host is None else ("WHERE e.host=?", (host,))
        stretch = "SELECT event, page, meta FROM fetched WHERE event<? ORDER BY event DESC LIMIT ?"
        query = (
            f"SELECT {_COLUMNS} FROM ({stretch}) AS f JOIN event e ON e.n=f.event LEFT"
            f" JOIN envelope v ON v.event=e.n {condition} ORDER BY f.event DESC"
        )
        seen: set[str] = set()
        before = 2**62
        for _ in range(SCAN // STRETCH):
            last = self._tx.execute(
                f"SELECT min(event) FROM ({stretch}) AS f", (before, STRETCH)
            ).get
            if last is None:
                return
            for row in self._tx.execute(query, (before, STRETCH, *bindings)).fetchall():
                found = _event_row(row)
                if found.page is None or found.page in seen:
                    continue
                seen.add(found.page)
                yield found, sizes([found.page]).get(found.page)
                if len(seen) >= limit:
                    return
            before = last
