"""Contenders of `pages`: how each is started, its measured time, and the checks of its result."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import apsw
from common import (
    BENCH,
    BenchError,
    Watched,
    cache,
    clean_environment,
    last_json,
    server_url,
    watch,
)
from environments import python_of
from redis_server import redis_serving
from target import HOSTS, PORT, TLS_PORT, sku, url

OUT = "products.jsonl"
FIELDS = ("sku", "name", "brand", "price", "rating")


@dataclass(frozen=True)
class Job:
    """One run of one contender."""

    n: int
    cores: frozenset[int]
    nice: int = 0
    tls: bool = False
    workers: int = 1
    every: float = 0.05  # seconds between two samples of its process tree
    # Penstock also reads the last element of a page, so that it must parse the whole page.
    late: bool = False


@dataclass(frozen=True)
class Result:
    n: int
    seconds: float
    cpu: float
    pss: float
    rss: float

    @property
    def rate(self) -> float:
        return self.n / self.seconds

    @property
    def cpu_us(self) -> float:
        return self.cpu / self.n * 1e6

    @property
    def share(self) -> float:
        """Share of one core. Near 1 means that no other process used the contender's core."""
        return self.cpu / self.seconds


@dataclass(frozen=True)
class Contender:
    name: str
    run: Callable[[Job], Result]
    slow: bool = True  # gets --peer-n pages, because its rate does not depend on their number
    workers: int = 1  # and as many cores
    shares_site_cores: bool = False  # the site shares its cores
    tls: bool = True  # can be configured to trust the site's certificate


def fresh(name: str) -> Path:
    directory = cache() / "scratch" / name
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    return directory


def write_urls(file: Path, job: Job) -> None:
    file.write_text("".join(url(i, tls=job.tls) + "\n" for i in range(job.n)))


def check_rows(file: Path, n: int, who: str) -> None:
    """Raise BenchError unless each page has one row with all five fields."""
    seen = set()
    rows = 0
    with open(file, encoding="utf-8") as f:
        for line in f:
            row = json.loads(line)
            rows += 1
            if not all(isinstance(row.get(name), str) and row[name].strip() for name in FIELDS):
                raise BenchError(f"{who}: a row lacks a field: {line.strip()[:200]}")
            seen.add(row["sku"])
    if rows != n or seen != {sku(i) for i in range(n)}:
        raise BenchError(
            f"{who}: {rows} rows and {len(seen)} different products for {n} pages",
            "this is a bug of the contender or of the bench, not a slow run",
        )


def check_ended(w: Watched, who: str) -> None:
    if w.code != 0:
        raise BenchError(f"{who} ended with {w.code}: {(w.err or w.out).strip()[-800:]}")


# -- Penstock --------------------------------------------------------------------------------------


def penstock_environment(job: Job, *, isolation: str) -> dict[str, str]:
    """Return the settings of a normal user.

    They are full durability, ledger, claims, robots.txt, stored pages, and a rate limit that is
    never reached.
    """
    port = TLS_PORT if job.tls else PORT
    more = {"SSL_CERT_FILE": str(cache() / "cert.pem")} if job.tls else {}
    return clean_environment(
        PENSTOCK_NET_ALLOW=",".join(f"{host}:{port}" for host in HOSTS),
        PENSTOCK_PACE_RATE="100000",
        PENSTOCK_ROBOTS="obey",
        PENSTOCK_DURABILITY="full",
        PENSTOCK_EXTRACT_ISOLATION=isolation,
        **more,
    )


def penstock_commands(job: Job) -> tuple[list[str], list[str]]:
    """Return the commands `push` and `run`."""
    cli = [sys.executable, "-m", "penstock.cli.main"]
    pipeline = BENCH / ("pipeline_late.py" if job.late else "pipeline.py")
    return [*cli, "push", "-f", "urls.txt"], [
        *cli,
        "run",
        str(pipeline),
        "--until-idle",
        "--workers",
        str(job.workers),
    ]


def penstock_prepared(
    job: Job, name: str, isolation: str, broker: str = ""
) -> tuple[Path, dict[str, str], list[str]]:
    """Make a new directory whose ledger has all events of the job.

    Return the directory, the environment, and the command that processes the events.
    """
    directory = fresh(name)
    write_urls(directory / "urls.txt", job)
    env = penstock_environment(job, isolation=isolation)
    if broker:
        state = directory / ".penstock"
        ledger = f"sqlite:{state}/penstock.db"
        env |= {
            "PENSTOCK_BROKER_URL": server_url(broker),
            "PENSTOCK_NAMESPACE": f"bench{os.urandom(4).hex()}",
        }
        env |= {
            "PENSTOCK_LEDGER_URL": ledger,
            "PENSTOCK_CLAIMS_URL": ledger,
            "PENSTOCK_PAGES_URL": f"file:{state}/pages",
        }
    push, run = penstock_commands(job)
    pushed = watch(push, cores=set(job.cores), nice=job.nice, cwd=directory, env=env)
    check_ended(pushed, "penstock push")
    return directory, env, run


def penstock(isolation: str, broker: str = "") -> Callable[[Job], Result]:
    """Return the contender with the embedded broker, or with the broker on a server.

    Ledger, claims and pages are always embedded.
    """

    def run(job: Job) -> Result:
        who = f"penstock ({broker or isolation})"
        directory, env, command = penstock_prepared(
            job, f"penstock-{broker or isolation}", isolation, broker
        )
        w = watch(
            command, cores=set(job.cores), nice=job.nice, cwd=directory, env=env, every=job.every
        )
        check_ended(w, who)
        start, end = penstock_span(directory, job.n, who)
        check_rows(directory / OUT, job.n, who)
        return Result(job.n, end - start, w.cpu_between(start, end), w.pss, w.rss)

    return run


def penstock_span(directory: Path, n: int, who: str) -> tuple[float, float]:
    """Return the start and the end of the run, from the ledger.

    The start is the dispatch of the first event. The end is the last success, or the last write of
    the sink's file if that is later. Also checks that each event succeeded with one start, and that
    each page is stored.
    """
    db = apsw.Connection(
        str(directory / ".penstock" / "penstock.db"), flags=apsw.SQLITE_OPEN_READONLY
    )
    try:
        total, good, starts, first, last = db.execute(
            "SELECT count(*), sum(status='success'), sum(starts), min(dispatched_at),"
            " max(finished_at) FROM event"
        ).fetchall()[0]
        pages = db.execute("SELECT count(*) FROM page").fetchall()[0][0]
    finally:
        db.close()
    if (total, good, starts, pages) != (n, n, n, n):
        raise BenchError(
            f"{who}: {n} pages were requested, but the ledger has {total} events, "
            f"{good} successes, {starts} starts and {pages} stored pages"
        )
    return first, max(last, (directory / OUT).stat().st_mtime)


# -- the others ------------------------------------------------------------------------------------


def peer(
    name: str, environment: str, script: str, arguments: Sequence[str] = ()
) -> Callable[[Job], Result]:
    def run(job: Job) -> Result:
        directory = fresh(name)
        write_urls(directory / "urls.txt", job)
        command = [
            str(python_of(environment)),
            str(BENCH / "peers" / script),
            "urls.txt",
            *arguments,
        ]
        more = {"SSL_CERT_FILE": str(cache() / "cert.pem")} if job.tls else {}
        w = watch(
            command,
            cores=set(job.cores),
            nice=job.nice,
            cwd=directory,
            env=clean_environment(**more),
        )
        check_ended(w, name)
        times = last_json(w.out)
        start, end = float(str(times["start"])), float(str(times["end"]))
        check_rows(directory / OUT, job.n, name)
        return Result(job.n, end - start, w.cpu_between(start, end), w.pss, w.rss)

    return run


def scrapy_redis(job: Job) -> Result:
    with redis_serving(fresh("redis"), core=0) as port:
        return peer("scrapy-redis", "scrapy", "scrapy_with_redis.py", [str(port)])(job)


ISOLATED, IN_PROCESS, SCRAPY, ALONE = (
    "penstock",
    "penstock in process",
    "scrapy",
    "1 worker, site on its core",
)
ON = "penstock on "
STANDARD = (
    Contender(ISOLATED, penstock("process"), slow=False),
    Contender(IN_PROCESS, penstock("none"), slow=False),
    Contender(SCRAPY, peer("scrapy", "scrapy", "scrapy_tuned.py")),
)
OTHERS = (
    Contender("scrapy-redis", scrapy_redis),
    Contender("crawlee", peer("crawlee", "crawlee", "crawlee_parsel.py"), tls=False),
    Contender("aiohttp loop", peer("aiohttp loop", "aiohttp", "aiohttp_loop.py"), slow=False),
)


def on_brokers(names: Sequence[str]) -> tuple[Contender, ...]:
    return tuple(
        Contender(f"{ON}{name}", penstock("process", name), slow=False, tls=False) for name in names
    )


def scaling(workers: int) -> tuple[Contender, Contender]:
    """Return two contenders: one worker on one core, and `workers` on as many cores.

    The site shares these cores in both, so that each core has the same work.
    """
    run = penstock("process")
    return (
        Contender(ALONE, run, slow=False, shares_site_cores=True),
        Contender(f"{workers} workers", run, slow=False, shares_site_cores=True, workers=workers),
    )
