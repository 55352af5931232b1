"""The state directory of an earlier release is read and processed by the current code."""

from __future__ import annotations

import json
from pathlib import Path

import apsw
import pytest
from tests.releases import RELEASES, ReleasedProject, check_end, figures, recorded_figures

from penstock.stores.migrations.versions import newest


@pytest.mark.parametrize("release", RELEASES)
async def test_the_state_of_an_earlier_release_is_processed(release: str, tmp_path: Path) -> None:
    recorded = recorded_figures(release, "embedded")
    project = ReleasedProject(release, "embedded", tmp_path)
    out, err = await project.command("status", "--json")
    assert figures(json.loads(out)) == recorded
    backup = tmp_path / ".penstock" / f"penstock.db.before-v{newest()}"
    assert len(err.splitlines()) == 1
    assert f"was migrated from store version 1 to {newest()}" in err
    assert f"The backup is {backup}" in err
    assert backup.exists()

    await project.process_open_events()
    check_end(recorded, await project.status())
    project.check_sinks()


@pytest.mark.parametrize("release", RELEASES)
async def test_the_first_run_on_the_state_of_an_earlier_release_sets_the_owner(
    release: str, tmp_path: Path
) -> None:
    project = ReleasedProject(release, "embedded", tmp_path)
    assert json.loads(await project.penstock("status", "--json"))["pipeline"] is None
    await project.process_open_events()
    assert json.loads(await project.penstock("status", "--json"))["pipeline"] == "shop"
    other = (tmp_path / "shop.py").read_text().replace('Pipeline("shop")', 'Pipeline("other")')
    (tmp_path / "other.py").write_text(other)
    await project.penstock("run", "other.py", "--until-idle", code=3)


@pytest.mark.parametrize("release", RELEASES)
async def test_the_known_urls_of_an_earlier_release_are_counted(
    release: str, tmp_path: Path
) -> None:
    project = ReleasedProject(release, "embedded", tmp_path)
    await project.penstock("status")
    connection = apsw.Connection(str(tmp_path / ".penstock" / "penstock.db"))
    counted = connection.execute("SELECT host, known FROM known_host ORDER BY host").fetchall()
    urls = connection.execute(
        "SELECT host, count(DISTINCT url_key) FROM event WHERE status='success'"
        " GROUP BY host ORDER BY host"
    ).fetchall()
    connection.close()
    assert counted == urls
    assert counted != []
