"""Dead letters of the ledger: the table inside a transaction, and reports about it."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from penstock.ports import DeadLetter
from penstock.ports.reports import Cause, Filter, Letter
from penstock.stores.sql import SqlTable

CAUSES = 200  # maximum number of distinct causes that `status` reads
COUNTED = 10_000  # maximum number of dead letters of one cause that `status` counts
_END = "\U0010ffff"  # sorts after every character of an id


def _where(which: Filter) -> tuple[str, list[Any]]:
    conditions, bindings = [], []
    for column, value in (
        ("host", which.host),
        ("class", which.error_class),
        ("stage", which.stage),
    ):
        if value is not None:
            conditions.append(f"{column}=?")
            bindings.append(value)
    if which.reason is not None:
        conditions.append("lower(reason) LIKE lower(?) ESCAPE '!'")
        bindings.append("%" + re.sub("[!%_]", r"!\g<0>", which.reason) + "%")
    if which.fingerprint is not None:
        conditions.append("fingerprint>=? AND fingerprint<?")
        bindings += [which.fingerprint, which.fingerprint + _END]
    return " AND ".join(conditions) or "1=1", bindings


_LETTER = (
    "n, event, topic, url, host, at, stage, class, reason, fingerprint, detail, envelope, headers"
)
_LETTER_FIELDS = tuple(f.name for f in msgspec.structs.fields(Letter))


class SqlDeadLetterReports(SqlTable):
    """Reports about dead letters, inside one transaction."""

    def causes(self, *, most: int = 5) -> list[Cause]:
        """Return the causes with the most dead letters, among the first `CAUSES` fingerprints.

        Steps from one fingerprint to the next in the index. A count of `COUNTED` is not exact.
        """
        fingerprint, found = "", []
        for _ in range(CAUSES):
            fingerprint = self._tx.execute(
                "SELECT min(fingerprint) FROM dead WHERE fingerprint>?", (fingerprint,)
            ).get
            if fingerprint is None:
                break
            n = self._tx.execute(
                "SELECT count(*) FROM (SELECT 1 FROM dead WHERE fingerprint=? LIMIT ?) AS found",
                (fingerprint, COUNTED),
            ).get
            found.append((n, fingerprint))
        found.sort(reverse=True)
        return [self._cause(f, n, exact=n < COUNTED) for n, f in found[:most]]

    def _cause(
        self,
        fingerprint: str,
        letters: int,
        *,
        exact: bool,
        newest: int | None = None,
        eldest: int | None = None,
    ) -> Cause:
        newest = (
            newest
            or self._tx.execute("SELECT max(n) FROM dead WHERE fingerprint=?", (fingerprint,)).get
        )
        eldest = (
            eldest
            or self._tx.execute("SELECT min(n) FROM dead WHERE fingerprint=?", (fingerprint,)).get
        )
        stage, kind, reason, at, event, url = self._tx.execute(
            "SELECT stage, class, reason, at, event, url FROM dead WHERE n=?", (newest,)
        ).get
        first = self._tx.execute("SELECT at FROM dead WHERE n=?", (eldest,)).get
        return Cause(
            fingerprint=fingerprint,
            letters=letters,
            exact=exact,
            stage=stage,
            error_class=kind,
            reason=reason,
            newest=at,
            first=first,
            event_id=event,
            url=url,
        )

    def letter_groups(self, which: Filter, most: int) -> tuple[list[Cause], int]:
        """Return (causes, number of all matching dead letters), the largest cause first.

        Without filters, one index is enough to count the letters.
        """
        where, bindings = _where(which)
        groups = self._tx.execute(
            f"SELECT count(*), fingerprint, max(n), min(n) FROM dead WHERE {where}"
            " GROUP BY fingerprint ORDER BY 1 DESC, 3 DESC",
            bindings,
        ).fetchall()
        return [
            self._cause(f, n, exact=True, newest=last, eldest=first)
            for n, f, last, first in groups[:most]
        ], sum(g[0] for g in groups)

    def letters(
        self,
        which: Filter,
        *,
        after: int = 0,
        upto: int | None = None,
        limit: int = 100,
        newest_first: bool = False,
    ) -> list[Letter]:
        where, bindings = _where(which)
        bounds, order = ("n>? AND n<=?", "DESC" if newest_first else "ASC")
        rows = self._tx.execute(
            f"SELECT {_LETTER} FROM dead WHERE {where} AND {bounds} ORDER BY n {order} LIMIT ?",
            (*bindings, after, upto if upto is not None else 2**62, limit),
        )
        return [Letter(**dict(zip(_LETTER_FIELDS, row, strict=True))) for row in rows]

    def letter_count(self, which: Filter) -> int:
        where, bindings = _where(which)
        return int(self._tx.execute(f"SELECT count(*) FROM dead WHERE {where}", bindings).get)

    def last_letter(self) -> int:
        return int(self._tx.execute("SELECT coalesce(max(n), 0) FROM dead").get)

    def letter(self, event_id: str) -> Letter | None:
        row = self._tx.execute(f"SELECT {_LETTER} FROM dead WHERE event=?", (event_id,)).get
        return None if row is None else Letter(**dict(zip(_LETTER_FIELDS, row, strict=True)))

    def letters_like(self, prefix: str, most: int = 6) -> list[str]:
        """Return ids of events with a dead letter that start with `prefix`."""
        return [
            i
            for (i,) in self._tx.execute(
                "SELECT event FROM dead WHERE event>=? AND event<? ORDER BY event LIMIT ?",
                (prefix, prefix + _END, most),
            )
        ]


class SqlDeadLetters(SqlTable):
    """Dead letters of the ledger."""

    def put(self, letter: DeadLetter, now: float) -> None:
        """Store a dead letter. It replaces an older one of the same event, under a new number."""
        self._tx.execute("DELETE FROM dead WHERE event=?", (letter.event_id,))
        self._tx.execute(
            "INSERT INTO dead(event, topic, url, host, at, stage, class, reason, fingerprint,"
            " detail, envelope, headers) VALUES(?,?,?,?,?,?,?,?,?,?,?,?)",
            (
                letter.event_id,
                letter.topic,
                letter.url,
                letter.host,
                now,
                letter.stage,
                letter.error_class,
                letter.reason,
                letter.fingerprint,
                letter.detail,
                letter.envelope,
                letter.headers,
            ),
        )

    def has(self, event_id: str) -> bool:
        return self._tx.execute("SELECT 1 FROM dead WHERE event=?", (event_id,)).get is not None

    def redrivable(self, event_id: str) -> tuple[int, bytes] | None:
        """Return (n, envelope) of a dead event, or None if it has no dead letter."""
        found: tuple[int, bytes] | None = self._tx.execute(
            "SELECT e.n, d.envelope FROM dead d JOIN event e ON e.id=d.event WHERE d.event=?"
            " AND e.status='dead'",
            (event_id,),
        ).get
        return found

    def drop(self, event_id: str, *, release_page: bool = False) -> int:
        """Delete a dead letter. Return 1 if the event had one, and else 0.

        If `release_page` is true, retention may then delete the event's page.
        """
        self._tx.execute("DELETE FROM dead WHERE event=?", (event_id,))
        gone = self._tx.changes()
        if release_page:
            self._tx.execute(
                "DELETE FROM needed WHERE event=(SELECT n FROM event WHERE id=?)", (event_id,)
            )
        return gone
