"""What libcurl does for one client: exchanges (an easy handle and its answer) on an engine (a multi
handle on its own epoll set). No policy, no proxy.
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
from penstock.net.body_budget import SMALL, Bodies
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

_SLICE = 0.01  # seconds of transfers before the loop gets its turn again
_PAUSE: int = pycurl.WRITEFUNC_PAUSE
_POLL_IN, _POLL_OUT, _POLL_REMOVE = pycurl.POLL_IN, pycurl.POLL_OUT, pycurl.POLL_REMOVE
_PATIENCE = 290.0  # seconds; libcurl itself waits 300 for a connection
_LATE = 0.1  # seconds that a busy loop may be behind; beyond that it stood still
# seconds after which a transfer has to stop in the middle: libcurl goes on with all that it has
# received, in crumbs if need be
_REST = 0.015


class HttpOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Limits and identity; every one of them holds for each exchange."""

    user_agent: str = "Penstock/0.1 (+https://penstock.invalid/bot)"
    accept: str = (
        "text/html,application/xhtml+xml,application/xml;q=0.9,application/json;q=0.8,*/*;q=0.5"
    )
    connect_timeout: float = 10.0  # until the request can be sent: TCP, proxy and TLS
    first_byte_timeout: float = 30.0
    total_timeout: float = 90.0
    min_rate: float = 256.0  # bytes a second, over each `min_rate_span`
    min_rate_span: float = 20.0
    max_header_bytes: int = 64 << 10
    max_encoded_bytes: int = 16 << 20
    max_decoded_bytes: int = 16 << 20
    max_held_bytes: int = 64 << 20  # of all bodies under way together
    max_idle: int = 1024  # connections kept warm; those in use are not limited here
    idle_seconds: int = 60
    http2: bool = True
    ca_file: str | None = None
    remote_dns: bool = False  # lets proxies resolve names: the guard then sees no address


class SetUp(msgspec.Struct, frozen=True):
    """What every handle of a client has in common."""

    guard: Guard
    options: HttpOptions
    headers: list[str]
    ca_file: str
    now: Callable[[], float]
    bodies: Bodies


# -- one exchange ----------------------------------------------------------------------------------


class _Lent:
    """A descriptor on its way to libcurl: pycurl duplicates what `fileno` says, and the original is
    closed when this goes.
    """

    __slots__ = ("_fd",)

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def fileno(self) -> int:
        return self._fd

    def __del__(self) -> None:
        os.close(self._fd)


Ended: TypeAlias = Callable[
    ["Exchange", "tuple[int, str] | None"], None
]  # with libcurl's error, if there is one


def nobody(*_: object) -> None:
    """Waits for this exchange."""


class Exchange:
    """An easy handle and what it is receiving. Reused: setting up a handle costs more than a
    request.
    """

    __slots__ = (
        "cancelled", "counted", "curl", "decoder", "done", "ended", "engine", "failure", "headers", "lines", "mark", "mark_size", "parts", "peer", "pin",
        "pins", "plain", "plain_headers", "proxied", "ready_at", "set_up", "since", "size", "started", "status", "target", "url", "version", "waits",
    )  # fmt: skip

    def __init__(self, set_up: SetUp) -> None:
        self.set_up, self.curl = set_up, pycurl.Curl()
        self.lines: list[bytes] = []
        self.ended: Ended = nobody  # the client's, set by Engine.start
        self.done: Done = nobody  # whom the client tells; url, pins and proxied are its notes too
        self.url, self.proxied = "", False
        self.pins: tuple[str, ...] = ()
        self.decoder: Decoder | None = None
        self.failure: Failure | None = None
        self.engine: Engine | None = None
        self.target: Target | None = None  # whom we may be connected to: the host, or the proxy
        self.counted, self.since = 0, 0.0  # by Bodies
        self._setup()
        self.clear()

    def _setup(self) -> None:
        o, opt = self.set_up.options, self.curl.setopt
        opt(pycurl.NOSIGNAL, 1)
        opt(pycurl.PROTOCOLS, pycurl.PROTO_HTTP | pycurl.PROTO_HTTPS)
        opt(pycurl.FOLLOWLOCATION, 0)
        opt(pycurl.NETRC, pycurl.NETRC_IGNORED)
        opt(pycurl.PROXY, "")  # not even one from the environment
        opt(pycurl.HTTP09_ALLOWED, 0)
        opt(pycurl.PATH_AS_IS, 1)  # the URL is canonical already, by our parser
        opt(
            pycurl.HTTP_VERSION,
            pycurl.CURL_HTTP_VERSION_2TLS if o.http2 else pycurl.CURL_HTTP_VERSION_1_1,
        )
        opt(pycurl.BUFFERSIZE, 131072)
        opt(pycurl.MAXFILESIZE_LARGE, o.max_encoded_bytes)
        opt(pycurl.MAXAGE_CONN, o.idle_seconds)
        if (
            o.connect_timeout > _PATIENCE
        ):  # the sweep comes first and says what was late; else a timer for each request is for nothing
            opt(pycurl.CONNECTTIMEOUT_MS, int(o.connect_timeout * 1000) + 5000)
        opt(pycurl.USERAGENT, o.user_agent)
        opt(pycurl.HTTPHEADER, self.set_up.headers)
        opt(pycurl.CAINFO, self.set_up.ca_file)
        opt(pycurl.PROXY_CAINFO, self.set_up.ca_file)
        opt(pycurl.SSL_VERIFYPEER, 1)
        opt(pycurl.SSL_VERIFYHOST, 2)
        opt(
            pycurl.HEADERFUNCTION, self.lines.append
        )  # ten calls a page: no frame of ours for each. Their size is looked at below
        opt(pycurl.WRITEFUNCTION, self._on_body)
        opt(pycurl.OPENSOCKETFUNCTION, self._on_open)
        opt(pycurl.PREREQFUNCTION, self._on_ready)
        self.pin, self.waits, self.plain, self.plain_headers = "", False, True, True

    def clear(self) -> None:
        self.lines.clear()
        self.parts: list[bytes | bytearray] = []
        self.headers: dict[str, str] | None = None
        self.decoder, self.failure, self.target, self.peer = None, None, None, ""
        self.status, self.version, self.size, self.mark_size, self.cancelled = 0, "", 0, 0, False
        self.started = self.ready_at = self.mark = 0.0

    def restore(self) -> None:
        """Back to a plain GET, with nothing left of this request's headers, body or proxy."""
        if not self.plain:
            self.curl.reset()
            self._setup()
        elif not self.plain_headers:
            self.curl.setopt(pycurl.HTTPHEADER, self.set_up.headers)
            self.plain_headers = True
        self.clear()

    def aim(self, url: str, target: Target, pin: str) -> None:
        """`pin`: the checked address to dial for a name; libcurl then never looks it up.
        Connections are reused per name and address.
        """
        self.target = target
        self.curl.setopt(pycurl.URL, url)
        # Under TLS a request waits for the handshake that is under way, which may bring HTTP/2 and
        # room for all. Without TLS it would wait for somebody else's answer.
        if (waits := url.startswith("https:")) is not self.waits:
            self.curl.setopt(pycurl.PIPEWAIT, int(waits))
            self.waits = waits
        if pin != self.pin:
            if pin:
                self.curl.setopt(pycurl.CONNECT_TO, [f"::[{pin}]:" if ":" in pin else f"::{pin}:"])
            else:
                self.curl.unsetopt(pycurl.CONNECT_TO)
            self.pin = pin

    def cancel(self) -> None:
        """As a task's, where there is none: whoever waits for the answer is told so at once."""
        if self.engine is not None:
            self.cancelled = True
            self.engine.stop(self)

    def go_on(self, waited: float) -> None:
        """There is room again. The time was ours, not the server's."""
        self.started += waited
        self.mark = 0.0
        if self.engine is not None:
            self.engine.go_on_soon(self)

    def put_off(self, late: float, now: float) -> None:
        """We stood still for so long. That time was ours as well."""
        self.started = min(now, self.started + late)
        self.ready_at = self.ready_at and min(now, self.ready_at + late)
        self.mark = self.mark and min(now, self.mark + late)

    # libcurl calls these. An exception would be printed and lost, so each ends the transfer by its
    # return value.

    def _on_open(self, purpose: int, address: Any) -> Any:
        try:
            if self.engine is not None:
                self.engine.let_go()
            self.set_up.guard.check_peer(address.addr[0], address.addr[1], self.target)
            return _Lent(socket.socket(address.family, address.socktype, address.protocol).detach())
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
            if bodies.held > bodies.room and not bodies.lets(self):
                return _PAUSE  # this chunk comes again
            if self.headers is None:
                self.read_head()
            elif self.engine is not None and self.engine.rests(self):
                return _PAUSE
            self.size += len(chunk)
            if self.decoder is not None:
                self.decoder.feed(chunk)
                if (size := self.decoder.size) > SMALL:
                    bodies.count(self, size)
                return None
            if self.size <= self.set_up.options.max_decoded_bytes:
                if self.parts:
                    add(self.parts, chunk)
                else:
                    self.parts.append(chunk)
                if self.size > SMALL:
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
        """Parse the last head received: interim answers and a proxy's own come before it, trailers
        after. Raises Failure.
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
        """Looked at when it is read; libcurl has a limit of its own, 300 kB, and the sweep sees one
        that does not end.
        """
        limit = self.set_up.options.max_header_bytes
        return breach(Breach.HEADERS, f"{limit} bytes") if self.head_size() > limit else None

    def take_body(self) -> bytes:
        if self.decoder is not None:
            if not self.size:
                return b""  # HEAD, 304: the coding of a body that is not here
            return self.decoder.finish()
        return joined(self.parts)


# -- the engine ------------------------------------------------------------------------------------


class Engine:
    """A libcurl multi handle and its connection pool, on one epoll set that the event loop watches
    as a single descriptor.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, options: HttpOptions) -> None:
        self._loop, self._options = loop, options
        self.active: dict[pycurl.Curl, Exchange] = {}
        self._watched: dict[int, int] = {}  # descriptor → events
        self._idle: set[int] = (
            set()
        )  # of these, the ones that libcurl does not wait for now: with keep-alive it will again in a moment
        self._kicked, self._deadline = False, 0.0
        self._turn_ends = math.inf
        self._resting: dict[Exchange, None] = {}  # in the order in which they go on
        self._alarm: asyncio.TimerHandle | None = None
        self._sweep: asyncio.TimerHandle | None = None
        self._tick = max(
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
        # No limit on connections in all: libcurl would close idle ones to other hosts to keep it.
        self._multi.setopt(pycurl.M_MAXCONNECTS, options.max_idle)
        loop.add_reader(self._epoll.fileno(), self._on_events)

    def start(self, ex: Exchange, ended: Ended) -> None:
        """`ended` is called once, by the loop or by `stop`; not before this returns."""
        ex.engine, ex.ended = self, ended
        ex.started = self._loop.time()
        self._multi.add_handle(ex.curl)
        self.active[ex.curl] = ex
        self._kick_soon()
        if self._sweep is None:
            self._sweep = self._loop.call_later(self._tick, self._on_sweep)

    def stop(self, ex: Exchange, error: tuple[int, str] | None = None) -> None:
        """End it now, wherever it is; its connection is closed unless the answer was complete."""
        if self.active.pop(ex.curl, None) is None:
            return
        self._resting.pop(ex, None)
        self._multi.remove_handle(ex.curl)
        ex.set_up.bodies.leave(ex)
        ex.ended(ex, error)

    def close(self) -> None:
        for ex in list(self.active.values()):
            ex.failure = breach(Breach.CLOSED)
            self.stop(ex)
        for timer in (self._alarm, self._sweep):
            if timer is not None:
                timer.cancel()
        self._alarm = self._sweep = None
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
                pass  # the number was given to a new socket without a word
        self._epoll.register(fd, mask)

    def let_go(self) -> None:
        """Before a new socket is made: it may get the number of an idle one that was closed, which
        the kernel has forgotten and we have not.
        """
        for fd in self._idle:
            self._forget(fd)
        self._idle.clear()

    def _forget(self, fd: int) -> None:
        del self._watched[fd]
        try:
            self._epoll.unregister(fd)
        except OSError:
            pass  # closed already

    def _set_alarm(self) -> None:
        """libcurl would tell us of its timer with every transfer, twice: asking it after each turn
        is cheaper.
        """
        milliseconds = self._multi.timeout()
        if milliseconds < 0:
            self._deadline = 0.0
        elif milliseconds == 0:
            self._kick_soon()
        else:
            # The alarm is left standing if it rings early enough, and looks again then.
            self._deadline = when = self._loop.time() + milliseconds / 1000
            if self._alarm is None or self._alarm.when() > when:
                if self._alarm is not None:
                    self._alarm.cancel()
                self._alarm = self._loop.call_at(when, self._on_alarm)

    def _kick_soon(self) -> None:
        if not self._kicked:
            self._kicked = True
            self._loop.call_soon(self._kick)

    def _on_alarm(self) -> None:
        self._alarm = None
        if not self._deadline:
            return
        if self._loop.time() >= self._deadline - 0.001:
            self._deadline = 0.0
            self._kick()
        else:
            self._alarm = self._loop.call_at(self._deadline, self._on_alarm)

    def _kick(self) -> None:
        self._kicked = False
        self._turn_ends = self._loop.time() + _REST
        if self._multi.socket_action(pycurl.SOCKET_TIMEOUT, 0)[1] != len(self.active):
            self._reap()
        self._set_alarm()

    def _on_events(self) -> None:
        action, running, now = self._multi.socket_action, -1, self._loop.time
        until = now() + _SLICE
        self._turn_ends = until - _SLICE + _REST
        for fd, event in self._epoll.poll(0, 256):
            if fd in self._idle:  # the other end closed it, mostly; libcurl finds out when it looks
                self._idle.discard(fd)
                self._forget(fd)
                continue
            running = action(fd, (1 if event & 25 else 0) | (2 if event & 4 else 0))[
                1
            ]  # ERR and HUP are found by reading
            if now() > until:
                break  # what is left stays readable
        if running != len(self.active):
            self._reap()
        self._set_alarm()

    def rests(self, ex: Exchange) -> bool:
        """Has this turn lasted too long? Then the exchange goes on in another."""
        if self._loop.time() < self._turn_ends:
            return False
        self.go_on_soon(ex)
        return True

    def go_on_soon(self, ex: Exchange) -> None:
        if not self._resting:
            self._loop.call_soon(self._go_on)
        self._resting[ex] = None

    def _go_on(self) -> None:
        if self._epoll.closed:
            return
        now = self._loop.time
        until = now() + _SLICE
        self._turn_ends = until - _SLICE + _REST
        waiting, self._resting = self._resting, {}
        while waiting and now() < until:
            ex = next(iter(waiting))
            del waiting[ex]
            if ex.curl not in self.active:
                continue
            try:
                ex.curl.pause(pycurl.PAUSE_CONT)  # delivers what it had received; may rest again
            except pycurl.error as e:
                self.stop(ex, (e.args[0], str(e.args[-1])))
        if waiting:
            if not self._resting:
                self._loop.call_soon(self._go_on)
            self._resting = {**waiting, **self._resting}
        self._set_alarm()

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
            if ex.counted or ex.since:
                ex.set_up.bodies.leave(ex)
            try:
                ex.ended(ex, error)
            except Exception as e:  # a bug: the others must not suffer
                self._loop.call_exception_handler(
                    {"message": "an answer could not be passed on", "exception": e}
                )

    def _on_sweep(self) -> None:
        """Time-outs, all of them: libcurl has none for the first byte, and a timer for each request
        costs more than this walk.
        """
        now, o = self._loop.time(), self._options
        behind = now - self._sweep.when() if self._sweep is not None else 0.0
        self._sweep = None
        if (
            behind > _LATE
        ):  # suspended, starved or blocked: what was answered meanwhile is still to be read
            for ex in self.active.values():
                ex.put_off(behind, now)
        late: list[tuple[Exchange, Failure]] = []
        for ex in self.active.values():
            if ex.since:
                continue  # it waits for us
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
            elif not ex.mark:
                ex.mark, ex.mark_size = now, ex.size + ex.head_size()
            elif now - ex.mark >= o.min_rate_span:
                got = ex.size + ex.head_size()
                if got - ex.mark_size < o.min_rate * (now - ex.mark):
                    late.append(
                        (
                            ex,
                            breach(
                                Breach.RATE,
                                f"{o.min_rate:g} bytes a second over {o.min_rate_span:g} s",
                            ),
                        )
                    )
                ex.mark, ex.mark_size = now, got
        for ex, why in late:
            ex.failure = why
            self.stop(ex)
        if self.active:
            self._sweep = self._loop.call_later(self._tick, self._on_sweep)
