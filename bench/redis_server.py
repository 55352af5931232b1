"""Redis server of the bench, for scrapy-redis. It makes no snapshots.

It runs on the site's core, not on the contender's, as a remote server would.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common import BenchError, pin, say

REDIS_PORT = 8196


def redis_server() -> str | None:
    """Return the path of redis-server. Install it if possible (as root, with apt), else None."""
    found = shutil.which("redis-server")
    if found is None and os.geteuid() == 0 and shutil.which("apt-get"):
        say("installing redis-server with apt: scrapy-redis keeps its queue there")
        environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        subprocess.run(
            ["apt-get", "update", "-qq"], env=environment, stdout=sys.stderr, check=False
        )
        subprocess.run(
            ["apt-get", "install", "-y", "-qq", "--no-install-recommends", "redis-server"],
            env=environment,
            stdout=sys.stderr,
            check=False,
        )
        found = shutil.which("redis-server")
    return found


@contextmanager
def redis_serving(directory: Path, *, core: int) -> Iterator[int]:
    """Run an empty server until the block ends. Yield its port."""
    server = redis_server()
    if server is None:
        raise BenchError(
            "redis-server was not found, and scrapy-redis needs it",
            "install it (Debian/Ubuntu: sudo apt install redis-server), then run this again",
        )
    command = [
        server,
        "--port",
        str(REDIS_PORT),
        "--bind",
        "127.0.0.1",
        "--save",
        "",
        "--dir",
        str(directory),
        "--logfile",
        str(directory / "redis.log"),
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=pin({core})
    )
    try:
        for _ in range(200):
            if process.poll() is not None:
                raise BenchError(
                    f"redis-server ended with {process.returncode}",
                    f"read {directory}/redis.log, and check that no other benchmark runs",
                )
            try:
                socket.create_connection(("127.0.0.1", REDIS_PORT), 0.2).close()
                break
            except OSError:
                time.sleep(0.05)
        yield REDIS_PORT
    finally:
        process.terminate()
        process.wait()
