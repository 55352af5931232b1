"""Hostile robots.txt files: many agents and rules, the largest file, and wildcards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tests.attacks.harness import Ground, survives

from penstock.testing.web import reply

URLS = 40  # of the hostile site. Each is compared with the rules.


def agents(size: int) -> bytes:
    half = b"".join(b"User-agent: a%d\n" % n for n in range(size // 2 // 16))
    return half + b"User-agent: *\n" + b"".join(b"Disallow: /%d\n" % n for n in range(size // 32))


def wildcards(size: int) -> bytes:
    rule = b"Disallow: /*a*a*a*a*a*b%d\n"
    return b"User-agent: *\n" + b"".join(rule % n for n in range(size // len(rule)))


@pytest.mark.parametrize(
    ("make", "size"),
    [(agents, 100 << 10), (agents, 500 << 10), (wildcards, 100 << 10), (wildcards, 500 << 10)],
)
def test_a_hostile_robots_file_does_not_disturb_other_hosts(
    tmp_path: Path, make: Callable[[int], bytes], size: int
) -> None:
    def attack(g: Ground) -> Sequence[str]:
        g.hostile.web.route("/robots.txt", reply(make(size), "text/plain"))
        return [g.hostile.url(f"/{'a' * 1500}{n}") for n in range(URLS)]

    survives(tmp_path, attack)
