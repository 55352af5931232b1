"""Lock for the whole fleet: a file lock on this machine and an advisory lock on the server.

A token in the database names the last holder. Transactions under the lock check it.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg

from penstock.locks import FileLock, Lost
from penstock.ports import Transaction

if TYPE_CHECKING:
    from penstock.stores.postgres.store import PostgresStore

SCHEMA = "CREATE TABLE holder(name TEXT PRIMARY KEY, token TEXT NOT NULL)"
_TAKEN = "INSERT INTO holder VALUES(?,?) ON CONFLICT(name) DO UPDATE SET token=excluded.token"


class FleetLock:
    """Implements locks.Lock.

    The advisory lock has its own connection. So the server releases the lock when the process or
    the machine has stopped.

    If the network fails without an error, a holder may learn too late that it lost the lock. So
    each new holder writes a token into the database. A transaction under the lock commits only if
    the token is still the holder's.
    """

    shared = True

    def __init__(self, store: PostgresStore, path: Path) -> None:
        store.part("holder", SCHEMA)
        self.path, self.name = path, path.stem
        self._store = store
        self._file = FileLock(path)
        self._wire = store.wire()
        self._one = threading.Lock()  # the connection serves a single thread at a time
        self._key = int.from_bytes(
            blake2b(
                f"{store.namespace}\0{self.name}".encode(), digest_size=8, person=b"penstock"
            ).digest(),
            "big",
            signed=True,
        )
        self._token = ""

    @property
    def held(self) -> bool:
        """True as far as this process knows. Detects a connection that the server has closed."""
        return bool(self._token) and self._file.held and self._wire.is_fresh

    @property
    def here(self) -> bool:
        return self._file.held

    async def take(self) -> bool:
        # Only one process of a machine requests the lock from the server.
        if not self._file.try_acquire():
            return False
        if self.held:
            return True
        self._token = ""
        if not await asyncio.to_thread(self._try):
            return False
        token = secrets.token_hex(8)
        await self._store.write(lambda tx: tx.execute(_TAKEN, (self.name, token)))
        self._token = token
        return True

    def _try(self) -> bool:
        with self._one:
            if not self._file.held:  # released while this call waited for its thread
                return False
            try:
                if not self._wire.is_fresh:
                    self._wire.open()
                return bool(self._wire.execute("SELECT pg_try_advisory_lock(?)", (self._key,)).get)
            except psycopg.Error as e:
                self._wire.close()
                raise self._store.outage(e, "cannot be asked for a lock") from e

    def verify(self, tx: Transaction) -> None:
        if not self._token or tx.locks.holder(self.name) != self._token:
            raise Lost(self.name)

    def lose(self) -> None:
        self._token = ""
        with self._one:
            self._wire.close()

    def note(self, text: str) -> None:
        self._file.note(text)

    def status(self) -> str:
        return self._file.status()

    def release(self) -> None:
        self.lose()
        self._file.release()
