"""Messages of Debezium's PostgreSQL connector, read by the Kafka source in every format."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.e2e.harness import wait_for
from tests.servers import Handle
from tests.sources.kafka_ground import Ground, until_idle

from penstock.cli.main import main
from penstock.ports import Finding

pytestmark = pytest.mark.server("postgres", "kafka", "connect")
Server = Callable[[str], Handle]


class Estate:
    """A table, the connector behind it and the topic that it fills."""

    def __init__(self, directory: Path, server: Server) -> None:
        self.ground, self.name = Ground(server("kafka").url), f"t{uuid.uuid4().hex[:12]}"
        self.worker, self.database = server("connect").url, server("postgres").url
        self.topic = f"{self.name}.public.{self.name}"
        self.ground.mine(self.topic)
        self._file = directory / "shop.py"
        self.sql(f"CREATE TABLE {self.name} (id bigserial PRIMARY KEY, url text NOT NULL)")

    def apply(self, **more: Any) -> None:
        connect = {
            "kind": "debezium-postgres",
            "database": self.database,
            "table": f"public.{self.name}",
            "name": "rows",
            **more,
        }
        self._file.write_text(
            f"from penstock import Pipeline\nshop = Pipeline({self.name!r})\n"
            f"shop.source('{self.ground.url}/{self.topic}', connect={connect!r})\n"
        )
        assert main(["connect", "apply", str(self._file), "--url", self.worker]) == 0

    def sql(self, statement: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.database, autocommit=True) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def messages(self) -> int:
        if self.topic not in self.ground.admin.list_topics(timeout=20).topics:
            return 0
        (future,) = self.ground.admin.list_offsets(self.ground.ends(self.topic)).values()
        return int(future.result(20).offset)

    def close(self) -> None:
        main(["connect", "delete", "--all", "--yes", "--pipeline", self.name, "--url", self.worker])
        slots = f"FROM pg_replication_slots WHERE slot_name LIKE '%{self.name}%'"
        wait_for(lambda: not self.sql(f"SELECT 1 {slots} AND active"), "the slot is free", 120, 0.1)
        self.sql(f"SELECT pg_drop_replication_slot(slot_name) {slots}")
        self.sql(f"DROP TABLE IF EXISTS {self.name}")
        self.ground.sweep()


@pytest.fixture
def estate(tmp_path: Path, server: Server) -> Iterator[Estate]:
    made = Estate(tmp_path, server)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("unwrap", "schemas"),
    [(True, False), (False, False), (False, True)],
    ids=["unwrapped", "envelope", "with schema"],
)
async def test_every_change_of_a_table_is_one_finding_with_its_row(
    estate: Estate, unwrap: bool, schemas: bool
) -> None:
    estate.sql(
        f"INSERT INTO {estate.name} (url) SELECT 'http://old.test/' || n "
        "FROM generate_series(1, 20) n"
    )
    estate.apply(
        unwrap=unwrap,
        schemas=schemas,
        operations=["insert", "update", "delete"],
        snapshot="initial",
        partitions=1,
    )
    wait_for(lambda: estate.messages() >= 20, "the snapshot", 120, 0.1)
    estate.sql(
        f"INSERT INTO {estate.name} (url) SELECT 'http://new.test/' || n "
        "FROM generate_series(1, 30) n"
    )  # several rows in one statement
    estate.sql(f"UPDATE {estate.name} SET url = url || '?' WHERE id <= 5")
    estate.sql(f"DELETE FROM {estate.name} WHERE id = 1")
    wait_for(lambda: estate.messages() >= 56, "the changes", 120, 0.1)
    found, _ = await until_idle(estate.ground.source(estate.topic, operations="c,r,u,d"))
    assert not [f.refused for f in found if f.refused]
    assert len({f.id for f in found}) == len(found) == 56
    assert Counter(f.payload["_cdc"]["op"] for f in found) == {"r": 20, "c": 30, "u": 5, "d": 1}
    assert all(type(f.payload["id"]) is int for f in found)
    assert sorted(_urls(found, "c")) == sorted(f"http://new.test/{n}" for n in range(1, 31))
    assert _urls(found, "u") == [f"http://old.test/{n}?" for n in range(1, 6)]
    usual, _ = await until_idle(estate.ground.source(estate.topic))
    assert [f.id for f in usual] == [f.id for f in found if f.payload["_cdc"]["op"] != "d"]


def _urls(found: list[Finding], op: str) -> list[str]:
    return [f.payload["url"] for f in found if f.payload["_cdc"]["op"] == op]
