"""Tests of `pytest --rerun-failed` (tests/rerun.py) with small suites in a temporary directory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow
BEGINNING = """
import os, pathlib, pytest

def first_time(name):
    mark = pathlib.Path(__file__).with_name(name)
    if mark.exists():
        return False
    mark.touch()
    return True

def test_good():
    pass
"""
FLAKY = """
def test_flaky():
    assert not first_time("flaky"), "only the first time"
"""
BAD = """
def test_bad():
    assert False, "every time"
"""
BAD_TEARDOWN = """
@pytest.fixture
def resource():
    yield
    assert not first_time("resource"), "only the first time"

def test_with_teardown(resource):
    pass
"""
SKIPPED_LATER = """
def test_skipped_later():
    if first_time("skipped"):
        assert False
    pytest.skip("cannot run now")
"""
CRASH = """
def test_crash():
    if first_time("crash"):
        os._exit(1)
"""
MANY = """
@pytest.mark.parametrize("n", range(21))
def test_many(n):
    assert not first_time(f"many-{n}")
"""


def run(directory: Path, *parts: str, options: tuple[str, ...] = ("-n", "2")) -> tuple[int, str]:
    """Return the exit status and the output."""
    (directory / "pytest.ini").write_text("[pytest]\n")
    (directory / "test_suite.py").write_text(BEGINNING + "".join(parts))
    surroundings = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")} | {
        "PYTHONPATH": str(ROOT),
        "NO_COLOR": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # some of them take seconds to import
    }
    plugins = ("-p", "xdist", "-p", "tests.rerun")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *plugins, "--rerun-failed", *options],
        cwd=directory,
        env=surroundings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=170,
        check=False,
    )
    print(done.stdout)
    assert done.stdout.count(" passed in ") <= 1, "one summary line for the whole run"
    return done.returncode, done.stdout


@pytest.mark.parametrize("options", [("-n", "2"), ()])
def test_a_test_that_passes_alone_counts_as_passed_and_is_listed(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    status, output = run(tmp_path, FLAKY, options=options)
    assert status == 0
    assert output.splitlines()[-2] == "FLAKY test_suite.py::test_flaky"
    assert "= 2 passed in " in output.splitlines()[-1]
    assert "only the first time" in output, "the first failure is printed"


def test_a_test_that_fails_twice_fails_the_run(tmp_path: Path) -> None:
    status, output = run(tmp_path, FLAKY, BAD)
    assert status == 1
    assert "FAILED test_suite.py::test_bad" in output
    assert output.splitlines()[-2] == "FLAKY test_suite.py::test_flaky"
    assert "= 1 failed, 2 passed in " in output.splitlines()[-1]


def test_a_failed_teardown_runs_again_and_counts_once(tmp_path: Path) -> None:
    status, output = run(tmp_path, BAD_TEARDOWN)
    assert status == 0
    assert output.splitlines()[-2] == "FLAKY test_suite.py::test_with_teardown"
    assert "= 2 passed in " in output.splitlines()[-1]


def test_a_test_that_is_skipped_in_its_rerun_stays_failed(tmp_path: Path) -> None:
    status, output = run(tmp_path, SKIPPED_LATER)
    assert status == 1
    assert "= 1 failed, 1 passed in " in output.splitlines()[-1]


def test_a_crashed_worker_fails_the_run(tmp_path: Path) -> None:
    """Each test would pass alone."""
    status, output = run(tmp_path, FLAKY, CRASH)
    assert status == 1
    assert "No failed test ran again: a worker crashed" in output
    assert "FLAKY" not in output
    assert "= 2 failed, 1 passed in " in output.splitlines()[-1]


def test_a_run_fails_if_all_workers_crash(tmp_path: Path) -> None:
    status, _ = run(tmp_path, CRASH, options=("-n", "1", "--max-worker-restart", "0"))
    assert status != 0


def test_more_than_twenty_failures_do_not_run_again(tmp_path: Path) -> None:
    status, output = run(tmp_path, MANY)
    assert status == 1
    assert "No failed test ran again: 21 tests failed, more than 20" in output
    assert "= 21 failed, 1 passed in " in output.splitlines()[-1]


def test_a_file_that_cannot_be_imported_fails_the_run(tmp_path: Path) -> None:
    status, output = run(tmp_path, FLAKY, "import nothing_like_this\n")
    assert status != 0
    assert "No failed test ran again: not all tests could be collected" in output
    assert "FLAKY" not in output


def test_a_run_that_ends_early_fails(tmp_path: Path) -> None:
    status, output = run(tmp_path, FLAKY, BAD, options=("-x",))
    assert status != 0
    assert "2 ran" in output
