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
    """A pipeline with unique names on the shared servers, and commands that use it."""

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
        """Run `penstock connect`. Return the exit code and the output."""
        self._capsys.readouterr()
        code = main(["connect", *args, "--url", self.url])
        output = self._capsys.readouterr()
        return code, output.out + output.err

    def json(self, *args: str) -> dict[str, Any]:
        _, output = self.connect(*args, "--json")
        found: dict[str, Any] = json.loads(output)
        return found

    def sql(self, statement: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.database, autocommit=True) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def publish(self, sku: str, price: float | None) -> None:
        """Produce a message in the format of the Kafka sink.

        It has schemas and a struct key. A deletion is a tombstone.
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
def test_applied_connectors_turn_rows_into_messages_and_messages_into_rows(estate: Estate) -> None:
    file = estate.declare(source=estate.source, sink=estate.sink)
    code, output = estate.connect("plan", file)
    assert code == 5, output
    assert f"+ {estate.id}-requests" in output
    assert "poll.interval.ms = 20" in output
    assert "2 to create" in output
    code, output = estate.connect("apply", file)
    assert code == 0, output
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
    )  # an error means that the topic does not exist yet
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
def test_apply_sends_nothing_if_nothing_differs_and_otherwise_only_the_change(
    estate: Estate,
) -> None:
    file = estate.declare(source=estate.source, sink=estate.sink)
    assert estate.connect("apply", file)[0] == 0
    code, output = estate.connect("apply", file)
    assert code == 0, output
    assert "no connector differs, so none was sent" in output
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
    # A connector that is no longer declared is reported, and deleted only with --prune.
    estate.declare(source={**estate.source, "poll": "50ms"})
    code, output = estate.connect("apply", file)
    assert "is no longer declared (--prune deletes it)" in output
    assert len(estate.json("status", "--pipeline", estate.id)["connectors"]) == 2
    assert estate.connect("apply", file, "--prune")[0] == 0
    assert [c["name"] for c in estate.json("status", "--pipeline", estate.id)["connectors"]] == [
        f"{estate.id}-requests"
    ]


@served
def test_a_secret_reference_is_resolved_by_the_connect_worker_and_never_shown(
    estate: Estate, tmp_path: Path
) -> None:
    secrets = tmp_path / "db.properties"
    secrets.write_text("password=hunter2\n")
    reference = f"${{file:{secrets}:password}}"
    file = estate.declare(sink={**estate.sink, "password": reference})
    assert estate.connect("apply", file)[0] == 0
    stored = Worker(estate.url).connectors()[f"{estate.id}-products"].info.texts()
    assert stored["connection.password"] == reference
    estate.declare(
        sink={**estate.sink, "database": estate.database.replace("postgres@", "postgres:hunter2@")}
    )
    code, output = estate.connect("plan", file)
    assert code == 5
    assert "hunter2" not in output
    assert "connection.password = ${file:" in output
    assert "→ ***" in output
    assert "hunter2" not in estate.connect("plan", file, "--json")[1]


@served
def test_errors_of_the_connect_worker_are_listed_by_option_and_nothing_is_applied(
    estate: Estate,
) -> None:
    wrong = estate.database.replace(
        ":" + estate.database.rpartition(":")[2].partition("/")[0], ":1"
    )
    file = estate.declare(
        source={**estate.source, "database": wrong, "config": {"poll.interval.msec": "5"}}
    )
    code, output = estate.connect("plan", file)
    assert code == 3, output
    assert "database.hostname: Error while validating connector config" in output
    assert (
        "poll.interval.msec: is not an option of this connector, did you mean poll.interval.ms?"
        in output
    )
    code, output = estate.connect("apply", file)
    assert (code, output.count("\n")) == (3, 2), output
    assert "no connector was sent" in output
    assert estate.json("status", "--pipeline", estate.id)["connectors"] == []


@served
def test_a_failed_connector_shows_its_trace_and_runs_after_fix_and_restart(
    estate: Estate,
) -> None:
    missing = f"{estate.id}_db"
    database = estate.database.rpartition("/")[0] + f"/{missing}"
    file = estate.declare(sink={**estate.sink, "database": database})
    code, output = estate.connect("apply", file)
    assert code == 1, output
    assert "task 0: " in output
    # The connector reports this if it cannot open the database.
    assert "Unable to determine Dialect without JDBC metadata" in output
    assert "\tat " not in output
    code, output = estate.connect("status", "--pipeline", estate.id)
    assert (code, "FAILED" in output) == (1, True)
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
            "the task runs",
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
def test_an_unwritable_record_stops_the_task_until_dead_letters_are_configured(
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
    # No configuration differs, so apply sends none. The exit code reports the failed task.
    code, output = estate.connect("apply", file)
    assert code == 1
    assert "FAILED" in output
    # A restart reads the same record again. Only the user can decide to skip it.
    estate.declare(sink={**estate.sink, "dead_letters": f"{estate.id}_bad", "replication": 1})
    assert estate.connect("apply", file)[0] == 0
    estate.publish("A", 1.0)
    wait_for(lambda: estate.rows() == [("A", 1.0)], "the row after the unwritable record", 120)


@served
def test_a_foreign_connector_is_never_changed_restarted_or_deleted(estate: Estate) -> None:
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
        code, output = estate.connect("plan", file)
        assert code == 3, output
        assert "belongs to another program, so set another name: connect.name" in output
        assert estate.connect("apply", file)[0] == 3
        for command in (("restart", name), ("delete", name, "--yes")):
            code, output = estate.connect(*command)
            assert code == 2
            assert f"connector {name} belongs to another program" in output
        assert estate.connect("delete", "--all", "--yes", "--pipeline", estate.id) == (
            0,
            "no connector of a pipeline exists\n",
        )
        assert worker.connectors()[name].info.texts() == foreign
        assert name in estate.connect("status", "--all")[1]
    finally:
        worker.delete(name)


@served
def test_a_missing_plugin_is_checked_by_the_catalogue_and_not_applied(
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
    code, output = estate.connect("plan", file)
    assert code == 3, output
    assert "not checked by the Connect worker: plugin not installed" in output
    assert "upsertEnable: is not an option of this connector, did you mean upsertEnabled?" in output
    del given["config"]
    estate.declare(sink=given)
    assert estate.connect("plan", file)[0] == 5
    assert estate.json("plan", file)["connectors"][0]["checked_by"] == "documentation"
    code, output = estate.connect("apply", file)
    assert code == 3
    assert "the Connect worker has no BigQuery sink" in output


@served
def test_delete_names_the_replication_slot_that_remains(estate: Estate) -> None:
    file = estate.declare(source=estate.source)
    assert estate.connect("apply", file)[0] == 0
    name = f"{estate.id}-requests"
    code, output = estate.connect("delete", name)
    assert (code, "--yes to confirm" in output) == (2, True)
    code, output = estate.connect("delete", name, "--yes")
    assert code == 0
    assert f"pg_drop_replication_slot('penstock_{estate.id}_requests')" in output
    assert estate.connect("delete", name, "--yes")[0] == 2


@served
def test_the_catalogue_matches_the_options_of_the_installed_plugins(estate: Estate) -> None:
    worker = Worker(estate.url)
    for plugin in (DEBEZIUM_POSTGRES, DEBEZIUM_JDBC):
        output = worker.validate(
            plugin.cls,
            {"connector.class": plugin.cls, "name": "x", "topic.prefix": "x", "topics": "x"},
        )
        assert plugin.options <= output.names(), (plugin.title, plugin.options - output.names())
        assert plugin.secrets == output.secrets()


# -- unavailable workers ---------------------------------------------------------------------------


class FakeWorker(BaseHTTPRequestHandler):
    """Server that sends the configured responses in order and then repeats the last one."""

    answers: ClassVar[list[tuple[int, bytes]]] = []
    asked: ClassVar[int] = 0

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()

    def do_GET(self) -> None:
        status, body = FakeWorker.answers[min(FakeWorker.asked, len(FakeWorker.answers) - 1)]
        FakeWorker.asked += 1
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        return None


@pytest.fixture
def fake_worker() -> Iterator[Callable[..., str]]:
    server = HTTPServer(("127.0.0.1", 0), FakeWorker)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()

    def answering(*answers: tuple[int, bytes]) -> str:
        FakeWorker.answers, FakeWorker.asked = list(answers), 0
        return f"http://127.0.0.1:{server.server_port}"

    yield answering
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_request_is_retried_during_a_rebalance(fake_worker: Callable[..., str]) -> None:
    waits: list[float] = []
    busy = (409, b'{"error_code":409,"message":"a rebalance is in process"}')
    assert Worker(fake_worker(busy, busy, (200, b"{}")), wait=waits.append).connectors() == {}
    assert waits == [0.25, 0.5]


def test_an_endless_rebalance_is_an_error(
    fake_worker: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter(range(0, 10_000, 25))
    worker = Worker(
        fake_worker((409, b'{"message":"a rebalance is in process"}')),
        wait=lambda seconds: None,
        now=lambda: float(next(clock)),
    )
    with pytest.raises(Exception, match="a rebalance is in process"):
        worker.connectors()


@pytest.mark.parametrize("runs", [True, False])
def test_a_failure_of_the_old_configuration_is_not_reported_for_the_new_one(
    fake_worker: Callable[..., str], runs: bool
) -> None:
    def status_reply(state: str, trace: str = "") -> tuple[int, bytes]:
        return 200, json.dumps(
            {
                "connector": {"state": "RUNNING"},
                "tasks": [{"id": 0, "state": state, "trace": trace}],
            }
        ).encode()

    old = status_reply("FAILED", "no schema")
    worker = Worker(
        fake_worker(
            old, *[old] * 7, status_reply("RUNNING") if runs else status_reply("FAILED", "no table")
        )
    )  # the old status before the change, and while the worker is busy
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
def test_a_server_that_is_not_a_connect_worker_is_an_error_without_the_password(
    fake_worker: Callable[..., str], capsys: pytest.CaptureFixture[str], answer: Any, says: str
) -> None:
    url = fake_worker(answer).replace("http://", "http://user:hunter2@")
    assert main(["connect", "status", "--url", url]) == 4
    output = capsys.readouterr().err
    assert says in output
    assert output.count("\n") == 2
    assert "hunter2" not in output


def test_an_unreachable_connect_worker_ends_with_exit_code_4(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["connect", "status", "--url", "http://127.0.0.1:1"]) == 4
    assert (
        "the Connect worker at http://127.0.0.1:1 cannot be reached: Connection refused"
        in capsys.readouterr().err
    )


def test_a_response_over_the_size_limit_is_an_error(
    fake_worker: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.connect.rest.MAX_ANSWER", 1 << 20)
    with pytest.raises(Unreachable, match="more than 1 MiB"):
        Worker(fake_worker((200, b"[" + b" " * (2 << 20)))).connectors()


# -- commands without a worker ---------------------------------------------------------------------


def test_init_writes_a_connector_file_and_does_not_overwrite_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = str(tmp_path / "connect")
    assert main(["connect", "init", "debezium-postgres", "-C", where]) == 0
    output = capsys.readouterr().out
    written = json.loads((tmp_path / "connect" / "debezium-postgres.json").read_text())
    assert written["name"] == "shop-scrape-requests"
    assert written["config"]["database.password"] == "${env:SHOP_DB_PASSWORD}"
    assert (
        'connect={"kind":"debezium-postgres","database":"postgres://shop:${env:SHOP_DB_PASSWORD}@'
        in output
    )
    assert main(["connect", "init", "debezium-postgres", "-C", where]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["connect", "init", "oracle"]) == 2


def test_the_address_of_the_connect_worker_comes_from_the_configuration(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PENSTOCK_CONNECT_URL", "http://127.0.0.1:2")
    assert main(["connect", "status"]) == 4
    assert "http://127.0.0.1:2" in capsys.readouterr().err
    monkeypatch.setenv("PENSTOCK_CONNECT_URL", "kafka://127.0.0.1")
    assert main(["connect", "status"]) == 3
