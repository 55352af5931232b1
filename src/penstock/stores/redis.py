"""One Redis server as this process knows it: its DSN, whether it can be trusted with our keys, and
scripts run in one round trip.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl, unquote, urlsplit

from redis import Redis
from redis import exceptions as wrong
from redis.asyncio.connection import Connection, ConnectionPool, SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.retry import Retry as BlockingRetry

from penstock.errors import ConfigError, PenstockError, StoreUnavailable, Unreachable

OLDEST = (7, 0)  # script flags, LPOP with a count, and XAUTOCLAIM that forgets deleted entries
PATIENCE = 10.0  # seconds for one round trip; a server that is silent for longer is away
TLS_OPTIONS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
Argument = str | bytes | int | float


class Script:
    """Lua that the server keeps; sent again to one that has forgotten it."""

    def __init__(self, text: str) -> None:
        self.text: Final = text.encode()
        self.sha: Final = hashlib.sha1(self.text, usedforsecurity=False).hexdigest().encode()


class Lost(StoreUnavailable):
    """The connection broke after the command was sent: it may or may not have happened."""


class Server:
    """Connections are opened when first used, and checked once: a server that could forget our keys
    is refused, not used.
    """

    def __init__(self, url: str, *, evictable: bool) -> None:
        """`evictable`: the caller's keys expire, so a server that evicts only such keys could take
        them too.
        """
        options, volatile = parse(url)
        self.name = f"{options['host']}:{options['port']}"
        self.tls = url.startswith("rediss:")
        self.options = {
            "protocol": 2,
            "socket_timeout": PATIENCE,
            "socket_connect_timeout": 5.0,
            **options,
        }
        self._pool = ConnectionPool(
            connection_class=SSLConnection if self.tls else Connection,
            retry=Retry(NoBackoff(), 0),
            **self.options,
        )
        self._evictable, self._volatile = evictable, volatile
        self._checked = False
        self._checking = asyncio.Lock()

    # -- calls -------------------------------------------------------------------------------------

    async def run(self, script: Script, keys: Sequence[str], *args: Argument) -> Any:
        """One script, one round trip."""
        (answer,) = await self.run_all([(script, keys, args)])
        if isinstance(answer, wrong.RedisError):
            raise self.explained(answer)
        return answer

    async def run_all(
        self, calls: Sequence[tuple[Script, Sequence[str], Sequence[Argument]]]
    ) -> list[Any]:
        """Several scripts in one round trip; what the server said against one of them is its
        answer. Raises Lost if nobody knows what happened.
        """
        if not self._checked:
            await self.check()
        answers = await self._exchange(
            [(b"EVALSHA", s.sha, len(keys), *keys, *args) for s, keys, args in calls]
        )
        forgotten = [i for i, a in enumerate(answers) if isinstance(a, wrong.NoScriptError)]
        if forgotten:  # a server that was started again has none
            again = await self._exchange(
                [
                    (b"EVAL", calls[i][0].text, len(calls[i][1]), *calls[i][1], *calls[i][2])
                    for i in forgotten
                ]
            )
            for i, a in zip(forgotten, again, strict=True):
                answers[i] = a
        return answers

    async def command(self, *args: Argument) -> Any:
        if not self._checked:
            await self.check()
        (answer,) = await self._exchange([args])
        if isinstance(answer, wrong.RedisError):
            raise self.explained(answer)
        return answer

    async def _exchange(self, commands: Sequence[Sequence[Argument]]) -> list[Any]:
        """Errors of single commands come back as values; trouble with the connection is raised."""
        task = asyncio.current_task()
        before = task.cancelling() if task is not None else 0
        try:
            connection: Any = await self._pool.get_connection()  # type: ignore[no-untyped-call]
        except (wrong.RedisError, OSError) as e:
            raise self.explained(e) from e
        try:
            await connection.send_packed_command(connection.pack_commands(commands))
            if (
                task is not None and task.cancelling() > before
            ):  # the client sends by wait_for, which before Python 3.12 loses a cancellation now and then
                raise asyncio.CancelledError
            answers: list[Any] = []
            for _ in commands:
                try:
                    answers.append(await connection.read_response())
                except wrong.ResponseError as e:
                    answers.append(e)
                except wrong.ConnectionError as e:
                    if not connection.is_connected:
                        raise
                    answers.append(e)  # "loading": an answer like any other
            return answers
        except (wrong.RedisError, OSError) as e:
            raise Lost(
                f"the connection to Redis at {self.name} broke: {e}",
                hint="it is tried again; see whether the server runs",
            ) from e
        except (
            BaseException
        ):  # cancelled halfway: the next user of this connection would read our answer
            await connection.disconnect(nowait=True)
            raise
        finally:
            await self._pool.release(connection)

    def explained(self, e: Exception) -> PenstockError:
        said = str(e)
        if isinstance(e, wrong.AuthenticationError) or said.startswith(("NOAUTH", "WRONGPASS")):
            missing = said.startswith("NOAUTH") or "Authentication required" in said
            return Unreachable(
                f"Redis at {self.name} {'asks for a password' if missing else 'refuses the user or password'}",
                hint="put both into the DSN: redis://USER:PASSWORD@HOST:PORT (USER may be empty; percent-encode special characters)",
            )
        if isinstance(e, wrong.NoPermissionError) or "NOPERM" in said:
            return Unreachable(
                f"Redis at {self.name} does not permit this user what Penstock needs: {said}",
                hint="ACL SETUSER … ~* +@all -@dangerous +info, or at least the commands for scripts, streams, hashes, lists, sorted sets and INFO",
            )
        if isinstance(e, wrong.ReadOnlyError):
            return StoreUnavailable(
                f"Redis at {self.name} is a read-only replica now",
                hint="name the primary, or wait for the fail-over to end",
            )
        if isinstance(e, wrong.OutOfMemoryError):
            return StoreUnavailable(
                f"Redis at {self.name} has reached its maxmemory and takes no more",
                hint="drain it, or give it more memory",
            )
        return StoreUnavailable(
            f"Redis at {self.name} does not answer: {said}",
            hint="it is tried again; see whether the server runs",
        )

    # -- trust -------------------------------------------------------------------------------------

    async def check(self) -> None:
        """Raises Unreachable, in one sentence, for a server that cannot be reached, refuses us, or
        could lose what we store.
        """
        async with self._checking:
            if self._checked:
                return
            try:
                (said,) = await self._exchange([("INFO",)])
            except StoreUnavailable as e:
                if "CERTIFICATE_VERIFY_FAILED" in e.message:
                    raise Unreachable(
                        f"the certificate of Redis at {self.name} is not trusted",
                        hint="name its authority: rediss://…?ssl_ca_certs=FILE, and the host it is for",
                    ) from e
                raise Unreachable(
                    f"no Redis server answers at {self.name}",
                    hint="start it, or correct host, port and scheme of the DSN (rediss:// is TLS)",
                ) from e
            if isinstance(said, wrong.BusyLoadingError):
                raise self.explained(said)
            if isinstance(said, wrong.RedisError):
                trouble = self.explained(said)
                raise Unreachable(trouble.message, hint=trouble.hint)
            self.judge(
                dict(line.split(":", 1) for line in said.decode().splitlines() if ":" in line)
            )
            self._checked = True

    def judge(self, facts: Mapping[str, str]) -> None:
        judge(facts, self.name, evictable=self._evictable, volatile=self._volatile)

    async def close(self) -> None:
        await self._pool.disconnect()


class Blocking:
    """The same server for commands that people type: they have no event loop, and wait for one
    answer at a time.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._client: Redis | None = None

    def run(self, script: Script, keys: Sequence[str], *args: Argument) -> Any:
        def call(client: Any) -> Any:
            try:
                return client.execute_command("EVALSHA", script.sha, len(keys), *keys, *args)
            except wrong.NoScriptError:
                return client.execute_command("EVAL", script.text, len(keys), *keys, *args)

        return self._ask(call)

    def command(self, *args: Argument) -> Any:
        return self._ask(lambda client: client.execute_command(*args))

    def _ask(self, call: Callable[[Any], Any]) -> Any:
        try:
            if self._client is None:
                client = Redis(
                    ssl=self._server.tls,
                    retry=BlockingRetry(NoBackoff(), 0),
                    **self._server.options,
                )
                facts: Any = client.info()
                self._server.judge({name: str(fact) for name, fact in facts.items()})
                self._client = client
            return call(self._client)
        except (wrong.RedisError, OSError) as e:
            trouble = self._server.explained(e)
            raise Unreachable(trouble.message, hint=trouble.hint) from e

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None


def judge(facts: Mapping[str, str], name: str, *, evictable: bool, volatile: bool) -> None:
    """What INFO says, weighed. Raises Unreachable, in one sentence."""
    if facts.get("loading") == "1":  # what it says of itself is not final yet
        raise Unreachable(f"Redis at {name} is loading its data", hint="try again in a moment")
    version = facts.get("redis_version", "0")
    if tuple(int(n) for n in version.split(".")[:2] if n.isdigit()) < OLDEST:
        raise Unreachable(
            f"Redis at {name} is version {version}; Penstock needs 7.0 or newer",
            hint="upgrade the server, or name another one",
        )
    if facts.get("role") == "slave":
        raise Unreachable(
            f"Redis at {name} is a replica and takes no writes", hint="name the primary in the DSN"
        )
    if facts.get("cluster_enabled") == "1":
        raise Unreachable(
            f"Redis at {name} is a cluster node; Penstock needs a single primary",
            hint="name a server without cluster mode",
        )
    if volatile:
        return
    policy = facts.get("maxmemory_policy", "noeviction")
    if policy.startswith("allkeys") or (evictable and policy != "noeviction"):
        raise Unreachable(
            f"Redis at {name} may evict our keys when memory is short (maxmemory-policy {policy})",
            hint="CONFIG SET maxmemory-policy noeviction, or accept the loss with ?volatile=allow in the DSN",
        )
    if facts.get("aof_enabled") != "1":
        raise Unreachable(
            f"Redis at {name} forgets on a restart (no append-only file)",
            hint="CONFIG SET appendonly yes (and in redis.conf), or accept the loss with ?volatile=allow in the DSN",
        )


def parse(url: str) -> tuple[dict[str, Any], bool]:
    """(connection options, may it be volatile). Raises ConfigError; no password is ever part of a
    message.
    """
    try:
        parts = urlsplit(url)
        port = parts.port or 6379
    except ValueError:
        raise ConfigError(
            "the Redis DSN has a port that is no number", hint="redis://HOST:6379/0"
        ) from None
    if parts.scheme not in ("redis", "rediss"):
        raise ConfigError(
            f"{parts.scheme!r} is no Redis scheme",
            hint="redis://HOST:PORT or, with TLS, rediss://HOST:PORT",
        )
    if not parts.hostname:
        raise ConfigError(
            f"the Redis DSN {parts.scheme}:{parts.path or '//'} names no host",
            hint="redis://HOST:6379/0",
        )
    number = parts.path.strip("/") or "0"
    if not number.isdigit():
        raise ConfigError(
            f"the Redis DSN names database {number!r}, which is no number",
            hint=f"{parts.scheme}://{parts.hostname}:{port}/0",
        )
    options: dict[str, Any] = {"host": parts.hostname, "port": port, "db": int(number)}
    if parts.username:
        options["username"] = unquote(parts.username)
    if parts.password:
        options["password"] = unquote(parts.password)
    volatile = False
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name == "volatile" and value == "allow":
            volatile = True
        elif name in TLS_OPTIONS and parts.scheme == "rediss":
            if not Path(value).is_file():
                raise ConfigError(
                    f"the Redis DSN names {value} as {name}, which is no file",
                    hint="give the path of a PEM file that this user may read",
                )
            options[name] = value
        else:
            raise ConfigError(
                f"the Redis DSN has an option that is not known or has no such value: {name}",
                hint=f"known: volatile=allow; with rediss: {', '.join(TLS_OPTIONS)}",
            )
    return options, volatile
