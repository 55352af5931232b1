"""`penstock proxies …`: lists proxy pools with their health, and tests each proxy with a request.

Credentials are never printed.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import time
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from penstock.cli.options import DEFAULTS, Common, Json, check_pool
from penstock.cli.output import (
    FIXED,
    FOLD,
    RIGHT,
    plain,
    print_json,
    say,
    show,
    styled,
    table,
)
from penstock.errors import OK, RAN_WITH_FAILURES, ConfigError
from penstock.model import Failure
from penstock.operate.figures import iso, lasting, moment, plural
from penstock.rules.proxies import Member, masked_list, parse_members, scrub

if TYPE_CHECKING:
    from rich.text import Text

    from penstock.config.schema import Config
    from penstock.ports import Fetcher

app = App(name="proxies", help="proxy pools: list the proxies with their health, test them")
MAX_PARALLEL = 16  # test requests in flight
_ADDRESS = re.compile(
    rb"(?<![0-9A-Za-z:.])"
    rb"(?:[0-9]{1,3}(?:\.[0-9]{1,3}){3}|[0-9A-Fa-f]{0,4}(?::[0-9A-Fa-f]{0,4}){2,7})"
    rb"(?![0-9A-Za-z:.])"
)


@app.command
def ls(*, json: Json = False, common: Common = DEFAULTS) -> None:
    """List pools and proxies, and the hosts for which a proxy is in cooldown.

    Proxies of a provider's list are shown only if they have failed.
    """
    config = common.load().config
    now = time.time()
    troubled, lists = _known(common, config)
    pools = [_pool(name, config, troubled, lists.get(name), now) for name in config.proxies]
    named = {member["id"] for pool in pools for member in pool["members"]}
    listed = [
        _trouble(row, now) | {"id": row[0], "proxy": row[2]}
        for row in troubled
        if row[0] not in named
    ]
    if json:
        print_json({"pools": pools, "listed": listed})
        return
    if not pools:
        say("no proxies are configured: add a pool with [proxies.NAME] in penstock.toml")
        return
    made = table(
        ("pool", FIXED),
        ("serves", FOLD),
        ("proxy", FOLD),
        ("weight", RIGHT),
        ("state", FIXED),
        ("where", FOLD),
        ("why", FOLD),
    )
    for pool in pools:
        first: tuple[Text | str, str] = styled(pool["pool"], "bold"), plain(_serves(pool))
        if pool["list"] is not None:
            had = pool["list"]
            state = (
                "not fetched yet"
                if had["at"] is None
                else had["error"]
                or f"{plural(had['members'], 'proxy', 'proxies')} at {moment(had['seen'], now)}"
            )
            made.add_row(
                *first,
                plain(had["url"]),
                "",
                styled(state, "yellow" if had["error"] else ""),
                "",
                "",
            )
            first = "", ""
        for member in pool["members"]:
            for i, trouble in enumerate(member["trouble"] or [None]):
                label = (plain(member["proxy"]), f"{member['weight']:g}") if not i else ("", "")
                made.add_row(*first, *label, *_state(trouble))
                first = "", ""
    for trouble in listed:
        made.add_row(
            styled("(list)", "dim"), "", plain(str(trouble["proxy"])), "", *_state(trouble)
        )
    show(made)


@app.command(name="test")
def try_them(
    name: Annotated[str | None, Parameter(help="only this pool")] = None,
    /,
    *,
    url: Annotated[
        str, Parameter(help="URL to request (a page that shows your address reveals the exit)")
    ] = "https://example.com/",
    limit: Annotated[int, Parameter(help="test at most this many proxies of each pool")] = 100,
    json: Json = False,
    common: Common = DEFAULTS,
) -> int:
    """Send one request through each proxy: verdict, time, and exit address if the page shows it.

    Exit code 1 if a proxy failed.
    """
    config = common.load().config
    check_pool(config, name)
    if not config.proxies:
        raise ConfigError(
            "no proxies are configured",
            hint='[proxies.main] urls = ["http://user:password@proxy.example:8080"]',
        )
    results = asyncio.run(_try_all(config, [name] if name else list(config.proxies), url, limit))
    if json:
        print_json({"url": url, "results": results})
    else:
        columns = (
            ("pool", FIXED),
            ("proxy", FOLD),
            ("verdict", FIXED),
            ("status", RIGHT),
            ("time", RIGHT),
            ("exit", FIXED),
            ("why", FOLD),
        )
        rows = [
            (
                styled(r["pool"], "bold"),
                plain(r["proxy"]),
                styled(r["verdict"], "green" if r["verdict"] == "ok" else "bold red"),
                str(r["status"] or ""),
                lasting(r["seconds"]) if r["seconds"] is not None else "",
                plain(r["exit"] or ""),
                plain(r["reason"]),
            )
            for r in results
        ]
        show(table(*columns, rows=rows))
    return OK if all(r["verdict"] == "ok" for r in results) else RAN_WITH_FAILURES


# -- recorded state --------------------------------------------------------------------------------

Row = tuple[str, str, str, int, float, float, str]


def _known(common: Common, config: Config) -> tuple[list[Row], dict[str, tuple[float, int, str]]]:
    """Read failures and lists from the store. Return nothing if there is no store yet."""
    from penstock.runtime.stores import has_state

    if not has_state(config.ledger.url):
        return [], {}
    with common.stores(config=config) as stores:
        return stores.proxies.troubled(), stores.proxies.lists()


def _pool(
    name: str, config: Config, troubled: list[Row], had: tuple[float, int, str] | None, now: float
) -> dict[str, Any]:
    c = config.proxies[name]
    by_member: dict[str, list[dict[str, Any]]] = {}
    for row in troubled:
        by_member.setdefault(row[0], []).append(_trouble(row, now))
    members = [
        {"id": m.id, "proxy": m.label, "weight": m.weight, "trouble": by_member.get(m.id, [])}
        for m in parse_members(c.urls)
    ]
    at, count, error = had or (None, 0, "")
    listed = (
        {
            "url": masked_list(c.list_url),
            "at": iso(at),
            "seen": at,
            "members": count,
            "error": error,
        }
        if c.list_url
        else None
    )
    return {
        "pool": name,
        "geo": list(c.geo),
        "account": list(c.account),
        "weight": c.weight,
        "sticky": c.sticky,
        "cooldown": c.cooldown,
        "next": c.next or None,
        "list": listed,
        "members": members,
    }


def _trouble(row: Row, now: float) -> dict[str, Any]:
    _, host, _, failures, until, at, reason = row
    return {
        "host": host,
        "state": "cooling" if until > now else "recovering",
        "failures": failures,
        "until": iso(until),
        "at": iso(at),
        "reason": reason,
        "seconds": round(max(0.0, until - now), 1),
    }


def _serves(pool: dict[str, Any]) -> str:
    parts = {"geo": ",".join(pool["geo"]), "account": ",".join(pool["account"])}
    return "; ".join(
        f"{name} {value}" for name, value in (parts | {"then": pool["next"]}).items() if value
    )


def _state(trouble: dict[str, Any] | None) -> tuple[Any, str, str]:
    if trouble is None:
        return styled("ok", "green"), "", ""
    state = styled("recovering", "cyan")
    if trouble["state"] == "cooling":
        state = styled(f"cooldown {lasting(trouble['seconds'])}", "yellow")
    where = "all hosts" if trouble["host"] == "*" else plain(trouble["host"])
    return state, where, plain(trouble["reason"])


# -- testing ---------------------------------------------------------------------------------------


async def _try_all(config: Config, names: list[str], url: str, limit: int) -> list[dict[str, Any]]:
    from penstock.runtime.fetching import listed_proxies, open_fetcher

    fetcher, gate = open_fetcher(config), asyncio.Semaphore(MAX_PARALLEL)
    results: list[dict[str, Any]] = []
    try:
        work = []
        for name in names:
            c = config.proxies[name]
            members = {m.id: m for m in parse_members(c.urls)}
            if c.list_url:
                try:
                    members |= {m.id: m for m in await listed_proxies(fetcher, c.list_url)}
                except Failure as e:
                    results.append(
                        _result(
                            name, masked_list(c.list_url), "failed", reason=f"the list: {e.reason}"
                        )
                    )
            work += [
                _try(fetcher, gate, name, member, url) for member in list(members.values())[:limit]
            ]
        return [*results, *await asyncio.gather(*work)]
    finally:
        await fetcher.close()
        fetcher.guard.close()


async def _try(
    fetcher: Fetcher, gate: asyncio.Semaphore, pool: str, member: Member, url: str
) -> dict[str, Any]:
    async with gate:
        start = time.monotonic()
        try:
            answer = await fetcher.fetch(url, proxy=member.dsn)
        except Failure as e:
            return _result(
                pool,
                member.label,
                "failed",
                seconds=time.monotonic() - start,
                reason=scrub(e.reason, member.dsn),
                status=e.status,
            )
    refused = answer.status == 407
    return _result(
        pool,
        member.label,
        "failed" if refused else "ok",
        seconds=answer.seconds,
        status=answer.status,
        reason="the proxy rejected the user or the password" if refused else "",
        exit_=None if refused else _exit(answer.body),
    )


def _result(
    pool: str,
    proxy: str,
    verdict: str,
    *,
    seconds: float | None = None,
    status: int | None = None,
    reason: str = "",
    exit_: str | None = None,
) -> dict[str, Any]:
    return {
        "pool": pool,
        "proxy": proxy,
        "verdict": verdict,
        "status": status,
        "seconds": seconds,
        "exit": exit_ or None,
        "reason": reason,
    }


def _exit(body: bytes) -> str:
    """Return the only address on a page of at most 4096 bytes, or "" if there is not exactly one.

    Pages that show the client's address are short.
    """
    found = set()
    for text in _ADDRESS.findall(body) if len(body) <= 4096 else ():
        try:
            found.add(str(ipaddress.ip_address(text.decode())))
        except ValueError:
            continue
    return found.pop() if len(found) == 1 else ""
