"""`./dev services` and the servers of tests: the one in the development environment (s3, by moto)
stands for all; the adapters' suites run the rest.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tools.services.processes import identity
from tools.services.servers import SERVERS

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


class Services:
    """The command, with a state directory and a cache of its own."""

    def __init__(self, directory: Path) -> None:
        self.state, self.cache = directory / "state", directory.parent / "cache"
        self.environment = os.environ | {
            "PENSTOCK_SERVICES_DIR": str(self.state),
            "XDG_CACHE_HOME": str(self.cache),
        }

    def run(
        self, *arguments: str, status: int = 0, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tools.services", *arguments]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=self.environment | environment,
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        assert done.returncode == status, done.stderr
        return done

    def status(self, name: str) -> dict[str, Any]:
        (found,) = json.loads(self.run("status", name, "--json").stdout)
        return dict(found)


@pytest.fixture
def services(tmp_path: Path) -> Any:
    made = Services(tmp_path / "one")
    yield made
    made.run("down")


def test_a_server_is_started_found_again_and_stopped(services: Services) -> None:
    assert services.status("s3")["state"] == "stopped"
    assert "s3 moto" in services.run("up", "s3").stderr
    found = services.status("s3")
    assert (found["name"], found["state"]) == ("s3", "running")
    assert found["url"] == services.run("url", "s3").stdout.strip()
    assert found["version"].startswith("moto ")
    assert "already running" in services.run("up", "s3").stderr
    assert services.status("s3")["pid"] == found["pid"]
    services.run("restart", "s3")
    again = services.status("s3")
    assert (again["url"], again["state"]) == (found["url"], "running")
    assert again["pid"] != found["pid"]
    services.run("down", "s3")
    assert identity(again["pid"]) is None
    assert services.status("s3")["state"] == "stopped"
    services.run("down", "--wipe", "s3")
    assert not (services.state / "s3").exists()


def test_two_clones_run_side_by_side(services: Services, tmp_path: Path) -> None:
    other = Services(tmp_path / "two")
    urls = {clone.run("url", "s3").stdout for clone in (services, other)}
    assert len(urls) == 2, (
        "a port that was given to one clone is not given to another, even while nobody listens"
    )
    try:
        services.run("up", "s3")
        other.run("up", "s3")
        services.run("kill", "s3")
        assert other.status("s3")["state"] == "running"
    finally:
        other.run("down")


def test_only_the_process_that_was_started_is_ever_ended(services: Services) -> None:
    services.run("up", "s3")
    note = services.state / "s3" / "state.json"
    noted = json.loads(note.read_text())
    os.kill(noted["pid"], signal.SIGKILL)
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as stranger:
        note.write_text(json.dumps(noted | {"pid": stranger.pid}))  # the pid is another's now
        assert services.status("s3")["state"] == "stopped"
        assert "not running" in services.run("down", "s3").stderr
        assert stranger.poll() is None
        stranger.kill()


def test_a_server_that_cannot_start_shows_its_log_and_what_to_do(services: Services) -> None:
    port = int(re.findall(r"127.0.0.1:(\d+)", services.run("url", "s3").stdout)[0])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        told = services.run("up", "s3", status=3).stderr
    assert "services: s3: " in told, "the end of its log"
    assert re.search(r"^Error: s3 ended while it was starting$", told, re.MULTILINE)
    assert re.search(rf"^Try: read {services.state}/s3/log", told, re.MULTILINE)


def test_a_program_that_is_not_there_is_named_with_its_package(
    services: Services, tmp_path: Path
) -> None:
    told = services.run("up", "redis", status=3, PATH=str(tmp_path)).stderr
    assert told.startswith("Error: redis-server is not installed (")
    assert "\nTry: " in told
    assert "Traceback" not in told


@pytest.mark.parametrize("words", [["upp"], ["up", "mysql"], ["url"], ["kill"], ["up", "--frob"]])
def test_a_mistyped_command_says_what_there_is(services: Services, words: list[str]) -> None:
    told = services.run(*words, status=2).stderr
    assert re.match(r"Error: .+\nTry: .+\n$", told)


SUITE = """
import pytest, urllib.request

@pytest.mark.server("redis")
def test_one_that_cannot_be_had(server):
    assert server("redis").url

@pytest.mark.server("s3")
def test_faults(server):
    endpoint = f"http://127.0.0.1:{server('s3').port}/"
    urllib.request.urlopen(endpoint).close()
    server("s3").kill()
    with pytest.raises(OSError):
        urllib.request.urlopen(endpoint)

@pytest.mark.server("s3")
def test_it_is_there_again(server):
    urllib.request.urlopen(f"http://127.0.0.1:{server('s3').port}/").close()

def test_without_a_server():
    print("FIRST")
"""


def _suite(services: Services, tmp_path: Path, *options: str, **environment: str) -> str:
    (tmp_path / "test_suite.py").write_text(SUITE)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.servers",
        "-c",
        str(ROOT / "pyproject.toml"),
        "-v",
        "-rs",
        "-p",
        "no:cacheprovider",
        *options,
    ]
    # Without a path there is neither the server nor a package manager.
    surroundings = (
        {name: value for name, value in services.environment.items() if name != "CI"}
        | {"PATH": str(tmp_path)}
        | environment
    )
    done = subprocess.run(
        [*command, str(tmp_path / "test_suite.py")],
        cwd=ROOT,
        env=surroundings,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    return done.stdout + done.stderr


def test_tests_start_what_they_need_and_stop_what_they_started(
    services: Services, tmp_path: Path
) -> None:
    told = _suite(services, tmp_path)
    assert "3 passed, 1 skipped" in told, told
    assert "NOT TESTED, no redis: redis-server is not installed" in told
    assert (
        told.index("test_without_a_server PASSED")
        < told.index("test_one_that_cannot_be_had SKIPPED")
        < told.index("test_faults PASSED")
    )
    assert services.status("s3")["state"] == "stopped"


def test_tests_leave_running_what_ran_before_them(services: Services, tmp_path: Path) -> None:
    services.run("up", "s3")
    before = services.status("s3")["pid"]
    assert "1 passed" in _suite(services, tmp_path, "-k", "there_again")
    assert services.status("s3")["pid"] == before


def test_under_ci_a_server_that_cannot_be_had_is_a_failure(
    services: Services, tmp_path: Path
) -> None:
    assert "1 error" in _suite(services, tmp_path, "-k", "cannot_be_had", CI="true")


def test_compose_has_the_same_servers_on_the_same_ports() -> None:
    text = (ROOT / "deploy" / "compose" / "compose.yaml").read_text()
    services = text.partition("\nservices:\n")[2].partition("\nvolumes:\n")[0]
    blocks = dict(re.findall(r"^  (\w+):\n((?:(?:    .*)?\n)+)", services, re.MULTILINE))
    assert set(blocks) == set(SERVERS)
    for name, block in blocks.items():
        port = next(iter(SERVERS[name].usual.values()))
        assert f'"127.0.0.1:{port}:' in block
        assert "healthcheck:" in block
        assert re.search(r"image: \S+:\d+\.\d+\S*( #.*)?$", block, re.MULTILINE), (
            "pinned by version"
        )
