"""Argument of each adapter's `open_*` function: the configuration, the clock, and the open stores.

Each store is opened once and shared.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.config.schema import Config
from penstock.errors import ConfigError
from penstock.ports import Clock
from penstock.stores.migrations.upgrade import upgrade_file
from penstock.stores.sql import SqlStore
from penstock.stores.sqlite import Database

if TYPE_CHECKING:
    from penstock.stores.postgres.store import PostgresStore


class Context:
    def __init__(
        self,
        config: Config,
        clock: Clock,
        rng: random.Random,
        *,
        worker: str,
        inline: bool = False,
        upgrade: bool = True,
    ) -> None:
        """Without `upgrade`, an SQLite file of an older version is opened and not migrated."""
        self.upgrade = upgrade
        self.config, self.clock, self.rng, self.worker, self.inline = (
            config,
            clock,
            rng,
            worker,
            inline,
        )
        self._databases: dict[str, Database] = {}
        self._servers: dict[str, PostgresStore] = {}

    def database(self, url: str) -> Database:
        """Return the store of an SQLite file.

        Adapters that name the same file share its one writing connection. So they can commit in one
        transaction.
        """
        path = url.removeprefix("sqlite:").removeprefix("//")
        if not path:
            raise ConfigError(
                f"{url!r} does not name a file",
                hint="write it as sqlite:/var/lib/penstock/penstock.db",
            )
        key = path if path == ":memory:" else str(Path(path).absolute())
        if key not in self._databases:
            self._databases[key] = db = Database(
                key, durability=self.config.durability, inline=self.inline
            )
            if self.upgrade:
                upgrade_file(db, self.config.state.dir / "workers")
        return self._databases[key]

    def server(self, url: str) -> PostgresStore:
        """Return the store of a PostgreSQL database.

        Adapters that name the same database share its connections. So they can commit in one
        transaction.
        """
        from penstock.stores.postgres.store import PostgresStore  # needs an optional dependency

        if url not in self._servers:
            namespace = self.config.namespace or "penstock"
            self._servers[url] = PostgresStore(
                url, namespace=namespace, durability=self.config.durability, inline=self.inline
            )
        return self._servers[url]

    def store(self, url: str) -> SqlStore:
        """Return the store on which shared SQL runs: PostgreSQL or SQLite, by the URL's scheme."""
        return (
            self.server(url) if url.startswith(("postgres:", "postgresql:")) else self.database(url)
        )

    @property
    def opened(self) -> list[SqlStore]:
        """The stores that are open."""
        return [*self._databases.values(), *self._servers.values()]

    def close(self) -> None:
        for store in self.opened:
            store.close_now()
