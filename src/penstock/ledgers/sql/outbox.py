"""Records of the ledger: change detection, the sink outbox, and changes that wait for hooks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from hashlib import blake2b
from typing import Any, TypeAlias

import msgspec

from penstock.model import REMOVED, Event, Record
from penstock.ports import Line, RecordsOfEvent, Row
from penstock.stores.sql import SqlStore, Tx

SCHEMA = """
CREATE TABLE record(extractor TEXT NOT NULL, key TEXT NOT NULL, url_key BLOB NOT NULL,
  hash BLOB NOT NULL, fields BLOB NOT NULL, n INTEGER NOT NULL,
  PRIMARY KEY(extractor, key)) WITHOUT ROWID;
CREATE INDEX record_url ON record(url_key);
CREATE TABLE sink(id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL UNIQUE,
  next INTEGER NOT NULL DEFAULT 1, flushed INTEGER NOT NULL DEFAULT 0,
  mark TEXT NOT NULL DEFAULT '', outage TEXT NOT NULL DEFAULT '', outage_since REAL);
CREATE TABLE outbox(sink INTEGER NOT NULL, n INTEGER NOT NULL, key TEXT NOT NULL,
  body BLOB NOT NULL, ord INTEGER NOT NULL,
  PRIMARY KEY(sink, n)) WITHOUT ROWID;
CREATE TABLE change(n INTEGER PRIMARY KEY AUTOINCREMENT, body BLOB NOT NULL,
  tries INTEGER NOT NULL DEFAULT 0, error TEXT);
"""
TableWriter: TypeAlias = Callable[[Tx, Sequence[Row]], None]
_json = msgspec.json.Encoder().encode
_pack = msgspec.msgpack.Encoder().encode


class _Origin(msgspec.Struct, omit_defaults=True):
    """The `_penstock` object of a line."""

    event_id: str
    trace_id: str
    url: str
    key: str
    extractor: str
    version: int
    fetched_at: str
    deleted: bool = False


class SqlOutbox:
    """Records, the sink outbox and changes for hooks, inside one transaction."""

    def __init__(self, tx: Tx, tables: Mapping[str, TableWriter] | None = None) -> None:
        """`tables` are the sinks whose table is in this store."""
        self._tx, self._tables = tx, tables or {}

    @staticmethod
    def create(db: SqlStore) -> None:
        """Create or check the tables."""
        db.part("outbox", SCHEMA)

    # -- records -----------------------------------------------------------------------------------

    def diff(
        self,
        ends: Sequence[tuple[RecordsOfEvent, bytes]],
        counts: Mapping[str, Counter[str]],
        *,
        emit_unchanged: bool,
        hooks: bool,
    ) -> list[Line]:
        """Compare records with the last ones of their record keys. Return the lines for sinks."""
        groups = [
            ((g[0].extractor, stored_key(g[0].key)), g, end, url_key)
            for end, url_key in ends
            for g in _by_key(end.records)
        ]
        places = dict.fromkeys([group[0] for group in groups])
        rows = self._tx.executemany(
            "SELECT extractor, key, url_key, hash, fields, n FROM record WHERE extractor=?"
            " AND key=?",
            places,
        ).fetchall()
        known: dict[tuple[str, str], tuple[Any, ...]] = {(row[0], row[1]): row for row in rows}
        # Rows to write. If a record key occurs twice, the last row counts.
        fresh: dict[tuple[str, str], tuple[Any, ...]] = {}
        lines: list[Line] = []
        for place, group, end, url_key in groups:
            event, n, last, old, count = (
                end.event,
                end.row,
                group[-1],
                known.get(place),
                counts[end.event.topic],
            )
            hash_ = (
                last.hash
                if len(group) == 1
                else blake2b(b"".join([r.hash for r in group]), digest_size=16).digest()
            )
            if old is not None:
                same = old[3] == hash_ and old[2] == url_key and not (emit_unchanged or event.force)
                # If a newer event removed the record, an older event must not send it again.
                if same or (old[3] == REMOVED and n < old[5]):
                    count["records_unchanged"] += len(group)
                    continue
                if old[3] != hash_ and n >= old[5]:
                    count["changes"] += 1
                    if hooks:
                        self._tx.execute(
                            "INSERT INTO change(body) VALUES(?)", (_change(event, last, old[4]),)
                        )
            fetched_at = end.meta.fetched_at if end.meta else 0.0
            lines += [
                Line(last.extractor, last.key, render(event, r, fetched_at), n) for r in group
            ]
            count["records"] += len(group)
            if old is None or n >= old[5]:
                known[place] = fresh[place] = (*place, url_key, hash_, last.fields, n)
        self._tx.executemany(
            "INSERT INTO record VALUES(?,?,?,?,?,?) ON CONFLICT(extractor, key)"
            " DO UPDATE SET url_key=excluded.url_key, hash=excluded.hash, fields=excluded.fields,"
            " n=excluded.n",
            list(fresh.values()),
        )
        return lines

    # -- the sinks' outbox -------------------------------------------------------------------------

    def _sink_id(self, name: str) -> int:
        found = self._tx.execute("SELECT id FROM sink WHERE name=?", (name,)).get
        if found is None:
            self._tx.execute("INSERT INTO sink(name) VALUES(?)", (name,))
            return self._tx.last_insert_rowid()
        return int(found)

    def append(self, sink: str, lines: Sequence[Line]) -> None:
        """Add rows for a sink, in order. A table in this store is written directly."""
        if sink in self._tables:
            rows = [Row(0, line.key, line.body, line.order) for line in lines]
            return self._tables[sink](self._tx, rows)
        id_ = self._sink_id(sink)
        first = self._tx.execute(
            "UPDATE sink SET next=next+? WHERE id=? RETURNING next", (len(lines), id_)
        ).get - len(lines)
        self._tx.executemany(
            "INSERT INTO outbox VALUES(?,?,?,?,?)",
            [(id_, first + i, line.key, line.body, line.order) for i, line in enumerate(lines)],
        )

    def position(self, sink: str) -> tuple[int, str]:
        row = self._tx.execute("SELECT flushed, mark FROM sink WHERE name=?", (sink,)).get
        return (0, "") if row is None else (row[0], row[1])

    def rows(self, sink: str, *, after: int, limit: int, max_bytes: int) -> list[Row]:
        rows: list[Row] = []
        size = 0
        for row in self._tx.execute(
            "SELECT n, key, body, ord FROM outbox"
            " WHERE sink=(SELECT id FROM sink WHERE name=?) AND n>? ORDER BY n LIMIT ?",
            (sink, after, limit),
        ):
            rows.append(Row(*row))
            size += len(row[2])
            if size > max_bytes:
                break
        return rows

    def mark_flushed(self, sink: str, *, upto: int, mark: str) -> None:
        id_ = self._sink_id(sink)
        self._tx.execute("UPDATE sink SET flushed=?, mark=? WHERE id=?", (upto, mark, id_))
        self._tx.execute("DELETE FROM outbox WHERE sink=? AND n<=?", (id_, upto))

    def outage(self, sink: str) -> str:
        return str(self._tx.execute("SELECT outage FROM sink WHERE name=?", (sink,)).get or "")

    def set_outage(self, sink: str, reason: str, *, since: float | None) -> None:
        self._tx.execute(
            "UPDATE sink SET outage=?, outage_since=? WHERE id=?",
            (reason, since, self._sink_id(sink)),
        )

    def backlog(self, sink: str) -> int:
        return int(
            self._tx.execute("SELECT next-1-flushed FROM sink WHERE name=?", (sink,)).get or 0
        )

    # -- changes that wait for hooks ---------------------------------------------------------------

    def has_changes(self) -> bool:
        return self._tx.execute("SELECT 1 FROM change WHERE tries<5 LIMIT 1").get is not None

    def changes(self, limit: int) -> list[tuple[int, bytes]]:
        return self._tx.execute(
            "SELECT n, body FROM change WHERE tries<5 ORDER BY n LIMIT ?", (limit,)
        ).fetchall()

    def mark_hooks_run(self, done: Sequence[int], failed: Sequence[tuple[str, int]]) -> None:
        self._tx.executemany("DELETE FROM change WHERE n=?", [(n,) for n in done])
        self._tx.executemany("UPDATE change SET tries=tries+1, error=? WHERE n=?", failed)


def stored_key(key: str) -> str:
    """Return the record key under which the last record is stored.

    An index entry of PostgreSQL holds at most 2,704 bytes, and a record key may have 4,000
    characters. So the end of a long key is replaced by a hash.
    """
    return (
        key
        if len(key) <= 500
        else f"{key[:400]}…{blake2b(key.encode(), digest_size=16).hexdigest()}"
    )


def _by_key(records: Sequence[Record]) -> Iterable[Sequence[Record]]:
    """Group records by extractor and record key.

    Records without a key share the page's URL as key. Such a group is compared as a whole. Compared
    alone, each record would look like a change of the one before.
    """
    if len(records) == 1:
        return (records,)
    same: dict[tuple[str, str], list[Record]] = {}
    for r in records:
        same.setdefault((r.extractor, r.key), []).append(r)
    return same.values()


def render(event: Event, r: Record, fetched_at: float) -> bytes:
    """Return one line of a JSON Lines sink, without the newline.

    The line contains the encoded fields unchanged, and `_penstock`.
    """
    origin = _json(
        _Origin(
            event.id,
            event.trace,
            event.url,
            r.key,
            r.extractor,
            r.version,
            _time(int(fetched_at * 1000)),
            r.deleted,
        )
    )
    return b"".join(
        (r.fields[:-1], b',"_penstock":' if len(r.fields) > 2 else b'"_penstock":', origin, b"}")
    )


@lru_cache(512)
def _time(milliseconds: int) -> str:
    seconds, rest = divmod(milliseconds, 1000)
    return f"{_to_the_second(seconds)}.{rest:03d}Z"


@lru_cache(64)
def _to_the_second(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")


def _change(event: Event, r: Record, old_fields: bytes) -> bytes:
    from penstock.authoring.changes import Change
    from penstock.rules.diffing import diff

    old, new = msgspec.json.decode(old_fields), msgspec.json.decode(r.fields)
    fields = {name: [a, b] for name, (a, b) in diff(old, new).items()}
    return _pack(
        Change(
            event_id=event.id,
            trace_id=event.trace,
            url=event.url,
            extractor=r.extractor,
            key=r.key,
            old=old,
            new=new,
            fields=fields,
        )
    )
