"""I14: no packet is sent to an address that is not public.

URLs, names, redirects and proxies try to cause one. Complete runs in a separate network.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.harness import PENSTOCK, SHOP, Done, Project
from tests.e2e.wall import (
    DNS,
    GOOD4,
    GOOD6,
    HOME4,
    HOME6,
    HTTP_PROXY,
    PROXY,
    SOCKS_PROXY,
    Sent,
    Unavailable,
    Wall,
    contacts,
    sent,
)

# Every spelling that some parser accepts. Each names a canary, or an address that no server
# can listen on.
LOOPBACK = (
    "127.0.0.1",
    "127.1",
    "127.0.1",
    "2130706433",
    "0x7f000001",
    "0x7f.1",
    "017700000001",
    "0177.0.0.1",
    "127.0.0.1.",
    "127.255.255.254",
    "0",
    "0.0.0.0",
    "[::1]",
    "[0:0:0:0:0:0:0:1]",
    "[::ffff:127.0.0.1]",
    "[::ffff:7f00:1]",
    "[::127.0.0.1]",
    "[::]",
    "１２７.０.０.１",
    "①②⑦.⓪.⓪.①",
    "127。0。0。1",
    "%31%32%37.0.0.1",
    "0x7F.0x0.0x0.0x1",
    "[::ffff:0:127.0.0.1]",
)
METADATA = (
    "169.254.169.254",
    "2852039166",
    "0xa9fea9fe",
    "0251.0376.0251.0376",
    "169.254.43518",
    "169.16689662",
    "[::ffff:169.254.169.254]",
    "[::ffff:a9fe:a9fe]",
    "[::169.254.169.254]",
    "[64:ff9b::a9fe:a9fe]",
    "[64:ff9b::169.254.169.254]",
    "[64:ff9b:1::a9fe:a9fe]",
    "[2002:a9fe:a9fe::1]",
    "[fd00:ec2::254]",
    "192.0.0.192",
    "100.100.100.200",
    "168.63.129.16",
    "169.254.170.2",
)
PRIVATE = (
    "10.0.0.5",
    "10.5",
    "0x0a000005",
    "012.0.0.5",
    "172.16.0.5",
    "172.31.255.254",
    "192.168.1.1",
    "100.64.0.1",
    "198.18.0.1",
    "192.0.2.1",
    "198.51.100.1",
    "203.0.113.1",
    "224.0.0.1",
    "240.0.0.1",
    "255.255.255.255",
    "0.1.2.3",
    "192.88.99.1",
    "[fc00::1]",
    "[fd00::1]",
    "[fe80::1]",
    "[fe80::1%25out]",
    "[fec0::1]",
    "[ff02::1]",
    "[2002:a00:5::1]",
    "[2001:0:a00:5::1]",
    "[2001:0:4136:e378:8000:63bf:f5ff:fffa]",
    "[2a01:4f8:2::5efe:10.0.0.5]",
    "[2a01:4f8:2:0:200:5efe:a00:5]",
    "[2001:db8::1]",
    "[3fff::1]",
    "[3ffe::1]",
    "[100::1]",
    "[::ffff:10.0.0.5]",
    "[64:ff9b::a00:5]",
)
OWN = (HOME4, f"[{HOME6}]")  # public, but this machine
HOSTS = [*LOOPBACK, *METADATA, *PRIVATE, *OWN]

# URLs that a person and a parser read differently, or with a port that is not a web port.
AUTHORITIES = (
    "good.test@127.0.0.1",
    "good.test:80@127.0.0.1:80",
    "127.0.0.1:80@good.test",
    "user:secret@good.test",
    "good.test:secret@[::1]",
    "good.test%00.127.0.0.1",
    "good.test%23@127.0.0.1",
    "127.0.0.1%0d%0aHost:%20good.test",
    "good.test:22",
    "good.test:25",
    f"{GOOD4}:6379",
    f"[{GOOD6}]:11211",
    "127.0.0.1:8080",
    "127.0.0.2:8000",
    "[::1]:8000",
    "[::ffff:127.0.0.1]:8000",
    "localhost:8080",
    "good.test:0",
    "good.test:99999",
    "-good.test",
    "good..test",
)
SCHEMES = (
    "file:///etc/passwd",
    "file://localhost/etc/passwd",
    "ftp://127.0.0.1/x",
    "gopher://127.0.0.1:6379/_INFO",
    "dict://127.0.0.1:11211/stats",
    "ldap://10.0.0.5/x",
    "tftp://10.0.0.5/x",
    "smb://10.0.0.5/x",
    "ws://127.0.0.1/x",
    "telnet://127.0.0.1:25",
    "javascript:alert(1)",
    "data:text/html,hello",
    "unix:///var/run/docker.sock",
    "view-source:http://127.0.0.1/",
)
SITE: dict[str, list[str]] = {"A": [GOOD4]}
ZONE: dict[str, list[dict[str, list[str]]]] = {
    "good.test": [SITE],
    "robots.test": [SITE],  # robots.txt redirects to an internal address
    "good6.test": [{"AAAA": [GOOD6]}],
    "both.test": [{"A": [GOOD4], "AAAA": [GOOD6]}],
    "inward.evil.test": [{"A": ["10.0.0.5"]}],
    **{
        f"to-{n}.evil.test": [{"A": [address]}]
        for n, address in enumerate(
            ["127.0.0.1", "169.254.169.254", "192.168.1.1", "100.64.0.1", "0.0.0.0", HOME4]
        )
    },
    **{
        f"to6-{n}.evil.test": [{"AAAA": [address]}]
        for n, address in enumerate(
            [
                "::1",
                "fd00::1",
                "fe80::1",
                "::ffff:10.0.0.5",
                "64:ff9b::a9fe:a9fe",
                "2002:a00:5::1",
                "::7f00:1",
                HOME6,
            ]
        )
    },
    "mixed.evil.test": [{"A": [GOOD4, "10.0.0.5"]}],
    "mixed-last.evil.test": [{"A": ["198.41.0.5", GOOD4, "169.254.169.254"]}],
    "mixed6.evil.test": [{"A": [GOOD4], "AAAA": ["::1"]}],
    "mixed-mapped.evil.test": [{"A": [GOOD4], "AAAA": ["::ffff:169.254.169.254"]}],
    "alias.evil.test": [{"CNAME": ["inward.evil.test"]}],
    "alias-far.evil.test": [{"CNAME": ["to-1.evil.test"]}],
    "rebind.test": [SITE, {"A": ["10.0.0.5"]}],
    "rebind6.test": [{"AAAA": [GOOD6]}, {"A": ["127.0.0.1"], "AAAA": ["::1"]}],
    "rebind-local.test": [SITE, {"A": ["127.0.0.1"]}],
    "proxy.test": [{"A": [PROXY]}],
    "localhost": [{"A": ["127.0.0.1"]}],  # with a trailing dot the name is not in /etc/hosts
}
EVIL = [name for name in ZONE if name.endswith(".evil.test")] + ["localhost", "LOCALHOST."]
ASKING = Sent(17, DNS, 53)
SITES = {Sent(6, GOOD4, 80), Sent(6, GOOD6, 80)}


class Walled(Project):
    """A project whose commands run in the `home` namespace."""

    def __init__(self, directory: Path, wall: Wall) -> None:
        super().__init__(directory)
        self.wall = wall
        self.write("shop.py", SHOP)
        inward = dict.fromkeys(
            ("http_proxy", "https_proxy", "all_proxy", "HTTPS_PROXY", "ALL_PROXY"),
            "http://10.0.0.5:3128",
        )
        self.env |= {**inward, "NO_PROXY": "", "RES_OPTIONS": "attempts:2"}
        self.set(breaker_min="1000000", follow_same_domain="false", retry_max="200ms")

    def penstock(self, *args: str, input: str | None = None, timeout: float = 300.0) -> Done:
        found = subprocess.run(
            self.wall.command(self.dir, *PENSTOCK, *args),
            env=self.env,
            input=input,
            capture_output=True,
            timeout=timeout,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
        done = Done(found.returncode, found.stdout, found.stderr)
        assert "Traceback (most recent call last)" not in done.err, done.output
        return done

    def offer(self, urls: list[str], *options: str) -> dict[str, str]:
        """Push all URLs. Return the refused ones with their reasons."""
        done = self.penstock(
            "push", "--json", *options, "-", input="".join(url + "\n" for url in urls)
        )
        pushed = json.loads(done.out)
        assert pushed["accepted"] + pushed["refused"] == len(urls), done.output
        return {refusal["input"]: refusal["reason"] for refusal in pushed["refusals"]}


@pytest.fixture(scope="module")
def wall(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wall]:
    try:
        made = Wall(tmp_path_factory.mktemp("wall") / "notes")
    except Unavailable as e:
        reason = f"no network namespaces, so these tests did not run: {e}"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    made.zone(ZONE)
    yield made
    made.close()


@pytest.fixture
def walled(wall: Wall, tmp_path: Path) -> Iterator[Walled]:
    directory = tmp_path / "project"
    directory.mkdir()
    made = Walled(directory, wall)
    wall.read_notes()
    yield made
    made.close()


def skus(project: Project) -> set[str]:
    return {row["sku"] for row in project.rows()}


def ends(project: Project) -> dict[str, tuple[str, str]]:
    """URL → (status, reason) of every event."""
    return {event["url"]: (event["status"], event["reason"]) for event in project.events()}


def no_inward(notes: list[dict[str, Any]], *allowed: Sent) -> None:
    """Check that packets and connections went only to public sites and to `allowed`."""
    assert sent(notes) <= {ASKING, *SITES, *allowed}
    assert contacts(notes) <= {(s.address, s.port) for s in {*SITES, *allowed}}


def readable(reasons: dict[str, str], *beginnings: str) -> None:
    wrong = {url: reason for url, reason in reasons.items() if not reason.startswith(beginnings)}
    assert not wrong


def test_the_sniffer_records_a_connection_to_every_canary(wall: Wall) -> None:
    """Without this test, an empty record in the other tests would prove nothing."""
    hosts = [
        "127.0.0.1",
        "127.9.9.9",
        "::1",
        "10.0.0.5",
        "172.16.0.5",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "198.18.0.1",
        "192.0.0.192",
        "240.0.0.1",
    ]
    hosts += [
        "fd00::1",
        "fd00:ec2::254",
        "fec0::1",
        "64:ff9b::a9fe:a9fe",
        "2002:a00:5::1",
        "2001:0:a00:5::1",
        "2a01:4f8:2::5efe:a00:5",
        "::7f00:2",
        HOME4,
        HOME6,
    ]
    hosts += [GOOD4, GOOD6, "::ffff:10.0.0.6", "::ffff:127.0.0.3"]
    # Each connection waits for its response: the server records the connection before that.
    program = (
        "import socket, sys\nfor a in sys.argv[1:]:\n"
        "    with socket.create_connection((a, 80), 60) as s:\n"
    )
    program += (
        "        s.sendall(b'GET / HTTP/1.1\\r\\n\\r\\n')\n        assert s.recv(1)\n"
        "socket.getaddrinfo('mixed.evil.test', 80)"
    )
    wall.read_notes()
    subprocess.run(
        wall.command(wall.dir, sys.executable, "-c", program, *hosts), check=True, timeout=180
    )
    notes = wall.read_notes()
    expected = {host.removeprefix("::ffff:") for host in hosts}
    assert {address for address, _ in contacts(notes)} == expected
    assert sent(notes) == {ASKING, *(Sent(6, address, 80) for address in expected)}


def test_a_request_to_an_allowed_internal_address_is_recorded(walled: Walled) -> None:
    walled.set(net_allow="10.0.0.5:80")
    walled.offer(["http://10.0.0.5/p/1"])
    walled.run()
    notes = walled.wall.read_notes()
    assert sent(notes) == {Sent(6, "10.0.0.5", 80)}
    assert contacts(notes) == {("10.0.0.5", 80)}
    assert skus(walled) == {"CANARY"}


@pytest.mark.slow
def test_no_spelling_of_an_internal_address_is_dialled_and_each_event_has_a_reason(
    walled: Walled,
) -> None:
    walled.set(net_allow="127.0.0.1:8000")
    bad = [f"http://{host}/p/{n}" for n, host in enumerate([*HOSTS, *AUTHORITIES, *EVIL])]
    bad += [f"https://{host}/p/s{n}" for n, host in enumerate([*HOSTS, *EVIL])]
    good = [
        "http://good.test/p/links",
        f"http://{GOOD4}/p/2",
        f"http://[{GOOD6}]/p/3",
        "http://good6.test/p/4",
        "http://both.test/p/5",
        "http://robots.test/p/6",
    ]
    good += [
        "http://127.0.0.1:8000/p/allowed",
        "http://good.test/#@127.0.0.1/",
    ]  # the host ends before the fragment
    refused = walled.offer([*bad, *good, *SCHEMES])
    walled.run(expect=1)
    notes = walled.wall.read_notes()
    no_inward(notes, Sent(6, "127.0.0.1", 8000))
    assert SITES | {ASKING, Sent(6, "127.0.0.1", 8000)} == sent(notes), "the good ones were dialled"
    found = ends(walled)
    dead = {url: reason for url, (status, reason) in found.items() if status == "dead"}
    alive = {url for url, (status, _) in found.items() if status == "success"}
    assert alive == {*good[:-1], "http://good.test/"}
    followed = {
        "http://169.254.169.254/latest/meta-data/p/followed",
        "http://127.0.0.1/p/followed",
        "http://inward.evil.test/p/followed",
    }
    assert followed <= set(dead), "links of a good page"
    assert len(dead) + len(refused) == len(bad) + len(SCHEMES) + len(followed)
    readable(dead, "forbidden address: ", "bad URL: ")
    assert all(len(reason) > 5 for reason in refused.values()), refused
    assert skus(walled) == {
        "GOOD /p/links",
        "GOOD /p/2",
        "GOOD /p/3",
        "GOOD /p/4",
        "GOOD /p/5",
        "GOOD /p/6",
        "GOOD /p/allowed",
    }
    dead_letter = json.loads(
        walled.good(
            "dlq", "show", f"http://169.254.169.254/p/{HOSTS.index('169.254.169.254')}", "--json"
        )
    )
    assert dead_letter["reason"] == "forbidden address: not a public address"
    assert "PENSTOCK_NET_ALLOW" in json.dumps(dead_letter), (
        "the hint names the option that allows the address"
    )


@pytest.mark.slow
def test_no_redirect_to_an_internal_address_is_followed(walled: Walled) -> None:
    targets = [f"http://{host}/p/r" for host in [*HOSTS, *AUTHORITIES, *EVIL]]
    targets += [
        f"//{host}/p/r"
        for host in ("127.0.0.1", "169.254.169.254", "[::1]", "inward.evil.test", "①②⑦.⓪.⓪.①")
    ]
    targets += [
        "/\\169.254.169.254/p/r",
        "\\\\10.0.0.5/p/r",
        "http:\\\\10.0.0.5\\p\\r",
        "hTTp:/\\10.0.0.5/p/r",
        "http:///10.0.0.5/p/r",
        " http://10.0.0.5/p/r",
        *SCHEMES,
    ]
    targets = [t for t in targets if "@good.test" not in t]
    targets += ["http://user:secret@good.test/p/r", "http://127.0.0.1:80@good.test/p/r"]
    chain = len(targets)
    targets += [f"http://both.test/to/{chain + 1}", "http://10.0.0.5/p/r", "http://good.test/p/end"]
    walled.wall.redirects(targets)
    assert (
        walled.offer([f"http://good.test/to/{n}" for n in range(len(targets)) if n != chain + 1])
        == {}
    )
    walled.run("--workers", "2", expect=1)
    notes = walled.wall.read_notes()
    no_inward(notes)
    found = ends(walled)
    good = f"http://good.test/to/{len(targets) - 1}"
    assert found.pop(good)[0] == "success"
    assert {status for url, (status, _) in found.items()} == {"dead"}
    readable(
        {url: reason for url, (_, reason) in found.items()},
        "forbidden address: ",
        "bad URL: ",
        "a redirect leads to nothing we fetch: ",
    )
    assert skus(walled) == {"GOOD /p/end"}


@pytest.mark.slow
def test_a_rebound_dns_name_is_dialled_at_its_checked_address_or_not_at_all(
    walled: Walled,
) -> None:
    names = {"rebind.test": "A", "rebind6.test": "AAAA", "rebind-local.test": "A"}
    walled.wall.redirects([f"http://{name}/p/{name}-3" for name in names])
    walled.offer(
        [
            url
            for n, name in enumerate(names)
            for url in (
                f"http://{name}/p/{name}-1",
                f"http://{name}/p/{name}-2",
                f"http://{name}/to/{n}",
            )
        ]
    )
    walled.run()
    notes = walled.wall.read_notes()
    no_inward(notes)
    assert skus(walled) == {f"GOOD /p/{name}-{n}" for name in names for n in (1, 2, 3)}
    for name, kind in names.items():
        assert [n["type"] for n in notes if n.get("asked") == name].count(kind) == 1, (
            "one lookup, whose result was checked and dialled"
        )
    walled.offer([f"http://{name}/p/{name}-4" for name in names])
    walled.run(expect=1)  # another process looks the names up again
    notes = walled.wall.read_notes()
    assert sent(notes) == {ASKING}
    assert contacts(notes) == set()
    found = ends(walled)
    assert {found[f"http://{name}/p/{name}-4"] for name in names} == {
        ("dead", "forbidden address: not a public address")
    }


@pytest.mark.slow
def test_no_internal_proxy_is_dialled_and_no_proxy_gets_an_internal_target(walled: Walled) -> None:
    pools = {
        "private": "http://10.0.0.5:3128",
        "metadata": "http://169.254.169.254:80",
        "loopback": "http://127.0.0.1:3128",
        "socks": "socks5://[fd00::1]:1080",
        "mapped": "socks5://[::ffff:10.0.0.5]:1080",
        "number": "http://2130706433:3128",
        "name": "http://inward.evil.test:3128",
        "own": f"http://{HOME4}:3128",
        "mixed": "http://mixed6.evil.test:3128",
        "http": f"http://{PROXY}:{HTTP_PROXY}",
        "named": f"http://proxy.test:{HTTP_PROXY}",
        "good-socks": f"socks5://{PROXY}:{SOCKS_PROXY}",
    }
    text = "".join(
        f'[proxies.{name}]\nurls = "{url}"\ncooldown = "100ms"\ncooldown_max = "100ms"\n'
        for name, url in pools.items()
    )
    text += (
        '[proxies.listed]\nlist_url = "http://good.test/proxies.txt"\ncooldown = "100ms"\n'
        'cooldown_max = "100ms"\n'
    )
    text += (
        '[proxies.list-inward]\nlist_url = "http://169.254.169.254/list"\nlist_every = "1s"\n'
        'cooldown = "100ms"\n'
    )
    walled.write("penstock.toml", text)
    walled.set(retry_max_age="1s")
    good = ("http", "named", "good-socks")
    inward = [*(name for name in pools if name not in good), "listed", "list-inward"]
    for name in inward:
        walled.offer([f"http://good.test/p/{name}"], "--pool", name)
    hosts = [
        "127.0.0.1",
        "10.0.0.5",
        "169.254.169.254",
        "[::1]",
        "[fd00::1]",
        "[::ffff:10.0.0.5]",
        "2852039166",
        *EVIL[:-1],
    ]
    for name in good:
        walled.offer(
            [
                f"http://good.test/p/{name}",
                *(f"http://{host}/p/{name}-{n}" for n, host in enumerate(hosts)),
            ],
            "--pool",
            name,
        )
    walled.run(expect=1)
    notes = walled.wall.read_notes()
    proxies = {Sent(6, PROXY, HTTP_PROXY), Sent(6, PROXY, SOCKS_PROXY)}
    assert sent(notes) == {ASKING, Sent(6, GOOD4, 80), *proxies}, (
        "the list was fetched, and the good proxies dialled"
    )
    assert contacts(notes) == {(GOOD4, 80), (PROXY, HTTP_PROXY), (PROXY, SOCKS_PROXY)}, (
        "from the proxies' side too"
    )
    assert {n["proxied"].split()[1] for n in notes if "proxied" in n} == {f"{GOOD4}:80"}, (
        "a proxy gets the checked address"
    )
    found = ends(walled)
    assert {url for url, (status, _) in found.items() if status == "success"} == {
        f"http://good.test/p/{name}" for name in good
    }
    assert {row["sku"] for row in walled.rows()} == {f"GOOD /p/{name}" for name in good}
    for name in inward:
        status, reason = found[f"http://good.test/p/{name}"]
        assert status == "dead"
        assert "forbidden address" in reason, (name, reason)
        assert name in reason, "the pool is named"
    readable(
        {
            url: reason
            for url, (status, reason) in found.items()
            if status == "dead" and "//good.test" not in url
        },
        "forbidden address: ",
        "bad URL: ",
    )


@pytest.mark.slow
def test_the_demo_sends_packets_only_to_its_own_shop(walled: Walled) -> None:
    """The demo uses the shop, triggers, live display, hooks and sinks. Every packet is recorded."""
    done = walled.penstock("demo", "--seconds", "8")
    assert done.code == 0, done.output
    notes = walled.wall.read_notes()
    dialled = sent(notes)
    assert dialled
    assert {(s.protocol, s.address) for s in dialled} == {(6, "127.0.0.1")}, dialled
    assert len({s.port for s in dialled}) <= 3, "the shop, and the pages with separate ports"
    assert contacts(notes) == set(), "no canary was contacted"
