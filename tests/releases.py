"""Fixtures of earlier releases: a project folder with open work, and the command line in it.

See tools/make_release_fixture.py for their contents.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tarfile
from pathlib import Path
from typing import Any

from tools.make_release_fixture import (
    HOST,
    PORTS,
    WITHOUT_AGE_LIMITS,
    Site,
    sink_rows,
)

FOLDER = Path(__file__).parent / "fixtures" / "releases"
RELEASES = sorted(path.name for path in FOLDER.iterdir() if path.is_dir())


def recorded_figures(release: str, kind: str) -> dict[str, Any]:
    return figures(json.loads((FOLDER / release / f"{kind}.status.json").read_text()))


def figures(status: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of `penstock status --json` that depend on neither time nor machine."""
    kept = ("topics", "total", "breaker", "paused", "hooks_waiting")
    return {name: status[name] for name in kept} | {
        # A later release may have more counters.
        "counters": {name: n for name, n in status["counters"].items() if n},
        "delays": sorted((d["reason"], d["events"]) for d in status["delays"]),
        "dead_causes": sorted((c["fingerprint"], c["reason"]) for c in status["dead_causes"]),
        "sinks": [(s["name"], s["flushed"], s["backlog"]) for s in status["sinks"]],
        "sources": [(s["name"], s["events"], s["paused"]) for s in status["sources"]],
    }


class ReleasedProject:
    """The unpacked project folder of a release."""

    def __init__(self, release: str, kind: str, folder: Path, **environment: str) -> None:
        self.folder = folder
        self.expected_rows = json.loads((FOLDER / release / f"{kind}.rows.json").read_text())
        kept = {k: v for k, v in os.environ.items() if not k.startswith("PENSTOCK_")}
        self.environment = kept | WITHOUT_AGE_LIMITS | {"NO_COLOR": "1"} | environment
        with tarfile.open(FOLDER / release / f"{kind}.tar.gz") as tar:
            tar.extractall(folder, filter="data")

    async def penstock(self, *args: str, code: int = 0) -> str:
        out, _ = await self.command(*args, code=code)
        return out

    async def command(self, *args: str, code: int = 0) -> tuple[str, str]:
        """Run a command, and return its stdout and stderr."""
        process = await self.start(*args)
        try:
            out, err = await process.communicate()
        finally:
            if process.returncode is None:  # the time limit of the test
                process.kill()
        assert process.returncode == code, f"{args}: {process.returncode}\n{out!r}\n{err.decode()}"
        return out.decode(), err.decode()

    async def start(self, *args: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "penstock.cli.main",
            *args,
            cwd=self.folder,
            env=self.environment,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )

    async def status(self) -> dict[str, Any]:
        return figures(json.loads(await self.penstock("status", "--json")))

    async def process_open_events(self) -> None:
        """Resume everything that was paused, and run until all events have ended."""
        async with Site(healed=True).serving():
            await self.penstock("topics", "resume", "requests")
            await self.penstock("topics", "resume", "records")
            await self.penstock("domains", "resume", f"{HOST}:{PORTS['paused']}")
            await self.penstock("run", "--until-idle")

    def check_sinks(self) -> None:
        """The rows equal those that the release itself has written."""
        assert sink_rows(self.folder) == self.expected_rows


def check_end(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Every accepted event has ended, and there is no new dead letter."""
    total = after["total"]
    assert total["accepted"] == before["total"]["accepted"]
    assert total["accepted"] == total["success"] + total["dead"] + total["duplicate"]
    assert total["dead"] == before["total"]["dead"]
    assert after["dead_causes"] == before["dead_causes"]
    assert all(backlog == 0 for _, _, backlog in after["sinks"])
