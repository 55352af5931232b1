"""The rig of the claims conformance suite, and workers with claims in the ledger or outside.

See `claims_suite` for the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from penstock.ports import (
    ClaimChange,
    ExternalClaims,
    Holder,
    HostTable,
    Pace,
    ProxyHealth,
    RobotsCache,
    Transaction,
    UnitOfWork,
)
from penstock.rules import pace
from penstock.testing.store_rig import StoreRig

T = TypeVar("T")
RATE = 10.0  # requests per second
# The rig opens each worker with these limits of a host.
LIMITS = pace.Limits(rate=RATE, burst=1, jitter=0.0, concurrency=8)


class HostAccess(Pace, RobotsCache, Protocol):
    """Slots of hosts and the cache of robots.txt. Every claims adapter has both."""


class FleetProxyHealth(ProxyHealth, Protocol):
    """Health of proxies that the fleet shares."""

    async def refresh(self) -> None:
        """Read changes that other workers recorded."""

    async def prune(self) -> None:
        """Delete old rows that no decision needs."""


class ClaimsWorker(Protocol):
    """The claims of one worker, as the tests use them. Two classes below implement it."""

    access: HostAccess
    proxies: FleetProxyHealth

    async def holders(self, *keys: bytes) -> dict[bytes, Holder]:
        """Return the holders of those URL keys that have a claim."""

    async def take(self, changes: Sequence[ClaimChange], now: float) -> list[bool]:
        """Take each claim whose owner is the expected one, or already the new one."""

    async def set_next(self, key: bytes, id_: str, expected: str) -> bool:
        """Record the event that is delayed to the end of the window, if the owner is expected."""

    async def prune(self, before: float) -> None: ...

    async def with_hosts(self, work: Callable[[HostTable], T]) -> T:
        """Run an operator's command on the state of hosts."""


class SharedClaimsWorker:
    """Claims in the ledger's store. Each call is one transaction."""

    def __init__(self, ledger: UnitOfWork, access: HostAccess, proxies: FleetProxyHealth) -> None:
        self.ledger, self.access, self.proxies = ledger, access, proxies

    async def holders(self, *keys: bytes) -> dict[bytes, Holder]:
        def work(tx: Transaction) -> dict[bytes, Holder]:
            found = tx.claims.holders(keys)
            assert set(found) == set(keys), "`holders` returns every key"
            for key in keys:
                assert tx.claims.holder(key) == found[key]
            return {key: holder for key, holder in found.items() if holder is not None}

        return await self.ledger.read(work)

    async def take(self, changes: Sequence[ClaimChange], now: float) -> list[bool]:
        return await self.ledger.write(lambda tx: take_in(tx, changes, now))

    async def set_next(self, key: bytes, id_: str, expected: str) -> bool:
        def work(tx: Transaction) -> bool:
            holder = tx.claims.holder(key)
            if holder is None or holder.owner != expected:
                return False
            tx.claims.set_next(key, id_)
            return True

        return await self.ledger.write(work)

    async def prune(self, before: float) -> None:
        # A call deletes a part of the claims.
        for _ in range(3):
            await self.ledger.write(lambda tx: tx.claims.prune(before))

    async def with_hosts(self, work: Callable[[HostTable], T]) -> T:
        return await self.ledger.write(lambda tx: work(tx.hosts))


def take_in(tx: Transaction, changes: Sequence[ClaimChange], now: float) -> list[bool]:
    """Take claims in a transaction as the engine does: free claims first, then the others."""
    free = {c.key: c.owner for c in changes if c.expected is None}
    acquired = set(tx.claims.acquire(free, now))
    answers = []
    for c in changes:
        holder = tx.claims.holder(c.key)
        if c.key in acquired and c.expected is None and free[c.key] == c.owner:
            answers.append(True)
            if c.last_success is not None:
                tx.claims.take_over([c], now)
        elif holder is not None and holder.owner == c.owner:
            answers.append(True)
        elif holder is not None and holder.owner == c.expected:
            tx.claims.take_over([c], now)
            answers.append(True)
        else:
            answers.append(False)
    return answers


class ExternalClaimsWorker:
    """Claims in another store than the ledger."""

    def __init__(
        self,
        claims: ExternalClaims,
        hosts: HostTable,
        access: HostAccess,
        proxies: FleetProxyHealth,
    ) -> None:
        self.claims, self.hosts, self.access, self.proxies = claims, hosts, access, proxies

    async def holders(self, *keys: bytes) -> dict[bytes, Holder]:
        return await self.claims.holders(keys)

    async def take(self, changes: Sequence[ClaimChange], now: float) -> list[bool]:
        return await self.claims.take(changes)

    async def set_next(self, key: bytes, id_: str, expected: str) -> bool:
        return await self.claims.set_next(key, id_, expected)

    async def prune(self, before: float) -> None:
        await self.claims.prune(before)

    async def with_hosts(self, work: Callable[[HostTable], T]) -> T:
        return work(self.hosts)


class ClaimsRig(StoreRig[ClaimsWorker]):
    """Base class of a rig.

    `open` returns a `SharedClaimsWorker` or an `ExternalClaimsWorker` with the limits `LIMITS`.
    """

    # Seconds by which two times may differ. With real time it should be longer than a busy machine
    # may stall. The tests compare times that differ by 10 s or more.
    accuracy = 5.0

    async def take(
        self,
        worker: ClaimsWorker,
        key: bytes,
        owner: str,
        expected: str | None = None,
        last_success: str | None = None,
    ) -> bool:
        change = ClaimChange(key, owner, last_success, expected)
        (answer,) = await worker.take([change], self.now())
        return answer

    async def holder(self, worker: ClaimsWorker, key: bytes) -> Holder | None:
        return (await worker.holders(key)).get(key)

    async def slots(self, worker: ClaimsWorker, host: str, n: int = 1) -> list[float]:
        return list((await worker.access.reserve({host: n}))[host])

    def near(self, one: float, two: float) -> bool:
        return abs(one - two) <= self.accuracy
