"""`penstock fetch URL`: one request through all steps of a worker, with a report of each step.

Steps: guard, robots.txt, slot, proxy, redirects, verdict. Queue and ledger are not used.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from cyclopts import Parameter

from penstock.cli.fetch_recorder import FetchRecorder, PaceRecorder, guard_verdict
from penstock.cli.options import (
    WITH_OUTPUT,
    CommonWithOutput,
    Json,
    check_pool,
    read_route_options,
    read_value,
)
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
from penstock.errors import OK, RAN_WITH_FAILURES, UsageError
from penstock.model import Ask, ErrorClass, Event, Failure
from penstock.operate.figures import lasting, plural, size
from penstock.rules.identity import BadUrl, canonical_url, host_key, origin
from penstock.rules.masking import mask_headers_to_show
from penstock.rules.robots import Robots, product_token

if TYPE_CHECKING:
    from penstock.config.schema import Config
    from penstock.ports import Response
    from penstock.runtime.stores import Politeness

_COLUMNS = (
    ("for", FIXED),
    ("status", RIGHT),
    ("peer", FIXED),
    ("connect", RIGHT),
    ("first byte", RIGHT),
    ("total", RIGHT),
    ("url", FOLD),
)
_TEXT = re.compile(r"(?i)text/|html|xml|json|javascript")


def fetch(
    url: Annotated[str, Parameter(help="an http or https URL")],
    /,
    *,
    head: Annotated[bool, Parameter(help="request only the headers")] = False,
    output: Annotated[
        str | None, Parameter(name=["--output", "-o"], help="write the body to this file")
    ] = None,
    geo: Annotated[str | None, Parameter(help="use a proxy pool that serves this location")] = None,
    pool: Annotated[str | None, Parameter(help="use this proxy pool")] = None,
    account: Annotated[
        str | None, Parameter(help="use a proxy pool that serves this account")
    ] = None,
    ignore_robots: Annotated[
        str | None,
        Parameter(
            help="ignore robots.txt for this request (the value is the reason, which is recorded)"
        ),
    ] = None,
    wait: Annotated[str, Parameter(help="longest wait for a slot of the host")] = "30s",
    json: Json = False,
    common: CommonWithOutput = WITH_OUTPUT,
) -> int:
    """Fetch one URL as a worker does, and show each step.

    The request uses a slot of the host. No event is queued or recorded in the ledger.
    """
    import msgspec

    from penstock.config import units
    from penstock.intake.accept import new_id
    from penstock.rules.events import event_of

    if ignore_robots is not None and not ignore_robots.strip():
        raise UsageError("an exception needs a reason", hint='--ignore-robots "our own shop"')
    max_wait = read_value("--wait", wait, units.durations(0, 86400))
    config = common.load().config
    check_pool(config, pool)
    try:
        event = event_of(
            url,
            id_=new_id(),
            source="fetch",
            route=read_route_options(geo, pool, account),
            force=True,
            host_by=config.pace.by,
        )
    except BadUrl as e:
        raise UsageError(
            f"the URL cannot be fetched: {e.reason}",
            hint="penstock fetch https://shop.example/",
        ) from None
    if head:
        event = msgspec.structs.replace(event, ask=Ask(method="HEAD"))
    seen = asyncio.run(_run(config, event, max_wait, " ".join((ignore_robots or "").split())))
    saved = output if seen.last is not None else None
    if saved is not None and seen.last is not None:
        Path(saved).write_bytes(seen.last.body)
    document = seen.document(saved)
    if json:
        print_json(document)
    else:
        _print_report(document)
    return OK if seen.failure is None else RAN_WITH_FAILURES


# -- the request -----------------------------------------------------------------------------------


async def _run(config: Config, event: Event, max_wait: float, ignoring: str) -> _Report:
    from penstock.rules.routes import needs_proxy
    from penstock.runtime.fetching import open_fetcher, open_stage, operator
    from penstock.runtime.stores import Politeness

    store = Politeness(config)
    try:
        fetcher = open_fetcher(config)
        pace = PaceRecorder(store.claims, store.clock)
        recorder = FetchRecorder(fetcher, pace)
        stage, proxies = open_stage(
            config, store, recorder, pace, lists_by=fetcher, ignore_robots=bool(ignoring)
        )
        seen = _Report(event, recorder, pace, stage, config, ignoring)
        try:
            await store.claims.refresh()
            await store.proxies.refresh()
            seen.dns, seen.guard, refused = await guard_verdict(
                fetcher, event.url, through_proxy=needs_proxy(event.route)
            )
            if refused is not None:  # no request is sent, so no slot is reserved
                raise refused
            await _slot(store, pace, event.key, max_wait)
            if ignoring:
                await store.note(
                    lambda hosts: hosts.add_exception(
                        "robots", event.key, ignoring, operator(), once=True
                    )
                )
            await stage.fetch(event, None)
        except Failure as e:
            seen.failure = e
        finally:
            seen.end = time.monotonic()
            await stage.close()
            await proxies.close()
            await fetcher.close()
            fetcher.guard.close()
        return seen
    finally:
        await store.close()


async def _slot(store: Politeness, pace: PaceRecorder, host: str, max_wait: float) -> None:
    """Wait for the host's next slot. Raise Failure if it is more than `max_wait` seconds away."""
    slots = await store.claims.reserve({host: 1}, within=max_wait)
    wait = slots[host][0] - store.clock.now()
    if wait > max_wait:
        raise Failure(
            ErrorClass.THROTTLED,
            f"the next slot of {host} is {lasting(wait)} away",
            after=wait,
            detail="use a longer --wait, or run `penstock domains show`",
        )
    pace.waits.append((host, max(0.0, wait)))
    if wait > 0:
        await store.clock.sleep(wait)


# -- the report ------------------------------------------------------------------------------------


class RobotsKnown(Protocol):
    def remembered(self, url: str) -> tuple[Robots, int] | None:
        """Return the cached robots.txt of the URL's origin and its status, or None."""


class _Report:
    def __init__(
        self,
        event: Event,
        recorder: FetchRecorder,
        pace: PaceRecorder,
        stage: RobotsKnown,
        config: Config,
        ignoring: str,
    ) -> None:
        self.event, self._recorder, self._pace, self._stage = event, recorder, pace, stage
        self._config, self._ignoring = config, ignoring
        self.guard: dict[str, Any] = {"verdict": "allowed", "addresses": [], "reason": ""}
        self.dns = 0.0
        self.failure: Failure | None = None
        self.start = time.monotonic()
        self.end = self.start

    @property
    def last(self) -> Response | None:
        return self._recorder.last

    def document(self, saved: str | None) -> dict[str, Any]:
        pages = [x for x in self._recorder.exchanges if x["for"] == "page"]
        last, final = self.last, pages[-1] if pages else {}
        f = self.failure
        return {
            "url": self.event.url,
            "method": self.event.ask.method,
            "ok": f is None,
            "status": last.status if last else f.status if f else None,
            "final_url": last.url if last else None,
            "error": None
            if f is None
            else {
                "class": str(f.kind),
                "reason": f.reason,
                "detail": f.detail,
                "retry_after": f.after,
            },
            "guard": next(
                (x["guard"] for x in pages if x["guard"]["verdict"] != "allowed"), self.guard
            ),
            "robots": [self._robots(url) for url in self._urls(pages)],
            "slots": [{"host": host, "waited": seconds} for host, seconds in self._pace.waits],
            "exchanges": self._recorder.exchanges,
            "timing": {
                "dns": self.dns,
                "connect": final.get("connect"),
                "first_byte": final.get("first_byte"),
                "answer": final.get("total"),
                "total": self.end - self.start,
            },
            "http_version": last.http_version if last else None,
            "headers": mask_headers_to_show(last.headers) if last else {},
            "size": len(last.body) if last else None,
            "charset": _charset(last) if last else None,
            "output": saved,
        }

    def _urls(self, pages: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return each URL that was checked against robots.txt.

        These are the requested URLs, and the target of a redirect that was not followed.
        """
        found = list(dict.fromkeys([self.event.url, *(x["url"] for x in pages)]))
        if (
            self.last is not None
            and 300 <= self.last.status < 400
            and (location := self.last.headers.get("location"))
        ):
            try:
                found.append(canonical_url(location, self.last.url))
            except BadUrl:
                pass
        return list(dict.fromkeys(found))

    def _robots(self, url: str) -> dict[str, Any]:
        agent = product_token(self._config.net.user_agent)
        about = {
            "url": url,
            "agent": agent,
            "verdict": "not asked",
            "rule": "",
            "status": None,
            "from": self._pace.sources.get(origin(url)),
        }
        if (
            self._ignoring
            or self._config.robots == "ignore"
            or self._pace.exempt(host_key(url, self._config.pace.by))
        ):
            why = self._ignoring or (
                "a recorded exception" if self._config.robots == "obey" else 'robots = "ignore"'
            )
            return about | {"verdict": "ignored", "rule": why}
        if (known := self._stage.remembered(url)) is None:
            return about
        rules, status = known
        verdict = (
            "unreadable"
            if not status or status >= 500
            else "allowed"
            if rules.allows(agent, url)
            else "disallowed"
        )
        return about | {
            "verdict": verdict,
            "status": status,
            "rule": rules.deciding(agent, url) if verdict != "unreadable" else "",
        }


def _charset(response: Response) -> str | None:
    kind = response.headers.get("content-type")
    if not response.body or (kind and not _TEXT.search(kind)):
        return None
    from penstock.authoring.selectors import charset

    return charset(response.body, kind).removeprefix("whatwg-") or None


def _print_report(d: Mapping[str, Any]) -> None:
    say(styled(f"{d['method']} ", "bold"), d["url"])
    for name, text, style in _lines(d):
        say(styled(f"{name:<9}", "dim"), styled(text, style))
    if d["exchanges"]:
        show(table(*_COLUMNS, rows=[_cells(x) for x in d["exchanges"]]))
    for name, value in d["headers"].items():
        for line in value.split("\n"):
            say(styled(f"{name}: ", "cyan"), line)
    if d["status"]:
        more = (
            f"HTTP/{d['http_version']}" if d["http_version"] else "",
            "" if d["size"] is None else size(d["size"]),
            d["charset"],
            f"written to {d['output']}" if d["output"] else "",
        )
        say(
            styled(str(d["status"]), "bold green" if d["ok"] else "bold red"),
            "".join(f", {part}" for part in more if part),
        )
    if d["error"]:
        e = d["error"]
        say(styled(f"{e['class']}: {e['reason']}", "bold red"))
        if e["detail"]:
            say(styled(e["detail"], "dim"))


def _cells(x: Mapping[str, Any]) -> list[str]:
    times = (x["connect"], x["first_byte"], x["total"])
    return [
        x["for"],
        str(x["status"] or x.get("error", "")),
        plain(f"{x['peer'] or ''}{' via ' + x['proxy'] if x['proxy'] else ''}"),
        *("" if seconds is None else lasting(seconds) for seconds in times),
        plain(x["url"]),
    ]


def _lines(d: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    g, t = d["guard"], d["timing"]
    where = f"{', '.join(g['addresses'])} " if g["addresses"] else ""
    yield (
        "guard",
        f"{g['verdict']} {where}{g['reason']}".strip(),
        "" if g["verdict"] == "allowed" else "bold red",
    )
    for r in d["robots"]:
        answer = {
            "cache": "cached",
            "site": f"answered {r['status']}" if r["status"] else "just requested",
        }.get(r["from"] or "", "")
        parts = [
            p
            for p in (
                r["rule"] or ("no rule matches" if r["verdict"] == "allowed" else ""),
                answer,
            )
            if p
        ]
        about = "" if len(d["robots"]) == 1 else f"{r['url']} "
        yield (
            "robots",
            f"{about}{r['verdict']}" + (f" ({'; '.join(parts)})" if parts else ""),
            "" if r["verdict"] in ("allowed", "not asked") else "yellow",
        )
    for host in dict.fromkeys(s["host"] for s in d["slots"]):
        waits = [s["waited"] for s in d["slots"] if s["host"] == host]
        yield "slot", f"waited {lasting(sum(waits))} for {plural(len(waits), 'slot')} of {host}", ""
    parts = [
        f"{name} {lasting(t[key])}"
        for name, key in (
            ("name", "dns"),
            ("connect", "connect"),
            ("first byte", "first_byte"),
            ("answer", "answer"),
        )
        if t[key] is not None
    ]
    yield "time", f"{', '.join(parts)}; total {lasting(t['total'])}", ""
