"""Interface of a store for shared SQL, whose statements SQLite and PostgreSQL accept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from penstock.locks import Lock

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
    def cursor(self) -> Any: ...


class SqlStore(Protocol):
    """A ports.Store whose transactions are SQL."""

    @property
    def path(self) -> str:
        """The name of the store in messages. It contains no password."""

    @property
    def durability(self) -> str:
        """`full`: commits survive a power cut. `process`: they survive a killed process."""

    @property
    def file(self) -> Path | None:
        """The store's file on this machine, or None for a server."""

    @property
    def pipelined(self) -> bool:
        """True if each answer takes a round trip, so that sending statements together is faster."""

    @property
    def rollbacks(self) -> int:
        """The number of rollbacks so far. A cached row may be wrong after a rollback."""

    def part(self, name: str, version: int, schema: str) -> None:
        """Create one adapter's tables, or check their version.

        Raises Unreachable if the tables have another version. Then they are not changed.
        """

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

    async def close(self) -> None: ...

    def close_now(self) -> None: ...
