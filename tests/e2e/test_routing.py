"""The seeds' payload `{"url": …, "routing": {…}}` at every source, without `map`."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from redis import Redis
from tests.e2e.harness import SHOP, Project, Site, wait_for
from tests.e2e.test_cdc import Database
from tests.e2e.webhook_rig import Server as WebhookServer
from tests.servers import Handle
from tests.sources.kafka_ground import Ground

from penstock.testing.web import json_reply

Server = Callable[[str], Handle]
URL = "https://shop.test/p/{}"
ROUTING: dict[str, Any] = {"geo": "US", "pool": "residential", "account": None}
ROUTE = {"geo": "US", "pool": "residential"}
# A static route, which an object with `routing` changes in part.
STATIC = 'route={"geo": "DE", "account": "main"}'
PAYLOADS: list[dict[str, Any]] = [
    {"url": URL.format(0), "routing": ROUTING},
    {"url": URL.format(1), "routing": None},
    {"url": URL.format(2)},
    {"url": URL.format(3), "routing": {"planet": "Mars"}},
    {"url": URL.format(4), "routing": {"geo": 7}},
]
ROUTES = {0: {**ROUTE, "account": "main"}, 1: {"geo": "DE", "account": "main"}}
ROUTES[2] = ROUTES[1]
REASONS = ["its geo is no text of 1 to 512 characters", "its routing has no 'planet'; it has geo"]


def check(project: Project) -> None:
    """Check the routes of the accepted events, and the reasons of the refused payloads."""

    def letters() -> list[dict[str, Any]]:
        found = json.loads(project.good("dlq", "ls", "--all", "--json"))["letters"]
        return sorted(found, key=lambda letter: str(letter["reason"]))

    wait_for(lambda: len(project.events()) >= len(ROUTES), "the events")
    wait_for(lambda: len(letters()) == len(REASONS), "the dead letters")
    for n, route in ROUTES.items():
        assert project.event(URL.format(n))["route"] == route
    for letter, reason in zip(letters(), REASONS, strict=True):
        assert letter["reason"].startswith(reason)


def read(
    project: Project, url: str, started: Callable[[], None] = lambda: None, **options: str
) -> None:
    """Read a source until the payloads are accepted or refused, and check the result.

    `started` is called after the start.
    """
    given = "".join(f", {name}={value}" for name, value in options.items())
    project.write("shop.py", f'{SHOP}\nshop.source("{url}", name="it", {STATIC}{given})\n')
    running = project.start("run", "shop.py", "--role", "source")
    wait_for(lambda: project.penstock("status").code == 0, "the store")
    started()
    check(project)
    running.signal(15)
    assert running.wait() == 0, running.output


def test_routing_in_a_list_of_json_lines(project: Project) -> None:
    project.write("urls.jsonl", "".join(json.dumps(p) + "\n" for p in PAYLOADS))
    read(project, "seeds:urls.jsonl")


def test_routing_in_a_column_of_a_csv_list(project: Project) -> None:
    lines = ["url,routing"]
    for payload in PAYLOADS:
        text = json.dumps(payload["routing"]) if "routing" in payload else ""
        lines.append(payload["url"] + ',"' + text.replace('"', '""') + '"')
    project.write("urls.csv", "\n".join(lines) + "\n")
    read(project, "seeds:urls.csv")


def test_routing_in_the_items_of_an_api(project: Project, site: Site) -> None:
    url = site.serve("/api.json", json_reply({"items": PAYLOADS}))
    read(project, f"api+{url}", items='"items"', key='"url"')


@pytest.mark.server("redis")
def test_routing_in_the_elements_of_a_redis_list(project: Project, server: Server) -> None:
    key = f"t{uuid.uuid4().hex[:8]}:start_urls"
    with Redis.from_url(server("redis").url) as client:
        client.rpush(key, *(json.dumps({**payload, "method": None}) for payload in PAYLOADS))
        read(project, f"{server('redis').url}?list={key}")
        client.delete(key)


@pytest.mark.server("kafka")
def test_routing_in_the_messages_of_a_kafka_topic(project: Project, server: Server) -> None:
    ground = Ground(server("kafka").url)
    try:
        topic = ground.topic()
        for payload in PAYLOADS:
            ground.queue(topic, json.dumps(payload).encode())
        ground.flush()
        read(project, f"{ground.url}/{topic}", group=f'"{topic}"')
    finally:
        project.close()
        ground.sweep()


@pytest.mark.server("postgres")
@pytest.mark.parametrize("kind", ["cdc", "table"])
@pytest.mark.parametrize("column", ["jsonb", "json", "text"])
def test_routing_in_a_column_of_a_table(
    project: Project, server: Server, kind: str, column: str
) -> None:
    database = Database(server("postgres").url)
    try:
        database.db.execute(f"ALTER TABLE scrape_requests ADD COLUMN routing {column}")
        database.db.execute("ALTER TABLE scrape_requests ADD COLUMN penstock_taken_at timestamptz")

        def insert() -> None:
            if kind == "cdc":
                wait_for(lambda: any(active for _, active in database.slots()), "the change stream")
            for payload in PAYLOADS:
                text = json.dumps(payload["routing"]) if "routing" in payload else None
                database.db.execute(
                    f"INSERT INTO scrape_requests(url, routing) VALUES(%s, %s::{column})",
                    (payload["url"], text),
                )

        read(project, database.url.replace("postgres:", f"postgres+{kind}:"), insert)
    finally:
        project.close()
        database.close()


def test_routing_in_the_items_of_a_webhook(project: Project) -> None:
    server = WebhookServer(project, pipeline=f'{SHOP}\nshop.source("webhook:shop", {STATIC})\n')
    for payload, n in zip(PAYLOADS, range(5), strict=True):
        answer = server.post(payload)
        assert answer.status == (202 if n in ROUTES else 422), answer.json
        if n in ROUTES:
            assert project.event(URL.format(n))["route"] == ROUTES[n]
    refused = server.post(PAYLOADS).json
    assert [each["reason"][:25] for each in refused["reasons"]] == [
        REASONS[1][:25],
        REASONS[0][:25],
    ]


def test_routing_in_a_pushed_object(project: Project) -> None:
    lines = "".join(json.dumps(payload) + "\n" for payload in PAYLOADS)
    done = project.penstock(
        *("push", "-", URL.format(9), "--geo", "DE", "--account", "main", "--json"),
        input=lines + "{no json\n",
    )
    found = json.loads(done.out)
    assert (done.code, found["accepted"], found["refused"]) == (1, 4, 3), done.output
    assert [(each["where"], each["reason"][:20]) for each in found["refusals"]] == [
        ("stdin:4", "its routing has no '"),
        ("stdin:5", "its geo is no text o"),
        ("stdin:6", "it is not a JSON obj"),
    ]
    for n, route in {**ROUTES, 9: ROUTES[2]}.items():
        assert project.event(URL.format(n))["route"] == route
    event = project.event(URL.format(0))
    assert (event["source"], event["priority"]) == ("push", 1)
