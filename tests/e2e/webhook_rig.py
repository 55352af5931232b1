"""A process that serves webhooks, and a sender of HTTP requests and raw bytes."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import http.client
import json
import socket
from typing import Any

from tests.e2e.harness import SHOP, Project, Running, free_port, wait_for

SECRET = base64.b64encode(bytes(range(32))).decode()
HOOKS = (
    SHOP
    + '\nshop.source("webhook:shop")\nshop.source("webhook:signed", secret="whsec_'
    + SECRET
    + '")\n'
)
JSON = {"content-type": "application/json"}


class Answer:
    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status, self.headers = response.status, response.headers
        self.json: dict[str, Any] = json.loads(response.read())


class Server:
    """A `penstock serve` (or `run`) process and its port."""

    def __init__(self, project: Project, *command: str, pipeline: str = HOOKS) -> None:
        self.project, self.port = project, free_port()
        project.write("shop.py", pipeline)
        project.set(serve_port=str(self.port))
        self.command = command or ("serve", "shop.py")
        self.running: Running
        self.start()

    def start(self) -> None:
        self.running = self.project.start(*self.command)
        wait_for(
            lambda: self.running.ended or "listening on" in self.running.output,
            "the server listens",
        )
        assert not self.running.ended, self.running.output

    def connect(self, timeout: float = 60) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)

    def post(
        self,
        body: Any,
        *,
        hook: str = "shop",
        method: str = "POST",
        connection: http.client.HTTPConnection | None = None,
        **headers: str,
    ) -> Answer:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        used = connection or self.connect()
        try:
            # The server may respond and close before everything is sent. The response is readable.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                used.request(
                    method,
                    f"/hooks/{hook}",
                    raw,
                    {**JSON, **{name.replace("_", "-"): value for name, value in headers.items()}},
                )
            return Answer(used.getresponse())
        finally:
            if connection is None:
                used.close()

    def raw(self, sent: bytes, *, end: bool = False) -> bytes:
        """Send bytes. Return everything that the server sends until it closes.

        `end` closes the sending side after the bytes.
        """
        with socket.create_connection(("127.0.0.1", self.port), 60) as s:
            got = b""
            with contextlib.suppress(ConnectionError):  # the server responded and closed early
                s.sendall(sent)
                if end:
                    s.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionError):
                while chunk := s.recv(65536):
                    got += chunk
            return got


def sign(body: bytes, id_: str, at: int) -> dict[str, Any]:
    """Return the headers of a signature, as keyword arguments of `Server.post`."""
    digest = hmac.new(
        base64.b64decode(SECRET), f"{id_}.{at}.".encode() + body, hashlib.sha256
    ).digest()
    return {
        "webhook_id": id_,
        "webhook_timestamp": str(at),
        "webhook_signature": "v1," + base64.b64encode(digest).decode(),
    }
