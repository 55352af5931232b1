"""`penstock doctor` opens everything, changes nothing, and has a next step for each finding."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apsw
import psycopg
import pytest
from tests.e2e.harness import SHOP, Project, Site, Target, free_port, product, wait_for
from tests.e2e.layouts import lay_out, layouts
from tests.e2e.silent_servers import BlackHole
from tests.servers import Handle

from penstock.testing.web import Reply

KEYS = {"code", "severity", "message", "next_step"}


def diagnose(project: Project, *args: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Return the exit code, and the findings by code."""
    done = project.penstock("doctor", *args, "--json")
    document = json.loads(done.out)
    assert document["exit_code"] == done.code
    assert document["ok"] is (done.code == 0)
    for finding in document["findings"]:
        assert set(finding) == KEYS
        assert finding["severity"] in ("warning", "error")
        assert finding["message"]
        assert finding["next_step"], finding
    return done.code, {finding["code"]: finding for finding in document["findings"]}


def finds(project: Project, code: str, *args: str) -> str:
    """Check that `doctor` finds an error with this code and exits with 5. Return its message."""
    exit_code, found = diagnose(project, *args)
    assert code in found, found
    assert found[code]["severity"] == "error"
    assert exit_code == 5
    return str(found[code]["message"])


@pytest.fixture
def black_hole() -> Iterator[BlackHole]:
    made = BlackHole()
    yield made
    made.close()


@pytest.fixture
def ran(project: Project, site: Site) -> Project:
    """A project with three rows in its file."""
    for n in range(3):
        site.serve(f"/p/{n}", product(n))
    project.push(*(site.url(f"/p/{n}") for n in range(3)))
    project.run()
    assert diagnose(project, "shop.py") == (0, {})
    return project


# -- files, workers, clocks, disks, breakers -------------------------------------------------------


@pytest.mark.server("postgres")
def test_doctor_finds_a_deleted_and_a_replaced_file_of_a_fleet(
    project: Project, server: Callable[[str], Handle], site: Site
) -> None:
    lay_out(project, "postgres", server)
    project.push(site.serve("/p/1", product(1)))
    project.run()
    file = project.dir / "products.jsonl"
    whole = file.read_bytes()
    file.unlink()
    assert "does not exist" in finds(project, "sink.file_missing")
    file.write_bytes(whole[:-10])
    assert str(len(whole)) in finds(project, "sink.file_short")
    file.write_bytes(whole)
    assert diagnose(project) == (0, {})


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_doctor_finds_a_shortened_and_a_deleted_output_file(
    project: Project, site: Site, kind: str
) -> None:
    project.write("shop.py", SHOP.replace("jsonl:products.jsonl", f"{kind}:products.{kind}"))
    project.push(site.serve("/p/1", product(1)))
    project.run()
    file = project.dir / f"products.{kind}"
    whole = file.read_bytes()
    file.write_bytes(whole[:-10])
    assert str(len(whole)) in finds(project, "sink.file_short")
    file.unlink()
    assert "does not exist" in finds(project, "sink.file_missing", "shop.py")
    assert not file.exists(), "doctor creates no file"
    file.write_bytes(whole)
    assert diagnose(project, "shop.py") == (0, {})


def test_doctor_finds_a_worker_that_is_silent_beyond_its_lease(project: Project) -> None:
    project.set(lease="1s")
    running = project.start("run", "shop.py")
    wait_for(
        lambda: running.ended or list((project.dir / ".penstock" / "workers").glob("*.alive")),
        f"a worker: {running.output}",
    )
    running.signal(signal.SIGSTOP)
    try:
        wait_for(lambda: diagnose(project)[0] == 5, "doctor finds the worker")
        message = finds(project, "worker.silent")
    finally:
        running.signal(signal.SIGCONT)
    assert str(running.pid) in message
    wait_for(lambda: diagnose(project)[0] == 0, "the worker beats again")
    running.signal(signal.SIGTERM)
    assert running.wait() == 0, running.output


def shift_clock(project: Project, seconds: float) -> None:
    """Let all later commands of the project see another time."""
    project.write(
        "shifted/sitecustomize.py",
        f"import time\nreal = time.time\ntime.time = lambda: real() + {seconds}\n",
    )
    project.env["PYTHONPATH"] = str(project.dir / "shifted")


def test_doctor_finds_a_clock_behind_the_ledger(ran: Project) -> None:
    shift_clock(ran, -3600)
    assert "in the future" in finds(ran, "clock.behind_ledger")


@pytest.mark.parametrize("seconds", [-3600, 3600])
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("postgres", marks=pytest.mark.server("postgres")),
        pytest.param("redis", marks=pytest.mark.server("redis")),
    ],
)
def test_doctor_finds_a_clock_that_differs_from_the_servers(
    project: Project, server: Callable[[str], Handle], layout: str, seconds: float
) -> None:
    handle = server(layout)
    project.set(namespace=f"t{project.mark[:12]}")
    if layout == "postgres":
        project.set(broker_url=handle.url)
    else:
        project.set(claims_url=handle.url)
    project.run()
    assert diagnose(project) == (0, {})
    shift_clock(project, seconds)
    message = finds(project, "clock.differs")
    assert ("ahead of" if seconds > 0 else "behind") in message


def test_doctor_finds_a_disk_that_will_be_full_within_a_day(project: Project) -> None:
    state = project.dir / ".penstock"
    running = project.start("run", "shop.py")
    wait_for(lambda: running.ended or (state / "disk.json").exists(), running.output)
    running.signal(signal.SIGTERM)
    assert running.wait() == 0, running.output
    assert diagnose(project) == (0, {}), "one sample shows no growth"
    (sample,) = json.loads((state / "disk.json").read_text())
    hours = 5
    earlier = sample | {
        "at": time.time() - 1800,
        "free": int(sample["free"] * (1 + 0.5 / hours)),
    }
    (state / "disk.json").write_text(json.dumps([earlier, sample]))
    assert "full in about" in finds(project, "disk.full_soon")
    slower = earlier | {"free": int(sample["free"] * (1 + 0.5 / 50))}
    (state / "disk.json").write_text(json.dumps([slower, sample]))
    assert diagnose(project) == (0, {})


def test_doctor_warns_of_a_topic_that_an_operator_paused(ran: Project) -> None:
    ran.good("topics", "pause", "requests")
    code, found = diagnose(ran)
    assert code == 0
    assert found["paused.topic"]["severity"] == "warning"
    assert "penstock topics resume requests" in found["paused.topic"]["next_step"]


def test_doctor_finds_an_open_breaker(project: Project, site: Site) -> None:
    project.set(breaker_min="2", retry_budget="0")
    site.serve("/p/*", Reply(403))
    project.push(*(site.url(f"/p/{n}") for n in range(6)))
    project.run(expect=1)
    code, found = diagnose(project)
    assert code == 5
    opened = [finding for name, finding in found.items() if name.startswith("breaker.")]
    assert opened, found
    assert all(finding["severity"] == "error" for finding in opened)
    assert any(" resume " in finding["next_step"] for finding in opened)


def test_doctor_finds_a_sink_that_was_down_at_the_last_try(ran: Project) -> None:
    (ran.dir / "out").write_text("in the way")
    ran.write("shop.py", SHOP.replace("jsonl:products.jsonl", "jsonl:out/products.jsonl"))
    ran.run(expect=4)
    assert "Not a directory" in finds(ran, "sink.down")
    (ran.dir / "out").unlink()
    ran.run()
    assert diagnose(ran, "shop.py") == (0, {})


# -- sinks, sources, proxies, stores ---------------------------------------------------------------


def test_doctor_opens_the_sinks_in_time_and_finds_those_that_cannot_be_opened(
    ran: Project, black_hole: BlackHole
) -> None:
    dead = free_port()
    (ran.dir / "blocked").write_text("no directory")
    broken = [
        "jsonl:blocked/a.jsonl",
        "csv:blocked/a.csv",
        "sqlite:blocked/a.db",
        f"postgres://u@127.0.0.1:{dead}/db?table=a",
        f"postgres://u@127.0.0.1:{black_hole.port}/db?table=b&connect_timeout=60",
        f"kafka://127.0.0.1:{dead}/products",
        f"kafka://127.0.0.1:{black_hole.port}/products",
    ]
    good = ["jsonl:new/b.jsonl", "csv:new/b.csv", "sqlite:new/b.db"]
    ran.write("many.py", SHOP + "".join(f"shop.sink({url!r})\n" for url in [*broken, *good]))
    began = time.monotonic()
    done = ran.penstock("doctor", "many.py", "--json")
    assert time.monotonic() - began < 60, "a sink that never answers does not hold doctor"
    assert done.code == 5, done.output
    found = [f for f in json.loads(done.out)["findings"] if f["code"] == "sink.unreachable"]
    assert len(found) == len(broken), found
    assert not (ran.dir / "new").exists(), "doctor creates nothing"


@pytest.mark.server("postgres")
def test_doctor_changes_nothing_beside_a_worker_and_finds_a_killed_server(
    project: Project, server: Callable[[str], Handle], target: Callable[..., Target]
) -> None:
    handle, table = server("postgres"), f"t{project.mark[:12]}"
    web = target(pages=20)
    project.write("shop.py", SHOP.replace("jsonl:products.jsonl", f"{handle.url}?table={table}"))
    running = project.start("run", "shop.py")
    wait_for(
        lambda: running.ended or list((project.dir / ".penstock" / "workers").glob("*.alive")),
        f"a worker: {running.output}",
    )
    project.push(*web.urls)
    wait_for(
        lambda: (
            diagnose(project, "shop.py")[0] == 0
            and (running.ended or project.total()["success"] == 20)
        ),
        f"all pages, with doctor beside them: {running.output}",
    )
    running.signal(signal.SIGTERM)
    assert running.wait() == 0, running.output
    handle.kill()
    assert table in finds(project, "sink.unreachable", "shop.py")
    handle.start()
    assert diagnose(project, "shop.py") == (0, {})


def test_doctor_reads_the_sources_and_moves_no_cursor(
    ran: Project, site: Site, black_hole: BlackHole
) -> None:
    feed = (
        '<rss version="2.0"><channel><title>t</title><item><guid>1</guid>'
        f"<link>{site.url('/p/1')}</link></item></channel></rss>"
    )
    good = site.serve("/feed.xml", feed)
    ran.allow(black_hole.port, dead := free_port())
    source = "shop.source({!r}, name={!r})\n".format
    ran.write("sourced.py", SHOP + source(f"feed+{good}", "good"))
    assert diagnose(ran, "sourced.py") == (0, {})
    assert site.asked("/feed.xml"), "doctor read the feed"
    ran.write(
        "sourced.py",
        SHOP
        + source(f"feed+{good}", "good")
        + source(f"feed+http://127.0.0.1:{dead}/feed.xml", "dead")
        + source(f"feed+http://127.0.0.1:{black_hole.port}/feed.xml", "silent"),
    )
    done = ran.penstock("doctor", "sourced.py", "--json")
    assert done.code == 5, done.output
    found = json.loads(done.out)["findings"]
    assert [f["code"] for f in found] == ["source.unreachable"] * 2
    assert [name for name in ("dead", "silent") if any(name in f["message"] for f in found)] == [
        "dead",
        "silent",
    ]
    assert ran.total()["accepted"] == 3, "doctor accepts no event"
    assert not json.loads(ran.good("sources", "ls", "--json"))["sources"]


def test_doctor_opens_the_proxies(ran: Project, site: Site, black_hole: BlackHole) -> None:
    dead = free_port()
    ran.write(
        "penstock.toml",
        f'[proxies.main]\nurls = ["http://127.0.0.1:{site.port}"]\n',
    )
    assert diagnose(ran) == (0, {})
    ran.write(
        "penstock.toml",
        f'[proxies.main]\nurls = ["http://127.0.0.1:{dead}",'
        f' "http://user:secret@127.0.0.1:{black_hole.port}"]\n',
    )
    done = ran.penstock("doctor", "--json")
    assert done.code == 5, done.output
    found = json.loads(done.out)["findings"]
    assert [f["code"] for f in found] == ["proxy.unreachable"] * 2
    assert str(dead) in found[0]["message"]
    assert str(black_hole.port) in found[1]["message"]
    assert "secret" not in done.out


@pytest.mark.parametrize("layout", layouts("redis", "rabbitmq", "kafka", "sqs", "postgres"))
def test_doctor_opens_each_kind_of_broker(
    project: Project, server: Callable[[str], Handle], site: Site, layout: str
) -> None:
    lay_out(project, layout, server)
    project.push(site.serve("/p/1", product(1)))
    project.run()
    code, found = diagnose(project, "shop.py")
    assert code == 0, found
    project.run()  # doctor has not changed the topics
    assert len(project.rows()) == 1


@pytest.mark.server("redis")
def test_doctor_finds_a_broker_and_claims_that_do_not_answer(
    project: Project, server: Callable[[str], Handle]
) -> None:
    state = project.dir / ".penstock"
    project.set(
        namespace=f"t{project.mark[:12]}",
        broker_url=server("redis").url,
        ledger_url=f"sqlite:{state}/ledger.db",
        pages_url=f"file:{state}/pages",
    )
    project.run()
    assert diagnose(project) == (0, {})
    server("redis").kill()
    _, found = diagnose(project)
    assert {"broker.unreachable", "claims.unreachable"} <= set(found)


@pytest.mark.server("postgres")
def test_doctor_and_status_know_the_workers_of_other_machines(
    project: Project, server: Callable[[str], Handle], site: Site, tmp_path: Path
) -> None:
    lay_out(project, "postgres", server)
    running = project.start("run", "shop.py")
    wait_for(lambda: running.ended or project.status()["pipeline"], f"a worker: {running.output}")
    elsewhere = Project(tmp_path / "elsewhere")
    elsewhere.dir.mkdir()
    elsewhere.env = project.env | {"PENSTOCK_STATE": str(elsewhere.dir / "state")}
    project.push(site.serve("/p/1", Reply(delay=60.0)))
    wait_for(lambda: elsewhere.total()["in_flight"] == 1, "a lease")
    (worker,) = elsewhere.status()["workers"]
    assert worker["alive"]
    assert str(running.pid) in worker["id"]
    assert diagnose(elsewhere) == (0, {})
    running.kill()
    with psycopg.connect(server("postgres").url, autocommit=True) as db:
        db.execute(f"SET search_path TO {project.env['PENSTOCK_NAMESPACE']}")
        db.execute("UPDATE live_worker SET until=until-60")  # a minute later
    assert {"worker.gone", "leases"} <= set(diagnose(elsewhere)[1])
    assert not elsewhere.status()["workers"][0]["alive"]


@pytest.mark.server("redis")
def test_a_worker_is_not_silent_while_its_claims_do_not_answer(
    project: Project, server: Callable[[str], Handle]
) -> None:
    project.set(lease="1s", namespace=f"t{project.mark[:12]}", claims_url=server("redis").url)
    running = project.start("run", "shop.py")
    workers = project.dir / ".penstock" / "workers"
    wait_for(lambda: running.ended or list(workers.glob("*.alive")), f"a worker: {running.output}")
    (sign,) = workers.glob("*.alive")
    before = sign.stat().st_mtime
    wait_for(lambda: running.ended or sign.stat().st_mtime > before, "the worker has started")
    server("redis").kill()
    wait_for(lambda: diagnose(project)[1].get("claims.unreachable"), "redis is down")
    before = sign.stat().st_mtime
    wait_for(lambda: sign.stat().st_mtime > before, "a heartbeat during the outage", 10.0)
    assert "worker.silent" not in diagnose(project)[1]


def test_doctor_exits_4_if_the_store_cannot_be_reached(project: Project) -> None:
    project.set(broker_url=f"postgres://u@127.0.0.1:{free_port()}/db")
    code, found = diagnose(project)
    assert code == 4
    assert found["store.unreachable"]["severity"] == "error"


def test_doctor_reports_a_store_whose_version_is_damaged(ran: Project) -> None:
    file = ran.dir / ".penstock" / "penstock.db"
    db = apsw.Connection(str(file))
    page = db.execute("SELECT rootpage FROM sqlite_master WHERE name='part'").get
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    db.close()
    with file.open("r+b") as f:
        f.seek(4096 * (page - 1))
        f.write(b"\xff" * 16)
    code, found = diagnose(ran)
    assert code == 4
    assert "backup" in found["store.unreachable"]["next_step"]


def test_the_findings_of_doctor_are_readable_without_json(ran: Project) -> None:
    (ran.dir / "products.jsonl").unlink()
    done = ran.penstock("doctor")
    assert done.code == 5
    assert "does not exist" in done.out
    assert "→" in done.out
