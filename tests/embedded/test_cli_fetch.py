"""`penstock fetch`: one URL along the whole way against the pretend web: what it tells, what it
spends, and how it ends.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.embedded.proxy_servers import PASSWORD, USER, Proxy
from tests.embedded.test_domains import lateness

from penstock.cli.main import main
from penstock.cli.output import console
from penstock.config import files as config
from penstock.runtime.stores import open_stores
from penstock.testing.web import Reply, Web, reply

PAGE = "<html><body>a page of some length, so that nobody takes it for a challenge</body></html>"
ROBOTS = "User-agent: *\nDisallow: /private\nUser-agent: shopbot\nDisallow: /no\nAllow: /no/but\n"


class Place:
    """A directory to call the command in."""

    def __init__(
        self,
        tmp: Path,
        monkeypatch: pytest.MonkeyPatch,
        capfd: pytest.CaptureFixture[str],
        *ports: int,
        toml: str = "",
    ) -> None:
        self.dir, self._capfd, self.err = tmp, capfd, ""
        allow = ",".join(f"127.0.0.1:{p}" for p in ports)
        (tmp / "penstock.toml").write_text(
            f'[net]\nallow = "{allow}"\nuser_agent = "shopbot/2 (+https://shop.example/bot)"\n[pace]\nrate = "unlimited"\n{toml}'
        )
        monkeypatch.chdir(tmp)

    async def text(self, code: int, *args: str) -> str:
        console.cache_clear()
        self._capfd.readouterr()
        found = await asyncio.to_thread(main, ["fetch", *args])
        shown = self._capfd.readouterr()
        self.err = shown.err
        assert found == code, shown
        return shown.out

    async def __call__(self, code: int, *args: str) -> Any:
        return json.loads(await self.text(code, *args, "--json"))

    def make_state(self) -> None:
        open_stores(config.load({}, {}, self.dir).config).close()

    def rows(self, sql: str) -> list[Any]:
        stores = open_stores(config.load({}, {}, self.dir).config, inline=True)
        try:
            found: list[Any] = stores.db.read_now(lambda tx: tx.execute(sql).fetchall())
            return found
        finally:
            stores.close()


@pytest.fixture
def place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Any:
    return lambda *ports, **more: Place(tmp_path, monkeypatch, capfd, *ports, **more)


async def test_a_chain_of_redirects_is_told_hop_by_hop_with_times_robots_and_masked_headers(
    place: Any,
) -> None:
    async with Web() as web:
        web.route("/robots.txt", reply(ROBOTS, "text/plain"))
        web.route("/start", Reply(302, {"location": "/no/but/here"}))
        headers = {
            "content-type": "text/html; charset=iso-8859-1",
            "set-cookie": "sid=PLANTED; Path=/",
            "x-auth-token": "PLANTED",
        }
        web.route("/no/but/here", Reply(200, headers, PAGE.encode() + b"\xf6"))
        fetch = place(web.port)
        told = await fetch(0, web.url("/start"), "-o", "page.html")
        peer = f"127.0.0.1:{web.port}"
        assert [(x["for"], x["status"], x["peer"]) for x in told["exchanges"]] == [
            ("robots.txt", 200, peer),
            ("page", 302, peer),
            ("page", 200, peer),
        ]
        assert all(
            0 <= x["connect"] <= x["first_byte"] <= x["total"] < 60 for x in told["exchanges"]
        )
        assert (told["ok"], told["status"], told["final_url"], told["error"]) == (
            True,
            200,
            web.url("/no/but/here"),
            None,
        )
        assert (told["guard"]["verdict"], told["guard"]["addresses"]) == ("allowed", ["127.0.0.1"])
        assert [(r["verdict"], r["rule"], r["agent"]) for r in told["robots"]] == [
            ("allowed", "", "shopbot"),
            ("allowed", "Allow: /no/but", "shopbot"),
        ]
        assert (told["charset"], told["size"], told["headers"]["set-cookie"]) == (
            "iso-8859-1",
            len(PAGE) + 1,
            "sid=***; Path=/",
        )
        assert told["timing"]["dns"] >= 0
        assert (fetch.dir / "page.html").read_bytes() == PAGE.encode() + b"\xf6"
        said = await fetch.text(0, web.url("/start"))
        assert "Allow: /no/but" in said
        assert peer in said
        assert "PLANTED" not in said + json.dumps(told)


async def test_robots_is_obeyed_under_our_own_name_and_an_exception_for_once_is_recorded_with_its_reason(
    place: Any,
) -> None:
    async with Web() as web:
        web.route("/robots.txt", reply(ROBOTS, "text/plain"))
        web.route("/*", PAGE)
        fetch = place(web.port)
        fetch.make_state()
        told = await fetch(1, web.url("/no/x"))
        assert told["error"]["class"] == "permanent"
        assert [(r["verdict"], r["rule"], r["from"]) for r in told["robots"]] == [
            ("disallowed", "Disallow: /no", "site")
        ]
        assert web.counts["/no/x"] == 0
        told = await fetch(0, web.url("/private"))
        assert [(r["verdict"], r["from"]) for r in told["robots"]] == [("allowed", "cache")], (
            "that group is not ours; and the state keeps what was learned"
        )
        await fetch.text(2, web.url("/no/x"), "--ignore-robots", " ")
        told = await fetch(0, web.url("/no/x"), "--ignore-robots", "our own  shop")
        assert [(r["verdict"], r["rule"]) for r in told["robots"]] == [("ignored", "our own shop")]
        ((kind, host, reason, who, once),) = fetch.rows(
            "SELECT kind, host, reason, who, ended=at FROM exception"
        )
        assert (kind, host, reason, once) == ("robots", f"127.0.0.1:{web.port}", "our own shop", 1)
        assert "@" in who
        assert (await fetch(1, web.url("/no/x")))["ok"] is False, "for once means once"
        assert web.counts["/robots.txt"] == 1


async def test_a_redirect_into_what_robots_forbids_is_told_with_the_rule(place: Any) -> None:
    async with Web() as web:
        web.route("/robots.txt", reply(ROBOTS, "text/plain"))
        web.route("/start", Reply(301, {"location": "/no/entry"}))
        told = await place(web.port)(1, web.url("/start"))
        assert [(r["url"], r["verdict"]) for r in told["robots"]] == [
            (web.url("/start"), "allowed"),
            (web.url("/no/entry"), "disallowed"),
        ]
        assert web.counts["/no/entry"] == 0


async def test_every_end_has_its_exit_code_and_class(place: Any) -> None:
    async with Web() as web:
        web.route("/gone", Reply(404, {}, b"no"))
        web.route("/busy", Reply(503, {"retry-after": "60"}))
        web.route("/denied", Reply(403, {}, b"no"))
        web.route("/cut", Reply(drop=True))
        fetch = place(web.port)
        for path, kind, status in (
            ("/gone", "permanent", 404),
            ("/denied", "blocked", 403),
            ("/cut", "transient", None),
            ("/busy", "throttled", 503),
        ):
            told = await fetch(1, web.url(path))
            assert (told["error"]["class"], told["status"]) == (kind, status)
        told = await fetch(1, "http://127.0.0.1:1/")
        assert (told["guard"]["verdict"], told["error"]["reason"]) == (
            "refused",
            "forbidden address: not a public address",
        )
        assert (told["exchanges"], told["slots"]) == ([], []), "nothing was sent and no slot spent"
        for bad in ("ftp://shop.example/", "http://user:secret@shop.example/", "no url"):
            await fetch.text(2, bad)
            assert "Error:" in fetch.err
            assert "secret" not in fetch.err
        await fetch.text(2, web.url("/"), "--pool", "none")
        await fetch.text(3, web.url("/"), "--set", "pace.rate=often")


async def test_only_the_headers_are_asked_for_with_head(place: Any) -> None:
    async with Web() as web:
        web.route("/a", PAGE)
        told = await place(web.port)(0, web.url("/a"), "--head")
        assert (told["method"], told["size"], told["headers"]["content-length"]) == (
            "HEAD",
            0,
            str(len(PAGE)),
        )
        assert [e.method for e in web.entries if e.path == "/a"] == ["HEAD"]


async def test_it_counts_for_the_pace_of_its_host_and_a_throttle_it_met_holds_for_the_next(
    place: Any,
) -> None:
    async with Web() as web:
        web.route("/a", PAGE)
        web.route("/busy", Reply(429, {"retry-after": "60"}))
        fetch = place(web.port, toml='burst = 1\n[claims]\nurl = "sqlite:.penstock/penstock.db"\n')
        fetch.make_state()
        limit = ["--set", "pace.rate=4"]
        async with lateness() as worst:
            for _ in range(2):
                assert len((await fetch(0, web.url("/a"), *limit))["slots"]) in (1, 2)
        at = [e.at for e in web.entries]
        assert len(at) == 3, "robots.txt, then the page twice"
        assert all(b - a > (0.2 - worst[0]) * 1e6 for a, b in itertools.pairwise(at)), (
            "in two processes' lives, by one pace"
        )
        await fetch(1, web.url("/busy"), *limit)
        told = await fetch(1, web.url("/a"), *limit, "--wait", "1s")
        assert told["error"]["class"] == "throttled"
        assert 50 < told["error"]["retry_after"] <= 60
        assert web.counts["/a"] == 2


async def test_without_any_state_nothing_is_left_behind(place: Any) -> None:
    async with Web() as web:
        web.route("/a", PAGE)
        fetch = place(web.port)
        await fetch(0, web.url("/a"))
        assert [p.name for p in fetch.dir.iterdir()] == ["penstock.toml"]


async def test_through_a_proxy_the_way_is_told_and_the_password_is_not(place: Any) -> None:
    async with (
        Web() as web,
        Proxy(user=USER, password=PASSWORD) as good,
        Proxy(user="other", password="other") as wrong,
    ):
        web.route("/a", PAGE)
        bad = f"http://{USER}:{PASSWORD}@127.0.0.1:{wrong.port}"
        toml = f'[proxies.home]\nurls = "{good.dsn}"\ngeo = "de"\n[proxies.ill]\nurls = "{bad}"\n'
        fetch = place(web.port, good.port, wrong.port, toml=toml)
        told = await fetch(0, web.url("/a"), "--geo", "de")
        assert {x["proxy"] for x in told["exchanges"]} == {f"http://***@127.0.0.1:{good.port}"}
        assert {x["peer"] for x in told["exchanges"]} == {f"127.0.0.1:{good.port}"}
        said = json.dumps(told) + await fetch.text(0, web.url("/a"), "--pool", "home")
        told = await fetch(1, web.url("/a"), "--pool", "ill")
        said += json.dumps(told) + fetch.err
        assert told["error"]["class"] == "throttled"
        assert USER not in said
        assert PASSWORD not in said


async def test_the_options_that_bend_a_rule_reach_the_request(place: Any) -> None:
    async with Web() as web:
        web.route(
            "/soft",
            "<html><title>404 Not Found</title><body>there is no such thing in this shop, sorry</body></html>",
        )
        fetch = place(web.port)
        await fetch(0, web.url("/soft"))
        told = await fetch(1, web.url("/soft"), "--set", "fetch.soft_404=true")
        assert told["error"]["class"] == "blocked"


async def test_a_downgrade_is_followed_only_where_it_is_allowed(place: Any, tmp_path: Path) -> None:
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1 -keyout key.pem -out cert.pem"
    subprocess.run(command.split(), check=True, cwd=tmp_path, capture_output=True)  # noqa: ASYNC221
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    async with Web() as web:
        web.route("/plain", PAGE)
        web.route("/tls", Reply(302, {"location": web.url("/plain")}))
        port = await web.listen(tls=context)
        fetch = place(web.port, port)
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
            told = await fetch(1, f"https://127.0.0.1:{port}/tls")
            assert told["error"]["reason"] == "a redirect leads from https to http"
            told = await fetch(
                0, f"https://127.0.0.1:{port}/tls", "--set", "fetch.allow_downgrade=true"
            )
            assert told["final_url"] == web.url("/plain")


async def test_with_remote_dns_the_proxy_resolves_and_the_guard_says_so(place: Any) -> None:
    async with Proxy() as proxy:
        fetch = place(proxy.port, toml=f'[proxies.p]\nurls = "{proxy.dsn}"\n')
        told = await fetch(1, "http://only-the-proxy-knows.invalid/", "--pool", "p")
        assert told["guard"]["verdict"] == "unresolved"
        assert proxy.connects == []
        told = await fetch(
            1, "http://only-the-proxy-knows.invalid/", "--pool", "p", "--set", "net.remote_dns=true"
        )
        assert told["guard"] == {
            "verdict": "allowed",
            "addresses": [],
            "reason": "the proxy resolves the name",
        }
        assert proxy.connects != []
