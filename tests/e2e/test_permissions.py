"""Only their owner may use the files of the state, also after an upgrade."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.harness import Project, Site, product, wait_for
from tests.e2e.test_doctor import diagnose


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def modes(directory: Path) -> dict[str, int]:
    """Return the modes of everything at and below a directory."""
    found = [directory, *sorted(directory.rglob("*"))]
    return {str(p.relative_to(directory)): stat.S_IMODE(p.lstat().st_mode) for p in found}


def wrong_modes(directory: Path) -> dict[str, str]:
    expected = {True: 0o700, False: 0o600}
    return {
        name: oct(mode)
        for name, mode in modes(directory).items()
        if mode != expected[(directory / name).is_dir()]
    }


def fetch_pages(project: Project, site: Site, pages: range) -> None:
    for n in pages:
        site.serve(f"/p/{n}", product(n))
    project.push(*(site.url(f"/p/{n}") for n in pages))
    project.run()


def test_a_run_creates_a_state_that_only_its_owner_may_read(project: Project, site: Site) -> None:
    fetch_pages(project, site, range(3))
    state = project.dir / ".penstock"
    assert len(modes(state)) > 5
    assert wrong_modes(state) == {}
    output = project.dir / "products.jsonl"
    assert stat.S_IMODE(output.stat().st_mode) == 0o644, "the user's file has the user's umask"


def test_files_are_private_while_a_worker_runs(project: Project, site: Site) -> None:
    site.serve("/p/1", product(1))
    project.push(site.url("/p/1"))
    running = project.start("run", "shop.py")
    try:
        wait_for(lambda: project.written() == 1, "the row")
        state = project.dir / ".penstock"
        found = modes(state)
        assert "penstock.db-wal" in found
        assert any(name.endswith(".alive") for name in found)
        assert wrong_modes(state) == {}
    finally:
        running.kill()


@pytest.mark.parametrize("sink", ["csv:.penstock/out/rows.csv", "sqlite:.penstock/out/rows.db"])
def test_a_sink_in_the_state_directory_is_private(project: Project, site: Site, sink: str) -> None:
    file = project.dir / "shop.py"
    text = file.read_text()
    assert "jsonl:products.jsonl" in text
    file.write_text(text.replace("jsonl:products.jsonl", sink))
    fetch_pages(project, site, range(2))
    assert (project.dir / sink.partition(":")[2]).exists()
    assert wrong_modes(project.dir / ".penstock") == {}


def test_doctor_finds_and_repairs_a_state_that_others_may_read(
    project: Project, site: Site
) -> None:
    fetch_pages(project, site, range(2))
    state, outside = project.dir / ".penstock", project.dir / "outside"
    outside.write_text("not a file of Penstock")
    outside.chmod(0o644)
    (state / "link").symlink_to(outside)
    for path in (state, *state.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() else 0o644)
    code, found = diagnose(project)
    assert code == 5
    assert found["permissions.state"]["severity"] == "error"
    assert "--repair" in found["permissions.state"]["next_step"]
    assert stat.S_IMODE(state.stat().st_mode) == 0o755, "doctor without --repair changes nothing"

    assert diagnose(project, "--repair") == (0, {})
    (state / "link").unlink()
    assert wrong_modes(state) == {}
    assert stat.S_IMODE(outside.stat().st_mode) == 0o644, "a link is not followed"
    assert diagnose(project) == (0, {})


def test_doctor_warns_if_only_the_directory_protects_the_files(
    project: Project, site: Site
) -> None:
    fetch_pages(project, site, range(1))
    (project.dir / ".penstock" / "penstock.db").chmod(0o644)
    code, found = diagnose(project)
    assert code == 0
    assert found["permissions.state"]["severity"] == "warning"
