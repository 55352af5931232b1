"""Webhooks against real processes: what a 202 promises, what a full queue or a dead process costs,
and that no bytes harm the server.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import resource
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from tests.e2e.harness import SHOP, Project, Site, product, wait_for
from tests.e2e.webhook_rig import HOOKS, SECRET, Answer, Server, sign

from penstock.intake.openapi import document


@pytest.fixture
def server(project: Project) -> Iterator[Server]:
    made = Server(project)
    yield made
    said = made.running.said
    assert "Traceback" not in said, said
    made.running.signal(signal.SIGTERM)
    assert made.running.wait() == 0, made.running.said


# -- what a 202 promises ---------------------------------------------------------------------------


@pytest.mark.slow
def test_what_was_answered_with_202_is_in_the_books_however_soon_the_process_is_killed(
    project: Project,
) -> None:
    server = Server(project, pipeline=SHOP + 'shop.source("webhook:shop", rate="unlimited")\n')
    promised: set[str] = set()
    unknown = 0

    def send(round_: int, sender: int, first: threading.Event) -> list[str]:
        ids: list[str] = []
        connection = server.connect()
        try:
            for n in range(10_000):
                answer = server.tell(
                    {"url": f"https://shop.example/p/{round_}-{sender}-{n}"}, connection=connection
                )
                assert answer.status == 202
                ids += answer.json["ids"]
                first.set()
        except (OSError, http.client.HTTPException):
            pass  # it was killed
        finally:
            connection.close()
        return ids

    for round_ in range(10):
        answered = threading.Event()
        with ThreadPoolExecutor(8) as pool:
            senders = [pool.submit(send, round_, sender, answered) for sender in range(8)]
            assert answered.wait(60)
            if round_ % 2:
                time.sleep(0.05 * round_)
            server.running.kill()  # in even rounds right after an answer
            for sender in senders:
                promised.update(sender.result())
                unknown += 1
        if round_ < 9:
            server.start()
    print(f"{len(promised)} answers of 202 in 10 rounds")
    assert len(promised) >= 10
    found = {event["event_id"] for event in project.events()}
    assert promised <= found
    assert len(found) <= len(promised) + unknown, (
        "each killed sender had at most one request without an answer"
    )
    project.doctor()


def test_a_hook_inside_run_has_its_pages_scraped_and_a_repeated_id_is_one_event(
    project: Project, site: Site
) -> None:
    server = Server(project, "run", "shop.py")
    urls = [site.serve(f"/p/{n}", product(n)) for n in range(5)]
    first = server.tell([{"url": url, "n": i} for i, url in enumerate(urls)], webhook_id="batch-1")
    again = server.tell([{"url": url, "n": i} for i, url in enumerate(urls)], webhook_id="batch-1")
    assert (first.status, first.json["accepted"], first.json["known"]) == (202, 5, 0)
    assert (again.status, again.json["accepted"], again.json["known"]) == (202, 0, 5)
    assert first.json["ids"] == again.json["ids"]
    wait_for(lambda: project.written() == 5, f"rows: {server.running.said}")
    sources = {
        source["name"]: source
        for source in json.loads(project.good("sources", "ls", "--pipeline", "shop.py", "--json"))[
            "sources"
        ]
    }
    assert (sources["shop"]["events"], sources["shop"]["known"]) == (5, 5)
    server.running.signal(signal.SIGTERM)
    assert server.running.wait() == 0, server.running.said
    assert {event["source"] for event in project.events()} == {"shop"}


def test_a_full_queue_is_a_503_that_accepts_nothing_and_the_senders_retry_loses_nothing(
    project: Project, site: Site
) -> None:
    project.set(intake_max_pending="5")
    urls = [site.serve(f"/p/{n}", product(n)) for n in range(12)]
    server = Server(project)
    assert server.tell(urls[:4], webhook_id="a").status == 202
    partly = server.tell(urls[4:8], webhook_id="b")
    assert (partly.status, partly.json["error"]) == (503, "the queue is full")
    assert int(partly.headers["retry-after"]) >= 1
    assert project.total()["accepted"] == 4, "all of a request or nothing"
    assert server.tell(urls[:4], webhook_id="a").json["known"] == 4, "what is known needs no room"
    assert server.tell([urls[4]], webhook_id="c").status == 202
    assert server.tell([urls[5]], webhook_id="d").status == 503
    server.running.signal(signal.SIGTERM)
    assert server.running.wait() == 0
    server.command = ("run", "shop.py")
    server.start()
    for id_, part in [("a", urls[:4]), ("b", urls[4:8]), ("c", [urls[4]]), ("e", urls[8:])]:
        wait_for(
            lambda id_=id_, part=part: server.tell(part, webhook_id=id_).status == 202,
            f"{id_} is taken: {server.running.said}",
            every=0.1,
        )
    wait_for(lambda: project.written() == 12, f"rows: {server.running.said}")
    server.running.signal(signal.SIGTERM)
    assert server.running.wait() == 0
    assert project.total()["accepted"] == 13  # one page was named twice, under two ids
    assert Counter(e["status"] for e in project.events())["success"] >= 12


def test_a_paused_hook_asks_its_senders_to_come_again(server: Server) -> None:
    server.project.good("sources", "pause", "shop", "--pipeline", "shop.py")
    answer = server.tell({"url": "https://shop.example/p/1"})
    assert (answer.status, answer.json["error"]) == (503, "this hook is paused")
    assert server.project.total()["accepted"] == 0
    server.project.good("sources", "resume", "shop", "--pipeline", "shop.py")
    assert server.tell({"url": "https://shop.example/p/1"}).status == 202


@pytest.mark.slow
def test_while_the_disk_takes_nothing_the_answer_is_a_503_and_afterwards_all_is_as_promised(
    server: Server,
) -> None:
    assert server.tell({"url": "https://shop.example/p/0"}, webhook_id="0").status == 202
    _, hard = resource.prlimit(server.running.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(server.running.pid, resource.RLIMIT_FSIZE, (4096, hard))
    answers = [
        server.tell({"url": f"https://shop.example/p/{n}"}, webhook_id=str(n)) for n in range(1, 4)
    ]
    resource.prlimit(server.running.pid, resource.RLIMIT_FSIZE, (hard, hard))
    assert {answer.status for answer in answers} == {503}
    assert int(answers[0].headers["retry-after"]) >= 1
    again = [
        wait_for(lambda n=n: _taken(server, n), f"{n} is taken: {server.running.said}", every=0.2)
        for n in range(4)
    ]
    assert [answer.json["known"] for answer in again] == [1, 0, 0, 0]
    assert server.project.total()["accepted"] == 4


def _taken(server: Server, n: int) -> Answer | None:
    answer = server.tell({"url": f"https://shop.example/p/{n}"}, webhook_id=str(n))
    return answer if answer.status == 202 else None


# -- who listens -----------------------------------------------------------------------------------


def test_of_two_processes_with_one_port_the_second_takes_over_when_the_first_is_killed(
    project: Project,
) -> None:
    server = Server(project)
    second = project.start("serve", "shop.py")
    wait_for(lambda: "takes over when it ends" in second.said, f"it waits: {second.said}")
    assert server.tell({"url": "https://shop.example/p/1"}).status == 202
    server.running.kill()
    wait_for(lambda: "listening on" in second.said, f"it took over: {second.said}")
    assert server.tell({"url": "https://shop.example/p/2"}).status == 202
    second.signal(signal.SIGTERM)
    assert second.wait() == 0
    assert project.total()["accepted"] == 2


@pytest.mark.slow
def test_of_several_workers_one_listens_and_another_takes_over(project: Project) -> None:
    server = Server(project, "run", "shop.py", "--workers", "3")

    def listener() -> int:
        sources = json.loads(project.good("sources", "ls", "--pipeline", "shop.py", "--json"))[
            "sources"
        ]
        return int(sources[0]["worker"].split("-")[-2])

    first = listener()
    os.kill(first, signal.SIGKILL)
    accepted = 0
    until = time.monotonic() + 60
    while accepted < 5 and time.monotonic() < until:
        try:
            accepted += server.tell({"url": f"https://127.0.0.1:1/p/{accepted}"}).status == 202
        except OSError:
            time.sleep(0.05)
    assert accepted == 5, server.running.said
    assert listener() != first
    server.running.signal(signal.SIGTERM)
    assert server.running.wait() == 0, server.running.said
    assert project.total()["accepted"] == 5


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (("--host", "0.0.0.0"), 3, "the hook is unsigned, and others can reach serve.host 0.0.0.0"),
        (("--host", "::"), 3, "the hook is unsigned, and others can reach serve.host ::"),
        (("--host", "203.0.113.7", "-o", "pipeline=signed.py"), 3, "is no address of this machine"),
        (("--host", "shop.example"), 3, "an IP address of this machine"),
        (("--port", "TAKEN"), 4, "another program listens there"),
        (("-o", "pipeline=none.py"), 3, "the pipeline has no source"),
        (("-o", "pipeline=twice.py"), 3, "two sources are served at /hooks/shop"),
    ],
)
def test_where_it_cannot_or_must_not_listen_is_said_before_it_does(
    project: Project, args: tuple[str, ...], code: int, said: str
) -> None:
    project.write("shop.py", HOOKS)
    project.write("none.py", SHOP)
    project.write("twice.py", HOOKS + 'shop.source("webhook:shop", name="other")\n')
    project.write("signed.py", SHOP + f'shop.source("webhook:signed", secret="whsec_{SECRET}")\n')
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        given_ = [arg.replace("TAKEN", str(taken.getsockname()[1])) for arg in args]
        done = project.penstock("serve", *given_, *([] if "-o" in args else ["shop.py"]))
    assert done.code == code, done.said
    assert said in done.err
    assert "Try:" in done.err
    assert SECRET not in done.err


# -- bad requests ----------------------------------------------------------------------------------


def test_forged_stale_replayed_oversized_and_malformed_requests_make_no_event(
    server: Server,
) -> None:
    body, now = b'{"url": "https://shop.example/p/1"}', int(time.time())
    good = sign(body, "m1", now)
    assert server.tell(body, hook="signed", **good).json["accepted"] == 1
    assert server.tell(body, hook="signed", **good).json == server.tell(
        body, hook="signed", **good
    ).json | {"known": 1, "accepted": 0}
    for forged in (
        {},
        sign(body, "m2", now - 301),
        sign(body, "m2", int(time.time()) + 330),
        sign(body + b" ", "m2", now),
        {**good, "webhook_id": "m2"},
        {**good, "webhook_signature": good["webhook_signature"] + "junk"},
    ):
        answer = server.tell(body, hook="signed", **forged)
        assert (answer.status, answer.json["error"]) == (
            401,
            "the request has no valid signature or token",
        )
    for sent, status in [
        (b" " * (1 << 20) + b"{}", 413),
        (b"x" * (6 << 20), 413),
        (b"{", 400),
        (b"", 400),
        (b"[" * 200_000, 400),
        (b"{}", 422),
        (b'{"url": "javascript:alert(1)"}', 422),
        (b'[{"url": "https://shop.example/p/2"}, {"url": 5}]', 422),
    ]:
        answer = server.tell(sent)
        assert answer.status == status, answer.json
        assert answer.json["error"]
        assert answer.json["try"]
    assert server.tell(b"{}", hook="nothing").status == 404
    assert server.tell(b"{}", method="PUT").headers["allow"] == "POST"
    assert server.tell(b"{}", content_type="text/plain").status == 415
    for host in ("evil.example", "[", "127.0.0.1:x", "\xff", "a b"):
        assert server.tell(b'{"url": "https://shop.example/p/3"}', host=host).status == 403, host
    assert (
        server.tell(b'{"url": "https://shop.example/p/3"}', origin="https://evil.example").status
        == 403
    )
    assert server.project.total()["accepted"] == 1


def test_more_requests_than_the_rate_are_told_when_to_come_again(project: Project) -> None:
    server = Server(project, pipeline=SHOP + 'shop.source("webhook:shop", rate="1/m", burst=2)\n')
    answers = [server.tell({"url": f"https://shop.example/p/{n}"}) for n in range(4)]
    assert [answer.status for answer in answers] == [202, 202, 429, 429]
    assert 1 <= int(answers[2].headers["retry-after"]) <= 60
    assert project.total()["accepted"] == 2


def test_who_dawdles_is_sent_away_and_there_are_only_so_many(project: Project) -> None:
    project.set(serve_timeout="1s", serve_max_connections="3")
    server = Server(project)
    with socket.create_connection(("127.0.0.1", server.port), 60) as slow:
        slow.sendall(b"POST /hooks/shop HTTP/1.1\r\nHost: 127.0.0.1\r\n")
        assert slow.recv(4096).startswith(b"HTTP/1.1 408 ")
        with contextlib.suppress(ConnectionResetError):  # what we sent came after it
            assert slow.recv(4096) == b""
    with socket.create_connection(("127.0.0.1", server.port), 60) as slow:
        slow.sendall(
            b"POST /hooks/shop HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
        )
        assert slow.recv(4096).startswith(b"HTTP/1.1 408 ")
    project.set(serve_timeout="60s")
    server.running.signal(signal.SIGTERM)
    assert server.running.wait() == 0
    server.start()
    held = [socket.create_connection(("127.0.0.1", server.port), 60) for _ in range(3)]
    for s in held:
        s.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert s.recv(4096).startswith(b"HTTP/1.1 200 ")
    with socket.create_connection(("127.0.0.1", server.port), 60) as fourth:
        assert fourth.recv(4096).startswith(b"HTTP/1.1 503 ")
    for s in held:
        s.close()

    def taken() -> bool:
        with contextlib.suppress(OSError):  # sent away before it had said what it wanted
            return server.tell({"url": "https://shop.example/p/1"}).status == 202
        return False

    wait_for(taken, "there is room again")


def test_chunked_pipelined_and_expecting_requests_are_read_as_http_says(server: Server) -> None:
    head = b"POST /hooks/shop HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    body = b'{"url": "https://shop.example/p/1"}'
    chunked = (
        head
        + b"Transfer-Encoding: chunked\r\n\r\n"
        + b"".join(b"1\r\n%c\r\n" % byte for byte in body)
        + b"0\r\n\r\n"
    )
    last = head + b"Connection: close\r\nContent-Length: 2\r\n\r\n{}"  # makes no event
    assert server.raw(chunked + last).count(b"HTTP/1.1 202 ") == 1
    plain = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    assert server.raw(plain * 3 + last).count(b"HTTP/1.1 202 ") == 3
    endless = (
        head
        + b"Transfer-Encoding: chunked\r\n\r\n"
        + (b"10000\r\n" + b" " * 0x10000 + b"\r\n") * 40
    )
    assert b"HTTP/1.1 413 " in server.raw(endless)
    with socket.create_connection(("127.0.0.1", server.port), 60) as s:
        s.sendall(head + b"Expect: 100-continue\r\nContent-Length: 99999999\r\n\r\n")
        assert s.recv(4096).startswith(b"HTTP/1.1 413 "), "refused before it was sent"
    smuggled = head + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + plain
    assert server.raw(smuggled).startswith(b"HTTP/1.1 400 ")
    assert server.raw(head + b"X-Long: " + b"x" * 40_000 + b"\r\n\r\n").startswith(b"HTTP/1.1 431 ")
    assert server.raw(head + b"X-Endless: " + b"x" * 30_000).startswith(b"HTTP/1.1 400 ")
    assert server.project.total()["accepted"] == 4


@pytest.mark.slow
def test_whatever_the_schema_allows_and_much_that_it_does_not_never_ends_in_a_5xx(
    server: Server,
) -> None:
    described = document()
    described["paths"]["/hooks/{name}"]["post"]["parameters"][0]["schema"] = {
        "enum": ["shop", "signed"]
    }
    operation = schemathesis.openapi.from_dict(described)["/hooks/{name}"]["POST"]
    seen: Counter[int] = Counter()
    cases = st.one_of(
        operation.as_strategy(generation_mode=GenerationMode.POSITIVE),
        operation.as_strategy(generation_mode=GenerationMode.NEGATIVE),
    )

    @settings(
        max_examples=300,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(cases)
    def fuzz(case: Any) -> None:
        response = case.call(base_url=f"http://127.0.0.1:{server.port}")
        seen[response.status_code] += 1
        assert response.status_code < 500
        assert response.headers["content-type"] == ["application/json"]
        found = response.json()
        assert "accepted" in found if response.status_code == 202 else found["error"]
        assert str(response.status_code) in described["paths"]["/hooks/{name}"]["post"]["responses"]

    fuzz()
    print(dict(seen))
    assert {202, 401} < set(seen)


@pytest.mark.slow
def test_no_bytes_at_all_harm_the_server(server: Server) -> None:
    """Requests, requests that are nearly none, and noise."""
    pieces = st.one_of(
        st.binary(max_size=60),
        st.sampled_from([
            b"POST /hooks/shop HTTP/1.1\r\n", b"GET / HTTP/1.0\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"Host: 127.0.0.1\r\n", b"\r\n", b"\r\n\r\n",
            b"Content-Type: application/json\r\n", b"Content-Type: application/cloudevents+json\r\n", b"Content-Length: 10\r\n", b"Content-Length: -1\r\n",
            b"Transfer-Encoding: chunked\r\n", b"5\r\nhello\r\n", b"0\r\n\r\n", b"ffffffffffffffff\r\n", b"Upgrade: websocket\r\nConnection: Upgrade\r\n",
            b'{"url": "https://shop.example/p/1"}', b"[[[[", b"CONNECT a:1 HTTP/1.1\r\n", b"POST //hooks//shop HTTP/1.1\r\n", b"POST /hooks/%00 HTTP/1.1\r\n",
            b"POST http://evil.example/hooks/shop HTTP/1.1\r\n", b"Expect: 100-continue\r\n", b"webhook-id: \xff\xfe\r\n", b"ce-specversion: 1.0\r\n",
        ]),
    )  # fmt: skip

    @settings(
        max_examples=300,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(pieces, max_size=8).map(b"".join))
    def fuzz(sent: bytes) -> None:
        got = server.raw(sent, end=True)
        assert b"Traceback" not in got
        assert b"HTTP/1.1 5" not in got

    fuzz()
    assert server.tell({"url": "https://shop.example/p/1"}).status == 202


def test_health_and_schema_are_served_and_nothing_else(server: Server) -> None:
    for path, status in [
        ("/healthz", 200),
        ("/openapi.json", 200),
        ("/", 404),
        ("/hooks", 404),
        ("/hooks/", 404),
        ("/hooks/shop/", 404),
        ("/docs", 404),
    ]:
        connection = server.connect()
        connection.request("GET", path)
        answer = Answer(connection.getresponse())
        connection.close()
        assert answer.status == status, path
        assert "server" not in answer.headers


def test_a_request_under_way_is_answered_before_the_process_ends(project: Project) -> None:
    server = Server(project)
    head = b"POST /hooks/shop HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 35\r\nExpect: 100-continue\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), 60) as s:
        s.sendall(head)
        assert s.recv(4096) == b"HTTP/1.1 100 Continue\r\n\r\n"
        server.running.signal(signal.SIGTERM)
        wait_for(lambda: "draining" in server.running.said, "it was told")
        s.sendall(b'{"url": "https://shop.example/p/1"}')
        assert s.recv(4096).startswith(b"HTTP/1.1 202 ")
    assert server.running.wait() == 0
    assert project.total()["accepted"] == 1
