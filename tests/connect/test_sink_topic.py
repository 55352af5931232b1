"""Messages of the Kafka sink, written to PostgreSQL by Debezium's JDBC sink.

The connector has the configuration that `penstock connect` renders.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.e2e.harness import wait_for
from tests.servers import Handle
from tests.sources.kafka_ground import Ground

from penstock.cli.main import main
from penstock.ports import Row
from penstock.sinks.kafka import KafkaSink, open_sink

pytestmark = pytest.mark.server("postgres", "kafka", "connect")
Server = Callable[[str], Handle]


def row(n: int, key: str, /, *, deleted: bool = False, **fields: Any) -> Row:
    origin = {
        "event_id": f"e{n}",
        "trace_id": "t",
        "url": "https://shop.example/" + key,
        "key": key,
        "extractor": "product",
        "version": 1,
    }
    return Row(
        n,
        key,
        json.dumps(
            fields | {"_penstock": origin | ({"deleted": True} if deleted else {})}
        ).encode(),
        n,
    )


class Estate:
    """A topic that the Kafka sink fills, the JDBC connector, and its table."""

    def __init__(self, directory: Path, server: Server, ground: Ground) -> None:
        self.ground, self.name = ground, f"t{uuid.uuid4().hex[:12]}"
        self.worker, self.database = server("connect").url, server("postgres").url
        self.topic = f"{self.name}.products"
        ground.mine(self.topic)
        self._file = directory / "shop.py"
        self._opened: list[KafkaSink] = []

    def sink(self, query: str = "key=sku") -> KafkaSink:
        sink = open_sink(f"{self.ground.url}/{self.topic}?{query}", {"partitions": 1}, Path())
        sink.open(0, "")
        self._opened.append(sink)
        return sink

    def apply(self, query: str = "key=sku") -> None:
        connect = {
            "kind": "jdbc-postgres",
            "database": self.database,
            "table": self.name,
            "name": "rows",
        }
        self._file.write_text(
            f"from penstock import Pipeline\nshop = Pipeline({self.name!r})\n"
            f"shop.sink('{self.ground.url}/{self.topic}?{query}', connect={connect!r})\n"
        )
        assert main(["connect", "apply", str(self._file), "--url", self.worker]) == 0

    def sql(self, statement: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.database, autocommit=True) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def becomes(self, expected: list[tuple[Any, ...]], columns: str) -> None:
        found: list[Any] = []

        def there() -> bool:
            try:
                found[:] = self.sql(f'SELECT {columns} FROM "{self.name}" ORDER BY 1')
            except (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedColumn):
                return False
            return found == expected

        try:
            wait_for(there, "rows", 120, 0.1)
        except pytest.fail.Exception:
            assert found == expected, main(["connect", "status", "--url", self.worker])

    def close(self) -> None:
        for sink in self._opened:
            sink.close()
        main(["connect", "delete", "--all", "--yes", "--pipeline", self.name, "--url", self.worker])
        self.sql(f'DROP TABLE IF EXISTS "{self.name}"')


@pytest.fixture
def estate(tmp_path: Path, server: Server) -> Iterator[Estate]:
    ground = Ground(server("kafka").url)
    made = Estate(tmp_path, server, ground)
    yield made
    made.close()
    ground.sweep()


def test_records_with_changing_field_types_are_upserted_and_removals_delete_rows(
    estate: Estate,
) -> None:
    sink = estate.sink("key=sku&types=stock:int64")
    sink.write(
        [
            row(1, "a", sku="a", price=10, stock=3, late=None),
            row(2, "b", sku="b", price=9.99, tags=["x", {"y": 1}], on=True),
        ]
    )
    estate.apply("key=sku&types=stock:int64")
    estate.becomes(
        [("a", 10.0, 3, None), ("b", 9.99, None, '["x",{"y":1}]')], "sku, price, stock, tags"
    )
    sink.write([
        row(3, "a", sku="a", price="call us", stock=2.5, late="now a text", tags="plain", on="yes"),
        row(4, "c", sku=5, price=1 << 80, title="nul \0 and ünï", order=1),
        row(5, "d", sku="d"),
    ])  # fmt: skip
    estate.becomes(
        [
            (
                "5",
                None,
                None,
                None,
                None,
                "nul \ufffd and ünï",
                '{"price":1208925819614629174706176}',
            ),
            (
                "a",
                None,
                None,
                "plain",
                "now a text",
                None,
                '{"price":"call us","stock":2.5,"on":"yes"}',
            ),
            ("b", 9.99, None, '["x",{"y":1}]', None, None, None),
            ("d", None, None, None, None, None, None),
        ],
        "sku, price, stock, tags, late, title, _penstock_rest",
    )
    sink.write(
        [
            row(6, "a", deleted=True, sku="a"),
            row(7, "never there", deleted=True, sku="z"),
            row(8, "b", sku="b", price=1),
        ]
    )
    estate.becomes([("5", None), ("b", 1.0), ("d", None)], "sku, price")
    types = dict(
        estate.sql(
            "SELECT column_name, data_type FROM information_schema.columns "
            f"WHERE table_name = '{estate.name}'"
        )
    )
    assert {types[name] for name in ("price", "order")} == {"double precision"}
    assert (types["stock"], types["on"], types["sku"]) == ("bigint", "boolean", types["title"])


def test_records_without_a_key_option_use_the_record_key_and_a_repeat_adds_no_row(
    estate: Estate,
) -> None:
    batch = [row(n, f"https://a.example/{n % 50}", n=n) for n in range(200)]
    estate.sink("provenance=true").write(batch)
    # Like a process that was killed before it recorded its mark.
    estate.sink("provenance=true").write(batch)
    estate.apply("provenance=true")
    estate.becomes(
        sorted((f"https://a.example/{n % 50}", float(n), f"e{n}") for n in range(150, 200)),
        "_penstock_key, n, _penstock_event_id",
    )
