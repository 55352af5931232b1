"""Check of outbound addresses: the rule `is_public`, and the Guard for every outbound connection.

The Guard resolves names and checks addresses. It does not connect.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
import time
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TypeAlias

from penstock.errors import ConfigError
from penstock.model import ErrorClass, Failure
from penstock.rules import identity

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network
Resolver: TypeAlias = Callable[[str, int], Awaitable[Sequence[str]]]

DEFAULT_PORTS = frozenset({80, 443, 8080, 8443})

# -- the rule --------------------------------------------------------------------------------------

# A separate table, because the interpreter's `is_global` changes with its patch level
# (CVE-2024-4032) and has another meaning. Source: the IANA special-purpose registries of 2026. In
# addition, 168.63.129.16 is a public address that a cloud provider uses as a channel to its host.
_NOT_PUBLIC_V4 = (
    "0.0.0.0/8",
    "10.0.0.0/8",
    "100.64.0.0/10",
    "127.0.0.0/8",
    "168.63.129.16/32",
    "169.254.0.0/16",
    "172.16.0.0/12",
    "192.0.0.0/24",
    "192.0.2.0/24",
    "192.31.196.0/24",
    "192.52.193.0/24",
    "192.88.99.0/24",
    "192.168.0.0/16",
    "192.175.48.0/24",
    "198.18.0.0/15",
    "198.51.100.0/24",
    "203.0.113.0/24",
    "224.0.0.0/4",
    "240.0.0.0/4",
)
# Global unicast is 2000::/3. The networks below are exceptions in it. All addresses outside are
# refused: loopback, ULA, link-local, multicast, discard, and also IPv4-mapped, -compatible,
# -translated and both NAT64 prefixes.
_UNICAST_V6 = ipaddress.IPv6Network("2000::/3")
_NOT_PUBLIC_V6 = (
    "2001::/23",  # IETF protocol assignments: Teredo, ORCHID, benchmarking, anycasts
    "2001:db8::/32",  # documentation
    "2002::/16",  # 6to4, which contains an IPv4 address
    "2620:4f:8000::/48",  # AS112
    "3ffe::/16",  # 6bone, returned
    "3fff::/20",  # documentation
)
# Interface ids that mean "an IPv4 address follows", under any prefix.
_ISATAP = (0x00005EFE, 0x02005EFE)


def _ranges(networks: Iterable[str]) -> tuple[list[int], list[int]]:
    spans = sorted(
        (int(n.network_address), int(n.broadcast_address))
        for n in map(ipaddress.ip_network, networks)
    )
    return [lo for lo, _ in spans], [hi for _, hi in spans]


_V4_LOW, _V4_HIGH = _ranges(_NOT_PUBLIC_V4)
_V6_LOW, _V6_HIGH = _ranges(_NOT_PUBLIC_V6)
_UNICAST_LOW, _UNICAST_HIGH = int(_UNICAST_V6.network_address), int(_UNICAST_V6.broadcast_address)


def is_public(address: str | Address) -> bool:
    """Return True for a global unicast address by the tables above.

    Return False for any other address, and for text that is not an address.

    Addresses that contain an IPv4 address (mapped, compatible, NAT64, 6to4, Teredo, ISATAP) are
    refused, even if that address is public. No server needs them, and each decoder could have
    errors. Addresses with a zone id are refused too.
    """
    parsed: object = parse_address(address) if isinstance(address, str) else address
    if isinstance(parsed, ipaddress.IPv4Address):
        n = int(parsed)
        # The table starts at 0.0.0.0, so there is always an entry before `n`.
        return n > _V4_HIGH[bisect_right(_V4_LOW, n) - 1]
    if not isinstance(parsed, ipaddress.IPv6Address) or parsed.scope_id is not None:
        return False
    n = int(parsed)
    if not _UNICAST_LOW <= n <= _UNICAST_HIGH or (n >> 32) & 0xFFFFFFFF in _ISATAP:
        return False
    i = bisect_right(_V6_LOW, n) - 1
    return i < 0 or n > _V6_HIGH[i]


@lru_cache(maxsize=8192)
def parse_address(text: str) -> Address | None:
    """Return the address, or None for other text."""
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def is_own(ip: str) -> bool:
    """Return True for an address of this machine. Connections to it are refused even if it is
    public. The test is whether the address can be bound.
    """
    return not _binds_anything() and _can_bind(ip)


def _can_bind(ip: str) -> bool:
    try:
        with socket.socket(
            socket.AF_INET6 if ":" in ip else socket.AF_INET, socket.SOCK_DGRAM
        ) as s:
            s.bind((ip, 0))
        return True
    except OSError:
        return False


@lru_cache(maxsize=1)
def _binds_anything() -> bool:
    """Return True if this machine can bind any address (`ip_nonlocal_bind`).

    Then binding does not show if an address is local. The test uses a documentation address.
    """
    return _can_bind("192.0.2.1")


# -- exceptions of the operator --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Allow:
    """A target that the operator allows: an address range or a name, and a port (None for any)."""

    port: int | None
    network: Network | None = None
    host: str | None = None

    def __str__(self) -> str:
        what = self.host
        if self.network is not None:
            single = self.network.num_addresses == 1
            what = str(self.network.network_address) if single else str(self.network)
            what = f"[{what}]" if self.network.version == 6 else what
        return f"{what}:{'*' if self.port is None else self.port}"

    def admits(self, host: str, address: Address | None, port: int) -> bool:
        if self.port is not None and self.port != port:
            return False
        if self.network is None:
            return self.host == host
        return (
            address is not None
            and address.version == self.network.version
            and address in self.network
            and not getattr(address, "scope_id", None)
        )


_HINT = (
    "write address:port, network/bits:port, [ipv6]:port or name:port, separated by commas "
    "(* is any port), for example 127.0.0.1:8000,10.0.0.0/8:443"
)


def parse_allow(text: str) -> tuple[Allow, ...]:
    """Parse a list such as `127.0.0.1:8000,[::1]:9000,10.0.0.0/8:443,shop.test:80`.

    Raise ConfigError for an invalid entry, including an entry without a port.
    """
    return tuple(_entry(part.strip()) for part in text.split(",") if part.strip())


def _entry(text: str) -> Allow:
    what, colon, port_text = text.rpartition(":")
    if not colon or not what or port_text.endswith("]"):
        raise ConfigError(f"allow-list entry {text!r} has no port", hint=_HINT)
    if port_text != "*" and not (
        re.fullmatch(r"[0-9]{1,5}", port_text) and 0 < int(port_text) < 65536
    ):
        raise ConfigError(
            f"allow-list entry {text!r}: the port is not a number from 1 to 65535 or *", hint=_HINT
        )
    port = None if port_text == "*" else int(port_text)
    bracketed = what.startswith("[") and what.endswith("]")
    bare = what[1:-1] if bracketed else what
    if bracketed or "/" in what:
        try:
            network = ipaddress.ip_network(bare)
        except ValueError as e:
            raise ConfigError(f"allow-list entry {text!r}: {e}", hint=_HINT) from None
        if (network.version == 6) is not bracketed or "%" in bare:
            raise ConfigError(
                f"allow-list entry {text!r}: "
                "write IPv6 in brackets without a zone, and IPv4 without brackets",
                hint=_HINT,
            )
        return Allow(port, network=network)
    try:
        host = identity.authority(f"http://{what}/").host
    except identity.BadUrl as e:
        raise ConfigError(
            f"allow-list entry {text!r} is neither an address nor a name: {e.reason}", hint=_HINT
        ) from None
    if (address := parse_address(host)) is not None:
        return Allow(port, network=ipaddress.ip_network(address))
    if not _name(host):
        raise ConfigError(f"allow-list entry {text!r} is neither an address nor a name", hint=_HINT)
    return Allow(port, host=host.removesuffix("."))


# -- the guard -------------------------------------------------------------------------------------

_name = re.compile(
    r"(?=.{1,254}\Z)[a-z0-9_](?:[a-z0-9_-]{0,62})(?:\.[a-z0-9_-]{1,63})*\.?"
).fullmatch


@dataclass(frozen=True, slots=True)
class Target:
    """A checked destination. Connect only to `addresses`. The name is for Host and SNI only."""

    scheme: str
    host: str
    port: int
    addresses: tuple[str, ...] = ()

    @property
    def ip(self) -> str:
        """The address to connect to, "" before `resolve`."""
        return self.addresses[0] if self.addresses else ""

    @property
    def pin(self) -> str:
        """Entry for libcurl's RESOLVE list, so that the name only leads to checked addresses."""
        return f"{self.host}:{self.port}:" + ",".join(
            f"[{a}]" if ":" in a else a for a in self.addresses
        )


@dataclass(slots=True)
class _CachedLookup:
    expires: float
    addresses: tuple[str, ...] = ()
    failure: tuple[ErrorClass, str, str] | None = None


class NotResolved(Failure):
    """The resolver failed, or the name does not exist. No request was sent."""


class Guard:
    """Checks every outbound connection: page, robots.txt, feed, outgoing webhook, proxy, browser.

    Call `resolve` first, connect only to its addresses, then call `check_peer`. All addresses of a
    name are checked. They are cached for `ttl` seconds, so that the connection uses a checked
    address. A refusal is `Failure(PERMANENT)`, a failure of the resolver `Failure(TRANSIENT)`.
    """

    def __init__(
        self,
        allow: Iterable[Allow] = (),
        *,
        ports: Iterable[int] = DEFAULT_PORTS,
        resolver: Resolver | None = None,
        ttl: float = 30.0,
        failure_ttl: float = 3.0,
        timeout: float = 5.0,
        max_answers: int = 64,
        max_names: int = 20_000,
        clock: Callable[[], float] = time.monotonic,
        own: Callable[[str], bool] = is_own,
    ) -> None:
        self._allow, self._ports = tuple(allow), frozenset(ports)
        # Separate threads for the system's resolver, started on first use. A resolver that hangs
        # must not block the few default threads of the event loop.
        self._threads = ThreadPoolExecutor(32, thread_name_prefix="resolve")
        self._resolver: Resolver = resolver or self._ask_system
        self._ttl, self._failure_ttl, self._timeout = ttl, failure_ttl, timeout
        self._max_answers, self._max_names = max_answers, max_names
        self._clock, self._own = clock, own
        self._lookups: dict[tuple[str, int], _CachedLookup] = {}
        self._running_lookups: dict[tuple[str, int], asyncio.Task[_CachedLookup]] = {}

    def check_url(self, url: str) -> Target:
        """Check a URL without a DNS lookup. A literal address is checked and returned."""
        try:
            scheme, host, port = identity.authority(identity.canonical_url(url))
        except identity.BadUrl as e:
            raise Failure(ErrorClass.PERMANENT, f"bad URL: {e.reason}") from None
        return self._check_host(scheme, host, port, any_port=False)

    async def resolve(self, url: str) -> Target:
        return await self._resolve_target(self.check_url(url), any_port=False)

    async def resolve_proxy(self, host: str, port: int, *, scheme: str = "http") -> Target:
        """Resolve the address of a proxy. Any port is allowed, because the operator chose it.

        The address must be public or on the allow-list.
        """
        try:
            host = identity.authority(f"http://{f'[{host}]' if ':' in host else host}/").host
        except identity.BadUrl as e:
            raise Failure(ErrorClass.PERMANENT, f"bad proxy address: {e.reason}") from None
        return await self._resolve_target(
            self._check_host(scheme, host, port, any_port=True), any_port=True
        )

    def check_peer(self, ip: str, port: int, target: Target | None = None) -> None:
        """Check the address of an open connection. With a target, it must be one of its addresses.

        Raise Failure(PERMANENT) if it is not allowed.
        """
        if target is not None:
            if port == target.port and ip in target.addresses:
                return
            raise _forbidden(
                "connected elsewhere than checked", f"{target.host} answered from {ip}:{port}"
            )
        if (reason := self._refusal("", ip, port, any_port=False)) is not None:
            raise _forbidden(reason, f"{ip}:{port}")

    def close(self) -> None:
        for task in self._running_lookups.values():
            task.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    # -- implementation

    def _check_host(self, scheme: str, host: str, port: int, *, any_port: bool) -> Target:
        if parse_address(host) is not None:
            if (reason := self._refusal(host, host, port, any_port=any_port)) is not None:
                raise _forbidden(reason, f"{host}:{port}")
            return Target(scheme, host, port, (host,))
        if not _name(host):
            raise Failure(ErrorClass.PERMANENT, "bad URL: the host is no DNS name")
        if (
            not any_port
            and port not in self._ports
            and not any(
                a.port in (None, port) and a.host in (None, host.removesuffix("."))
                for a in self._allow
            )
        ):
            raise _forbidden(f"port {port} is not allowed", f"{host}:{port}")
        return Target(scheme, host, port)

    def _refusal(self, host: str, ip: str, port: int, *, any_port: bool) -> str | None:
        address = parse_address(ip)
        name = host.removesuffix(".")
        if any(a.admits(name, address, port) for a in self._allow):
            return None
        if address is None or not is_public(address):
            return "not a public address"
        if not any_port and port not in self._ports:
            return f"port {port} is not allowed"
        return "this machine's own address" if self._own(ip) else None

    async def _resolve_target(self, target: Target, *, any_port: bool) -> Target:
        if target.addresses:
            return target
        key = (target.host, -target.port if any_port else target.port)
        answer = self._lookups.get(key)
        if answer is None or answer.expires <= self._clock():
            task = self._running_lookups.get(key)
            if task is None:
                task = self._running_lookups[key] = asyncio.ensure_future(
                    self._query(target, any_port)
                )
                task.add_done_callback(lambda t: self._cache_lookup(key, t))
            # Shielded, because other callers may wait for the same lookup if this one is cancelled.
            answer = await asyncio.shield(task)
        if answer.failure is not None:
            kind, reason, detail = answer.failure
            raise (NotResolved if kind is ErrorClass.TRANSIENT else Failure)(
                kind, reason, detail=detail
            )
        return Target(target.scheme, target.host, target.port, answer.addresses)

    def _cache_lookup(self, key: tuple[str, int], task: asyncio.Task[_CachedLookup]) -> None:
        self._running_lookups.pop(key, None)
        if task.cancelled() or task.exception() is not None:
            return
        self._lookups.pop(key, None)  # move the entry to the end: the oldest are dropped first
        self._lookups[key] = task.result()
        while len(self._lookups) > self._max_names:
            del self._lookups[next(iter(self._lookups))]

    async def _query(self, target: Target, any_port: bool) -> _CachedLookup:
        host, port = target.host, target.port
        try:
            async with asyncio.timeout(self._timeout):
                found = list(dict.fromkeys(await self._resolver(host, port)))
        except TimeoutError:
            return self._failed("the name server did not answer in time", host)
        except socket.gaierror as e:
            missing = e.errno in (
                socket.EAI_NONAME,
                getattr(socket, "EAI_NODATA", socket.EAI_NONAME),
            )
            return self._failed(
                "the name does not exist" if missing else "the name could not be resolved",
                f"{host}: {e.strerror}",
            )
        except (OSError, UnicodeError, RuntimeError) as e:
            return self._failed("the name could not be resolved", f"{host}: {e}")
        if not found:
            return self._failed("the name has no address", host)
        if len(found) > self._max_answers:
            return self._refused("more addresses than any honest name has", f"{host}: {len(found)}")
        # One forbidden address refuses the name. Otherwise the next lookup, or the second try of a
        # connection, could use that address.
        for ip in found:
            if (reason := self._refusal(host, ip, port, any_port=any_port)) is not None:
                return self._refused(reason, f"{host}:{port} resolves to {ip}")
        return _CachedLookup(self._clock() + self._ttl, tuple(found))

    async def _ask_system(self, host: str, port: int) -> list[str]:
        query = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        found = await asyncio.get_running_loop().run_in_executor(self._threads, query)
        return [str(sockaddr[0]) for *_, sockaddr in found]

    def _failed(self, reason: str, detail: str) -> _CachedLookup:
        return _CachedLookup(
            self._clock() + self._failure_ttl, failure=(ErrorClass.TRANSIENT, reason, detail)
        )

    def _refused(self, reason: str, detail: str) -> _CachedLookup:
        f = _forbidden(reason, detail)
        return _CachedLookup(
            self._clock() + self._failure_ttl, failure=(f.kind, f.reason, f.detail)
        )


def _forbidden(reason: str, detail: str) -> Failure:
    """Return a failure whose reason is the same for similar addresses, so that dead letters group.

    The detail has the address.
    """
    return Failure(
        ErrorClass.PERMANENT,
        f"forbidden address: {reason}",
        detail=f"{detail}; private targets need an entry in net.allow (PENSTOCK_NET_ALLOW)",
    )
