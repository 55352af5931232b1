"""A second try for tests that failed beside others: `pytest -n 3 --again`.

Each failed test runs once more after the run, alone, in a process of its own. If it passes there,
it counts as passed, and the last lines list it as flaky. If it fails there, it stays failed.

Nothing is tried again if the run itself is in doubt: a worker died, tests did not run, or more than
MOST tests failed.
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

MOST = 20


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--again",
        action="store_true",
        help="run each failed test once more, alone; if it passes then, list it as flaky",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("again") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Again(config), "again")


class _Again:
    """Lives in the process that sees the reports of all workers."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.ran: set[str] = set()
        self.collected_wrongly = False
        self.died: list[str] = []
        self.notes: list[str] = []  # lines for the end of the output
        self.flaky: list[pytest.TestReport] = []

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.collected_wrongly |= report.failed

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.ran.add(report.nodeid)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object, error: object) -> None:
        """A hook of pytest-xdist. A worker that ended as it should has no error."""
        if error:
            self.died.append(f"{node}: {error}")

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Iterator[None]:
        yield  # here pytest-xdist ends its workers
        if session.exitstatus != pytest.ExitCode.TESTS_FAILED:
            return
        reporter = self.config.pluginmanager.get_plugin("terminalreporter")
        assert reporter is not None
        failures = [*reporter.stats.get("failed", []), *reporter.stats.get("error", [])]
        tests = list(dict.fromkeys(report.nodeid for report in failures))
        if doubt := self._doubt(session, len(tests)):
            self.notes.append(f"no failed test was tried again: {doubt}")
            return
        reporter.write_sep("=", f"{len(tests)} failed, trying each again alone")
        sys.stdout.flush()
        passed = {test for test in tests if self._passes_alone(test)}
        self.flaky = [report for report in failures if report.nodeid in passed]
        for kind in ("failed", "error"):
            failures = reporter.stats.pop(kind, [])
            if kept := [report for report in failures if report.nodeid not in passed]:
                reporter.stats[kind] = kept
        counted = {report.nodeid for report in reporter.stats.get("passed", [])}
        for report in self.flaky:
            if report.nodeid not in counted:  # one that failed in its teardown was counted
                counted.add(report.nodeid)
                reporter.stats.setdefault("passed", []).append(report)
        if passed == set(tests):
            session.exitstatus = pytest.ExitCode.OK

    def _doubt(self, session: pytest.Session, failed: int) -> str:
        """Why the failures are not the whole story, or an empty string."""
        if self.collected_wrongly:
            return "not all tests could be collected"
        if self.died:
            return "a worker died (" + ", ".join(self.died) + ")"
        if len(self.ran) != session.testscollected:
            return f"{session.testscollected} tests were collected and {len(self.ran)} ran"
        if failed > MOST:
            return f"{failed} failed, which is more than {MOST}"
        return ""

    def _passes_alone(self, test: str) -> bool:
        """A skip is no pass, so the counts are read as well as the exit status."""
        with tempfile.TemporaryDirectory() as directory:
            found = Path(directory) / "found.xml"
            # -qq: without a summary line, of which the whole run has one.
            command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-qq"]
            if profile := self.config.getoption("--hypothesis-profile", None):
                command.append(f"--hypothesis-profile={profile}")
            done = subprocess.run(
                [*command, f"--junitxml={found}", test],
                cwd=self.config.rootpath,
                env=os.environ | {"CI": "true"},  # a server that cannot be had is a failure
                check=False,
            )
            if done.returncode != 0:
                return False
            (suite,) = ElementTree.parse(found).getroot().iter("testsuite")
            return suite.get("tests") == "1" and suite.get("skipped") == "0"

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
        for report in self.flaky:
            terminalreporter.write_sep("_", f"flaky: {report.nodeid} ({report.when})")
            terminalreporter.write_line(report.longreprtext)
            for title, text in report.sections:
                terminalreporter.write_sep("-", title)
                terminalreporter.write_line(text)
        yield
        for line in self.notes:
            terminalreporter.write_line(line)
        tests = list(dict.fromkeys(report.nodeid for report in self.flaky))
        if tests:
            terminalreporter.write_sep("=", f"{len(tests)} flaky (failed once, passed alone)")
        for test in tests:
            terminalreporter.write_line(f"FLAKY {test}")
