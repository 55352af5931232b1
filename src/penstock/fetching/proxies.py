"""Sends events through the proxies of their routes: pools, provider lists, health and cookies.

Opens no sockets.
"""

from __future__ import annotations

import asyncio
import io
import logging
import random
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence

import msgspec

from penstock.config.schema import ProxyPoolConfig
from penstock.model import ErrorClass, Event, Failure, Reason
from penstock.net.cookies import Jar
from penstock.ports import Clock, Fetcher, ProxyHealth, Response, Traffic
from penstock.rules import proxies as rules
from penstock.rules.budgets import BUDGET, POOL
from penstock.rules.reasons import sentence
from penstock.rules.routes import ServedPool

log = logging.getLogger("penstock.proxies")
# Proxies of one pool that may fail in a row. Then the event is delayed, so that others can run.
TRIES = 3
LIST_WAIT = 2.0  # seconds that an event waits for a provider's list. Then the event is delayed.
LIST_RETRY = 30.0  # seconds until a list that failed is fetched again
MAX_LIST = 2 << 20  # bytes of a provider's list. It has at most 10,000 proxies.
MAX_JARS = 10_000  # accounts. Above this, the least recently used jar is dropped.


class _List(msgspec.Struct):
    """A provider's proxy list and its last contents."""

    url: str
    every: float  # seconds between two fetches
    due: float = 0.0  # when the list is fetched again
    members: tuple[rules.Member, ...] = ()
    trouble: str = "its list was not fetched yet"
    task: asyncio.Task[None] | None = None


def pools(config: Mapping[str, ProxyPoolConfig]) -> dict[str, rules.Pool]:
    return {
        name: rules.Pool(
            name=name,
            members=rules.parse_members(c.urls),
            geo=tuple(g.lower() for g in c.geo),
            account=c.account,
            weight=c.weight,
            cooldown=c.cooldown,
            longest=max(c.cooldown, c.cooldown_max),
            sticky=c.sticky,
            next=c.next,
        )
        for name, c in config.items()
    }


def served_pools(config: Mapping[str, ProxyPoolConfig]) -> list[ServedPool]:
    """Return the routes that these pools serve, without their proxies."""
    return [
        ServedPool(name=name, geo=tuple(g.lower() for g in c.geo), account=c.account)
        for name, c in config.items()
    ]


class Proxies:
    """Proxy pools of one worker. A provider's list is fetched when an event first needs it."""

    def __init__(
        self,
        config: Mapping[str, ProxyPoolConfig],
        health: ProxyHealth,
        fetcher: Fetcher,
        clock: Clock,
        rng: random.Random,
        traffic: Traffic | None = None,
    ) -> None:
        self._traffic = traffic
        self._pools, self._health, self._fetcher, self._clock, self._rng = (
            pools(config),
            health,
            fetcher,
            clock,
            rng,
        )
        self._lists = {
            name: _List(c.list_url, c.list_every) for name, c in config.items() if c.list_url
        }
        self._jars: OrderedDict[str, Jar] = OrderedDict()

    async def close(self) -> None:
        tasks = [known.task for known in self._lists.values() if known.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def jar(self, account: str) -> Jar:
        """Return the cookie jar of this account only.

        Jars are kept in this worker's memory, for the most recently used accounts.
        """
        jar = self._jars.get(account)
        if jar is None:
            jar = self._jars[account] = Jar()
            if len(self._jars) > MAX_JARS:
                self._jars.popitem(last=False)
        self._jars.move_to_end(account)
        return jar

    async def through(
        self, event: Event, turn: int, send: Callable[[str], Awaitable[Response]]
    ) -> Response:
        """Call `send` with the URL of a proxy of the event's route. Never sends without a proxy.

        Raise PoolExhausted if no proxy is available, and Failure if the request failed.
        """
        for _ in range(TRIES):
            choice = await self._choose(event, turn)
            if self._traffic is not None:
                self._traffic.use(choice.pool.name, choice.member.dsn)
            try:
                response = await send(choice.member.dsn)
            except Failure as e:
                failure = _describe_failure(e, choice)
                await self._record_result(choice, event.key, failure)
                if rules.failure_scope(failure) != rules.ANY_HOST:
                    raise failure from None
                log.info("pool %s: %s: %s", choice.pool.name, choice.member.label, failure.reason)
            else:
                await self._health.worked(choice.member.id, event.key, choice.member.label)
                return response
        raise rules.PoolExhausted(
            sentence(Reason.POOL_FAILED, choice.pool.name, detail=failure.reason),
            code=Reason.POOL_FAILED,
            after=1.0 + self._rng.random(),
        )

    async def _choose(self, event: Event, turn: int) -> rules.Choice:
        route, now = event.route, self._clock.now()
        order = rules.plan(self._pools, route, key=route.account or event.id, turn=turn)
        order = self._with_bytes_left(order, now)
        if self._lists:
            order = tuple([await self._with_listed_members(pool) for pool in order])
        found = rules.pick(
            order, event.key, self._health.view, now, self._rng.random(), session=route.account
        )
        if isinstance(found, rules.Exhausted):
            # Spread the retries by up to 10 %, so that waiting events do not return together.
            raise rules.PoolExhausted(
                found.reason,
                code=found.code,
                after=max(0.1, found.until - now) * (1 + 0.1 * self._rng.random()),
            )
        return found

    def _with_bytes_left(self, order: Sequence[rules.Pool], now: float) -> tuple[rules.Pool, ...]:
        """Return the pools whose byte budget of this day is not used up.

        If the result is empty, the event waits until the day ends.
        """
        if self._traffic is None:
            return tuple(order)
        ends = {pool.name: self._traffic.spent_until(pool.name) for pool in order}
        left = tuple(pool for pool in order if not ends[pool.name])
        if not left:
            what = POOL + order[0].name
            raise Failure(
                ErrorClass.THROTTLED,
                sentence(Reason.BUDGET, what),
                code=Reason.BUDGET,
                after=max(0.1, ends[order[0].name] - now),
                waits_for=BUDGET + what,
            )
        return left

    async def _record_result(self, choice: rules.Choice, host: str, failure: Failure) -> None:
        pool, member = choice.pool, choice.member
        scope = rules.failure_scope(failure)
        if scope is None:
            if failure.status is not None:  # the proxy delivered a response
                await self._health.worked(member.id, host, member.label)
            return
        if pool.cooldown or scope == rules.ANY_HOST:
            await self._health.failed(
                member.id,
                scope or host,
                member.label,
                cooldown=pool.cooldown or 1.0,
                longest=pool.longest or 60.0,
                reason=failure.reason,
                least=failure.after or 0.0,
            )

    # -- lists

    async def _with_listed_members(self, pool: rules.Pool) -> rules.Pool:
        known = self._lists.get(pool.name)
        if known is None:
            return pool
        if known.due <= self._clock.now() and known.task is None:
            known.task = asyncio.create_task(self._refresh(pool.name, known))
        if known.task is not None and not known.members:
            await asyncio.wait([known.task], timeout=LIST_WAIT)
        members = {m.id: m for m in (*known.members, *pool.members)}
        return msgspec.structs.replace(pool, members=tuple(members.values()), trouble=known.trouble)

    async def _refresh(self, name: str, known: _List) -> None:
        """Fetch the provider's list. If that fails, the last list stays in use."""
        try:
            known.members, known.trouble = await fetch_list(self._fetcher, known.url), ""
            known.due = self._clock.now() + known.every
        except Failure as e:
            known.trouble = f"its list: {e.reason}"
            known.due = self._clock.now() + min(LIST_RETRY, known.every)
            log.warning("proxy pool %s: %s", name, known.trouble)
        finally:
            known.task = None
        await self._health.listed(name, len(known.members), known.trouble)


async def fetch_list(fetcher: Fetcher, url: str) -> tuple[rules.Member, ...]:
    """Fetch a provider's list, which has one proxy per line. The guard checks its address.

    Raise Failure without the URL of the list, which may be a secret.
    """
    answer = await fetcher.fetch(url, headers={"accept": "text/plain"})
    if answer.status != 200:
        raise Failure(ErrorClass.TRANSIENT, f"HTTP {answer.status}", status=answer.status)
    if len(answer.body) > MAX_LIST:
        raise Failure(ErrorClass.TRANSIENT, f"it has more than {MAX_LIST} bytes")
    lines = io.StringIO(answer.body.decode("utf-8", "replace"), newline=None)
    try:
        members = await asyncio.to_thread(rules.parse_members, lines)
    except ValueError as e:
        raise Failure(ErrorClass.TRANSIENT, str(e)) from None
    if not members:
        raise Failure(ErrorClass.TRANSIENT, "it is empty")
    return members


def _describe_failure(failure: Failure, choice: rules.Choice) -> Failure:
    """Add the proxy and its pool to the failure's detail, and remove the proxy's credentials."""
    failure.reason = rules.scrub(failure.reason, choice.member.dsn)
    failure.args = (failure.reason,)
    via = f"through {choice.member.label} of proxy pool {choice.pool.name!r}"
    failure.detail = rules.scrub(
        f"{failure.detail}\n{via}" if failure.detail else via, choice.member.dsn
    )
    return failure
