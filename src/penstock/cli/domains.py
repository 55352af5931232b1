"""`penstock domains …`: shows the state of each host, and changes its limits for the whole fleet.

See `penstock.operate.hosts` for the decisions.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter

from penstock.cli.options import DEFAULTS, Common, Json, ask, read_value
from penstock.cli.output import (
    FIXED,
    FOLD,
    RIGHT,
    plain,
    print_json,
    report_pause,
    say,
    show,
    styled,
    table,
)
from penstock.config import units
from penstock.errors import ConfigError, UsageError
from penstock.operate.figures import count, iso, lasting, moment, plural, size
from penstock.operate.hosts import Domain, Domains, host_of

if TYPE_CHECKING:
    from rich.text import Text

    from penstock.ports import Exempt

app = App(name="domains", help="hosts: their limits, pauses, robots.txt and exceptions")
Host = Annotated[str, Parameter(help="shop.example, shop.example:8080, or a URL of it")]
MAX_EXCEPTIONS = 8  # exceptions shown for one host


@app.command
def ls(
    *,
    limit: Annotated[int, Parameter(help="hosts listed")] = 50,
    json: Json = False,
    common: Common = DEFAULTS,
) -> None:
    """List hosts by queue length. Held or slowed hosts, and hosts with own rules, come first."""
    with _open(common, create=False) as (domains, stores):
        found, everywhere = ask(
            stores, lambda tx: (domains.listed_in(tx, max(1, limit)), domains.everywhere_in(tx))
        )
    now = time.time()
    if json:
        print_json(
            {
                "domains": [_document(d) for d in found],
                "exceptions": [_exception(e) for e in everywhere],
            }
        )
        return
    for e in everywhere:
        say(styled("all hosts: ", "yellow"), f"{e.reason} (since {moment(e.at, now)}, {e.who})")
    if not found:
        say("no host is known yet")
        return
    columns = (
        ("host", FOLD),
        ("queued", RIGHT),
        ("rate", RIGHT),
        ("parallel", RIGHT),
        ("state", FIXED),
        ("last", RIGHT),
        ("throttled", RIGHT),
        ("robots.txt", FIXED),
        ("why", FOLD),
    )
    show(table(*columns, rows=[_row(d, now) for d in found]))


@app.command(name="show")
def show_one(host: Host, /, *, json: Json = False, common: Common = DEFAULTS) -> None:
    """Show the stored state of one host."""
    _report(common, host, json=json, create=False)


@app.command
def limit(
    host: Host,
    rate: Annotated[
        str | None,
        Parameter(
            help="requests a second: 2, 0.5, 30/m, unlimited, or `default` to remove its own limits"
        ),
    ] = None,
    /,
    *,
    burst: Annotated[
        int | None, Parameter(help="requests it may get in a burst after an idle time")
    ] = None,
    concurrency: Annotated[
        int | None, Parameter(help="requests in flight to this host in one worker")
    ] = None,
    json: Json = False,
    common: Common = DEFAULTS,
) -> None:
    """Set the limits of a host, for every worker from now on.

    A longer interval that the host itself requests still applies.
    """
    if (rate, burst, concurrency) == (None, None, None):
        raise UsageError("no limit given", hint=f"penstock domains limit {host} 30/m")
    for name, value in (("burst", burst), ("concurrency", concurrency)):
        if value is not None and not 1 <= value <= 10_000:
            raise UsageError(f"--{name} {value} is not a number from 1 to 10000")
    reset = rate is not None and rate.strip().lower() == "default"
    wanted = None if rate is None or reset else _parse_rate(rate)
    key = _key(host, common)
    with _open(common, create=True) as (domains, stores):
        was = ask(stores, lambda tx: domains.one_in(tx, key)).state
        domains.limit(
            key,
            rate=None if reset else was.rate if wanted is None else wanted,
            burst=burst if burst is not None or reset else was.burst,
            concurrency=concurrency if concurrency is not None or reset else was.concurrency,
        )
    _report(common, host, json=json)


@app.command
def pause(
    host: Host,
    /,
    *,
    for_: Annotated[
        str | None, Parameter(name="--for", help="how long: 10m, 1h, 2d (else until it is resumed)")
    ] = None,
    json: Json = False,
    common: Common = DEFAULTS,
) -> None:
    """Stop requests to a host from all workers. Requests in flight finish, queued events wait."""
    key = _key(host, common)
    seconds = None if for_ is None else read_value("--for", for_, units.durations(0.001))
    with _open(common, create=True) as (domains, _):
        until = domains.pause(key, seconds)
    if json:
        _report(common, host, json=True)
    else:
        end = "" if until == math.inf else f" until {moment(until)}"
        report_pause("domains", key, until=end, paused=True)


@app.command
def resume(host: Host, /, *, json: Json = False, common: Common = DEFAULTS) -> None:
    """Resume a paused host. A wait that the host itself requested (Retry-After) is kept."""
    key = _key(host, common)
    with _open(common, create=True) as (domains, stores):
        freed = domains.resume(key)
        held = ask(stores, lambda tx: domains.one_in(tx, key)).state.blocked_until
    if json:
        _report(common, host, json=True)
        return
    report_pause("domains", key, paused=False)
    if freed:
        say(f"{plural(freed, 'delayed event')} released")
    if held > time.time():
        say(f"{key} is still blocked until {moment(held)}: it sent Retry-After")


@app.command
def approve(host: Host, /, *, json: Json = False, common: Common = DEFAULTS) -> None:
    """Remove the records of gone URLs that wait because too many URLs of the host disappeared.

    Removals of the next hour are approved too. A running worker applies them.
    """
    key = _key(host, common)
    with _open(common, create=False) as (domains, _):
        waiting = domains.approve(key)
    if json:
        print_json({"host": key, "removals": waiting})
        return
    say(f"{key}: {plural(waiting, 'removal')} approved, and those of the next hour")


@app.command
def robots(
    host: Host,
    what: Annotated[
        Literal["obey", "ignore"] | None,
        Parameter(help="obey, or ignore with a reason (else show the stored state)"),
    ] = None,
    /,
    *,
    reason: Annotated[
        str, Parameter(help="why it may be ignored (recorded with your name and the time)")
    ] = "",
    json: Json = False,
    common: Common = DEFAULTS,
) -> None:
    """Show a host's robots.txt and whether it is obeyed, or change that."""
    key = _key(host, common)
    if what == "ignore" and not reason.strip():
        raise UsageError(
            "an exception needs a reason",
            hint=f'penstock domains robots {key} ignore --reason "our own shop"',
        )
    if what != "ignore" and reason:
        raise UsageError(
            "--reason is only for `ignore`",
            hint=f'penstock domains robots {key} ignore --reason "{reason}"',
        )
    if what is not None:
        with _open(common, create=True) as (domains, _):
            if what == "ignore":
                from penstock.runtime.fetching import operator

                domains.ignore_robots(key, " ".join(reason.split()), operator())
            else:
                domains.obey_robots(key)
    _report(common, host, json=json, create=what is not None)


# -- one host --------------------------------------------------------------------------------------


@contextlib.contextmanager
def _open(common: Common, *, create: bool) -> Iterator[tuple[Domains, Any]]:
    from penstock.rules.robots import product_token

    config = common.load().config
    with common.stores(create=create, config=config) as stores:
        agent = product_token(config.net.user_agent)
        yield Domains(stores.uow, stores.clock, stores.limits, agent), stores


def _key(host: str, common: Common) -> str:
    from penstock.rules.identity import BadUrl

    try:
        return host_of(host, common.load().config.pace.by)
    except BadUrl as e:
        raise UsageError(
            f"{host!r} is not a host: {e.reason}",
            hint="shop.example, shop.example:8080, or a URL of it",
        ) from None


def _parse_rate(text: str) -> float:
    from penstock.rules.pace import parse_rate

    try:
        found = parse_rate(text)
    except ConfigError as e:
        raise UsageError(e.message, hint=e.hint) from None
    return math.inf if found is None else found


def _report(common: Common, host: str, *, json: bool, create: bool = True) -> None:
    key = _key(host, common)
    with _open(common, create=create) as (domains, stores):
        d = ask(stores, lambda tx: domains.one_in(tx, key))
    if json:
        print_json(_document(d))
        return
    now = time.time()
    say(
        styled(d.host, "bold"),
        "" if d.known else ": no state is stored yet, so the default limits apply",
    )
    rows = [(styled(name, "dim"), text) for name, text in _lines(d, now)]
    show(table(("", FIXED), ("", FOLD), rows=rows, header=False))


def _row(d: Domain, now: float) -> list[Text | str]:
    ignored = next((e for e in d.exceptions if e.kind == "robots" and e.ended is None), None)
    return [
        styled(d.host, "bold"),
        count(d.queued),
        styled(_rate(d), "bold" if d.state.rate is not None else ""),
        styled(str(d.concurrency), "bold" if d.state.concurrency is not None else ""),
        _state_text(d, now),
        str(d.state.last_status or ""),
        count(d.state.throttles) if d.state.throttles else "",
        styled("ignored", "yellow") if ignored else _robots_state(d, now),
        plain("; ".join(_notes(d, ignored))),
    ]


def _notes(d: Domain, ignored: Exempt | None) -> Iterator[str]:
    if ignored is not None:
        yield f"{ignored.reason} ({ignored.who})"
    if d.held is not None:
        yield f"{plural(d.held.urls, 'removal')} of gone URLs wait for `domains approve`"


def _lines(d: Domain, now: float) -> Iterator[tuple[str, Text | str]]:
    s = d.state
    own = {"rate": s.rate, "burst": s.burst, "concurrency": s.concurrency}
    given = [name for name, value in own.items() if value is not None]
    yield "state", _state_text(d, now)
    yield (
        "rate",
        f"{_rate(d)}, burst {d.burst}, {d.concurrency} in parallel in one worker"
        + (f" (its own: {', '.join(given)})" if given else ""),
    )
    if s.crawl_delay:
        yield "crawl delay", lasting(s.crawl_delay) + (" (ignored)" if s.ignores_robots else "")
    if s.penalty > 1:
        yield "slowed down", f"{s.penalty:g} times, because it throttled requests"
    if s.throttles or s.last_status:
        yield (
            "throttled",
            f"{plural(s.throttles, 'time')}, last status {s.last_status or 'unknown'}, "
            f"answers in {lasting(s.latency)}",
        )
    yield "queued", count(d.queued)
    if d.held is not None:
        yield (
            "removals",
            styled(
                f"{plural(d.held.urls, 'gone URL')} of {count(d.held.known)} known ones, waiting "
                f"since {moment(d.held.since, now)}: penstock domains approve {d.host}",
                "yellow",
            ),
        )
    for r in d.robots:
        what = (
            size(r.size)
            if 200 <= r.status < 300
            else f"status {r.status}"
            if r.status
            else "not reachable"
        )
        more = [f"crawl delay {lasting(r.crawl_delay)}"] if r.crawl_delay else []
        more += [plural(r.sitemaps, "sitemap")] if r.sitemaps else []
        expiry = f"cached until {moment(r.until, now)}" if r.until > now else "to be fetched again"
        yield "robots.txt", plain(f"{r.origin}: {what}, {expiry}{''.join(', ' + m for m in more)}")
    for e in d.exceptions[:MAX_EXCEPTIONS]:
        span = (
            f"since {moment(e.at, now)}"
            if e.ended is None
            else f"{moment(e.at, now)} to {moment(e.ended, now)}"
            if e.ended > e.at
            else moment(e.at, now)
        )
        yield (
            "exception",
            styled(
                f"{e.kind} ignored, {span}, {e.who}: {e.reason}",
                "yellow" if e.ended is None else "dim",
            ),
        )


def _state_text(d: Domain, now: float) -> Text:
    s = d.state
    if s.paused_until > now:
        return styled(
            "paused"
            if s.paused_until == math.inf
            else f"paused for {lasting(s.paused_until - now)}",
            "bold red",
        )
    if s.blocked_until > now:
        return styled(f"blocked for {lasting(s.blocked_until - now)}", "yellow")
    return styled(f"slowed {s.penalty:g}×", "yellow") if s.penalty > 1 else styled("ok", "green")


def _rate(d: Domain) -> str:
    if not d.interval:
        return "unlimited"
    rate = 1 / d.interval
    for unit, seconds in (("s", 1), ("min", 60), ("h", 3600)):
        if rate * seconds >= 1 or unit == "h":
            return f"{rate * seconds:.3g}/{unit}"
    return ""


def _robots_state(d: Domain, now: float) -> str:
    good = [r for r in d.robots if r.until > now]
    if not good:
        return "not known"
    return (
        "obeyed"
        if any(200 <= r.status < 300 for r in good)
        else "not readable"
        if any(not r.status or r.status >= 500 for r in good)
        else "none"
    )


def _document(d: Domain) -> dict[str, Any]:
    s, now = d.state, time.time()
    paused, blocked = s.paused_until > now, s.blocked_until > now
    return {
        "host": d.host,
        "state": "paused"
        if paused
        else "blocked"
        if blocked
        else "slowed"
        if s.penalty > 1
        else "ok",
        "queued": d.queued,
        "rate": 1 / d.interval if d.interval else None,
        "interval": d.interval,
        "burst": d.burst,
        "concurrency": d.concurrency,
        "own": {
            "rate": "unlimited" if s.rate == math.inf else s.rate,
            "burst": s.burst,
            "concurrency": s.concurrency,
        },
        "crawl_delay": s.crawl_delay,
        "penalty": s.penalty,
        "paused": paused,
        "paused_until": iso(s.paused_until) if paused and s.paused_until != math.inf else None,
        "blocked_until": iso(s.blocked_until) if blocked else None,
        "last_status": s.last_status,
        "throttles": s.throttles,
        "latency": s.latency or None,
        "robots": "ignore" if s.ignores_robots else "obey",
        "robots_txt": [
            {
                "origin": r.origin,
                "status": r.status,
                "until": iso(r.until),
                "bytes": r.size,
                "crawl_delay": r.crawl_delay,
                "sitemaps": r.sitemaps,
            }
            for r in d.robots
        ],
        "exceptions": [_exception(e) for e in d.exceptions],
        "removals_held": d.held.urls if d.held else 0,
    }


def _exception(e: Exempt) -> dict[str, Any]:
    return {
        "kind": e.kind,
        "host": e.host,
        "reason": e.reason,
        "who": e.who,
        "at": iso(e.at),
        "ended": iso(e.ended),
    }
