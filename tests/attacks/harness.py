"""Runs an attack beside a healthy site, and the same run without the attack.

`measure` starts a real `penstock run`. `holds` compares the two runs with the limits of the
project: turns of the event loop, memory of the process tree, and pages of the healthy site.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.harness import SHOP, Project, Site, product, wait_for

from penstock.testing.web import Entry, Reply, reply

WATCHED = Path(__file__).with_name("watched.py")
MAX_TURN = 0.25  # seconds of CPU time of the loop's thread between two turns
MAX_MORE_MEMORY = 64 << 20  # bytes that the attack may add to the peak of the process tree
MIN_SHARE = 0.8  # of the pages that the healthy site gets in the quiet run
MEMORY_EVERY = 0.1  # seconds between two samples of the memory
PAGES = 2_000  # of the healthy site. More than a run can fetch.


@dataclass
class Ground:
    """A project, a healthy site and a hostile site."""

    project: Project
    healthy: Site
    hostile: Site


@dataclass(frozen=True)
class Measured:
    """Results of one run, from the first request to the healthy site on."""

    pages: int  # that the healthy site answered
    longest_turn: float  # seconds of CPU time of the loop's thread
    peak_memory: int  # bytes, proportional set size of the process tree
    hostile_requests: int


_quiet_runs: dict[tuple[tuple[str, object], ...], Measured] = {}  # by the options of the run

# Sets up the hostile site and the project. Returns the URLs of the attack.
Attack = Callable[[Ground], Sequence[str]]


@contextlib.contextmanager
def ground(directory: Path) -> Iterator[Ground]:
    directory.mkdir(parents=True)
    project = Project(directory)
    project.write("shop.py", SHOP)
    healthy, hostile = Site(), Site()
    try:
        project.allow(healthy.port, hostile.port)
        healthy.web.route("/p/*", lambda request: _page(request.path))
        yield Ground(project, healthy, hostile)
    finally:
        project.close()
        healthy.close()
        hostile.close()


def _page(path: str) -> Reply:
    return reply(product(path.rpartition("/")[2]))


def measure(
    directory: Path,
    attack: Attack | None,
    *,
    seconds: float = 8.0,
    rate: int = 20,
    until: Callable[[Ground], object] | None = None,
    pipeline: str = SHOP,
    during: Callable[[Ground, bool], contextlib.AbstractContextManager[None]] | None = None,
    **options: str,
) -> Measured:
    """Run the project for `seconds` from the first request to the healthy site on.

    `rate` is the number of requests a second for each host. With `until`, the attacked run
    continues until it returns a true value, so that the attack is really received.
    `during` is entered for the time of the measurement. Its second argument tells whether the run
    is attacked. It is for attacks by clients of the project, and checks their results itself.
    `options` are options of the project, such as `fetch_concurrency="16"`.
    """
    with ground(directory) as g:
        g.project.write("shop.py", pipeline)
        g.project.set(pace_rate=str(rate), **options)
        attacked = list(attack(g)) if attack is not None else []
        if attacked:
            g.project.push(*attacked)
        g.project.push(*[g.healthy.url(f"/p/{n}") for n in range(PAGES)])
        turns = directory / "turns.txt"
        turns.touch()
        g.project.command = (sys.executable, str(WATCHED), str(turns))
        running = g.project.start("run", "shop.py")
        wait_for(lambda: _pages(g) or running.ended, "the healthy site gets a request", 120)
        assert not running.ended, running.output
        began = time.time()
        client = during(g, attack is not None) if during is not None else contextlib.nullcontext()
        with _sampled_memory(g.project) as peak, client:
            time.sleep(seconds)
            pages = sum(e.at / 1e6 <= began + seconds for e in _answered(g))
            if attack is not None and until is not None:
                wait_for(lambda: until(g) or running.ended, "the attack is received", 120)
        assert not running.ended, running.output
        running.kill()
        found = [line.split() for line in turns.read_text().splitlines()]
        return Measured(
            pages=pages,
            longest_turn=max((float(cpu) for at, cpu in found if float(at) > began), default=0.0),
            peak_memory=peak[0],
            hostile_requests=len(g.hostile.web.entries),
        )


def holds(quiet: Measured, attacked: Measured) -> None:
    """Check the limits of the project."""
    print(f"quiet {quiet}\nattacked {attacked}")
    assert quiet.pages > 0, quiet
    assert attacked.hostile_requests > 0, "the hostile site got no request"
    assert attacked.longest_turn < MAX_TURN, attacked
    assert attacked.peak_memory - quiet.peak_memory <= MAX_MORE_MEMORY, (quiet, attacked)
    assert attacked.pages >= MIN_SHARE * quiet.pages, (quiet, attacked)


def survives(tmp_path: Path, attack: Attack, **more: object) -> None:
    """Run without and with the attack, and check the limits.

    Attacks with the same options share a quiet run. A busy machine can spoil one pair of runs. So a
    pair that breaks a limit is measured again once, with a quiet run of its own.
    """
    same = tuple(sorted((name, value) for name, value in more.items() if name != "until"))
    for n in (1, 2):
        if n == 2 or (quiet := _quiet_runs.get(same)) is None:
            quiet = measure(tmp_path / f"quiet{n}", None, **more)  # type: ignore[arg-type]
            _quiet_runs[same] = quiet
        attacked = measure(tmp_path / f"attacked{n}", attack, **more)  # type: ignore[arg-type]
        try:
            holds(quiet, attacked)
        except AssertionError:
            if n == 2:
                raise
        else:
            return


def _answered(g: Ground) -> list[Entry]:
    return [e for e in list(g.healthy.web.entries) if e.status == 200 and e.path.startswith("/p/")]


def _pages(g: Ground) -> int:
    return len(_answered(g))


@contextlib.contextmanager
def _sampled_memory(project: Project) -> Iterator[list[int]]:
    """Keep the peak of the project's memory in the first item of the result."""
    peak, stop = [0], threading.Event()

    def sample() -> None:
        while not stop.wait(MEMORY_EVERY):
            peak[0] = max(peak[0], project.memory())

    thread = threading.Thread(target=sample, name="memory")
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join()
