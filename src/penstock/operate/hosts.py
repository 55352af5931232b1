"""Operators' decisions about hosts (limits, pause, robots.txt) and the current state of hosts.

Each decision is written in one transaction and applies to the whole fleet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal

import msgspec

from penstock.model import Reason
from penstock.operate.waiting import Parked, make_due
from penstock.ports import Clock, Exempt, HeldRemovals, HostTable, Transaction, UnitOfWork
from penstock.rules import gone, pace
from penstock.rules.identity import host_key
from penstock.rules.reasons import sentence
from penstock.rules.robots import from_answer
from penstock.rules.waiting import HOST

TOPIC, GROUP = "requests", "main"
EVERYWHERE = "*"  # the host of an exception that the configuration makes
ROBOTS = "robots"


class RobotsFile(msgspec.Struct, frozen=True, kw_only=True):
    """A cached robots.txt."""

    origin: str
    status: int  # HTTP status, or 0 if the server could not be reached
    until: float
    size: int
    crawl_delay: float | None
    sitemaps: int


class Domain(msgspec.Struct, frozen=True, kw_only=True):
    """The current state of one host."""

    host: str
    state: pace.HostState
    limits: pace.Limits
    queued: int  # messages that are ready to be delivered
    robots: tuple[RobotsFile, ...] = ()
    exceptions: tuple[Exempt, ...] = ()
    held: HeldRemovals | None = None  # removals that wait for an operator

    @property
    def interval(self) -> float:
        return pace.interval(self.state, self.limits)

    @property
    def burst(self) -> int:
        return self.limits.burst if self.state.burst is None else self.state.burst

    @property
    def concurrency(self) -> int:
        return self.limits.concurrency if self.state.concurrency is None else self.state.concurrency

    @property
    def known(self) -> bool:
        stored = self.queued or self.robots or self.exceptions or self.held
        return bool(stored or self.state != pace.HostState())


def host_of(text: str, by: Literal["host", "domain"] = "host") -> str:
    """Return the host key of a host, host:port or URL that an operator typed. Raises BadUrl."""
    if "://" not in text:
        text = f"{'https' if text.endswith(':443') else 'http'}://{text}/"
    return host_key(text, by)


def ignore_robots(hosts: HostTable, host: str, reason: str, who: str) -> None:
    hosts.add_exception(ROBOTS, host, reason, who)
    hosts.change(host, lambda state: msgspec.structs.replace(state, ignores_robots=True))


def obey_robots(hosts: HostTable, host: str) -> bool:
    """End the robots.txt exception of a host. Return False if there was no exception."""
    hosts.change(host, lambda state: msgspec.structs.replace(state, ignores_robots=False))
    return hosts.end_exception(ROBOTS, host)


def apply_configured_exceptions(hosts: HostTable, reasons: Mapping[str, str], who: str) -> None:
    """Record the exceptions that the configuration makes for all hosts.

    A kind with a reason is an exception. If the reason is empty, an existing exception ends.
    """
    current = {e.kind: e.reason for e in hosts.exceptions([EVERYWHERE])}
    for kind, reason in reasons.items():
        if reason and current.get(kind) != reason:
            hosts.add_exception(kind, EVERYWHERE, reason, who)
        elif not reason and kind in current:
            hosts.end_exception(kind, EVERYWHERE)


class Domains:
    """Reports about hosts, and an operator's decisions about them.

    `limits` are the usual limits of a host. `agent` is the product token for robots.txt.
    """

    def __init__(self, uow: UnitOfWork, clock: Clock, limits: pace.Limits, agent: str) -> None:
        self._uow, self._clock, self._limits, self._agent = uow, clock, limits, agent

    # -- reports -----------------------------------------------------------------------------------

    def listed_in(self, tx: Transaction, limit: int) -> list[Domain]:
        """Return up to `limit` hosts.

        Blocked, throttled or paused hosts and hosts with an operator's decision come first. The
        other hosts follow, and those with the most queued messages come before the rest.
        """
        noted: dict[str, list[Exempt]] = {}
        for e in tx.hosts.exceptions(limit=limit):
            noted.setdefault(e.host, []).append(e)
        held = {h.host: h for h in tx.absences.held()}
        states = tx.hosts.list(limit)
        depths = tx.queue_reports.depths(TOPIC, GROUP, limit=limit)
        chosen = sorted(
            {*noted, *states, *depths, *held} - {"*"},
            key=lambda h: (
                not self._special(states.get(h), h in noted or h in held),
                -depths.get(h, 0),
                h,
            ),
        )[:limit]
        depths |= tx.queue_reports.depths(TOPIC, GROUP, [h for h in chosen if h not in depths])
        return [
            Domain(
                host=h,
                state=states[h] if h in states else tx.hosts.state(h),
                limits=self._limits,
                queued=depths[h],
                robots=self._robots_in(tx, h),
                exceptions=tuple(noted.get(h, ())),
                held=held.get(h),
            )
            for h in chosen
        ]

    def everywhere_in(self, tx: Transaction) -> list[Exempt]:
        """Return the exceptions that the configuration makes for all hosts."""
        return list(tx.hosts.exceptions([EVERYWHERE]))

    def one_in(self, tx: Transaction, host: str) -> Domain:
        """Return the state of one host, with its current and past exceptions."""
        return Domain(
            host=host,
            state=tx.hosts.state(host),
            limits=self._limits,
            queued=tx.queue_reports.depths(TOPIC, GROUP, [host])[host],
            robots=self._robots_in(tx, host),
            exceptions=tuple(tx.hosts.exceptions([host], ended=True)),
            held=next((h for h in tx.absences.held() if h.host == host), None),
        )

    def _special(self, state: pace.HostState | None, noted: bool) -> bool:
        if noted or state is None:
            return noted
        own = (state.rate, state.burst, state.concurrency) != (None, None, None)
        return own or state.penalty > 1 or pace.held_until(state) > self._clock.now()

    def _robots_in(self, tx: Transaction, host: str) -> tuple[RobotsFile, ...]:
        found = []
        for kept in tx.hosts.robots(host):
            rules = from_answer(kept.status or None, kept.body)
            found.append(
                RobotsFile(
                    origin=kept.origin,
                    status=kept.status,
                    until=kept.until,
                    size=len(kept.body),
                    crawl_delay=rules.crawl_delay(self._agent),
                    sitemaps=len(rules.sitemaps),
                )
            )
        return tuple(found)

    # -- decisions ---------------------------------------------------------------------------------

    def limit(
        self, host: str, *, rate: float | None, burst: int | None, concurrency: int | None
    ) -> None:
        """Set the host's limits. None means the usual limit, and a rate of inf means no limit."""
        usual = self._limits
        self._change(host, lambda state: pace.limited(state, usual, rate, burst, concurrency))
        self._set_free(host)

    def pause(self, host: str, seconds: float | None) -> float:
        """Stop all workers from sending requests to the host. Return the end of the pause.

        If `seconds` is None, the pause lasts until `resume`.
        """
        until = math.inf if seconds is None else self._clock.now() + seconds
        self._pause(host, until)
        if seconds is not None:
            self._set_free(host)  # the host may have been paused for longer before
        return until

    def resume(self, host: str) -> int:
        """End the pause. Return the number of delayed events that became due.

        A block that the host itself requested stays.
        """
        self._pause(host, 0.0)
        return self._set_free(host)

    def _pause(self, host: str, until: float) -> None:
        """Set the end of the pause. The operator's decision replaces that of the breaker."""

        def work(tx: Transaction) -> None:
            tx.breakers.close(HOST + host)
            tx.hosts.change(host, lambda state: msgspec.structs.replace(state, paused_until=until))

        self._uow.write_now(work)

    def approve(self, host: str) -> int:
        """Allow the removals of gone URLs that wait, and those of the next hour.

        Return how many waited. A worker applies them.
        """
        until = self._clock.now() + gone.HOUR
        return self._uow.write_now(lambda tx: tx.absences.approve(host, until))

    def ignore_robots(self, host: str, reason: str, who: str) -> None:
        self._uow.write_now(lambda tx: ignore_robots(tx.hosts, host, reason, who))
        self._set_free(host)

    def obey_robots(self, host: str) -> bool:
        """End the robots.txt exception of a host. Return False if there was no exception."""
        return self._uow.write_now(lambda tx: obey_robots(tx.hosts, host))

    def _change(self, host: str, change: Callable[[pace.HostState], pace.HostState]) -> None:
        self._uow.write_now(lambda tx: tx.hosts.change(host, change))

    def _set_free(self, host: str) -> int:
        """Make events due that are delayed until a slot under the old limits. Return how many.

        They then get slots under the new limits.
        """
        reasons = (
            sentence(Reason.SLOT, host),
            sentence(Reason.HELD, detail=host),
            sentence(Reason.SLOT_FAR, host),
        )

        def find(tx: Transaction) -> list[Parked]:
            slots = {n: (host, at) for n, at in tx.maintenance.parked(host, reasons)}
            waits = {n: (key, at) for n, key, at in tx.maintenance.waiting_for(HOST + host)}
            return [(n, key, at) for n, (key, at) in (slots | waits).items()]

        parked = self._uow.snapshot(find)
        self._uow.write_now(lambda tx: tx.queue.make_due(TOPIC, GROUP, host, []))
        make_due(self._uow, parked, self._clock)
        return len(parked)
