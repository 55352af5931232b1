"""`penstock trace`: every event of a trace as a tree, each with its history."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from cyclopts import Parameter

from penstock.cli import find
from penstock.cli.options import DEFAULTS, Common, Json, ask
from penstock.cli.output import (
    console,
    plain,
    print_json,
    status_text,
    styled,
)
from penstock.errors import BadEnvelope
from penstock.model import Event, decode_event
from penstock.operate.figures import iso, lasting, moment, plural, short, size
from penstock.ports.reports import EventRow, Letter, Step
from penstock.rules.dependencies import labels_of

if TYPE_CHECKING:
    from rich.text import Text
    from rich.tree import Tree

    from penstock.ports import Transaction
    from penstock.runtime.stores import Stores


class Found(msgspec.Struct, kw_only=True):
    """One event with its history, duplicates, dead letter and records."""

    row: EventRow
    event: Event | None
    history: list[Step]
    duplicates: list[tuple[str, str]]
    original_trace: str | None  # trace of the owner, if this event is a duplicate
    letter: Letter | None
    records: list[tuple[str, str]] | None  # None if they were not read


class Traced(msgspec.Struct, kw_only=True):
    trace: str
    asked: str | None  # the requested event, or None if a trace was requested
    events: list[Found]
    total: int
    others: list[EventRow]  # of the same URL, in other traces


def trace(
    what: Annotated[
        str,
        Parameter(help="an event id or trace id (or a unique prefix), a URL, or `last`"),
    ] = "last",
    /,
    *,
    limit: Annotated[
        int, Parameter(name=["--limit", "-n"], help="events shown of a large trace")
    ] = 100,
    json: Json = False,
    common: Common = DEFAULTS,
) -> None:
    """Show the history of an event or a URL, with every event of its trace.

    Shows times, reasons, duplicates, page and records.
    """
    with common.stores() as stores:
        found = ask(stores, lambda tx: gather(stores, tx, what, max(1, limit)))
    if json:
        print_json(document(found))
    else:
        show(found)


def gather(stores: Stores, tx: Transaction, what: str, limit: int) -> Traced:
    asked: EventRow | None = None
    if what == "last" or find.is_url(what):
        asked = find.event_for(stores, tx, what)
        # The owner of a duplicate has the history of the fetch.
        if asked.status == "duplicate" and asked.duplicate_of:
            asked = tx.reports.event(asked.duplicate_of) or asked
        trace_id = asked.trace
    else:
        events, traces = (
            tx.reports.ids_like(what, find.MAX_LISTED),
            tx.reports.traces_like(what, find.MAX_LISTED),
        )
        if what in traces:
            trace_id = what
            asked = tx.reports.event(what)
        elif what in events or (len(events) == 1 and (not traces or traces == events)):
            asked = tx.reports.event(what if what in events else events[0])
            assert asked is not None
            trace_id = asked.trace
        else:
            trace_id = find.one(
                sorted(set(events) | set(traces)),
                what,
                "event or trace",
                "`penstock events ls` lists them, `penstock trace last` shows the newest",
            )
            if trace_id not in traces:
                asked = tx.reports.event(trace_id)
                trace_id = asked.trace if asked else trace_id
    rows = tx.reports.of_trace(trace_id, limit)
    if asked is not None and all(row.id != asked.id for row in rows):
        rows = [*rows[: limit - 1], asked]
    total = len(rows) if len(rows) < limit else tx.reports.trace_size(trace_id)
    records = tx.reports.records_of([row.n for row in rows])
    others = (
        [row for row in tx.reports.of_url(find.key_of(stores, what), 11) if row.trace != trace_id][
            :10
        ]
        if find.is_url(what)
        else []
    )
    return Traced(
        trace=trace_id,
        asked=asked.id if asked else None,
        events=[_found(stores, tx, row, records) for row in rows],
        total=total,
        others=others,
    )


def _found(
    stores: Stores, tx: Transaction, row: EventRow, records: dict[int, list[tuple[str, str]]] | None
) -> Found:
    original = tx.reports.event(row.duplicate_of) if row.duplicate_of else None
    try:
        event = decode_event(row.envelope)
    except BadEnvelope:
        event = None
    return Found(
        row=row,
        event=event,
        history=tx.reports.history(row.n),
        duplicates=tx.reports.duplicates_of(row.id),
        original_trace=original.trace if original else None,
        letter=tx.letter_reports.letter(row.id) if row.status == "dead" else None,
        records=None if records is None else records.get(row.n, []),
    )


# -- JSON ------------------------------------------------------------------------------------------


def document(found: Traced) -> dict[str, Any]:
    return {
        "trace_id": found.trace,
        "asked": found.asked,
        "total": found.total,
        "events": [event_document(f) for f in found.events],
        "other_events_of_url": [
            {
                "event_id": row.id,
                "trace_id": row.trace,
                "status": row.status,
                "accepted_at": iso(row.accepted_at),
            }
            for row in found.others
        ],
    }


def row_document(row: EventRow) -> dict[str, Any]:
    """Return the JSON fields of an event that every listing has."""
    return {
        "event_id": row.id,
        "trace_id": row.trace,
        "url": row.url,
        "host": row.host,
        "topic": row.topic,
        "event_offset": row.position,
        "source": row.source,
        "status": row.status,
        "result": row.result,
        "reason": row.reason or "",
        "retry_count": row.attempts,
        "starts": row.starts,
        "accepted_at": iso(row.accepted_at),
        "dispatched_at": iso(row.dispatched_at),
        "finished_at": iso(row.finished_at),
        "not_before": iso(row.not_before) if row.status == "delayed" else None,
        "response_status": row.response_status,
        "response_hash": row.response_hash,
        "worker": row.worker,
        "extractors": labels_of(row.extractors or ""),
        "page": row.page,
        "duplicate_of": row.duplicate_of,
    }


def event_document(f: Found) -> dict[str, Any]:
    e = f.event
    return {
        **row_document(f.row),
        "parent": e.parent if e else None,
        "depth": e.depth if e else 0,
        "cause": e.cause if e else "",
        "route": msgspec.to_builtins(e.route) if e else {},
        "priority": e.priority if e else None,
        "force": e.force if e else False,
        "promoted": bool(f.row.promoted),
        "duplicate_of_trace": f.original_trace,
        "duplicates": [{"event_id": id_, "trace_id": trace_id} for id_, trace_id in f.duplicates],
        "records": None
        if f.records is None
        else [{"extractor": extractor, "key": key} for extractor, key in f.records],
        "dead_letter": None
        if f.letter is None
        else {
            "stage": f.letter.stage,
            "class": f.letter.error_class,
            "reason": f.letter.reason,
            "fingerprint": f.letter.fingerprint,
        },
        "history": [step_document(s) for s in f.history],
    }


def step_document(s: Step) -> dict[str, Any]:
    return {
        "at": iso(s.at),
        "status": s.status,
        "worker": s.worker,
        "stage": s.stage,
        "class": s.error_class,
        "reason": s.reason,
    }


# -- text output -----------------------------------------------------------------------------------


def show(found: Traced) -> None:
    from rich.text import Text
    from rich.tree import Tree

    now = time.time()
    root = Tree(
        Text.assemble(
            ("trace ", "dim"),
            (plain(found.trace), "bold"),
            (f"  {plural(found.total, 'event')}", "dim"),
        ),
        guide_style="dim",
    )
    by_id: dict[str, Tree] = {}
    for f in found.events:
        parent = f.event.parent if f.event else None
        node = by_id.get(parent or "", root).add(_headline(f, asked=f.row.id == found.asked))
        by_id[f.row.id] = node
        for line in _lines(f, now):
            node.add(line)
    if found.total > len(found.events):
        root.add(styled(f"{found.total - len(found.events):,} more (--limit shows them)", "dim"))
    console().print(root)
    if found.others:
        console().print(styled("\nother events of this URL", "dim"))
        for row in found.others:
            console().print(
                Text.assemble(
                    "  ",
                    short(row.id),
                    "  ",
                    status_text(row.status),
                    f"  {moment(row.accepted_at, now)}  ",
                    (f"penstock trace {short(row.id)}", "cyan"),
                )
            )


def _headline(f: Found, *, asked: bool) -> Text:
    from rich.text import Text

    took = f" in {lasting(f.row.finished_at - f.row.accepted_at)}" if f.row.finished_at else ""
    return Text.assemble(
        status_text(f.row.status),
        (f" ({plain(f.row.result)})", "yellow") if f.row.result else "",
        took,
        "  ",
        (plain(f.row.url), "bold" if asked else ""),
        (f"  {short(f.row.id)}", "dim"),
    )


def _lines(f: Found, now: float) -> list[Text]:
    from rich.text import Text

    row, lines = f.row, []
    start = row.accepted_at
    for s in f.history:
        place = " · ".join(plain(p) for p in (s.stage, s.error_class, s.reason) if p)
        after = f"+{lasting(max(0.0, s.at - start))}" if s.at - start >= 0.0005 else "      "
        line = Text.assemble(
            (moment(s.at, now), "dim"),
            f"  {after:>10}  ",
            status_text(s.status),
            f"  {place}" if place else "",
        )
        if s.worker:
            line.append(f"  by {plain(s.worker)}", "dim")
        lines.append(line)
    event = f.event
    route = msgspec.to_builtins(event.route) if event else {}
    facts = (
        f"source {row.source}",
        f"cause {event.cause}" if event and event.cause not in ("", event.parent) else "",
        f"{plural(row.starts, 'start')}, {plural(row.attempts, 'failure')}"
        if row.attempts or row.starts > 1
        else "",
        f"again in {lasting(max(0.0, row.not_before - now))}"
        if row.status == "delayed" and row.not_before
        else "",
        f"route {', '.join(f'{k} {v}' for k, v in route.items())}" if route else "",
        "forced" if event and event.force else "",
    )
    lines.append(Text(plain(" · ".join(fact for fact in facts if fact)), "dim"))
    if row.duplicate_of:
        other = (
            f" (trace {short(f.original_trace)})"
            if f.original_trace and f.original_trace != row.trace
            else ""
        )
        lines.append(
            Text.assemble(
                "duplicate of ",
                (short(row.duplicate_of), "magenta"),
                other,
                (f"  penstock trace {short(row.duplicate_of)}", "cyan"),
            )
        )
    for id_, trace_id in f.duplicates:
        lines.append(
            Text.assemble(
                "its duplicate: ",
                (short(id_), "magenta"),
                f" (trace {short(trace_id)})" if trace_id != row.trace else "",
            )
        )
    if row.page:
        meta = row.meta
        about = f"{meta.status}, {size(meta.size)}, " if meta else ""
        lines.append(
            Text.assemble(
                f"page: {about}",
                (short(row.page), "bold"),
                (f"  penstock pages show {short(row.page)}", "cyan"),
            )
        )
    if f.records:
        listed = ", ".join(f"{extractor}:{key}" for extractor, key in f.records[:5]) + (
            ", …" if len(f.records) > 5 else ""
        )
        lines.append(Text(plain(f"{plural(len(f.records), 'record')}: {listed}")))
    labels = labels_of(row.extractors or "")
    if labels and not f.records and row.status == "success":
        lines.append(Text(plain(f"extractors {labels}"), "dim"))
    if f.letter:
        lines.append(
            Text.assemble(
                ("dead letter", "bold red"),
                f" at {plain(f.letter.stage)}",
                (f"  penstock dlq show {short(row.id)}", "cyan"),
            )
        )
    return lines
