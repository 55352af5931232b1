"""HTTP/1.1 for the test web server: values, strict parsing with limits, encoding.

No sockets and no event loop.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import AsyncIterable, Mapping
from dataclasses import dataclass, field
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qsl

MAX_HEAD = 32 * 1024
MAX_HEADERS = 100
MAX_BODY = 8 * 1024 * 1024
MAX_CHUNK_LINE = 4096

HTML, TEXT, JSON, XML = (
    "text/html; charset=utf-8",
    "text/plain; charset=utf-8",
    "application/json",
    "application/xml; charset=utf-8",
)

_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_HEX = re.compile(rb"[0-9A-Fa-f]{1,8}")
_BODILESS = frozenset((204, 304))
_STATUS_LINES = {s.value: f"HTTP/1.1 {s.value} {s.phrase}\r\n" for s in HTTPStatus}


@dataclass(frozen=True, slots=True)
class Request:
    """A client's request. Header names are lower case. A repeated header is joined with commas."""

    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    body: bytes
    port: int

    @property
    def host(self) -> str:
        return self.headers.get("host", "")

    @property
    def params(self) -> dict[str, str]:
        return dict(parse_qsl(self.query, keep_blank_values=True))


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer, sent after `delay` seconds.

    `drop` resets the connection instead. `raw` is sent unchanged, and the connection is closed.
    """

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    delay: float = 0.0
    drop: bool = False
    raw: bytes | AsyncIterable[bytes] | None = None


def reply(body: str | bytes, kind: str = HTML, status: int = 200, **headers: str) -> Reply:
    """Return a reply with a content type. `retry_after="3"` becomes `retry-after: 3`."""
    named = {
        "content-type": kind,
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    return Reply(status, named, body.encode() if isinstance(body, str) else body)


def json_reply(value: Any, status: int = 200, **headers: str) -> Reply:
    return reply(json.dumps(value, ensure_ascii=False), JSON, status, **headers)


def tagged(request: Request, answer: Reply) -> Reply:
    """Return the answer with an ETag of its body, or 304 if the client already has that body.

    Tags are compared weakly (RFC 9110).
    """
    etag = f'"{hashlib.blake2b(answer.body, digest_size=12).hexdigest()}"'
    wanted = request.headers.get("if-none-match")
    if wanted is not None and (
        wanted.strip() == "*"
        or etag in (tag.strip().removeprefix("W/") for tag in wanted.split(","))
    ):
        return Reply(304, {"etag": etag}, delay=answer.delay)
    return Reply(answer.status, {**answer.headers, "etag": etag}, answer.body, answer.delay)


class Refused(Exception):
    """The request is malformed or exceeds a limit.

    The server answers with this status and closes the connection.
    """

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.reply = reply(reason + "\n", TEXT, status)


@dataclass(slots=True)
class Head:
    """A request whose head is complete and whose body may still arrive."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    keep: bool
    length: int | None  # None if chunked
    body: bytearray = field(default_factory=bytearray)
    trailing: bool = False  # True after the last chunk


def take_head(buffer: bytearray) -> Head | None:
    """Remove the head from the buffer, or return None while it is incomplete. Raise Refused."""
    end = buffer.find(b"\r\n\r\n", 0, MAX_HEAD)
    if end < 0:
        if len(buffer) >= MAX_HEAD:
            raise Refused(431, "request head too large")
        return None
    head = parse_head(bytes(buffer[:end]))
    del buffer[: end + 4]
    return head


def parse_head(raw: bytes) -> Head:
    first, *lines = raw.decode("latin-1").split("\r\n")
    try:
        method, target, version = first.split(" ")
    except ValueError:
        raise Refused(400, "malformed request line") from None
    if version not in ("HTTP/1.1", "HTTP/1.0"):
        raise Refused(505, "HTTP/1.0 and HTTP/1.1 only")
    if not _TOKEN.fullmatch(method) or _CONTROL.search(target):
        raise Refused(400, "malformed request line")
    if target[:7].lower() == "http://":  # absolute form, as in requests to a proxy
        target = "/" + target[7:].partition("/")[2]
    if not target.startswith("/") and target != "*":
        raise Refused(400, "malformed request target")
    if len(lines) > MAX_HEADERS:
        raise Refused(431, "too many headers")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not _TOKEN.fullmatch(name) or _CONTROL.search(value):
            raise Refused(400, "malformed header")
        name, value = name.lower(), value.strip(" \t")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    if version == "HTTP/1.1" and ("host" not in headers or "," in headers["host"]):
        raise Refused(400, "exactly one Host header is required")
    connection = headers.get("connection", "").lower()
    keep = "close" not in connection and (version == "HTTP/1.1" or "keep-alive" in connection)
    path, _, query = target.partition("?")
    return Head(method, path, query, headers, keep, _body_length(headers))


def _body_length(headers: Mapping[str, str]) -> int | None:
    digits = headers.get("content-length")
    if "transfer-encoding" in headers:
        if digits is not None or headers["transfer-encoding"].lower() != "chunked":
            # Request smuggling uses this ambiguity.
            raise Refused(400, "chunked, or a content-length, not both")
        return None
    if digits is None:
        return 0
    if not (digits.isascii() and digits.isdigit()):
        raise Refused(400, "malformed content-length")
    if len(digits) > 12 or int(digits) > MAX_BODY:
        raise Refused(413, "body too large")
    return int(digits)


def take_body(head: Head, buffer: bytearray) -> bool:
    """Move received body bytes from the buffer to the head. Return True when it is complete.

    Raise Refused.
    """
    if head.length is None:
        return _take_chunks(head, buffer)
    if len(buffer) < head.length:
        return False
    if head.length:
        head.body = buffer[: head.length]
        del buffer[: head.length]
    return True


def _take_chunks(head: Head, buffer: bytearray) -> bool:
    while True:
        end = buffer.find(b"\r\n", 0, MAX_CHUNK_LINE)
        if end < 0:
            if len(buffer) >= MAX_CHUNK_LINE:
                raise Refused(400, "chunk header too large")
            return False
        if head.trailing:  # trailers are read and ignored
            del buffer[: end + 2]
            if end == 0:
                return True
            continue
        digits = bytes(buffer[:end]).partition(b";")[0].rstrip(b" \t")
        if not _HEX.fullmatch(digits):
            raise Refused(400, "malformed chunk")
        size = int(digits, 16)
        if size == 0:
            head.trailing = True
            del buffer[: end + 2]
            continue
        if len(head.body) + size > MAX_BODY:
            raise Refused(413, "body too large")
        if len(buffer) < end + size + 4:
            return False
        if buffer[end + size + 2 : end + size + 4] != b"\r\n":
            raise Refused(400, "malformed chunk")
        head.body += buffer[end + 2 : end + 2 + size]
        del buffer[: end + size + 4]


@lru_cache(maxsize=4)
def _date(second: int) -> str:
    return formatdate(second, usegmt=True)


def encode(answer: Reply, *, head_only: bool = False, keep: bool = True) -> bytes:
    lines = [_STATUS_LINES.get(answer.status) or f"HTTP/1.1 {answer.status} Unnamed\r\n"]
    lines += [f"{name}: {value}\r\n" for name, value in answer.headers.items()]
    if answer.status not in _BODILESS:
        lines.append(f"content-length: {len(answer.body)}\r\n")
    lines.append(f"date: {_date(int(time.time()))}\r\n")
    lines.append("\r\n" if keep else "connection: close\r\n\r\n")
    head = "".join(lines).encode("latin-1")
    return head if head_only or answer.status in _BODILESS else head + answer.body
