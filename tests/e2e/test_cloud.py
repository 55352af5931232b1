"""Topics on SQS and pages on S3, with split roles: a killed worker loses and repeats no row."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest
from tests.e2e.harness import PENSTOCK, Project, Site, product, wait_for
from tests.servers import Handle

PAGES = 60


@pytest.mark.slow
@pytest.mark.server("sqs", "s3")
def test_a_pipeline_on_sqs_and_s3_loses_nothing_when_a_worker_is_killed(
    project: Project, site: Site, server: Callable[[str], Handle]
) -> None:
    state = project.dir / ".penstock"
    project.set(
        namespace=f"t{project.mark[:12]}",
        broker_url=server("sqs").url + "&poll=1",
        pages_url=server("s3").url,
        ledger_url=f"sqlite:{state}/ledger.db",
        claims_url=f"sqlite:{state}/ledger.db",
        lease="3s",
    )
    urls = [site.serve(f"/p/{n}", product(n)) for n in range(PAGES)]
    project.push(*urls)
    fetch = project.start("run", "shop.py", "--role", "fetch")
    rest = project.start("run", "shop.py", "--role", "extract,sink")
    wait_for(lambda: site.asked("/p/5"), "the first requests")
    fetch.kill()
    fetch = project.start("run", "shop.py", "--role", "fetch")
    wait_for(
        lambda: fetch.ended or rest.ended or project.total()["success"] == PAGES,
        "every event's end",
        240,
        0.3,
    )
    wait_for(lambda: project.written() >= PAGES, "every row")
    for each in (fetch, rest):
        each.signal(15)
    for each in (fetch, rest):
        assert each.wait() == 0, each.output
    assert (
        project.total()["success"]
        == len({row["sku"] for row in project.rows()})
        == len(project.rows())
        == PAGES
    )
    body = subprocess.run(
        [*PENSTOCK, "pages", "show", urls[0]],
        cwd=project.dir,
        env=project.env,
        capture_output=True,
        check=True,
    ).stdout
    assert body == product(0).encode()
    project.doctor()
