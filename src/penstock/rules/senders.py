"""Limits of senders of requests: rates, addresses behind proxies, and senders without signature."""

from __future__ import annotations

import ipaddress
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TypeAlias

Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

MAX_ADDRESSES = 4096  # addresses that a table remembers. The oldest one is forgotten.
# Requests per second that are not verified, and the size of a burst after an idle time.
ADDRESS_RATE, ADDRESS_BURST = 20.0, 100  # of one address
TOTAL_RATE, TOTAL_BURST = 200.0, 1000  # of all addresses
TRUSTED_FOR = 3600.0  # seconds after a verified request in which its address is known


class RateLimiter:
    """A rate limit: `rate` requests per second, and up to `burst` requests after an idle time."""

    def __init__(self, rate: float, burst: int) -> None:
        self._interval, self._burst, self._next = 1 / rate, burst, -math.inf

    def early(self, now: float) -> float:
        """Return the seconds until a request is allowed. Takes no request."""
        early = max(self._next, now) - (self._burst - 1) * self._interval - now
        return early if early > 1e-9 else 0.0

    def wait(self, now: float) -> float:
        """Take one request and return 0, or return the seconds until a request is allowed."""
        if early := self.early(now):
            return early
        self._next = max(self._next, now) + self._interval
        return 0.0


class AddressLimits:
    """One rate limit for each address. The table has a limited size."""

    def __init__(self, rate: float, burst: int, most: int = MAX_ADDRESSES) -> None:
        self._rate, self._burst, self._most = rate, burst, most
        self._limiters: OrderedDict[str, RateLimiter] = OrderedDict()

    def __len__(self) -> int:
        return len(self._limiters)

    def wait(self, address: str, now: float) -> float:
        """Take one request of the address and return 0, or return the seconds to wait."""
        limiter = self._limiters.get(address)
        if limiter is None:
            limiter = self._limiters[address] = RateLimiter(self._rate, self._burst)
            if len(self._limiters) > self._most:
                self._limiters.popitem(last=False)
        self._limiters.move_to_end(address)
        return limiter.wait(now)

    def early(self, address: str, now: float) -> float:
        """Return the seconds until a request of the address is allowed. Takes no request."""
        limiter = self._limiters.get(address)
        return 0.0 if limiter is None else limiter.early(now)


class Unverified:
    """Limits of all requests whose signature was not verified.

    A verified request makes its address known for a while. Senders without a valid signature
    cannot add known addresses, and so cannot remove them.
    """

    def __init__(self) -> None:
        self._addresses = AddressLimits(ADDRESS_RATE, ADDRESS_BURST)
        self._total = RateLimiter(TOTAL_RATE, TOTAL_BURST)
        self._known: OrderedDict[str, float] = OrderedDict()

    def charge(self, address: str, now: float) -> float:
        """Take one request and return 0, or return the seconds until one is allowed.

        A request over the limit of its address does not count in the total. So one address cannot
        use the limit of all others.
        """
        return self._addresses.wait(address, now) or self._total.wait(now)

    def early(self, address: str, now: float) -> float:
        """Return the seconds until a request of the address is allowed. Takes no request.

        The total does not count here: many addresses must not limit another one.
        """
        return self._addresses.early(address, now)

    def verified(self, address: str, now: float) -> None:
        """Remember that a request of this address was verified."""
        self._known[address] = now
        self._known.move_to_end(address)
        if len(self._known) > MAX_ADDRESSES:
            self._known.popitem(last=False)

    def is_known(self, address: str, now: float) -> bool:
        return now - self._known.get(address, -math.inf) < TRUSTED_FOR


def address_group(text: str) -> str:
    """Return the address that the limits count: an IPv4 address, or the /64 of an IPv6 address.

    One machine usually has a whole /64. A text that is not an address is its own group.
    """
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return text[:100]
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))
    return str(address)


def is_in(text: str, networks: Sequence[Network]) -> bool:
    """Return whether a text is an address in one of the networks."""
    if not networks:
        return False
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return any(address in network for network in networks)


def sender(peer: str, forwarded: Callable[[], Sequence[str]], proxies: Sequence[Network]) -> str:
    """Return the address that sent a request, for its limits.

    `forwarded` returns the values of X-Forwarded-For. It is read only if the peer is a trusted
    proxy. Each proxy appends the address of its client. So the sender is the last address that is
    not a trusted proxy. Addresses before it come from the sender, and are not used.
    """
    address = peer
    if is_in(peer, proxies):
        for part in reversed(",".join(forwarded()).split(",")):
            if not _is_address(part.strip()):
                break
            address = part.strip()
            if not is_in(address, proxies):
                break
    return address_group(address)


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
