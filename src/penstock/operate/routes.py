"""Routes that events wait for, and the step by which an operator ends the wait."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from penstock.config.options import suggest
from penstock.model import Route
from penstock.ports import Transaction
from penstock.rules.routes import ANY_ACCOUNT, ServedPool, route_of, serves
from penstock.rules.waiting import Waiting, waiting


def unserved(tx: Transaction, waits: Mapping[str, int]) -> list[Waiting]:
    """Return the causes of delayed events, without routes that a live worker serves.

    That worker releases the events of such a route within a second.
    """
    routes = {cause: route for cause in waits if (route := route_of(cause)) is not None}
    pools = [pool for served in tx.routes.served().values() for pool in served] if routes else []
    found = []
    for cause, events in sorted(waits.items()):
        shown = waiting(cause, events)
        if (route := routes.get(cause)) is not None:
            if serves(pools, route):
                continue
            step = next_step(route, pools)
            shown = msgspec.structs.replace(shown, next_step=step)
        found.append(shown)
    return found


def next_step(route: Route, live: Iterable[ServedPool]) -> str:
    """Return how a route gets a worker. `live` has the pools of all live workers."""
    pools = {pool.name: pool for pool in live}
    if route.pool and route.pool in pools:
        pool = pools[route.pool]
        accounts = pool.account
        # A pool that is not reserved, or reserved for any account, serves every account.
        serves_any = not accounts or ANY_ACCOUNT in accounts
        lacking = [
            f"{option} of proxies.{route.pool} does not list {value!r}"
            for option, value, listed in (
                ("geo", route.geo and route.geo.lower(), pool.geo),
                ("account", None if serves_any else route.account, accounts),
            )
            if value and value not in listed
        ]
        if lacking:
            return f"add it to the configuration: {', '.join(lacking)}"
        return f"proxies.{route.pool} is reserved for accounts: give the events one of them"
    if route.pool:
        start = f"start a worker with [proxies.{route.pool}] in its configuration"
        hint = suggest(route.pool, pools)
        return f"{start}, or {hint}" if hint else start
    given = [(name, value) for name in ("geo", "account") if (value := getattr(route, name))]
    options = " and ".join(f"{name} = {value!r}" for name, value in given)
    return f"start a worker with a proxy pool that has {options}"
