"""Webhooks on two machines that share a ledger in PostgreSQL.

An id is known on both machines, and a killed server loses no event that was answered with 202.
"""

from __future__ import annotations

import http.client
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest
from tests.e2e.harness import Project, wait_for
from tests.e2e.webhook_rig import Server
from tests.servers import Handle

pytestmark = [pytest.mark.server("postgres"), pytest.mark.slow]


@pytest.fixture
def machines(
    project: Project, tmp_path: Path, server: Callable[[str], Handle]
) -> Iterator[list[Server]]:
    url, namespace = server("postgres").url, f"t{project.mark[:12]}"
    other = tmp_path / "other"
    other.mkdir()
    made = []
    for each in (project, Project(other)):
        each.set(broker_url=url, namespace=namespace, lease="2s")
        made.append(Server(each))
    yield made
    made[1].project.close()
    made[0].running.kill()
    with psycopg.connect(url) as db:
        db.execute(f"DROP SCHEMA IF EXISTS {namespace} CASCADE")


def test_an_id_posted_to_both_machines_at_the_same_time_is_one_event(
    machines: list[Server],
) -> None:
    def post(n: int) -> tuple[int, int]:
        answer = machines[n % 2].post(
            {"url": f"https://shop.example/p/{n // 2}"}, webhook_id=str(n // 2)
        )
        assert answer.status == 202, answer.json
        return answer.json["accepted"], answer.json["known"]

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(post, range(400)))
    assert sum(new for new, _ in answers) == sum(known for _, known in answers) == 200
    assert machines[0].project.total()["accepted"] == 200


def test_a_killed_database_server_means_503_and_every_event_answered_202_is_kept(
    machines: list[Server], server: Callable[[str], Handle]
) -> None:
    handle = server("postgres")
    promised: set[str] = set()

    def post(n: int) -> int:
        try:
            answer = machines[n % 2].post({"url": f"https://shop.example/p/{n}"}, webhook_id=str(n))
        except (OSError, http.client.HTTPException):
            pytest.fail("the webhook must stay reachable")
        assert answer.status in (202, 503), answer.json
        if answer.status == 202:
            promised.update(answer.json["ids"])
        return answer.status

    with ThreadPoolExecutor(8) as pool:
        before = list(pool.map(post, range(100)))
        handle.kill()
        during = list(pool.map(post, range(100, 120)))
        handle.start()
        wait_for(lambda: post(1000) == post(1001) == 202, "both machines accept again", 60, 0.2)
        after = list(pool.map(post, range(120)))
    assert set(before) == set(after) == {202}
    assert set(during) == {503}
    assert promised == {event["event_id"] for event in machines[0].project.events()}
    assert len(promised) == 122
