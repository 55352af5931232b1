"""Slot and publication on the server: looked at, made, dropped, and what a refusal means. Rows are
read elsewhere.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
import psycopg2
import psycopg2.extras

from penstock.errors import SourceDown
from penstock.sources.postgres.pgoutput import lsn_of
from penstock.sources.postgres.settings import CdcSettings, Table, identifier, inline
from penstock.stores.postgres.url import OLDEST, refusal

log = logging.getLogger("penstock")
# Values are read from their text, so the session says how they are written, whatever the server's
# defaults are.
SESSION = "-c datestyle=ISO -c timezone=UTC -c bytea_output=hex -c intervalstyle=iso_8601 -c extra_float_digits=1 -c statement_timeout=0"
_HERE = "CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_lsn() END"


@dataclass(frozen=True)
class Slot:
    """As the server shows it."""

    name: str
    plugin: str
    database: str
    active_pid: int | None
    restart: int  # WAL from here on is kept for it
    confirmed: int  # what we said we have
    here: int  # where the server writes now
    status: str  # reserved, extended, unreserved, lost

    @property
    def held(self) -> int:
        return max(0, self.here - self.restart) if self.restart else 0

    @property
    def backlog(self) -> int:
        return max(0, self.here - self.confirmed) if self.confirmed else 0


def connect(s: CdcSettings, *, replication: bool = False) -> Any:
    """Raises SourceDown."""
    given = dict(s.address.options)
    given["options"] = f"{given.get('options') or ''} {SESSION}".strip()
    given["client_encoding"] = "UTF8"
    try:
        if replication:
            return psycopg2.connect(
                connection_factory=psycopg2.extras.LogicalReplicationConnection, **given
            )
        connection = psycopg2.connect(**given)
        connection.autocommit = True
        return connection
    except psycopg2.Error as e:
        said = str(e)
        if "replication" in said and ("must be superuser" in said or "permission denied" in said):
            raise _no_right(s) from None
        why = refusal(psycopg.OperationalError(said), s.address, "")
        raise SourceDown(f"source {s.source}: {why.message}", hint=why.hint) from None


def system(replication: Any) -> tuple[str, str]:
    """(the server's own identifier, the database)."""
    with replication.cursor() as words:
        words.execute("IDENTIFY_SYSTEM")
        found = words.fetchone()
    return str(found[0]), str(found[3])


def rows(connection: Any, statement: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
    """A % in a name is written %% (postgres_dsn.inline), with parameters or without."""
    with connection.cursor() as cursor:
        if parameters:
            cursor.execute(statement, parameters)
        else:
            cursor.execute(statement.replace("%%", "%"))
        return list(cursor.fetchall()) if cursor.description else []


def check(s: CdcSettings, connection: Any) -> None:
    """Can this server be read at all? Raises SourceDown with what to do."""
    if connection.server_version < OLDEST:
        raise SourceDown(
            f"source {s.source}: {s.address.label} runs PostgreSQL {connection.server_version // 10000}, and Penstock needs {OLDEST // 10000} or newer",
            hint="upgrade the server, or point the URL at a newer one",
        )
    level = rows(connection, "SHOW wal_level")[0][0]
    if level != "logical":
        raise SourceDown(
            f"source {s.source}: {s.address.label} has wal_level={level}, and changes can be read from its log only with wal_level=logical",
            hint="ALTER SYSTEM SET wal_level = logical and restart the server, or read the table itself: postgres+table://…",
        )
    for table in s.tables:
        if not rows(connection, "SELECT to_regclass(%s)", (table.quoted,))[0][0]:
            raise SourceDown(
                f"source {s.source}: there is no table {table.label} in {s.address.label}, or {_user(s)} may not see it",
                hint=f"create it, or name another one (table=…); GRANT USAGE ON SCHEMA {table.schema} TO {_user(s)} where that is missing",
            )


def warn_of_no_limit(s: CdcSettings, connection: Any) -> None:
    """The server's own guard holds even when no reader runs, and ours does not."""
    if (
        connection.server_version >= 130000
        and rows(connection, "SHOW max_slot_wal_keep_size")[0][0] == "-1"
    ):
        log.warning(
            "source %s: %s keeps WAL for a slot without any limit (max_slot_wal_keep_size = -1): a reader that stays away can fill its disk;"
            " ALTER SYSTEM SET max_slot_wal_keep_size = '10GB' sets one",
            s.source,
            s.address.label,
        )


# -- the publication -------------------------------------------------------------------------------


def ensure_publication(s: CdcSettings, connection: Any) -> None:
    """There, with these tables and operations, when this returns. Raises SourceDown."""
    found = rows(
        connection,
        "SELECT puballtables, pubinsert, pubupdate FROM pg_publication WHERE pubname=%s",
        (s.publication,),
    )
    if not found:
        return _create_publication(s, connection)
    everything, inserts, updates = found[0]
    listed = {
        (schema, name)
        for schema, name in rows(
            connection,
            "SELECT schemaname, tablename FROM pg_publication_tables WHERE pubname=%s",
            (s.publication,),
        )
    }
    missing = [
        table for table in s.tables if not everything and (table.schema, table.name) not in listed
    ]
    kinds = {"insert": inserts, "update": updates}
    unsaid = sorted(operation for operation in s.operations if not kinds[operation])
    if not missing and not unsaid:
        return None
    name = inline(s.publication)
    tables = ", ".join(table.inline for table in missing)
    change = (
        f"ALTER PUBLICATION {name} ADD TABLE {tables}"
        if missing
        else f"ALTER PUBLICATION {name} SET (publish = 'insert, update')"
    )
    what = f"table {missing[0].label}" if missing else unsaid[0] + "s"
    if not s.owned:
        raise SourceDown(
            f"source {s.source}: publication {s.publication} does not publish {what}", hint=change
        )
    try:
        if missing:
            rows(connection, f"ALTER PUBLICATION {name} ADD TABLE {tables}")
        if unsaid:
            rows(connection, f"ALTER PUBLICATION {name} SET (publish = 'insert, update')")
    except psycopg2.Error as e:
        raise SourceDown(
            f"source {s.source}: publication {s.publication} does not publish {what}: {said(s, e)}",
            hint=f"as its owner: {change}",
        ) from None
    return None


def _create_publication(s: CdcSettings, connection: Any) -> None:
    publish = ", ".join(sorted(s.operations))
    root = ", publish_via_partition_root = true" if connection.server_version >= 130000 else ""
    tables = ", ".join(table.inline for table in s.tables)
    statement = f"CREATE PUBLICATION {inline(s.publication)} FOR TABLE {tables} WITH (publish = '{publish}'{root})"
    try:
        rows(connection, statement)
    except psycopg2.errors.DuplicateObject:
        pass  # another reader was faster
    except psycopg2.Error as e:
        raise SourceDown(
            f"source {s.source}: there is no publication {s.publication}, and {_user(s)} could not make it: {said(s, e)}",
            hint=f"as the owner of the table: {statement}",
        ) from None


# -- the slot --------------------------------------------------------------------------------------


def look(s: CdcSettings, connection: Any) -> Slot | None:
    """None: there is no such slot."""
    found = listed(connection, "slot_name=%s", (s.slot,))
    return found[0] if found else None


def listed(
    connection: Any, where: str = "plugin='pgoutput'", parameters: Sequence[Any] = ()
) -> list[Slot]:
    status = "wal_status" if connection.server_version >= 130000 else "'reserved'"
    statement = (
        f"SELECT slot_name, coalesce(plugin, ''), coalesce(database, ''), active_pid, restart_lsn::text, confirmed_flush_lsn::text, ({_HERE})::text,"
        f" coalesce({status}, '') FROM pg_replication_slots WHERE {where} ORDER BY slot_name"
    )
    return [
        Slot(
            name,
            plugin,
            database,
            pid,
            lsn_of(restart or "0/0"),
            lsn_of(confirmed or "0/0"),
            lsn_of(here),
            state,
        )
        for name, plugin, database, pid, restart, confirmed, here, state in rows(
            connection, statement, parameters
        )
    ]


def refuse_unfit(s: CdcSettings, slot: Slot, database: str) -> None:
    """Raises SourceDown where the slot is not one that we could read."""
    if slot.plugin != "pgoutput" or slot.database != database:
        raise SourceDown(
            f"source {s.source}: slot {s.slot} belongs to {slot.plugin or 'physical replication'} in database {slot.database or '-'}, not to us",
            hint="give the source a slot of its own: slot=…",
        )
    if slot.status == "lost":
        raise SourceDown(
            f"source {s.source}: the server has thrown away WAL that slot {s.slot} still needed, so changes are lost to it",
            hint=f"penstock sources slots drop, then penstock sources reset {s.source} --to start (with snapshot = true the table is read again)",
        )


def create(s: CdcSettings, connection: Any) -> None:
    """Waits until the transactions that are open now have ended. Raises SourceDown."""
    try:
        rows(connection, "SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", (s.slot,))
    except psycopg2.errors.DuplicateObject:
        pass
    except psycopg2.Error as e:
        raise slot_refused(s, e) from None


def create_exporting(s: CdcSettings, replication: Any) -> str:
    """As `create`, and the name of a snapshot of that very moment; it holds until the connection is
    used again. Raises SourceDown.
    """
    try:
        with replication.cursor() as cursor:
            cursor.execute(
                f"CREATE_REPLICATION_SLOT {identifier(s.slot)} LOGICAL pgoutput EXPORT_SNAPSHOT"
            )
            return str(cursor.fetchone()[2])
    except psycopg2.Error as e:
        raise slot_refused(s, e) from None


def drop(s: CdcSettings, connection: Any) -> bool:
    """False: there was none. Raises SourceDown."""
    try:
        rows(connection, "SELECT pg_drop_replication_slot(%s)", (s.slot,))
        return True
    except psycopg2.errors.UndefinedObject:
        return False
    except psycopg2.errors.ObjectInUse as e:
        raise SourceDown(
            f"slot {s.slot} is being read: {said(s, e)}",
            hint="stop the reader first (penstock sources pause), then drop it",
        ) from None
    except psycopg2.Error as e:
        raise slot_refused(s, e) from None


def drop_publication(s: CdcSettings, connection: Any) -> bool:
    """Only one that we made."""
    if not s.owned or not rows(
        connection, "SELECT 1 FROM pg_publication WHERE pubname=%s", (s.publication,)
    ):
        return False
    try:
        rows(connection, f"DROP PUBLICATION {inline(s.publication)}")
    except psycopg2.Error as e:
        raise SourceDown(
            f"publication {s.publication} cannot be dropped: {said(s, e)}",
            hint=f"as its owner: DROP PUBLICATION {s.publication}",
        ) from None
    return True


# -- refusals --------------------------------------------------------------------------------------


def slot_refused(s: CdcSettings, e: psycopg2.Error) -> SourceDown:
    text = said(s, e)
    if e.pgcode == "42501" or "replication role" in text:
        return _no_right(s)
    if "all replication slots are in use" in text or e.pgcode == "53400":
        return SourceDown(
            f"source {s.source}: {s.address.label} has no replication slot left",
            hint="drop one that nobody reads (penstock sources slots ls shows them), or raise max_replication_slots",
        )
    return trouble(s, e)


def trouble(s: CdcSettings, e: psycopg2.Error) -> SourceDown:
    """What a server or a connection said while we read."""
    text = said(s, e)
    if e.pgcode == "55006":
        return SourceDown(
            f"source {s.source}: slot {s.slot} is read by somebody else: {text}",
            hint="it is tried again; where it is another deployment's reader, give this source a slot of its own (slot=…)",
            after=1.0,
        )
    if e.pgcode == "55000" and "slot" in text:
        return SourceDown(
            f"source {s.source}: slot {s.slot} cannot be read any more: {text}",
            hint=f"penstock sources slots drop, then penstock sources reset {s.source} --to start (with snapshot = true the table is read again)",
        )
    if e.pgcode == "42704" and "publication" in text:
        return SourceDown(
            f"source {s.source}: {text}; a slot needs its publication from before its own time on",
            hint=f"penstock sources slots drop, then penstock sources reset {s.source} --to start",
        )
    if "must be superuser" in text or "replication role" in text:
        return _no_right(s)
    return SourceDown(
        f"source {s.source}: {s.address.label}: {text}", hint="it is tried again by itself"
    )


def said(s: CdcSettings, e: BaseException) -> str:
    lines = str(e).strip().splitlines() or [type(e).__name__]
    return s.address.without_secrets(lines[0].removeprefix("ERROR:").removeprefix("FATAL:").strip())


def _user(s: CdcSettings) -> str:
    return str(s.address.options.get("user") or "the user")


def _no_right(s: CdcSettings) -> SourceDown:
    return SourceDown(
        f"source {s.source}: {_user(s)} has no right to replicate from {s.address.label}",
        hint=f"as a superuser: ALTER ROLE {_user(s)} REPLICATION (or, without it, postgres+table://…)",
    )


def key_columns(s: CdcSettings, connection: Any, table: Table) -> list[tuple[str, str]]:
    """(name, type) of the primary key's."""
    statement = (
        "SELECT a.attname, format_type(a.atttypid, a.atttypmod) FROM pg_index i CROSS JOIN LATERAL unnest(i.indkey) WITH ORDINALITY AS k(number, place)"
        " JOIN pg_attribute a ON a.attrelid=i.indrelid AND a.attnum=k.number WHERE i.indrelid=to_regclass(%s) AND i.indisprimary ORDER BY k.place"
    )
    return [(name, kind) for name, kind in rows(connection, statement, (table.quoted,))]


def columns(connection: Any, table: Table) -> list[tuple[str, int]]:
    statement = (
        "SELECT attname, atttypid::bigint FROM pg_attribute"
        " WHERE attrelid=to_regclass(%s) AND attnum>0 AND NOT attisdropped AND attgenerated='' ORDER BY attnum"
    )
    return [(name, oid) for name, oid in rows(connection, statement, (table.quoted,))]
