"""I8: the request rate of each host, from the host's own log.

With one, four and eight workers, across a kill and a suspension, after a 429, and with a crawl
delay.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator

import pytest
from tests.e2e.harness import Project, Site, product, wait_for

from penstock.testing.web import HTML, TEXT, Reply, Request, reply

RATES = (10.0, 5.0, 10.0)  # of the three hosts, one with a separate limit
SECONDS = 6.0  # of work for each host
pytestmark = pytest.mark.slow


class Hosts:
    """Three hosts on three ports, each with its own robots.txt and responses."""

    def __init__(self, project: Project) -> None:
        self.site = Site(self._answer)
        self.ports = [self.site.port, *(self._listen() for _ in RATES[1:])]
        self.robots: dict[int, str] = {}
        self.answers: dict[int, Callable[[Request], Reply | None]] = {}
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
        """Return the longest delay of a timer of these hosts, in seconds."""
        return self.site.late

    @property
    def often_late(self) -> float:
        """Return the delay in seconds that a tenth of the timers exceeds on this machine."""
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
        """Scrape all pages with `workers` workers.

        The workers start before the first push. Starting them keeps the machine busy, and slots
        would be missed.
        """
        running = self.project.start("run", "shop.py", "--workers", str(workers))
        wait_for(
            lambda: running.ended or len(self.project.tree()[1]) == workers,
            f"{workers} workers: {running.output}",
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
            running.output,
            every=0.05,
        )
        running.signal(signal.SIGTERM)
        assert running.wait() == 0, running.output
        assert self.project.total()["success"] == pages

    def times(self, port: int) -> list[float]:
        """Return the times of the requests to `port` in seconds, including robots.txt."""
        return sorted(entry.at / 1e6 for entry in list(self.site.web.entries) if entry.port == port)

    def asked(self) -> int:
        return len(self.site.web.entries)

    def check_limits(self, *, least: float = 0.8) -> None:
        """Check that every limit is kept within 5 % in every window, and that it is used.

        At least half of the waits are no longer than `least` allows.
        """
        for port, rate in zip(self.ports, RATES, strict=True):
            times = self.times(port)
            for width in (1.0, 2.0, 3.0, 5.0):
                peak = max(count(times, start, width) for start in times)
                assert peak <= 1 + 1.05 * rate * (width + self.late), (
                    f"{peak} requests to the host with {rate:g} a second within {width:g} s\n"
                    f"{gaps(times)}"
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
def test_every_host_is_requested_at_its_rate_limit_and_never_more_often(
    project: Project, hosts: Hosts, workers: int
) -> None:
    hosts.run(workers)
    hosts.check_limits()
    for port, rate in zip(hosts.ports, RATES, strict=True):
        found = sorted(gaps(hosts.times(port)))
        # Sending takes a few ms after the slot. The time varies, and is longer on a busy machine.
        assert found[len(found) // 4] >= 0.85 / rate - hosts.often_late, found
        assert len({round(gap * rate, 2) for gap in found}) > 5, "jittered"


def test_the_limits_hold_across_a_kill_and_a_restart(project: Project, hosts: Hosts) -> None:
    hosts.push()
    for n in (25, 70):
        run = project.start("run", "shop.py", "--workers", "4")
        wait_for(lambda n=n: hosts.asked() > n, f"{n} requests")
        for pid in project.processes():
            with contextlib.suppress(ProcessLookupError):  # the process ended with its supervisor
                os.kill(pid, signal.SIGKILL)
        run.wait()
        project.nothing_runs()
    project.run("--workers", "4")
    assert project.total()["success"] == sum(int(rate * SECONDS) for rate in RATES)
    # Each kill loses the reserved slots, up to ten seconds of them.
    hosts.check_limits(least=0.2)


def test_a_worker_that_was_suspended_does_not_send_the_missed_requests_in_a_burst(
    project: Project, hosts: Hosts
) -> None:
    """The slots of the suspended worker have expired."""
    hosts.push()
    run = project.start("run", "shop.py", "--until-idle", "--workers", "2")
    wait_for(lambda: hosts.asked() > 30, "thirty requests")
    standing = list(project.processes())
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in standing:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        time.sleep(2.0 if number == signal.SIGSTOP else 0.0)
    assert run.wait() == 0, run.output
    hosts.check_limits(least=0.5)


def test_events_that_waited_for_a_permit_are_sent_within_the_rate_limit(
    project: Project, hosts: Hosts
) -> None:
    """Sixteen slow hosts hold all permits while the slots of the other hosts expire."""
    slow = tuple(hosts._listen() for _ in range(16))
    project.allow(*slow)
    project.set(fetch_concurrency="8")
    hosts.answers = dict.fromkeys(
        slow, lambda request: Reply(200, {"content-type": HTML}, product(1).encode(), 0.7)
    )
    hosts.push(seconds=3.0, more=slow)
    project.run()
    hosts.check_limits(least=0.1)


def test_a_page_holds_no_permit_while_it_waits_for_the_slot_after_robots_txt(
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
        "the only permit was free during the wait"
    )


def test_pages_that_waited_after_robots_txt_do_not_exceed_the_permits_in_flight(
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
    concurrent = max(sum(e.at <= one.at < e.answered for e in pages) for one in pages)
    assert (len(pages), concurrent) == (len(ports), 1)


def test_after_a_429_the_host_is_not_requested_until_retry_after_and_the_others_are(
    project: Project, hosts: Hosts
) -> None:
    first, *others = hosts.ports
    sent: list[float] = []

    def answer(request: Request) -> Reply | None:
        if sent or len(hosts.times(first)) < 10:
            return None
        sent.append(time.time())
        return reply("not so fast", TEXT, 429, **{"retry-after": "5"})

    hosts.answers[first] = answer
    hosts.run(8)
    at = sent[0]
    # Requests that were already sent when the response arrived.
    in_flight = [t - at for t in hosts.times(first) if at < t < at + 5.0]
    assert len(in_flight) <= 3, in_flight
    assert max(in_flight, default=0.0) < 0.25 + hosts.late, in_flight
    after = [t - at for t in hosts.times(first) if t >= at + 5.0]
    print(f"asked again {after[0] - 5.0:.3f} s after the time of Retry-After")
    assert after[0] < 10.0 + hosts.late, "requests did not resume"
    assert count(after, after[0], 1.0) <= 1 + 1.05 * RATES[0] * (1.0 + hosts.late), (
        "the waiting requests were sent in a burst"
    )
    for port, rate in zip(others, RATES[1:], strict=True):
        assert count(hosts.times(port), at + 0.5, 4.5) >= 0.5 * rate * (3.0 - hosts.late), (
            "other hosts were blocked as well"
        )
    for port in hosts.ports:
        times = hosts.times(port)
        assert max(count(times, start, 1.0) for start in times) <= 1 + 1.05 * RATES[0] * (
            1.0 + hosts.late
        )


@pytest.mark.parametrize("rate", ["10", "unlimited"])
def test_a_crawl_delay_applies_from_the_first_page_on(
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
    assert run.wait() == 0, run.output
    assert min(gaps(hosts.times(slow))) >= 0.95 - hosts.late, gaps(hosts.times(slow))
    assert len(hosts.times(other)) == 31, "the other host has no crawl delay"
    assert project.total()["success"] == len(hosts.times(slow)) + len(hosts.times(other)) - 2
