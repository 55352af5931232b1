"""Limits of the webhook server: early answers, addresses, connections, proxies and slow clients."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import time
from collections.abc import Iterator

import pytest
from tests.e2e.harness import SHOP, Project, wait_for
from tests.e2e.webhook_rig import SECRET, Server, sign

from penstock.rules.senders import ADDRESS_BURST

HOOKS = (
    SHOP
    + '\nshop.source("webhook:shop")\nshop.source("webhook:open", unsigned="anywhere")\n'
    + f'shop.source("webhook:signed", secret="whsec_{SECRET}")\n'
    + 'shop.source("webhook:bearer", signature="bearer", secret="token-of-24-bytes-or-more")\n'
)
ITEM = b'{"url": "https://shop.example/p/1"}'


@pytest.fixture
def server(project: Project) -> Iterator[Server]:
    made = Server(project, pipeline=HOOKS)
    yield made
    assert "Traceback" not in made.running.output, made.running.output


def head(path: str, *lines: str, method: str = "POST", length: int | None = 100) -> bytes:
    size = [] if length is None else [f"content-length: {length}"]
    given = [f"{method} {path} HTTP/1.1", "host: 127.0.0.1", *size, *lines]
    if not any(line.startswith("content-type") for line in lines):
        given.append("content-type: application/json")
    return ("\r\n".join(given) + "\r\n\r\n").encode("latin-1")


def signature(body: bytes, id_: str = "m1", late: int = 0) -> list[str]:
    headers = sign(body, id_, int(time.time()) + late)
    return [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]


def connect(server: Server, address: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), 30, source_address=(address, 0))


def everything(s: socket.socket) -> bytes:
    got = b""
    with contextlib.suppress(ConnectionResetError):
        while chunk := s.recv(65536):
            got += chunk
    return got


# -- checks before the body ------------------------------------------------------------------------


@pytest.mark.parametrize("expect", [(), ("expect: 100-continue",)], ids=["", "expect"])
@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (head("/hooks/nothing"), 404),
        (head("/hooks/shop", method="PUT"), 405),
        (head("/hooks/shop", "origin: https://evil.example"), 403),
        (head("/hooks/shop", "x-forwarded-for: 192.0.2.1"), 403),
        (head("/hooks/shop", length=(1 << 20) + 1), 413),
        (head("/hooks/shop", "content-type: text/plain"), 415),
        (head("/hooks/shop", "content-encoding: gzip"), 415),
        (head("/hooks/signed"), 401),
        (head("/hooks/signed", *signature(b"")[:2]), 401),
        (head("/hooks/signed", *signature(b"", late=-400)), 401),
        (head("/hooks/signed", *signature(b"")[:2], "webhook-signature: v1,%%%"), 401),
        (head("/hooks/signed", *signature(b"")[:2], "webhook-signature: v1," + "A" * 5000), 401),
        (head("/hooks/bearer"), 401),
        (head("/hooks/bearer", "authorization: Bearer wrong"), 401),
    ],
)
def test_a_request_is_refused_by_its_headers_and_its_body_is_not_awaited(
    server: Server, sent: bytes, status: int, expect: tuple[str, ...]
) -> None:
    more = "".join(line + "\r\n" for line in expect).encode()
    with connect(server) as s:
        s.sendall(sent[:-2] + more + b"\r\n")
        got = everything(s)  # the server closes although the body was not sent
    assert got.startswith(f"HTTP/1.1 {status} ".encode()), got
    assert b"\r\nconnection: close\r\n" in got
    assert got.count(b"HTTP/1.1 ") == 1
    assert json.loads(got.partition(b"\r\n\r\n")[2])["error"]


def test_a_signed_head_gets_100_continue_and_its_body_is_verified(server: Server) -> None:
    for body, status in ((ITEM, b"202"), (ITEM[:-1] + b" ", b"401")):
        with connect(server) as s:
            s.sendall(
                head(
                    "/hooks/signed",
                    *signature(ITEM),
                    "expect: 100-continue",
                    "connection: close",
                    length=len(ITEM),
                )
            )
            assert s.recv(4096) == b"HTTP/1.1 100 Continue\r\n\r\n"
            s.sendall(body)
            assert everything(s).startswith(b"HTTP/1.1 " + status)


# -- rate limits -----------------------------------------------------------------------------------


def test_the_rate_of_a_source_is_charged_by_signed_requests_only(project: Project) -> None:
    server = Server(
        project,
        pipeline=SHOP
        + f'\nshop.source("webhook:signed", secret="whsec_{SECRET}", rate="1/m", burst=3)\n',
    )
    statuses = []
    for n in range(5):
        forged = server.post(ITEM, hook="signed", **sign(b"other", f"f{n}", int(time.time())))
        unsigned = server.post(ITEM, hook="signed")
        assert (forged.status, unsigned.status) == (401, 401)
        statuses.append(server.post(ITEM, hook="signed", **sign(ITEM, f"m{n}", int(time.time()))))
    assert [answer.status for answer in statuses] == [202, 202, 202, 429, 429]
    assert int(statuses[3].headers["retry-after"]) >= 1


def test_an_address_without_signature_gets_429_and_other_addresses_do_not(server: Server) -> None:
    def ask(address: str) -> bytes:
        with connect(server, address) as s:
            s.sendall(head("/hooks/signed", length=0))
            return everything(s)

    answers = [ask("127.0.0.2") for _ in range(2 * ADDRESS_BURST)]
    statuses = [answer[9:12] for answer in answers]
    assert statuses[:ADDRESS_BURST] == [b"401"] * ADDRESS_BURST
    assert b"429" in statuses
    limited = answers[statuses.index(b"429")]
    assert b"\r\nretry-after: 1\r\n" in limited
    assert b"\r\nconnection: close\r\n" in limited
    assert ask("127.0.0.3")[9:12] == b"401"
    # A signed request of the limited address is accepted, and health is always answered.
    with connect(server, "127.0.0.2") as s:
        s.sendall(
            head("/hooks/signed", *signature(ITEM), "connection: close", length=len(ITEM)) + ITEM
        )
        assert everything(s).startswith(b"HTTP/1.1 202 ")
    with connect(server, "127.0.0.2") as s:
        s.sendall(head("/healthz", method="GET", length=0))
        assert everything(s).startswith(b"HTTP/1.1 200 ")


def test_a_limited_address_may_send_large_signed_bodies_after_a_verified_one(
    server: Server,
) -> None:
    large = ITEM + b" " * 100_000

    def send(body: bytes, *lines: str) -> bytes:
        with connect(server, "127.0.0.2") as s:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                s.sendall(
                    head("/hooks/signed", *lines, "connection: close", length=len(body)) + body
                )
            return everything(s)[9:12]

    wait_for(lambda: send(b"") == b"429", "the address is over its limit", every=0)
    statuses = []
    for n in range(3):  # the limit allows another request now and then, so it is used up again
        wait_for(lambda: send(b"") == b"429", "the address is over its limit", every=0)
        statuses.append(send(large, *signature(large, f"large{n}")))
    assert statuses == [b"429"] * 3
    assert send(ITEM, *signature(ITEM, "small")) == b"202"
    wait_for(lambda: send(b"") == b"429", "the address is over its limit", every=0)
    assert send(large, *signature(large, "large")) == b"202"


@pytest.mark.parametrize("known", [True, False])
def test_unfinished_forged_bodies_do_not_drop_the_body_of_a_sender(
    server: Server, known: bool
) -> None:
    large = ITEM + b" " * 1_000_000
    if known:
        assert server.post(ITEM, hook="signed", **sign(ITEM, "m1", int(time.time()))).status == 202
    with connect(server) as s, contextlib.ExitStack() as stack:
        s.sendall(head("/hooks/signed", *signature(large), "connection: close", length=len(large)))
        s.sendall(large[:500_000])
        strangers = [stack.enter_context(connect(server, "127.0.0.2")) for _ in range(40)]
        for stranger in strangers:  # more than the memory of all bodies
            stranger.sendall(head("/hooks/signed", *signature(b""), length=1 << 20))
            stranger.sendall(b" " * ((1 << 20) - 1))
        assert everything(strangers[0]).startswith(b"HTTP/1.1 503 ")
        s.sendall(large[500_000:])
        assert everything(s).startswith(b"HTTP/1.1 202 ")


def test_one_address_may_use_half_of_the_rate_of_an_unsigned_hook(project: Project) -> None:
    server = Server(
        project,
        pipeline=SHOP + '\nshop.source("webhook:open", unsigned="anywhere", rate="1/m", burst=6)\n',
    )

    def send(address: str) -> bytes:
        with connect(server, address) as s:
            s.sendall(head("/hooks/open", "connection: close", length=len(ITEM)) + ITEM)
            return everything(s)[9:12]

    statuses = [send(f"127.0.0.{n}") for n in (2, 2, 2, 2, 3, 3, 3, 3, 4)]
    assert statuses == [b"202"] * 3 + [b"429"] + [b"202"] * 3 + [b"429"] * 2


# -- proxies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("trusted", [True, False])
def test_senders_behind_a_proxy_have_their_own_limits_only_if_it_is_trusted(
    project: Project, trusted: bool
) -> None:
    project.set(serve_max_per_address="2", serve_timeout="60s")
    if trusted:
        project.set(serve_trusted_proxies="127.0.0.9")
    server = Server(project, pipeline=HOOKS)

    def ask(forwarded: str) -> bytes:
        with connect(server, "127.0.0.9") as s:
            s.sendall(head("/hooks/signed", f"x-forwarded-for: {forwarded}", length=0))
            return everything(s)[9:12]

    found = {ask("203.0.113.1, 192.0.2.1") for _ in range(2 * ADDRESS_BURST)}
    assert found == {b"401", b"429"}
    others = {ask(f"192.0.2.1, 198.51.100.{n}") for n in range(20)}
    assert (b"429" in others) is not trusted
    held = [connect(server, "127.0.0.9") for _ in range(5)]
    for s in held:
        s.sendall(b"POST /hooks/signed HTTP/1.1\r\n")
        s.settimeout(1)
    open_ = 0
    for s in held:
        try:
            assert s.recv(4096).startswith(b"HTTP/1.1 503 ")
        except TimeoutError:
            open_ += 1
        s.close()
    assert open_ == (5 if trusted else 2)


# -- connections -----------------------------------------------------------------------------------


def test_the_oldest_half_open_connection_is_closed_for_a_new_one(project: Project) -> None:
    project.set(serve_max_connections="4", serve_timeout="60s")
    server = Server(project, pipeline=HOOKS)
    held = [connect(server) for _ in range(4)]
    starts = [
        b"POST /hooks/signed HTTP/1.1\r\n",
        head("/hooks/signed", *signature(b"")),  # the body is missing
        b"",
        b"POST",
    ]
    for s, start in zip(held, starts, strict=True):
        s.sendall(start)
        time.sleep(0.05)
    for oldest in held:
        answer = server.post(ITEM, hook="signed", **sign(ITEM, "m1", int(time.time())))
        assert answer.status == 202
        extra = connect(server)  # takes the place of the request that ended
        assert everything(oldest).startswith(b"HTTP/1.1 503 ")
        oldest.close()
        held.append(extra)
        if len(held) == 8:
            break
    for s in held:
        s.close()


def test_a_body_for_a_page_that_needs_none_does_not_keep_the_connection(server: Server) -> None:
    with connect(server) as s:
        s.sendall(head("/healthz", method="GET", length=1000))
        began = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() < began + 20:
                s.sendall(b" ")
                time.sleep(0.1)
        assert time.monotonic() < began + 10


def test_a_client_that_does_not_read_responses_is_disconnected(project: Project) -> None:
    project.set(serve_timeout="1s")
    server = Server(project, pipeline=HOOKS)
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        s.connect(("127.0.0.1", server.port))
        s.settimeout(1)
        body = json.dumps([{"url": f"https://shop.example/{n}"} for n in range(1000)]).encode()
        request = head("/hooks/signed", *signature(body), length=len(body)) + body

        def is_disconnected() -> bool:
            try:
                s.send(request)  # the answers, of 34 KB each, are never read
            except TimeoutError:
                pass
            except OSError:
                return True
            return False

        wait_for(is_disconnected, "the client is disconnected")


def test_small_chunks_are_refused_and_many_useful_ones_are_accepted(server: Server) -> None:
    chunked = ("transfer-encoding: chunked", "connection: close")
    tiny = head("/hooks/signed", *signature(b""), *chunked, length=None) + b"1\r\n \r\n" * 5000
    assert server.raw(tiny).startswith(b"HTTP/1.1 400 ")
    lines = [
        json.dumps({"url": f"https://shop.example/{n}", "text": "x" * 100}) for n in range(900)
    ]
    body = "\n".join(lines).encode()
    pieces = [line.encode() + b"\n" for line in lines[:-1]] + [lines[-1].encode()]
    sent = head(
        "/hooks/signed",
        *signature(body),
        *chunked,
        "content-type: application/x-ndjson",
        length=None,
    ) + b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    assert server.raw(sent + b"0\r\n\r\n").startswith(b"HTTP/1.1 202 ")


def test_many_pipelined_requests_are_answered_in_order(server: Server) -> None:
    """More bytes than one turn of the event loop parses."""
    sent = b""
    for n in range(300):
        body = json.dumps({"url": "https://shop.example/p/1", "text": f"{n}" * 200}).encode()
        more = ["connection: close"] if n == 299 else []
        sent += head("/hooks/signed", *signature(body, f"p{n}"), *more, length=len(body)) + body
    got = server.raw(sent)
    assert got.count(b"HTTP/1.1 202 ") == 300
    assert len(set(re.findall(rb'"ids":\["([0-9a-f]+)"\]', got))) == 300
    assert server.project.total()["accepted"] == 300
