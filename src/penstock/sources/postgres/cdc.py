"""Inserts and updates of PostgreSQL tables as findings, read from the server's log by its own
logical decoding. How the log is read is in postgres_feed.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Sequence
from typing import Any

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
from penstock.sources.postgres.settings import CdcSettings, identifier, inline
from penstock.sources.postgres.slot_reader import Feed

PATIENCE = 1.0  # seconds without a change after which a word is given all the same


class CdcSource(BaseSource):
    def __init__(self, spec: SourceSpec, context: SourceContext, settings: CdcSettings) -> None:
        super().__init__(spec, context)
        self.settings = settings
        self._spill = context.config.state.dir / "sources" / f"{settings.slot}.spill"

    async def read(self, cursor: bytes | None) -> AsyncGenerator[Batch, None]:
        feed = Feed(
            self.settings, None if cursor is None else Cursor.decode(cursor, self.name), self._spill
        )
        feed.start()
        try:
            while True:
                piece = await feed.next(PATIENCE)
                if piece is None:
                    yield Batch(
                        idle=feed.caught_up,
                        lag=0.0 if feed.caught_up else None,
                        backlog=feed.backlog,
                    )
                    continue
                lag = None if piece.at is None else max(0.0, self.context.clock.now() - piece.at)
                yield Batch(
                    findings=piece.findings,
                    cursor=None if piece.cursor is None else piece.cursor.encode(),
                    lag=lag,
                    backlog=feed.backlog,
                )
                feed.accept(piece)
        finally:
            await asyncio.shield(asyncio.to_thread(feed.stop))

    async def preview(self, cursor: bytes | None, limit: int) -> Sequence[Finding]:
        """What waits in the slot; where nothing does (or there is no slot yet), rows that are
        there, as they would come if they were inserted now.
        """
        return await asyncio.to_thread(
            self._asked, lambda side: self._waiting(side, limit) or self._sample(side, limit)
        )

    async def place(self, to: str) -> bytes:
        return await asyncio.to_thread(self._asked, lambda side: self._placed(side, to).encode())

    def describe(self, cursor: bytes | None) -> str:
        if cursor is None:
            return (
                "at the start: "
                + ("the rows that are there, then " if self.settings.snapshot else "")
                + "what changes from now on"
            )
        try:
            return str(Cursor.decode(cursor, self.name))
        except SourceDown as e:
            return e.message

    # -- for `penstock sources slots` --------------------------------------------------------------

    async def slots(self) -> Sequence[SlotInfo]:
        """Every slot of this kind on the server, ours first."""

        def own_first(slot: server.Slot) -> bool:
            return slot.name != self.settings.slot

        return await asyncio.to_thread(
            self._asked,
            lambda side: [self._told(slot) for slot in sorted(server.listed(side), key=own_first)],
        )

    async def create_slot(self) -> SlotInfo:
        """With its publication; one that is there stays."""

        def create(side: Any) -> SlotInfo:
            server.check(self.settings, side)
            server.ensure_publication(self.settings, side)
            server.create(self.settings, side)
            found = server.look(self.settings, side)
            if found is None:
                raise SourceDown(
                    f"slot {self.settings.slot} was dropped while it was made", hint="try again"
                )
            return self._told(found)

        return await asyncio.to_thread(self._asked, create)

    async def drop_slot(self) -> bool:
        """And the publication, where it is ours. False: there was none."""

        def drop(side: Any) -> bool:
            dropped = server.drop(self.settings, side)
            return server.drop_publication(self.settings, side) or dropped

        return await asyncio.to_thread(self._asked, drop)

    def _told(self, slot: server.Slot) -> SlotInfo:
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

    def _asked(self, work: Any) -> Any:
        side = server.connect(self.settings)
        try:
            return work(side)
        except psycopg2.Error as e:
            raise server.trouble(self.settings, e) from None
        finally:
            side.close()

    def _waiting(self, side: Any, limit: int) -> list[Finding]:
        server.check(self.settings, side)
        slot = server.look(self.settings, side)
        if slot is None or slot.active_pid is not None:
            return []
        statement = "SELECT data FROM pg_logical_slot_peek_binary_changes(%s, NULL, %s, 'proto_version', '1', 'publication_names', %s)"
        decoder, found = pgoutput.Decoder(), []
        most = 10 * limit + 50  # messages; not every one is a row
        for (data,) in server.rows(
            side,
            f"{statement} LIMIT {most}",
            (self.settings.slot, limit, identifier(self.settings.publication)),
        ):
            change = decoder.decode(bytes(data))
            if isinstance(change, pgoutput.Insert | pgoutput.Update):
                operation = "insert" if isinstance(change, pgoutput.Insert) else "update"
                if operation in self.settings.operations:
                    found.append(
                        _example(
                            change.relation.label,
                            change.row,
                            operation,
                            f"{change.relation.label}: {operation} that waits in the slot",
                        )
                    )
        return found[:limit]

    def _sample(self, side: Any, limit: int) -> list[Finding]:
        found: list[Finding] = []
        for table in self.settings.tables:
            names = server.columns(side, table)
            told = ", ".join(f"{inline(name)}::text" for name, _ in names)
            for row in server.rows(
                side, f"SELECT {told} FROM {table.inline} LIMIT {limit - len(found)}"
            ):
                values = {
                    name: pgoutput.value(oid, text)
                    for (name, oid), text in zip(names, row, strict=True)
                }
                found.append(
                    _example(
                        table.label,
                        values,
                        "insert",
                        f"{table.label}: a row that is there, as if it were inserted now",
                    )
                )
        return found

    def _placed(self, side: Any, to: str) -> Cursor:
        slot = server.look(self.settings, side)
        here = (
            slot.here
            if slot is not None
            else lsn_of(server.rows(side, "SELECT pg_current_wal_lsn()::text")[0][0])
        )
        if to != "now" and not re.fullmatch(r"[0-9A-Fa-f]+/[0-9A-Fa-f]+", to):
            raise UsageError(
                f"source {self.name} has no position {to!r}",
                hint="--to start, now, or an LSN such as 0/16B3748",
            )
        lsn = here if to == "now" else lsn_of(to)
        if slot is None:
            raise UsageError(
                f"source {self.name}: there is no slot {self.settings.slot}, so only what comes can be read",
                hint="--to start makes the slot",
            )
        if lsn < slot.confirmed or lsn > here:
            raise UsageError(
                f"source {self.name}: the slot keeps changes from {lsn_text(slot.confirmed)} to {lsn_text(here)}, and {to} is not between the two",
                hint="--to now, or an LSN there",
            )
        replication = server.connect(self.settings, replication=True)
        try:
            return Cursor(server.system(replication)[0], lsn, 0)
        finally:
            replication.close()


def _example(table: str, row: dict[str, Any], operation: str, cause: str) -> Finding:
    return Finding(
        id=mint("cdc", "example", cause, repr(row)),
        cause=cause,
        payload={**row, "_cdc": {"op": operation, "table": table}},
    )
