"""Exchanges: easy handles of libcurl, and the responses that they receive."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import pycurl

from penstock.model import Failure, Reason
from penstock.net.decoding import (
    BrokenCoding,
    DecodedTooLarge,
    Decoder,
    TooManyCodings,
    add,
    codings,
    joined,
)
from penstock.net.guard import Guard, Target
from penstock.net.headers import parse_head
from penstock.ports import Done
from penstock.rules.identity import host_key
from penstock.rules.speed import HIGHEST, SHORTEST, Scarcity
from penstock.rules.verdict import breach

if TYPE_CHECKING:
    from penstock.net.transfer import Engine

_PAUSE: int = pycurl.WRITEFUNC_PAUSE
# Bytes. Bodies up to this size are not counted: there are many, but their total size is small.
_MIN_COUNTED_BYTES = 1 << 16
# Bytes. Smaller bodies are never paused for memory. Otherwise, one server that fills the memory and
# then sends slowly would stop the pages of all hosts.
_MIN_PAUSED_BYTES = 1 << 17
# Seconds. libcurl itself stops waiting for a connection after 300 s. Longer timeouts must be set.
_MAX_DEFAULT_CONNECT_TIMEOUT = 290.0


class HttpOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Identity and limits of a client. Each limit applies to each exchange, unless noted."""

    user_agent: str = "Penstock/0.1 (+https://penstock.invalid/bot)"
    accept: str = (
        "text/html,application/xhtml+xml,application/xml;q=0.9,application/json;q=0.8,*/*;q=0.5"
    )
    connect_timeout: float = 10.0  # seconds until the request can be sent: TCP, proxy and TLS
    first_byte_timeout: float = 30.0
    total_timeout: float = 90.0
    min_rate: float = 256.0  # bytes per second, over each `min_rate_span`
    min_rate_span: float = 20.0
    max_header_bytes: int = 64 << 10
    max_encoded_bytes: int = 16 << 20
    max_decoded_bytes: int = 16 << 20
    max_held_bytes: int = 64 << 20  # of all bodies in progress together
    max_idle: int = 1024  # idle connections kept open. Connections in use are not limited here.
    idle_seconds: int = 60
    http2: bool = True
    ca_file: str | None = None
    # Proxies resolve names. The guard then does not see the address.
    remote_dns: bool = False


class BodyMemory:
    """Limits the memory of response bodies in progress.

    Above the limit small bodies and one large body may continue, so that at least one can finish.
    Other large bodies are paused when they receive data, until an exchange ends. The large body
    that continues must be fast while others are paused (`rules.speed`). The smallest is resumed
    first.
    """

    def __init__(self, limit: int, now: Callable[[], float]) -> None:
        self.limit, self.held_bytes = limit, 0
        self._now = now
        self._over_limit: Exchange | None = None
        self._paused: dict[Exchange, None] = {}

    def may_grow(self, ex: Exchange) -> bool:
        """Return True if the exchange may continue above the limit, False if it is paused."""
        if ex.counted_bytes <= _MIN_PAUSED_BYTES and (ex.decoder is None or ex.decoder.is_lean):
            return True
        if self._over_limit is None:
            self._over_limit = ex
            ex.mark(self._now())
            self.count(ex, max(1, ex.counted_bytes))  # a counted exchange calls `remove` at its end
        if self._over_limit is ex:
            return True
        if not ex.paused_at:
            ex.paused_at = self._now()
            self._paused[ex] = None
        return False

    def waits_for(self, ex: Exchange) -> bool:
        """Return True if paused bodies wait for the end of this exchange."""
        return self._over_limit is ex and bool(self._paused)

    def count(self, ex: Exchange, size: int) -> None:
        self.held_bytes += size - ex.counted_bytes
        ex.counted_bytes = size

    def remove(self, ex: Exchange) -> None:
        """Remove an ended exchange, and resume paused ones if possible.

        Only needed for an exchange that is counted or paused.
        """
        self.held_bytes -= ex.counted_bytes
        ex.counted_bytes, ex.paused_at = 0, 0.0
        self._paused.pop(ex, None)
        if self._over_limit is ex:
            self._over_limit = None
        if self._paused and (self._over_limit is None or self.held_bytes <= self.limit):
            paused, self._paused, now = self._paused, {}, self._now()
            for other in sorted(paused, key=lambda ex: ex.counted_bytes):
                waited, other.paused_at = now - other.paused_at, 0.0
                other.resume(waited)


class SetUp(msgspec.Struct, frozen=True):
    """Settings that all handles of a client share."""

    guard: Guard
    options: HttpOptions
    headers: list[str]
    ca_file: str
    now: Callable[[], float]
    bodies: BodyMemory


class _SocketForCurl:
    """Socket descriptor for libcurl. pycurl duplicates the result of `fileno`, and the original is
    closed with this object.
    """

    __slots__ = ("_fd",)

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def fileno(self) -> int:
        return self._fd

    def __del__(self) -> None:
        os.close(self._fd)


# Called with libcurl's error, or None.
OnEnd: TypeAlias = Callable[["Exchange", "tuple[int, str] | None"], None]


def ignore_result(*_: object) -> None:
    """Ignore the result. Callback of an exchange that no caller waits for."""


class Exchange:
    """An easy handle and the response that it receives.

    Exchanges are reused, because creating a handle costs more than a request.
    """

    __slots__ = (
        "cancelled",
        "counted_bytes",
        "curl",
        "decoder",
        "done",
        "engine",
        "failure",
        "headers",
        "lines",
        "marked_at",
        "marked_size",
        "on_end",
        "parts",
        "paused_at",
        "peer",
        "pin",
        "pins",
        "pipewait",
        "plain",
        "plain_headers",
        "proxy",
        "rate_size",
        "rate_start",
        "ready_at",
        "set_up",
        "size",
        "started",
        "status",
        "taken",
        "target",
        "url",
        "version",
    )

    def __init__(self, set_up: SetUp) -> None:
        self.set_up, self.curl = set_up, pycurl.Curl()
        self.lines: list[bytes] = []
        self.on_end: OnEnd = ignore_result  # method of the client, set by Engine.start
        self.done: Done = ignore_result  # the client calls it with the result
        # For the client: the request's URL, its addresses from the current one on, and the URL of
        # its proxy.
        self.url = ""
        self.proxy: str | None = None
        self.pins: tuple[str, ...] = ()
        self.decoder: Decoder | None = None
        self.failure: Failure | None = None
        self.engine: Engine | None = None
        self.target: Target | None = None  # allowed destination: the host or the proxy
        # Set by BodyMemory: bytes of the body that are counted, and when this exchange was paused
        # (0 if it is not paused).
        self.counted_bytes, self.paused_at = 0, 0.0
        # Bytes received until `marked_at`, the time from which the speed is measured while permits
        # are scarce. It is measured from the start if `marked_at` is 0.
        self.marked_size = 0
        self._setup()
        self.clear()

    def _setup(self) -> None:
        o = self.set_up.options
        version = pycurl.CURL_HTTP_VERSION_2TLS if o.http2 else pycurl.CURL_HTTP_VERSION_1_1
        settings: list[tuple[int, Any]] = [
            (pycurl.NOSIGNAL, 1),
            (pycurl.PROTOCOLS, pycurl.PROTO_HTTP | pycurl.PROTO_HTTPS),
            (pycurl.FOLLOWLOCATION, 0),
            (pycurl.NETRC, pycurl.NETRC_IGNORED),
            (pycurl.PROXY, ""),  # also ignores proxies from the environment
            (pycurl.HTTP09_ALLOWED, 0),
            (pycurl.PATH_AS_IS, 1),  # the URL is already canonical
            (pycurl.HTTP_VERSION, version),
            (pycurl.BUFFERSIZE, 131072),
            (pycurl.MAXFILESIZE_LARGE, o.max_encoded_bytes),
            (pycurl.MAXAGE_CONN, o.idle_seconds),
            (pycurl.USERAGENT, o.user_agent),
            (pycurl.HTTPHEADER, self.set_up.headers),
            (pycurl.CAINFO, self.set_up.ca_file),
            (pycurl.PROXY_CAINFO, self.set_up.ca_file),
            (pycurl.SSL_VERIFYPEER, 1),
            (pycurl.SSL_VERIFYHOST, 2),
            # About ten calls per page, so no Python function is used. `oversized` checks the size.
            (pycurl.HEADERFUNCTION, self.lines.append),
            (pycurl.WRITEFUNCTION, self._on_body),
            (pycurl.OPENSOCKETFUNCTION, self._on_open),
            (pycurl.PREREQFUNCTION, self._on_ready),
        ]
        # Set libcurl's limit only if its default is too short: it costs a timer for each request.
        # `overdue` is called first, and reports which timeout was exceeded.
        if o.connect_timeout > _MAX_DEFAULT_CONNECT_TIMEOUT:
            settings.append((pycurl.CONNECTTIMEOUT_MS, int(o.connect_timeout * 1000) + 5000))
        for option, value in settings:
            self.curl.setopt(option, value)
        self.pin, self.pipewait, self.plain, self.plain_headers = "", False, True, True

    def clear(self) -> None:
        self.lines.clear()
        self.parts: list[bytes | bytearray] = []
        self.headers: dict[str, str] | None = None
        self.decoder, self.failure, self.target, self.peer = None, None, None, ""
        self.status, self.version, self.size, self.rate_size, self.cancelled = 0, "", 0, 0, False
        self.taken = 0  # bytes of a paused chunk that the decoder has
        self.started = self.ready_at = self.rate_start = self.marked_at = 0.0

    def restore(self) -> None:
        """Reset to a plain GET, without headers, body and proxy of the last request."""
        if not self.plain:
            self.curl.reset()
            self._setup()
        elif not self.plain_headers:
            self.curl.setopt(pycurl.HTTPHEADER, self.set_up.headers)
            self.plain_headers = True
        self.clear()

    def set_target(self, url: str, target: Target, pin: str) -> None:
        """Set URL and destination. `pin` is the checked address of a name, "" for none.

        With a pin, libcurl does not resolve the name. Connections are reused per name and address.
        """
        self.target = target
        self.curl.setopt(pycurl.URL, url)
        # With TLS, wait for a handshake in progress: HTTP/2 may allow all requests on its
        # connection. Without TLS, the request would wait for the response of another one.
        if (pipewait := url.startswith("https:")) is not self.pipewait:
            self.curl.setopt(pycurl.PIPEWAIT, int(pipewait))
            self.pipewait = pipewait
        if pin != self.pin:
            if pin:
                self.curl.setopt(pycurl.CONNECT_TO, [f"::[{pin}]:" if ":" in pin else f"::{pin}:"])
            else:
                self.curl.unsetopt(pycurl.CONNECT_TO)
            self.pin = pin

    def cancel(self) -> None:
        """Cancel the exchange like a task. Calls `done` with CancelledError before it returns."""
        if self.engine is not None:
            self.cancelled = True
            self.engine.stop(self)

    def resume(self, waited: float) -> None:
        """Resume after a pause for memory. The pause does not count for the server's timeouts."""
        self.started += waited
        self.rate_start = 0.0
        self.mark(self.set_up.now())
        if self.engine is not None:
            self.engine.schedule_resume(self)

    def mark(self, now: float) -> None:
        """Measure the speed from now on."""
        self.marked_at, self.marked_size = now, self.size + self.head_size()

    def extend_timeouts(self, late: float, now: float) -> None:
        """Extend all timeouts by the time for which this process was blocked or suspended."""
        self.started = min(now, self.started + late)
        self.ready_at = self.ready_at and min(now, self.ready_at + late)
        self.rate_start = self.rate_start and min(now, self.rate_start + late)
        self.marked_at = self.marked_at and min(now, self.marked_at + late)

    # Callbacks of libcurl. An exception would be printed and lost, so each callback ends the
    # transfer by its return value.

    def _on_open(self, purpose: int, address: Any) -> Any:
        try:
            if self.engine is not None:
                self.engine.drop_idle_descriptors()
            self.set_up.guard.check_peer(address.addr[0], address.addr[1], self.target)
            return _SocketForCurl(
                socket.socket(address.family, address.socktype, address.protocol).detach()
            )
        except Failure as e:
            self.failure = e
        except OSError as e:
            self.failure = breach(Reason.SOCKET, e.strerror or str(e))
        except Exception as e:
            self.failure = breach(Reason.FORBIDDEN, repr(e))
        return pycurl.SOCKET_BAD

    def _on_ready(self, peer: str, local: str, port: int, local_port: int) -> int:
        try:
            self.set_up.guard.check_peer(peer, port, self.target)
            self.peer = f"[{peer}]:{port}" if ":" in peer else f"{peer}:{port}"
            self.ready_at = self.set_up.now()
            return 0
        except Failure as e:
            self.failure = e
        except Exception as e:
            self.failure = breach(Reason.FORBIDDEN, repr(e))
        return 1  # PREREQFUNC_ABORT

    def _on_body(self, chunk: bytes) -> int | None:
        try:
            bodies = self.set_up.bodies
            if self.headers is None:
                self.read_head()
            elif self.engine is not None and self.engine.must_pause(self):
                return _PAUSE
            if bodies.held_bytes > bodies.limit and not bodies.may_grow(self):
                return _PAUSE  # libcurl delivers this chunk again
            if self.decoder is not None:
                return self._decode(chunk, self.decoder)
            self.size += len(chunk)
            if self.size <= self.set_up.options.max_decoded_bytes:
                if self.parts:
                    add(self.parts, chunk)
                else:
                    self.parts.append(chunk)
                if self.size > _MIN_COUNTED_BYTES:
                    bodies.count(self, self.size)
                return None
            self.failure = breach(Reason.BODY, f"{self.set_up.options.max_decoded_bytes} bytes")
        except Failure as e:
            self.failure = e
        except DecodedTooLarge as e:
            self.failure = breach(Reason.DECODED, str(e))
        except TooManyCodings as e:
            self.failure = breach(Reason.CODINGS, str(e))
        except BrokenCoding as e:
            self.failure = breach(Reason.CODING, str(e))
        except Exception as e:
            self.failure = breach(Reason.CODING, repr(e))
        return -1

    def _decode(self, chunk: bytes, decoder: Decoder) -> int | None:
        """Decode a chunk in bounded steps. Return _PAUSE if it continues in another turn.

        libcurl then delivers the chunk again, possibly with more bytes behind it. The decoder has
        already taken its first `taken` bytes.
        """
        bodies, engine, size = self.set_up.bodies, self.engine, len(chunk)
        if self.taken:
            decoded = decoder.proceed()
        else:
            self.size += size
            self.taken = size
            decoded = decoder.start(chunk)
        while True:
            if (held := decoder.held_bytes) > _MIN_COUNTED_BYTES:
                bodies.count(self, held)
            if decoded:
                if self.taken >= size:
                    self.taken -= size
                    return None
                rest = chunk[self.taken :]
                self.size += len(rest)
                self.taken = size
                decoded = decoder.start(rest)
                continue
            if engine is not None and engine.must_pause(self):
                return _PAUSE
            if bodies.held_bytes > bodies.limit and not bodies.may_grow(self):
                return _PAUSE
            decoded = decoder.proceed()

    def read_head(self) -> dict[str, str]:
        """Parse the last head. Raise Failure if it is invalid or too large.

        Interim responses and a proxy's response precede it, trailers follow.
        """
        if (large := self.oversized()) is not None:
            raise large
        self.status, self.version, self.headers = parse_head(self.lines)
        encoding = self.headers.get("content-encoding")
        if encoding and (names := codings(encoding)):
            self.decoder = Decoder(names, self.set_up.options.max_decoded_bytes)
        return self.headers

    def overdue(self, now: float, scarcity: Scarcity | None = None) -> Failure | None:
        """Return a failure if a timeout has expired, or if the server sends too slowly.

        libcurl has no timeout for the first byte, and a timer for each request costs more than a
        periodic call for all exchanges.
        """
        o = self.set_up.options
        age = now - self.started
        if scarcity is not None and scarcity.affects(host_key(self.url, by="domain")):
            if text := self._slower_than(scarcity.speed, scarcity.span, now):
                return breach(Reason.SLOW, text)
        elif self.set_up.bodies.waits_for(self) and (
            text := self._slower_than(HIGHEST, SHORTEST, now)
        ):
            return breach(Reason.RATE, f"{text} while other bodies wait for memory")
        if age > o.total_timeout:
            return breach(Reason.TOTAL, f"{o.total_timeout:g} s")
        if not self.ready_at:
            late = age > o.connect_timeout
            return breach(Reason.CONNECT, f"{o.connect_timeout:g} s") if late else None
        if not self.lines:
            late = now - self.ready_at > o.first_byte_timeout
            return breach(Reason.FIRST_BYTE, f"{o.first_byte_timeout:g} s") if late else None
        if self.headers is None and (large := self.oversized()) is not None:
            return large
        span = now - self.rate_start
        if self.rate_start and span < o.min_rate_span:
            return None
        got = self.size + self.head_size()
        slow = self.rate_start and got - self.rate_size < o.min_rate * span
        self.rate_start, self.rate_size = now, got
        text = f"{o.min_rate:g} bytes a second over {o.min_rate_span:g} s"
        return breach(Reason.RATE, text) if slow else None

    def _slower_than(self, lowest: float, span: float, now: float) -> str:
        """Return the speed as text if it is below the lowest one, "" otherwise.

        All phases count: the connection, the proxy, the wait for the first byte, head and body.
        """
        seconds = now - (self.marked_at or self.started)
        if seconds < span:
            return ""
        got = self.size + self.head_size() - (self.marked_size if self.marked_at else 0)
        if got < lowest * seconds:
            return f"{got / seconds:.0f} bytes a second over {seconds:.0f} s, below {lowest:.0f}"
        self.mark(now)
        return ""

    def head_size(self) -> int:
        return sum(map(len, self.lines))

    def wire_bytes(self) -> int:
        """Return the HTTP bytes that were sent and received, without decoding.

        Bytes of TLS, TCP and IP are not included.
        """
        info = self.curl.getinfo
        return int(
            info(pycurl.REQUEST_SIZE)
            + info(pycurl.HEADER_SIZE)
            + info(pycurl.SIZE_UPLOAD)
            + info(pycurl.SIZE_DOWNLOAD)
        )

    def oversized(self) -> Failure | None:
        """Return a failure if the head is too large.

        Checked when the head is read, and by `overdue` for a head that does not end.
        libcurl has another limit, 300 kB.
        """
        limit = self.set_up.options.max_header_bytes
        return breach(Reason.HEADERS, f"{limit} bytes") if self.head_size() > limit else None

    def take_body(self) -> bytes:
        if self.decoder is None:
            return joined(self.parts)
        # HEAD or 304: the header describes a body that is not sent.
        return self.decoder.finish() if self.size else b""
