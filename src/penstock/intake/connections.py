"""Connections of the HTTP server: their number, their time limits, and the order of closing."""

from __future__ import annotations

import asyncio
import math
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from penstock.intake.endpoint import MAX_HEAD, error
from penstock.rules.senders import address_group

# Seconds in which a connection without a request is not closed for another one after a response.
# The client may be sending its next request.
IDLE_GRACE = 1.0
# Seconds in which a new connection is not closed for another one. Its request may be there already,
# and then it is processed.
NEW_GRACE = 0.01
# Seconds after a new connection in which the limits may be exceeded. The graces of it and of all
# older ones have ended then, also if the clock of the loop counts milliseconds.
ROOM_AFTER = 2 * NEW_GRACE
# Seconds, and bytes. The rest of a refused body is received and dropped. If the server closed the
# connection immediately, a client that is still writing would lose the response.
LINGER, LINGER_BYTES = 2.0, 8 << 20
# Bytes that are parsed in one turn of the event loop. The smallest headers take 40 ms for them.
PIECE = 64 << 10
# A body has at most this number of chunks, and one more for each CHUNK_BYTES bytes.
CHUNKS, CHUNK_BYTES = 1024, 64


class Connections:
    """The open connections, with a limit in total and for each address.

    At a limit the oldest connection that waits for bytes of its client is closed. A connection
    whose request is being processed is never closed.
    """

    def __init__(
        self, most: int, per_address: int, *, is_exempt: Callable[[str], bool] = lambda _: False
    ) -> None:
        self._most, self._per_address, self._is_exempt = most, per_address, is_exempt
        self._groups: dict[Any, str] = {}  # connection → address
        self._counts: Counter[str] = Counter()
        # Connections that wait, the oldest one first, with the end of their grace. By address, and
        # under None all of them.
        self._waiting: dict[str | None, OrderedDict[Any, float]] = {None: OrderedDict()}

    def __len__(self) -> int:
        return len(self._groups)

    def is_over(self, connection: Any) -> bool:
        """Return whether the limit in total or of this connection's address is exceeded."""
        group = self._groups.get(connection, "")
        return len(self) > self._most or self._counts[group] > self._limit(group)

    def is_full(self, address: str) -> bool:
        """Return whether no connection of the address may be added, not even for a short time."""
        group = self._group(address)
        return len(self) >= 2 * self._most or self._counts[group] >= 2 * self._limit(group)

    def _group(self, address: str) -> str:
        return "" if self._is_exempt(address) else address_group(address)

    def _limit(self, group: str) -> float:
        return self._per_address if group else math.inf

    def add(self, connection: Any, address: str) -> None:
        group = self._group(address)
        self._groups[connection] = group
        self._counts[group] += 1

    def wait(self, connection: Any, grace_until: float = 0.0) -> None:
        """Note that a connection waits for bytes. Its age counts from the first call."""
        group = self._groups.get(connection)
        if group is not None:
            for key in (None, group):
                self._waiting.setdefault(key, OrderedDict()).setdefault(connection, grace_until)

    def work(self, connection: Any) -> None:
        """Note that the request of a connection is complete, and is being processed."""
        group = self._groups.get(connection)
        for key in (None, group):
            waiting = self._waiting.get(key)
            if waiting is not None:
                waiting.pop(connection, None)
                if not waiting and key is not None:
                    del self._waiting[key]

    def remove(self, connection: Any) -> None:
        """Forget a connection. May be called twice."""
        if connection in self._groups:
            self.work(connection)
            group = self._groups.pop(connection)
            self._counts[group] -= 1
            if not self._counts[group]:
                del self._counts[group]

    def surplus(self, connection: Any, now: float) -> list[Any]:
        """Remove and return the connections that must be closed for this one, or this one."""
        group = self._groups.get(connection)
        return [] if group is None else self._surplus(group, now)

    def surplus_of(self, address: str, now: float) -> list[Any]:
        """Remove and return the connections that must be closed for a new one of the address."""
        return self._surplus(self._group(address), now)

    def _surplus(self, group: str, now: float) -> list[Any]:
        found = []
        while self._counts[group] > self._limit(group):
            victim = self._oldest(group, now)
            if victim is None:
                break
            self.remove(victim)
            found.append(victim)
        while len(self) > self._most:
            victim = self._oldest(None, now)
            if victim is None:
                break
            self.remove(victim)
            found.append(victim)
        return found

    def _oldest(self, group: str | None, now: float) -> Any:
        waiting = self._waiting.get(group)
        if waiting is None:
            return None
        return next((each for each, until in waiting.items() if until <= now), None)


class _Http(h11.Connection):
    """The state machine of h11, with a limit on the number of chunks, and one end of each body.

    Each chunk costs some microseconds. So chunks of one byte would cost seconds for 1 MiB.
    """

    _left = CHUNKS * CHUNK_BYTES  # cost that is left for chunks

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Data) and event.chunk_end:
            self._left += min(0, len(event.data) - CHUNK_BYTES)
            if self._left < 0:
                raise h11.RemoteProtocolError("the body has too many small chunks")
        elif isinstance(event, h11.Request):
            # A proxy in front of this server may end the body by the other of the two headers. The
            # rest of the body would be a request here, and clients would get wrong responses.
            if {b"content-length", b"transfer-encoding"} <= {name for name, _ in event.headers}:
                raise h11.RemoteProtocolError("the end of the body is ambiguous")
            self._left = CHUNKS * CHUNK_BYTES
        return event


class _Transport:
    """The transport of a connection. It closes in a way that does not lose the response."""

    def __init__(self, transport: asyncio.Transport, protocol: Connection) -> None:
        # A strong reference would be a cycle, which keeps the buffers until a garbage collection.
        self._transport, self._protocol = transport, weakref.proxy(protocol)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def close(self) -> None:
        self._protocol.close()

    def is_closing(self) -> bool:
        return self._protocol.lingers or self._transport.is_closing()

    def resume_reading(self) -> None:
        self._protocol.resume()


class Connection(H11Protocol):
    """The HTTP/1.1 protocol of uvicorn with limits on connections, time, chunks and turns."""

    table: Connections  # set by `protocol`
    timeout: float
    on_bad: Callable[[str], object]  # called with the address that sent an unreadable request
    lingers = False

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.conn = _Http(h11.SERVER, MAX_HEAD)
        self._raw: asyncio.Transport = None  # type: ignore[assignment]
        self._deadline: asyncio.TimerHandle | None = None  # of the next request's head
        self._abort: asyncio.TimerHandle | None = None  # of a response that the client reads
        self._unread = bytearray()  # received bytes that are parsed in a later turn
        self._dropped = 0  # bytes of a refused body

    # -- events of the transport -------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._raw = transport
        super().connection_made(_Transport(transport, self))  # type: ignore[arg-type]
        address = self.client[0] if self.client else ""
        if self.table.is_full(address):
            for victim in self.table.surplus_of(address, self.loop.time()):
                victim._refuse()
            if self.table.is_full(address):
                self._refuse()
                return
        self.table.add(self, address)
        self._watch()
        self._wait(NEW_GRACE)

    def data_received(self, data: bytes) -> None:
        if self.lingers:
            self._dropped += len(data)
            if self._dropped > LINGER_BYTES:
                self._raw.abort()
        elif not self._raw.is_closing():
            if self._unread or len(data) > PIECE:
                self._raw.pause_reading()
                self._unread += data
                self._parse_unread()
            else:
                self._parse(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.table.remove(self)
        for timer in (self._deadline, self._abort):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        # Free the buffers now. The garbage collection of reference cycles is late.
        self._unread.clear()
        if self.cycle is not None:
            self.cycle.body = bytearray()
            self.cycle = None  # type: ignore[assignment]

    def pause_writing(self) -> None:
        super().pause_writing()
        self._abort_after(self.timeout)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._abort is not None and not self.transport.is_closing():
            self._abort.cancel()
            self._abort = None

    # -- parsing -----------------------------------------------------------------------------------

    def _parse(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._unwatch()
        elif self._deadline is None:
            self._watch()
        self._note()

    def _parse_unread(self) -> None:
        """Parse a piece of the received bytes, and the next one in a later turn."""
        if not self._unread or self.flow.read_paused or self.transport.is_closing():
            return
        piece = bytes(self._unread[:PIECE])
        del self._unread[:PIECE]
        self._parse(piece)
        self.resume()

    def resume(self) -> None:
        """Continue to read, first the bytes that are received already."""
        if self._unread:
            self.loop.call_soon(self._parse_unread)
        elif not self.flow.read_paused and not self._raw.is_closing():
            self._raw.resume_reading()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self.conn.their_state is h11.SEND_BODY:  # the body of a request that has no use for it
            self.close()
            return
        self._note(IDLE_GRACE)

    def send_400_response(self, msg: str) -> None:
        if self.client:
            self.on_bad(self.client[0])
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._end(
                400,
                "Bad Request",
                "this is no HTTP request that can be read",
                f"HTTP/1.1, with headers of at most {MAX_HEAD} bytes",
            )
        else:
            self._raw.close()

    # -- limits ------------------------------------------------------------------------------------

    def _note(self, grace: float = 0.0) -> None:
        """Note in the table whether this connection waits for its client."""
        if self._is_asked() and self.conn.their_state is not h11.SEND_BODY:
            self.table.work(self)
        else:
            self._wait(grace)

    def _is_asked(self) -> bool:
        """Return whether there is a request whose response is not complete."""
        cycle: RequestResponseCycle | None = self.cycle  # None before the first request
        return cycle is not None and not cycle.response_complete

    def _wait(self, grace: float = 0.0) -> None:
        self.table.wait(self, self.loop.time() + grace if grace else 0.0)
        if self.table.is_over(self):
            self.loop.call_later(ROOM_AFTER, self._make_room)

    def _make_room(self) -> None:
        for victim in self.table.surplus(self, self.loop.time()):
            victim._refuse()

    def _refuse(self) -> None:
        self._end(
            503,
            "Service Unavailable",
            "there are too many connections",
            "try again later",
            "retry-after: 1\r\n",
        )

    def _watch(self) -> None:
        self._deadline = self.loop.call_later(
            self.timeout,
            self._end,
            408,
            "Request Timeout",
            f"no request came within {self.timeout:g} s",
            "send it all at once",
        )

    def _unwatch(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _abort_after(self, seconds: float) -> None:
        if self._abort is None:
            self._abort = self.loop.call_later(seconds, self._raw.abort)

    def _end(self, status: int, phrase: str, message: str, hint: str, more: str = "") -> None:
        """Write an error response and close the connection.

        The response bypasses the state machine of h11, because an invalid request breaks it.
        """
        if self.lingers:
            self._raw.abort()
        elif not self._raw.is_closing():
            if not self._is_asked() or not self.cycle.response_started:
                body = error(message, hint)
                head = (
                    f"HTTP/1.1 {status} {phrase}\r\ncontent-type: application/json\r\n"
                    f"content-length: {len(body)}\r\n{more}connection: close\r\n\r\n"
                )
                self._raw.write(head.encode() + body)
            self._raw.close()
            self._abort_after(self.timeout)

    def close(self) -> None:
        """Close the connection after the response.

        If the client may still be sending a body, only the sending side is closed. Received bytes
        are dropped until the client closes, or a limit is reached.
        """
        if self.transport.is_closing():
            return
        self._unwatch()
        if self.conn.their_state is h11.SEND_BODY and not self._raw.is_closing():
            self.lingers = True
            self._unread.clear()
            if self.cycle is not None:
                self.cycle.body = bytearray()
            self._raw.write_eof()
            self._raw.resume_reading()
            self._abort_after(LINGER)
            self._wait()
        else:
            self._raw.close()
            self._abort_after(self.timeout)


def protocol(
    table: Connections, timeout: float, on_bad: Callable[[str], object]
) -> type[Connection]:
    """Return the class of the connections of one server."""
    return type(
        "Protocol",
        (Connection,),
        {"table": table, "timeout": timeout, "on_bad": staticmethod(on_bad)},
    )
