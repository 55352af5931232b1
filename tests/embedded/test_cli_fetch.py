"""`penstock fetch` against the test web server: its report, its slots and its exit codes."""

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

PAGE = "<html><body>a page that is too long to count as a challenge page</body></html>"
ROBOTS = "User-agent: *\nDisallow: /private\nUser-agent: shopbot\nDisallow: /no\nAllow: /no/but\n"


class Place:
    """A directory in which the command runs."""

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
            f'[net]\nallow = "{allow}"\nuser_agent = "shopbot/2 (+https://shop.example/bot)"\n'
            f'[pace]\nrate = "unlimited"\n{toml}'
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


async def test_a_redirect_chain_is_reported_per_hop_with_times_robots_and_masked_headers(
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
        report = await fetch(0, web.url("/start"), "-o", "page.html")
        peer = f"127.0.0.1:{web.port}"
        assert [(x["for"], x["status"], x["peer"]) for x in report["exchanges"]] == [
            ("robots.txt", 200, peer),
            ("page", 302, peer),
            ("page", 200, peer),
        ]
        assert all(
            0 <= x["connect"] <= x["first_byte"] <= x["total"] < 60 for x in report["exchanges"]
        )
        assert (report["ok"], report["status"], report["final_url"], report["error"]) == (
            True,
            200,
            web.url("/no/but/here"),
            None,
        )
        assert (report["guard"]["verdict"], report["guard"]["addresses"]) == (
            "allowed",
            ["127.0.0.1"],
        )
        assert [(r["verdict"], r["rule"], r["agent"]) for r in report["robots"]] == [
            ("allowed", "", "shopbot"),
            ("allowed", "Allow: /no/but", "shopbot"),
        ]
        assert (report["charset"], report["size"], report["headers"]["set-cookie"]) == (
            "iso-8859-1",
            len(PAGE) + 1,
            "sid=***; Path=/",
        )
        assert report["timing"]["dns"] >= 0
        assert (fetch.dir / "page.html").read_bytes() == PAGE.encode() + b"\xf6"
        text = await fetch.text(0, web.url("/start"))
        assert "Allow: /no/but" in text
        assert peer in text
        assert "PLANTED" not in text + json.dumps(report)


async def test_robots_rules_of_our_agent_apply_and_a_single_exception_is_recorded(
    place: Any,
) -> None:
    async with Web() as web:
        web.route("/robots.txt", reply(ROBOTS, "text/plain"))
        web.route("/*", PAGE)
        fetch = place(web.port)
        fetch.make_state()
        report = await fetch(1, web.url("/no/x"))
        assert report["error"]["class"] == "permanent"
        assert [(r["verdict"], r["rule"], r["from"]) for r in report["robots"]] == [
            ("disallowed", "Disallow: /no", "site")
        ]
        assert web.counts["/no/x"] == 0
        report = await fetch(0, web.url("/private"))
        assert [(r["verdict"], r["from"]) for r in report["robots"]] == [("allowed", "cache")], (
            "that group is for another agent, and robots.txt was cached"
        )
        await fetch.text(2, web.url("/no/x"), "--ignore-robots", " ")
        report = await fetch(0, web.url("/no/x"), "--ignore-robots", "our own  shop")
        assert [(r["verdict"], r["rule"]) for r in report["robots"]] == [
            ("ignored", "our own shop")
        ]
        ((kind, host, reason, who, once),) = fetch.rows(
            "SELECT kind, host, reason, who, ended=at FROM exception"
        )
        assert (kind, host, reason, once) == ("robots", f"127.0.0.1:{web.port}", "our own shop", 1)
        assert "@" in who
        assert (await fetch(1, web.url("/no/x")))["ok"] is False, (
            "the exception applies to one command only"
        )
        assert web.counts["/robots.txt"] == 1


async def test_a_redirect_to_a_disallowed_url_is_reported_and_not_followed(place: Any) -> None:
    async with Web() as web:
        web.route("/robots.txt", reply(ROBOTS, "text/plain"))
        web.route("/start", Reply(301, {"location": "/no/entry"}))
        report = await place(web.port)(1, web.url("/start"))
        assert [(r["url"], r["verdict"]) for r in report["robots"]] == [
            (web.url("/start"), "allowed"),
            (web.url("/no/entry"), "disallowed"),
        ]
        assert web.counts["/no/entry"] == 0


async def test_every_outcome_has_its_exit_code_and_error_class(place: Any) -> None:
    async with Web() as web:
        web.route("/gone", Reply(404, {}, b"no"))
        web.route("/busy", Reply(503, {"retry-after": "60"}))
        web.route("/denied", Reply(403, {}, b"no"))
        web.route("/cut", Reply(drop=True))
        fetch = place(web.port)
        for path, kind, status in (
            ("/gone", "not_found", 404),
            ("/denied", "blocked", 403),
            ("/cut", "transient", None),
            ("/busy", "throttled", 503),
        ):
            report = await fetch(1, web.url(path))
            assert (report["error"]["class"], report["status"]) == (kind, status)
        report = await fetch(1, "http://127.0.0.1:1/")
        assert (report["guard"]["verdict"], report["error"]["reason"]) == (
            "refused",
            "forbidden address: not a public address",
        )
        assert (report["exchanges"], report["slots"]) == ([], []), (
            "no request was sent and no slot reserved"
        )
        for bad in ("ftp://shop.example/", "http://user:secret@shop.example/", "no url"):
            await fetch.text(2, bad)
            assert "Error:" in fetch.err
            assert "secret" not in fetch.err
        await fetch.text(2, web.url("/"), "--pool", "none")
        await fetch.text(3, web.url("/"), "--set", "pace.rate=often")


async def test_head_requests_only_the_headers(place: Any) -> None:
    async with Web() as web:
        web.route("/a", PAGE)
        report = await place(web.port)(0, web.url("/a"), "--head")
        assert (report["method"], report["size"], report["headers"]["content-length"]) == (
            "HEAD",
            0,
            str(len(PAGE)),
        )
        assert [e.method for e in web.entries if e.path == "/a"] == ["HEAD"]


async def test_fetch_uses_the_hosts_slots_and_a_429_applies_to_the_next_command(
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
            "two commands share one rate limit"
        )
        await fetch(1, web.url("/busy"), *limit)
        report = await fetch(1, web.url("/a"), *limit, "--wait", "1s")
        assert report["error"]["class"] == "throttled"
        assert 50 < report["error"]["retry_after"] <= 60
        assert web.counts["/a"] == 2


async def test_fetch_without_a_state_directory_creates_no_files(place: Any) -> None:
    async with Web() as web:
        web.route("/a", PAGE)
        fetch = place(web.port)
        await fetch(0, web.url("/a"))
        assert [p.name for p in fetch.dir.iterdir()] == ["penstock.toml"]


async def test_the_proxy_is_reported_without_its_user_name_and_password(place: Any) -> None:
    async with (
        Web() as web,
        Proxy(user=USER, password=PASSWORD) as good,
        Proxy(user="other", password="other") as wrong,
    ):
        web.route("/a", PAGE)
        bad = f"http://{USER}:{PASSWORD}@127.0.0.1:{wrong.port}"
        toml = f'[proxies.home]\nurls = "{good.dsn}"\ngeo = "de"\n[proxies.ill]\nurls = "{bad}"\n'
        fetch = place(web.port, good.port, wrong.port, toml=toml)
        report = await fetch(0, web.url("/a"), "--geo", "de")
        assert {x["proxy"] for x in report["exchanges"]} == {f"http://***@127.0.0.1:{good.port}"}
        assert {x["peer"] for x in report["exchanges"]} == {f"127.0.0.1:{good.port}"}
        text = json.dumps(report) + await fetch.text(0, web.url("/a"), "--pool", "home")
        report = await fetch(1, web.url("/a"), "--pool", "ill")
        text += json.dumps(report) + fetch.err
        assert report["error"]["class"] == "throttled"
        assert USER not in text
        assert PASSWORD not in text


async def test_an_option_set_on_the_command_line_applies_to_the_request(place: Any) -> None:
    async with Web() as web:
        web.route(
            "/soft",
            (
                "<html><title>404 Not Found</title><body>there is no such thing in this shop, "
                "sorry</body></html>"
            ),
        )
        fetch = place(web.port)
        await fetch(0, web.url("/soft"))
        report = await fetch(1, web.url("/soft"), "--set", "fetch.soft_404=true")
        assert report["error"]["class"] == "blocked"


async def test_a_redirect_to_http_is_followed_only_if_allowed(place: Any, tmp_path: Path) -> None:
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1 -addext "
        "subjectAltName=IP:127.0.0.1 -keyout key.pem -out cert.pem"
    )
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
            report = await fetch(1, f"https://127.0.0.1:{port}/tls")
            assert report["error"]["reason"] == "a redirect leads from https to http"
            report = await fetch(
                0, f"https://127.0.0.1:{port}/tls", "--set", "fetch.allow_downgrade=true"
            )
            assert report["final_url"] == web.url("/plain")


async def test_with_remote_dns_the_proxy_resolves_the_name_and_the_guard_reports_it(
    place: Any,
) -> None:
    async with Proxy() as proxy:
        fetch = place(proxy.port, toml=f'[proxies.p]\nurls = "{proxy.dsn}"\n')
        report = await fetch(1, "http://only-the-proxy-knows.invalid/", "--pool", "p")
        assert report["guard"]["verdict"] == "unresolved"
        assert proxy.connects == []
        report = await fetch(
            1, "http://only-the-proxy-knows.invalid/", "--pool", "p", "--set", "net.remote_dns=true"
        )
        assert report["guard"] == {
            "verdict": "allowed",
            "addresses": [],
            "reason": "the proxy resolves the name",
        }
        assert proxy.connects != []
