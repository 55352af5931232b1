"""The state directory of an earlier release is read and processed by the current code."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.releases import RELEASES, ReleasedProject, check_end, recorded_figures


@pytest.mark.parametrize("release", RELEASES)
async def test_the_state_of_an_earlier_release_is_processed(release: str, tmp_path: Path) -> None:
    recorded = recorded_figures(release, "embedded")
    project = ReleasedProject(release, "embedded", tmp_path)
    assert await project.status() == recorded

    await project.process_open_events()
    check_end(recorded, await project.status())
    project.check_sinks()
