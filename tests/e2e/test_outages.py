"""Our own disk fails for a while: the queue fills, memory does not, nobody pays, and everything is
there afterwards.
"""

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
    """At once: between two steps the sink would make a directory of its own there."""
    new = link.with_name("new")
    new.symlink_to(target)
    new.replace(link)


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_sink_that_cannot_be_written_for_a_while_at_full_load_loses_nothing(
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
        f"rows: {running.said}",
    )
    place(out, blocked)
    project.push(*web.urls[4000:])  # the world does not wait
    time.sleep(1)
    before, most = project.memory(), 0
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        assert not running.ended, running.said
        assert project.total()["dead"] == 0
        most = max(most, project.memory())
        time.sleep(0.3)
    status = project.status()
    assert status["total"]["pending"] > 0, "consumption did not pause"
    assert status["sinks"][0]["backlog"] > 0
    print(f"memory {before >> 20} MiB when it began, at most {most >> 20} MiB in {SECONDS:g} s")
    assert most <= before + FLAT
    assert project.penstock("doctor").code in (
        0,
        1,
        4,
        5,
    )  # it may say that the sink is down; it must not fail itself
    place(out, away)
    wait_for(
        lambda: running.ended or project.total()["success"] == 6000,
        f"all done: {running.said}",
        240,
        0.25,
    )
    wait_for(lambda: project.written("out/products.jsonl") == 6000, "all rows", every=0.1)
    running.signal(15)
    assert running.wait() == 0, running.said
    assert sorted(row["sku"] for row in project.rows("out/products.jsonl")) == sorted(
        f"T-{n}" for n in range(6000)
    )
    assert {(e["starts"], e["retry_count"]) for e in project.events()} == {(1, 0)}
    project.doctor()


def test_a_run_whose_sink_never_comes_back_keeps_its_rows_for_the_next_run(
    project: Project, target: Callable[..., Target]
) -> None:
    project.set(grace="1s")
    web = target(pages=50)
    project.write("shop.py", SHOP.replace("jsonl:products.jsonl", "jsonl:out/products.jsonl"))
    (project.dir / "out").write_text("in the way")
    project.push(*web.urls)
    running = project.start("run", "shop.py")
    wait_for(
        lambda: running.ended or "out/products.jsonl is down" in running.said,
        "it says which sink is down",
    )
    wait_for(
        lambda: running.ended or project.total()["in_flight"] == 0,
        f"nothing is under way that the short grace would cut off: {running.said}",
        every=0.2,
    )
    running.signal(15)
    assert running.wait() == 0, running.said
    assert project.total()["dead"] == 0
    (project.dir / "out").unlink()
    project.run()
    assert len(project.rows("out/products.jsonl")) == 50
    assert set(web.asked().values()) == {1}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a few megabytes; where we may not mount one, the test is left out (its
    sibling below always runs).
    """
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(place)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("may not mount a small file system here")
    yield place
    for _ in range(50):
        if subprocess.run(["umount", str(place)], capture_output=True, check=False).returncode == 0:
            break
        time.sleep(0.1)


@pytest.mark.slow
def test_a_full_disk_stops_the_work_and_room_lets_it_go_on(
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
    assert full.code == 4, full.said
    assert "Error:" in full.err
    assert "Try:" in full.err
    running = project.start("run", "shop.py")
    wait_for(
        lambda: running.ended or ("full" in running.said.lower() and "Error:" not in running.said),
        f"it says why nothing goes on: {running.said}",
    )
    ended = running.ended
    if ended:
        assert running.wait() == 4, running.said
        assert "Error:" in running.said
    filler.unlink()
    subprocess.run(["mount", "-o", "remount,size=200m", str(small_disk)], check=True)
    if ended:
        running = project.start("run", "shop.py")
    wait_for(
        lambda: running.ended or project.total()["success"] == 400,
        f"all done: {running.said}",
        180,
        0.2,
    )
    wait_for(lambda: project.written() == 400, "all rows")
    running.signal(15)
    assert running.wait() == 0, running.said
    assert {e["retry_count"] for e in project.events()} == {0}, "somebody paid for our full disk"
    assert "Traceback" not in running.said
    project.doctor()


@pytest.mark.slow
def test_files_that_may_not_grow_for_a_while_stop_the_work_and_nobody_pays(
    project: Project, target: Callable[..., Target]
) -> None:
    """The same without a file system of our own: the kernel refuses every write beyond a size, then
    does not any more.
    """
    web = target(pages=3000, delay=0.05)
    project.push(*web.urls)
    running = project.start("run", "shop.py")
    wait_for(lambda: web.lines() > 300, f"under way: {running.said}")
    _, hard = resource.prlimit(running.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(running.pid, resource.RLIMIT_FSIZE, (4096, hard))
    wait_for(
        lambda: running.ended or "does not take writes" in running.said,
        f"it says so: {running.said}",
    )
    time.sleep(2)
    assert not running.ended, running.said
    resource.prlimit(running.pid, resource.RLIMIT_FSIZE, (hard, hard))
    wait_for(
        lambda: running.ended or project.total()["success"] == 3000,
        f"all done: {running.said}",
        240,
        0.2,
    )
    wait_for(lambda: project.written() == 3000, "all rows")
    running.signal(15)
    assert running.wait() == 0, running.said
    assert project.total()["dead"] == 0
    assert {e["retry_count"] for e in project.events()} == {0}
    assert len({row["sku"] for row in project.rows()}) == 3000
    project.doctor()
