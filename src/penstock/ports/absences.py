"""Absent URLs: known URLs that answer 404 or 410, and removals of their records that wait."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from penstock.model import Record
from penstock.rules.gone import HostAbsences, Past

# Extractor -> its version, and the fields of its record key, if the key consists of fields.
ExtractorKeys = Mapping[str, tuple[int, tuple[str, ...]]]


class AbsentVisit(msgspec.Struct, frozen=True, kw_only=True):
    """A visit of a known URL that answered 404 or 410."""

    url_key: bytes
    host: str
    row: int  # row number of its event
    visits: int  # absent visits in a row, with this one
    leaving: bool  # the records of the URL will be removed


class Leaving(msgspec.Struct, frozen=True, kw_only=True):
    """A URL whose records are to be removed."""

    url_key: bytes
    row: int  # row number of the newest absent visit's event
    envelope: bytes  # of that event
    at: float  # time of that visit
    status: int  # HTTP status of that visit


class HeldRemovals(msgspec.Struct, frozen=True, kw_only=True):
    """Removals of one host that wait for an operator."""

    host: str
    urls: int
    known: int  # URLs of the host with a success that are not gone
    since: float


class AbsenceTable(Protocol):
    """Absent URLs of the ledger, inside one transaction."""

    def past(self, urls: Sequence[tuple[bytes, int]]) -> dict[bytes, Past]:
        """Return the newest success of each URL that has one.

        `urls` are URL keys, each with the row number of an event that does not count.
        """

    def record(self, visits: Sequence[AbsentVisit], now: float) -> None:
        """Record absent visits."""

    def add_known(self, hosts: Mapping[str, int]) -> None:
        """Count URLs of these hosts that had their first success."""

    def leaving_hosts(self, after: str, limit: int) -> list[str]:
        """Return the first hosts after `after` with removals that were not decided yet."""

    def host(self, host: str, since: float) -> HostAbsences:
        """Return the absent URLs of a host. Counts visits after `since`."""

    def drop_returned(self, host: str) -> None:
        """Delete the absences of URLs that have succeeded since."""

    def hold(self, host: str, now: float) -> None:
        """Let the removals of a host wait for an operator."""

    def approve(self, host: str, until: float) -> int:
        """Allow the removals of a host until then. Return how many waited."""

    def held(self) -> list[HeldRemovals]:
        """Return the removals that wait for an operator, without URLs that have succeeded since."""

    def leaving(self, host: str, limit: int) -> list[Leaving]:
        """Return URLs of a host whose removals may be applied."""

    def records_of(self, url: Leaving, page_url: str, keys: ExtractorKeys) -> list[Record]:
        """Return removals of the records whose newest value came from this URL."""

    def mark_gone(self, urls: Sequence[Leaving], reason: str, now: float) -> None:
        """Record that these URLs are gone. Their next page is extracted even if it is unchanged."""
