"""PostgreSQL as a store: transactions, refused statements, outages, and errors at the start."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql
from tests.servers import Handle

from penstock.errors import PenstockError, StoreRefused, StoreUnavailable
from penstock.ledgers.postgres import WEEK, PostgresLedger
from penstock.ledgers.sql.maintenance import SqlEventMaintenance
from penstock.ports import Status
from penstock.stores.migrations.versions import newest
from penstock.stores.postgres import store as postgres
from penstock.stores.postgres.store import PostgresStore
from penstock.stores.sql import Tx
from penstock.testing.clock import ManualClock

pytestmark = pytest.mark.server("postgres")
SCHEMA = (
    "CREATE TABLE pot(name TEXT PRIMARY KEY, n INTEGER NOT NULL) WITHOUT ROWID; "
    "CREATE TABLE note(n INTEGER PRIMARY KEY AUTOINCREMENT, body BLOB);"
)
Server = Callable[[str], Handle]


class Place:
    """A separate schema for one test, and the stores that the test opened."""

    def __init__(self, url: str) -> None:
        self.url, self.namespace = url, f"test_{secrets.token_hex(6)}"
        self.stores: list[PostgresStore] = []

    def open(self, **more: Any) -> PostgresStore:
        store = PostgresStore(self.url, namespace=self.namespace, **more)
        self.stores.append(store)
        store.part("test", SCHEMA)
        return store

    def ask(self, query: str) -> list[Any]:
        with psycopg.connect(
            self.url, autocommit=True, options=f"-c search_path={self.namespace}"
        ) as connection:
            found = connection.execute(query.encode())
            return found.fetchall() if found.description else []

    def clear(self) -> None:
        for store in self.stores:
            store.close_now()
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(
                sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(sql.Identifier(self.namespace))
            )


@pytest.fixture
def place(server: Server) -> Iterator[Place]:
    made = Place(server("postgres").url)
    yield made
    made.clear()


def put(name: str, n: int = 1) -> Callable[[Tx], None]:
    def work(tx: Tx) -> None:
        tx.execute(
            "INSERT INTO pot VALUES(?,?) ON CONFLICT(name) DO UPDATE SET n=pot.n+excluded.n",
            (name, n),
        )

    return work


def pots(tx: Tx) -> dict[str, int]:
    return dict(tx.execute("SELECT name, n FROM pot ORDER BY name").fetchall())


# -- writing ---------------------------------------------------------------------------------------


async def test_a_transaction_returns_the_same_results_as_sqlite(place: Place) -> None:
    def work(tx: Tx) -> list[Any]:
        tx.execute("INSERT INTO note(body) VALUES(?)", (b"\0\xff",))
        first = tx.last_insert_rowid()
        numbers = tx.executemany(
            "INSERT INTO note(body) VALUES(?) RETURNING n", [(b"a",), (b"b",)]
        ).fetchall()
        tx.execute("UPDATE note SET body=?2 WHERE n>=?1", (first, b"c"))
        changed = tx.changes()
        one = tx.execute("SELECT body FROM note WHERE n=?", (first,)).get
        both = tx.execute("SELECT n-?, body FROM note WHERE n=?", (first, first)).get
        none = tx.execute("SELECT body FROM note WHERE n=?", (-1,)).get
        total = tx.execute("SELECT coalesce(sum(n), 0) FROM pot").get
        return [[n - first for (n,) in numbers], changed, one, both, none, total]

    assert await place.open().write(work) == [[1, 2], 3, b"c", (0, b"c"), None, 0]


async def test_concurrent_writes_share_a_transaction(place: Place) -> None:
    store = place.open()
    numbers = await asyncio.gather(
        *(store.write(lambda tx: int(tx.execute("SELECT txid_current()").get)) for _ in range(40))
    )
    assert len(set(numbers)) < 10


async def test_a_job_that_raises_is_rolled_back_alone(place: Place) -> None:
    store = place.open()

    def fails(tx: Tx) -> None:
        put("bad")(tx)
        raise ZeroDivisionError

    answers = await asyncio.gather(
        *(store.write(work) for work in (put("a"), fails, put("b"), fails, put("a"))),
        return_exceptions=True,
    )
    assert [type(a) for a in answers] == [
        type(None),
        ZeroDivisionError,
        type(None),
        ZeroDivisionError,
        type(None),
    ]
    with pytest.raises(ZeroDivisionError):
        await store.write(fails)
    assert await store.read(pots) == {"a": 2, "b": 1}


async def test_a_statement_that_the_server_refuses_fails_only_its_own_job(place: Place) -> None:
    store = place.open()

    def refused(tx: Tx) -> None:
        # The job does not read the result, so the error appears at the commit.
        tx.execute("INSERT INTO pot VALUES('x', NULL)")

    works = [put("a"), refused, put("b"), refused]
    answers = await asyncio.gather(*(store.write(work) for work in works), return_exceptions=True)
    assert [isinstance(a, psycopg.errors.NotNullViolation) for a in answers] == [
        False,
        True,
        False,
        True,
    ]
    assert await store.read(pots) == {"a": 1, "b": 1}


async def test_read_then_write_jobs_of_several_stores_lose_no_update(place: Place) -> None:
    stores = [place.open() for _ in range(3)]

    def read_then_write(tx: Tx) -> None:
        n = tx.execute("SELECT n FROM pot WHERE name='k'").get or 0
        tx.execute(
            "INSERT INTO pot VALUES('k', ?) ON CONFLICT(name) DO UPDATE SET n=excluded.n", (n + 1,)
        )

    await asyncio.gather(
        *(store.write(read_then_write, durable=i % 2 == 0) for i in range(30) for store in stores)
    )
    assert await stores[0].read(pots) == {"k": 90}


async def test_a_row_locking_write_does_not_wait_for_an_exclusive_write(place: Place) -> None:
    slow, quick = place.open(), place.open()
    entered, go_on = threading.Event(), threading.Event()

    def holds(tx: Tx) -> None:
        put("held")(tx)
        tx.changes()
        entered.set()
        assert go_on.wait(30)

    holding = asyncio.ensure_future(slow.write(holds))
    try:
        await asyncio.to_thread(entered.wait, 30)
        await quick.write(put("beside"), alone=False)
        assert await quick.read(pots) == {"beside": 1}
        waiting = asyncio.ensure_future(quick.write(put("behind")))
        await quick.write(put("beside"), alone=False)
        assert not waiting.done()
    finally:
        go_on.set()
    await asyncio.gather(holding, waiting)
    assert await quick.read(pots) == {"behind": 1, "beside": 2, "held": 1}


async def test_both_writes_of_a_deadlock_are_committed(place: Place) -> None:
    stores = [place.open(), place.open()]
    await stores[0].write(lambda tx: (put("a")(tx), put("b")(tx)))
    both = threading.Barrier(2)

    def crosswise(first: str, second: str) -> Callable[[Tx], None]:
        tries = 0

        def work(tx: Tx) -> None:
            nonlocal tries
            tries += 1
            put(first)(tx)
            tx.changes()
            if tries == 1:
                both.wait(30)
            put(second)(tx)
            tx.changes()

        return work

    await asyncio.gather(
        stores[0].write(crosswise("a", "b"), alone=False),
        stores[1].write(crosswise("b", "a"), alone=False),
    )
    assert await stores[0].read(pots) == {"a": 3, "b": 3}


async def test_a_before_commit_callback_that_raises_stops_the_commit(place: Place) -> None:
    store = place.open()

    def disk_full() -> None:
        raise OSError("no space left")

    def work(tx: Tx) -> None:
        put("a")(tx)
        store.before_commit(disk_full)

    with pytest.raises(OSError, match="no space"):
        await store.write(work)
    await store.write(put("b"))
    assert await store.read(pots) == {"b": 1}


def test_commands_without_an_event_loop_can_write_and_read(place: Place) -> None:
    store = place.open()
    store.write_now(put("a"))
    assert store.read_now(pots) == {"a": 1}
    assert store.check() == []
    store.close_now()
    with pytest.raises(StoreUnavailable, match="closed"):
        store.write_now(put("a"))


# -- versions --------------------------------------------------------------------------------------


def test_tables_of_another_version_are_refused_and_not_changed(place: Place) -> None:
    place.open().write_now(put("a"))
    for change, age in ((1, "A newer release"), (-1, "an older release")):
        place.ask(f"UPDATE part SET version={newest() + change} WHERE name='store'")
        with pytest.raises(StoreRefused, match=f"store version {newest() + change}.*{age}"):
            place.open()
    place.ask(f"UPDATE part SET version={newest()} WHERE name='store'")
    assert place.open().read_now(pots) == {"a": 1}


def test_concurrent_first_starts_all_succeed(place: Place) -> None:
    errors: list[BaseException] = []
    start = threading.Barrier(6)

    def first() -> None:
        try:
            start.wait(30)
            place.open().write_now(put("a"))
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=first) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert place.ask("SELECT n FROM pot") == [(6,)]


def test_two_namespaces_in_one_database_do_not_see_each_other(place: Place, server: Server) -> None:
    other = Place(server("postgres").url)
    try:
        place.open().write_now(put("a"))
        assert other.open().read_now(pots) == {}
    finally:
        other.clear()


# -- outages ---------------------------------------------------------------------------------------


async def test_writes_fail_while_the_server_is_down_and_work_after_its_restart(
    place: Place, server: Server
) -> None:
    store = place.open()
    await store.write(put("before"))
    server("postgres").kill()
    for ask in (
        lambda: store.write(put("lost")),
        lambda: store.read(pots),
        lambda: store.write(put("lost"), alone=False),
    ):
        with pytest.raises(StoreUnavailable) as caught:
            await ask()
        assert caught.value.hint
    server("postgres").start()
    await store.write(put("after"))
    await store.write(put("after"), alone=False)
    assert await store.read(pots) == {"after": 2, "before": 1}


async def test_a_connection_that_was_cut_while_idle_is_replaced_without_an_error(
    place: Place,
) -> None:
    store = place.open()
    await store.write(put("a"))
    await store.read(pots)
    place.ask(
        "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity "
        "WHERE application_name LIKE 'penstock%'"
    )
    await store.write(put("a"))
    assert await store.read(pots) == {"a": 2}


def test_a_killed_server_ends_its_queries_and_can_be_started_again(
    server: Callable[[str], Handle],
) -> None:
    handle, active = (
        server("postgres"),
        (
            "SELECT 1 FROM pg_stat_activity WHERE state='active' "
            "AND query LIKE '%generate_series(1, 200000000)'"
        ),
    )
    with (
        psycopg.connect(handle.url, autocommit=True) as busy,
        psycopg.connect(handle.url, autocommit=True) as beside,
        ThreadPoolExecutor(1) as pool,
    ):
        query = pool.submit(busy.execute, "SELECT count(*) FROM generate_series(1, 200000000)")
        while not beside.execute(active).fetchall():
            pass
        handle.kill()
        handle.start()
        with pytest.raises(psycopg.OperationalError):
            query.result(60)


async def test_a_commit_whose_answer_was_lost_raises_store_unavailable(place: Place) -> None:
    """The connection is cut during the commit, so the store does not know if it was committed."""
    store = place.open()
    place.ask(
        "CREATE FUNCTION cut() "
        "RETURNS trigger LANGUAGE plpgsql AS $$BEGIN PERFORM "
        "pg_terminate_backend(pg_backend_pid()); RETURN NULL; END$$;"
        " CREATE CONSTRAINT TRIGGER cut AFTER INSERT ON pot DEFERRABLE INITIALLY DEFERRED "
        "FOR EACH ROW WHEN (NEW.name='cut') EXECUTE FUNCTION cut()"
    )
    await store.write(put("a"))
    with pytest.raises(StoreUnavailable):
        await store.write(put("cut"))
    await store.write(put("a"))
    assert (await store.read(pots))["a"] == 2


def test_sessions_have_an_idle_transaction_timeout_and_a_lock_timeout(place: Place) -> None:
    """The server rolls back the transaction of a worker that stopped in the middle of it."""
    store = place.open()
    assert store.read_now(
        lambda tx: (
            tx.execute(
                "SELECT current_setting('idle_in_transaction_session_timeout'), "
                "current_setting('lock_timeout')"
            ).get
        )
    ) == (
        "15s",
        "30s",
    )


# -- errors at the start ---------------------------------------------------------------------------


def opening(url: str, namespace: str = "penstock_test") -> PenstockError:
    store = PostgresStore(url, namespace=namespace)
    try:
        with pytest.raises(PenstockError) as caught:
            store.part("test", SCHEMA)
        return caught.value
    finally:
        store.close_now()


@pytest.fixture
def ann(server: Server) -> Iterator[str]:
    """A user with a password and no rights."""
    url = server("postgres").url
    with psycopg.connect(url, autocommit=True) as connection:
        (hba,) = connection.execute("SHOW hba_file").fetchone() or ("",)
        (before,) = (Path(hba).read_text(),)
        connection.execute("CREATE ROLE ann LOGIN PASSWORD 's3cret'")
        Path(hba).write_text("host all ann 127.0.0.1/32 scram-sha-256\n" + before)
        connection.execute("SELECT pg_reload_conf()")
    try:
        yield url.replace("postgres@", "ann:s3cret@")
    finally:
        Path(hba).write_text(before)
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("DROP OWNED BY ann")
            connection.execute("DROP ROLE ann")
            connection.execute("SELECT pg_reload_conf()")


def test_a_wrong_password_is_reported_and_not_shown(ann: str) -> None:
    error = opening(ann.replace("s3cret", "wr0ng"))
    assert error.message.endswith("refuses the user or the password")
    assert "wr0ng" not in error.message + error.hint
    assert error.exit_code == 4


def test_a_missing_permission_is_reported_with_the_needed_statement(ann: str) -> None:
    error = opening(ann)
    assert "ann may not create the tables of Penstock in schema penstock_test" in error.message
    assert 'CREATE SCHEMA "penstock_test" AUTHORIZATION ann' in error.hint
    assert "s3cret" not in error.message + error.hint


def test_a_user_that_owns_the_schema_needs_no_other_permission(ann: str, server: Server) -> None:
    url = server("postgres").url
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE SCHEMA penstock_test AUTHORIZATION ann")
    store = PostgresStore(ann, namespace="penstock_test")
    store.part("test", SCHEMA)
    store.write_now(put("a"))
    assert store.read_now(pots) == {"a": 1}
    store.close_now()


def test_an_unknown_database_and_an_unknown_user_have_different_errors(server: Server) -> None:
    url = server("postgres").url
    assert opening(url.rsplit("/", 1)[0] + "/nowhere").message.endswith("there is no such database")
    assert opening(url.replace("postgres@", "nobody@")).message.endswith(
        "the server has no user nobody"
    )


def test_an_unreachable_server_is_reported_in_one_line(server: Server) -> None:
    error = opening("postgres://postgres@127.0.0.1:1/penstock")
    assert "cannot be reached" in error.message
    assert "\n" not in error.message
    assert "resolved" in opening("postgres://postgres@no.such.host.invalid/penstock").message


def test_a_server_that_is_too_old_is_refused(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres, "OLDEST", 990000)
    error = opening(server("postgres").url)
    assert "needs 99 or newer" in error.message
    assert error.exit_code == 4


# -- weekly history partitions ---------------------------------------------------------------------


def weeks(place: Place) -> dict[str, int]:
    names = [
        name
        for (name,) in place.ask(
            (
                "SELECT relname::text FROM pg_class WHERE relname ~ '^history_(w[0-9]+|rest)$' "
                "AND relkind='r'"
            )
            + _HERE
        )
    ]
    return {name: place.ask(f"SELECT count(*) FROM {name}")[0][0] for name in names}


_HERE = " AND relnamespace=current_schema()::regnamespace"


def test_history_is_removed_by_whole_weeks_and_needed_rows_are_kept(place: Place) -> None:
    clock = ManualClock()
    store = place.open()
    ledger = PostgresLedger(store, clock)

    def note(tx: Tx, n: int, status: str) -> None:
        tx.execute(
            (
                "INSERT INTO event(n, id, topic, source, trace, url, url_key, host, status, "
                "accepted_at, finished_at) VALUES(?,?,'t','s','t','u',?,'h',?,?,?)"
            ),
            (n, str(n), b"", status, clock.now(), clock.now()),
        )
        SqlEventMaintenance(tx, ledger).note(n, status, "", clock.now())

    store.write_now(lambda tx: note(tx, 1, Status.SUCCESS))
    store.write_now(lambda tx: note(tx, 2, Status.DEAD))
    first = int(clock.now() * 1e6) // WEEK
    assert weeks(place) == {f"history_w{first}": 2, f"history_w{first + 1}": 0, "history_rest": 0}

    def keep_house() -> None:
        store.write_now(
            lambda tx: SqlEventMaintenance(tx, ledger).prune(
                clock.now() - 30 * 86400, lambda key, id_: False
            )
        )

    for _ in range(8):
        clock.advance(7 * 86400)
        keep_house()
    now = int(clock.now() * 1e6) // WEEK
    there = weeks(place)
    assert f"history_w{first}" not in there
    assert {f"history_w{now}", f"history_w{now + 1}"} <= set(there)
    assert len(there) <= 8
    assert place.ask("SELECT event, status FROM history") == [(2, "dead")]
    assert there["history_rest"] == 1


def test_history_without_a_weekly_partition_is_kept_in_the_default_partition(place: Place) -> None:
    clock = ManualClock()
    store = place.open()
    ledger = PostgresLedger(store, clock)
    clock.advance(100 * 86400)
    for reason in ("first", "again"):
        store.write_now(
            lambda tx, reason=reason: SqlEventMaintenance(tx, ledger).note(  # type: ignore[misc]
                1, "pending", reason, clock.now()
            )
        )
    store.write_now(
        lambda tx: SqlEventMaintenance(tx, ledger).prune(
            clock.now() - 86400 * 365, lambda key, id_: False
        )
    )
    assert place.ask("SELECT event, reason FROM history") == [(1, "again")]
