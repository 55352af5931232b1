"""Claims of a store that lies apart from the ledger, as they were read before the books'
transaction, and what it wants changed in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.ports import Holder


class Seen:
    """Answers the books' questions inside their transaction as a claims store does that shares it."""

    apart = True

    def __init__(self, holders: dict[bytes, Holder]) -> None:
        self.holders = holders
        self.taken: dict[
            bytes, tuple[str, str | None]
        ] = {}  # by us, a moment ago: owner and last success
        self.nexts: list[
            tuple[bytes, str, str]
        ] = []  # (URL, event to wait for the window's end, owner of the claim)

    def won(self, key: bytes, owner: str, good: str | None) -> None:
        self.holders[key] = Holder(owner, good, None)
        self.taken[key] = owner, good

    def holder_in(self, tx: Any, key: bytes) -> Holder | None:
        return self.holders.get(key)

    def next_in(self, tx: Any, key: bytes, event_id: str) -> None:
        self.nexts.append((key, event_id, self.holders[key].owner))

    def take_in(self, tx: Any, rows: Sequence[tuple[bytes, str, str | None]], now: float) -> None:
        """They were taken before: a start that the books do not get to note leaves a claim whose
        owner comes back.
        """
