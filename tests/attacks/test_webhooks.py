"""Strangers that send webhook requests, while a signed sender and the fetcher work."""

from __future__ import annotations

import contextlib
import http.client
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.attacks import senders
from tests.attacks.harness import Ground, survives
from tests.attacks.senders import ATTACKS
from tests.e2e.harness import SHOP, free_port
from tests.e2e.webhook_rig import JSON, SECRET, sign

SIGNED = 30  # requests of the signed sender. All of them must be accepted.
EVERY = 0.15  # seconds between two of them
PIPELINE = (
    SHOP
    + '\nshop.source("webhook:shop")\n'
    + f'shop.source("webhook:signed", secret="whsec_{SECRET}", rate="20/s", burst=10)\n'
)


@pytest.mark.parametrize("attack", [each.__name__ for each in ATTACKS])
def test_a_stranger_stops_no_signed_request_and_no_page(tmp_path: Path, attack: str) -> None:
    @contextlib.contextmanager
    def during(g: Ground, attacked: bool) -> Iterator[None]:
        port = int(g.project.env["PENSTOCK_SERVE_PORT"])
        answers: Counter[object] = Counter()
        sender = threading.Thread(target=lambda: answers.update(_send(g, port)), name="signed")
        with _stranger(attack, port) if attacked else contextlib.nullcontext():
            sender.start()
            yield
            sender.join()
        assert answers == {202: SIGNED}, answers

    survives(
        tmp_path,
        lambda g: [],
        pipeline=PIPELINE,
        during=during,
        seconds=SIGNED * EVERY + 2,
        serve_port=str(free_port()),
    )


@contextlib.contextmanager
def _stranger(attack: str, port: int) -> Iterator[None]:
    """Run an attack in a separate process."""
    command = (sys.executable, senders.__file__, attack, str(port))
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8"
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "begun\n"
        yield
        process.stdin.close()
        process.stdin = None
        sent = int(process.stdout.readline())
        print(f"{attack}: {sent} connections of the stranger")
        assert sent >= 10
    finally:
        process.kill()
        process.communicate()  # also closes the pipes


def _send(g: Ground, port: int) -> Iterator[object]:
    """Send signed requests, each on a new connection. Yield the status of each, or the error."""
    for n in range(SIGNED):
        time.sleep(EVERY)
        body = json.dumps({"url": g.hostile.url(f"/signed/{n}")}).encode()
        headers = sign(body, f"signed-{n}", int(time.time()))
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request(
                "POST",
                "/hooks/signed",
                body,
                JSON | {name.replace("_", "-"): value for name, value in headers.items()},
            )
            yield connection.getresponse().status
        except (OSError, http.client.HTTPException) as e:
            yield type(e).__name__
        finally:
            connection.close()
