"""The owner of a store: the first pipeline that runs on it. Another one is refused or adopts it."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest
from tests.e2e.harness import SHOP, Done, Project, Running, Site, product, wait_for
from tests.e2e.layouts import Server, lay_out, layouts
from tests.servers import Handle

STORES = ["embedded", *layouts("postgres")]
OTHER = SHOP.replace('Pipeline("shop")', 'Pipeline("other")').replace("products.", "others.")
CONFIGURATION, DIFFERENCES = 3, 5


def prepare(project: Project, layout: str, server: Server) -> None:
    project.write("other.py", OTHER)
    lay_out(project, layout, server)


def refused(done: Done, owner: str, name: str) -> None:
    assert done.code == CONFIGURATION, done.output
    assert f"belongs to the pipeline {owner!r}, and not to {name!r}" in done.err
    assert "penstock adopt FILE" in done.err


def start(project: Project, file: str) -> Running:
    """Start a worker, and wait until it is recorded."""
    before = {worker["id"] for worker in workers(project)}
    running = project.start("run", file)
    wait_for(lambda: {worker["id"] for worker in workers(project)} - before, "a worker")
    wait_for(lambda: project.status()["pipeline"], "the owner")
    return running


def workers(project: Project) -> list[dict[str, str]]:
    done = project.penstock("status", "--json")
    return [] if done.code else [w for w in json.loads(done.out)["workers"] if w["alive"]]


def stop(running: Running) -> None:
    running.signal(15)
    assert running.wait() == 0, running.output


@pytest.mark.parametrize("layout", STORES)
def test_a_second_pipeline_is_refused_and_the_first_keeps_its_events(
    project: Project, site: Site, layout: str, server: Server
) -> None:
    prepare(project, layout, server)
    project.push(site.serve("/p/1", product(1)))
    assert project.status()["pipeline"] is None
    project.run()
    assert project.status()["pipeline"] == "shop"
    project.push(site.serve("/p/2", product(2)))
    place = "--state DIR" if layout == "embedded" else "PENSTOCK_NAMESPACE"
    for args in (("--until-idle",), ("--until-idle", "--workers", "2"), ("--role", "fetch")):
        done = project.penstock("run", "other.py", *args)
        refused(done, "shop", "other")
        assert place in done.err
    assert project.total()["pending"] == 1
    assert site.asked("/p/2") == []
    project.run("--workers", "2")
    assert sorted(row["sku"] for row in project.rows()) == ["S-1", "S-2"]
    assert not (project.dir / "others.jsonl").exists()


def test_webhooks_of_a_second_pipeline_are_refused(project: Project) -> None:
    project.write("other.py", OTHER + 'shop.source("webhook:other", secret="s" * 32)\n')
    project.run()
    refused(project.penstock("serve", "other.py"), "shop", "other")


@pytest.mark.parametrize("layout", STORES)
def test_adopt_gives_the_open_events_to_another_pipeline(
    project: Project, site: Site, layout: str, server: Server
) -> None:
    prepare(project, layout, server)
    project.run()
    project.push(site.serve("/p/1", product(1)))
    shown = project.good("adopt", "other.py")
    assert "belongs to the pipeline 'other' now (before: shop)" in shown
    assert "1 open event will be handled by it" in shown
    again = json.loads(project.good("adopt", "other.py", "--json"))
    assert (again["pipeline"], again["before"], again["changed"]) == ("other", "other", False)
    project.run(file="other.py")
    assert [row["sku"] for row in project.rows("others.jsonl")] == ["S-1"]
    refused(project.penstock("run", "shop.py", "--until-idle"), "other", "shop")


@pytest.mark.parametrize("layout", STORES)
def test_adopt_is_refused_while_a_worker_of_the_owner_is_alive(
    project: Project, layout: str, server: Server
) -> None:
    prepare(project, layout, server)
    running = start(project, "shop.py")
    done = project.penstock("adopt", "other.py")
    assert done.code == CONFIGURATION, done.output
    assert "1 worker of the pipeline 'shop' runs on" in done.err
    assert "stop the pipeline 'shop' first" in done.err
    assert project.status()["pipeline"] == "shop"
    stop(running)
    project.good("adopt", "other.py")
    running = start(project, "other.py")
    running.kill()  # the lock file shows that the worker crashed
    project.nothing_runs()
    project.good("adopt", "shop.py")
    project.run()


@pytest.mark.server("postgres")
def test_adopt_is_refused_while_a_worker_of_another_machine_has_a_heartbeat(
    project: Project, tmp_path: Path, server: Callable[[str], Handle]
) -> None:
    prepare(project, "postgres", server)
    other = Project(tmp_path / "other")
    other.dir.mkdir()
    other.env = project.env | {"PENSTOCK_STATE": str(other.dir / "state")}
    try:
        running = start(project, "shop.py")
        other.write("other.py", OTHER)
        for _ in range(2):
            done = other.penstock("adopt", "other.py")
            assert done.code == CONFIGURATION, done.output
            assert "A worker that crashed counts for 60 s" in done.err
            if not running.ended:
                running.kill()
        with psycopg.connect(server("postgres").url, autocommit=True) as db:
            db.execute(f"SET search_path TO {project.env['PENSTOCK_NAMESPACE']}")
            # The last heartbeat of the worker has expired.
            db.execute("UPDATE live_worker SET until=0")
        other.good("adopt", "other.py")
    finally:
        project.close()


@pytest.mark.parametrize("layout", STORES)
def test_of_two_pipelines_that_start_together_one_becomes_the_owner(
    project: Project, layout: str, server: Server
) -> None:
    prepare(project, layout, server)
    running = {name: project.start("run", f"{name}.py") for name in ("shop", "other")}
    wait_for(lambda: any(r.ended for r in running.values()), "one pipeline is refused")
    (loser,) = [name for name, r in running.items() if r.ended]
    (owner,) = running.keys() - {loser}
    assert running[loser].wait() == CONFIGURATION, running[loser].output
    assert f"belongs to the pipeline {owner!r}" in running[loser].output
    assert project.status()["pipeline"] == owner
    stop(running[owner])


def test_doctor_reports_a_pipeline_that_is_not_the_owner(project: Project) -> None:
    project.write("other.py", OTHER)
    project.run()

    def check(*args: str, code: int) -> dict[str, str]:
        done = project.penstock("doctor", *args, "--json")
        assert done.code == code, done.output
        (found,) = [c for c in json.loads(done.out)["checks"] if c["check"] == "owner"]
        return {"result": found["result"], "found": found["found"], "fix": found["fix"]}

    good = {"result": "ok", "found": "the pipeline 'shop'", "fix": ""}
    assert check(code=0) == check("shop.py", code=0) == good
    bad = check("other.py", code=DIFFERENCES)
    assert bad["result"] == "fail"
    assert "belongs to the pipeline 'shop', and other.py is 'other'" in bad["found"]
    assert "penstock adopt other.py" in bad["fix"]


@pytest.mark.parametrize("layout", layouts("redis", "rabbitmq"))
def test_two_pipelines_on_one_broker_namespace_do_not_take_each_others_messages(
    project: Project, tmp_path: Path, site: Site, layout: str, server: Server
) -> None:
    prepare(project, layout, server)
    other = Project(tmp_path / "other")
    other.dir.mkdir()
    other.env = dict(project.env)
    lay_out(other, layout, server)
    other.set(namespace=project.env["PENSTOCK_NAMESPACE"])
    other.write("other.py", OTHER)
    try:
        project.run()
        other.run(file="other.py")
        project.push(site.serve("/p/1", product(1)))
        done = other.start("run", "other.py")
        assert done.wait() == CONFIGURATION, done.output
        assert "a message belongs to the pipeline 'shop', and not to 'other'" in done.output
        assert "PENSTOCK_NAMESPACE" in done.output
        assert other.total()["accepted"] == 0
        project.run()
        assert [row["sku"] for row in project.rows()] == ["S-1"]
    finally:
        other.close()


@pytest.mark.server("redis")
def test_the_new_owner_accepts_old_messages_that_the_ledger_has_deleted(
    project: Project, site: Site, server: Server
) -> None:
    prepare(project, "redis", server)
    project.run()
    project.push(site.serve("/p/1", product(1)))
    ledger = sqlite3.connect(project.dir / ".penstock" / "ledger.db", isolation_level=None)
    ledger.execute("DELETE FROM event")
    ledger.close()
    project.good("adopt", "other.py")
    running = start(project, "other.py")
    wait_for(lambda: project.written("others.jsonl"), "the row")
    stop(running)
