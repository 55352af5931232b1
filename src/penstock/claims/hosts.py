"""What is remembered of hosts for people, wherever the claims lie: exceptions with their reasons,
cached robots.txt. Each store's own is beside.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from penstock.ports import Exempt
from penstock.rules import pace

EVERYWHERE = "*"  # the host of an exception that the configuration makes
ROBOTS = "robots"


class Kept(msgspec.Struct, frozen=True):
    """A robots.txt in the cache. Status 0: it could not be reached."""

    origin: str
    status: int
    until: float
    body: bytes


class Hosts(ABC):
    """`tx` is the ledger's transaction; claims that lie apart take no part in it."""

    @abstractmethod
    def change_in(
        self, tx: Any, host: str, change: Callable[[pace.HostState], pace.HostState]
    ) -> pace.HostState: ...

    @abstractmethod
    def exceptions_in(
        self, tx: Any, hosts: Sequence[str] | None = None, *, ended: bool = False, limit: int = 1000
    ) -> list[Exempt]:
        """Of these hosts, or of all; those that hold, or with `ended` the past ones too. The newest
        first.
        """

    @abstractmethod
    def note_in(
        self, tx: Any, kind: str, host: str, reason: str, who: str, *, at_once: bool = False
    ) -> None:
        """From now on, in place of one that holds; `at_once`: for this one time only."""

    @abstractmethod
    def end_in(self, tx: Any, kind: str, host: str) -> bool:
        """False: none held."""

    def ignore_robots_in(self, tx: Any, host: str, reason: str, who: str) -> None:
        self.note_in(tx, ROBOTS, host, reason, who)
        self.change_in(tx, host, lambda state: msgspec.structs.replace(state, ignores_robots=True))

    def obey_robots_in(self, tx: Any, host: str) -> bool:
        """False: it was obeyed all along."""
        self.change_in(tx, host, lambda state: msgspec.structs.replace(state, ignores_robots=False))
        return self.end_in(tx, ROBOTS, host)

    def configured_in(self, tx: Any, reasons: Mapping[str, str], who: str) -> None:
        """Exceptions that the configuration makes everywhere: a kind with a reason holds, one with
        an empty reason does not (any more).
        """
        held = {noted.kind: noted.reason for noted in self.exceptions_in(tx, [EVERYWHERE])}
        for kind, reason in reasons.items():
            if reason and held.get(kind) != reason:
                self.note_in(tx, kind, EVERYWHERE, reason, who)
            elif not reason and kind in held:
                self.end_in(tx, kind, EVERYWHERE)
