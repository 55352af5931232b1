"""Interface of a store for shared SQL, whose statements SQLite and PostgreSQL accept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from penstock.ports import Durability, Lock, Transaction

if TYPE_CHECKING:
    from penstock.stores.migrations.other_workers import OtherWorker
    from penstock.stores.migrations.versions import StoreVersion

T = TypeVar("T")


class Rows(Protocol):
    """Result rows of a statement. The values are Any: their types are only known in SQL."""

    @property
    def get(self) -> Any:
        """The first row, its value if it has one column, or None if there is no row."""

    def fetchall(self) -> list[Any]: ...
    def __iter__(self) -> Iterator[Any]: ...


class Tx(Protocol):
    """Argument of `work(tx)`: statements in one transaction, with `?` or `?1` for bindings."""

    def execute(self, sql: str, bindings: Any = ..., /) -> Rows: ...
    def executemany(self, sql: str, rows: Any, /) -> Any: ...
    def each(self, sql: str, rows: Sequence[Any], /) -> list[bool]:
        """As executemany, for a statement that changes at most one row.

        Return for each of `rows` whether the statement changed a row.
        """

    def changes(self) -> int: ...
    def last_insert_rowid(self) -> int: ...


class SqlStore(Protocol):
    """A ports.Store whose transactions are SQL."""

    path: str  # the name of the store in messages, without a password
    durability: str  # `full`: commits survive a power cut, `process`: a killed process
    pipelined: bool  # True if each answer takes a round trip, so that batches are faster
    rollbacks: int  # number of rollbacks so far. A cached row may be wrong after a rollback.

    @property
    def file(self) -> Path | None:
        """The store's file on this machine, or None for a server."""

    def part(self, name: str, schema: str) -> None:
        """Create one adapter's tables if they do not exist.

        Raises StoreRefused if the store has another version. Then it is not changed. The first
        table of a new store gives it the newest version (see `stores.migrations`).
        """

    def version(self) -> StoreVersion | None:
        """Return the version of the store, or None if it has no tables yet."""

    def table_size(self, table: str) -> tuple[int, int]:
        """Return the number of rows and the estimated bytes of a table, or zeros if it is absent.

        Reads the whole table.
        """

    def other_workers(self) -> list[OtherWorker]:
        """Return the clients of the server that use this store with another version."""

    def statements(self, script: str) -> list[str]:
        """Split shared SQL without bindings into statements of this store, with its types."""

    def before_commit(self, work: Callable[[], object], /) -> None:
        """Run `work` after the jobs of the transaction, before its COMMIT. Called by a job.

        `work` runs on a thread that may block.
        """

    async def write(
        self, work: Callable[[Tx], T], *, durable: bool = True, synced: bool = False
    ) -> T:
        """Run `work(tx)` in a transaction and return its result after the commit.

        With `synced`, the commit survives a power cut even if `durability` is `process`. It is for
        rows about files that are synced themselves.
        """

    def write_now(self, work: Callable[[Tx], T], *, durable: bool = True) -> T:
        """As write, for callers without a running event loop."""

    async def read(self, work: Callable[[Tx], T]) -> T: ...

    def read_now(self, work: Callable[[Tx], T]) -> T: ...

    def moment(self, work: Callable[[Tx], T]) -> T:
        """As read_now, but all queries of `work` read one snapshot."""

    def lock(self, path: Path) -> Lock:
        """Return a lock that one process at a time can hold, of all that share this store.

        This includes processes of other machines. `path` is the lock's file on this machine, and
        gives its name.
        """

    def check(self) -> list[str]:
        """Check the integrity of the store. Return one sentence per problem."""

    def server_time(self) -> float | None:
        """Return the time of the server's clock, or None for a store without a server."""

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


class SqlTable:
    """Tables inside one transaction."""

    def __init__(self, tx: Tx) -> None:
        self._tx = tx


class HolderTable(SqlTable):
    """Holders of the fleet's locks, inside one transaction."""

    def holder(self, name: str) -> str | None:
        token: str | None = self._tx.execute("SELECT token FROM holder WHERE name=?", (name,)).get
        return token
