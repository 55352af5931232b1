"""What an operator decides about one host (limits, pause, robots.txt) and what is known of it. Each
decision is one transaction, and holds for the fleet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal, Protocol

import msgspec

from penstock.ports import Clock, Exempt, HostTable, Transaction, UnitOfWork
from penstock.rules import pace
from penstock.rules.identity import host_key
from penstock.rules.robots import from_answer
from penstock.rules.verdict import Breach

TOPIC, GROUP = "requests", "main"
EVERYWHERE = "*"  # the host of an exception that the configuration makes
ROBOTS = "robots"
BATCH = 1000  # parked events set free in one transaction


class RobotsFile(msgspec.Struct, frozen=True, kw_only=True):
    origin: str
    status: int  # 0: it could not be reached
    until: float
    size: int
    crawl_delay: float | None
    sitemaps: int


class Domain(msgspec.Struct, frozen=True, kw_only=True):
    """One host, as it stands now."""

    host: str
    state: pace.HostState
    limits: pace.Limits
    queued: int  # ready to be handed out
    robots: tuple[RobotsFile, ...] = ()
    exceptions: tuple[Exempt, ...] = ()

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
        return bool(self.queued or self.robots or self.exceptions or self.state != pace.HostState())


def host_of(text: str, by: Literal["host", "domain"] = "host") -> str:
    """The host key of what a person typed: a host, host:port or a URL. Raises BadUrl."""
    if "://" not in text:
        text = f"{'https' if text.endswith(':443') else 'http'}://{text}/"
    return host_key(text, by)


class LimitedHosts(Protocol):
    """What decisions about hosts need of the open stores."""

    @property
    def uow(self) -> UnitOfWork: ...

    @property
    def clock(self) -> Clock: ...

    @property
    def limits(self) -> pace.Limits:
        """The usual limits of a host."""


def ignore_robots(hosts: HostTable, host: str, reason: str, who: str) -> None:
    hosts.add_exception(ROBOTS, host, reason, who)
    hosts.change(host, lambda state: msgspec.structs.replace(state, ignores_robots=True))


def obey_robots(hosts: HostTable, host: str) -> bool:
    """Return False if the host's robots.txt was obeyed before."""
    hosts.change(host, lambda state: msgspec.structs.replace(state, ignores_robots=False))
    return hosts.end_exception(ROBOTS, host)


def apply_configured_exceptions(hosts: HostTable, reasons: Mapping[str, str], who: str) -> None:
    """Record the exceptions that the configuration makes for all hosts.

    A kind with a reason is an exception. A kind with an empty reason is none, or ends.
    """
    current = {e.kind: e.reason for e in hosts.exceptions([EVERYWHERE])}
    for kind, reason in reasons.items():
        if reason and current.get(kind) != reason:
            hosts.add_exception(kind, EVERYWHERE, reason, who)
        elif not reason and kind in current:
            hosts.end_exception(kind, EVERYWHERE)


class Domains:
    def __init__(self, stores: LimitedHosts, agent: str) -> None:
        self._uow, self._clock, self._limits, self._agent = (
            stores.uow,
            stores.clock,
            stores.limits,
            agent,
        )

    # -- looking -----------------------------------------------------------------------------------

    def listed_in(self, tx: Transaction, limit: int) -> list[Domain]:
        """Those somebody decided about or that are held back, then those with most to do, then the
        others.
        """
        noted: dict[str, list[Exempt]] = {}
        for e in tx.hosts.exceptions(limit=limit):
            noted.setdefault(e.host, []).append(e)
        states = tx.hosts.list(limit)
        depths = tx.queue_reports.depths(TOPIC, GROUP, limit=limit)
        chosen = sorted(
            {*noted, *states, *depths} - {"*"},
            key=lambda h: (not self._special(states.get(h), h in noted), -depths.get(h, 0), h),
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
            )
            for h in chosen
        ]

    def everywhere_in(self, tx: Transaction) -> list[Exempt]:
        """Exceptions that the configuration makes."""
        return list(tx.hosts.exceptions([EVERYWHERE]))

    def one_in(self, tx: Transaction, host: str) -> Domain:
        """With its past exceptions."""
        return Domain(
            host=host,
            state=tx.hosts.state(host),
            limits=self._limits,
            queued=tx.queue_reports.depths(TOPIC, GROUP, [host])[host],
            robots=self._robots_in(tx, host),
            exceptions=tuple(tx.hosts.exceptions([host], ended=True)),
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

    # -- deciding ----------------------------------------------------------------------------------

    def limit(
        self, host: str, *, rate: float | None, burst: int | None, concurrency: int | None
    ) -> None:
        """Limits of its own from now on; None is the usual one, a rate of inf is none at all."""
        usual = self._limits
        self._change(host, lambda state: pace.limited(state, usual, rate, burst, concurrency))
        self._set_free(host)

    def pause(self, host: str, seconds: float | None) -> float:
        """Nothing is sent to it by any worker; None: until it is resumed. Returns until when."""
        until = math.inf if seconds is None else self._clock.now() + seconds
        self._change(host, lambda state: msgspec.structs.replace(state, paused_until=until))
        if seconds is not None:
            self._set_free(host)  # it may have been paused for longer before
        return until

    def resume(self, host: str) -> int:
        """What the host itself asked for stays. Returns how many waiting events were set free."""
        self._change(host, lambda state: msgspec.structs.replace(state, paused_until=0.0))
        return self._set_free(host)

    def ignore_robots(self, host: str, reason: str, who: str) -> None:
        self._uow.write_now(lambda tx: ignore_robots(tx.hosts, host, reason, who))
        self._set_free(host)

    def obey_robots(self, host: str) -> bool:
        """False: it was obeyed all along."""
        return self._uow.write_now(lambda tx: obey_robots(tx.hosts, host))

    def _change(self, host: str, change: Callable[[pace.HostState], pace.HostState]) -> None:
        self._uow.write_now(lambda tx: tx.hosts.change(host, change))

    def _set_free(self, host: str) -> int:
        """Events that were put off until a slot of the old kind come at once, and get one of the
        new kind.
        """
        reasons = (
            f"waiting for a slot of {host}",
            f"{Breach.HELD.sentence}: {host}",
            f"the next slot of {host} is too far away to wait for",
        )
        parked = self._uow.snapshot(lambda tx: tx.maintenance.parked(host, reasons))
        for i in range(0, max(1, len(parked)), BATCH):
            self._uow.write_now(partial(self._make_due, host, parked[i : i + BATCH]))
        return len(parked)

    def _make_due(self, host: str, rows: list[tuple[int, int]], tx: Transaction) -> None:
        tx.maintenance.make_due([n for n, _ in rows], self._clock.now())
        tx.queue.make_due(TOPIC, GROUP, host, [position for _, position in rows])
