"""Memory of request bodies: one limit in bytes for all connections."""

from __future__ import annotations

from collections.abc import Callable

from penstock.errors import RequestRefused

MIN_BUDGET = 24 << 20  # bytes of all bodies together
# Requests with an unsigned body may use this share. The rest belongs to requests whose headers have
# a signature.
UNSIGNED_SHARE = 0.5


class Body:
    """The body of one request, and its share of the budget."""

    __slots__ = ("data", "drop", "evicted", "signed", "size")

    def __init__(self, signed: bool, drop: Callable[[], None]) -> None:
        self.data = bytearray()
        self.size = 0  # bytes that are counted
        self.signed = signed  # True if the headers have a signature
        self.drop = drop  # ends the reading of the body
        self.evicted = False


class BodyBudget:
    """Counts the bytes of all bodies, until their requests are answered.

    If the budget is full, the oldest incomplete body is dropped, an unsigned one first. A complete
    body is never dropped.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self._unsigned_limit = limit, int(limit * UNSIGNED_SHARE)
        self.held = 0
        self._unsigned = 0  # bytes
        self._incomplete: dict[bool, dict[Body, None]] = {False: {}, True: {}}  # by `signed`

    def open(self, signed: bool, drop: Callable[[], None]) -> Body:
        body = Body(signed, drop)
        self._incomplete[signed][body] = None
        return body

    def add(self, body: Body, chunk: bytes) -> None:
        """Append received bytes. Raises RequestRefused if there is no memory for them."""
        body.data += chunk
        self._count(body, len(chunk))
        while not body.evicted and self._is_over():
            # The unsigned share is exceeded only while an unsigned body grows.
            victim = next(iter(self._incomplete[False] or self._incomplete[True]))
            self.close(victim)
            victim.evicted = True
            victim.drop()
        if body.evicted:
            raise no_memory()

    def complete(self, body: Body) -> bytes:
        """Return the body. It stays counted until `close`."""
        self._incomplete[body.signed].pop(body, None)
        data, body.data = bytes(body.data), bytearray()
        return data

    def close(self, body: Body) -> None:
        """Give back the memory of a body. May be called twice."""
        self._incomplete[body.signed].pop(body, None)
        self._count(body, -body.size)
        body.data = bytearray()

    def _count(self, body: Body, change: int) -> None:
        body.size += change
        self.held += change
        if not body.signed:
            self._unsigned += change

    def _is_over(self) -> bool:
        return self.held > self.limit or self._unsigned > self._unsigned_limit


def no_memory() -> RequestRefused:
    return RequestRefused(503, "too much is being sent at once", hint="send it again", after=1.0)
