"""Source for inserts and updates of PostgreSQL tables, read by logical decoding.

See `slot_reader` for the thread that reads the replication slot.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, TypeVar

import psycopg2

from penstock.authoring.pipeline import SourceSpec
from penstock.errors import SourceDown, UsageError
from penstock.model import mint
from penstock.ports import Batch, Finding, SlotInfo
from penstock.sources.base import BaseSource, SourceContext
from penstock.sources.postgres import pgoutput
from penstock.sources.postgres import slot as server
from penstock.sources.postgres.pgoutput import lsn_of, lsn_text
from penstock.sources.postgres.position import Cursor
from penstock.sources.postgres.settings import CdcSettings, as_text, identifier
from penstock.sources.postgres.slot_reader import SlotReader
from penstock.sources.postgres.snapshot import OPERATIONS, row_of_change

T = TypeVar("T")
IDLE_REPORT_INTERVAL = 1.0  # seconds without a change after which an empty batch is yielded


class CdcSource(BaseSource):
    def __init__(self, spec: SourceSpec, context: SourceContext, settings: CdcSettings) -> None:
        super().__init__(spec, context)
        self.settings = settings
        self._spill = context.config.state.dir / "sources" / f"{settings.slot}.spill"

    async def read(self, cursor: bytes | None) -> AsyncGenerator[Batch, None]:
        reader = SlotReader(
            self.settings, None if cursor is None else Cursor.decode(cursor, self.name), self._spill
        )
        reader.start()
        try:
            while True:
                chunk = await reader.queue.next(IDLE_REPORT_INTERVAL)
                if chunk is None:
                    yield Batch(
                        idle=reader.caught_up,
                        lag=0.0 if reader.caught_up else None,
                        backlog=reader.backlog,
                    )
                    continue
                lag = (
                    None
                    if chunk.committed_at is None
                    else max(0.0, self.context.clock.now() - chunk.committed_at)
                )
                yield Batch(
                    findings=chunk.findings,
                    cursor=None if chunk.cursor is None else chunk.cursor.encode(),
                    lag=lag,
                    backlog=reader.backlog,
                )
                reader.queue.accept(chunk)
        finally:
            await asyncio.shield(asyncio.to_thread(reader.stop))

    async def preview(self, cursor: bytes | None, limit: int) -> Sequence[Finding]:
        """Return unread changes of the slot, or existing rows as if they were inserted now.

        Existing rows are returned if there are no unread changes, if the slot does not exist, or
        if a client is reading it.
        """
        return await self._with_session(
            lambda session: self._unread(session, limit) or self._sample(session, limit)
        )

    async def place(self, to: str) -> bytes:
        return await self._with_session(lambda session: self._cursor_for(session, to).encode())

    def describe(self, cursor: bytes | None) -> str:
        if cursor is None:
            return (
                "at the start: "
                + ("existing rows, then " if self.settings.snapshot else "")
                + "changes from now on"
            )
        try:
            return str(Cursor.decode(cursor, self.name))
        except SourceDown as e:
            return e.message

    # -- for `penstock sources slots` --------------------------------------------------------------

    async def slots(self) -> Sequence[SlotInfo]:
        """Return all slots with Penstock's output plugin on the server, this source's first."""
        found = await self._with_session(
            lambda session: [self._slot_info(slot) for slot in server.list_slots(session)]
        )
        return sorted(found, key=lambda slot: not slot.own)

    async def create_slot(self) -> SlotInfo:
        """Create the slot and its publication, unless they exist, and return the slot."""

        def create(session: Any) -> SlotInfo:
            server.check(self.settings, session)
            server.ensure_publication(self.settings, session)
            server.create(self.settings, session)
            return self._slot_info(server.find_created(self.settings, session))

        return await self._with_session(create)

    async def drop_slot(self) -> bool:
        """Drop the slot, and the publication if Penstock owns it. Return False if none existed."""

        def drop(session: Any) -> bool:
            dropped = server.drop(self.settings, session)
            return server.drop_publication(self.settings, session) or dropped

        return await self._with_session(drop)

    def _slot_info(self, slot: server.Slot) -> SlotInfo:
        return SlotInfo(
            name=slot.name,
            own=slot.name == self.settings.slot,
            active=slot.active_pid is not None,
            position=lsn_text(slot.confirmed),
            behind=slot.backlog,
            held=slot.held,
            status=slot.status,
        )

    # -- on another thread -------------------------------------------------------------------------

    async def _with_session(self, work: Callable[[Any], T]) -> T:
        """Run `work` on another thread, with a connection.

        Raises SourceDown if the server refuses the connection or a statement.
        """

        def run() -> T:
            with contextlib.closing(server.connect(self.settings)) as session:
                return work(session)

        try:
            return await asyncio.to_thread(run)
        except psycopg2.Error as e:
            raise server.read_error(self.settings, e) from None

    def _unread(self, session: Any, limit: int) -> list[Finding]:
        server.check(self.settings, session)
        slot = server.find(self.settings, session)
        if slot is None or slot.active_pid is not None:
            return []
        statement = (
            "SELECT data FROM pg_logical_slot_peek_binary_changes"
            "(%s, NULL, %s, 'proto_version', '1', 'publication_names', %s)"
        )
        decoder, found = pgoutput.Decoder(), []
        max_messages = 10 * limit + 50  # more than `limit`, because not every message is a row
        for (data,) in server.rows(
            session,
            f"{statement} LIMIT {max_messages}",
            (self.settings.slot, limit, identifier(self.settings.publication)),
        ):
            change = decoder.decode(bytes(data))
            if isinstance(change, pgoutput.Insert | pgoutput.Update | pgoutput.Delete):
                operation = OPERATIONS[type(change)]
                if operation in self.settings.operations:
                    found.append(
                        _example(
                            change.relation.label,
                            row_of_change(change),
                            operation,
                            f"{change.relation.label}: unread {operation} in the slot",
                        )
                    )
        return found[:limit]

    def _sample(self, session: Any, limit: int) -> list[Finding]:
        found: list[Finding] = []
        for table in self.settings.tables:
            names = server.columns(session, table)
            selected = as_text(name for name, _ in names)
            statement = f"SELECT {selected} FROM {table.inline} LIMIT {limit - len(found)}"
            cause = f"{table.label}: existing row, as if it were inserted now"
            found += [
                _example(table.label, pgoutput.row_of(names, row), "insert", cause)
                for row in server.rows(session, statement)
            ]
        return found

    def _cursor_for(self, session: Any, to: str) -> Cursor:
        if to != "now" and not re.fullmatch(r"[0-9A-Fa-f]+/[0-9A-Fa-f]+", to):
            raise UsageError(
                f"source {self.name} has no position {to!r}",
                hint="use `--to start`, `--to now`, or an LSN such as 0/16B3748",
            )
        slot = server.find(self.settings, session)
        if slot is None:
            raise UsageError(
                f"source {self.name}: there is no slot {self.settings.slot}, "
                "so only future changes can be read",
                hint="use `--to start`, which creates the slot",
            )
        lsn = slot.current_lsn if to == "now" else lsn_of(to)
        if not slot.confirmed <= lsn <= slot.current_lsn:
            raise UsageError(
                f"source {self.name}: the slot keeps changes from {lsn_text(slot.confirmed)} to "
                f"{lsn_text(slot.current_lsn)}, and {to} is not in that range",
                hint="use `--to now`, or an LSN in that range",
            )
        with contextlib.closing(server.connect(self.settings, replication=True)) as replication:
            return Cursor(server.identify(replication)[0], lsn, 0)


def _example(table: str, row: dict[str, Any], operation: str, cause: str) -> Finding:
    return Finding(
        id=mint("cdc", "example", cause, repr(row)),
        cause=cause,
        payload={**row, "_cdc": {"op": operation, "table": table}},
    )
