"""CPU time and memory of robots.txt and cookies grow linearly with the input."""

from __future__ import annotations

import time

import pytest
from tests.unit.doubling import grows_linearly

from penstock.net.cookies import MAX_PER_DOMAIN, Jar
from penstock.rules import robots

pytestmark = pytest.mark.slow

AGENT = "penstock"
LINES = {
    "agents and rules": (b"User-agent: a%d\n", b"Disallow: /%d\n"),
    "agents and delays": (b"User-agent: a%d\n", b"Crawl-delay: %d\n"),
    "wildcards": (b"User-agent: *\n", b"Disallow: /*a*%d*b\n"),
    "sitemaps": (b"User-agent: *\n", b"Sitemap: https://a.example/%d\n"),
}


def file_of(agents: bytes, rules: bytes, size: int) -> bytes:
    """Return a robots.txt: agents in the first half if they are numbered, then rules."""
    numbered = b"%d" in agents
    head = b"".join(agents % n for n in range(size // 2 // len(agents))) if numbered else agents
    return head + b"".join(rules % n for n in range((size - len(head)) // len(rules)))


@pytest.mark.parametrize("name", LINES)
def test_robots_grows_linearly(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Production reads the first 500 KiB. The property must also hold beyond this limit.
    monkeypatch.setattr(robots, "MAX_BYTES", 8 << 20)
    agents, rules = LINES[name]

    def run(body: bytes) -> object:
        found = robots.parse(body).only_for(AGENT)
        return found.allows(AGENT, "https://shop.example/" + "a" * 2000), found.size

    grows_linearly(lambda size: file_of(agents, rules, size), run)


@pytest.mark.parametrize(
    ("rule", "path"),
    [
        ("Disallow: /*a*%d*b\n", "/" + "a" * 1900),
        ("Disallow: /" + "*a" * 200 + "%db\n", "/" + "a" * 1900),
        ("Disallow: /*" + "a" * 900 + "%d\n", "/" + "a" * 1900),
        ("Disallow: *%d\n", "/" + "0123456789" * 190),
    ],
)
def test_a_decision_stops_at_its_work_and_then_forbids_the_url(rule: str, path: str) -> None:
    text = "".join(rule % n for n in range(robots.MAX_BYTES // len(rule)))
    found = robots.parse(f"User-agent: *\n{text}".encode()).only_for(AGENT)
    steps = []
    for _ in range(5):
        start = time.thread_time()
        found.allows(AGENT, "https://shop.example" + path)
        steps.append(time.thread_time() - start)
    # MAX_WORK is about 5 ms. The limit for a turn of the loop is 250 ms.
    assert min(steps) < 0.05


@pytest.mark.parametrize("line", ["a%d=b\n", "a%d=b; Domain=a.shop.example; " + "x;" * 100 + "\n"])
def test_cookies_grow_linearly_and_keep_their_limits(line: str) -> None:
    url = "https://a.shop.example/"

    def run(text: str) -> None:
        jar = Jar()
        jar.store(url, {"set-cookie": text}, 0.0)
        assert len(jar) <= MAX_PER_DOMAIN

    grows_linearly(lambda size: "".join(line % n for n in range(size // len(line))), run)
