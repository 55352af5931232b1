"""`./dev` in a copy of the source tree: installed packages and error messages.

These tests download packages from the package index, as `./dev` itself does.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COUNT = "from importlib.metadata import distributions as d; print(len(list(d())))"


class Clone:
    """A copy of the files that `./dev` needs, with a separate environment."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        for name in ("dev", "pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, directory)
        for name in ("locks", "tools", "src"):
            shutil.copytree(
                ROOT / name, directory / name, ignore=shutil.ignore_patterns("__pycache__")
            )

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        clean = {
            name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")
        }
        done = subprocess.run(
            [self.directory / "dev", *arguments],
            cwd=self.directory,
            env=clean,
            capture_output=True,
            text=True,
            check=False,
        )
        if "installing the dependencies failed" in done.stderr and not os.environ.get("CI"):
            pytest.skip(f"packages cannot be installed here: {done.stderr}")
        return done

    def imports(self, module: str) -> bool:
        return self.run("exec", "python", "-c", f"import {module}").returncode == 0

    def change(self, old: str, new: str) -> None:
        path = self.directory / "pyproject.toml"
        text = path.read_text("utf-8")
        assert old in text
        path.write_text(text.replace(old, new, 1), "utf-8")


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


@pytest.mark.slow
def test_an_environment_has_the_runtime_packages_and_keeps_added_extras(clone: Clone) -> None:
    made = clone.run("exec", "penstock", "--version")
    assert made.stdout.startswith("penstock "), made.stderr
    assert "making the environment" in made.stderr
    # pip, uv and Penstock itself are counted.
    assert int(clone.run("exec", "python", "-c", COUNT).stdout) <= 36
    assert not clone.imports("confluent_kafka")

    assert clone.run("extras", "kafka").returncode == 0
    assert clone.imports("confluent_kafka")
    listed = dict(line.split() for line in clone.run("extras").stdout.splitlines())
    assert (listed["kafka"], listed["postgres"]) == ("installed", "-")

    # An environment that is up to date prints nothing.
    assert clone.run("exec", "true").stderr == ""

    clone.change("[project.entry-points", "# a comment\n[project.entry-points")
    assert "updating the environment" in clone.run("exec", "true").stderr
    assert clone.imports("confluent_kafka")

    # An installation that was killed leaves this file.
    (clone.directory / ".venv/.penstock-installing").touch()
    assert "making it again" in clone.run("exec", "true").stderr
    assert clone.imports("confluent_kafka")


def test_an_unknown_extra_is_an_error_that_lists_the_extras(clone: Clone) -> None:
    done = clone.run("extras", "kafka", "kavka")
    assert done.returncode == 2
    assert 'Error: no extra is called "kavka"' in done.stderr
    assert "kafka postgres rabbitmq" in done.stderr
    assert not (clone.directory / ".venv").exists()


def test_a_dependency_that_is_not_locked_is_an_error_with_a_next_step(clone: Clone) -> None:
    clone.change("aiormq>=7.2", "aiormq>=7.3")
    done = clone.run("exec", "true")
    assert done.returncode == 4
    assert "extras/dev.txt extras/rabbitmq.txt" in done.stderr
    assert "Try: ./dev lock" in done.stderr
