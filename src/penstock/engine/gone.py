"""Absent pages: the end of an event with a 404 or 410, and removals of the URL's records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

import msgspec

from penstock.engine.settings import LifecycleSettings
from penstock.errors import NewerMessage
from penstock.model import Event, Reason, Record, decode_event
from penstock.ports import (
    AbsentVisit,
    Clock,
    End,
    Leaving,
    PageMeta,
    RecordsOfEvent,
    Transaction,
    UnitOfWork,
)
from penstock.rules import gone
from penstock.rules.reasons import sentence

HOSTS = 100  # hosts whose removals one call of `settle` decides
BATCH = 100  # URLs whose records one transaction removes
# Writes records to the sinks: (transaction, records by URL key, counters by topic).
WriteRecords: TypeAlias = Callable[
    [Transaction, Sequence[tuple[RecordsOfEvent, bytes]], Mapping[str, Counter[str]]], None
]


class Visits:
    """Ends of one transaction whose pages were absent, or came for the first time."""

    def __init__(
        self,
        tx: Transaction,
        ends: Sequence[End],
        limits: gone.Limits,
        url_key: Callable[[str], bytes],
    ) -> None:
        self._tx, self._url_key = tx, url_key
        self._leaving: dict[int, gone.Absence] = {}  # row number of the event -> its absence
        absent = [end for end in ends if end.outcome == "absent"]
        self.ends = ends
        if absent:
            past = tx.absences.past([(url_key(end.event.url), end.row) for end in absent])
            self.ends = [self._decided(end, limits, past) for end in ends]

    def _decided(self, end: End, limits: gone.Limits, past: Mapping[bytes, gone.Past]) -> End:
        if end.outcome != "absent":
            return end
        event = end.event
        judge = partial(
            gone.judge, limits, past.get(self._url_key(event.url)), status=end.response_status or 0
        )
        found = judge(removed=gone.says_removed(event.data))
        if found.result == "missing" and self._duplicate_says_removed(event.id):
            found = judge(removed=True)
        if found.result == "not_found":
            return msgspec.structs.replace(end, outcome="dead")
        success = partial(
            msgspec.structs.replace, end, outcome="success", error_class="", fingerprint=""
        )
        if found.result == "gone":
            return success(result="gone", reason=sentence(Reason.GONE))
        self._leaving[end.row] = found
        reason = sentence(Reason.MISSING, found.visits, found.needed)
        return success(result="missing", reason=reason)

    def _duplicate_says_removed(self, owner: str) -> bool:
        """Return True if the newest duplicate reports a removal. This visit was also for it."""
        newest = self._tx.lookup.newest_duplicate(owner)
        if newest is None:
            return False
        try:
            return gone.says_removed(decode_event(newest.envelope).data)
        except NewerMessage:
            return False

    def record(self, successes: Sequence[End], now: float) -> None:
        """Record the absent visits, and count URLs that are known from now on."""
        if self._leaving:
            visits = [
                AbsentVisit(
                    url_key=self._url_key(end.event.url),
                    host=end.event.key,
                    row=end.row,
                    visits=found.visits,
                    leaving=found.result == "leaving",
                )
                for end in successes
                if (found := self._leaving.get(end.row)) is not None
            ]
            self._tx.absences.record(visits, now)
        first = [end for end in successes if end.meta is not None and end.meta.first]
        if first:
            self._tx.absences.add_known(Counter(end.event.key for end in self._unknown(first)))

    def _unknown(self, ends: Sequence[End]) -> Sequence[End]:
        """Return ends whose URL is not known. A forced event was admitted without its baseline."""
        forced = [(self._url_key(e.event.url), e.row) for e in ends if e.event.force]
        if not forced:
            return ends
        past = self._tx.absences.past(forced)
        known = {key for key, newest in past.items() if gone.is_known(newest)}
        return [e for e in ends if not e.event.force or self._url_key(e.event.url) not in known]


class _Removal(msgspec.Struct, frozen=True):
    """Removed records of one URL."""

    event: Event
    row: int
    records: Sequence[Record]
    meta: PageMeta | None


class Removals:
    """Removes the records of URLs that are gone. Several workers may do it at the same time."""

    def __init__(
        self, uow: UnitOfWork, write: WriteRecords, settings: LifecycleSettings, *, clock: Clock
    ) -> None:
        self._uow, self._write, self._settings, self._clock = uow, write, settings, clock
        # The next call continues after this host, so that hosts that have not settled do not hide
        # the others.
        self._after = ""

    async def settle(self, *, idle: bool = False) -> bool:
        """Decide about waiting removals. Return True if records were removed.

        `idle` is True if no event is open. Then all hosts are decided. Called once a second.
        """
        removed = False
        after = "" if idle else self._after
        while True:
            hosts = await self._uow.read(partial(_leaving_hosts, after))
            for host in hosts:
                while n := await self._uow.write(partial(self._settle_host, host, idle)):
                    removed = True
                    if n < BATCH:
                        break
            after = self._after = hosts[-1] if len(hosts) == HOSTS else ""
            if not (idle and after):
                return removed

    def _settle_host(self, host: str, idle: bool, tx: Transaction) -> int:
        """Return the number of URLs whose records were removed."""
        now = self._clock.now()
        decide = partial(gone.decide, self._settings.gone, now=now, idle=idle)
        # Reading which URLs have returned is slow, so it waits until the host has settled.
        if decide(tx.absences.host(host, now - gone.HOUR)) == "wait":
            return 0
        tx.absences.drop_returned(host)
        match decide(tx.absences.host(host, now - gone.HOUR)):
            case "remove":
                return self._remove(tx, tx.absences.leaving(host, BATCH), now)
            case "hold":
                tx.absences.hold(host, now)
        return 0

    def _remove(self, tx: Transaction, urls: Sequence[Leaving], now: float) -> int:
        removals: list[tuple[RecordsOfEvent, bytes]] = []
        counts: dict[str, Counter[str]] = {}
        readable = []
        for url in urls:
            try:
                event = decode_event(url.envelope)
            except NewerMessage:
                continue  # a worker of the newer release removes its records
            readable.append(url)
            records = tx.absences.records_of(url, event.url, self._settings.keys)
            visit = PageMeta(
                page="", url=event.url, status=url.status, headers={}, fetched_at=url.at, size=0
            )
            removals.append((_Removal(event, url.row, records, visit), url.url_key))
            counts.setdefault(event.topic, Counter()).update({"gone": 1, "missing": -1})
        self._write(tx, removals, counts)
        tx.absences.mark_gone(readable, sentence(Reason.GONE), now)
        for topic, count in counts.items():
            tx.counters.add(topic, count)
        return len(readable)


def _leaving_hosts(after: str, tx: Transaction) -> Sequence[str]:
    return tx.absences.leaving_hosts(after, HOSTS)
