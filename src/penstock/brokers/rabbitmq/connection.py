"""A connection to RabbitMQ: its DSN, its life, and what its failures mean in our words. What is
sent over it is decided elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit, urlunsplit

import aiormq
import msgspec
from aiormq import exceptions as amqp
from aiormq.channel import Channel
from aiormq.connection import TCPTransportFactory, TLSTransportFactory, TransportFactory

from penstock.brokers.rabbitmq.management import Management
from penstock.errors import ConfigError, StoreUnavailable, Unreachable
from penstock.rules.masking import mask

CONNECT = 10.0  # seconds until a server that does not answer is taken for unreachable
ANSWER = 15.0  # seconds that one request to a connected server may take
READ_AHEAD = 1 << 20
OLDEST = (3, 10)  # at-least-once dead-lettering, and a time to live on quorum queues
EXAMPLE = "amqp://user:password@host:5672/vhost"
TLS_OPTIONS = ("cafile", "capath", "certfile", "keyfile", "no_verify_ssl")
OWN_OPTIONS = ("publish_timeout", "management")
TROUBLE = (amqp.AMQPError, OSError, TimeoutError, RuntimeError)

# Every failure is mapped where it happens; what the library would print beside that is a traceback
# on the user's terminal.
logging.getLogger("aiormq").setLevel(logging.CRITICAL)


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """A DSN that was read and checked."""

    url: str  # for the library
    shown: str  # without the password
    place: str  # host:port
    user: str
    vhost: str
    publish_timeout: float = 10.0
    management: Management | None = None


def read_address(dsn: str) -> Address:
    shown = mask(dsn)
    if "#" in dsn:
        raise ConfigError(
            f"{shown!r} has a '#', which ends an address",
            hint="write it as %23 where it belongs to the password",
        )
    try:
        parts = urlsplit(dsn)
        port = parts.port
    except ValueError:  # what it says may quote a part of the password
        raise ConfigError(
            f"{shown!r} is not an address of a RabbitMQ server",
            hint=f"{EXAMPLE}; write / @ : in a password as %2F %40 %3A",
        ) from None
    if parts.scheme not in ("amqp", "amqps") or not parts.hostname:
        raise ConfigError(f"{shown!r} names no RabbitMQ server", hint=EXAMPLE)
    if "/" in parts.path.lstrip("/"):
        raise ConfigError(
            f"{shown!r} names a virtual host with a '/' in it", hint="write that '/' as %2F"
        )
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    if unknown := sorted(set(options) - {"heartbeat", *TLS_OPTIONS, *OWN_OPTIONS}):
        raise ConfigError(
            f"{shown!r}: there is no option {unknown[0]!r}",
            hint=f"there are: heartbeat, {', '.join((*OWN_OPTIONS, *TLS_OPTIONS))}",
        )
    numbers = {}
    for name, default in (("heartbeat", 30.0), ("publish_timeout", 10.0)):
        try:
            numbers[name] = float(options.pop(name, default))
        except ValueError:
            numbers[name] = -1.0
        if not 0.1 <= numbers[name] <= 3600:
            raise ConfigError(
                f"{shown!r}: {name} is not a number of seconds", hint=f"{name}={default:g}"
            )
    api = options.pop("management", "")
    user = unquote(parts.username or "guest")
    options["heartbeat"] = str(max(1, round(numbers["heartbeat"])))
    port = port or (5671 if parts.scheme == "amqps" else 5672)
    return Address(
        url=urlunsplit((parts.scheme, parts.netloc, parts.path, urlencode(options), "")),
        shown=shown,
        place=f"{parts.hostname}:{port}",
        user=user,
        vhost=unquote(parts.path[1:]) or "/",
        publish_timeout=numbers["publish_timeout"],
        management=Management(api, user, unquote(parts.password or "guest")) if api else None,
    )


class _Transport(TransportFactory):
    """Keeps hold of the socket, so that a connection can be dropped without a word."""

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


class Link:
    """One connection, made when it is first needed and again when it was lost. Publishing and
    consuming have one each: a server short of memory stops reading from those that publish, and
    acks must get through all the same.
    """

    def __init__(self, address: Address, name: str) -> None:
        self.address, self.name = address, name
        self.version: tuple[int, ...] = ()
        self._connection: aiormq.Connection | None = None
        self._transport: _Transport | None = None
        self._connecting = asyncio.Lock()
        self._closed = False

    @property
    def up(self) -> bool:
        return self._connection is not None and self._connection.is_opened

    async def connect(self) -> aiormq.Connection:
        """Raises Unreachable, with the sentence for what is wrong."""
        async with self._connecting:
            if self._connection is not None and self._connection.is_opened:
                return self._connection
            if self._closed:
                raise Unreachable(f"the connection to RabbitMQ at {self.address.place} was closed")
            transport = _Transport(tls=self.address.url.startswith("amqps:"))
            connection = aiormq.Connection(
                self.address.url, transport_factory=transport, limit=READ_AHEAD
            )
            try:
                async with asyncio.timeout(CONNECT):
                    await connection.connect(
                        client_properties={"connection_name": self.name, "product": "penstock"}
                    )
            except BaseException as e:
                transport.abort()
                if isinstance(e, asyncio.CancelledError) and not _ours(e):
                    raise self._refusal(e) from e
                if not isinstance(e, TROUBLE):
                    raise
                raise self._refusal(e) from e
            self.version = _version(connection.server_properties)
            if self.version < OLDEST:
                await connection.close()
                found = ".".join(map(str, self.version)) or "of an unknown version"
                raise Unreachable(
                    f"RabbitMQ at {self.address.place} is {found}, and 3.10 is the oldest that can keep what waits",
                    hint="upgrade the server",
                )
            self._connection, self._transport = connection, transport
            return connection

    def _refusal(self, e: BaseException) -> Unreachable:
        """What to do depends on who said no."""
        a = self.address
        cause = e.__cause__ if isinstance(e.__cause__, OSError) else e
        if isinstance(e, amqp.ProbableAuthenticationError | amqp.AuthenticationError):
            return Unreachable(
                f"RabbitMQ at {a.place} refuses the user {a.user!r} or its password",
                hint="correct them in the address; `guest` may only come from the server's own machine",
            )
        if isinstance(e, amqp.InvalidFrameError) and "Connection.OpenOk" in str(e):
            return Unreachable(
                f"RabbitMQ at {a.place} has no virtual host {a.vhost!r}, or does not let the user {a.user!r} in",
                hint=f"rabbitmqctl add_vhost {a.vhost}; rabbitmqctl set_permissions -p {a.vhost} {a.user} '.*' '.*' '.*'",
            )
        if isinstance(cause, ssl.SSLError):
            return Unreachable(
                f"RabbitMQ at {a.place} and we do not agree on TLS: {cause.reason or cause}",
                hint="amqp:// or amqps://? its port, ?cafile=FILE for its authority",
            )
        if isinstance(e, TimeoutError):
            return Unreachable(
                f"RabbitMQ at {a.place} did not answer within {CONNECT:g} s",
                hint="is it another server's port? is a firewall in between?",
            )
        if (
            isinstance(cause, OSError)
            and cause.errno is not None
            and not isinstance(e, amqp.AMQPError)
        ) or isinstance(e.__cause__, OSError):
            return Unreachable(
                f"RabbitMQ at {a.place} cannot be reached: {_said(cause)}",
                hint="start it, or correct the address",
            )
        return Unreachable(
            f"what answers at {a.place} is no RabbitMQ, or closed the connection: {_said(e)}",
            hint="correct the address: 5672 is its usual port, 5671 with TLS",
        )

    async def channel(self, *, confirms: bool = False) -> Channel:
        """Raises StoreUnavailable."""
        with self.outage():
            connection = await self.connect()
            async with asyncio.timeout(ANSWER):
                channel = await connection.channel(publisher_confirms=confirms)
                assert isinstance(channel, Channel)
                return channel

    async def blocked(self, patience: float) -> bool:
        """Has the server asked us to publish nothing (memory or disk alarm), and not taken that
        back for this long?
        """
        connection = self._connection
        if connection is None:
            return False
        try:
            async with asyncio.timeout(patience):
                await connection.ready()
        except TimeoutError:
            return True
        return False

    @contextmanager
    def outage(self) -> Iterator[None]:
        """Failures of a connection at run time are an outage: wait, and try again."""
        try:
            yield
        except Unreachable as e:
            raise StoreUnavailable(e.message, hint=e.hint) from e
        except TimeoutError as e:
            self.abort()  # half an answer may still come, and would be taken for another's
            raise StoreUnavailable(f"RabbitMQ at {self.address.place} does not answer") from e
        except TROUBLE as e:
            raise StoreUnavailable(
                f"the connection to RabbitMQ at {self.address.place} was lost: {_said(e)}"
            ) from e
        except asyncio.CancelledError as e:
            if _ours(e):
                raise
            raise StoreUnavailable(
                f"the connection to RabbitMQ at {self.address.place} was lost"
            ) from e

    def abort(self) -> None:
        """Drop it without a word: the server gives what was held to others."""
        if self._transport is not None:
            self._transport.abort()

    async def close(self) -> None:
        self._closed = True
        connection, self._connection = self._connection, None
        if connection is not None:
            try:
                async with asyncio.timeout(ANSWER):
                    await connection.close()
            except TROUBLE:
                self.abort()


def _ours(e: asyncio.CancelledError) -> bool:
    """Was this task cancelled? The library also answers with CancelledError whoever waits on a
    connection that ends.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _said(e: BaseException) -> str:
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
