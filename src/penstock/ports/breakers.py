"""Recent ends of events, and the hosts and extractors that the breaker paused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec


class OpenBreaker(msgspec.Struct, frozen=True):
    """A host or extractor that is paused."""

    what: str  # "host:HOST" or "extractor:NAME"
    error_class: str  # most frequent class of its dead events, "" if an operator paused it
    reason: str
    at: float  # when it was paused
    counted: bool  # this pause counts for the pause of the topic


class Breakers(Protocol):
    """Recent ends and open breakers, inside one transaction."""

    def record_ends(self, ends: Mapping[tuple[str, str], int], now: float) -> None:
        """Add to the recent ends.

        `ends` has the number of ends by (what, class). `what` is "topic:NAME", "host:HOST" or
        "extractor:NAME". The class is that of dead events, and "" for other ends.
        """

    def recent_ends(self, what: str, seconds: float, now: float) -> dict[str, int]:
        """Return the ends of the last `seconds` by class."""

    def reset_ends(self, what: str) -> None:
        """Delete the recent ends of a topic, host or extractor."""

    def active_hosts(self, seconds: float, now: float) -> set[str]:
        """Return "host:HOST" of each host with ends in the last `seconds`."""

    def open(
        self, what: str, error_class: str, reason: str, now: float, *, counted: bool = True
    ) -> bool:
        """Record a pause. Return False if there was one. Then nothing changes."""

    def close(self, what: str) -> bool:
        """Delete a pause and the recent ends behind it. Return False if there was no pause."""

    def opened(self) -> Sequence[OpenBreaker]:
        """Return all pauses, the oldest first."""

    def stop_counting(self) -> None:
        """Let the present pauses no longer count for the pause of the topic."""

    def prune(self, before: float) -> None:
        """Delete ends from before a time."""
