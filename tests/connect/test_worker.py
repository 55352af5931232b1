"""`penstock connect` against a real Connect worker with Debezium's plugins, a real Kafka and a real
PostgreSQL.
"""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import psycopg
import pytest
from confluent_kafka import Consumer, Producer
from tests.e2e.harness import wait_for
from tests.servers import Handle

from penstock.authoring.pipeline import Pipeline
from penstock.cli.main import main
from penstock.connect.apply import apply
from penstock.connect.catalogue import DEBEZIUM_JDBC, DEBEZIUM_POSTGRES
from penstock.connect.plan import Plan, Step
from penstock.connect.render import render
from penstock.connect.rest import Worker
from penstock.errors import Unreachable

served = pytest.mark.server("postgres", "kafka", "connect")
Server = Callable[[str], Handle]


class Estate:
    """A pipeline with names of its own on the shared servers, and the command line run on it."""

    def __init__(self, directory: Path, server: Server, capsys: pytest.CaptureFixture[str]) -> None:
        self.id = "t" + uuid.uuid4().hex[:8]
        self.dir, self._capsys = directory, capsys
        self.url, self.database = server("connect").url, server("postgres").url
        self.broker = server("kafka").url.removeprefix("kafka://")
        self.requests, self.products = f"{self.id}.public.{self.id}_requests", f"{self.id}_products"
        self.sql(f"CREATE TABLE {self.id}_requests (id bigserial PRIMARY KEY, url text NOT NULL)")

    @property
    def source(self) -> dict[str, Any]:
        return {
            "kind": "debezium-postgres",
            "database": self.database,
            "table": f"public.{self.id}_requests",
            "route": {"geo": "us"},
            "name": "requests",
        }

    @property
    def sink(self) -> dict[str, Any]:
        return {
            "kind": "jdbc-postgres",
            "database": self.database,
            "table": self.products,
            "name": "products",
        }

    def declare(
        self, *, source: dict[str, Any] | None = None, sink: dict[str, Any] | None = None
    ) -> str:
        lines = ["from penstock import Pipeline", f"shop = Pipeline({self.id!r})"]
        if source is not None:
            lines.append(
                f"shop.source('kafka://{self.broker}/{self.requests}', connect={source!r})"
            )
        if sink is not None:
            lines.append(
                f"shop.sink('kafka://{self.broker}/{self.products}?key=sku', connect={sink!r})"
            )
        file = self.dir / "shop.py"
        file.write_text("\n".join(lines) + "\n")
        return str(file)

    def connect(self, *args: str) -> tuple[int, str]:
        """Exit code, and all that was said."""
        self._capsys.readouterr()
        code = main(["connect", *args, "--url", self.url])
        said = self._capsys.readouterr()
        return code, said.out + said.err

    def json(self, *args: str) -> dict[str, Any]:
        _, said = self.connect(*args, "--json")
        found: dict[str, Any] = json.loads(said)
        return found

    def sql(self, statement: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.database, autocommit=True) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def publish(self, sku: str, price: float | None) -> None:
        """As our Kafka sink writes it: schemas with it, the key as a struct, a tombstone for a
        deletion.
        """
        fields = [{"field": "sku", "type": "string", "optional": False}]
        key = {
            "schema": {"type": "struct", "fields": fields, "optional": False},
            "payload": {"sku": sku},
        }
        schema = {
            "type": "struct",
            "fields": [*fields, {"field": "price", "type": "double", "optional": True}],
            "optional": False,
        }
        value = {"schema": schema, "payload": {"sku": sku, "price": price}}
        self.produce(json.dumps(key), None if price is None else json.dumps(value))

    def produce(self, key: str, value: str | None) -> None:
        producer = Producer({"bootstrap.servers": self.broker})
        producer.produce(self.products, key=key, value=value)
        assert producer.flush(20) == 0

    def rows(self) -> list[tuple[Any, ...]]:
        try:
            return self.sql(f"SELECT sku, price FROM {self.products} ORDER BY sku")
        except psycopg.errors.UndefinedTable:
            return []

    def close(self) -> None:
        self.connect("delete", "--all", "--yes", "--pipeline", self.id)
        slots = "FROM pg_replication_slots WHERE slot_name LIKE '%" + self.id + "%'"
        wait_for(lambda: not self.sql(f"SELECT 1 {slots} AND active"), "the slot is free", 120, 0.1)
        self.sql(f"SELECT pg_drop_replication_slot(slot_name) {slots}")
        self.sql(f"DROP TABLE IF EXISTS {self.id}_requests, {self.products}")


@pytest.fixture
def estate(tmp_path: Path, server: Server, capsys: pytest.CaptureFixture[str]) -> Iterator[Estate]:
    made = Estate(tmp_path, server, capsys)
    yield made
    made.close()


@served
def test_a_row_becomes_a_record_and_a_record_a_row_by_what_apply_made(estate: Estate) -> None:
    file = estate.declare(source=estate.source, sink=estate.sink)
    code, said = estate.connect("plan", file)
    assert code == 5, said
    assert f"+ {estate.id}-requests" in said
    assert "poll.interval.ms = 20" in said
    assert "2 to create" in said
    code, said = estate.connect("apply", file)
    assert code == 0, said
    assert estate.connect("plan", file)[0] == 0
    estate.sql(f"INSERT INTO {estate.id}_requests (url) VALUES ('http://shop.test/p/1')")
    consumer = Consumer(
        {"bootstrap.servers": estate.broker, "group.id": estate.id, "auto.offset.reset": "earliest"}
    )
    consumer.subscribe([estate.requests])
    message = wait_for(
        lambda: next((m for m in consumer.consume(1, 0.2) if m.error() is None), None),
        "the row on its topic",
        120,
    )  # an error: no topic yet
    value = json.loads(message.value())
    assert (value["url"], value["__op"], value["__lsn"] > 0) == ("http://shop.test/p/1", "c", True)
    assert json.loads(message.key()) == {"id": 1}
    assert message.headers() == [("penstock-geo", b"us")]
    consumer.close()
    for price in (1.5, 2.5):
        estate.publish("A", price)
    estate.publish("B", 3.0)
    wait_for(
        lambda: estate.rows() == [("A", 2.5), ("B", 3.0)],
        "one row for each key, the later value",
        120,
    )
    estate.publish("A", None)
    wait_for(lambda: estate.rows() == [("B", 3.0)], "the tombstone took its row away", 120)


@served
def test_applying_again_sends_nothing_and_a_change_only_what_changed(estate: Estate) -> None:
    file = estate.declare(source=estate.source, sink=estate.sink)
    assert estate.connect("apply", file)[0] == 0
    code, said = estate.connect("apply", file)
    assert code == 0, said
    assert "no connector differs, so none was sent" in said
    estate.declare(source={**estate.source, "poll": "50ms"}, sink=estate.sink)
    planned = estate.json("plan", file)
    assert {c["name"]: c["action"] for c in planned["connectors"]} == {
        f"{estate.id}-requests": "change",
        f"{estate.id}-products": "keep",
    }
    assert planned["connectors"][0]["differences"] == [
        {"option": "poll.interval.ms", "old": "20", "new": "50"}
    ]
    done = estate.json("apply", file)
    assert {c["name"]: (c["action"], c["ok"], c["state"]) for c in done["connectors"]} == {
        f"{estate.id}-requests": ("change", True, "RUNNING"),
        f"{estate.id}-products": ("keep", True, "RUNNING"),
    }
    # What is declared no more is said, and deleted only when asked for.
    estate.declare(source={**estate.source, "poll": "50ms"})
    code, said = estate.connect("apply", file)
    assert "is no longer declared (--prune deletes it)" in said
    assert len(estate.json("status", "--pipeline", estate.id)["connectors"]) == 2
    assert estate.connect("apply", file, "--prune")[0] == 0
    assert [c["name"] for c in estate.json("status", "--pipeline", estate.id)["connectors"]] == [
        f"{estate.id}-requests"
    ]


@served
def test_a_secret_by_reference_is_read_by_the_worker_and_seen_by_nobody_else(
    estate: Estate, tmp_path: Path
) -> None:
    secrets = tmp_path / "db.properties"
    secrets.write_text("password=hunter2\n")
    reference = f"${{file:{secrets}:password}}"
    file = estate.declare(sink={**estate.sink, "password": reference})
    assert estate.connect("apply", file)[0] == 0
    kept = Worker(estate.url).connectors()[f"{estate.id}-products"].info.texts()
    assert kept["connection.password"] == reference
    estate.declare(
        sink={**estate.sink, "database": estate.database.replace("postgres@", "postgres:hunter2@")}
    )
    code, said = estate.connect("plan", file)
    assert code == 5
    assert "hunter2" not in said
    assert "connection.password = ${file:" in said
    assert "→ ***" in said
    assert "hunter2" not in estate.connect("plan", file, "--json")[1]


@served
def test_what_the_worker_finds_wrong_is_told_for_each_option_and_nothing_is_sent(
    estate: Estate,
) -> None:
    wrong = estate.database.replace(
        ":" + estate.database.rpartition(":")[2].partition("/")[0], ":1"
    )
    file = estate.declare(
        source={**estate.source, "database": wrong, "config": {"poll.interval.msec": "5"}}
    )
    code, said = estate.connect("plan", file)
    assert code == 3, said
    assert "database.hostname: Error while validating connector config" in said
    assert (
        "poll.interval.msec: is no option of this connector; did you mean poll.interval.ms?" in said
    )
    code, said = estate.connect("apply", file)
    assert (code, said.count("\n")) == (3, 2), said
    assert "nothing was sent" in said
    assert estate.json("status", "--pipeline", estate.id)["connectors"] == []


@served
def test_a_connector_that_fails_shows_its_trace_and_runs_once_it_is_restarted_without_the_cause(
    estate: Estate,
) -> None:
    missing = f"{estate.id}_db"
    database = estate.database.rpartition("/")[0] + f"/{missing}"
    file = estate.declare(sink={**estate.sink, "database": database})
    code, said = estate.connect("apply", file)
    assert code == 1, said
    assert "task 0: " in said
    assert (
        "Unable to determine Dialect without JDBC metadata" in said
    )  # its words for a database that it cannot open
    assert "\tat " not in said
    code, said = estate.connect("status", "--pipeline", estate.id)
    assert (code, "FAILED" in said) == (1, True)
    failed = estate.json("status", "--pipeline", estate.id)["connectors"][0]
    assert failed["tasks"][0]["state"] == "FAILED"
    assert any("Unable to determine Dialect" in line for line in failed["tasks"][0]["trace"])
    estate.sql(f"CREATE DATABASE {missing}")
    try:
        assert estate.connect("restart", "--failed", "--pipeline", estate.id) == (
            0,
            f"{estate.id}-products: restarted, with 1 failed task\n",
        )
        wait_for(
            lambda: (
                estate.json("status", "--pipeline", estate.id)["connectors"][0]["tasks"][0]["state"]
                == "RUNNING"
            ),
            "it runs",
            120,
            0.2,
        )
        assert estate.connect("restart", "--failed", "--pipeline", estate.id) == (
            0,
            "no connector has failed\n",
        )
        assert estate.connect("delete", f"{estate.id}-products", "--yes")[0] == 0
    finally:
        estate.sql(f"DROP DATABASE {missing} WITH (FORCE)")


@served
def test_a_record_that_cannot_be_written_stops_the_task_and_restart_alone_takes_it_up_again(
    estate: Estate,
) -> None:
    file = estate.declare(sink=estate.sink)
    assert estate.connect("apply", file)[0] == 0
    estate.produce("{}", '{"sku": "no schema"}')
    wait_for(
        lambda: estate.connect("status", "--pipeline", estate.id)[0] == 1,
        "the task has failed",
        120,
        0.2,
    )
    code, said = estate.connect("apply", file)  # as it was: nothing is sent, and it is no success
    assert code == 1
    assert "FAILED" in said
    # A restart finds the same record again; passing it over is the user's decision.
    estate.declare(sink={**estate.sink, "dead_letters": f"{estate.id}_bad", "replication": 1})
    assert estate.connect("apply", file)[0] == 0
    estate.publish("A", 1.0)
    wait_for(lambda: estate.rows() == [("A", 1.0)], "what came after it", 120)


@served
def test_what_penstock_did_not_make_it_does_not_touch(estate: Estate) -> None:
    worker, name = Worker(estate.url), f"{estate.id}-products"
    foreign = {
        "name": name,
        "connector.class": "org.apache.kafka.connect.file.FileStreamSinkConnector",
        "topics": estate.products,
        "file": "/dev/null",
    }
    worker.put(name, foreign)
    try:
        file = estate.declare(sink=estate.sink)
        code, said = estate.connect("plan", file)
        assert code == 3, said
        assert "belongs to another program, so set another name: connect.name" in said
        assert estate.connect("apply", file)[0] == 3
        for command in (("restart", name), ("delete", name, "--yes")):
            code, said = estate.connect(*command)
            assert code == 2
            assert f"connector {name} belongs to another program" in said
        assert estate.connect("delete", "--all", "--yes", "--pipeline", estate.id) == (
            0,
            "no connector of a pipeline exists\n",
        )
        assert worker.connectors()[name].info.texts() == foreign
        assert name in estate.connect("status", "--all")[1]
    finally:
        worker.delete(name)


@served
def test_a_plugin_that_the_worker_lacks_is_checked_by_its_documentation_and_not_sent(
    estate: Estate,
) -> None:
    given = {
        "kind": "bigquery",
        "project": "p",
        "dataset": "d",
        "keyfile": "/run/key.json",
        "name": "big",
        "config": {"upsertEnable": "true"},
    }
    file = estate.declare(sink=given)
    code, said = estate.connect("plan", file)
    assert code == 3, said
    assert "not checked by the Connect worker: plugin not installed" in said
    assert "upsertEnable: is no option of this connector; did you mean upsertEnabled?" in said
    del given["config"]
    estate.declare(sink=given)
    assert estate.connect("plan", file)[0] == 5
    assert estate.json("plan", file)["connectors"][0]["checked_by"] == "documentation"
    code, said = estate.connect("apply", file)
    assert code == 3
    assert "the worker has no BigQuery sink" in said


@served
def test_deleting_names_the_slot_that_stays(estate: Estate) -> None:
    file = estate.declare(source=estate.source)
    assert estate.connect("apply", file)[0] == 0
    name = f"{estate.id}-requests"
    code, said = estate.connect("delete", name)
    assert (code, "--yes to confirm" in said) == (2, True)
    code, said = estate.connect("delete", name, "--yes")
    assert code == 0
    assert f"pg_drop_replication_slot('penstock_{estate.id}_requests')" in said
    assert estate.connect("delete", name, "--yes")[0] == 2


@served
def test_the_catalogue_of_what_runs_here_is_the_plugins_own(estate: Estate) -> None:
    worker = Worker(estate.url)
    for plugin in (DEBEZIUM_POSTGRES, DEBEZIUM_JDBC):
        said = worker.validate(
            plugin.cls,
            {"connector.class": plugin.cls, "name": "x", "topic.prefix": "x", "topics": "x"},
        )
        assert plugin.options <= said.names(), (plugin.title, plugin.options - said.names())
        assert plugin.secrets == said.secrets()


# -- a worker that is none, or not yet -------------------------------------------------------------


class Pretender(BaseHTTPRequestHandler):
    """Answers what it is told to, one after the other; the last one stays."""

    answers: ClassVar[list[tuple[int, bytes]]] = []
    asked: ClassVar[int] = 0

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()

    def do_GET(self) -> None:
        status, body = Pretender.answers[min(Pretender.asked, len(Pretender.answers) - 1)]
        Pretender.asked += 1
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        return None


@pytest.fixture
def pretender() -> Iterator[Callable[..., str]]:
    server = HTTPServer(("127.0.0.1", 0), Pretender)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()

    def answering(*answers: tuple[int, bytes]) -> str:
        Pretender.answers, Pretender.asked = list(answers), 0
        return f"http://127.0.0.1:{server.server_port}"

    yield answering
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_rebalance_is_waited_for(pretender: Callable[..., str]) -> None:
    waits: list[float] = []
    busy = (409, b'{"error_code":409,"message":"a rebalance is in process"}')
    assert Worker(pretender(busy, busy, (200, b"{}")), wait=waits.append).connectors() == {}
    assert waits == [0.25, 0.5]


def test_a_rebalance_without_end_is_said(
    pretender: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter(range(0, 10_000, 25))
    worker = Worker(
        pretender((409, b'{"message":"a rebalance is in process"}')),
        wait=lambda seconds: None,
        now=lambda: float(next(clock)),
    )
    with pytest.raises(Exception, match="a rebalance is in process"):
        worker.connectors()


@pytest.mark.parametrize("runs", [True, False])
def test_a_failure_of_the_old_configuration_is_not_taken_for_one_of_the_new(
    pretender: Callable[..., str], runs: bool
) -> None:
    def told(state: str, trace: str = "") -> tuple[int, bytes]:
        return 200, json.dumps(
            {
                "connector": {"state": "RUNNING"},
                "tasks": [{"id": 0, "state": state, "trace": trace}],
            }
        ).encode()

    old = told("FAILED", "no schema")
    worker = Worker(
        pretender(old, *[old] * 7, told("RUNNING") if runs else told("FAILED", "no table"))
    )  # before, and while the worker is busy
    shop = Pipeline("shop")
    shop.sink(
        "kafka://127.0.0.1:9092/products?key=sku",
        connect={"kind": "jdbc-postgres", "database": "postgres://shop@db.example/shop"},
    )
    (made,) = render(shop, {})
    (done,) = apply(
        Plan("shop", worker.shown, (Step(made.name, "change", made),)),
        worker,
        prune=False,
        timeout=60,
    )
    assert (done.ok, done.status.tasks[0].trace) == ((True, "") if runs else (False, "no table"))


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ((200, b"<html>"), "is not a Kafka Connect worker"),
        ((404, b"<html>"), "is not a Kafka Connect worker (status 404)"),
        ((401, b""), "rejects the credentials (401)"),
    ],
)
def test_what_is_no_worker_is_said_in_one_sentence(
    pretender: Callable[..., str], capsys: pytest.CaptureFixture[str], answer: Any, says: str
) -> None:
    url = pretender(answer).replace("http://", "http://user:hunter2@")
    assert main(["connect", "status", "--url", url]) == 4
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 2
    assert "hunter2" not in said


def test_a_worker_that_is_not_there_is_exit_four(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["connect", "status", "--url", "http://127.0.0.1:1"]) == 4
    assert (
        "the Connect worker at http://127.0.0.1:1 cannot be reached: Connection refused"
        in capsys.readouterr().err
    )


def test_an_answer_without_end_is_cut_off(
    pretender: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.connect.rest.MAX_ANSWER", 1 << 20)
    with pytest.raises(Unreachable, match="more than 1 MiB"):
        Worker(pretender((200, b"[" + b" " * (2 << 20)))).connectors()


# -- what needs no worker --------------------------------------------------------------------------


def test_init_writes_a_connector_to_start_from_and_never_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = str(tmp_path / "connect")
    assert main(["connect", "init", "debezium-postgres", "-C", where]) == 0
    said = capsys.readouterr().out
    written = json.loads((tmp_path / "connect" / "debezium-postgres.json").read_text())
    assert written["name"] == "shop-scrape-requests"
    assert written["config"]["database.password"] == "${env:SHOP_DB_PASSWORD}"
    assert (
        'connect={"kind":"debezium-postgres","database":"postgres://shop:${env:SHOP_DB_PASSWORD}@'
        in said
    )
    assert main(["connect", "init", "debezium-postgres", "-C", where]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["connect", "init", "oracle"]) == 2


def test_the_address_is_configuration(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PENSTOCK_CONNECT_URL", "http://127.0.0.1:2")
    assert main(["connect", "status"]) == 4
    assert "http://127.0.0.1:2" in capsys.readouterr().err
    monkeypatch.setenv("PENSTOCK_CONNECT_URL", "kafka://127.0.0.1")
    assert main(["connect", "status"]) == 3
