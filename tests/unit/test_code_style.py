"""Lint, format and type checks, so that the summary of the test suite covers them too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "tool",
    [
        ["ruff", "check", "--quiet", "."],
        ["ruff", "format", "--check", "--quiet", "."],
        ["mypy", "--no-error-summary"],
    ],
    ids=["lint", "format", "types"],
)
def test_the_code_passes_its_checks(tool: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *tool],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, f"./dev check\n{done.stdout}{done.stderr}"
