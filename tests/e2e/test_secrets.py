"""No file, message or output of Penstock has the secrets of the sites and of the configuration.

The site sets cookies, wants logins, and sends tokens back. The configuration has passwords in every
URL that a server accepts with one. The test reads the state directory, the messages of the broker,
the tables and files of the servers, and the output of the commands.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import re
import secrets
import signal
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from urllib.parse import quote

import obstore
import psycopg
import pytest
import zstandard
from tests.e2e.harness import Project, Site, product, wait_for
from tests.e2e.layouts import Server, lay_out, layouts
from tests.e2e.test_passwords_in_urls import output_of
from tests.embedded.proxy_servers import Proxy

from penstock.stores.s3 import bucket_at
from penstock.testing.web import Reply, Request

# A secret is stored in none of these spellings.
NAMES = (
    *("cookie", "nameless", "hop", "delayed", "echo", "apikey", "session", "linked", "location"),
    *("bearer", "webhook", "proxy", "broker", "store", "pushed", "list", "basic"),
)
PIPELINE = """
from penstock import Page, Pipeline

shop = Pipeline("shop")

@shop.extract(match="*/p/*", version=1, key="sku")
def product(page: Page):
    yield {
        "sku": page.css("[data-sku]::attr(data-sku)").get(),
        "cookie": page.headers.get("set-cookie"),
        "type": page.headers["content-type"],
    }

@shop.extract(match="*/broken/*", version=1)
def broken(page: Page):
    raise ValueError(f"cannot use {page.headers}")

shop.source(
    "api+SITE/api",
    key="sku",
    map={"url": "link"},
    headers={"Authorization": "Bearer env:SHOP_TOKEN"},
)
shop.source("webhook:orders", secret="env:HOOK_SECRET")
shop.sink("jsonl:products.jsonl")
shop.sink("csv:.penstock/products.csv")
shop.sink("sqlite:products.db")
"""
# Prints all messages of the broker.
PEEK = """
import os, sys
from pathlib import Path
from penstock.config import files
from penstock.runtime.stores import open_stores

stores = open_stores(files.load({}, dict(os.environ), Path.cwd()).config, inline=True)
for topic in ("requests", "pages", "records", "requests.dead", "pages.dead", "records.dead"):
    try:
        found = stores.perform(lambda: stores.topics.peek(topic, 1000))
    except Exception as e:
        print(topic, "has no messages:", e, file=sys.stderr)
        continue
    for m in found:
        sys.stdout.buffer.write(f"{topic} {m.key} {m.headers} ".encode() + m.body + b"\\n")
stores.close()
"""


def spellings(secret: str) -> set[bytes]:
    """Return the secret as text, percent-encoded, in hexadecimal, and in base64 at any offset."""
    raw = secret.encode()
    found = {raw, quote(secret, safe="").encode(), raw.hex().encode(), raw.hex().upper().encode()}
    for offset in range(3):
        # Without the characters that depend on the bytes around it.
        text = base64.b64encode(b"\0" * offset + raw).rstrip(b"=")
        found.add(text[(0, 2, 3)[offset] : -1 if (offset + len(raw)) % 3 else None])
    return found


class Places:
    """Searches bytes for secrets. `hits` has the places of the secrets that were found.

    Files that were last written before this object was made are left out. A server's directory has
    many of them, from other tests.
    """

    def __init__(self, planted: Mapping[str, str]) -> None:
        self._began = time.time() - 1.0  # file systems round the time
        self._planted = {name: spellings(secret) for name, secret in planted.items()}
        self.hits: set[tuple[str, str]] = set()  # (place, name of the secret)
        self.bytes = 0

    def add(self, place: str, data: bytes) -> None:
        self.bytes += len(data)
        for name, forms in self._planted.items():
            if any(form in data for form in forms):
                self.hits.add((place, name))
        for at in [m.start() for m in re.finditer(rb"\x28\xb5\x2f\xfd", data)]:
            try:
                plain = zstandard.ZstdDecompressor().decompressobj().decompress(data[at:])
            except zstandard.ZstdError:
                continue
            self.add(f"{place} (compressed)", plain)

    def add_bytes_of_files(self, directory: Path, *, but: tuple[str, ...] = ()) -> None:
        for path in sorted(directory.rglob("*")):
            # A worker that runs may remove a file.
            with contextlib.suppress(FileNotFoundError):
                if not path.is_file() or path.name in but or path.stat().st_mtime < self._began:
                    continue
                # Kafka's files of 10 MB have zeros at the end, before they are used.
                data = path.read_bytes().rstrip(b"\0")
                self.add(str(path.relative_to(directory)), data)

    def add_files(self, directory: Path, *, but: tuple[str, ...] = ()) -> None:
        """Search the files and the rows of the databases. No worker may run."""
        self.add_bytes_of_files(directory, but=but)
        for path in sorted(directory.rglob("*.db")):
            with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
                tables = db.execute("SELECT name FROM sqlite_master WHERE type='table'")
                for (table,) in tables.fetchall():
                    for row in db.execute(f'SELECT * FROM "{table}"'):
                        self.add_row(f"{path.name}:{table}", row)

    def add_row(self, place: str, row: tuple[object, ...]) -> None:
        for value in row:
            if isinstance(value, (bytes, str)):
                self.add(place, value.encode() if isinstance(value, str) else bytes(value))


@pytest.fixture
def planted() -> dict[str, str]:
    """Return a new secret for each name. Its characters differ when they are percent-encoded."""
    return {name: f"Zq{secrets.token_hex(8)}!{name}" for name in NAMES}


@pytest.fixture
def proxy(site: Site, planted: dict[str, str], project: Project) -> Iterator[Proxy]:
    """A proxy that wants a password. It runs in the thread of the site."""
    made = Proxy(password=planted["proxy"])

    def run(work: Callable[[], object]) -> None:
        asyncio.run_coroutine_threadsafe(work(), site._loop).result(30)  # type: ignore[arg-type]

    run(made.start)
    project.allow(made.port)
    yield made
    run(made.stop)


def serve_secrets(site: Site, planted: dict[str, str]) -> list[str]:
    """Let the site send its secrets. Return the URLs to push. A page's body has no secret."""
    seen: list[str] = []

    def page(n: int | str, **headers: str) -> str:
        html = {"content-type": "text/html; charset=utf-8"}
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        return site.serve(f"/p/{n}", Reply(200, html | names, product(n).encode()))

    def once_busy(request: Request) -> Reply:
        seen.append(request.headers.get("cookie", ""))
        if len(seen) == 1:
            return Reply(429, {"retry-after": "1"}, b"later")
        return Reply(200, {"content-type": "text/html"}, product("busy").encode())

    def api(request: Request) -> Reply:
        if request.headers.get("authorization") != f"Bearer {planted['bearer']}":
            return Reply(401, {"www-authenticate": "Bearer"}, b"")
        listed = [{"sku": "API", "link": site.url("/p/listed")}]
        return Reply(200, {"content-type": "application/json"}, json.dumps(listed).encode())

    site.serve("/api", api)
    page("listed")
    site.serve("/p/busy", once_busy)
    site.serve("/broken/1", Reply(200, {"set-cookie": f"b={planted['cookie']}"}, b"<p>broken"))
    site.serve(
        "/start",
        Reply(302, {"location": "/p/after", "set-cookie": f"h={planted['hop']}; Path=/"}, b""),
    )
    page("after")
    site.serve(
        "/begin",
        Reply(302, {"location": "/p/busy", "set-cookie": f"d={planted['delayed']}; Path=/"}, b""),
    )
    site.serve("/login", Reply(401, {"www-authenticate": 'Basic realm="shop"'}, b"who are you?"))
    userinfo = f"http://me:{quote(planted['location'], safe='')}@127.0.0.1:{site.port}/p/1"
    site.serve("/elsewhere", Reply(302, {"location": userinfo}, b""))
    return [
        page(1, set_cookie=f"sid={planted['cookie']}; Path=/; HttpOnly"),
        page(2, set_cookie=planted["nameless"]),
        page(3, authorization=f"Bearer {planted['echo']}", x_api_key=planted["apikey"]),
        page(4, x_session_id=planted["session"], authentication_info=planted["basic"]),
        page(5, link=f"<http://me:{quote(planted['linked'], safe='')}@127.0.0.1/>; rel=next"),
        *map(site.url, ("/start", "/begin", "/login", "/elsewhere", "/broken/1")),
    ]


def give_passwords(project: Project, layout: str, server: Server, planted: dict[str, str]) -> None:
    """Put a password into the URL of each server that accepts one."""
    password = quote(planted["broker"], safe="")
    match layout:
        case "redis":
            handle = server("redis")
            subprocess.run(
                [sys.executable, "-c", "import redis,sys; redis.Redis.from_url(sys.argv[1])"
                 ".acl_setuser('me', enabled=True, reset=True, passwords='+' + sys.argv[2],"
                 " keys='*', channels='*', commands=['+@all'])", handle.url, planted["broker"]],
                check=True,
            )  # fmt: skip
            project.set(broker_url=f"redis://me:{password}@127.0.0.1:{handle.port}/0")
        case "rabbitmq":
            handle = server("rabbitmq")
            at = f"http://127.0.0.1:{handle.ports('management')}/api"
            rights = {"configure": ".*", "write": ".*", "read": ".*"}
            put(f"{at}/users/me", {"password": planted["broker"], "tags": "administrator"})
            put(f"{at}/permissions/%2F/me", rights)
            project.set(broker_url=f"amqp://me:{password}@127.0.0.1:{handle.port}/")
        case "postgres":
            # The server trusts its clients, so it takes any password.
            url = server("postgres").url
            project.set(broker_url=url.replace("postgres@", f"postgres:{password}@"))
        case "sqs":
            url = server("sqs").url
            assert "//x:x@" in url
            project.set(broker_url=url.replace("//x:x@", f"//key:{password}@"))
        case "s3":
            assert "key=x&secret=x" in server("s3").url
            pages = server("s3").url.replace("/pages?", f"/{project.mark}?")
            keys = quote(planted["store"], safe="")
            project.set(pages_url=pages.replace("key=x&secret=x", f"key={keys}&secret={keys}"))


def list_in_s3(server: Server, planted: dict[str, str], name: str, text: str) -> str:
    """Write a list of URLs to S3. Return a source that reads the list with a secret key."""
    bucket, _ = bucket_at(server("s3").url, whole=True)
    obstore.put(bucket, name, text.encode())
    keys = quote(planted["list"], safe="")
    url = server("s3").url.replace("/pages?", f"/{name}?")
    url = url.replace("key=x&secret=x", f"key={keys}&secret={keys}")
    return f"shop.source({'seeds+' + url!r})\n"


def put(url: str, document: dict[str, str]) -> None:
    login = "Basic " + base64.b64encode(b"guest:guest").decode()
    headers = {"authorization": login, "content-type": "application/json"}
    body = json.dumps(document).encode()
    urllib.request.urlopen(urllib.request.Request(url, body, headers, method="PUT")).close()


def add_messages(places: Places, project: Project, when: str) -> int:
    """Search the messages on the broker. Return their number."""
    done = subprocess.run(
        [sys.executable, "-c", PEEK], cwd=project.dir, env=project.env, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    places.add(f"messages {when}", done.stdout)
    places.add(f"errors of reading messages {when}", done.stderr)
    return done.stdout.count(b"\n")


def run_role(project: Project, role: str, until: Callable[[], object]) -> str:
    running = project.start("run", "shop.py", "--role", role, "--log-level", "debug")
    wait_for(lambda: running.ended or until(), f"the work of {role}", 90, 0.1)
    running.signal(signal.SIGTERM)
    running.wait()
    return running.output


@pytest.mark.parametrize(
    "layout",
    [
        *layouts("embedded", "redis", "rabbitmq", "kafka", "sqs", "postgres"),
        pytest.param("s3", marks=pytest.mark.server("s3")),  # embedded, with pages and a list in S3
    ],
)
def test_no_file_message_or_output_has_a_secret(
    project: Project,
    site: Site,
    server: Server,
    planted: dict[str, str],
    proxy: Proxy,
    layout: str,
) -> None:
    places, objects = Places(planted), 0
    urls = serve_secrets(site, planted)
    lay_out(project, "embedded" if layout == "s3" else layout, server)
    give_passwords(project, layout, server, planted)
    project.env |= {"SHOP_TOKEN": planted["bearer"], "HOOK_SECRET": planted["webhook"]}
    project.set(proxies_home_urls=proxy.dsn.replace(proxy.password, quote(proxy.password, safe="")))
    project.set(serve_port="0")
    pipeline = PIPELINE.replace("SITE", site.url(""))
    if layout == "s3":
        text = site.serve("/p/in-s3", product("in-s3")) + "\n"
        pipeline += list_in_s3(server, planted, f"{project.mark}.txt", text)
    project.write("shop.py", pipeline)

    refused = project.penstock("push", f"http://me:{planted['pushed']}@127.0.0.1:{site.port}/p/1")
    assert refused.code == 1, refused.output
    places.add("push", (refused.out + refused.err).encode())
    project.push(*urls)
    project.push(site.serve("/p/proxied", product("proxied")), options=("--pool", "home"))
    add_messages(places, project, "after push")

    fetched = run_role(
        project, "source,fetch", lambda: len(site.asked("/p/busy")) >= 1 and proxy.connects
    )
    places.add("log of fetch", fetched.encode())
    assert add_messages(places, project, "after fetch") > 0
    places.add_files(project.dir / ".penstock")

    def look_while_it_runs() -> int:
        places.add_bytes_of_files(project.dir / ".penstock")  # with -wal and lock files
        return add_messages(places, project, "during extract")

    extracted = run_role(project, "extract", look_while_it_runs)
    places.add("log of extract", extracted.encode())
    add_messages(places, project, "after extract")
    done = project.penstock("run", "shop.py", "--until-idle", "--log-level", "debug", "--debug")
    places.add("log of run", (done.out + done.err).encode())
    add_messages(places, project, "at the end")

    assert site.asked("/api"), "the source was read"
    rows = {row["sku"]: row for row in project.rows()}
    assert {"S-1", "S-2", "S-3", "S-4", "S-5", "S-after", "S-busy", "S-listed"} <= set(rows)
    assert "S-proxied" in rows
    assert ("S-in-s3" in rows) == (layout == "s3")
    assert {"login", "elsewhere"} <= set(project.dead_letters())

    commands = [
        ("status", "--json"), ("events", "ls", "--json"), ("dlq", "ls", "--all", "--json"),
        ("dlq", "export"), ("pages", "ls"), ("sources", "ls", "--json"),
        ("proxies", "ls", "--json"), ("doctor", "shop.py", "--json"), ("config", "show"),
        ("config", "show", "--json"), ("config", "check", "shop.py", "--debug"),
        ("topics", "ls", "--json"), ("topics", "peek", "requests", "--json"), ("domains", "ls"),
        *(("pages", "show", url, "--headers") for url in urls[:5]),
        *(("pages", "show", url, "--json") for url in urls[:5]),
        *(("trace", url, "--json") for url in urls),
        *(("dlq", "show", url, "--json") for url in urls[7:]),
        *(("fetch", url, "--json") for url in urls),
        ("fetch", "--pool", "home", urls[0]),
    ]  # fmt: skip
    said = output_of(project, [({}, list(command)) for command in commands])
    assert "CODE 2" not in said, "a command does not exist"
    # The marks between the outputs name the commands.
    for part in said.split("COMMAND ")[1:]:
        command, _, text = part.partition("\n")
        places.add(command, text.encode())

    places.add_files(project.dir, but=("shop.py",))
    match layout:
        case "postgres":
            with psycopg.connect(server("postgres").url) as db:
                tables = db.execute(
                    "SELECT table_schema, table_name FROM information_schema.tables"
                    " WHERE table_schema NOT IN ('pg_catalog', 'information_schema')"
                ).fetchall()
                assert tables
                for schema, table in tables:
                    for row in db.execute(f'SELECT * FROM "{schema}"."{table}"'):
                        places.add_row(f"{schema}.{table}", row)
        case "s3":
            bucket, _ = bucket_at(server("s3").url, whole=True)
            for batch in obstore.list(bucket, project.mark):
                for found in batch:
                    places.add(found["path"], bytes(obstore.get(bucket, found["path"]).bytes()))
                    objects += 1
            assert objects > len(rows), "the pages and the list are in S3"
        case "redis" | "kafka" | "rabbitmq":
            places.add_files(server(layout).file(""), but=(".erlang.cookie",))
    assert places.bytes > 100_000, "the test has searched something"
    assert places.hits == set()
    assert rows["S-1"]["cookie"] == "sid=***; Path=/; HttpOnly", "extraction sees the masked value"


def test_the_search_finds_every_spelling() -> None:
    secret = "Zq0123456789abcdef!cookie"
    for text in (
        secret,
        quote(secret, safe=""),
        *(base64.b64encode(f"{'x' * n}{secret}yz".encode()).decode() for n in range(6)),
        secret.encode().hex(),
    ):
        places = Places({"a": secret})
        places.add("here", b"junk " + zstandard.compress(b"more " + text.encode()) + b" junk")
        assert ("here (compressed)", "a") in places.hits, text
    places = Places({"a": secret})
    places.add("here", secret[:-3].encode())
    assert places.hits == set()
