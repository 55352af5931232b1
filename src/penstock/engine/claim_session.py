"""Claims around one transaction of the ledger, in the ledger's store or in an external store."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

from penstock.model import Event
from penstock.ports import Baseline, ClaimChange, ExternalClaims, Holder, Transaction, UnitOfWork

Takeovers: TypeAlias = Callable[
    [Transaction, Mapping[bytes, Holder], Mapping[bytes, Event]], list[ClaimChange]
]


class SharedClaims:
    """Claims in the ledger's store. Every read and change is part of the transaction."""

    takes_over = True  # this transaction can take claims of other events

    async def open(self, keys: Callable[[], Iterable[bytes]]) -> SharedClaims:
        """Prepare a transaction that reads the claims of these URL keys."""
        return self

    async def open_for_start(
        self, wanted: Callable[[], Mapping[bytes, Event]], takeovers: Takeovers
    ) -> SharedClaims:
        """Prepare a transaction that starts these events."""
        return self

    def holder(self, tx: Transaction, key: bytes) -> Holder | None:
        return tx.claims.holder(key)

    def holders(self, tx: Transaction, keys: Sequence[bytes]) -> dict[bytes, Holder | None]:
        """Return holders of many keys if one query for all keys is cheaper.

        The result may be empty. Then use `holder` for each key.
        """
        return tx.claims.holders(keys) if keys else {}

    def acquire(
        self, tx: Transaction, free: Mapping[bytes, str], now: float
    ) -> dict[bytes, ClaimChange]:
        """Take claims (URL key -> owner) that no event had. Return the claims taken."""
        return {key: ClaimChange(key, free[key]) for key in tx.claims.acquire(free, now)}

    def take_over(self, tx: Transaction, changes: Sequence[ClaimChange], now: float) -> None:
        tx.claims.take_over(changes, now)

    def set_next(self, tx: Transaction, key: bytes, id: str) -> None:
        tx.claims.set_next(key, id)

    def reserve(
        self, tx: Transaction, wants: Mapping[str, int], within: float
    ) -> Mapping[str, Sequence[float]]:
        """Reserve slots in the transaction."""
        return tx.hosts.reserve(wants, within)

    async def apply(self) -> None:
        """Do nothing: the transaction has written everything."""


class PrefetchedClaims:
    """Claims in an external store. They are read and taken before the ledger's transaction."""

    def __init__(self, claims: ExternalClaims, uow: UnitOfWork) -> None:
        self._claims, self._uow = claims, uow

    async def open(self, keys: Callable[[], Iterable[bytes]]) -> PrefetchedSession:
        return PrefetchedSession(self._claims, await self._claims.holders(list(keys())))

    async def open_for_start(
        self, wanted: Callable[[], Mapping[bytes, Event]], takeovers: Takeovers
    ) -> PrefetchedSession:
        """Take the claims before the start is recorded.

        The owner of a claim is an event and not a worker. If this process crashes before the start,
        the event still owns its claim when it is delivered again.
        """
        events = wanted()
        holders = await self._claims.holders(list(events))
        changes = [ClaimChange(key, e.id) for key, e in events.items() if key not in holders]
        if any(holders[key].owner != e.id for key, e in events.items() if key in holders):
            changes += await self._uow.read(lambda tx: takeovers(tx, holders, events))
        session = PrefetchedSession(self._claims, holders)
        lost = []
        for change, taken in zip(changes, await self._claims.take(changes), strict=True):
            if taken:
                session.add(change)
            else:
                lost.append(change.key)
        if lost:
            holders |= await self._claims.holders(lost)
        return session


class PrefetchedSession:
    """Claims of an external store, read before the transaction."""

    takes_over = False

    def __init__(self, claims: ExternalClaims, holders: dict[bytes, Holder]) -> None:
        self._claims, self._holders = claims, holders
        self._taken: dict[bytes, ClaimChange] = {}
        self._next: dict[bytes, tuple[str, str]] = {}  # URL key -> next event, expected owner

    def add(self, change: ClaimChange) -> None:
        """Record a claim that was taken before the transaction."""
        self._holders[change.key] = Holder(change.owner, change.last_success, None)
        self._taken[change.key] = change

    def holder(self, tx: Transaction, key: bytes) -> Holder | None:
        return self._holders.get(key)

    def holders(self, tx: Transaction, keys: Sequence[bytes]) -> dict[bytes, Holder | None]:
        """Return no holders: `holder` needs no query."""
        return {}

    def acquire(
        self, tx: Transaction, free: Mapping[bytes, str], now: float
    ) -> dict[bytes, ClaimChange]:
        return dict(self._taken)

    def take_over(self, tx: Transaction, changes: Sequence[ClaimChange], now: float) -> None:
        """Do nothing: `open_for_start` has taken the claims."""

    def set_next(self, tx: Transaction, key: bytes, id: str) -> None:
        self._next[key] = (id, self._holders[key].owner)

    def reserve(self, tx: Transaction, wants: Mapping[str, int], within: float) -> None:
        """Return None: `Pace` reserves the slots after the transaction."""

    async def apply(self) -> None:
        """Write the decisions of the committed transaction to the external store."""
        for key, (id_, owner) in self._next.items():
            await self._claims.set_next(key, id_, owner)


Claims: TypeAlias = SharedClaims | PrefetchedClaims
ClaimSession: TypeAlias = SharedClaims | PrefetchedSession  # claims as one transaction sees them


def baseline_of(tx: Transaction, holder: Holder) -> Baseline | None:
    """Return the baseline of the claim's owner, or else of the last success before it."""
    found = tx.lookup.baseline(holder.owner)
    if found is None and holder.good is not None:
        found = tx.lookup.baseline(holder.good)
    return found


def last_success(tx: Transaction, holder: Holder) -> str | None:
    """Return the claim's owner if it has a baseline, or else the last success before it."""
    return holder.owner if tx.lookup.baseline(holder.owner) else holder.good
