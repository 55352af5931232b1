"""Make the upgrade fixtures of a release: state with open work, as a killed worker leaves it.

Run this with the Python environment and the source of the release:

    PYTHONPATH=RELEASE/src python tools/make_release_fixture.py embedded OUT
    PYTHONPATH=RELEASE/src python tools/make_release_fixture.py postgres OUT --url postgres://…

OUT is a folder, for example tests/fixtures/releases/0.1.0. The script drives the command line of
the release against a small site on loopback. `embedded` writes embedded.tar.gz (the project folder
with its state directory). `postgres` writes postgres.tar.gz (the project folder) and
postgres.sql.gz (the schema). Both write NAME.status.json, the output of `penstock status --json`.
With `--rows`, the script uses the fixtures in OUT, finishes their open work with the release, and
writes NAME.rows.json, the rows of all sinks. A test compares them with those of the current code.
The database of --url must be empty. pg_dump must have the version of the server or a newer one.

The URLs in a fixture contain the ports in PORTS. `Site(healed=True)` answers them all, so that a
test can process the open events.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gzip
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import apsw

from penstock.testing.web import XML, Reply, Request, Web, product_page, reply

HOST = "127.0.0.1"
# One host for each kind of answer. All ports are below the range of outgoing connections.
PORTS = {"shop": 23301, "throttled": 23302, "failing": 23303, "slow": 23304, "paused": 23305}
MAX_BODY = 64 * 1024
NAMESPACE = "fixture"
# Numbers of the products that are in the sinks after all open events are processed.
PRODUCTS = sorted(
    {*range(7), 9, *range(10, 22), 30, 31, *range(100, 103), *range(200, 203), *range(300, 302)}
    | {*range(400, 403), *range(500, 503), *range(600, 605)}
)
TIMEOUT = 60.0  # seconds for each step
# No age limit: a fixture may be years old.
WITHOUT_AGE_LIMITS = {
    "PENSTOCK_HISTORY_KEEP": "forever",
    "PENSTOCK_PAGES_KEEP": "forever",
    "PENSTOCK_RETRY_MAX_AGE": "3650d",
}

PIPELINE = f"""
import os

from penstock import Page, Pipeline

shop = Pipeline("shop")
shop.source("feed+http://{HOST}:{PORTS["shop"]}/feed.xml", name="news", every="1h")


@shop.extract(match="*/p/*", version=1, key="sku")
def product(page: Page):
    if page.url.endswith("/p/7"):
        raise ValueError("the extractor fails on this page")
    if page.url.endswith("/p/8"):
        os.abort()
    yield {{
        "sku": page.css("[data-sku]::attr(data-sku)").get(),
        "title": page.css("h1::text").get(),
        "price": page.css(".price::text").get(),
    }}
    if page.url.endswith("/p/3"):
        yield from page.follow(["/p/30", "/p/31"])


shop.sink("jsonl:products.jsonl")
shop.sink("sqlite:products.db?table=products&mode=append")
"""

CONFIGURATION = f"""\
pipeline = "shop.py"
namespace = "{NAMESPACE}"

[net]
allow = "{",".join(f"{HOST}:{port}" for port in PORTS.values())}"
max_body = "{MAX_BODY}"
timeout.first_byte = "10m"
timeout.total = "10m"

[pace]
rate = "50"

[retry]
base = "2m"
"""

# Publishes a message that is not an event envelope, past the intake.
PUBLISH_GARBAGE = """
import os
from pathlib import Path
from penstock.config.files import load
from penstock.runtime.stores import open_stores
from penstock.ports import Out

stores = open_stores(load({}, os.environ, Path.cwd()).config)
async def publish():
    return await stores.broker.publish([Out(topic="requests", id="garbage", key="k", body=b"{")])
try:
    print(stores.perform(publish))
finally:
    stores.close()
"""


class Site:
    """The five hosts. With `healed`, the throttled, failing and slow hosts answer with pages."""

    def __init__(self, *, healed: bool = False) -> None:
        self.healed = healed

    def __call__(self, request: Request) -> Reply:
        host = next(name for name, port in PORTS.items() if port == request.port)
        if request.path == "/robots.txt":
            return reply("User-agent: *\nDisallow: /private/\n", "text/plain")
        if request.path == "/feed.xml":
            return reply(feed(), XML)
        if not self.healed:
            if host == "throttled":
                return reply("later\n", "text/plain", 429, retry_after="120")
            if host == "failing":
                return reply("broken\n", "text/plain", 500)
        if request.path == "/big":
            return reply("<p>" + "x" * 2 * MAX_BODY)
        if request.path.startswith("/p/"):
            delay = 3600.0 if host == "slow" and not self.healed else 0.0
            return replace(reply(product_page(int(request.path[3:]))), delay=delay)
        return reply("not found\n", "text/plain", 404)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[Web]:
        """Listen on all ports. Wait for a port that another process uses."""
        async with Web(self, host=HOST) as web:
            until = time.monotonic() + TIMEOUT
            for port in PORTS.values():
                while True:
                    try:
                        await web.listen(HOST, port)
                        break
                    except OSError:
                        if time.monotonic() > until:
                            raise
                        await asyncio.sleep(0.1)
            yield web


def feed() -> str:
    entries = "".join(
        f"<item><guid>{n}</guid><link>{url('shop', n)}</link><title>Product {n}</title></item>"
        for n in (100, 101, 102)
    )
    return f'<rss version="2.0"><channel><title>News</title>{entries}</channel></rss>'


def url(host: str, n: int | str) -> str:
    path = f"/p/{n}" if isinstance(n, int) else n
    return f"http://{HOST}:{PORTS[host]}{path}"


@contextlib.contextmanager
def site_in_thread(*, healed: bool = False) -> Iterator[None]:
    loop = asyncio.new_event_loop()
    ready, stop = threading.Event(), asyncio.Event()

    async def serve() -> None:
        async with Site(healed=healed).serving():
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        if not ready.wait(TIMEOUT):
            sys.exit("the site did not start")
        yield
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()


class Project:
    """A project folder, and the command line of the release in it."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        kept = {k: v for k, v in os.environ.items() if not k.startswith("PENSTOCK_")}
        self.environment = kept | {"NO_COLOR": "1"} | environment

    def process(self, *command: str, codes: tuple[int, ...] = (0,)) -> str:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode not in codes:
            sys.exit(f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout

    def penstock(self, *args: str, codes: tuple[int, ...] = (0,)) -> str:
        return self.process("-m", "penstock.cli.main", *args, codes=codes)

    def start(self, *args: str) -> subprocess.Popen[bytes]:
        with open(self.folder.parent / "run.log", "ab") as log:
            command = [sys.executable, "-m", "penstock.cli.main", *args]
            return subprocess.Popen(
                command,
                cwd=self.folder,
                env=self.environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.penstock("status", "--json"))
        return found

    def wait_for(self, reached: Callable[[dict[str, Any]], bool], fact: str) -> None:
        until = time.monotonic() + TIMEOUT
        while not reached(status := self.status()):
            if time.monotonic() > until:
                log = (self.folder.parent / "run.log").read_text()
                sys.exit(f"not reached: {fact}\n{json.dumps(status, indent=1)}\n{log}")
            time.sleep(0.2)


def make_state(project: Project) -> None:
    """Leave open work of every kind. No process of the project runs when this returns."""
    push = ["push", *(url("shop", n) for n in range(10)), url("shop", 1)]
    push += [url("shop", "/gone"), url("shop", "/big"), url("shop", "/private/x")]
    project.penstock(*push)
    project.process("-c", PUBLISH_GARBAGE)
    project.penstock("run", "--until-idle", codes=(1,))

    # Two events wait between extraction and sink, on the topic `records`.
    worker = project.start("run", "--role", "fetch,extract")
    try:
        project.penstock("push", url("shop", 20), url("shop", 21))
        project.wait_for(handed_over, "2 events on the topic records")
    finally:
        kill(worker)
    project.penstock("topics", "pause", "records", "--reason", "release fixture")

    project.penstock("domains", "pause", f"{HOST}:{PORTS['paused']}")
    project.penstock("domains", "limit", f"{HOST}:{PORTS['slow']}", "20")
    worker = project.start("run")
    target = apsw.Connection(str(project.folder / "products.db"))
    try:
        project.penstock("push", *(url("throttled", n) for n in range(200, 203)))
        project.penstock("push", *(url("failing", n) for n in range(300, 302)))
        project.penstock("push", *(url("paused", n) for n in range(500, 503)))
        project.penstock("push", "--priority", "high", *(url("slow", n) for n in range(400, 403)))
        project.wait_for(
            lambda s: s["total"]["in_flight"] == 5 and s["total"]["delayed"] >= 5,
            "3 requests in flight, 5 delayed events",
        )
        # A lock on the database of the second sink. Its rows stay in the outbox.
        target.execute("BEGIN IMMEDIATE")
        before = project.status()["total"]["success"]
        project.penstock("push", *(url("shop", n) for n in range(10, 20)))
        project.wait_for(lambda s: s["total"]["success"] == before + 10, "10 more successes")
        project.penstock("push", url("shop", 2))  # inside its freshness window
        project.penstock("topics", "pause", "requests", "--reason", "release fixture")
        project.penstock("push", "--priority", "low", *(url("shop", n) for n in range(600, 605)))
    finally:
        kill(worker)
        target.close()


def finish(run: Callable[..., object]) -> None:
    """Resume everything that was paused, and run until all events have ended."""
    run("topics", "resume", "requests")
    run("topics", "resume", "records")
    run("domains", "resume", f"{HOST}:{PORTS['paused']}")
    run("run", "--until-idle")


def sink_rows(folder: Path) -> dict[str, list[Any]]:
    """Return the rows of both sinks in a fixed order, without the time of the fetch."""
    lines = [json.loads(x) for x in (folder / "products.jsonl").read_text().splitlines()]
    for line in lines:
        del line["_penstock"]["fetched_at"]
    table = apsw.Connection(str(folder / "products.db"))
    try:
        cursor = table.execute("SELECT * FROM products")
        names = [name for name, _ in cursor.get_description()]
        rows = [dict(zip(names, row, strict=True)) for row in cursor]
    finally:
        table.close()
    for row in rows:
        del row["_penstock_fetched_at"]
    return {
        "jsonl": sorted(lines, key=lambda line: str(line["sku"])),
        "table": sorted(rows, key=lambda row: str(row["sku"])),
    }


def write_rows(kind: str, out: Path, database: str, project: Project) -> None:
    """Finish the work of a fixture with the release, and write the rows of the sinks."""
    with tarfile.open(out / f"{kind}.tar.gz") as tar:
        tar.extractall(project.folder, filter="data")
    if database:
        dumped = gzip.decompress((out / "postgres.sql.gz").read_bytes())
        subprocess.run(
            ["psql", "--quiet", database], input=dumped, stdout=subprocess.DEVNULL, check=True
        )
    project.environment |= WITHOUT_AGE_LIMITS
    finish(project.penstock)
    rows = sink_rows(project.folder)
    assert [row["sku"] for row in rows["jsonl"]] == sorted(f"T-{n}" for n in PRODUCTS), rows
    (out / f"{kind}.rows.json").write_text(json.dumps(rows, indent=1) + "\n")


def handed_over(status: dict[str, Any]) -> bool:
    """Return True if 2 events are in flight and no worker holds them."""
    held = sum(worker["holds"] for worker in status["workers"])
    return bool(status["total"]["in_flight"] == 2 and held == 0)


def kill(worker: subprocess.Popen[bytes]) -> None:
    os.killpg(worker.pid, signal.SIGKILL)
    worker.wait()


def check(status: dict[str, Any]) -> None:
    total = status["total"]
    states = ("pending", "in_flight", "delayed", "success", "duplicate", "dead")
    assert all(total[state] for state in states), total
    assert total["accepted"] == sum(total[state] for state in states), total
    assert all(sink["flushed"] for sink in status["sinks"]), status["sinks"]
    assert any(sink["backlog"] for sink in status["sinks"]), status["sinks"]
    assert len(status["dead_causes"]) >= 5, status["dead_causes"]
    assert status["paused"] == dict.fromkeys(("requests", "records"), "release fixture")
    assert status["sources"][0]["events"] == 3


def pack(folder: Path, file: Path) -> None:
    """Write a tar.gz of the folder's contents, without names of this machine's users."""

    def anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        return member

    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                tar.add(path, path.relative_to(folder).as_posix(), filter=anonymous)
    file.write_bytes(gzip.compress(raw.getvalue(), mtime=0))


def dump(database: str) -> bytes:
    """Return the schema as INSERT statements: any client can run them, not only psql."""
    command = ["pg_dump", "--inserts", "--no-owner", "--no-privileges"]
    command += [f"--schema={NAMESPACE}", database]
    text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    # psql commands that pg_dump adds since August 2025
    lines = [x for x in text.splitlines(True) if not x.startswith(("\\restrict", "\\unrestrict"))]
    return gzip.compress("".join(lines).encode(), mtime=0)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=("embedded", "postgres"))
    parser.add_argument("out", type=Path, help="folder for the fixtures")
    parser.add_argument("--url", default="", help="an empty PostgreSQL database")
    parser.add_argument("--rows", action="store_true", help="only write the rows of the fixture")
    args = parser.parse_args()
    if (args.kind == "postgres") != bool(args.url):
        parser.error("--url is needed for postgres, and only there")
    stores = ("BROKER", "LEDGER", "CLAIMS", "PAGES") if args.url else ()
    args.out.mkdir(parents=True, exist_ok=True)

    with tempfile.TemporaryDirectory() as scratch, site_in_thread(healed=args.rows):
        project = Project(
            Path(scratch) / "project", {f"PENSTOCK_{name}_URL": args.url for name in stores}
        )
        project.folder.mkdir()
        if args.rows:
            write_rows(args.kind, args.out, args.url, project)
            return 0
        (project.folder / "shop.py").write_text(PIPELINE)
        (project.folder / "penstock.toml").write_text(CONFIGURATION)
        make_state(project)
        pack(project.folder, args.out / f"{args.kind}.tar.gz")
        if args.url:
            (args.out / "postgres.sql.gz").write_bytes(dump(args.url))
        # The command below may change files, for example by a checkpoint. It runs on a copy.
        copy = Path(scratch) / "copy"
        shutil.copytree(project.folder, copy)
        project.folder = copy
        status = project.status()
        (args.out / f"{args.kind}.status.json").write_text(json.dumps(status, indent=1) + "\n")
        check(status)
    return 0


if __name__ == "__main__":
    sys.exit(main())
