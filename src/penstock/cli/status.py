"""`penstock status`: counters of events, reasons of delays and the largest dead-letter groups.

It reads counters, so its cost does not grow with the number of events.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from penstock.cli.options import DEFAULTS, Common, Json, ask
from penstock.cli.output import (
    FIXED,
    FOLD,
    RIGHT,
    STATUS_STYLE,
    console,
    plain,
    print_json,
    styled,
    table,
)
from penstock.operate.figures import count, iso, lasting, plural, short
from penstock.ports import LINKS_WAITING

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

    from penstock.ports import SourceState, StoppedTrap
    from penstock.ports.reports import Standing
    from penstock.rules.waiting import Waiting
    from penstock.runtime.stores import Stores

STATES = ("pending", "in_flight", "delayed", "success", "duplicate", "dead")
COUNTERS = (
    "records",
    "records_unchanged",
    "changes",
    "unchanged",
    "gone",
    "missing",
    "empty",
    "unmatched",
    "followed",
    "unreadable",
)
LINKS_WAIT = "workers accept them while open events use less than nine tenths of intake.max_pending"


def links_waiting(found: Standing) -> int:
    """Return how many links wait until there is room for their events."""
    return found.counters.get(LINKS_WAITING, 0)


def status(
    *,
    json: Json = False,
    watch: Annotated[
        bool, Parameter(name=["--watch", "-w"], help="refresh every second, until Ctrl-C")
    ] = False,
    common: Common = DEFAULTS,
) -> None:
    """Count events by status: pending, in flight, delayed, done, dead. The sum is all accepted.

    Also shows: why events wait, the largest dead-letter groups, sinks that are behind, pages that
    no extractor matched or that yielded nothing.
    """
    with common.stores() as stores:
        if watch:
            _watch(stores, json)
        elif json:
            print_json(document(*look(stores)))
        else:
            console().print(picture(*look(stores)))


def _watch(stores: Stores, json: bool) -> None:
    from rich.live import Live

    with contextlib.suppress(KeyboardInterrupt):
        if json or not console().is_terminal:
            while True:
                print_json(document(*look(stores)), line=True)
                console().file.flush()
                time.sleep(1.0)
        with Live(picture(*look(stores)), console=console(), refresh_per_second=4) as live:
            while True:
                time.sleep(1.0)
                live.update(picture(*look(stores)))


Look = tuple[
    "Standing",
    list[dict[str, Any]],
    dict[str, tuple[int, int]],
    dict[str, str],
    "list[SourceState]",
    "list[Waiting]",
    str | None,  # the pipeline that owns the store
    "list[StoppedTrap]",
]


def look(stores: Stores) -> tuple[Look, float]:
    from penstock.locks import holder_alive, note_of
    from penstock.operate.waiting import waits_in
    from penstock.operate.workers import workers_in
    from penstock.runtime.sources_and_sinks import sink_lock

    found = ask(stores, lambda tx: tx.status_reports.standing())
    alerts, sources, owner = (
        ask(stores, stores.maintenance.alerts),
        ask(stores, lambda tx: tx.sources.all()),
        ask(stores, lambda tx: tx.owner.pipeline()),
    )
    states = ask(
        stores,
        lambda tx: workers_in(
            tx,
            stores.clock.now(),
            stores.workers_directory,
            on_server=stores.db.file is None,
            others=found.running,
        ),
    )
    workers = [
        {"id": worker, "alive": alive, "holds": found.running.get(worker, 0)}
        for worker, alive in states.items()
    ]
    locks = {s.name: sink_lock(stores.config, s.name) for s in found.sinks}
    # The text of a live holder is newer than the reason in the ledger, or equal to it.
    down = {
        s.name: reason
        for s in found.sinks
        if (reason := (note_of(locks[s.name]) if holder_alive(locks[s.name]) else "") or s.outage)
    }
    waits = ask(stores, waits_in)
    traps = list(ask(stores, lambda tx: tx.budgets.traps()))
    return (found, workers, alerts, down, sources, waits, owner, traps), time.time()


def document(looked: Look, now: float) -> dict[str, Any]:
    from penstock.model import Reason
    from penstock.rules.budgets import NOT_ACCEPTED
    from penstock.rules.reasons import code_of

    found, workers, alerts, down, sources, waits, owner, traps = looked
    total = {
        name: sum(row[name] for row in found.topics.values()) for name in ("accepted", *STATES)
    }
    causes = {code_of(w.reason) for w in waits}
    return {
        "pipeline": owner,
        "topics": found.topics,
        "total": total,
        "breaker": "open" if causes & {Reason.BREAKER, Reason.BREAKER_HOSTS} else "closed",
        "paused": found.paused,
        "alerts": [
            {"topic": topic, "ended": ended, "dead": dead}
            for topic, (ended, dead) in alerts.items()
        ],
        "waits": [
            {
                "for": w.cause,
                "events": w.events,
                "reason": w.reason,
                "since": iso(w.since),
                "next": w.next_step,
            }
            for w in waits
        ],
        "links": {
            "waiting": links_waiting(found),
            "reason": LINKS_WAIT if links_waiting(found) else None,
        },
        "counters": {**dict.fromkeys(COUNTERS, 0), **found.counters},
        "links_not_accepted": [
            {"counter": name, "links": n, "reason": reason, "next": step}
            for name, (reason, step) in NOT_ACCEPTED.items()
            if (n := found.counters.get(name))
        ],
        "traps": [
            {"kind": t.kind, "template": t.template, "links": t.links, "last_at": iso(t.at)}
            for t in traps
        ],
        "delays": [
            {"reason": w.reason, "events": w.events, "next_at": iso(w.next_at)}
            for w in found.waiting
        ],
        "dead_causes": [
            {
                "fingerprint": c.fingerprint,
                "letters": c.letters,
                "exact": c.exact,
                "stage": c.stage,
                "class": c.error_class,
                "reason": c.reason,
                "newest_at": iso(c.newest),
                "event_id": c.event_id,
            }
            for c in found.causes
        ],
        "sinks": [
            {
                "name": s.name,
                "flushed": s.flushed,
                "backlog": s.backlog,
                "down": down.get(s.name),
                "down_since": None if s.outage_since is None else iso(s.outage_since),
            }
            for s in found.sinks
        ],
        "sources": [
            {
                "name": s.name,
                "events": s.events,
                "last_event_at": None if s.event_at is None else iso(s.event_at),
                "lag_seconds": s.lag,
                "backlog": s.backlog,
                "paused": s.paused,
                "error": s.error,
            }
            for s in sources
        ],
        "hooks_waiting": found.changes_waiting,
        "workers": workers,
        "oldest_pending_age": None
        if found.oldest is None
        else round(max(0.0, now - found.oldest), 3),
    }


# -- text output -----------------------------------------------------------------------------------


def _joined(*parts: str) -> str:
    return ", ".join(part for part in parts if part)


def picture(looked: Look, now: float) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    found, workers, alerts, down, sources, waits, owner, traps = looked
    warnings = [
        *(
            (" alert ", topic, f"{count(dead)} of the last {count(ended)} events ended dead", "")
            for topic, (ended, dead) in alerts.items()
        ),
        *(
            (
                " paused " if w.reason else " waiting ",
                w.what,
                _joined(w.reason, f"{plural(w.events, 'event')} waiting" if w.events else ""),
                plain(w.next_step),
            )
            for w in waits
        ),
        *((" sink down ", n, f"{why} (rows wait in the outbox)", "") for n, why in down.items()),
        *(
            (" source ", s.name, f"paused: {s.paused}" if s.paused else s.error or "", "")
            for s in sources
            if s.paused or s.error
        ),
    ]
    parts: list[RenderableType] = []
    for label, name, text, command in warnings:
        style = "bold white on red" if label in (" paused ", " sink down ") else "black on yellow"
        line = Text.assemble((label, style), " ", (plain(name), "bold"), f": {plain(text)}")
        parts += [line.append(f"  {command}" if command else "", "cyan"), ""]
    parts += [_figures(found), "", _workers(found, workers, owner, now)]
    for part in (
        _yield(found),
        _not_accepted(found, traps),
        _delays(found, now),
        _causes(found, now),
        _sinks(found),
    ):
        if part is not None:
            parts += ["", part]
    return Group(*parts)


def _figures(found: Standing) -> RenderableType:
    rows = dict(found.topics)
    if len(rows) > 1:
        rows["total"] = {
            name: sum(row[name] for row in rows.values()) for name in ("accepted", *STATES)
        }
    cells = [
        (
            styled(topic, "bold"),
            styled(count(row["accepted"]), "bold"),
            *(styled(count(row[s]), STATUS_STYLE[s] if row[s] else "dim") for s in STATES),
        )
        for topic, row in rows.items()
    ]
    columns = ((name.replace("_", " "), RIGHT) for name in ("accepted", *STATES))
    return table("topic", *columns, rows=cells)


def _workers(
    found: Standing, workers: list[dict[str, Any]], owner: str | None, now: float
) -> RenderableType:
    from rich.text import Text

    alive, gone = [w for w in workers if w["alive"]], [w for w in workers if not w["alive"]]
    line = Text.assemble(
        *((("pipeline ", "dim"), plain(owner), "   ") if owner else ()),
        ("workers ", "dim"),
        plural(len(alive), "worker") + " running" if alive else "none running",
    )
    if gone:
        line.append(
            f", {plural(len(gone), 'worker')} ended without shutdown "
            "(the next one takes over the work)",
            "yellow",
        )
    if found.oldest is not None:
        line.append("   oldest ", "dim").append(lasting(now - found.oldest))
    open_ = sum(row[name] for row in found.topics.values() for name in ("pending", "delayed"))
    if open_ and not alive:
        line.append("   penstock run", "cyan")
    return line


def _yield(found: Standing) -> RenderableType | None:
    from rich.text import Text

    c = found.counters
    line = Text.assemble(("records ", "dim"), count(c.get("records", 0)))
    for name, label in (
        ("changes", "changes"),
        ("unchanged", "pages unchanged"),
        ("gone", "pages gone"),
        ("missing", "pages missing"),
        ("records_unchanged", "records unchanged"),
        ("followed", "links followed"),
    ):
        if c.get(name):
            line.append(f"   {label} ", "dim").append(count(c[name]))
    for name, text in (("unmatched", "no extractor matched"), ("empty", "yielded nothing")):
        if c.get(name):
            advice = "check match=" if name == "unmatched" else "check the selectors"
            line.append(f"\n{plural(c[name], 'page')}: {text}", "yellow").append(
                f"   {advice}", "dim"
            )
    if n := links_waiting(found):
        line.append(f"\n{plural(n, 'link')} waiting", "yellow").append(f"   {LINKS_WAIT}", "dim")
    if c.get("unreadable"):
        line.append(
            f"\n{plural(c['unreadable'], 'message')} could not be read as an event", "yellow"
        ).append("   penstock dlq ls --stage intake, or --stage source", "dim")
    if not any(c.get(name) for name in (*COUNTERS, LINKS_WAITING)):
        return None
    return line


def _not_accepted(found: Standing, traps: list[StoppedTrap]) -> RenderableType | None:
    """Return the links that budgets and the crawler-trap rule stopped, with examples of traps."""
    from rich.text import Text

    from penstock.rules.budgets import NOT_ACCEPTED

    lines = []
    for name, (reason, step) in NOT_ACCEPTED.items():
        if n := found.counters.get(name):
            line = Text(f"{plural(n, 'link')} not accepted: {reason}", "yellow")
            lines.append(line.append(f"   {step}", "dim"))
    lines += [Text(f"  {plural(t.links, 'link')} of {plain(t.template)}") for t in traps[:5]]
    if len(traps) > 5:
        lines.append(Text(f"  and {plural(len(traps) - 5, 'other template')}", "dim"))
    return Text("\n").join(lines) if lines else None


def _delays(found: Standing, now: float) -> RenderableType | None:
    if not found.waiting:
        return None
    total = sum(row["delayed"] for row in found.topics.values())
    part = f" (of the next {count(found.waiting_seen)})" if total > found.waiting_seen else ""
    rows: list[tuple[str | Text, ...]] = [
        (styled(count(w.events), "yellow"), lasting(max(0.0, w.next_at - now)), plain(w.reason))
        for w in found.waiting[:5]
    ]
    if len(found.waiting) > 5:
        rows.append(
            ("", "", styled(f"and {plural(len(found.waiting) - 5, 'other reason')}", "dim"))
        )
    return table(("delayed", RIGHT), ("next in", RIGHT), (f"reason{part}", FOLD), rows=rows)


def _causes(found: Standing, now: float) -> RenderableType | None:
    if not found.causes:
        return None
    rows = [
        (
            styled(count(c.letters) + ("" if c.exact else "+"), "bold red"),
            lasting(max(0.0, now - c.newest)) + " ago",
            plain(c.stage),
            plain(f"{c.error_class}: {c.reason}"),
            styled(f"penstock dlq show {short(c.event_id)}", "cyan"),
        )
        for c in found.causes
    ]
    columns = (("dead", RIGHT), ("last", RIGHT), "stage", ("cause", FOLD), ("details", FIXED))
    return table(*columns, rows=rows)


def _sinks(found: Standing) -> RenderableType | None:
    if not found.sinks:
        return None
    rows = [
        (
            plain(s.name),
            count(s.flushed),
            styled(count(s.backlog), "yellow" if s.backlog else "dim"),
        )
        for s in found.sinks
    ]
    return table("sink", ("written", RIGHT), ("waiting", RIGHT), rows=rows)
