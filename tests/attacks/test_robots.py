"""Hostile robots.txt files: many agents and rules, the largest file, and wildcards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tests.attacks.harness import Ground, survives
from tests.e2e.harness import product

from penstock.testing.web import reply

URLS = 40  # of the hostile site. Each is compared with the rules.


def agents(size: int) -> bytes:
    half = b"".join(b"User-agent: a%d\n" % n for n in range(size // 2 // 16))
    return half + b"User-agent: *\n" + b"".join(b"Disallow: /%d\n" % n for n in range(size // 32))


def wildcards(size: int) -> bytes:
    rule = b"Disallow: /*a*a*a*a*a*b%d\n"
    return b"User-agent: *\n" + b"".join(rule % n for n in range(size // len(rule)))


def agents_and_rules(size: int) -> bytes:
    """Return 4,266 agents and 6,400 rules, which the issue measured, in about 100 KiB."""
    names = b"".join(b"User-agent: %d\n" % n for n in range(4265)) + b"User-agent: *\n"
    return names + b"".join(b"Allow:%d\n" % (n % 10) for n in range(6400))


def test_the_measured_robots_file_has_its_size() -> None:
    found = agents_and_rules(0)
    assert (found.count(b"User-agent"), found.count(b"Allow")) == (4266, 6400)
    assert 100 << 10 <= len(found) <= 140 << 10


@pytest.mark.parametrize(
    ("make", "size"),
    [
        (agents_and_rules, 100 << 10),
        (agents, 500 << 10),
        (wildcards, 100 << 10),
        (wildcards, 500 << 10),
    ],
)
def test_a_hostile_robots_file_does_not_disturb_other_hosts(
    tmp_path: Path, make: Callable[[int], bytes], size: int
) -> None:
    def attack(g: Ground) -> Sequence[str]:
        g.hostile.web.route("/robots.txt", reply(make(size), "text/plain"))
        return [g.hostile.url(f"/{'a' * 1500}{n}") for n in range(URLS)]

    survives(tmp_path, attack)


def test_a_restart_that_meets_a_stored_robots_file_does_not_disturb_other_hosts(
    tmp_path: Path,
) -> None:
    def attack(g: Ground) -> Sequence[str]:
        g.hostile.web.route("/robots.txt", reply(agents(500 << 10), "text/plain"))
        g.hostile.web.route("/first", reply(product("first")))
        g.project.push(g.hostile.url("/first"))
        g.project.run()
        assert [e.path for e in g.hostile.web.entries] == ["/robots.txt", "/first"]
        return [g.hostile.url(f"/{'a' * 1500}{n}") for n in range(URLS)]

    survives(tmp_path, attack)
