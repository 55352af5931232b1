"""Routes that workers serve, and causes of waits for a route."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import quote, unquote

import msgspec

from penstock.model import Route

ANY_ACCOUNT = "*"
RENDER = "render"  # the cause of events that wait for a renderer
ROUTE = "route:"  # start of the other causes
_PARTS = ("pool", "geo", "account")


class ServedPool(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A proxy pool as other workers know it: the routes that it serves, and no secret."""

    name: str
    geo: tuple[str, ...] = ()  # locations of its exits. Empty if unknown.
    # Accounts that it is reserved for. Empty for all events, "*" for any account.
    account: tuple[str, ...] = ()


def needs_proxy(route: Route) -> bool:
    return bool(route.pool or route.geo or route.account)


def pool_serves(pool: ServedPool, route: Route, *, named: bool) -> bool:
    """Return True if the pool may be used for the route. `named`: the route names this pool."""
    if route.geo and route.geo.lower() not in pool.geo:
        return False
    if pool.account:
        return bool(route.account) and (
            route.account in pool.account or ANY_ACCOUNT in pool.account
        )
    return named or bool(route.geo)


def serves(pools: Iterable[ServedPool], route: Route) -> bool:
    """Return True if a worker with these pools can fetch an event of this route."""
    if route.render:
        return False
    if not needs_proxy(route):
        return True
    return any(
        pool_serves(pool, route, named=bool(route.pool))
        for pool in pools
        if not route.pool or pool.name == route.pool
    )


def cause_of(route: Route) -> str:
    """Return the cause of a wait for this route, as text: `route:pool=residential,geo=us`."""
    if route.render:
        return RENDER
    given = [(part, value) for part in _PARTS if (value := getattr(route, part))]
    return ROUTE + ",".join(f"{part}={quote(value, safe=' /:@*')}" for part, value in given)


def route_of(cause: str) -> Route | None:
    """Return the route of a cause that `cause_of` made, or None for any other cause."""
    if not cause.startswith(ROUTE):
        return None
    pairs = (part.partition("=") for part in cause.removeprefix(ROUTE).split(","))
    given = {name: unquote(value) for name, _, value in pairs if name in _PARTS}
    return Route(given.get("geo"), given.get("pool"), given.get("account")) if given else None


def describe(route: Route) -> str:
    """Return the route in words: `pool 'residential' and geo 'us'`."""
    given = [f"{part} {value!r}" for part in _PARTS if (value := getattr(route, part))]
    return " and ".join(given) or "a route without a proxy"
