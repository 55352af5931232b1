"""Rerun failed tests alone: `pytest -n 3 --rerun-failed`.

After the run, each failed test runs once more, alone, in a separate process. If it passes, it
counts as passed, and the last lines list it as flaky. If it fails again, it stays failed.

The plugin reruns nothing if the run is incomplete (a worker crashed, a test did not run) or if
more than MAX_FAILURES tests failed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

MAX_FAILURES = 20


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rerun-failed",
        action="store_true",
        help="run each failed test once more, alone, and list it as flaky if it passes",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("rerun_failed") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Rerun(config), "rerun")


class _Rerun:
    """Reruns failed tests. Exists only in the process that receives the reports of all workers."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.ran: set[str] = set()
        self.collection_failed = False
        self.crashed: list[str] = []
        self.refusal = ""
        self.flaky: list[pytest.TestReport] = []

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.collection_failed |= report.failed

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.ran.add(report.nodeid)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object, error: object) -> None:
        """Called by pytest-xdist when a worker ends. `error` is None after a normal end."""
        if error:
            self.crashed.append(f"{node}: {error}")

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Iterator[None]:
        yield  # pytest-xdist ends its workers here
        if session.exitstatus != pytest.ExitCode.TESTS_FAILED:
            return
        reporter = self.config.pluginmanager.get_plugin("terminalreporter")
        assert reporter is not None
        failures = [*reporter.stats.get("failed", []), *reporter.stats.get("error", [])]
        tests = list(dict.fromkeys(report.nodeid for report in failures))
        self.refusal = self._refuse(session, len(tests))
        if self.refusal:
            return
        reporter.write_sep("=", f"{len(tests)} failed, running each once more, alone")
        sys.stdout.flush()
        passed = {test for test in tests if self._passes_alone(test)}
        self.flaky = [report for report in failures if report.nodeid in passed]
        for kind in ("failed", "error"):
            reports = reporter.stats.pop(kind, [])
            if failed := [report for report in reports if report.nodeid not in passed]:
                reporter.stats[kind] = failed
        # A test that failed only in its teardown is already among the passed tests.
        counted = {report.nodeid for report in reporter.stats.get("passed", [])}
        for report in self.flaky:
            if report.nodeid not in counted:
                counted.add(report.nodeid)
                reporter.stats.setdefault("passed", []).append(report)
        if passed == set(tests):
            session.exitstatus = pytest.ExitCode.OK

    def _refuse(self, session: pytest.Session, failures: int) -> str:
        """Return the reason against a rerun, or an empty string."""
        if self.collection_failed:
            return "not all tests could be collected"
        if self.crashed:
            return "a worker crashed (" + ", ".join(self.crashed) + ")"
        if len(self.ran) != session.testscollected:
            return f"{session.testscollected} tests were collected and {len(self.ran)} ran"
        if failures > MAX_FAILURES:
            return f"{failures} tests failed, more than {MAX_FAILURES}"
        return ""

    def _passes_alone(self, test: str) -> bool:
        """Run one test. A skipped test also ends with exit status 0, so this reads the counts."""
        with tempfile.TemporaryDirectory() as directory:
            counts = Path(directory) / "counts.xml"
            # With -qq the rerun prints no summary line. The whole run prints one.
            command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-qq"]
            if profile := self.config.getoption("--hypothesis-profile", None):
                command.append(f"--hypothesis-profile={profile}")
            done = subprocess.run(
                [*command, f"--junitxml={counts}", test],
                cwd=self.config.rootpath,
                env=os.environ | {"CI": "true"},  # fail, not skip, if a server cannot start
                check=False,
            )
            if done.returncode != 0:
                return False
            (suite,) = ElementTree.parse(counts).getroot().iter("testsuite")
            return suite.get("tests") == "1" and suite.get("skipped") == "0"

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
        """Print the first failure of each flaky test. List the flaky tests in the last lines."""
        for report in self.flaky:
            terminalreporter.write_sep("_", f"flaky: {report.nodeid} ({report.when})")
            terminalreporter.write_line(report.longreprtext)
            for title, text in report.sections:
                terminalreporter.write_sep("-", title)
                terminalreporter.write_line(text)
        yield
        if self.refusal:
            terminalreporter.write_line(f"No failed test ran again: {self.refusal}.")
        tests = list(dict.fromkeys(report.nodeid for report in self.flaky))
        if tests:
            terminalreporter.write_sep("=", f"{len(tests)} flaky (failed once, passed alone)")
        for test in tests:
            terminalreporter.write_line(f"FLAKY {test}")
