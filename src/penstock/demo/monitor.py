"""Reads the data of the display from the ledger, the worker's signals and the hook's file."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path

from penstock.demo.display import Counts, DeadPage, FieldChange, Host, Snapshot, Source, Waiting
from penstock.operate.waiting import waits_in
from penstock.ports import Transaction
from penstock.ports.reports import Filter
from penstock.rules.identity import host_key
from penstock.runtime.process import WorkerProcess

RATE_WINDOW = 3.0  # seconds over which the request rate of a host is measured
LATENCY_SAMPLE = 50  # newest events whose latency is shown
MAX_LISTED = 20  # delayed events, dead letters and changes that are read
SOURCES = {"seeds": "seed list", "changes": "price feed"}
_STATES = ("pending", "in_flight", "delayed", "success", "duplicate", "dead")


class Look:
    """Data of the ledger in one snapshot."""

    def __init__(self, tx: Transaction) -> None:
        self.sources = {state.name: state for state in tx.sources.all()}
        found = tx.status_reports.standing()
        self.counters = found.counters
        self.counts = Counts(
            **{name: sum(row[name] for row in found.topics.values()) for name in _STATES}
        )
        self.breaker = next((w.reason or w.what for w in waits_in(tx)), "")
        self.hooks_waiting = found.changes_waiting
        self.delayed = tx.reports.events(status="delayed", limit=MAX_LISTED).events
        self.dead = tx.letter_reports.letters(Filter(), limit=MAX_LISTED, newest_first=True)

    @property
    def open(self) -> int:
        return self.counts.pending + self.counts.in_flight + self.counts.delayed


class Watch:
    """Takes snapshots of one run.

    It keeps its position in the hook's file, and the time of the last followed link.
    """

    def __init__(
        self,
        running: WorkerProcess,
        *,
        shop: str,
        limited: str,
        changes: Path,
        started: float,
        total: float | None,
    ) -> None:
        self._running, self._clock = running, running.clock
        self._shop, self._changes, self._started = shop, changes, started
        self.total = total  # seconds until the demo ends, or None without a limit
        by = running.stores.lifecycle.settings.host_by
        self._hosts = [host_key(url + "/", by=by) for url in (shop, limited)]
        self._read = self._lines = 0
        self._moved: deque[FieldChange] = deque(maxlen=MAX_LISTED)
        self._followed = 0
        self._followed_at: float | None = None
        self.notice = ""
        self.first_row: float | None = None  # seconds from the start to the first record
        self.idle = False

    async def look(self) -> Snapshot:
        look = await self._running.stores.uow.read(Look)
        now, elapsed = self._clock.now(), self.elapsed
        c = look.counters
        if c.get("records") and self.first_row is None:
            self.first_row = elapsed
        self.idle = not look.open and not look.hooks_waiting
        self._tail()
        latencies = sorted(list(self._running.signals.latencies)[-LATENCY_SAMPLE:])
        return Snapshot(
            elapsed=elapsed,
            total=self.total,
            address=self._shop,
            counts=look.counts,
            sources=self._sources(look, now),
            hosts=self._rates(now),
            waiting=tuple(
                Waiting(e.url, e.reason or "", max(0.0, (e.not_before or now) - now))
                for e in look.delayed
            ),
            records=c.get("records", 0),
            changes=c.get("changes", 0),
            unchanged=c.get("unchanged", 0) + c.get("records_unchanged", 0),
            unmatched=c.get("unmatched", 0),
            empty=c.get("empty", 0),
            moved=tuple(reversed(self._moved)),
            dead=tuple(DeadPage(d.url, d.reason) for d in look.dead),
            breaker=look.breaker,
            notice=self.notice,
            p50=_quantile(latencies, 0.50),
            p95=_quantile(latencies, 0.95),
        )

    @property
    def elapsed(self) -> float:
        return self._clock.now() - self._started

    def _sources(self, look: Look, now: float) -> tuple[Source, ...]:
        followed = look.counters.get("followed", 0)
        if followed > self._followed:
            self._followed, self._followed_at = followed, now
        read = ((title, look.sources.get(name)) for name, title in SOURCES.items())
        made = [
            (title, state.events if state else 0, state.event_at if state else None)
            for title, state in read
        ]
        made.append(("links followed", followed, self._followed_at))
        return tuple(
            Source(name, events, None if at is None else max(0.0, now - at))
            for name, events, at in made
        )

    def _rates(self, now: float) -> tuple[Host, ...]:
        asked = [host for at, host in self._running.signals.asked if at > now - RATE_WINDOW]
        span = min(RATE_WINDOW, max(1.0, self.elapsed))
        blocked = self._running.stores.claims.blocked_until
        return tuple(
            Host(
                host,
                asked.count(host) / span,
                self._running.config.pace.rate,
                max(0.0, blocked(host) - now),
            )
            for host in self._hosts
        )

    def _tail(self) -> None:
        """Read new lines of the hook's file, such as `Title: €9.99 → €8.49`.

        An incomplete line is read the next time.
        """
        try:
            with self._changes.open("rb") as f:
                f.seek(self._read)
                new = f.read()
        except FileNotFoundError:
            return
        complete = new[: new.rfind(b"\n") + 1]
        self._read += len(complete)
        for line in complete.decode("utf-8", "replace").splitlines():
            self._lines += 1
            title, _, prices = line.rpartition(": ")
            old, _, new_price = prices.partition(" → ")
            self._moved.append(FieldChange(str(self._lines), title, "price", old, new_price))


def _quantile(ordered: Sequence[float], share: float) -> float | None:
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else None
