"""The state directory of an earlier release is read and processed by the current code."""

from __future__ import annotations

import json
from pathlib import Path

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
