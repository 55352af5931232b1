"""The PostgreSQL sink on a real server, through its outbox and in the caller's transaction."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.servers import Handle

from penstock.errors import ConfigError, StoreUnavailable
from penstock.ports import Reopen, Row
from penstock.sinks import postgres
from penstock.stores.postgres.store import PostgresStore
from penstock.stores.sql import Tx

pytestmark = pytest.mark.server("postgres")


def row(n: int, key: str | None = None, order: int | None = None, /, **fields: Any) -> Row:
    key = key if key is not None else f"k{n}"
    origin = {
        "event_id": f"e{n}",
        "trace_id": "t",
        "url": "https://shop.example/" + key,
        "key": key,
        "extractor": "product",
        "version": 1,
        "fetched_at": 12.5,
    }
    return Row(
        n,
        key,
        json.dumps(fields | {"_penstock": origin}).encode(),
        order if order is not None else n,
    )


class Place:
    """A separate schema on the server, with its sinks and stores."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.schema = f"t{secrets.token_hex(6)}"
        self.db = psycopg.connect(url, autocommit=True)
        self.db.execute(f"CREATE SCHEMA {self.schema}")
        self.opened: list[postgres.PostgresSink] = []
        self.stores: list[PostgresStore] = []

    def sink(self, **options: Any) -> postgres.PostgresSink:
        sink = postgres.open_sink(
            f"{self.url}?schema={self.schema}", {"table": "products"} | options, Path()
        )
        self.opened.append(sink)
        return sink

    def store(self) -> PostgresStore:
        """Open a store like the ledger's. It uses the same schema, so that one DROP removes all."""
        made = PostgresStore(self.url, namespace=self.schema)
        made.part("nothing", "")
        self.stores.append(made)
        return made

    def sql(self, text: str) -> list[tuple[Any, ...]]:
        self.db.execute(f"SET search_path = {self.schema}")
        cursor = self.db.execute(text)
        return cursor.fetchall() if cursor.description else []

    def types(self) -> dict[str, str]:
        text = (
            "SELECT column_name, data_type FROM information_schema.columns "
            "WHERE table_schema = current_schema() AND table_name = 'products'"
        )
        return {name: kind for name, kind in self.sql(text) if not name.startswith("_penstock")}


@pytest.fixture
def place(server: Callable[[str], Handle]) -> Iterator[Place]:
    made = Place(server("postgres").url)
    yield made
    for sink in made.opened:
        sink.close()
    for store in made.stores:
        store.close_now()
    made.db.execute(f"DROP SCHEMA {made.schema} CASCADE")
    made.db.close()


def test_upsert_keeps_one_row_per_key_from_the_newest_accepted_event(place: Place) -> None:
    sink = place.sink()
    sink.open(0, "")
    sink.write(
        [
            row(1, "a", 5, price=1),
            row(2, "a", 9, price=2),
            row(3, "b", 6, price=3),
            row(4, "a", 7, price=4, late=True),
        ]
    )
    sink.write([row(5, "a", 8, price=5), row(6, "b", 6, price=6)])
    assert place.sql(
        "SELECT _penstock_key, price, _penstock_event_id, late FROM products ORDER BY 1"
    ) == [("a", 2, "e2", None), ("b", 6, "e6", None)]


def test_a_missing_field_becomes_null_and_a_column_of_the_user_is_kept(place: Place) -> None:
    sink = place.sink()
    sink.open(0, "")
    sink.write([row(1, "a", price=1, offer="yes")])
    place.sql("ALTER TABLE products ADD COLUMN checked TEXT DEFAULT 'by hand'")
    sink.write([row(2, "a", price=2)])
    assert place.sql("SELECT price, offer, checked FROM products") == [(2, None, "by hand")]


def test_append_mode_writes_one_row_per_record(place: Place) -> None:
    sink = place.sink(mode="append")
    sink.open(0, "")
    sink.write([row(1, "a", price=1), row(2, "a", price=2), row(3, "a", 0, price=3)])
    assert sorted(place.sql("SELECT price FROM products")) == [(1,), (2,), (3,)]


@pytest.mark.parametrize("mode", ["append", "upsert"])
def test_a_repeated_batch_is_not_written_again(place: Place, mode: str) -> None:
    sink = place.sink(mode=mode)
    mark = sink.open(0, "")
    sink.write([row(1, price=1), row(2, price=2)])
    other = place.sink(mode=mode)  # the server sees another machine
    other.open(0, mark)
    other.write([row(1, price=8), row(2, price=9), row(3, price=3)])
    assert other.notice == ""
    assert sorted(place.sql("SELECT price FROM products")) == [(1,), (2,), (3,)]


def test_a_restored_or_dropped_target_is_reported_and_continued(place: Place) -> None:
    sink = place.sink(mode="append")
    mark = sink.open(0, "")
    sink.write([row(1, price=1)])
    assert sink.open(2, mark) == mark
    assert "older than row 2" in sink.notice
    sink.write([row(2, price=2), row(3, price=3)])
    assert sorted(place.sql("SELECT price FROM products")) == [(1,), (3,)]
    place.sql("DROP TABLE products, _penstock_position, _penstock_columns")
    with pytest.raises(Reopen):
        sink.write([row(4, price=4)])
    assert sink.open(3, mark) != mark
    assert "not the database" in sink.notice
    sink.write([row(4, price=4)])
    assert place.sql("SELECT price FROM products") == [(4,)]


def test_columns_have_the_type_of_their_values_and_every_value_is_kept_exactly(
    place: Place,
) -> None:
    sink = place.sink()
    sink.open(0, "")
    sink.write(
        [
            row(1, "a", i=1, f=1.5, s="x", b=True, o={"a": [1]}, none=None, big=10**30, mixed=20),
            row(2, "b", none="3", mixed=19.99),
        ]
    )
    assert place.types() == {
        "i": "bigint",
        "f": "double precision",
        "s": "text",
        "b": "boolean",
        "o": "jsonb",
        "none": "text",
        "big": "numeric",
        "mixed": "numeric",
    }
    sink.write(
        [
            row(3, "c", i="007", f=2**60 + 1, s=12, b="n/a", o="text", big="lots"),
            row(4, "d", s={"x": 1}, f=10**400, b=1, i=[1], mixed=1e300),
        ]
    )
    rows = {
        r[0]: r[1:]
        for r in place.sql("SELECT _penstock_key, i, f, s, b, o, _penstock_rest FROM products")
    }
    assert rows["a"] == (1, 1.5, "x", True, {"a": [1]}, None)
    assert rows["c"] == (
        7,
        float(2**60),
        "12",
        None,
        "text",
        {"i": "007", "f": 2**60 + 1, "b": "n/a", "big": "lots"},
    )
    assert rows["d"] == (None, None, '{"x":1}', None, None, {"f": 10**400, "b": 1, "i": [1]})
    assert [
        str(v) for (v,) in place.sql("SELECT mixed FROM products WHERE mixed < 100 ORDER BY 1")
    ] == ["19.99", "20"]


def test_an_integer_column_becomes_numeric_for_a_fraction_or_a_huge_number(place: Place) -> None:
    sink = place.sink()
    sink.open(0, "")
    sink.write([row(1, "a", price=20, n=1)])
    sink.write([row(2, "b", price=19.99, n=2**63)])
    assert place.types() == {"price": "numeric", "n": "numeric"}
    assert [(str(p), int(n)) for p, n in place.sql("SELECT price, n FROM products ORDER BY 1")] == [
        ("19.99", 2**63),
        ("20", 1),
    ]
    assert place.sql("SELECT count(*) FROM products WHERE _penstock_rest IS NOT NULL") == [(0,)]


def test_a_column_that_a_view_uses_is_not_changed_and_the_value_is_kept_as_json(
    place: Place,
) -> None:
    sink = place.sink()
    sink.open(0, "")
    sink.write([row(1, "a", price=20)])
    place.sql("CREATE VIEW cheap AS SELECT price FROM products")
    sink.write([row(2, "b", price=19.99)])
    assert place.sql("SELECT price, _penstock_rest FROM products WHERE _penstock_key = 'b'") == [
        (None, {"price": 19.99})
    ]
    assert "could not be changed" in sink.notice


def test_nul_characters_are_replaced_in_the_cell_and_kept_as_json(place: Place) -> None:
    sink = place.sink()
    sink.open(0, "")
    sink.write([row(1, "a\0b", s="x\0y", o={"k": "\0", "back": "\\u0000"}), row(2, "a\0c", s="z")])
    rows = place.sql("SELECT s, o, _penstock_rest::text FROM products ORDER BY _penstock_order")
    assert rows[0][:2] == ("x�y", {"k": "�", "back": "\\u0000"})
    assert json.loads(rows[0][2]) == {"s": "x\0y", "o": {"k": "\0", "back": "\\u0000"}}
    sink.write([row(3, "a\0b", s="again")])
    assert [s for (s,) in place.sql("SELECT s FROM products ORDER BY 1")] == ["again", "z"]


def test_records_with_very_long_keys_have_one_row_per_key(place: Place) -> None:
    sink = place.sink()
    sink.open(0, "")
    keys = [secrets.token_hex(5000), secrets.token_hex(5000)]
    for n in range(1, 5):
        sink.write([row(n, keys[n % 2], price=n)])
    assert sorted(place.sql("SELECT price FROM products")) == [(3,), (4,)]


HOSTILE = [
    "select",
    "ctid",
    'a"b',
    "a b",
    "'; DROP TABLE products; --",
    "été",
    "a.b[0]",
    "excluded",
    "1",
    "%s",
    "100%",
    "%(x)s",
    "{}",
    "$1",
    "?",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_any_field_or_table_name_is_safe(place: Place, name: str) -> None:
    sink = place.sink(table=name)
    sink.open(0, "")
    sink.write([row(1, "a", **{name: "v1"})])
    sink.write([row(2, "a", **{name: "v2", "order": 1})])
    quoted = name.replace('"', '""')
    wanted = "_penstock_rest->>'ctid'" if name == "ctid" else f'"{quoted}"'
    assert place.sql(f'SELECT {wanted} FROM "{quoted}"') == [("v2",)]


def test_fields_that_cannot_have_a_column_are_kept_as_json_with_a_notice(place: Place) -> None:
    sink = place.sink(max_columns=12)
    sink.open(0, "")
    long = "n" * 64
    sink.write(
        [
            row(1, "a", title=2, _penstock_url=3, b=4, c=5, d=6, e=7),
            row(2, "b", **{"nul\0": 1, "": 2, long: 3}),
        ]
    )
    sink.write([Row(4, "d", b"[not an object", 4), Row(5, "e", b'"text"', 5)])
    got = {
        key: json.loads(rest)
        for key, rest in place.sql(
            "SELECT _penstock_key, _penstock_rest::text FROM products "
            "WHERE _penstock_rest IS NOT NULL"
        )
    }
    assert got["a"] == {"_penstock_url": 3, "d": 6, "e": 7}
    assert got["b"] == {"nul\0": 1, "": 2, long: 3}
    assert got["d"] == {"body": "[not an object"}
    assert got["e"] == {"body": '"text"'}
    assert "max_columns" in sink.notice


def test_a_row_wider_than_a_block_is_kept_as_json(place: Place) -> None:
    sink = place.sink(max_columns=1500)
    sink.open(0, "")
    sink.write(
        [row(1, "a", **{f"f{i}": secrets.token_hex(50) for i in range(1000)}), row(2, "b", f1="x")]
    )
    assert place.sql("SELECT f1, _penstock_rest IS NULL FROM products ORDER BY _penstock_key") == [
        (None, False),
        ("x", True),
    ]


def test_a_users_table_is_filled_by_name_and_refused_values_are_kept_as_json(place: Place) -> None:
    place.sql(
        "CREATE TABLE products (id serial PRIMARY KEY, price integer, double integer "
        "GENERATED ALWAYS AS (price * 2) STORED, day date, code varchar(3))"
    )
    place.sql("INSERT INTO products (price) VALUES (0)")
    sink = place.sink()
    sink.open(0, "")
    sink.write(
        [
            row(1, "a", price=1, double=9, day="2026-11-16", code="ab"),
            row(2, "a", price=2, day="2026-11-17", code="abc"),
        ]
    )
    sink.write([row(3, "b", price=3, day="yesterday", code="abcd"), row(4, "c", price=4)])
    rows = place.sql(
        "SELECT price, double, day::text, code, _penstock_key FROM products ORDER BY id"
    )
    assert rows[:2] == [(0, 0, None, None, None), (2, 4, "2026-11-17", "abc", "a")]
    assert ("yesterday", "abcd") in place.sql(
        "SELECT _penstock_rest->>'day', _penstock_rest->>'code' FROM products "
        "WHERE _penstock_key = 'b'"
    )
    assert place.sql("SELECT price FROM products WHERE _penstock_key = 'c'") == [(4,)]
    assert "refuses some values" in sink.notice


def test_a_row_that_the_table_refuses_is_an_outage_with_the_reason(place: Place) -> None:
    place.sql("CREATE TABLE products (must text NOT NULL, price integer)")
    sink = place.sink()
    sink.open(0, "")
    with pytest.raises(StoreUnavailable, match='"must"'):
        sink.write([row(1, "a", price=1)])
    sink.write([row(1, "a", price=1, must="x")])
    assert place.sql("SELECT price FROM products") == [(1,)]


def test_a_view_a_table_with_duplicate_keys_or_a_missing_schema_is_refused(place: Place) -> None:
    appending = place.sink(mode="append")
    appending.open(0, "")
    appending.write([row(1, "a"), row(2, "a")])
    with pytest.raises(ConfigError, match="several rows"):
        place.sink().open(0, "")
    place.sql("CREATE VIEW seen AS SELECT 1")
    with pytest.raises(ConfigError, match="needs a table"):
        place.sink(table="seen").open(0, "")
    with pytest.raises(ConfigError, match="no schema 'nowhere'") as caught:
        place.sink(schema="nowhere").open(0, "")
    assert "CREATE SCHEMA" in caught.value.hint


def test_a_missing_permission_is_reported_with_the_needed_grant(place: Place) -> None:
    place.sql("CREATE TABLE products (price integer)")
    place.sql(f"DROP ROLE IF EXISTS {place.schema}")
    place.sql(f"CREATE ROLE {place.schema} LOGIN")
    place.sql(f"GRANT USAGE ON SCHEMA {place.schema} TO {place.schema}")
    try:
        dsn = place.url.replace("://postgres@", f"://{place.schema}@")
        sink = postgres.open_sink(f"{dsn}?schema={place.schema}&table=products", {}, Path())
        place.opened.append(sink)
        with pytest.raises(ConfigError, match="no permission") as caught:
            sink.open(0, "")
        assert "GRANT CREATE" in caught.value.hint
        place.sql(f"GRANT CREATE ON SCHEMA {place.schema} TO {place.schema}")
        with pytest.raises(ConfigError, match="this user cannot change"):
            sink.open(0, "")
    finally:
        sink.close()
        place.sql(f"DROP OWNED BY {place.schema} CASCADE")
        place.sql(f"DROP ROLE {place.schema}")


def test_a_cut_connection_is_an_outage_and_the_batch_can_be_repeated(place: Place) -> None:
    sink = place.sink()
    mark = sink.open(0, "")
    sink.write([row(1, "a", price=1)])
    place.sql(
        "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity "
        "WHERE application_name LIKE 'penstock%' AND pid <> pg_backend_pid()"
    )
    with pytest.raises(StoreUnavailable):
        sink.write([row(2, "b", price=2), row(3, "c", new=3)])
    with pytest.raises(Reopen):
        sink.write([row(2, "b", price=2)])
    assert sink.open(1, mark) == mark
    sink.write([row(2, "b", price=2), row(3, "c", new=3)])
    assert sorted(place.sql("SELECT _penstock_key FROM products")) == [("a",), ("b",), ("c",)]


def test_a_locked_table_does_not_stop_the_sink(place: Place) -> None:
    sink = place.sink()
    sink.open(0, "")
    sink.write([row(1, "a", price=1)])
    with psycopg.connect(place.url) as reader:
        reader.execute(f"SELECT * FROM {place.schema}.products")
        sink.write([row(2, "b", price=2, new="x")])
        assert place.sql(
            "SELECT price, _penstock_rest FROM products WHERE _penstock_key = 'b'"
        ) == [(2, {"new": "x"})]
        assert "could not be changed" in sink.notice


def test_rows_are_committed_or_rolled_back_with_the_callers_transaction(place: Place) -> None:
    sink = place.sink()
    store = place.store()
    store.write_now(sink.prepare_in)

    def fails(tx: Tx) -> None:
        sink.write_in(tx, [row(1, "a", price=1)])
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        store.write_now(fails)
    assert place.types() == {}

    def works(tx: Tx) -> None:
        sink.write_in(tx, [row(1, "a", price=1)])
        sink.write_in(tx, [row(2, "a", price=2, new=1), row(3, "b", 0, price=3)])
        sink.write_in(tx, [])
        assert place.types() == {}

    store.write_now(works)
    assert place.sql("SELECT price, new FROM products ORDER BY _penstock_key") == [
        (2, 1),
        (3, None),
    ]


def test_two_workers_can_alternately_add_columns_to_one_table(place: Place) -> None:
    stores = [place.store() for _ in range(2)]
    sinks = [place.sink() for _ in range(2)]
    for store, sink in zip(stores, sinks, strict=True):
        store.write_now(sink.prepare_in)
    for n in range(1, 9):
        some = [row(n, "k", **{f"f{n}": n, f"f{n - 1}": n})]
        stores[n % 2].write_now(partial(sinks[n % 2].write_in, rows=some))
    assert place.sql("SELECT f6, f7, f8 FROM products") == [(None, 8, 8)]


def test_dropped_tables_are_created_again_at_the_second_write(place: Place) -> None:
    store, sink = place.store(), place.sink()
    store.write_now(lambda tx: sink.write_in(tx, [row(1, "a", price=1)]))
    place.sql("DROP TABLE products, _penstock_columns")
    with pytest.raises(StoreUnavailable, match="_penstock_columns"):
        store.write_now(lambda tx: sink.write_in(tx, [row(2, "b", price=2)]))
    store.write_now(lambda tx: sink.write_in(tx, [row(2, "b", price=2)]))
    assert place.sql("SELECT price FROM products") == [(2,)]


def test_a_table_of_another_application_is_not_filled_in_a_transaction(place: Place) -> None:
    place.sql("CREATE TABLE products (id integer)")
    store = place.store()
    with pytest.raises(ConfigError, match="belongs to another application"):
        store.write_now(place.sink().prepare_in)
    with pytest.raises(ConfigError, match="belongs to another application"):
        store.write_now(lambda tx: place.sink().write_in(tx, [row(1)]))


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("postgres://h/db?tabel=x", "tabel"),
        ("postgres://h/db?table=pg_x", "cannot be the name"),
        ("postgres://h/db?table=" + "x" * 64, "cannot be the name"),
        ("postgres://h/db?mode=replace", "mode is 'replace'"),
        ("postgres://h/db?max_columns=2", "max_columns"),
        ("postgres://u:sec%zzret@h/db", "cannot be read"),
        ("postgres://u:sec/ret@h:99999/db", "its port"),
    ],
)
def test_a_mistyped_url_is_refused_with_a_hint_and_without_its_password(
    url: str, says: str
) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        postgres.open_sink(url, {}, Path())
    assert caught.value.hint
    assert "sec" not in caught.value.message + caught.value.hint


def test_an_unreachable_server_unknown_database_and_user_have_different_errors(
    place: Place,
) -> None:
    base = place.url.rpartition("/")[0]
    for url, says in (
        ("postgres://u:secret@127.0.0.1:1/db", "127.0.0.1:1/db cannot be reached"),
        (
            "postgres://u:secret@nohost.invalid/db",
            "nohost.invalid/db: the host's name cannot be resolved",
        ),
        (base + "/no_such_database", "no_such_database: there is no such database"),
        (place.url.replace("://postgres@", "://no_such_user@"), "has no user no_such_user"),
    ):
        with pytest.raises(StoreUnavailable, match=says) as caught:
            postgres.open_sink(url, {}, Path()).open(0, "")
        assert caught.value.hint
        assert "secret" not in caught.value.message


def test_a_sink_shares_the_transaction_only_if_it_uses_the_ledgers_database() -> None:
    sink = postgres.open_sink("postgres://u:p@db.example/shop?table=products", {}, Path())
    assert sink.shares("postgresql://other@db.example:5432/shop")
    assert not sink.shares("postgres://u:p@db.example/other")
    assert not sink.shares("postgres://u:p@db.example:5433/shop")
    assert not sink.shares("sqlite:shop.db")


def test_a_removal_deletes_the_row_unless_a_newer_event_wrote_it(place: Place) -> None:
    def removal(n: int, key: str, order: int) -> Row:
        made = row(n, key, order, sku=key)
        return Row(n, key, made.body.replace(b'"event_id"', b'"deleted": true, "event_id"'), order)

    sink = place.sink()
    sink.open(0, "")
    sink.write([removal(1, "never there", 1)])
    sink.write(
        [
            row(2, "a", 5, sku="a"),
            row(3, "b", 5, sku="b"),
            removal(4, "a", 6),
            removal(5, "b", 4),
            removal(6, "c", 9),
            row(7, "c", 10, sku="c"),
        ]
    )
    assert place.sql("SELECT sku FROM products ORDER BY 1") == [("b",), ("c",)]
    added = place.sink(table="history", mode="append")
    added.open(0, "")
    added.write([row(1, "a", sku="a"), removal(2, "a", 6)])
    assert place.sql(
        "SELECT sku, _penstock_rest->>'_penstock_deleted' FROM history ORDER BY _penstock_order"
    ) == [("a", None), ("a", "true")]
