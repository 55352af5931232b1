"""Absent URLs in SQL: visits that answered 404 or 410, known URLs of hosts, waiting removals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from penstock.ledgers.sql.ledger import LedgerTable
from penstock.ledgers.sql.outbox import stored_key
from penstock.model import REMOVED, Record
from penstock.ports.absences import AbsentVisit, ExtractorKeys, HeldRemovals, Leaving
from penstock.rules.gone import HostAbsences, Past

# The newest success of a URL, besides one event.
_PAST = (
    "SELECT e.url_key, coalesce(e.result, ''), coalesce(a.visits, 0) FROM event e"
    " LEFT JOIN absent a ON a.url_key=e.url_key AND a.event=e.n"
    " WHERE e.url_key=? AND e.n<>? AND e.status='success' ORDER BY e.finished_at DESC LIMIT 1"
)
# Condition: the URL has had another success since its absent visit.
_RETURNED = (
    "EXISTS(SELECT 1 FROM event e WHERE e.url_key=absent.url_key AND e.n<>absent.event"
    " AND e.status='success' AND e.finished_at>absent.at)"
)
_KNOW = (
    "INSERT INTO known_host(host, known) VALUES(?,?) ON CONFLICT(host) DO UPDATE"
    " SET known=known_host.known+excluded.known"
)
_encode = msgspec.json.Encoder().encode


class SqlAbsences(LedgerTable):
    """Absent URLs, inside one transaction. `rules.gone` decides about them."""

    def past(self, urls: Sequence[tuple[bytes, int]]) -> dict[bytes, Past]:
        """Return the newest success of each URL that has one."""
        rows = self._tx.executemany(_PAST, urls).fetchall()
        return {bytes(key): Past(result, visits) for key, result, visits in rows}

    def record(self, visits: Sequence[AbsentVisit], now: float) -> None:
        """Record absent visits. A removal that already waits keeps its state and its time."""
        self._tx.executemany(
            "INSERT INTO absent VALUES(?,?,?,?,?,?,?) ON CONFLICT(url_key) DO UPDATE"
            " SET host=excluded.host, event=excluded.event, visits=excluded.visits, at=excluded.at,"
            " since=CASE WHEN excluded.visits>1 AND absent.state IN ('leaving','held')"
            " THEN absent.since ELSE excluded.since END,"
            " state=CASE WHEN excluded.visits>1 AND absent.state='held' THEN 'held'"
            " ELSE excluded.state END",
            [
                (v.url_key, v.host, v.row, v.visits, now, _state(v.leaving), now)
                for v in sorted(visits, key=lambda v: v.url_key)
            ],
        )

    def add_known(self, hosts: Mapping[str, int]) -> None:
        """Add to the numbers of known URLs. In one order everywhere, against deadlocks."""
        self._tx.executemany(_KNOW, sorted(hosts.items()))

    def leaving_hosts(self, after: str, limit: int) -> list[str]:
        """Return hosts with removals that were not decided yet, in order."""
        return [
            host
            for (host,) in self._tx.execute(
                "SELECT DISTINCT host FROM absent WHERE state='leaving' AND host>?"
                " ORDER BY host LIMIT ?",
                (after, limit),
            )
        ]

    def host(self, host: str, since: float) -> HostAbsences:
        """Return the absent URLs of a host."""
        missing, gone, newest = self._tx.execute(
            "SELECT coalesce(sum(CASE WHEN state='missing' THEN 1 ELSE 0 END), 0),"
            " coalesce(sum(CASE WHEN state='gone' THEN 1 ELSE 0 END), 0),"
            " coalesce(max(CASE WHEN state='gone' THEN 0 ELSE at END), 0)"
            " FROM absent WHERE host=? AND at>?",
            (host, since),
        ).get
        # Removals that wait count at any age: no worker may have run since.
        leaving, oldest = self._tx.execute(
            "SELECT count(*), min(since) FROM absent WHERE state IN ('leaving','held') AND host=?",
            (host,),
        ).get
        known, held_at, approved = self._tx.execute(
            "SELECT known, held_at, approved_until FROM known_host WHERE host=?", (host,)
        ).get or (0, None, 0.0)
        return HostAbsences(
            known=known,
            absent=int(missing + leaving),
            gone=int(gone),
            newest=newest,
            oldest=oldest or 0.0,
            held=held_at is not None,
            approved_until=approved,
        )

    def drop_returned(self, host: str) -> None:
        """Delete the absences of URLs that have succeeded since."""
        self._tx.execute(f"DELETE FROM absent WHERE host=? AND {_RETURNED}", (host,))
        self._free_hosts(" AND host=?", (host,))

    def _free_hosts(self, where: str = "", bindings: tuple[str, ...] = ()) -> None:
        """No longer hold hosts of which no removal is left."""
        self._tx.execute(
            "UPDATE known_host SET held_at=NULL WHERE held_at IS NOT NULL AND NOT EXISTS("
            f"SELECT 1 FROM absent a WHERE a.state='held' AND a.host=known_host.host){where}",
            bindings,
        )

    def hold(self, host: str, now: float) -> None:
        """Let the removals of a host wait for an operator."""
        self._tx.execute("UPDATE absent SET state='held' WHERE host=? AND state='leaving'", (host,))
        self._tx.execute(
            "INSERT INTO known_host(host, known, held_at) VALUES(?,0,?) ON CONFLICT(host)"
            " DO UPDATE SET held_at=coalesce(known_host.held_at, excluded.held_at)",
            (host, now),
        )

    def approve(self, host: str, until: float) -> int:
        """Allow the removals of a host until then. Return how many waited."""
        self.drop_returned(host)
        waiting = self._tx.execute(
            "SELECT count(*) FROM absent WHERE host=? AND state IN ('held','leaving')", (host,)
        ).get
        self._tx.execute("UPDATE absent SET state='leaving' WHERE host=? AND state='held'", (host,))
        self._tx.execute(
            "INSERT INTO known_host(host, known, approved_until) VALUES(?,0,?) ON CONFLICT(host)"
            " DO UPDATE SET held_at=NULL, approved_until=excluded.approved_until",
            (host, until),
        )
        return int(waiting)

    def held(self) -> list[HeldRemovals]:
        """Return the removals that wait for an operator, without URLs that have succeeded since."""
        rows = self._tx.execute(
            "SELECT absent.host, count(*), min(absent.since), coalesce(max(k.known), 0)"
            " FROM absent LEFT JOIN known_host k ON k.host=absent.host"
            f" WHERE absent.state='held' AND NOT {_RETURNED}"
            " GROUP BY absent.host ORDER BY absent.host"
        )
        return [
            HeldRemovals(host=host, urls=urls, known=known, since=since)
            for host, urls, since, known in rows
        ]

    def leaving(self, host: str, limit: int) -> list[Leaving]:
        """Return URLs of a host whose removals may be applied."""
        rows = self._tx.execute(
            "SELECT a.url_key, a.event, v.body, a.at, e.response_status FROM absent a"
            " JOIN event e ON e.n=a.event JOIN envelope v ON v.event=a.event"
            " WHERE a.state='leaving' AND a.host=? ORDER BY a.url_key LIMIT ?",
            (host, limit),
        )
        return [
            Leaving(url_key=bytes(key), row=n, envelope=body, at=at, status=status or 404)
            for key, n, body, at, status in rows
        ]

    def records_of(self, url: Leaving, page_url: str, keys: ExtractorKeys) -> list[Record]:
        """Return removals of the records whose newest value came from this URL."""
        rows = self._tx.execute(
            "SELECT extractor, key, fields FROM record WHERE url_key=? AND n<=? AND hash<>?"
            " ORDER BY extractor, key",
            (url.url_key, url.row, REMOVED),
        )
        removals = []
        for index, (extractor, stored, raw) in enumerate(rows):
            version, names = keys.get(extractor, (0, ()))
            fields = {n: v for n, v in msgspec.json.decode(raw).items() if n in names}
            removals.append(
                Record(
                    extractor=extractor,
                    version=version,
                    key=_full_key(stored, [fields.get(name) for name in names], page_url),
                    index=index,
                    fields=_encode(fields),
                    hash=REMOVED,
                    deleted=True,
                )
            )
        return removals

    def mark_gone(self, urls: Sequence[Leaving], reason: str, now: float) -> None:
        """Record that these URLs are gone. Their next page is extracted even if it is unchanged."""
        self._tx.executemany(
            "UPDATE event SET result='gone', reason=? WHERE n=?", [(reason, u.row) for u in urls]
        )
        self._ledger.record_all(self._tx, [u.row for u in urls], now, "success", None, None, reason)
        keys = [(u.url_key,) for u in urls]
        # A page whose baseline has no extractors is never unchanged.
        self._tx.executemany(
            "UPDATE event SET extractors='' WHERE url_key=? AND status='success'", keys
        )
        hosts = self._tx.executemany(
            "UPDATE absent SET state='gone' WHERE url_key=? RETURNING host", keys
        ).fetchall()
        self._add_forgotten([host for (host,) in hosts])

    # -- retention ---------------------------------------------------------------------------------

    def events_needed(self) -> set[int]:
        """Return the row numbers of events whose removals wait."""
        rows = self._tx.execute("SELECT event FROM absent WHERE state IN ('leaving','held')")
        return {n for (n,) in rows}

    def prune(self, before: float, forgotten: Sequence[tuple[bytes, str]], hour: float) -> None:
        """Forget URLs. `forgotten` are (URL key, host) of deleted successes, without gone URLs.

        A URL is no longer known if none of its successes is left. Absences before `before` are
        deleted, and those of gone URLs before `hour`.
        """
        left = self._tx.executemany(
            "SELECT url_key FROM event WHERE url_key=? AND status='success' LIMIT 1",
            [(key,) for key, _ in forgotten],
        ).fetchall()
        known = {bytes(key) for (key,) in left}
        self._add_forgotten([host for key, host in forgotten if key not in known])
        self._tx.execute(
            "DELETE FROM absent WHERE (state='gone' AND at<?) OR (state='missing' AND at<?)",
            (hour, before),
        )
        self._tx.execute(f"DELETE FROM absent WHERE state='held' AND {_RETURNED}")
        self._free_hosts()

    def _add_forgotten(self, hosts: Iterable[str]) -> None:
        self.add_known({host: -n for host, n in Counter(hosts).items()})


def _state(leaving: bool) -> str:
    return "leaving" if leaving else "missing"


def _full_key(stored: str, values: Sequence[Any], page_url: str) -> str:
    """Return the record key. The ledger stores the end of a long key as a hash."""
    parts = [str(value) for value in values]
    joined = "|".join(part.replace("\\", "\\\\").replace("|", "\\|") for part in parts)
    found = (key for key in (*parts, joined, page_url) if key and stored_key(key) == stored)
    return next(found, stored)
