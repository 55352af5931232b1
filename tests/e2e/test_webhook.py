"""Webhooks of real processes: durability of a 202, full queues, kills and invalid requests."""

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
    output = made.running.output
    assert "Traceback" not in output, output
    made.running.signal(signal.SIGTERM)
    assert made.running.wait() == 0, made.running.output


# -- durability of a 202 ---------------------------------------------------------------------------


@pytest.mark.slow
def test_an_event_answered_with_202_is_in_the_ledger_after_an_immediate_kill(
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
                answer = server.post(
                    {"url": f"https://shop.example/p/{round_}-{sender}-{n}"}, connection=connection
                )
                assert answer.status == 202
                ids += answer.json["ids"]
                first.set()
        except (OSError, http.client.HTTPException):
            pass  # the server was killed
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


def test_a_webhook_inside_run_is_scraped_and_a_repeated_id_is_one_event(
    project: Project, site: Site
) -> None:
    server = Server(project, "run", "shop.py")
    urls = [site.serve(f"/p/{n}", product(n)) for n in range(5)]
    first = server.post([{"url": url, "n": i} for i, url in enumerate(urls)], webhook_id="batch-1")
    again = server.post([{"url": url, "n": i} for i, url in enumerate(urls)], webhook_id="batch-1")
    assert (first.status, first.json["accepted"], first.json["known"]) == (202, 5, 0)
    assert (again.status, again.json["accepted"], again.json["known"]) == (202, 0, 5)
    assert first.json["ids"] == again.json["ids"]
    wait_for(lambda: project.written() == 5, f"rows: {server.running.output}")
    sources = {
        source["name"]: source
        for source in json.loads(project.good("sources", "ls", "--pipeline", "shop.py", "--json"))[
            "sources"
        ]
    }
    assert (sources["shop"]["events"], sources["shop"]["known"]) == (5, 5)
    server.running.signal(signal.SIGTERM)
    assert server.running.wait() == 0, server.running.output
    assert {event["source"] for event in project.events()} == {"shop"}


def test_a_full_queue_answers_503_and_accepts_all_events_when_the_sender_retries(
    project: Project, site: Site
) -> None:
    project.set(intake_max_pending="5")
    urls = [site.serve(f"/p/{n}", product(n)) for n in range(12)]
    server = Server(project)
    assert server.post(urls[:4], webhook_id="a").status == 202
    partly = server.post(urls[4:8], webhook_id="b")
    assert (partly.status, partly.json["error"]) == (503, "the queue is full")
    assert int(partly.headers["retry-after"]) >= 1
    assert project.total()["accepted"] == 4, "a request is accepted as a whole or not at all"
    assert server.post(urls[:4], webhook_id="a").json["known"] == 4, (
        "known events are accepted by a full queue"
    )
    assert server.post([urls[4]], webhook_id="c").status == 202
    assert server.post([urls[5]], webhook_id="d").status == 503
    server.running.signal(signal.SIGTERM)
    assert server.running.wait() == 0
    server.command = ("run", "shop.py")
    server.start()
    for id_, part in [("a", urls[:4]), ("b", urls[4:8]), ("c", [urls[4]]), ("e", urls[8:])]:
        wait_for(
            lambda id_=id_, part=part: server.post(part, webhook_id=id_).status == 202,
            f"{id_} is accepted: {server.running.output}",
            every=0.1,
        )
    wait_for(lambda: project.written() == 12, f"rows: {server.running.output}")
    server.running.signal(signal.SIGTERM)
    assert server.running.wait() == 0
    assert project.total()["accepted"] == 13  # two events name the same page, under two ids
    assert Counter(e["status"] for e in project.events())["success"] >= 12


def test_a_paused_webhook_answers_503_until_it_is_resumed(server: Server) -> None:
    server.project.good("sources", "pause", "shop", "--pipeline", "shop.py")
    answer = server.post({"url": "https://shop.example/p/1"})
    assert (answer.status, answer.json["error"]) == (503, "this hook is paused")
    assert server.project.total()["accepted"] == 0
    server.project.good("sources", "resume", "shop", "--pipeline", "shop.py")
    assert server.post({"url": "https://shop.example/p/1"}).status == 202


def test_a_webhook_counts_new_known_skipped_and_refused_items_as_sources_do(
    project: Project,
) -> None:
    server = Server(project, pipeline=SHOP + 'shop.source("webhook:shop", where="sku != `old`")\n')
    url = "https://shop.example/p/1"
    mixed = [{"url": url, "sku": "a"}, {"url": url, "sku": "old"}]
    assert server.post(mixed, webhook_id="1").status == 202
    assert server.post(mixed, webhook_id="1").status == 202
    # A request with a refused item is refused whole. Only its refused items are counted.
    answer = server.post([*mixed, {"url": 5}, {"url": url, "sku": "b"}], webhook_id="2")
    assert (answer.status, [r["item"] for r in answer.json["reasons"]]) == (422, [2])
    listed = json.loads(project.good("sources", "ls", "--pipeline", "shop.py", "--json"))
    (source,) = listed["sources"]
    assert {name: source[name] for name in ("events", "known", "skipped", "refused")} == {
        "events": 1,
        "known": 1,
        "skipped": 2,
        "refused": 1,
    }
    assert project.total()["accepted"] == 1
    assert project.dead_letters() == {}, "the sender has the refused items"


@pytest.mark.slow
def test_a_disk_without_writes_answers_503_and_the_retried_requests_are_accepted(
    server: Server,
) -> None:
    assert server.post({"url": "https://shop.example/p/0"}, webhook_id="0").status == 202
    _, hard = resource.prlimit(server.running.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(server.running.pid, resource.RLIMIT_FSIZE, (4096, hard))
    answers = [
        server.post({"url": f"https://shop.example/p/{n}"}, webhook_id=str(n)) for n in range(1, 4)
    ]
    resource.prlimit(server.running.pid, resource.RLIMIT_FSIZE, (hard, hard))
    assert {answer.status for answer in answers} == {503}
    assert int(answers[0].headers["retry-after"]) >= 1
    again = [
        wait_for(
            lambda n=n: _taken(server, n), f"{n} is accepted: {server.running.output}", every=0.2
        )
        for n in range(4)
    ]
    assert [answer.json["known"] for answer in again] == [1, 0, 0, 0]
    assert server.project.total()["accepted"] == 4


def _taken(server: Server, n: int) -> Answer | None:
    answer = server.post({"url": f"https://shop.example/p/{n}"}, webhook_id=str(n))
    return answer if answer.status == 202 else None


# -- the listening process -------------------------------------------------------------------------


def test_the_second_of_two_processes_with_one_port_takes_over_after_a_kill(
    project: Project,
) -> None:
    server = Server(project)
    second = project.start("serve", "shop.py")
    wait_for(lambda: "takes over when it ends" in second.output, f"it waits: {second.output}")
    assert server.post({"url": "https://shop.example/p/1"}).status == 202
    server.running.kill()
    wait_for(lambda: "listening on" in second.output, f"it took over: {second.output}")
    assert server.post({"url": "https://shop.example/p/2"}).status == 202
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
            accepted += server.post({"url": f"https://127.0.0.1:1/p/{accepted}"}).status == 202
        except OSError:
            time.sleep(0.05)
    assert accepted == 5, server.running.output
    assert listener() != first
    server.running.signal(signal.SIGTERM)
    assert server.running.wait() == 0, server.running.output
    assert project.total()["accepted"] == 5


@pytest.mark.parametrize(
    ("args", "code", "output"),
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
def test_a_server_that_cannot_or_must_not_listen_is_an_error_with_a_next_step(
    project: Project, args: tuple[str, ...], code: int, output: str
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
    assert done.code == code, done.output
    assert output in done.err
    assert "Try:" in done.err
    assert SECRET not in done.err


# -- bad requests ----------------------------------------------------------------------------------


def test_forged_stale_replayed_oversized_and_malformed_requests_make_no_event(
    server: Server,
) -> None:
    body, now = b'{"url": "https://shop.example/p/1"}', int(time.time())
    good = sign(body, "m1", now)
    assert server.post(body, hook="signed", **good).json["accepted"] == 1
    assert server.post(body, hook="signed", **good).json == server.post(
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
        answer = server.post(body, hook="signed", **forged)
        assert (answer.status, answer.json["error"]) == (
            401,
            "the request has no valid signature or token",
        )
    for sent, status in [
        (b" " * (1 << 20) + b"{}", 413),
        (b"x" * (6 << 20), 413),
        (b"{", 400),
        (b"", 400),
        (b"[" * 40_000, 400),
        (b"[" * 200_000, 413),
        (b"{}", 422),
        (b'{"url": "javascript:alert(1)"}', 422),
        (b'[{"url": "https://shop.example/p/2"}, {"url": 5}]', 422),
    ]:
        answer = server.post(sent)
        assert answer.status == status, answer.json
        assert answer.json["error"]
        assert answer.json["try"]
    assert server.post(b"{}", hook="nothing").status == 404
    assert server.post(b"{}", method="PUT").headers["allow"] == "POST"
    assert server.post(b"{}", content_type="text/plain").status == 415
    for host in ("evil.example", "[", "127.0.0.1:x", "\xff", "a b"):
        assert server.post(b'{"url": "https://shop.example/p/3"}', host=host).status == 403, host
    assert (
        server.post(b'{"url": "https://shop.example/p/3"}', origin="https://evil.example").status
        == 403
    )
    assert server.project.total()["accepted"] == 1


def test_requests_above_the_rate_limit_get_a_429_with_retry_after(project: Project) -> None:
    server = Server(project, pipeline=SHOP + 'shop.source("webhook:shop", rate="1/m", burst=2)\n')
    answers = [server.post({"url": f"https://shop.example/p/{n}"}) for n in range(4)]
    assert [answer.status for answer in answers] == [202, 202, 429, 429]
    assert 1 <= int(answers[2].headers["retry-after"]) <= 60
    assert project.total()["accepted"] == 2


def test_a_slow_client_gets_a_408_and_a_connection_over_the_limit_a_503(project: Project) -> None:
    project.set(serve_timeout="1s", serve_max_connections="3")
    server = Server(project)
    with socket.create_connection(("127.0.0.1", server.port), 60) as slow:
        slow.sendall(b"POST /hooks/shop HTTP/1.1\r\nHost: 127.0.0.1\r\n")
        assert slow.recv(4096).startswith(b"HTTP/1.1 408 ")
        with contextlib.suppress(
            ConnectionResetError
        ):  # the rest of the request arrived after the response
            assert slow.recv(4096) == b""
    with socket.create_connection(("127.0.0.1", server.port), 60) as slow:
        slow.sendall(
            b"POST /hooks/shop HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            b"Content-Length: 100\r\n\r\n{"
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
        with contextlib.suppress(OSError):  # refused before the request was sent
            return server.post({"url": "https://shop.example/p/1"}).status == 202
        return False

    wait_for(taken, "a connection is accepted again")


def test_chunked_pipelined_and_expect_requests_are_handled_by_the_rules_of_http(
    server: Server,
) -> None:
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
    both = b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    for start in (head, b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n"):
        smuggled = server.raw(start + both + plain)
        assert smuggled.startswith(b"HTTP/1.1 400 ")
        assert smuggled.count(b"HTTP/1.1 ") == 1
    assert server.raw(head + b"X-Long: " + b"x" * 40_000 + b"\r\n\r\n").startswith(b"HTTP/1.1 431 ")
    assert server.raw(head + b"X-Endless: " + b"x" * 30_000).startswith(b"HTTP/1.1 400 ")
    assert server.project.total()["accepted"] == 4


@pytest.mark.slow
def test_requests_inside_and_outside_the_schema_never_get_a_5xx(
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
def test_random_bytes_cause_no_5xx_and_the_server_continues(server: Server) -> None:
    """Send requests, broken requests and random bytes."""
    pieces = st.one_of(
        st.binary(max_size=60),
        st.sampled_from(
            [
                b"POST /hooks/shop HTTP/1.1\r\n",
                b"GET / HTTP/1.0\r\n",
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
                b"Host: 127.0.0.1\r\n",
                b"\r\n",
                b"\r\n\r\n",
                b"Content-Type: application/json\r\n",
                b"Content-Type: application/cloudevents+json\r\n",
                b"Content-Length: 10\r\n",
                b"Content-Length: -1\r\n",
                b"Transfer-Encoding: chunked\r\n",
                b"5\r\nhello\r\n",
                b"0\r\n\r\n",
                b"ffffffffffffffff\r\n",
                b"Upgrade: websocket\r\nConnection: Upgrade\r\n",
                b'{"url": "https://shop.example/p/1"}',
                b"[[[[",
                b"CONNECT a:1 HTTP/1.1\r\n",
                b"POST //hooks//shop HTTP/1.1\r\n",
                b"POST /hooks/%00 HTTP/1.1\r\n",
                b"POST http://evil.example/hooks/shop HTTP/1.1\r\n",
                b"Expect: 100-continue\r\n",
                b"webhook-id: \xff\xfe\r\n",
                b"ce-specversion: 1.0\r\n",
            ]
        ),
    )

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
    assert server.post({"url": "https://shop.example/p/1"}).status == 202


def test_only_health_and_schema_are_served_to_get_requests(server: Server) -> None:
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


def test_a_request_in_progress_is_answered_before_the_process_exits(project: Project) -> None:
    server = Server(project)
    head = (
        b"POST /hooks/shop HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        b"Content-Length: 35\r\nExpect: 100-continue\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.port), 60) as s:
        s.sendall(head)
        assert s.recv(4096) == b"HTTP/1.1 100 Continue\r\n\r\n"
        server.running.signal(signal.SIGTERM)
        wait_for(lambda: "draining" in server.running.output, "the server is draining")
        s.sendall(b'{"url": "https://shop.example/p/1"}')
        assert s.recv(4096).startswith(b"HTTP/1.1 202 ")
    assert server.running.wait() == 0
    assert project.total()["accepted"] == 1
