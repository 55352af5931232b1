"""libcurl transfers of one client: exchanges (easy handles) on an engine (a multi handle).

No policy and no proxies.
"""

from __future__ import annotations

import asyncio
import math
import os
import select
import socket
from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec
import pycurl

from penstock.model import Failure
from penstock.net.body_budget import MIN_COUNTED_BYTES, BodyMemory
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
from penstock.rules.verdict import Breach, breach

_MAX_BATCH_SECONDS = 0.01  # seconds of transfers before other tasks of the event loop run
_PAUSE: int = pycurl.WRITEFUNC_PAUSE
_POLL_IN, _POLL_OUT, _POLL_REMOVE = pycurl.POLL_IN, pycurl.POLL_OUT, pycurl.POLL_REMOVE
# Seconds. libcurl itself stops waiting for a connection after 300 s. Longer timeouts must be set.
_MAX_DEFAULT_CONNECT_TIMEOUT = 290.0
# Seconds. If the event loop is later than that, it was blocked or the machine was suspended.
_LOOP_LAG_LIMIT = 0.1
# Seconds after which a transfer is paused. libcurl would otherwise deliver everything that it has
# received, even in very small chunks.
_PAUSE_AFTER = 0.015


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


class SetUp(msgspec.Struct, frozen=True):
    """Settings that all handles of a client share."""

    guard: Guard
    options: HttpOptions
    headers: list[str]
    ca_file: str
    now: Callable[[], float]
    bodies: BodyMemory


# -- one exchange ----------------------------------------------------------------------------------


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
        "on_end",
        "parts",
        "paused_at",
        "peer",
        "pin",
        "pins",
        "pipewait",
        "plain",
        "plain_headers",
        "proxied",
        "rate_size",
        "rate_start",
        "ready_at",
        "set_up",
        "size",
        "started",
        "status",
        "target",
        "url",
        "version",
    )

    def __init__(self, set_up: SetUp) -> None:
        self.set_up, self.curl = set_up, pycurl.Curl()
        self.lines: list[bytes] = []
        self.on_end: OnEnd = ignore_result  # method of the client, set by Engine.start
        self.done: Done = ignore_result  # the client calls it with the result
        # For the client: the request's URL, its addresses from the current one on, and if it uses
        # a proxy.
        self.url, self.proxied = "", False
        self.pins: tuple[str, ...] = ()
        self.decoder: Decoder | None = None
        self.failure: Failure | None = None
        self.engine: Engine | None = None
        self.target: Target | None = None  # allowed destination: the host or the proxy
        self.counted_bytes, self.paused_at = 0, 0.0  # set by BodyMemory
        self._setup()
        self.clear()

    def _setup(self) -> None:
        o, opt = self.set_up.options, self.curl.setopt
        opt(pycurl.NOSIGNAL, 1)
        opt(pycurl.PROTOCOLS, pycurl.PROTO_HTTP | pycurl.PROTO_HTTPS)
        opt(pycurl.FOLLOWLOCATION, 0)
        opt(pycurl.NETRC, pycurl.NETRC_IGNORED)
        opt(pycurl.PROXY, "")  # also ignores proxies from the environment
        opt(pycurl.HTTP09_ALLOWED, 0)
        opt(pycurl.PATH_AS_IS, 1)  # the URL is already canonical
        opt(
            pycurl.HTTP_VERSION,
            pycurl.CURL_HTTP_VERSION_2TLS if o.http2 else pycurl.CURL_HTTP_VERSION_1_1,
        )
        opt(pycurl.BUFFERSIZE, 131072)
        opt(pycurl.MAXFILESIZE_LARGE, o.max_encoded_bytes)
        opt(pycurl.MAXAGE_CONN, o.idle_seconds)
        # Set libcurl's limit only if its default is too short: it costs a timer for each request.
        # `_check_timeouts` runs first, and reports which timeout was exceeded.
        if o.connect_timeout > _MAX_DEFAULT_CONNECT_TIMEOUT:
            opt(pycurl.CONNECTTIMEOUT_MS, int(o.connect_timeout * 1000) + 5000)
        opt(pycurl.USERAGENT, o.user_agent)
        opt(pycurl.HTTPHEADER, self.set_up.headers)
        opt(pycurl.CAINFO, self.set_up.ca_file)
        opt(pycurl.PROXY_CAINFO, self.set_up.ca_file)
        opt(pycurl.SSL_VERIFYPEER, 1)
        opt(pycurl.SSL_VERIFYHOST, 2)
        # About ten calls per page, so no Python function is used. `oversized` checks the size.
        opt(pycurl.HEADERFUNCTION, self.lines.append)
        opt(pycurl.WRITEFUNCTION, self._on_body)
        opt(pycurl.OPENSOCKETFUNCTION, self._on_open)
        opt(pycurl.PREREQFUNCTION, self._on_ready)
        self.pin, self.pipewait, self.plain, self.plain_headers = "", False, True, True

    def clear(self) -> None:
        self.lines.clear()
        self.parts: list[bytes | bytearray] = []
        self.headers: dict[str, str] | None = None
        self.decoder, self.failure, self.target, self.peer = None, None, None, ""
        self.status, self.version, self.size, self.rate_size, self.cancelled = 0, "", 0, 0, False
        self.started = self.ready_at = self.rate_start = 0.0

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
        if self.engine is not None:
            self.engine.schedule_resume(self)

    def extend_timeouts(self, late: float, now: float) -> None:
        """Extend all timeouts by the time for which this process was blocked or suspended."""
        self.started = min(now, self.started + late)
        self.ready_at = self.ready_at and min(now, self.ready_at + late)
        self.rate_start = self.rate_start and min(now, self.rate_start + late)

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
            self.failure = breach(Breach.SOCKET, e.strerror or str(e))
        except Exception as e:
            self.failure = breach(Breach.FORBIDDEN, repr(e))
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
            self.failure = breach(Breach.FORBIDDEN, repr(e))
        return 1  # PREREQFUNC_ABORT

    def _on_body(self, chunk: bytes) -> int | None:
        try:
            bodies = self.set_up.bodies
            if bodies.held_bytes > bodies.limit and not bodies.may_grow(self):
                return _PAUSE  # libcurl delivers this chunk again
            if self.headers is None:
                self.read_head()
            elif self.engine is not None and self.engine.must_pause(self):
                return _PAUSE
            self.size += len(chunk)
            if self.decoder is not None:
                self.decoder.feed(chunk)
                if (size := self.decoder.size) > MIN_COUNTED_BYTES:
                    bodies.count(self, size)
                return None
            if self.size <= self.set_up.options.max_decoded_bytes:
                if self.parts:
                    add(self.parts, chunk)
                else:
                    self.parts.append(chunk)
                if self.size > MIN_COUNTED_BYTES:
                    bodies.count(self, self.size)
                return None
            self.failure = breach(Breach.BODY, f"{self.set_up.options.max_decoded_bytes} bytes")
        except Failure as e:
            self.failure = e
        except DecodedTooLarge:
            self.failure = breach(Breach.DECODED, f"{self.set_up.options.max_decoded_bytes} bytes")
        except TooManyCodings as e:
            self.failure = breach(Breach.CODINGS, str(e))
        except BrokenCoding as e:
            self.failure = breach(Breach.CODING, str(e))
        except Exception as e:
            self.failure = breach(Breach.CODING, repr(e))
        return -1

    def read_head(self) -> dict[str, str]:
        """Parse the last head. Raise Failure if it is invalid or too large.

        Interim responses and a proxy's response precede it, trailers follow.
        """
        if (large := self.oversized()) is not None:
            raise large
        self.status, self.version, self.headers = parse_head(self.lines)
        if encoding := self.headers.get("content-encoding"):
            names = codings(encoding)
            if names:
                self.decoder = Decoder(names, self.set_up.options.max_decoded_bytes)
        return self.headers

    def head_size(self) -> int:
        return sum(map(len, self.lines))

    def oversized(self) -> Failure | None:
        """Return a failure if the head is too large.

        Checked when the head is read, and by `_check_timeouts` for a head that does not end.
        libcurl has another limit, 300 kB.
        """
        limit = self.set_up.options.max_header_bytes
        return breach(Breach.HEADERS, f"{limit} bytes") if self.head_size() > limit else None

    def take_body(self) -> bytes:
        if self.decoder is not None:
            if not self.size:
                return b""  # HEAD or 304: the header describes a body that is not sent
            return self.decoder.finish()
        return joined(self.parts)


# -- the engine ------------------------------------------------------------------------------------


class Engine:
    """A libcurl multi handle with its connection pool.

    All its sockets are in one epoll set, which the event loop watches as a single descriptor.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, options: HttpOptions) -> None:
        self._loop, self._options = loop, options
        self.active: dict[pycurl.Curl, Exchange] = {}
        self._watched: dict[int, int] = {}  # descriptor → events
        # Watched descriptors that libcurl does not wait for now. With keep-alive, it usually waits
        # for them again within milliseconds.
        self._idle: set[int] = set()
        self._run_scheduled, self._deadline = False, 0.0
        self._pause_deadline = math.inf
        self._paused: dict[Exchange, None] = {}  # paused exchanges, in the order of resuming
        self._curl_timer: asyncio.TimerHandle | None = None
        self._timeout_timer: asyncio.TimerHandle | None = None
        self._check_interval = max(
            0.01,
            min(
                0.25,
                options.connect_timeout / 4,
                options.first_byte_timeout / 4,
                options.total_timeout / 4,
                options.min_rate_span / 4,
            ),
        )
        self._epoll = select.epoll()
        self._multi = pycurl.CurlMulti()
        self._multi.setopt(pycurl.M_SOCKETFUNCTION, self._on_socket)
        # Do not limit all connections: libcurl would close idle connections to other hosts.
        self._multi.setopt(pycurl.M_MAXCONNECTS, options.max_idle)
        loop.add_reader(self._epoll.fileno(), self._on_events)

    def start(self, ex: Exchange, on_end: OnEnd) -> None:
        """Start an exchange. `on_end` is called once, by the event loop or by `stop`.

        It is not called before this method returns.
        """
        ex.engine, ex.on_end = self, on_end
        ex.started = self._loop.time()
        self._multi.add_handle(ex.curl)
        self.active[ex.curl] = ex
        self._schedule_run()
        if self._timeout_timer is None:
            self._timeout_timer = self._loop.call_later(self._check_interval, self._check_timeouts)

    def stop(self, ex: Exchange, error: tuple[int, str] | None = None) -> None:
        """End an exchange now. Its connection is closed unless the response is complete."""
        if self.active.pop(ex.curl, None) is None:
            return
        self._paused.pop(ex, None)
        self._multi.remove_handle(ex.curl)
        ex.set_up.bodies.remove(ex)
        ex.on_end(ex, error)

    def close(self) -> None:
        for ex in list(self.active.values()):
            ex.failure = breach(Breach.CLOSED)
            self.stop(ex)
        for timer in (self._curl_timer, self._timeout_timer):
            if timer is not None:
                timer.cancel()
        self._curl_timer = self._timeout_timer = None
        self._multi.close()
        self._loop.remove_reader(self._epoll.fileno())
        self._epoll.close()

    def _on_socket(self, what: int, fd: int, multi: Any, data: Any) -> None:
        if what == _POLL_REMOVE:
            if fd in self._watched:
                self._idle.add(fd)
            return
        mask = (select.EPOLLIN if what & _POLL_IN else 0) | (
            select.EPOLLOUT if what & _POLL_OUT else 0
        )
        known = self._watched.get(fd)
        if known == mask and fd in self._idle:
            self._idle.discard(fd)
            return
        self._idle.discard(fd)
        self._watched[fd] = mask
        if known is not None:
            try:
                self._epoll.modify(fd, mask)
                return
            except FileNotFoundError:
                pass  # libcurl reused the descriptor number for a new socket without a callback
        self._epoll.register(fd, mask)

    def drop_idle_descriptors(self) -> None:
        """Unregister idle descriptors. Called before a socket is created.

        The socket may get the number of an idle descriptor that was closed. The kernel has removed
        that one from the epoll set, but `_watched` still has it.
        """
        for fd in self._idle:
            self._unregister(fd)
        self._idle.clear()

    def _unregister(self, fd: int) -> None:
        del self._watched[fd]
        try:
            self._epoll.unregister(fd)
        except OSError:
            pass  # already closed

    def _set_curl_timer(self) -> None:
        """Read libcurl's timeout and set a timer.

        That is cheaper than its timer callback, which libcurl calls twice for every transfer.
        """
        milliseconds = self._multi.timeout()
        if milliseconds < 0:
            self._deadline = 0.0
        elif milliseconds == 0:
            self._schedule_run()
        else:
            # A timer that fires earlier is kept. It checks the deadline again.
            self._deadline = when = self._loop.time() + milliseconds / 1000
            if self._curl_timer is None or self._curl_timer.when() > when:
                if self._curl_timer is not None:
                    self._curl_timer.cancel()
                self._curl_timer = self._loop.call_at(when, self._on_curl_timer)

    def _schedule_run(self) -> None:
        if not self._run_scheduled:
            self._run_scheduled = True
            self._loop.call_soon(self._run_timers)

    def _on_curl_timer(self) -> None:
        self._curl_timer = None
        if not self._deadline:
            return
        if self._loop.time() >= self._deadline - 0.001:
            self._deadline = 0.0
            self._run_timers()
        else:
            self._curl_timer = self._loop.call_at(self._deadline, self._on_curl_timer)

    def _run_timers(self) -> None:
        self._run_scheduled = False
        self._pause_deadline = self._loop.time() + _PAUSE_AFTER
        if self._multi.socket_action(pycurl.SOCKET_TIMEOUT, 0)[1] != len(self.active):
            self._reap()
        self._set_curl_timer()

    def _on_events(self) -> None:
        action, running, now = self._multi.socket_action, -1, self._loop.time
        until = now() + _MAX_BATCH_SECONDS
        self._pause_deadline = until - _MAX_BATCH_SECONDS + _PAUSE_AFTER
        for fd, event in self._epoll.poll(0, 256):
            # The server usually closed this connection. libcurl notices that at the next use.
            if fd in self._idle:
                self._idle.discard(fd)
                self._unregister(fd)
                continue
            # ERR and HUP are handled by reading.
            running = action(fd, (1 if event & 25 else 0) | (2 if event & 4 else 0))[1]
            if now() > until:
                break  # the other descriptors stay readable
        if running != len(self.active):
            self._reap()
        self._set_curl_timer()

    def must_pause(self, ex: Exchange) -> bool:
        """Return True if this turn has lasted too long. The exchange then continues in another."""
        if self._loop.time() < self._pause_deadline:
            return False
        self.schedule_resume(ex)
        return True

    def schedule_resume(self, ex: Exchange) -> None:
        if not self._paused:
            self._loop.call_soon(self._resume_paused)
        self._paused[ex] = None

    def _resume_paused(self) -> None:
        if self._epoll.closed:
            return
        now = self._loop.time
        until = now() + _MAX_BATCH_SECONDS
        self._pause_deadline = until - _MAX_BATCH_SECONDS + _PAUSE_AFTER
        waiting, self._paused = self._paused, {}
        while waiting and now() < until:
            ex = next(iter(waiting))
            del waiting[ex]
            if ex.curl not in self.active:
                continue
            try:
                ex.curl.pause(pycurl.PAUSE_CONT)  # delivers received data, and may pause again
            except pycurl.error as e:
                self.stop(ex, (e.args[0], str(e.args[-1])))
        if waiting:
            if not self._paused:
                self._loop.call_soon(self._resume_paused)
            self._paused = {**waiting, **self._paused}
        self._set_curl_timer()

    def _reap(self) -> None:
        active, remove = self.active, self._multi.remove_handle
        finished: list[tuple[Exchange, tuple[int, str] | None]] = []
        queued = 1
        while queued:
            queued, good, bad = self._multi.info_read()
            for curl in good:
                remove(curl)
                finished.append((active.pop(curl), None))
            for curl, code, message in bad:
                remove(curl)
                finished.append((active.pop(curl), (code, message)))
        for ex, error in finished:
            if ex.counted_bytes or ex.paused_at:
                ex.set_up.bodies.remove(ex)
            try:
                ex.on_end(ex, error)
            except Exception as e:  # a bug, which must not affect the other exchanges
                self._loop.call_exception_handler(
                    {"message": "the result of an exchange could not be delivered", "exception": e}
                )

    def _check_timeouts(self) -> None:
        """Check all timeouts.

        libcurl has no timeout for the first byte, and a timer for each request costs more than this
        loop.
        """
        now, o = self._loop.time(), self._options
        behind = now - self._timeout_timer.when() if self._timeout_timer is not None else 0.0
        self._timeout_timer = None
        # This process was suspended or blocked. Responses that arrived are not read yet.
        if behind > _LOOP_LAG_LIMIT:
            for ex in self.active.values():
                ex.extend_timeouts(behind, now)
        late: list[tuple[Exchange, Failure]] = []
        for ex in self.active.values():
            if ex.paused_at:
                continue  # paused by this process, not by the server
            age = now - ex.started
            if age > o.total_timeout:
                late.append((ex, breach(Breach.TOTAL, f"{o.total_timeout:g} s")))
            elif not ex.ready_at:
                if age > o.connect_timeout:
                    late.append((ex, breach(Breach.CONNECT, f"{o.connect_timeout:g} s")))
            elif not ex.lines:
                if now - ex.ready_at > o.first_byte_timeout:
                    late.append((ex, breach(Breach.FIRST_BYTE, f"{o.first_byte_timeout:g} s")))
            elif ex.headers is None and (large := ex.oversized()) is not None:
                late.append((ex, large))
            elif not ex.rate_start:
                ex.rate_start, ex.rate_size = now, ex.size + ex.head_size()
            elif now - ex.rate_start >= o.min_rate_span:
                got = ex.size + ex.head_size()
                if got - ex.rate_size < o.min_rate * (now - ex.rate_start):
                    late.append(
                        (
                            ex,
                            breach(
                                Breach.RATE,
                                f"{o.min_rate:g} bytes a second over {o.min_rate_span:g} s",
                            ),
                        )
                    )
                ex.rate_start, ex.rate_size = now, got
        for ex, failure in late:
            ex.failure = failure
            self.stop(ex)
        if self.active:
            self._timeout_timer = self._loop.call_later(self._check_interval, self._check_timeouts)
