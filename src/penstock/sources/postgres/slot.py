"""Replication slot and publication on the server: check, create and drop them, explain errors."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
import psycopg2
import psycopg2.extras

from penstock.errors import SourceDown
from penstock.sources.postgres.pgoutput import lsn_of, lsn_text
from penstock.sources.postgres.position import Cursor, Reading
from penstock.sources.postgres.settings import (
    CdcSettings,
    TableName,
    TableSettings,
    identifier,
    inline,
)
from penstock.stores.postgres.url import OLDEST, refusal

log = logging.getLogger("penstock")
# Values are read as text, so the session sets their text format and does not depend on the
# server's defaults.
SESSION = (
    "-c datestyle=ISO -c timezone=UTC -c bytea_output=hex -c intervalstyle=iso_8601"
    " -c extra_float_digits=1 -c statement_timeout=0"
)
# Name and type of each column of a table's primary key.
KEY_COLUMNS = (
    "SELECT a.attname, format_type(a.atttypid, a.atttypmod) FROM pg_index i"
    " CROSS JOIN LATERAL unnest(i.indkey) WITH ORDINALITY AS k(number, place)"
    " JOIN pg_attribute a ON a.attrelid=i.indrelid AND a.attnum=k.number"
    " WHERE i.indrelid=to_regclass(%s) AND i.indisprimary ORDER BY k.place"
)
_CURRENT_LSN = (
    "CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_lsn() END"
)


@dataclass(frozen=True)
class Slot:
    """State of a replication slot, as pg_replication_slots shows it."""

    name: str
    plugin: str
    database: str
    active_pid: int | None
    restart: int  # the server keeps WAL from this LSN on
    confirmed: int  # LSN up to which the reader has confirmed changes
    current_lsn: int  # LSN at which the server writes now
    status: str  # reserved, extended, unreserved, lost

    @property
    def held(self) -> int:
        """Bytes of WAL that the server keeps for this slot."""
        return max(0, self.current_lsn - self.restart) if self.restart else 0

    @property
    def backlog(self) -> int:
        """Bytes of WAL that the reader has not confirmed."""
        return max(0, self.current_lsn - self.confirmed) if self.confirmed else 0


def connect(s: CdcSettings, *, replication: bool = False) -> Any:
    """Connect to the server. Raises SourceDown."""
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
        text = str(e)
        if "replication" in text and ("must be superuser" in text or "permission denied" in text):
            raise _no_replication_right(s) from None
        error = refusal(psycopg.OperationalError(text), s.address, "")
        raise SourceDown(f"source {s.source}: {error.message}", hint=error.hint) from None


def identify(replication: Any) -> tuple[str, str]:
    """Return the server's system identifier and the name of the database."""
    with replication.cursor() as cursor:
        cursor.execute("IDENTIFY_SYSTEM")
        found = cursor.fetchone()
    return str(found[0]), str(found[3])


def rows(connection: Any, statement: str, parameters: Sequence[Any] = ()) -> list[Any]:
    """Run a statement and return its rows.

    A % in an identifier must be written %% (`settings.inline`), with parameters or without.
    """
    with connection.cursor() as cursor:
        if parameters:
            cursor.execute(statement, parameters)
        else:
            cursor.execute(statement.replace("%%", "%"))
        return list(cursor.fetchall()) if cursor.description else []


def check(s: CdcSettings, connection: Any) -> None:
    """Check version, wal_level and tables of the server. Raises SourceDown."""
    if connection.server_version < OLDEST:
        raise SourceDown(
            f"source {s.source}: {s.address.label} runs PostgreSQL "
            f"{connection.server_version // 10000}, and Penstock needs {OLDEST // 10000} or newer",
            hint="upgrade the server, or change the URL to a newer server",
        )
    level = rows(connection, "SHOW wal_level")[0][0]
    if level != "logical":
        raise SourceDown(
            f"source {s.source}: {s.address.label} has wal_level={level}, and changes can be read "
            "from its log only with wal_level=logical",
            hint="ALTER SYSTEM SET wal_level = logical and restart the server, or read the table "
            "itself: postgres+table://…",
        )
    for table in s.tables:
        if not rows(connection, "SELECT to_regclass(%s)", (table.quoted,))[0][0]:
            raise SourceDown(
                f"source {s.source}: there is no table {table.label} in {s.address.label}, "
                f"or {_user(s)} may not see it",
                hint="create it, name another table (table=…), or "
                f"GRANT USAGE ON SCHEMA {table.schema} TO {_user(s)} if that right is missing",
            )


def warn_if_unlimited(s: CdcSettings, connection: Any) -> None:
    """Log a warning if the server does not limit the WAL of a slot.

    The server's limit also applies while no reader runs. `max_lag` does not.
    """
    if (
        connection.server_version >= 130000
        and rows(connection, "SHOW max_slot_wal_keep_size")[0][0] == "-1"
    ):
        log.warning(
            "source %s: %s keeps WAL for a slot without a limit (max_slot_wal_keep_size = -1), "
            "so the server's disk can fill up while no reader runs. "
            "To set a limit: ALTER SYSTEM SET max_slot_wal_keep_size = '10GB'",
            s.source,
            s.address.label,
        )


# -- the publication -------------------------------------------------------------------------------


def ensure_publication(s: CdcSettings, connection: Any) -> None:
    """Create or extend the publication so that it has all tables and operations of the source.

    Raises SourceDown if that is not possible.
    """
    found = rows(
        connection,
        "SELECT puballtables, pubinsert, pubupdate, pubdelete FROM pg_publication WHERE pubname=%s",
        (s.publication,),
    )
    if not found:
        _create_publication(s, connection)
        return
    everything, *flags = found[0]
    listed = rows(
        connection,
        "SELECT schemaname, tablename FROM pg_publication_tables WHERE pubname=%s",
        (s.publication,),
    )
    missing = [
        table for table in s.tables if not everything and (table.schema, table.name) not in listed
    ]
    published = {
        name for name, is_on in zip(("insert", "update", "delete"), flags, strict=True) if is_on
    }
    unpublished = sorted(s.operations - published)
    changes = [f"ADD TABLE {', '.join(table.inline for table in missing)}"] if missing else []
    wanted = ", ".join(sorted(s.operations | published))
    changes += [f"SET (publish = '{wanted}')"] if unpublished else []
    for change in changes:
        statement = f"ALTER PUBLICATION {inline(s.publication)} {change}"
        what = f"table {missing[0].label}" if missing else unpublished[0] + "s"
        lacks = f"source {s.source}: publication {s.publication} does not publish {what}"
        if not s.owned:
            raise SourceDown(lacks, hint=statement)
        try:
            rows(connection, statement)
        except psycopg2.Error as e:
            raise SourceDown(
                f"{lacks}: {error_text(s, e)}", hint=f"as its owner: {statement}"
            ) from None


def _create_publication(s: CdcSettings, connection: Any) -> None:
    publish = ", ".join(sorted(s.operations))
    root = ", publish_via_partition_root = true" if connection.server_version >= 130000 else ""
    tables = ", ".join(table.inline for table in s.tables)
    statement = (
        f"CREATE PUBLICATION {inline(s.publication)} FOR TABLE {tables}"
        f" WITH (publish = '{publish}'{root})"
    )
    try:
        rows(connection, statement)
    except psycopg2.errors.DuplicateObject:
        pass  # another reader has created it
    except psycopg2.Error as e:
        raise SourceDown(
            f"source {s.source}: there is no publication {s.publication}, and {_user(s)} "
            f"could not create it: {error_text(s, e)}",
            hint=f"as the owner of the table: {statement}",
        ) from None


# -- the slot --------------------------------------------------------------------------------------


def find(s: CdcSettings, connection: Any) -> Slot | None:
    """Return the source's slot, or None if it does not exist."""
    found = list_slots(connection, "slot_name=%s", (s.slot,))
    return found[0] if found else None


def find_created(s: CdcSettings, connection: Any) -> Slot:
    """Return the source's slot, which was just created. Raises SourceDown if it does not exist."""
    slot = find(s, connection)
    if slot is None:
        raise SourceDown(
            f"source {s.source}: slot {s.slot} was dropped while it was created",
            hint="try again",
            after=1.0,
        )
    return slot


def list_slots(
    connection: Any, where: str = "plugin='pgoutput'", parameters: Sequence[Any] = ()
) -> list[Slot]:
    """Return all slots that match the condition, by default those of Penstock's output plugin."""
    status = "wal_status" if connection.server_version >= 130000 else "'reserved'"
    statement = (
        "SELECT slot_name, coalesce(plugin, ''), coalesce(database, ''), active_pid,"
        f" restart_lsn::text, confirmed_flush_lsn::text, ({_CURRENT_LSN})::text,"
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
            lsn_of(current_lsn),
            state,
        )
        for name, plugin, database, pid, restart, confirmed, current_lsn, state in rows(
            connection, statement, parameters
        )
    ]


def check_usable(s: CdcSettings, slot: Slot, database: str) -> None:
    """Raise SourceDown if the source cannot read this slot."""
    if slot.plugin != "pgoutput" or slot.database != database:
        raise SourceDown(
            f"source {s.source}: slot {s.slot} belongs to "
            f"{slot.plugin or 'physical replication'} in database {slot.database or '-'}, "
            "not to Penstock",
            hint="name another slot for this source: slot=…",
        )
    if slot.status == "lost":
        raise SourceDown(
            f"source {s.source}: the server has discarded WAL that slot {s.slot} still needed, "
            "so changes are lost",
            hint="run `penstock sources slots drop`, then "
            f"`penstock sources reset {s.source} --to start` "
            "(with snapshot = true the table is read again)",
        )


def create(s: CdcSettings, connection: Any) -> None:
    """Create the slot, unless it exists. Raises SourceDown.

    The server waits until all transactions that are open now have ended.
    """
    try:
        rows(connection, "SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", (s.slot,))
    except psycopg2.errors.DuplicateObject:
        pass
    except psycopg2.Error as e:
        raise creation_error(s, e) from None


def create_exporting(s: CdcSettings, replication: Any) -> str:
    """Create the slot and return the name of a snapshot of exactly its start. Raises SourceDown.

    The snapshot is valid until the connection is used again. Like `create`, this waits until all
    transactions that are open now have ended.
    """
    try:
        with replication.cursor() as cursor:
            cursor.execute(
                f"CREATE_REPLICATION_SLOT {identifier(s.slot)} LOGICAL pgoutput EXPORT_SNAPSHOT"
            )
            return str(cursor.fetchone()[2])
    except psycopg2.Error as e:
        raise creation_error(s, e) from None


def drop(s: CdcSettings, connection: Any) -> bool:
    """Drop the slot. Return False if it did not exist. Raises SourceDown."""
    try:
        rows(connection, "SELECT pg_drop_replication_slot(%s)", (s.slot,))
        return True
    except psycopg2.errors.UndefinedObject:
        return False
    except psycopg2.errors.ObjectInUse as e:
        raise SourceDown(
            f"slot {s.slot} is being read: {error_text(s, e)}",
            hint="stop the reader first (`penstock sources pause`), then drop the slot",
        ) from None
    except psycopg2.Error as e:
        raise creation_error(s, e) from None


def drop_publication(s: CdcSettings, connection: Any) -> bool:
    """Drop the publication if Penstock owns it. Return whether it was dropped."""
    if not s.owned or not rows(
        connection, "SELECT 1 FROM pg_publication WHERE pubname=%s", (s.publication,)
    ):
        return False
    try:
        rows(connection, f"DROP PUBLICATION {inline(s.publication)}")
    except psycopg2.Error as e:
        raise SourceDown(
            f"publication {s.publication} cannot be dropped: {error_text(s, e)}",
            hint=f"as its owner: DROP PUBLICATION {s.publication}",
        ) from None
    return True


# -- the start of a reader -------------------------------------------------------------------------


def check_cursor(s: CdcSettings, session: Any, cursor: Cursor, system: str, database: str) -> None:
    """Check that the slot has the changes after the cursor, and extend the publication.

    Raises SourceDown, for example if the slot is missing, because changes are lost.
    """
    if cursor.system != system:
        raise SourceDown(
            f"source {s.source}: its position {lsn_text(cursor.lsn)} belongs to "
            f"another server than {s.address.label}",
            hint="change the URL back to the first server, or run "
            f"`penstock sources reset {s.source} --to start`",
        )
    slot = find(s, session)
    if slot is None:
        raise SourceDown(
            f"source {s.source}: slot {s.slot} does not exist any longer, so changes after "
            f"{lsn_text(cursor.lsn)} are lost",
            hint=f"run `penstock sources reset {s.source} --to start` to create a new slot "
            "(with snapshot = true the table is read again)",
        )
    check_usable(s, slot, database)
    # Otherwise new changes with an LSN below the cursor would be skipped as already read.
    if cursor.lsn > slot.current_lsn:
        raise SourceDown(
            f"source {s.source}: its position {lsn_text(cursor.lsn)} is ahead of "
            f"{s.address.label}, which is at {lsn_text(slot.current_lsn)}:"
            " the server was restored from a backup, or replaced by another server",
            hint=f"run `penstock sources reset {s.source} --to start` (or `--to now`)",
        )
    ensure_publication(s, session)


def first_start(
    s: CdcSettings, session: Any, replication: Any, system: str, database: str
) -> tuple[Cursor, str | None]:
    """Create the publication and the slot, unless they exist. Raises SourceDown.

    Return the cursor at the start of the slot, and the name of the snapshot that a new slot
    exported, or None.
    """
    exported = None
    slot = find(s, session)
    # Before the slot: a slot cannot use a publication that was created after it.
    ensure_publication(s, session)
    if slot is None:
        warn_if_unlimited(s, session)
        if s.snapshot:
            exported = create_exporting(s, replication)
        else:
            create(s, session)
        slot = find_created(s, session)
    check_usable(s, slot, database)
    reading = Reading(0, None) if s.snapshot else None
    return Cursor(system, slot.confirmed, 0, reading), exported


# -- errors ----------------------------------------------------------------------------------------


def creation_error(s: CdcSettings, e: psycopg2.Error) -> SourceDown:
    text = error_text(s, e)
    if e.pgcode == "42501" or "replication role" in text:
        return _no_replication_right(s)
    if "all replication slots are in use" in text or e.pgcode == "53400":
        return SourceDown(
            f"source {s.source}: {s.address.label} has no replication slot left",
            hint="drop an unused slot (`penstock sources slots ls` shows them), "
            "or raise max_replication_slots",
        )
    return read_error(s, e)


def read_error(s: CdcSettings, e: psycopg2.Error) -> SourceDown:
    """Return the error for a failure while the slot is read."""
    text = error_text(s, e)
    if e.pgcode == "55006":
        return SourceDown(
            f"source {s.source}: slot {s.slot} is being read by another client: {text}",
            hint="it is retried automatically. If the client belongs to another deployment, "
            "name another slot for this source (slot=…)",
            after=1.0,
        )
    if e.pgcode == "55000" and "slot" in text:
        return SourceDown(
            f"source {s.source}: slot {s.slot} can no longer be read: {text}",
            hint="run `penstock sources slots drop`, then "
            f"`penstock sources reset {s.source} --to start` "
            "(with snapshot = true the table is read again)",
        )
    if e.pgcode == "42704" and "publication" in text:
        return SourceDown(
            f"source {s.source}: {text} (a slot can only use a publication that existed before it)",
            hint="run `penstock sources slots drop`, then "
            f"`penstock sources reset {s.source} --to start`",
        )
    if "must be superuser" in text or "replication role" in text:
        return _no_replication_right(s)
    return SourceDown(
        f"source {s.source}: {s.address.label}: {text}", hint="it is retried automatically"
    )


def error_text(s: CdcSettings | TableSettings, e: BaseException) -> str:
    """Return the first line of the server's message, without secrets."""
    lines = str(e).strip().splitlines() or [type(e).__name__]
    return s.address.without_secrets(lines[0].removeprefix("ERROR:").removeprefix("FATAL:").strip())


def _user(s: CdcSettings) -> str:
    return str(s.address.options.get("user") or "the user")


def _no_replication_right(s: CdcSettings) -> SourceDown:
    return SourceDown(
        f"source {s.source}: {_user(s)} has no right to replicate from {s.address.label}",
        hint=f"as a superuser: ALTER ROLE {_user(s)} REPLICATION "
        "(or use postgres+table://…, which does not need it)",
    )


def columns(connection: Any, table: TableName) -> list[tuple[str, int]]:
    """Return (name, type oid) of each column, without generated columns."""
    statement = (
        "SELECT attname, atttypid::bigint FROM pg_attribute"
        " WHERE attrelid=to_regclass(%s) AND attnum>0 AND NOT attisdropped AND attgenerated=''"
        " ORDER BY attnum"
    )
    return rows(connection, statement, (table.quoted,))
