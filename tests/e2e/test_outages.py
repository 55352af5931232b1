"""Local disks that fail for a while: memory stays flat, no attempt is charged, no row is lost."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.e2e.harness import SHOP, Project, Target, wait_for

SECONDS = float(os.environ.get("E2E_OUTAGE_SECONDS", "6"))
FLAT = 24 << 20  # bytes


def place(link: Path, target: Path) -> None:
    """Replace the link atomically. Otherwise the sink could create a directory there."""
    new = link.with_name("new")
    new.symlink_to(target)
    new.replace(link)


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["1", "2"])
def test_no_row_is_lost_if_a_sink_is_not_writable_for_a_while_at_full_load(
    project: Project, target: Callable[..., Target], workers: str
) -> None:
    web = target(pages=6000)
    project.write("shop.py", SHOP.replace("jsonl:products.jsonl", "jsonl:out/products.jsonl"))
    out, away, blocked = project.dir / "out", project.dir / "away", project.dir / "a file"
    away.mkdir()
    blocked.write_text("no directory")
    place(out, away)
    project.push(*web.urls[:4000])
    running = project.start("run", "shop.py", "--workers", workers)
    wait_for(
        lambda: (
            (out / "products.jsonl").exists() and (out / "products.jsonl").stat().st_size > 10_000
        ),
        f"rows: {running.output}",
    )
    place(out, blocked)
    project.push(*web.urls[4000:])  # new events arrive during the outage
    time.sleep(1)
    before, peak = project.memory(), 0
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        assert not running.ended, running.output
        assert project.total()["dead"] == 0
        peak = max(peak, project.memory())
        time.sleep(0.3)
    status = project.status()
    assert status["total"]["pending"] > 0, "consumption did not pause"
    assert status["sinks"][0]["backlog"] > 0
    print(f"memory {before >> 20} MiB at the start, at most {peak >> 20} MiB in {SECONDS:g} s")
    assert peak <= before + FLAT
    # `doctor` may report that the sink is down, but it must not fail itself.
    assert project.penstock("doctor").code in (
        0,
        1,
        4,
        5,
    )
    place(out, away)
    wait_for(
        lambda: running.ended or project.total()["success"] == 6000,
        f"all done: {running.output}",
        240,
        0.25,
    )
    wait_for(lambda: project.written("out/products.jsonl") == 6000, "all rows", every=0.1)
    running.signal(15)
    assert running.wait() == 0, running.output
    assert sorted(row["sku"] for row in project.rows("out/products.jsonl")) == sorted(
        f"T-{n}" for n in range(6000)
    )
    assert {(e["starts"], e["retry_count"]) for e in project.events()} == {(1, 0)}
    project.doctor()


def test_rows_for_a_sink_that_stays_down_are_written_by_the_next_run(
    project: Project, target: Callable[..., Target]
) -> None:
    project.set(grace="1s")
    web = target(pages=50)
    project.write("shop.py", SHOP.replace("jsonl:products.jsonl", "jsonl:out/products.jsonl"))
    project.push(web.urls[0])
    running = project.start("run", "shop.py")
    wait_for(
        lambda: running.ended or project.written("out/products.jsonl"),
        f"the first row: {running.output}",
    )
    (project.dir / "out").rename(project.dir / "away")
    (project.dir / "out").write_text("in the way")
    project.push(*web.urls[1:])
    wait_for(
        lambda: running.ended or "out/products.jsonl is down" in running.output,
        "the run names the sink that is down",
    )
    wait_for(
        lambda: running.ended or project.total()["in_flight"] == 0,
        f"no event is in flight that the short grace would cut off: {running.output}",
        every=0.2,
    )
    running.signal(15)
    assert running.wait() == 0, running.output
    assert project.total()["dead"] == 0
    (project.dir / "out").unlink()
    (project.dir / "away").rename(project.dir / "out")
    project.run()
    assert len(project.rows("out/products.jsonl")) == 50
    assert set(web.asked().values()) == {1}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of a few megabytes. Skip the test if mounting is not permitted.

    The test with a file size limit below always runs.
    """
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(place)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("mounting a small file system is not permitted here")
    yield place
    for _ in range(50):
        if subprocess.run(["umount", str(place)], capture_output=True, check=False).returncode == 0:
            break
        time.sleep(0.1)


@pytest.mark.slow
def test_a_full_disk_stops_the_work_and_free_space_resumes_it_without_attempts(
    project: Project, target: Callable[..., Target], small_disk: Path
) -> None:
    web = target(pages=400)
    project.set(state=str(small_disk / "state"))
    project.push(*web.urls)
    filler = small_disk / "filler"
    with filler.open("wb") as f, contextlib.suppress(OSError):
        while True:
            f.write(b"\0" * 65536)
            f.flush()
    full = project.penstock("push", web.urls[0])
    assert full.code == 4, full.output
    assert "Error:" in full.err
    assert "Try:" in full.err
    running = project.start("run", "shop.py")
    wait_for(
        lambda: (
            running.ended or ("full" in running.output.lower() and "Error:" not in running.output)
        ),
        f"the run reports the full disk: {running.output}",
    )
    ended = running.ended
    if ended:
        assert running.wait() == 4, running.output
        assert "Error:" in running.output
    filler.unlink()
    subprocess.run(["mount", "-o", "remount,size=200m", str(small_disk)], check=True)
    if ended:
        running = project.start("run", "shop.py")
    wait_for(
        lambda: running.ended or project.total()["success"] == 400,
        f"all done: {running.output}",
        180,
        0.2,
    )
    wait_for(lambda: project.written() == 400, "all rows")
    running.signal(15)
    assert running.wait() == 0, running.output
    assert {e["retry_count"] for e in project.events()} == {0}, (
        "an attempt was charged for the full disk"
    )
    assert "Traceback" not in running.output
    project.doctor()


@pytest.mark.slow
def test_a_file_size_limit_stops_the_work_and_no_attempt_is_charged(
    project: Project, target: Callable[..., Target]
) -> None:
    """The same without a mount: the kernel refuses writes beyond a size for a while."""
    # At least 15 s of work, so that pages are left when the limit comes, on a machine that pauses
    # for seconds.
    project.set(fetch_concurrency="32", fetch_prefetch="64")
    web = target(pages=2000, delay=0.25)
    project.push(*web.urls)
    running = project.start("run", "shop.py")
    wait_for(lambda: web.lines() > 300, f"300 requests: {running.output}")
    _, hard = resource.prlimit(running.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(running.pid, resource.RLIMIT_FSIZE, (4096, hard))
    wait_for(
        lambda: running.ended or "does not take writes" in running.output,
        f"the run reports the refused writes: {running.output}",
    )
    time.sleep(2)
    assert not running.ended, running.output
    resource.prlimit(running.pid, resource.RLIMIT_FSIZE, (hard, hard))
    wait_for(
        lambda: running.ended or project.total()["success"] == 2000,
        f"all done: {running.output}",
        240,
        0.2,
    )
    wait_for(lambda: project.written() == 2000, "all rows")
    running.signal(15)
    assert running.wait() == 0, running.output
    assert project.total()["dead"] == 0
    assert {e["retry_count"] for e in project.events()} == {0}
    assert len({row["sku"] for row in project.rows()}) == 2000
    project.doctor()
