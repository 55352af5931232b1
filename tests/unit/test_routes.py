"""Routes: which pools serve a route, and the text of a wait for a route."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.model import Failure, Reason, Route
from penstock.operate.routes import next_step
from penstock.rules.proxies import Pool, plan
from penstock.rules.routes import ServedPool, cause_of, describe, route_of, serves

names = st.sampled_from(["a", "b", "US", "*"]) | st.none()
routes = st.builds(Route, geo=names, pool=names, account=names)
some = st.lists(st.sampled_from(["a", "b", "us", "*"]), max_size=2).map(tuple)
pools = st.dictionaries(st.sampled_from(["a", "b", "US"]), st.tuples(some, some), max_size=3)
values = st.text(min_size=1, max_size=20) | st.none()


@given(pools, routes)
def test_a_route_is_served_if_a_worker_with_these_pools_can_plan_it(
    given_pools: dict[str, tuple[tuple[str, ...], tuple[str, ...]]], route: Route
) -> None:
    known = {
        name: Pool(name=name, geo=geo, account=account)
        for name, (geo, account) in given_pools.items()
    }
    if route == Route():
        assert serves(known.values(), route), "it needs no proxy"
        return
    if serves(known.values(), route):
        assert plan(known, route, key="k")
    else:
        with pytest.raises(Failure) as e:
            plan(known, route, key="k")
        assert e.value.code is Reason.NO_POOL


@given(st.builds(Route, geo=values, pool=values, account=values))
def test_the_cause_of_a_wait_names_the_route_exactly(route: Route) -> None:
    if route != Route():
        assert route_of(cause_of(route)) == route


@pytest.mark.parametrize(
    ("route", "cause", "words"),
    [
        (Route(pool="residential"), "route:pool=residential", "pool 'residential'"),
        (
            Route(geo="us", pool="home", account="a,b=c"),
            "route:pool=home,geo=us,account=a%2Cb%3Dc",
            "pool 'home' and geo 'us' and account 'a,b=c'",
        ),
        (Route(render=True), "render", "a route without a proxy"),
    ],
)
def test_a_route_has_a_readable_cause_and_description(route: Route, cause: str, words: str) -> None:
    assert (cause_of(route), describe(route)) == (cause, words)


@pytest.mark.parametrize("cause", ["host:shop.example", "render", "route:", "route:lane=browser"])
def test_another_cause_is_not_a_route(cause: str) -> None:
    assert route_of(cause) is None


def test_no_pool_serves_a_route_that_needs_a_renderer() -> None:
    assert not serves([ServedPool(name="home")], Route(pool="home", render=True))
    assert not serves([], Route(render=True))


@pytest.mark.parametrize(
    ("route", "expected"),
    [
        (Route(pool="office"), "start a worker with [proxies.office] in its configuration"),
        (Route(pool="hmoe"), "[proxies.hmoe] in its configuration, or did you mean home?"),
        (Route(pool="home", geo="FR"), "geo of proxies.home does not list 'fr'"),
        (Route(pool="home", account="bob"), "account of proxies.home does not list 'bob'"),
        (Route(pool="home"), "proxies.home is reserved for accounts"),
        (Route(geo="fr"), "start a worker with a proxy pool that has geo = 'fr'"),
        (Route(account="bob"), "start a worker with a proxy pool that has account = 'bob'"),
    ],
)
def test_a_route_without_a_worker_has_a_next_step(route: Route, expected: str) -> None:
    live = [ServedPool(name="home", geo=("us",), account=("alice",))]
    assert not serves(live, route)
    assert expected in next_step(route, live)


@pytest.mark.parametrize("account", [(), ("*",)])
def test_the_next_step_does_not_name_an_account_that_the_pool_serves(
    account: tuple[str, ...],
) -> None:
    live = [ServedPool(name="home", geo=("us",), account=account)]
    step = next_step(Route(pool="home", geo="fr", account="bob"), live)
    assert step == "add it to the configuration: geo of proxies.home does not list 'fr'"
