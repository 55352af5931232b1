"""A new database for each test, a source over one of its tables, and its findings."""

from __future__ import annotations

import contextlib
import random
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

from penstock.authoring.pipeline import Pipeline, SourceSpec
from penstock.clock import SystemClock
from penstock.config import files as configuration
from penstock.errors import SourceDown
from penstock.fetching.source_client import SourceWeb
from penstock.ports import Batch, Finding
from penstock.sources.base import SourceContext
from penstock.sources.postgres import open_source

TABLE = "CREATE TABLE scrape_requests(id bigserial PRIMARY KEY, url text NOT NULL, note text)"


class Rig:
    """A database and a source. `accept` records ids and the cursor together, as the ledger does."""

    def __init__(self, url: str, directory: Path, kind: str) -> None:
        self.server, self.directory, self.kind = url, directory, kind
        self.database = f"test_{secrets.token_hex(6)}"
        self.url = url.rpartition("/")[0] + "/" + self.database
        self.cursor: bytes | None = None
        self.accepted: dict[str, Finding] = {}
        self.repeated = 0
        self.admin = psycopg.connect(url, autocommit=True)
        self.admin.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(self.database)))
        self.db = psycopg.connect(self.url, autocommit=True)
        self.run(TABLE)

    def reconnect(self) -> None:
        """Connect again after a restart of the server."""
        self.admin.close()
        self.db.close()
        self.admin, self.db = (
            psycopg.connect(self.server, autocommit=True),
            psycopg.connect(self.url, autocommit=True),
        )

    def run(self, statement: str, *parameters: Any) -> list[Any]:
        done = self.db.execute(statement, parameters or None)
        return done.fetchall() if done.description else []

    def insert(self, *urls: str) -> None:
        with self.db.transaction():
            for url in urls:
                self.run("INSERT INTO scrape_requests(url) VALUES(%s)", url)

    def spec(self, **options: Any) -> SourceSpec:
        pipeline = Pipeline("shop")
        scheme, _, rest = self.url.partition(":")
        pipeline.source(f"{scheme}+{self.kind}:{rest}", **{"name": self.database, **options})
        return pipeline.sources[0]

    def source(self, **options: Any) -> Any:
        config = configuration.load({"state.dir": str(self.directory)}, {}, self.directory).config
        return open_source(
            self.spec(**options),
            SourceContext(config, SystemClock(), random.Random(1), SourceWeb(), self.directory),
        )

    @contextlib.asynccontextmanager
    async def reading(self, **options: Any) -> Any:
        """Yield the batches of the source, starting at the cursor."""
        batches = self.source(**options).read(self.cursor)
        try:
            yield batches
        finally:
            await batches.aclose()

    def accept(self, batch: Batch) -> None:
        for finding in batch.findings:
            self.repeated += finding.id in self.accepted
            self.accepted[finding.id] = finding
        if batch.cursor is not None:
            self.cursor = batch.cursor

    async def until(
        self, batches: AsyncGenerator[Batch, None], holds: Callable[..., object]
    ) -> Batch:
        """Accept batches until `holds()` is true. Return the last accepted batch.

        The generator is not resumed after that batch.
        """
        async for batch in batches:
            self.accept(batch)
            if holds():
                return batch
        raise AssertionError("the source ended")

    async def ready(self, batches: AsyncGenerator[Batch, None]) -> None:
        """Read until there is a cursor. All later changes will be read."""
        await self.until(batches, lambda: self.cursor is not None)

    async def idle(self, batches: AsyncGenerator[Batch, None]) -> None:
        async for batch in batches:
            self.accept(batch)
            if batch.idle:
                return
        raise AssertionError("the source ended")

    @property
    def urls(self) -> list[str]:
        return [finding.payload["url"] for finding in self.accepted.values()]

    @property
    def slot(self) -> str:
        return f"penstock_{self.database}"

    def slot_row(self, what: str = "confirmed_flush_lsn") -> Any:
        found = self.admin.execute(
            f"SELECT {what} FROM pg_replication_slots WHERE slot_name=%s", (self.slot,)
        ).fetchall()
        return found[0][0] if found else None

    def when(self, holds: Callable[..., object], what: str) -> None:
        """Wait until `holds()` is true, for changes made by the server or the reader's thread."""
        for _ in range(600):
            if holds():
                return
            time.sleep(0.05)
        raise AssertionError(f"never: {what}")

    def close(self) -> None:
        self.db.close()
        if self.admin.closed:
            self.admin = psycopg.connect(self.server, autocommit=True)
        self.admin.execute(
            (
                "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots "
                "WHERE database=%s AND active"
            ),
            (self.database,),
        )
        for _ in range(1200):  # the server notices late that a reader has ended
            with contextlib.suppress(psycopg.errors.ObjectInUse):
                self.admin.execute(
                    (
                        "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots "
                        "WHERE database=%s"
                    ),
                    (self.database,),
                )
                break
            time.sleep(0.05)
        self.admin.execute(
            sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(self.database))
        )
        self.admin.close()


def made(url: str, directory: Path, kind: str) -> Iterator[Rig]:
    rig = Rig(url, directory, kind)
    try:
        yield rig
    finally:
        rig.close()


async def refused(batches: AsyncGenerator[Batch, None]) -> SourceDown:
    try:
        async for _ in batches:
            pass
    except SourceDown as e:
        return e
    raise AssertionError("the source ended without an error")
