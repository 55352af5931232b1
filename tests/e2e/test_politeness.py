"""I8: how often a host is asked, by the host's own log: with one, four and eight workers, across a
kill and a stall, after a 429, with a crawl delay.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import statistics
import time
from collections.abc import Iterator

import pytest
from tests.e2e.harness import Project, Site, product, wait_for

from penstock.testing.web import HTML, TEXT, Handler, Reply, Request, reply

RATES = (10.0, 5.0, 10.0)  # of the three hosts: one of them has a limit of its own
SECONDS = 6.0  # of work for each
pytestmark = pytest.mark.slow


class Hosts:
    """Three hosts: three ports, each with its own robots.txt and its own answer to everything else."""

    def __init__(self, project: Project) -> None:
        self.site = Site(self._answer)
        self.ports = [self.site.port, *(self._listen() for _ in RATES[1:])]
        self.robots: dict[int, str] = {}
        self.answers: dict[int, Handler] = {}
        self.project = project
        project.allow(*self.ports)
        project.set(pace_rate=f"{RATES[0]:g}")
        for port, rate in zip(self.ports, RATES, strict=True):
            if rate != RATES[0]:
                project.good("domains", "limit", f"127.0.0.1:{port}", f"{rate:g}")

    def _listen(self) -> int:
        return asyncio.run_coroutine_threadsafe(self.site.web.listen(), self.site._loop).result()

    @property
    def late(self) -> float:
        """Seconds: the longest that this machine kept these hosts from looking at their clock."""
        return self.site.late

    @property
    def often_late(self) -> float:
        """Seconds: what a step of this machine takes at times without anything being wrong."""
        return sorted(self.site.lateness)[-len(self.site.lateness) // 10]

    def _answer(self, request: Request) -> Reply:
        if request.path == "/robots.txt":
            body = self.robots.get(request.port)
            return reply("nothing here", TEXT, 404) if body is None else reply(body, TEXT)
        special = self.answers.get(request.port)
        answer = special(request) if special else None
        return answer if isinstance(answer, Reply) else reply(product(request.path[3:]), HTML)

    def push(self, seconds: float = SECONDS, more: tuple[int, ...] = ()) -> None:
        counts = {
            port: int(rate * seconds) for port, rate in zip(self.ports, RATES, strict=True)
        } | dict.fromkeys(more, 4)
        self.project.push(
            *(
                f"http://127.0.0.1:{port}/p/{n}"
                for n in range(max(counts.values()))
                for port, count in counts.items()
                if n < count
            )
        )

    def run(self, workers: int) -> None:
        """All that can be asked for, by so many workers, which are there before there is anything
        to do: a machine that is busy with their start has no time for anybody's turn.
        """
        running = self.project.start("run", "shop.py", "--workers", str(workers))
        wait_for(
            lambda: running.ended or len(self.project.tree()[1]) == workers,
            f"{workers} workers: {running.said}",
            every=0.1,
        )
        self.push()
        pages = sum(int(rate * SECONDS) for rate in RATES)
        wait_for(
            lambda: (
                running.ended
                or len({(e.port, e.path) for e in self.site.web.entries if e.status == 200})
                == pages
            ),
            running.said,
            every=0.05,
        )
        running.signal(signal.SIGTERM)
        assert running.wait() == 0, running.said
        assert self.project.total()["success"] == pages

    def times(self, port: int) -> list[float]:
        """When it was asked, robots.txt included; seconds."""
        return sorted(entry.at / 1e6 for entry in list(self.site.web.entries) if entry.port == port)

    def asked(self) -> int:
        return len(self.site.web.entries)

    def kept(self, *, least: float = 0.8) -> None:
        """Every limit, in every window, within 5 %; and not kept by doing nothing: half of the
        waits are no longer than need be.
        """
        for port, rate in zip(self.ports, RATES, strict=True):
            times = self.times(port)
            for width in (1.0, 2.0, 3.0, 5.0):
                most = max(count(times, start, width) for start in times)
                assert most <= 1 + 1.05 * rate * (width + self.late), (
                    f"{most} requests to the host with {rate:g} a second within {width:g} s\n{gaps(times)}"
                )
            assert statistics.median(gaps(times)) <= 1 / (least * rate) + self.often_late, (
                f"slower than need be: {gaps(times)}"
            )


def count(times: list[float], start: float, width: float) -> int:
    return sum(start <= at < start + width for at in times)


def gaps(times: list[float]) -> list[float]:
    return [round(b - a, 3) for a, b in itertools.pairwise(times)]


@pytest.fixture
def hosts(project: Project) -> Iterator[Hosts]:
    made = Hosts(project)
    yield made
    made.site.close()


@pytest.mark.parametrize("workers", [1, 4, 8])
def test_every_host_is_asked_as_often_as_its_limit_allows_and_never_more(
    project: Project, hosts: Hosts, workers: int
) -> None:
    hosts.run(workers)
    hosts.kept()
    for port, rate in zip(hosts.ports, RATES, strict=True):
        found = sorted(gaps(hosts.times(port)))
        # The way from the slot to the wire takes a few ms, not always the same, and longer while
        # others are at work.
        assert found[len(found) // 4] >= 0.85 / rate - hosts.often_late, found
        assert len({round(gap * rate, 2) for gap in found}) > 5, "jittered"


def test_the_limits_hold_across_a_kill_and_a_restart(project: Project, hosts: Hosts) -> None:
    hosts.push()
    for n in (25, 70):
        run = project.start("run", "shop.py", "--workers", "4")
        wait_for(lambda n=n: hosts.asked() > n, f"{n} requests")
        for pid in project.processes():
            with contextlib.suppress(ProcessLookupError):  # it went with its supervisor
                os.kill(pid, signal.SIGKILL)
        run.wait()
        project.nothing_runs()
    project.run("--workers", "4")
    assert project.total()["success"] == sum(int(rate * SECONDS) for rate in RATES)
    hosts.kept(
        least=0.2
    )  # each kill takes the slots with it that were given out: up to ten seconds of them


def test_a_worker_that_stood_still_does_not_make_up_for_it(project: Project, hosts: Hosts) -> None:
    """Suspended, swapped out, a laptop closed: its slots are gone by."""
    hosts.push()
    run = project.start("run", "shop.py", "--until-idle", "--workers", "2")
    wait_for(lambda: hosts.asked() > 30, "thirty requests")
    standing = list(project.processes())
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in standing:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        time.sleep(2.0 if number == signal.SIGSTOP else 0.0)
    assert run.wait() == 0, run.said
    hosts.kept(least=0.5)


def test_events_that_waited_for_a_permit_do_not_go_all_at_once(
    project: Project, hosts: Hosts
) -> None:
    """Sixteen slow hosts take all the permits there are; meanwhile the slots of the others go by."""
    slow = tuple(hosts._listen() for _ in range(16))
    project.allow(*slow)
    project.set(fetch_concurrency="8")
    hosts.answers = dict.fromkeys(
        slow, lambda request: Reply(200, {"content-type": HTML}, product(1).encode(), 0.7)
    )
    hosts.push(seconds=3.0, more=slow)
    project.run()
    hosts.kept(least=0.1)


def test_a_page_whose_slot_went_to_robots_waits_for_the_next_without_a_permit(
    project: Project, hosts: Hosts
) -> None:
    slow, other, _ = hosts.ports
    project.set(fetch_concurrency="1")
    project.good("domains", "limit", f"127.0.0.1:{slow}", "0.25")
    project.push(
        f"http://127.0.0.1:{slow}/p/0", *(f"http://127.0.0.1:{other}/p/{n}" for n in range(25))
    )
    project.run()
    robots, page = hosts.times(slow)
    assert page - robots >= 0.95 * 4.0 - hosts.late
    assert len([at for at in hosts.times(other) if robots < at < page]) >= 2, (
        "the only permit there is was free meanwhile"
    )


def test_those_who_waited_on_their_way_are_no_more_in_flight_than_there_are_permits(
    project: Project, hosts: Hosts
) -> None:
    ports = [*hosts.ports, *(hosts._listen() for _ in range(5))]
    for port in ports:
        hosts.answers[port] = lambda request: Reply(
            200, {"content-type": HTML}, product(request.port).encode(), delay=0.5
        )
    project.allow(*ports)
    project.set(fetch_concurrency="1", pace_rate="2")
    project.push(*(f"http://127.0.0.1:{port}/p/1" for port in ports))
    project.run()
    pages = [entry for entry in hosts.site.web.entries if entry.path != "/robots.txt"]
    most = max(sum(e.at <= one.at < e.answered for e in pages) for one in pages)
    assert (len(pages), most) == (len(ports), 1)


def test_after_one_429_nobody_asks_that_host_until_its_time_is_over_and_the_others_go_on(
    project: Project, hosts: Hosts
) -> None:
    first, *others = hosts.ports
    told: list[float] = []

    def answer(request: Request) -> Reply | None:
        if told or len(hosts.times(first)) < 10:
            return None
        told.append(time.time())
        return reply("not so fast", TEXT, 429, **{"retry-after": "5"})

    hosts.answers[first] = answer  # type: ignore[assignment]
    hosts.run(8)
    at = told[0]
    told_late = [
        t - at for t in hosts.times(first) if at < t < at + 5.0
    ]  # on their way when the answer was
    assert len(told_late) <= 3, told_late
    assert max(told_late, default=0.0) < 0.25 + hosts.late, told_late
    after = [t - at for t in hosts.times(first) if t >= at + 5.0]
    print(f"asked again {after[0] - 5.0:.3f} s after its time was over")
    assert after[0] < 10.0 + hosts.late, "and then it goes on"
    assert count(after, after[0], 1.0) <= 1 + 1.05 * RATES[0] * (1.0 + hosts.late), (
        "as before, not with all that waited"
    )
    for port, rate in zip(others, RATES[1:], strict=True):
        assert count(hosts.times(port), at + 0.5, 4.5) >= 0.5 * rate * (3.0 - hosts.late), (
            "only that host is silent"
        )
    for port in hosts.ports:
        times = hosts.times(port)
        assert max(count(times, start, 1.0) for start in times) <= 1 + 1.05 * RATES[0] * (
            1.0 + hosts.late
        )


@pytest.mark.parametrize("rate", ["10", "unlimited"])
def test_a_crawl_delay_is_kept_from_the_first_page_on(
    project: Project, hosts: Hosts, rate: str
) -> None:
    project.set(pace_rate=rate)
    slow, other = hosts.ports[0], hosts.ports[2]
    hosts.robots[slow] = "User-agent: *\nCrawl-delay: 1\n"
    project.push(*(f"http://127.0.0.1:{port}/p/{n}" for n in range(30) for port in (slow, other)))
    run = project.start("run", "shop.py", "--workers", "4")
    wait_for(
        lambda: len(hosts.times(slow)) >= 5 and len(hosts.times(other)) >= 31,
        "robots.txt and four pages, and all of the other",
        30,
    )
    run.signal(signal.SIGTERM)
    assert run.wait() == 0, run.said
    assert min(gaps(hosts.times(slow))) >= 0.95 - hosts.late, gaps(hosts.times(slow))
    assert len(hosts.times(other)) == 31, "the other host has no such wish"
    assert project.total()["success"] == len(hosts.times(slow)) + len(hosts.times(other)) - 2
