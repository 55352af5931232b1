"""`./dev services` and the servers of tests, with the one server of the development environment.

That server is s3 (moto). The suites of the adapters start the other servers.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
from tools.services.processes import identity
from tools.services.servers import SERVERS, cluster_id
from tools.services.state import Place

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


class Services:
    """The command with a separate state directory.

    The port table is that of all clones of this user: parallel tests must not choose one port.
    """

    def __init__(self, directory: Path) -> None:
        self.state = directory / "state"
        self.environment = os.environ | {"PENSTOCK_SERVICES_DIR": str(self.state)}

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
    made.run("down", "--wipe")  # frees its ports


def test_a_server_is_started_found_restarted_and_stopped(services: Services) -> None:
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


def test_two_clones_run_their_servers_independently(services: Services, tmp_path: Path) -> None:
    other = Services(tmp_path / "two")
    urls = {clone.run("url", "s3").stdout for clone in (services, other)}
    assert len(urls) == 2, "two clones get different ports, even if no server is running"
    try:
        services.run("up", "s3")
        other.run("up", "s3")
        services.run("kill", "s3")
        assert other.status("s3")["state"] == "running"
    finally:
        other.run("down", "--wipe")


def test_clones_that_choose_ports_at_the_same_time_get_different_ports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for turn in range(20):
        clones = [Place(tmp_path / f"{turn}-{n}" / "s3") for n in range(8)]
        together = Barrier(len(clones))

        def choose(clone: Place, together: Barrier = together) -> int:
            together.wait(60)
            return clone.ports({"s3": 47000})["s3"]

        with ThreadPoolExecutor(len(clones)) as threads:
            ports = list(threads.map(choose, clones))
        assert len(set(ports)) == len(clones), ports
        for clone in clones:
            clone.wipe()  # its reservation can be replaced


def test_only_a_process_that_services_started_is_killed(services: Services) -> None:
    services.run("up", "s3")
    state_file = services.state / "s3" / "state.json"
    recorded = json.loads(state_file.read_text())
    os.kill(recorded["pid"], signal.SIGKILL)
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as stranger:
        state_file.write_text(
            json.dumps(recorded | {"pid": stranger.pid})
        )  # another process has this pid
        assert services.status("s3")["state"] == "stopped"
        assert "not running" in services.run("down", "s3").stderr
        assert stranger.poll() is None
        stranger.kill()


def test_a_server_that_cannot_start_prints_its_log_and_a_hint(services: Services) -> None:
    port = int(re.findall(r"127.0.0.1:(\d+)", services.run("url", "s3").stdout)[0])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        output = services.run("up", "s3", status=3).stderr
    assert "services: s3: " in output, "the end of its log"
    assert re.search(r"^Error: s3 ended while it was starting$", output, re.MULTILINE)
    assert re.search(rf"^Try: read {services.state}/s3/log", output, re.MULTILINE)


def test_the_error_of_a_missing_program_names_it_with_a_hint(
    services: Services, tmp_path: Path
) -> None:
    output = services.run("up", "redis", status=3, PATH=str(tmp_path)).stderr
    assert output.startswith("Error: redis-server is not installed (")
    assert "\nTry: " in output
    assert "Traceback" not in output


@pytest.mark.parametrize("words", [["upp"], ["up", "mysql"], ["url"], ["kill"], ["up", "--frob"]])
def test_a_mistyped_command_exits_2_with_an_error_and_a_hint(
    services: Services, words: list[str]
) -> None:
    output = services.run(*words, status=2).stderr
    assert re.match(r"Error: .+\nTry: .+\n$", output)


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
    # With an empty PATH, neither the server nor a package manager is found.
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


def test_tests_start_the_servers_they_need_and_stop_them(
    services: Services, tmp_path: Path
) -> None:
    output = _suite(services, tmp_path)
    assert "3 passed, 1 skipped" in output, output
    assert "NOT TESTED, no redis: redis-server is not installed" in output
    assert (
        output.index("test_without_a_server PASSED")
        < output.index("test_one_that_cannot_be_had SKIPPED")
        < output.index("test_faults PASSED")
    )
    assert services.status("s3")["state"] == "stopped"


def test_tests_do_not_stop_servers_that_were_already_running(
    services: Services, tmp_path: Path
) -> None:
    services.run("up", "s3")
    before = services.status("s3")["pid"]
    assert "1 passed" in _suite(services, tmp_path, "-k", "there_again")
    assert services.status("s3")["pid"] == before


HANGING_SUITE = """
import pathlib, signal, time, pytest

@pytest.mark.server("s3")
def test_that_ignores_ctrl_c(server):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pathlib.Path(__file__).with_name("running").touch()
    time.sleep(600)
"""


@pytest.mark.slow
def test_ctrl_c_stops_the_servers_of_workers_that_do_not_end(
    services: Services, tmp_path: Path
) -> None:
    (tmp_path / "test_suite.py").write_text(HANGING_SUITE)
    command = [sys.executable, "-m", "pytest", "-p", "tests.servers", "-p", "no:cacheprovider"]
    place = Place(services.state / "gw0" / "s3")
    with subprocess.Popen(
        [*command, "-c", str(ROOT / "pyproject.toml"), "-n", "1", str(tmp_path / "test_suite.py")],
        cwd=ROOT,
        env=services.environment,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    ) as suite:
        try:
            while not (tmp_path / "running").exists():
                assert suite.poll() is None
                time.sleep(0.05)
            assert place.running()
            os.killpg(suite.pid, signal.SIGINT)  # as a terminal does
            assert suite.wait(120) == pytest.ExitCode.INTERRUPTED
            assert not place.running()
        finally:
            services.run("down", "--wipe", PENSTOCK_SERVICES_DIR=str(services.state / "gw0"))


def test_in_ci_a_missing_server_is_an_error(services: Services, tmp_path: Path) -> None:
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


def test_a_cluster_id_of_kafka_is_never_read_as_an_option() -> None:
    assert cluster_id(b"\xff" * 16) == "f" + "_" * 20 + "w"
    assert not any(cluster_id(bytes([n]) * 16).startswith("-") for n in range(256))
