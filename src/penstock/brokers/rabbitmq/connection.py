"""Connection to RabbitMQ: parses the URL, connects, and explains errors."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from urllib.parse import unquote, urlencode, urlsplit, urlunsplit

import aiormq
import msgspec
from aiormq import exceptions as amqp
from aiormq.channel import Channel
from aiormq.connection import TCPTransportFactory, TLSTransportFactory, TransportFactory

from penstock.brokers.rabbitmq.management import Management
from penstock.config import units
from penstock.config.options import query_options, read_options
from penstock.errors import ConfigError, StoreUnavailable, Unreachable
from penstock.rules.masking import mask

CONNECT_TIMEOUT = 10.0  # seconds
RESPONSE_TIMEOUT = 15.0  # seconds for one request to a connected server
READ_BUFFER = 1 << 20  # bytes
# The first version with at-least-once dead-lettering and a time to live in quorum queues.
MIN_VERSION = (3, 10)
EXAMPLE = "amqp://user:password@host:5672/vhost"
_SECONDS = units.durations(0.1, 3600)
_TEXT = units.texts(".*", "a text")
OPTIONS = {
    "heartbeat": _SECONDS,
    "publish_timeout": _SECONDS,
    "management": _TEXT,
    **dict.fromkeys(("cafile", "capath", "certfile", "keyfile", "no_verify_ssl"), _TEXT),
}
CONNECTION_ERRORS = (amqp.AMQPError, OSError, TimeoutError, RuntimeError)

# Every error is handled where it occurs. The library would also print a traceback to the user's
# terminal.
logging.getLogger("aiormq").setLevel(logging.CRITICAL)


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed and checked URL."""

    url: str  # for the library
    host_port: str
    user: str
    vhost: str
    publish_timeout: float = 10.0
    management: Management | None = None


def read_address(dsn: str) -> Address:
    shown = mask(dsn)
    if "#" in dsn:
        raise ConfigError(
            f"{shown!r} has a '#', which ends an address",
            hint="write it as %23 if it belongs to the password",
        )
    try:
        parts = urlsplit(dsn)
        port = parts.port
    except ValueError:  # the text of the error may contain a part of the password
        raise ConfigError(
            f"{shown!r} is not an address of a RabbitMQ server",
            hint=f"{EXAMPLE}, and write / @ : in a password as %2F %40 %3A",
        ) from None
    if parts.scheme not in ("amqp", "amqps") or not parts.hostname:
        raise ConfigError(f"{shown!r} names no RabbitMQ server", hint=EXAMPLE)
    if "/" in parts.path.lstrip("/"):
        raise ConfigError(
            f"{shown!r} names a virtual host with a '/' in it", hint="write that '/' as %2F"
        )
    options = read_options(repr(shown), query_options(parts.query), OPTIONS)
    publish_timeout = options.pop("publish_timeout", 10.0)
    api = options.pop("management", "")
    user = unquote(parts.username or "guest")
    options["heartbeat"] = max(1, round(options.get("heartbeat", 30.0)))
    port = port or (5671 if parts.scheme == "amqps" else 5672)
    return Address(
        url=urlunsplit((parts.scheme, parts.netloc, parts.path, urlencode(options), "")),
        host_port=f"{parts.hostname}:{port}",
        user=user,
        vhost=unquote(parts.path[1:]) or "/",
        publish_timeout=publish_timeout,
        management=Management(api, user, unquote(parts.password or "guest")) if api else None,
    )


class _Transport(TransportFactory):
    """Keeps the socket, so that a connection can be dropped without the closing handshake."""

    def __init__(self, *, tls: bool) -> None:
        self._inner = TLSTransportFactory() if tls else TCPTransportFactory()
        self.writer: asyncio.StreamWriter | None = None

    async def create(
        self, url: Any, **more: Any
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, self.writer = await self._inner.create(url, **more)
        return reader, self.writer

    def abort(self) -> None:
        if self.writer is not None:
            self.writer.transport.abort()


class Connection:
    """One connection. It is opened when it is first used, and again after it was lost.

    Publishing and consuming use separate connections. A server short of memory stops reading from
    publishing connections, but must still receive acks.
    """

    def __init__(self, address: Address, name: str) -> None:
        self.address, self.name = address, name
        self.version: tuple[int, ...] = ()
        self._connection: aiormq.Connection | None = None
        self._transport: _Transport | None = None
        self._connecting = asyncio.Lock()
        self._closed = False

    @property
    def is_open(self) -> bool:
        return self._connection is not None and self._connection.is_opened

    async def connect(self) -> aiormq.Connection:
        """Return the open connection, or open one. Raises Unreachable, with an explanation."""
        async with self._connecting:
            if self._connection is not None and self._connection.is_opened:
                return self._connection
            if self._closed:
                raise Unreachable(
                    f"the connection to RabbitMQ at {self.address.host_port} was closed"
                )
            transport = _Transport(tls=self.address.url.startswith("amqps:"))
            connection = aiormq.Connection(
                self.address.url, transport_factory=transport, limit=READ_BUFFER
            )
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT):
                    await connection.connect(
                        client_properties={"connection_name": self.name, "product": "penstock"}
                    )
            except BaseException as e:
                transport.abort()
                ended = isinstance(e, asyncio.CancelledError) and not is_task_cancelled()
                if ended or isinstance(e, CONNECTION_ERRORS):
                    raise self._explain(e) from e
                raise
            self.version = _version(connection.server_properties)
            if self.version < MIN_VERSION:
                await connection.close()
                found = ".".join(map(str, self.version)) or "of an unknown version"
                raise Unreachable(
                    f"RabbitMQ at {self.address.host_port} is {found},"
                    " and 3.10 is the oldest supported version",
                    hint="upgrade the server",
                )
            self._connection, self._transport = connection, transport
            return connection

    def _explain(self, e: BaseException) -> Unreachable:
        """Return the error with its cause and a next step."""
        a = self.address
        cause = e.__cause__ if isinstance(e.__cause__, OSError) else e
        match e, cause:
            case amqp.ProbableAuthenticationError() | amqp.AuthenticationError(), _:
                return Unreachable(
                    f"RabbitMQ at {a.host_port} refuses the user {a.user!r} or its password",
                    hint="correct them in the address. RabbitMQ accepts the user `guest`"
                    " only from its own machine",
                )
            case amqp.InvalidFrameError(), _ if "Connection.OpenOk" in str(e):
                return Unreachable(
                    f"RabbitMQ at {a.host_port} has no virtual host {a.vhost!r},"
                    f" or does not let the user {a.user!r} in",
                    hint=f"rabbitmqctl add_vhost {a.vhost}; rabbitmqctl set_permissions"
                    f" -p {a.vhost} {a.user} '.*' '.*' '.*'",
                )
            case _, ssl.SSLError(reason=reason):
                return Unreachable(
                    f"no TLS connection to RabbitMQ at {a.host_port}: {reason or cause}",
                    hint="use amqps:// for TLS ports and amqp:// for plain ones,"
                    " and ?cafile=FILE for the CA of a private certificate",
                )
            case TimeoutError(), _:
                return Unreachable(
                    f"RabbitMQ at {a.host_port} did not answer within {CONNECT_TIMEOUT:g} s",
                    hint="check that the port belongs to RabbitMQ and that no firewall blocks it",
                )
            case _, OSError(errno=errno) if cause is not e or (
                errno is not None and not isinstance(e, amqp.AMQPError)
            ):
                return Unreachable(
                    f"RabbitMQ at {a.host_port} cannot be reached: {_error_text(cause)}",
                    hint="start it, or correct the address",
                )
        return Unreachable(
            f"the server at {a.host_port} is not RabbitMQ, or closed the connection:"
            f" {_error_text(e)}",
            hint="correct the address: the usual port is 5672, or 5671 with TLS",
        )

    async def channel(self, *, confirms: bool = False) -> Channel:
        """Open a channel. Raises StoreUnavailable."""
        with self.outage():
            connection = await self.connect()
            async with asyncio.timeout(RESPONSE_TIMEOUT):
                channel = await connection.channel(publisher_confirms=confirms)
                assert isinstance(channel, Channel)
                return channel

    async def close_channel(self, channel: Channel) -> None:
        """Close a channel. Raises StoreUnavailable."""
        async with self.request():
            await channel.close()

    async def blocked(self, timeout: float) -> bool:
        """Return True if the server blocks publishing for all of the next `timeout` seconds.

        It does so during a memory or disk alarm.
        """
        try:
            async with asyncio.timeout(timeout):
                if self._connection is not None:
                    await self._connection.ready()
        except TimeoutError:
            return True
        return False

    @contextmanager
    def outage(self) -> Iterator[None]:
        """Raise connection errors at run time as StoreUnavailable, so that callers retry."""
        try:
            yield
        except Unreachable as e:
            raise StoreUnavailable(e.message, hint=e.hint) from e
        except TimeoutError as e:
            self.abort()  # a late answer would be taken for the answer to a later request
            raise StoreUnavailable(f"RabbitMQ at {self.address.host_port} does not answer") from e
        except CONNECTION_ERRORS as e:
            raise StoreUnavailable(
                f"the connection to RabbitMQ at {self.address.host_port} was lost: {_error_text(e)}"
            ) from e
        except asyncio.CancelledError as e:
            if is_task_cancelled():
                raise
            raise StoreUnavailable(
                f"the connection to RabbitMQ at {self.address.host_port} was lost"
            ) from e

    @asynccontextmanager
    async def request(self) -> AsyncIterator[None]:
        """As `outage`, for requests that the server must answer within `RESPONSE_TIMEOUT`."""
        with self.outage():
            async with asyncio.timeout(RESPONSE_TIMEOUT):
                yield

    def abort(self) -> None:
        """Drop the connection without the closing handshake.

        The server redelivers unsettled messages.
        """
        if self._transport is not None:
            self._transport.abort()

    async def close(self) -> None:
        self._closed = True
        connection, self._connection = self._connection, None
        if connection is not None:
            try:
                async with asyncio.timeout(RESPONSE_TIMEOUT):
                    await connection.close()
            except CONNECTION_ERRORS:
                self.abort()


def is_task_cancelled() -> bool:
    """Return True if this task was cancelled.

    The library also raises CancelledError in tasks that wait on a connection when it ends.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _error_text(e: BaseException) -> str:
    if isinstance(e, OSError) and e.strerror:
        return e.strerror
    text = str(e.args[-1]) if e.args else ""
    return text.partition(" - ")[2] or text or type(e).__name__


def _version(properties: Any) -> tuple[int, ...]:
    raw = properties.get("version", "")
    text = raw.decode("ascii", "replace") if isinstance(raw, bytes) else str(raw)
    return tuple(
        int(part) for part in text.split("+")[0].split("-")[0].split(".") if part.isdigit()
    )
