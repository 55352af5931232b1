"""What shared SQL asks of the store it runs on: transactions with statements that SQLite and
PostgreSQL both understand, and who commits them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from penstock.ports import Durability, Lock, Transaction

T = TypeVar("T")


class Rows(Protocol):
    """What a statement answers; SQL knows the types, Python cannot."""

    @property
    def get(self) -> Any:
        """The only value of the first row, or the row, or None."""

    def fetchall(self) -> list[Any]: ...
    def __iter__(self) -> Iterator[Any]: ...


class Tx(Protocol):
    """What `work(tx)` is given: statements inside one transaction, with `?` or `?1` for bindings."""

    def execute(self, sql: str, bindings: Any = ..., /) -> Rows: ...
    def executemany(self, sql: str, rows: Any, /) -> Any: ...
    def each(self, sql: str, rows: Sequence[Any], /) -> list[bool]:
        """As executemany, for a statement that changes one row or none. Which of them changed one?"""

    def changes(self) -> int: ...
    def last_insert_rowid(self) -> int: ...
    def cursor(self) -> Any: ...


class SqlStore(Protocol):
    """A ports.Store whose transactions are SQL."""

    @property
    def path(self) -> str:
        """Its name in messages; holds no password."""

    @property
    def durability(self) -> str:
        """`full` survives a power cut, `process` a killed process."""

    @property
    def file(self) -> Path | None:
        """Where it lies on this machine; None for a server."""

    @property
    def pipelined(self) -> bool:
        """Does an answer take a round trip, so that asking for many at once pays?"""

    @property
    def rollbacks(self) -> int:
        """How many there were: what was remembered about rows may be wrong after one."""

    def part(self, name: str, version: int, schema: str) -> None:
        """Create or check one adapter's tables. A newer version than ours is refused, never
        touched.
        """

    def before_commit(self, work: Callable[[], object], /) -> None:
        """Called by a job: `work` runs where blocking does not hurt, after the jobs and before
        their COMMIT.
        """

    async def write(
        self, work: Callable[[Tx], T], *, durable: bool = True, synced: bool = False
    ) -> T:
        """`synced` survives a power cut whatever the durability: for notes about files that were
        synced themselves.
        """

    def write_now(self, work: Callable[[Tx], T], *, durable: bool = True) -> T:
        """For commands without a loop, and before one runs."""

    async def read(self, work: Callable[[Tx], T]) -> T: ...

    def read_now(self, work: Callable[[Tx], T]) -> T: ...

    def moment(self, work: Callable[[Tx], T]) -> T:
        """As read_now, with all that `work` reads from one moment."""

    def lock(self, path: Path) -> Lock:
        """Held by one process at a time of all that share this store, on whatever machine; `path`
        is its file on this one, and its name.
        """

    def check(self) -> list[str]:
        """Integrity, in sentences; [] is good."""

    async def close(self) -> None: ...

    def close_now(self) -> None: ...


class SqlUnitOfWork:
    """Transactions of an SQL store, with tables that `bind` makes for each."""

    def __init__(self, store: SqlStore, bind: Callable[[Tx], Transaction]) -> None:
        self._store, self._bind = store, bind

    async def write(
        self,
        work: Callable[[Transaction], T],
        *,
        durability: Durability = Durability.CONFIGURED,
    ) -> T:
        return await self._store.write(
            lambda sql: work(self._bind(sql)),
            durable=durability is not Durability.RELAXED,
            synced=durability is Durability.FSYNC,
        )

    async def read(self, work: Callable[[Transaction], T]) -> T:
        return await self._store.read(lambda sql: work(self._bind(sql)))

    def write_now(self, work: Callable[[Transaction], T]) -> T:
        return self._store.write_now(lambda sql: work(self._bind(sql)))

    def snapshot(self, work: Callable[[Transaction], T]) -> T:
        return self._store.moment(lambda sql: work(self._bind(sql)))


class HolderTable:
    """Holders of the fleet's locks, inside one transaction."""

    def __init__(self, tx: Tx) -> None:
        self._tx = tx

    def holder(self, name: str) -> str | None:
        token: str | None = self._tx.execute("SELECT token FROM holder WHERE name=?", (name,)).get
        return token
