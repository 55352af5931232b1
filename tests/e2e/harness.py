"""A project directory, real `penstock` processes, and target sites that keep an access log.

Every process that a project starts has a mark in its environment. A test fails if one of these
processes is left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from penstock.testing.web import Entry, Handler, Reply, Web, read_log

PENSTOCK = (sys.executable, "-m", "penstock.cli.main")
MARK = "E2E_MARK"
SHOP = """
from penstock import Page, Pipeline

shop = Pipeline("shop")

@shop.extract(match="*/p/*", version=1, key="sku")
def product(page: Page):
    yield {
        "sku": page.css("[data-sku]::attr(data-sku)").get(),
        "title": page.css("h1::text").get(),
        "price": page.css(".price::text").get(),
    }
    yield from page.follow("a.related")

shop.sink("jsonl:products.jsonl")
"""


def wait_for(
    true: Callable[..., Any], what: str, seconds: float = 60.0, every: float = 0.01
) -> Any:
    """Return the first true result of `true`. Fail the test after `seconds`.

    `true` is called without arguments. Its parameters may have defaults, as in `lambda n=n: …`.
    The time limit only ends a hang. It allows for a machine that is slow, busy or suspended.
    """
    until = time.monotonic() + seconds
    while True:
        answer = true()
        if answer:
            return answer
        if time.monotonic() > until:
            pytest.fail(f"not within {seconds:g} s: {what}")
        time.sleep(every)


_given: set[int] = set()


def free_port() -> int:
    """Return a port for a server that needs its port before it listens.

    The port is outside the range of ports for outgoing connections, so no client gets it.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 20_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            if port not in _given:
                _given.add(port)
                return port


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str

    @property
    def output(self) -> str:
        return f"exit {self.code}\n{self.out[-3000:]}\n{self.err[-3000:]}"


def product(n: int | str, price: str = "10.00", more: str = "") -> str:
    return (
        f'<!doctype html><title>{n}</title><main data-sku="S-{n}"><h1>Product {n}</h1><p '
        f'class="price">{price}</p>{more}</main>'
    )


class Running:
    """A `penstock` command that runs in the background."""

    def __init__(self, project: Project, args: tuple[str, ...]) -> None:
        self.log = project.dir / f"run-{len(project.started)}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*project.command, *args],
                cwd=project.dir,
                env=project.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.pid = self.process.pid

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    @property
    def output(self) -> str:
        # The last 200,000 characters: a waiting test may look for a line that is not new.
        return self.log.read_text("utf-8", "replace")[-200_000:]

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def wait(self, seconds: float = 180.0) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {seconds:g} s:\n{self.output}")


class Project:
    """A user's project directory, and the `penstock` commands that run in it."""

    def __init__(self, directory: Path) -> None:
        self.dir = directory
        self.command: tuple[str, ...] = PENSTOCK
        self.mark = uuid.uuid4().hex
        self.env = {
            name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")
        }
        self.env |= {
            MARK: self.mark,
            "NO_COLOR": "1",
            "PENSTOCK_PACE_RATE": "unlimited",
            "PENSTOCK_RETRY_BASE": "100ms",
        }
        self.started: list[Running] = []

    def set(self, **options: str) -> None:
        """Set options as environment variables, for example `set(retry_base="1s")`."""
        self.env |= {f"PENSTOCK_{name.upper()}": value for name, value in options.items()}

    def allow(self, *ports: int) -> None:
        known = [t for t in self.env.get("PENSTOCK_NET_ALLOW", "").split(",") if t]
        self.env["PENSTOCK_NET_ALLOW"] = ",".join(
            [*known, *(f"127.0.0.1:{port}" for port in ports)]
        )

    def write(self, name: str, text: str) -> Path:
        path = self.dir / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
        return path

    # -- commands ----------------------------------------------------------------------------------

    def penstock(self, *args: str, input: str | None = None, timeout: float = 300.0) -> Done:
        found = subprocess.run(
            [*self.command, *args],
            cwd=self.dir,
            env=self.env,
            input=input,
            capture_output=True,
            timeout=timeout,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
        done = Done(found.returncode, found.stdout, found.stderr)
        assert "Traceback (most recent call last)" not in done.err, done.output
        return done

    def good(self, *args: str, input: str | None = None, timeout: float = 300.0) -> str:
        done = self.penstock(*args, input=input, timeout=timeout)
        assert done.code == 0, done.output
        return done.out

    def start(self, *args: str) -> Running:
        running = Running(self, args)
        self.started.append(running)
        return running

    def push(self, *urls: str, options: tuple[str, ...] = ()) -> None:
        if len(urls) > 20:
            self.good("push", *options, "-", input="".join(url + "\n" for url in urls))
        else:
            self.good("push", *options, *urls)

    def run(self, *args: str, file: str = "shop.py", expect: int = 0) -> Done:
        done = self.penstock("run", file, "--until-idle", *args)
        assert done.code == expect, done.output
        return done

    # -- results -----------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.good("status", "--json"))
        adds_up(found)
        return found

    def total(self) -> dict[str, int]:
        total: dict[str, int] = self.status()["total"]
        return total

    def events(self, *args: str) -> list[dict[str, Any]]:
        found = json.loads(self.good("events", "ls", "--json", "--limit", "100000", *args))
        rows: list[dict[str, Any]] = found["events"]
        return rows

    def trace(self, what: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.good("trace", what, "--json"))
        return found

    def event(self, what: str) -> dict[str, Any]:
        """Return the event with this id, or the newest event of this URL."""
        found = self.trace(what)
        return next(e for e in found["events"] if e["event_id"] == found["asked"])

    def dead_letters(self) -> dict[str, dict[str, Any]]:
        """Return the dead letters by the last part of their URL."""
        found = json.loads(self.good("dlq", "ls", "--all", "--json", "--limit", "100000"))
        return {
            dead_letter["url"].rpartition("/")[2]: dead_letter for dead_letter in found["letters"]
        }

    def rows(self, name: str = "products.jsonl") -> list[dict[str, Any]]:
        return read_rows(self.dir / name)

    def written(self, name: str = "products.jsonl") -> int:
        """Count the complete lines of a file that a process may be writing."""
        path = self.dir / name
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def doctor(self) -> None:
        done = self.penstock("doctor")
        assert done.code == 0, done.output

    # -- processes ---------------------------------------------------------------------------------

    def processes(self) -> dict[int, str]:
        """Return pid → command line of all live processes that descend from this project."""
        found = {}
        wanted = f"{MARK}={self.mark}".encode()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if wanted in (entry / "environ").read_bytes().split(b"\0"):
                        found[int(entry.name)] = (
                            (entry / "cmdline")
                            .read_bytes()
                            .replace(b"\0", b" ")
                            .decode("utf-8", "replace")
                        )
        return found

    def tree(self) -> tuple[list[int], list[int]]:
        """Return the pids of the workers and of the zygotes.

        A worker fetches. A zygote has imported the pipeline and forks the child processes.
        """
        lines = self.processes()
        parents = {pid: _parent(pid) for pid in lines}
        zygotes = [
            pid
            for pid, line in lines.items()
            if "zygote_main" in line and "zygote_main" not in lines.get(parents[pid], "")
        ]
        return sorted({parents[pid] for pid in zygotes} & set(lines)), zygotes

    def memory(self) -> int:
        """Return the proportional set size of all processes of this project, in bytes."""
        total = 0
        for pid in self.processes():
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                    if line.startswith("Pss:"):
                        total += int(line.split()[1]) * 1024
        return total

    def nothing_runs(self, seconds: float = 60.0) -> None:
        wait_for(lambda: not self.processes(), "no process left behind", seconds, 0.05)

    def close(self) -> None:
        for running in self.started:
            if not running.ended:
                running.kill()
        try:
            self.nothing_runs()
        finally:
            for pid in self.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def adds_up(status: dict[str, Any]) -> None:
    """Check I10: `accepted` is the sum of all states."""
    for name, row in [*status["topics"].items(), ("total", status["total"])]:
        assert row["accepted"] == sum(
            row[k] for k in ("pending", "in_flight", "delayed", "success", "duplicate", "dead")
        ), (name, row)
        assert min(row.values()) >= 0, (name, row)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read a JSONL file. An incomplete last line fails the test."""
    raw = path.read_bytes() if path.exists() else b""
    assert not raw or raw.endswith(b"\n"), (
        f"{path.name} ends in the middle of a line: {raw[-80:]!r}"
    )
    return [json.loads(line) for line in raw.splitlines()]


# -- targets ---------------------------------------------------------------------------------------


class Site:
    """A web site on a thread of the test process. A test may change its responses at any time.

    It measures how late its timers run, because the machine may be suspended for a while.
    Tests add that delay to their time limits.
    """

    def __init__(self, handler: Handler | None = None) -> None:
        self.web = Web(handler)
        self._ready, self._loop = threading.Event(), asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._failure: BaseException | None = None
        self.lateness: list[float] = []  # seconds of delay of each timer
        self._thread = threading.Thread(target=self._run, name="site")
        self._thread.start()
        self._ready.wait()

    def _run(self) -> None:
        async def serve() -> None:
            async with self.web:
                self._loop.call_soon(self._tick, self._loop.time())
                self._ready.set()
                await self._stop.wait()

        try:
            self._loop.run_until_complete(serve())
        except BaseException as e:
            self._failure = e
        finally:
            self._ready.set()
            self._loop.close()

    def _tick(self, due: float) -> None:
        now = self._loop.time()
        self.lateness.append(now - due)
        self._loop.call_at(now + 0.01, self._tick, now + 0.01)

    @property
    def late(self) -> float:
        """Return the longest delay of a timer, in seconds."""
        return max(self.lateness)

    @property
    def port(self) -> int:
        return self.web.port

    def url(self, path: str) -> str:
        return self.web.url(path)

    def serve(self, path: str, answer: Handler | Reply | str | bytes) -> str:
        """Serve `answer` at `path` from now on. Return the URL."""
        self.web.route(path, answer)
        return self.url(path)

    def call(self, work: Callable[[], object]) -> None:
        """Call `work` in the event loop of the site."""
        self._loop.call_soon_threadsafe(work)

    def asked(self, path: str) -> list[Entry]:
        return [entry for entry in self.web.entries if entry.path == path]

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        if self._failure is not None:
            raise self._failure


class Target:
    """A separate process that serves /p/0 … /p/<pages-1> and writes an access log.

    A share of the pages (`dead_share`) is always 404.
    """

    def __init__(
        self, directory: Path, *, pages: int, dead_share: float = 0.0, delay: float = 0.0
    ) -> None:
        self.pages, self.log = pages, directory / f"target-{uuid.uuid4().hex[:6]}.jsonl"
        args = [
            "--pages",
            str(pages),
            "--dead-share",
            str(dead_share),
            "--delay",
            str(delay),
            "--log",
            str(self.log),
            "--with-parent",
        ]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "penstock.testing.web", *args],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        started = json.loads(self.process.stdout.readline())
        self.port: int = started["port"]
        self.urls = [f"{started['url']}/p/{n}" for n in range(pages)]

    def asked(self) -> Counter[str]:
        """Return the number of requests for each page, from the access log."""
        return Counter(entry.path for entry in read_log(self.log) if entry.path.startswith("/p/"))

    def lines(self) -> int:
        return self.log.read_bytes().count(b"\n") if self.log.exists() else 0

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(60)
        assert self.process.stdout is not None
        self.process.stdout.close()
