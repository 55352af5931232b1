"""`penstock status`: counters of events, reasons of delays and the largest dead-letter groups.

It reads counters, so its cost does not grow with the number of events.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from penstock.cli.options import DEFAULTS, Common, Json, ask
from penstock.cli.output import (
    FOLD,
    RIGHT,
    console,
    plain,
    print_json,
    status_text,
    styled,
    table,
)
from penstock.operate.figures import count, iso, lasting, plural, short

if TYPE_CHECKING:
    from rich.console import RenderableType

    from penstock.ports import SourceState
    from penstock.ports.reports import Standing
    from penstock.runtime.stores import Stores

STATES = ("pending", "in_flight", "delayed", "success", "duplicate", "dead")
COUNTERS = (
    "records",
    "records_unchanged",
    "changes",
    "unchanged",
    "empty",
    "unmatched",
    "followed",
    "unreadable",
)


def status(
    *,
    json: Json = False,
    watch: Annotated[
        bool, Parameter(name=["--watch", "-w"], help="refresh every second, until Ctrl-C")
    ] = False,
    common: Common = DEFAULTS,
) -> int:
    """Count events by status: pending, in flight, delayed, done, dead. The sum is all accepted.

    Also shows: why events wait, the largest dead-letter groups, sinks that are behind, pages that
    no extractor matched or that yielded nothing.
    """
    with common.stores() as stores:
        if not watch:
            found, now = look(stores)
            if json:
                print_json(document(found, now))
            else:
                console().print(picture(found, now))
            return 0
        return _watch(stores, json)


def _watch(stores: Stores, json: bool) -> int:
    from rich.live import Live

    try:
        if json or not console().is_terminal:
            while True:
                print_json(document(*look(stores)), line=True)
                console().file.flush()
                time.sleep(1.0)
        with Live(picture(*look(stores)), console=console(), refresh_per_second=4) as live:
            while True:
                time.sleep(1.0)
                live.update(picture(*look(stores)))
    except KeyboardInterrupt:
        return 0


Look = tuple[
    "Standing",
    list[dict[str, Any]],
    dict[str, tuple[int, int]],
    dict[str, str],
    "list[SourceState]",
]


def look(stores: Stores) -> tuple[Look, float]:
    from penstock.locks import holder_alive, note_of, worker_alive
    from penstock.runtime.process import sink_lock

    found = ask(stores, lambda tx: tx.status_reports.standing())
    alerts, sources = (
        ask(stores, stores.maintenance.alerts),
        ask(stores, lambda tx: tx.sources.all()),
    )
    directory = stores.workers_directory
    signs = {path.name.removesuffix(".alive") for path in directory.glob("*.alive")} | set(
        found.running
    )
    workers = [
        {
            "id": worker,
            "alive": worker_alive(directory, worker),
            "holds": found.running.get(worker, 0),
        }
        for worker in sorted(signs)
    ]
    locks = {s.name: sink_lock(stores.config, s.name) for s in found.sinks}
    down = {
        name: note for name, lock in locks.items() if holder_alive(lock) and (note := note_of(lock))
    }
    return (found, workers, alerts, down, sources), time.time()


def document(looked: Look, now: float) -> dict[str, Any]:
    found, workers, alerts, down, sources = looked
    total = {
        name: sum(row[name] for row in found.topics.values()) for name in ("accepted", *STATES)
    }
    breaker = {
        topic: reason for topic, reason in found.paused.items() if reason.startswith("breaker:")
    }
    return {
        "topics": found.topics,
        "total": total,
        "breaker": "open" if breaker else "closed",
        "paused": found.paused,
        "alerts": [
            {"topic": topic, "ended": ended, "dead": dead}
            for topic, (ended, dead) in alerts.items()
        ],
        "counters": {**dict.fromkeys(COUNTERS, 0), **found.counters},
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
            {"name": s.name, "flushed": s.flushed, "backlog": s.backlog, "down": down.get(s.name)}
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


def picture(looked: Look, now: float) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    found, workers, alerts, down, sources = looked
    parts: list[RenderableType] = []
    for topic, (ended, dead) in alerts.items():
        parts += [
            Text.assemble(
                (" alert ", "black on yellow"),
                " ",
                (plain(topic), "bold"),
                f": {count(dead)} of the last {count(ended)} events ended dead",
            ),
            "",
        ]
    for topic, reason in found.paused.items():
        parts += [
            Text.assemble(
                (" paused ", "bold white on red"),
                " ",
                (plain(topic), "bold"),
                f": {plain(reason)}  ",
                (f"penstock topics resume {plain(topic)}", "cyan"),
            ),
            "",
        ]
    for name, reason in down.items():
        parts += [
            Text.assemble(
                (" sink down ", "bold white on red"),
                " ",
                (plain(name), "bold"),
                f": {plain(reason)} (rows wait in the outbox)",
            ),
            "",
        ]
    for source in sources:
        if wrong := f"paused: {source.paused}" if source.paused else source.error:
            parts += [
                Text.assemble(
                    (" source ", "black on yellow"),
                    " ",
                    (plain(source.name), "bold"),
                    f": {plain(wrong)}",
                ),
                "",
            ]
    parts += [_figures(found), "", _workers(found, workers, now)]
    for part in (_yield(found), _delays(found, now), _causes(found, now), _sinks(found)):
        if part is not None:
            parts += ["", part]
    return Group(*parts)


def _figures(found: Standing) -> RenderableType:
    made = table("topic", *((name.replace("_", " "), RIGHT) for name in ("accepted", *STATES)))
    rows = dict(found.topics)
    if len(rows) > 1:
        rows["total"] = {
            name: sum(row[name] for row in rows.values()) for name in ("accepted", *STATES)
        }
    for topic, row in rows.items():
        cells = [styled(count(row["accepted"]), "bold")]
        for state in STATES:
            cell = status_text(state)
            cell.plain = count(row[state])
            cells.append(cell if row[state] else styled("0", "dim"))
        made.add_row(styled(topic, "bold"), *cells)
    return made


def _workers(found: Standing, workers: list[dict[str, Any]], now: float) -> RenderableType:
    from rich.text import Text

    alive, gone = [w for w in workers if w["alive"]], [w for w in workers if not w["alive"]]
    line = Text.assemble(
        ("workers ", "dim"), plural(len(alive), "worker") + " running" if alive else "none running"
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
    if c.get("unreadable"):
        line.append(
            f"\n{plural(c['unreadable'], 'message')} could not be read as an event", "yellow"
        ).append("   penstock dlq ls --stage intake, or --stage source", "dim")
    if not any(c.get(name) for name in COUNTERS):
        return None
    return line


def _delays(found: Standing, now: float) -> RenderableType | None:
    if not found.waiting:
        return None
    total = sum(row["delayed"] for row in found.topics.values())
    part = f" (of the next {count(found.waiting_seen)})" if total > found.waiting_seen else ""
    made = table(("delayed", RIGHT), ("next in", RIGHT), (f"reason{part}", FOLD))
    for w in found.waiting[:5]:
        made.add_row(
            styled(count(w.events), "yellow"), lasting(max(0.0, w.next_at - now)), plain(w.reason)
        )
    if len(found.waiting) > 5:
        made.add_row("", "", styled(f"and {plural(len(found.waiting) - 5, 'other reason')}", "dim"))
    return made


def _causes(found: Standing, now: float) -> RenderableType | None:
    if not found.causes:
        return None
    made = table(
        ("dead", RIGHT),
        ("last", RIGHT),
        "stage",
        ("cause", FOLD),
        ("details", {"no_wrap": True}),
    )
    for c in found.causes:
        shown = count(c.letters) + ("" if c.exact else "+")
        command = styled(f"penstock dlq show {short(c.event_id)}", "cyan")
        made.add_row(
            styled(shown, "bold red"),
            lasting(max(0.0, now - c.newest)) + " ago",
            plain(c.stage),
            plain(f"{c.error_class}: {c.reason}"),
            command,
        )
    return made


def _sinks(found: Standing) -> RenderableType | None:
    if not found.sinks:
        return None
    made = table("sink", ("written", RIGHT), ("waiting", RIGHT))
    for s in found.sinks:
        made.add_row(
            plain(s.name),
            count(s.flushed),
            styled(count(s.backlog), "yellow" if s.backlog else "dim"),
        )
    return made
