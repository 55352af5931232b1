"""Budgets of pages, bytes and links: who may still spend, and who waits until there is more."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from penstock.engine.publishing import end_delays, state_of
from penstock.engine.settings import LifecycleSettings
from penstock.errors import StoreUnavailable
from penstock.model import Ack, Event, Link, Outcome, Reason, Retry
from penstock.ports import (
    MAX_CAUSES,
    OPEN,
    Admitted,
    Clock,
    Delivery,
    Durability,
    EventState,
    StoppedTrap,
    Topics,
    Transaction,
    UnitOfWork,
)
from penstock.rules import traps
from penstock.rules.budgets import (
    BUDGET,
    BYTES_DAY,
    PAGES_DAY,
    POOL,
    RUN,
    Key,
    Limits,
    counter_of,
    day_end,
    is_daily,
    key_of,
)
from penstock.rules.reasons import sentence
from penstock.rules.waiting import RECHECK

log = logging.getLogger("penstock.budgets")
MAX_PROXIES = 20_000  # proxies whose pools are remembered
BATCH = 1000  # events that become due in one transaction
TOPIC = "requests"


class _Account:
    """Budgets that one transaction reads and charges."""

    def __init__(self, tx: Transaction, now: float) -> None:
        self._tx, self._now = tx, now
        self._used: dict[Key, int] = {}
        self._charged: Counter[Key] = Counter()

    def read(self, keys: Iterable[Key]) -> None:
        """Read budgets, and keep other transactions from changing them."""
        unread = {key: 0 for key in keys if key not in self._used}
        if unread:
            self._used |= self._tx.budgets.spend(unread, self._now)

    def used(self, key: Key) -> int:
        self.read([key])
        return self._used[key] + self._charged[key]

    def charge(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self._charged[key] += 1

    def write(self) -> None:
        if self._charged:
            self._tx.budgets.spend(self._charged, self._now)


# -- at the start of an event ----------------------------------------------------------------------


class StartGate:
    """Charges pages at the first start of their events, or delays the events."""

    def __init__(
        self, tx: Transaction, settings: LifecycleSettings, traffic: Traffic, now: float
    ) -> None:
        self._tx, self._settings, self._traffic, self._now = tx, settings, traffic, now
        self._limits, self._account = settings.budgets, _Account(tx, now)
        self._seen: dict[Key, int] = {}  # amounts that were read without a lock

    def read(self, starts: Iterable[tuple[Delivery, Event, Admitted]]) -> None:
        """Read the budgets of these events in one statement."""
        if self._limits.has_pages:
            self._account.read(key for _, e, a in starts for key in self._keys(e, a.starts))

    def _keys(self, e: Event, starts: int) -> list[Key]:
        """Return the budgets to charge for the next start of an event with this many starts.

        A link was charged when it was accepted, except to the day. A retry is charged nothing.
        """
        if starts:
            return []
        s = self._settings
        if e.parent is None:
            keys = self._limits.lasting(e.key, e.trace, s.run.id)
        elif self._limits.pages_per_run and e.accepted_at < s.run.started:
            keys = [(RUN + s.run.id, "")]
        else:
            keys = []
        if self._limits.pages_per_day:
            keys.append(key_of(PAGES_DAY, self._now))
        return keys

    def delay(self, e: Event, a: Admitted) -> Outcome | None:
        """Return None if the event may start. It is charged then.

        Otherwise the event waits in the ledger, and the result is the outcome of its delivery.
        """
        keys = self._keys(e, a.starts) if self._limits.has_pages else []
        what = self._used_up(keys, self._account.used)
        if what is None:
            self._account.charge(keys)
            return None
        state = state_of(self._tx, e.id)
        if state is None or state.status not in OPEN:
            return Ack()
        return self._delay(e, state, what)

    def delay_early(self, e: Event, state: EventState) -> Outcome | None:
        """As delay, before the event gets a slot of its host. Charges nothing. See `peek`.

        So events over a budget do not wait for their turn at the host only to be delayed.
        """
        keys = self._keys(e, state.starts) if self._limits.has_pages else []
        what = self._used_up(keys, self._seen.__getitem__)
        return None if what is None else self._delay(e, state, what)

    def peek(self, events: Iterable[Event]) -> None:
        """Read the budgets that `delay_early` needs for these events, in one statement."""
        if self._limits.has_pages and (keys := {k for e in events for k in self._keys(e, 0)}):
            self._seen = self._tx.budgets.used(list(keys))

    def _used_up(self, keys: Sequence[Key], used: Callable[[Key], int]) -> str | None:
        """Return the first budget that is used up, or None."""
        limits = self._limits
        if limits.bytes_per_day and self._traffic.is_spent(BYTES_DAY):
            return BYTES_DAY
        return next((key[0] for key in keys if used(key) >= limits.of(key[0])), None)

    def _delay(self, e: Event, state: EventState, what: str) -> Outcome:
        until = day_end(self._now) if is_daily(what) else self._now + RECHECK
        reason = sentence(Reason.BUDGET, what)
        self._tx.events.delay(e, state, until, reason, self._now, waits_for=BUDGET + what)
        return Retry(until - self._now, "budget")

    def write(self) -> None:
        self._account.write()


# -- at the acceptance of links --------------------------------------------------------------------


class LinkGate:
    """Decides which links of one page the budgets and the crawler-trap rule accept."""

    def __init__(
        self,
        tx: Transaction,
        settings: LifecycleSettings,
        parent: Event,
        tokens: Collection[str],
        now: float,
    ) -> None:
        """`tokens` has the new session id in the links of the page: see `session_tokens`."""
        self._tx, self._settings, self._parent, self._now = tx, settings, parent, now
        self._limits, self._account = settings.budgets, _Account(tx, now)
        self._tokens = tokens
        self._stopped: Counter[tuple[str, str]] = Counter()  # (template, kind) -> links

    def decide(self, url: str, host: str, url_key: bytes) -> tuple[str | None, list[Key]]:
        """Return the counter of the reason why a link is not accepted, or the budgets to charge."""
        keys = self._limits.lasting(host, self._parent.trace, self._settings.run.id)
        over = next((k[0] for k in keys if self._account.used(k) >= self._limits.of(k[0])), None)
        refused = None if over is None else counter_of(over)
        most = self._limits.traps
        trap = traps.find_trap(url, self._tokens, most) if most else None
        # A link over a budget is not counted, so that a page cannot fill the table of counters.
        if trap is not None and (refused is None or trap.limit == 0):
            key = (f"trap:{trap.kind}:{self._parent.trace}", traps.digest_of(trap.template))
            if trap.limit == 0 or self._account.used(key) >= trap.limit:
                refused = f"followed_trap_{trap.kind}"
            keys.append(key)
        if refused is None:
            return None, keys
        if self._tx.lookup.in_trace(self._parent.trace, url_key):
            return "followed_seen", []
        if trap is not None and refused.startswith("followed_trap"):
            self._stopped[traps.shown(trap.template), trap.kind] += 1
        return refused, []

    def charge(self, keys: Iterable[Key]) -> None:
        """Charge an accepted link."""
        self._account.charge(keys)

    def write(self) -> None:
        self._account.write()
        for (template, kind), links in self._stopped.items():
            self._tx.budgets.stop(template, kind, links, self._now)


def session_tokens(settings: LifecycleSettings, page: str, links: Sequence[Link]) -> list[str]:
    """Return the new session id in these links of a page, if the crawler-trap rule is on."""
    if not settings.budgets.traps:
        return []
    return list(traps.session_tokens(page, (link.url for link in links)))


# -- bytes -----------------------------------------------------------------------------------------


class Traffic:
    """Implements ports.Traffic: bytes of this process, and what the fleet has used today."""

    def __init__(self, limits: Limits, clock: Clock) -> None:
        self.limits, self._clock = limits, clock
        self._unsaved: Counter[str] = Counter()  # budget -> bytes
        self._saved: Mapping[Key, int] = {}
        self._pools: defaultdict[str, set[str]] = defaultdict(set)  # proxy -> its pools

    def count(self, proxy: str | None, size: int) -> None:
        self._unsaved[BYTES_DAY] += size
        if proxy is not None:
            for pool in self._pools.get(proxy, ()):
                self._unsaved[POOL + pool] += size

    def use(self, pool: str, proxy: str) -> None:
        if pool in self.limits.pool_bytes:
            if len(self._pools) >= MAX_PROXIES:  # lists of proxies change
                self._pools.clear()
            self._pools[proxy].add(pool)

    def is_spent(self, what: str) -> bool:
        limit = self.limits.of(what)
        used = self._saved.get(key_of(what, self._clock.now()), 0) + self._unsaved[what]
        return 0 < limit <= used

    def spent_until(self, pool: str) -> float:
        return day_end(self._clock.now()) if self.is_spent(POOL + pool) else 0.0

    async def save(self, uow: UnitOfWork) -> None:
        """Add the bytes to the budgets, and read what all workers have used."""
        if not self.limits.has_bytes:
            return
        now = self._clock.now()
        unsaved, self._unsaved = self._unsaved, Counter()
        names = [BYTES_DAY] if self.limits.bytes_per_day else []
        names += [POOL + pool for pool in self.limits.pool_bytes]
        amounts = {key_of(what, now): unsaved[what] for what in names}
        try:
            before = await uow.write(
                lambda tx: tx.budgets.spend(amounts, now), durability=Durability.RELAXED
            )
        except BaseException:
            self._unsaved += unsaved
            raise
        self._saved = {key: before[key] + n for key, n in amounts.items()}


# -- periodic work ---------------------------------------------------------------------------------


class Budgets:
    """The budgets of one worker, and the events that wait for them."""

    def __init__(
        self,
        uow: UnitOfWork,
        topics: Topics,
        settings: LifecycleSettings,
        traffic: Traffic,
        *,
        clock: Clock,
    ) -> None:
        self._uow, self._topics, self._traffic, self._clock = uow, topics, traffic, clock
        self._limits, self._run = settings.budgets, settings.run.id
        self._pools = {pool.name for pool in settings.pools}
        self._started = clock.now()
        self._logged: set[str] = set()
        self._after = ""  # last cause that `refresh` has read, or "" to start again

    async def finish(self) -> None:
        """Save the bytes and log new traps, before the worker stops."""
        with suppress(StoreUnavailable):
            await self._save()

    async def _save(self) -> None:
        await self._traffic.save(self._uow)
        if self._limits.traps:
            self._log(await self._uow.read(lambda tx: tx.budgets.traps()))

    async def refresh(self, *, fetches: bool = True) -> int:
        """Save the bytes, log new traps, and make events due. Return how many became due.

        Called at the start, and every second. Looks at up to 1,000 budgets, and the next call looks
        at the next ones. `fetches` is False if this process starts no events.
        """
        await self._save()
        self._after, causes = await self._uow.read(partial(self._next_causes, fetches))
        released = done = 0
        while done < len(causes):
            some, read = await self._uow.write(partial(self._release, causes[done:]))
            released, done = released + some, done + read
        if released:
            self._topics.wake([TOPIC])
        return released

    async def refresh_all(self, *, fetches: bool = True) -> int:
        """As refresh, until some events became due or all budgets have been read."""
        self._after = ""
        while not (released := await self.refresh(fetches=fetches)) and self._after:
            pass
        return released

    def _next_causes(self, fetches: bool, tx: Transaction) -> tuple[str, list[str]]:
        """Return the last of the next causes of waits, and those causes whose budget has room."""
        found = tx.maintenance.causes(BUDGET, after=self._after)
        last = found[-1] if len(found) == MAX_CAUSES else ""
        found = [cause for cause in found if self._knows_room_of(cause, fetches)]
        now = self._clock.now()
        limited = [b for c in found if self._limits.of(b := self._budget_of(c))]
        used = tx.budgets.used([key_of(b, now) for b in limited]) if limited else {}
        return last, [c for c in found if self._room(self._budget_of(c), used, now) > 0]

    def _knows_room_of(self, cause: str, fetches: bool) -> bool:
        """Return False if other workers start the events that wait for a budget.

        The run of a process that starts no events never uses its own budget of pages. A worker
        without a pool does not know the limit of the pool.
        """
        what = cause.removeprefix(BUDGET)
        if what.startswith(RUN):
            return fetches
        return not what.startswith(POOL) or what.removeprefix(POOL) in self._pools

    def _budget_of(self, cause: str) -> str:
        """Return the budget whose room releases the events that wait for a cause.

        A new run has its own budget, so it takes the events that wait for the budget of an earlier
        run.
        """
        what = cause.removeprefix(BUDGET)
        return RUN + self._run if what.startswith(RUN) else what

    def _room(self, budget: str, used: Mapping[Key, int], now: float) -> int:
        """Return how many events may become due now."""
        limit = self._limits.of(budget)
        return min(BATCH, limit - used.get(key_of(budget, now), 0)) if limit else BATCH

    def _log(self, found: Sequence[StoppedTrap]) -> None:
        for trap in found:
            if trap.at >= self._started and trap.template not in self._logged:
                log.warning(
                    "crawler trap (%s): stopped following links of %s", trap.kind, trap.template
                )
        self._logged = {trap.template for trap in found if trap.at >= self._started}

    def _release(self, causes: Sequence[str], tx: Transaction) -> tuple[int, int]:
        """Make events due that wait for these causes, until one transaction has enough.

        Return how many events became due, and how many of the causes were read.
        """
        now = self._clock.now()
        budgets = [self._budget_of(cause) for cause in causes]
        used = tx.budgets.used([key_of(b, now) for b in set(budgets)])
        rows: list[tuple[int, str, int]] = []
        read = 0
        for cause, budget in zip(causes, budgets, strict=True):
            if len(rows) >= BATCH:
                break
            read += 1
            if (room := min(self._room(budget, used, now), BATCH - len(rows))) > 0:
                rows += tx.maintenance.some_waiting_for(cause, room, due_before=now + 2 * RECHECK)
        end_delays(tx, rows, (TOPIC,), now)
        return len(rows), read
