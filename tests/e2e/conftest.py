"""Fixtures of the end-to-end tests: a project, a site, targets, a seed. See `harness`."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# `tests.e2e.harness` must be importable from any working directory.
sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.e2e.harness import SHOP, Project, Site, Target


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    directory = tmp_path / "project"
    directory.mkdir()
    made = Project(directory)
    made.write("shop.py", SHOP)
    yield made
    made.close()


@pytest.fixture
def site(project: Project) -> Iterator[Site]:
    made = Site()
    project.allow(made.port)
    yield made
    made.close()


@pytest.fixture
def target(project: Project, tmp_path: Path) -> Iterator[Callable[..., Target]]:
    made: list[Target] = []

    def start(**options: Any) -> Target:
        made.append(Target(tmp_path, **options))
        project.allow(made[-1].port)
        return made[-1]

    yield start
    for each in made:
        each.close()


@pytest.fixture
def seed() -> int:
    """Return a random seed. A failure prints it, and E2E_SEED repeats it."""
    value = int(os.environ.get("E2E_SEED") or random.SystemRandom().randrange(1 << 32))
    print(f"E2E_SEED={value}")
    return value


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests with a random seed, so that `./dev test full` can repeat them (`-m random`)."""
    for item in items:
        if "seed" in getattr(item, "fixturenames", ()):
            item.add_marker("random")
