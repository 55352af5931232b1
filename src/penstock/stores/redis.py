"""Client of one Redis server: parses the DSN, checks the server's settings, and runs Lua scripts.

A batch of scripts takes one round trip.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import msgspec
from redis import Redis
from redis import exceptions as wrong
from redis.asyncio.connection import Connection, ConnectionPool, SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.retry import Retry as BlockingRetry

from penstock.config import units
from penstock.config.options import query_options, read_options
from penstock.errors import ConfigError, PenstockError, StoreUnavailable, Unreachable
from penstock.rules.masking import mask

# Oldest supported version. It has script flags, LPOP with a count, and an XAUTOCLAIM that drops
# deleted entries.
OLDEST = (7, 0)
REPLY_TIMEOUT = 10.0  # seconds for one round trip, after which the server counts as unavailable
Argument = str | bytes | int | float


class Layout(msgspec.Struct, frozen=True):
    """The version of the keys of one adapter in one namespace.

    The hash NAMESPACE.layout has the version of each adapter that has written keys.
    """

    namespace: str
    part: str  # the adapter
    version: int  # that this release reads and writes
    first: tuple[str, ...]  # keys of a namespace that release 0.1.0 wrote. It has version 1.


class Script:
    """Lua script that the server caches. The text is sent again if the server does not have it."""

    def __init__(self, text: str) -> None:
        self.text: Final = text.encode()
        self.sha: Final = hashlib.sha1(self.text, usedforsecurity=False).hexdigest().encode()


# Return the version of the keys, and write it if it is missing. KEYS: the hash, then the keys of
# version 1. ARGV: part, version.
_LAYOUT = Script(
    """#!lua flags=allow-oom
local found = redis.call('HGET', KEYS[1], ARGV[1])
if found then return tonumber(found) end
local version = tonumber(ARGV[2])
for i = 2, #KEYS do
  if redis.call('EXISTS', KEYS[i]) == 1 then version = 1 end
end
redis.call('HSET', KEYS[1], ARGV[1], version)
return version
"""
)


class Lost(StoreUnavailable):
    """The connection was lost after the command was sent. The command may have been executed."""


class Server:
    """Connections to a server, opened when first used.

    The server is checked once. A server that could lose the keys of Penstock is rejected.
    """

    def __init__(self, url: str, *, evictable: bool, layout: Layout | None = None) -> None:
        """Parse the URL. `evictable` means that the caller's keys have an expiry time.

        Then a server that evicts only such keys is rejected too. `layout` is the version of the
        caller's keys. Keys of another version are rejected.
        """
        options, volatile = parse(url)
        self.name = f"{options['host']}:{options['port']}"
        self.tls = url.startswith("rediss:")
        self.options = {
            "protocol": 2,
            "socket_timeout": REPLY_TIMEOUT,
            "socket_connect_timeout": 5.0,
            **options,
        }
        self._pool = ConnectionPool(
            connection_class=SSLConnection if self.tls else Connection,
            retry=Retry(NoBackoff(), 0),
            **self.options,
        )
        self._evictable, self._volatile, self._layout = evictable, volatile, layout
        self._checked = False
        self._checking = asyncio.Lock()

    # -- calls -------------------------------------------------------------------------------------

    async def run(self, script: Script, keys: Sequence[str], *args: Argument) -> Any:
        """Run one script in one round trip."""
        (answer,) = await self.run_all([(script, keys, args)])
        if isinstance(answer, wrong.RedisError):
            raise self.explained(answer)
        return answer

    async def run_all(
        self, calls: Sequence[tuple[Script, Sequence[str], Sequence[Argument]]]
    ) -> list[Any]:
        """Run several scripts in one round trip. The result of a failed script is its error.

        Raises Lost if it is unknown whether the scripts ran.
        """
        if not self._checked:
            await self.check()
        answers = await self._exchange(
            [(b"EVALSHA", s.sha, len(keys), *keys, *args) for s, keys, args in calls]
        )
        uncached = [i for i, a in enumerate(answers) if isinstance(a, wrong.NoScriptError)]
        if uncached:  # a restarted server has no scripts
            again = await self._exchange(
                [
                    (b"EVAL", calls[i][0].text, len(calls[i][1]), *calls[i][1], *calls[i][2])
                    for i in uncached
                ]
            )
            for i, a in zip(uncached, again, strict=True):
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
        """Send commands and read the replies. An error of a command is returned as its reply.

        An error of the connection is raised.
        """
        task = asyncio.current_task()
        before = task.cancelling() if task is not None else 0
        try:
            connection: Any = await self._pool.get_connection()  # type: ignore[no-untyped-call]
        except (wrong.RedisError, OSError) as e:
            raise self.explained(e) from e
        try:
            await connection.send_packed_command(connection.pack_commands(commands))
            # The client sends with wait_for, which before Python 3.12 may lose a cancellation.
            if task is not None and task.cancelling() > before:
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
                    answers.append(e)  # the "loading" error is a normal reply
            return answers
        except (wrong.RedisError, OSError) as e:
            raise Lost(
                f"the connection to Redis at {self.name} was lost: {e}",
                hint="check that the server runs. The command is retried",
            ) from e
        except BaseException:
            # Cancelled before all replies were read. The next user of this connection would read
            # them.
            await connection.disconnect(nowait=True)
            raise
        finally:
            await self._pool.release(connection)

    def explained(self, e: Exception) -> PenstockError:
        said = str(e)
        if isinstance(e, wrong.AuthenticationError) or said.startswith(("NOAUTH", "WRONGPASS")):
            missing = said.startswith("NOAUTH") or "Authentication required" in said
            return Unreachable(
                f"Redis at {self.name} "
                f"{'requires a password' if missing else 'refuses the user or password'}",
                hint="put both into the DSN: redis://USER:PASSWORD@HOST:PORT "
                "(USER may be empty. Percent-encode special characters)",
            )
        if isinstance(e, wrong.NoPermissionError) or "NOPERM" in said:
            return Unreachable(
                f"Redis at {self.name} denies this user a command that Penstock needs: {said}",
                hint="run ACL SETUSER … ~* +@all -@dangerous +info, or permit at least the "
                "commands for scripts, streams, hashes, lists, sorted sets and INFO",
            )
        if isinstance(e, wrong.ReadOnlyError):
            return StoreUnavailable(
                f"Redis at {self.name} is a read-only replica now",
                hint="name the primary, or wait for the fail-over to end",
            )
        if isinstance(e, wrong.OutOfMemoryError):
            return StoreUnavailable(
                f"Redis at {self.name} has reached its maxmemory and accepts no writes",
                hint="delete data, or raise maxmemory",
            )
        return StoreUnavailable(
            f"Redis at {self.name} does not answer: {said}",
            hint="check that the server runs. The command is retried",
        )

    # -- checks ------------------------------------------------------------------------------------

    async def check(self) -> None:
        """Check the server once, before the first command.

        Raises Unreachable if the server cannot be reached, rejects the login, or could lose keys.
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
                        hint="name its CA with rediss://…?ssl_ca_certs=FILE, "
                        "and use the host name of the certificate",
                    ) from e
                raise Unreachable(
                    f"no Redis server answers at {self.name}",
                    hint="start it, or correct host, port and scheme of the DSN (rediss:// is TLS)",
                ) from e
            if isinstance(said, wrong.BusyLoadingError):
                raise self.explained(said)
            if isinstance(said, wrong.RedisError):
                error = self.explained(said)
                raise Unreachable(error.message, hint=error.hint)
            self.judge(
                dict(line.split(":", 1) for line in said.decode().splitlines() if ":" in line)
            )
            if call := self.layout_call():
                (found,) = await self._exchange([call])
                if isinstance(found, wrong.RedisError):
                    raise self.explained(found)
                self.judge_layout(found)
            self._checked = True

    def layout_call(self) -> Sequence[Argument]:
        """Return the command that reads the version of the keys, or nothing without a version."""
        if (own := self._layout) is None:
            return ()
        keys = (f"{own.namespace}.layout", *own.first)
        return b"EVAL", _LAYOUT.text, len(keys), *keys, own.part, own.version

    def judge_layout(self, found: int) -> None:
        """Check the version of the keys. Raises ConfigError if it is another one."""
        own = self._layout
        if own is not None and found != own.version:
            age = "a newer" if found > own.version else "an older"
            raise ConfigError(
                f"Redis at {self.name}: the {own.part} keys of namespace {own.namespace!r} have"
                f" version {found}, this Penstock knows {own.version}; {age} release wrote them",
                hint="run that release, or set `namespace` to another name",
            )

    def judge(self, facts: Mapping[str, str]) -> None:
        """Check the reply of INFO. Raises Unreachable if the server is not usable."""
        for found, problem, hint in self.problems(facts):
            if found:
                raise Unreachable(f"Redis at {self.name} {problem}", hint=hint)

    def problems(self, facts: Mapping[str, str]) -> Sequence[tuple[bool, str, str]]:
        """Return the possible problems: whether the server has it, its description, its hint."""
        version = facts.get("redis_version", "0")
        policy = facts.get("maxmemory_policy", "noeviction")
        return (
            (
                facts.get("loading") == "1",  # the other values are not final yet
                "is loading its data",
                "try again in some seconds",
            ),
            (
                tuple(int(n) for n in version.split(".")[:2] if n.isdigit()) < OLDEST,
                f"is version {version}; Penstock needs 7.0 or newer",
                "upgrade the server, or name another one",
            ),
            (
                facts.get("role") == "slave",
                "is a replica and accepts no writes",
                "name the primary in the DSN",
            ),
            (
                facts.get("cluster_enabled") == "1",
                "is a cluster node; Penstock needs a single primary",
                "name a server without cluster mode",
            ),
            (
                not self._volatile
                and (policy.startswith("allkeys") or (self._evictable and policy != "noeviction")),
                f"may evict keys of Penstock when memory is short (maxmemory-policy {policy})",
                "run CONFIG SET maxmemory-policy noeviction, "
                "or accept the loss with ?volatile=allow in the DSN",
            ),
            (
                not self._volatile and facts.get("aof_enabled") != "1",
                "loses its data on a restart (no append-only file)",
                "run CONFIG SET appendonly yes (and set it in redis.conf), "
                "or accept the loss with ?volatile=allow in the DSN",
            ),
        )

    async def close(self) -> None:
        await self._pool.disconnect()


class Blocking:
    """Blocking client of a server, for CLI commands, which have no event loop."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._client: Redis | None = None

    def run(self, script: Script, keys: Sequence[str], *args: Argument) -> Any:
        def call(client: Any) -> Any:
            try:
                return client.execute_command("EVALSHA", script.sha, len(keys), *keys, *args)
            except wrong.NoScriptError:
                return client.execute_command("EVAL", script.text, len(keys), *keys, *args)

        return self._call(call)

    def command(self, *args: Argument) -> Any:
        return self._call(lambda client: client.execute_command(*args))

    def _call(self, call: Callable[[Any], Any]) -> Any:
        try:
            if self._client is None:
                client: Any = Redis(
                    ssl=self._server.tls,
                    retry=BlockingRetry(NoBackoff(), 0),
                    **self._server.options,
                )
                facts: Any = client.info()
                self._server.judge({name: str(fact) for name, fact in facts.items()})
                if command := self._server.layout_call():
                    self._server.judge_layout(client.execute_command(*command))
                self._client = client
            return call(self._client)
        except (wrong.RedisError, OSError) as e:
            error = self._server.explained(e)
            raise Unreachable(error.message, hint=error.hint) from e

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None


def _existing_file(value: object) -> str:
    if not Path(str(value)).is_file():
        raise ValueError(value)
    return str(value)


OPTIONS = {"volatile": units.choices("allow")}
TLS_OPTIONS = dict.fromkeys(
    ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile"),
    units.Kind(
        name="file",
        expected="the path of a PEM file that this user may read",
        read=_existing_file,
    ),
)


def parse(url: str) -> tuple[dict[str, Any], bool]:
    """Return the connection options, and whether the DSN has `volatile=allow`.

    Raises ConfigError. Its message never contains a password.
    """
    try:
        parts = urlsplit(url)
        port = parts.port or 6379
    except ValueError:
        raise ConfigError(
            "the Redis DSN has a port that is not a number", hint="write it as redis://HOST:6379/0"
        ) from None
    if parts.scheme not in ("redis", "rediss"):
        raise ConfigError(
            f"{parts.scheme!r} is not a Redis scheme",
            hint="use redis://HOST:PORT or, with TLS, rediss://HOST:PORT",
        )
    if not parts.hostname:
        raise ConfigError(
            f"the Redis DSN {mask(url)} names no host",
            hint="write it as redis://HOST:6379/0",
        )
    number = parts.path.strip("/") or "0"
    if not number.isdigit():
        raise ConfigError(
            f"the Redis DSN {mask(url)} names a database that is not a number",
            hint=f"write it as {parts.scheme}://HOST:6379/0, and / in a password as %2F",
        )
    options: dict[str, Any] = {"host": parts.hostname, "port": port, "db": int(number)}
    if parts.username:
        options["username"] = unquote(parts.username)
    if parts.password:
        options["password"] = unquote(parts.password)
    given = query_options(parts.query)
    if parts.scheme == "redis" and (tls := sorted(TLS_OPTIONS.keys() & given.keys())):
        raise ConfigError(
            f"the Redis DSN has the TLS option {tls[0]}", hint="write it as rediss://…"
        )
    options |= read_options("the Redis DSN", given, OPTIONS | TLS_OPTIONS)
    return options, options.pop("volatile", "") == "allow"
