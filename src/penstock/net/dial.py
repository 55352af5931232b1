"""Checks that a proxy answers, without a request to any site."""

from __future__ import annotations

import base64
import socket
from urllib.parse import unquote, urlsplit

from penstock.errors import Unreachable

# RFC 9110, section 7.6.2: with Max-Forwards 0 the proxy itself answers, and forwards nothing.
_REQUEST = (
    "OPTIONS http://penstock.invalid/ HTTP/1.1\r\nHost: penstock.invalid\r\nMax-Forwards: 0\r\n"
    "{authorization}Connection: close\r\n\r\n"
)


def probe_proxy(dsn: str, label: str, timeout: float) -> str:
    """Connect to a proxy and return the result in words. Raises OSError or Unreachable.

    An `http` proxy must answer a request. Of other proxies only the connection is checked.
    """
    parts = urlsplit(dsn)
    with socket.create_connection((parts.hostname or "", parts.port or 0), timeout) as s:
        if parts.scheme != "http":
            return "accepts connections"
        credentials = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}"
        authorization = (
            f"Proxy-Authorization: Basic {base64.b64encode(credentials.encode()).decode()}\r\n"
            if parts.username
            else ""
        )
        s.sendall(_REQUEST.format(authorization=authorization).encode())
        try:
            answer = s.recv(4096)
        except TimeoutError:
            raise Unreachable(f"{label} accepts connections and does not answer") from None
    if not answer.startswith(b"HTTP/"):
        raise Unreachable(f"{label} is not an HTTP proxy")
    if answer[8:13].strip().startswith(b"407"):
        raise Unreachable(
            f"{label} refuses the credentials (407)", hint="check user and password of the proxy"
        )
    return "answers"
