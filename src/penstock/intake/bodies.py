"""Memory of request bodies: one limit in bytes for all connections."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from penstock.errors import RequestRefused

MIN_BUDGET = 24 << 20  # bytes of all bodies together
# Untrusted bodies may use this share. A forged signature costs nothing, so a body with a signature
# is untrusted until its sender is known.
UNTRUSTED_SHARE = 0.5
# Untrusted bodies of one address may use this share of that share. Above it, they are the first
# that are dropped.
ADDRESS_SHARE = 0.125


class Body:
    """The body of one request, and its share of the budget."""

    __slots__ = ("address", "data", "drop", "evicted", "size", "trusted")

    def __init__(self, trusted: bool, address: str, drop: Callable[[], None]) -> None:
        self.data = bytearray()
        self.size = 0  # bytes that are counted
        self.trusted = trusted  # True if the sender was verified, now or before
        self.address = address
        self.drop = drop  # ends the reading of the body
        self.evicted = False


class BodyBudget:
    """Counts the bytes of all bodies, until their requests are answered.

    If the budget is full, the oldest incomplete body is dropped, an untrusted one first. Of these,
    bodies of an address that has more than its share are first. A complete body is never dropped.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self._untrusted_limit = limit, int(limit * UNTRUSTED_SHARE)
        self.held = 0
        self._untrusted = 0  # bytes
        self._address_limit = int(self._untrusted_limit * ADDRESS_SHARE)
        self._addresses: Counter[str] = Counter()  # bytes of untrusted bodies, by address
        self._incomplete: dict[bool, dict[Body, None]] = {False: {}, True: {}}  # by `trusted`

    def open(self, trusted: bool, address: str, drop: Callable[[], None]) -> Body:
        body = Body(trusted, address, drop)
        self._incomplete[trusted][body] = None
        return body

    def add(self, body: Body, chunk: bytes) -> None:
        """Append received bytes. Raises RequestRefused if there is no memory for them."""
        if not body.evicted:
            body.data += chunk
            self._count(body, len(chunk))
        while self._is_over():  # at most until this body is dropped
            victim = self._victim()
            self.close(victim)
            victim.evicted = True
            victim.drop()
        if body.evicted:
            raise no_memory()

    def complete(self, body: Body) -> bytes:
        """Return the body. It stays counted until `close`."""
        self._incomplete[body.trusted].pop(body, None)
        data, body.data = bytes(body.data), bytearray()
        return data

    def close(self, body: Body) -> None:
        """Give back the memory of a body. May be called twice."""
        self._incomplete[body.trusted].pop(body, None)
        self._count(body, -body.size)
        body.data = bytearray()

    def _victim(self) -> Body:
        # The untrusted share is exceeded only while an untrusted body grows.
        bodies = self._incomplete[False] or self._incomplete[True]
        above = (body for body in bodies if self._addresses[body.address] > self._address_limit)
        return next(above, next(iter(bodies)))

    def _count(self, body: Body, change: int) -> None:
        body.size += change
        self.held += change
        if not body.trusted:
            self._untrusted += change
            self._addresses[body.address] += change
            if not self._addresses[body.address]:
                del self._addresses[body.address]

    def _is_over(self) -> bool:
        return self.held > self.limit or self._untrusted > self._untrusted_limit


def no_memory() -> RequestRefused:
    return RequestRefused(
        503, "the bodies of all requests use too much memory", hint="send it again", after=1.0
    )
