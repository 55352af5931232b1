"""The claim table of a transaction whose claims are in another store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

from penstock.ports import ClaimChange, Holder


class NoClaimTable:
    """A claim table whose methods fail. External claims are not used in a ledger transaction."""

    def holder(self, key: bytes) -> Holder | None:
        _fail()

    def holders(self, keys: Sequence[bytes]) -> dict[bytes, Holder | None]:
        _fail()

    def acquire(self, wanted: Mapping[bytes, str], now: float) -> list[bytes]:
        _fail()

    def take_over(self, changes: Sequence[ClaimChange], now: float) -> None:
        _fail()

    def set_next(self, key: bytes, id: str) -> None:
        _fail()

    def references(self, key: bytes, id: str) -> bool:
        _fail()

    def prune(self, before: float) -> None:
        _fail()


def _fail() -> NoReturn:
    raise AssertionError("the claims are in another store than the ledger")
