"""`penstock dlq …`: lists, shows, redrives, drops and exports dead letters."""

from __future__ import annotations

import asyncio
import base64
import sys
import time
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from cyclopts import App, Parameter

from penstock.cli.dlq_selection import (
    NO_FILTERS,
    Filters,
    checked_filter,
    choose,
    letter_for,
    process,
)
from penstock.cli.options import (
    DEFAULTS,
    WITH_OUTPUT,
    Common,
    CommonWithOutput,
    Json,
    Yes,
    ask,
    confirmed,
    read_value,
)
from penstock.cli.output import (
    FIXED,
    FOLD,
    RIGHT,
    console,
    json_bytes,
    plain,
    print_json,
    report,
    say,
    styled,
    table,
)
from penstock.cli.output import (
    show as show_table,
)
from penstock.cli.trace import step_document
from penstock.config import units
from penstock.errors import BadEnvelope, UsageError
from penstock.model import Event, Priority, decode_event
from penstock.operate.figures import count, iso, lasting, moment, plural, short
from penstock.ports.reports import Cause, EventRow, Filter, Letter, Step
from penstock.rules.masking import mask_headers_to_show

if TYPE_CHECKING:
    from rich.text import Text

    from penstock.ports import Transaction

app = App(name="dlq", help="dead letters: list, show, retry, drop, export")

_GROUP_COLUMNS = (
    ("count", RIGHT),
    ("cause", FIXED),
    "stage",
    "class",
    ("last", RIGHT),
    ("newest", FIXED),
    ("url", FOLD),
    ("reason", FOLD),
)
_LETTER_COLUMNS = (
    ("event", FIXED),
    ("dead since", FIXED),
    ("cause", FIXED),
    "stage",
    "class",
    ("url", FOLD),
    ("reason", FOLD),
)


@app.command
def ls(
    *,
    all: Annotated[
        bool, Parameter(name="--all", help="list single dead letters, newest first, not causes")
    ] = False,
    filters: Filters = NO_FILTERS,
    limit: Annotated[int, Parameter(name=["--limit", "-n"], help="at most this many (50)")] = 50,
    json: Json = False,
    common: Common = DEFAULTS,
) -> None:
    """List causes of dead letters, the largest first, each with its newest dead letter."""
    which = filters.filter()
    now = time.time()
    if all:
        found, total = common.read(
            lambda stores, tx: (
                tx.letter_reports.letters(which, limit=max(1, limit), newest_first=True),
                tx.letter_reports.letter_count(which),
            )
        )
        document = {"total": total, "letters": [_summary(letter) for letter in found]}
        made = table(*_LETTER_COLUMNS, rows=[_letter_cells(letter, now) for letter in found])
    else:
        causes, total = common.read(
            lambda stores, tx: tx.letter_reports.letter_groups(which, max(1, limit))
        )
        document = {"total": total, "groups": [_group(cause) for cause in causes]}
        made = table(*_GROUP_COLUMNS, rows=[_group_cells(cause, now) for cause in causes])
    if json:
        print_json(document)
        return
    if not total:
        say("no dead letters" + (" match the filters" if which != Filter() else ""))
        return
    show_table(made)
    say(
        styled(
            f"{plural(total, 'dead letter')}: `penstock dlq show ID` shows one in full, "
            "`dlq retry ID | --fingerprint CAUSE | --all` redrives them",
            "dim",
        )
    )


@app.command
def show(
    id: Annotated[str, Parameter(help="event id or a unique prefix of it, or a URL")],
    /,
    *,
    json: Json = False,
    common: Common = DEFAULTS,
) -> None:
    """Show one dead letter in full: reason, traceback, attempts, headers and the queued event."""

    with common.stores() as stores:

        def question(tx: Transaction) -> tuple[Letter, EventRow | None, list[Step]]:
            letter = letter_for(stores, tx, id)
            row = tx.reports.event(letter.event)
            return letter, row, tx.reports.history(row.n) if row else []

        letter, row, steps = ask(stores, question)
    if json:
        print_json(_document(letter, row, steps))
        return
    event = _event(letter)
    facts = (
        ("reason", styled(letter.reason, "bold red")),
        ("class", f"{letter.error_class}, at {letter.stage}"),
        ("url", plain(letter.url)),
        ("event", letter.event),
        ("trace", event.trace if event else ""),
        ("source", event.source if event else ""),
        ("cause", event.cause if event else ""),
        ("dead since", moment(letter.at)),
        ("fingerprint", letter.fingerprint),
        ("http", str(row.response_status) if row and row.response_status else ""),
        ("page", f"penstock pages show {short(row.page)}" if row and row.page else ""),
        ("headers", "\n".join(f"{k}: {v}" for k, v in _headers(letter).items())),
    )
    rows = [
        (name, plain(value) if isinstance(value, str) else value) for name, value in facts if value
    ]
    columns = (("", {"style": "dim", "no_wrap": True}), ("", FOLD))
    show_table(table(*columns, rows=rows, header=False))
    say(styled("\nattempts", "dim"))
    for s in steps:
        line = " · ".join(p for p in (s.stage, s.error_class, s.reason) if p)
        say(f"  {moment(s.at)}  {s.status:<9}  {line}" + (f"  by {s.worker}" if s.worker else ""))
    if letter.detail:
        say(styled("\ndetail", "dim"))
        say("\n".join("  " + line for line in letter.detail.rstrip().splitlines()))
    say(styled("\nenvelope", "dim"))
    say(
        "  "
        + (_pretty(event) if event else letter.envelope.decode("utf-8", "replace")).replace(
            "\n", "\n  "
        )
    )
    redrive = (
        f"`penstock dlq retry {short(letter.event)}` redrives it, "
        "optionally with --geo, --pool, --account, --priority or --force"
    )
    reread = (
        "it contains no event: correct the source's mapping, "
        "then read it again with `penstock sources reset NAME --to …`"
    )
    say(styled("\n" + (reread if letter.stage == "source" else redrive), "dim"))


@app.command
def retry(
    *ids: Annotated[str, Parameter(help="event ids or unique prefixes")],
    all: Annotated[bool, Parameter(name="--all", help="every dead letter")] = False,
    filters: Filters = NO_FILTERS,
    rate: Annotated[
        str, Parameter(help="how fast, e.g. 5/s or 100/m (else without a limit)")
    ] = "unlimited",
    geo: Annotated[str | None, Parameter(help="another geo")] = None,
    pool: Annotated[str | None, Parameter(help="another proxy pool")] = None,
    account: Annotated[str | None, Parameter(help="another account")] = None,
    priority: Annotated[str | None, Parameter(help="high, normal or low")] = None,
    force: Annotated[bool, Parameter(help="bypass deduplication and the freshness window")] = False,
    dry_run: Annotated[bool, Parameter(help="only show how many would be retried")] = False,
    json: Json = False,
    common: Common = DEFAULTS,
) -> None:
    """Redrive dead letters with a new budget.

    Each event is queued and its dead letter removed in one transaction.
    """
    which = checked_filter(ids, all, filters, "retry")
    pace = read_value("--rate", rate, units.RATE)
    try:
        rank = None if priority is None else Priority.named(priority)
    except KeyError:
        raise UsageError(
            f"--priority {priority!r} is unknown", hint="high, normal or low"
        ) from None

    def change(event: Event) -> Event:
        given = {
            k: v for k, v in (("geo", geo), ("pool", pool), ("account", account)) if v is not None
        }
        event = msgspec.structs.replace(
            event, route=msgspec.structs.replace(event.route, **given), force=event.force or force
        )
        return event if rank is None else msgspec.structs.replace(event, priority=rank)

    with common.stores(create=not dry_run) as stores:
        chosen, total = choose(stores, ids, which)
        if dry_run:
            sentence = f"would retry {plural(total, 'dead letter')}"
            report({"would_retry": total, "retried": 0, "skipped": 0}, sentence, json=json)
            return
        done = stores.perform(
            lambda: process(
                chosen,
                total,
                lambda batch: stores.dead_letters.redrive(batch, change),
                "retrying",
                rate=pace,
            )
        )
    skipped = max(0, total - done)
    more = f", {plural(skipped, 'dead letter')} skipped (no readable event)" if skipped else ""
    report(
        {"would_retry": total, "retried": done, "skipped": skipped},
        f"retried {plural(done, 'dead letter')}{more}",
        json=json,
    )


@app.command
def drop(
    *ids: Annotated[str, Parameter(help="event ids or unique prefixes")],
    all: Annotated[bool, Parameter(name="--all", help="every dead letter")] = False,
    filters: Filters = NO_FILTERS,
    yes: Yes = False,
    json: Json = False,
    common: Common = DEFAULTS,
) -> None:
    """Delete dead letters permanently, after a confirmation.

    Their events stay dead in the ledger.
    """
    which = checked_filter(ids, all, filters, "drop")
    with common.stores(create=True) as stores:
        chosen, total = choose(stores, ids, which)
        if total and not confirmed(
            f"delete {plural(total, 'dead letter')} permanently",
            yes=yes,
            hint=" (`penstock dlq export` keeps a copy)",
        ):
            say("nothing dropped")
            return
        done = asyncio.run(process(chosen, total, stores.dead_letters.drop, "dropping"))
    report({"dropped": done}, f"dropped {plural(done, 'dead letter')}", json=json)


@app.command
def export(
    *ids: Annotated[str, Parameter(help="event ids or unique prefixes (else all)")],
    filters: Filters = NO_FILTERS,
    output: Annotated[
        str | None, Parameter(name=["--output", "-o"], help="a file (else stdout)")
    ] = None,
    common: CommonWithOutput = WITH_OUTPUT,
) -> None:
    """Export dead letters as JSON lines, with the queued bytes in base64."""
    which = filters.filter()
    written = 0
    with common.stores() as stores:
        chosen, _ = choose(stores, ids, which)
        with nullcontext(sys.stdout.buffer) if output is None else open(output, "wb") as out:
            for batch in chosen:
                for line in filter(None, (ask(stores, partial(_full, id_)) for id_ in batch)):
                    out.write(json_bytes(line, line=True))
                    written += 1
    if output is not None:
        console(stderr=True).print(f"{plural(written, 'dead letter')} in {plain(output)}")


# -- output ----------------------------------------------------------------------------------------


def _event(letter: Letter) -> Event | None:
    try:
        return decode_event(letter.envelope)
    except BadEnvelope:
        return None


def _headers(letter: Letter) -> dict[str, str]:
    try:
        return mask_headers_to_show(
            msgspec.json.decode(letter.headers or "{}", type=dict[str, str])
        )
    except msgspec.MsgspecError:
        return {}


def _letter_cells(x: Letter, now: float) -> list[str]:
    return [
        short(x.event),
        moment(x.at, now),
        short(x.fingerprint),
        *map(plain, (x.stage, x.error_class, x.url, x.reason)),
    ]


def _group(c: Cause) -> dict[str, Any]:
    return {
        "fingerprint": c.fingerprint,
        "count": c.letters,
        "stage": c.stage,
        "class": c.error_class,
        "reason": c.reason,
        "first_at": iso(c.first),
        "newest_at": iso(c.newest),
        "newest": {"event_id": c.event_id, "url": c.url},
    }


def _group_cells(c: Cause, now: float) -> list[str | Text]:
    return [
        styled(count(c.letters), "bold red"),
        c.fingerprint,
        plain(c.stage),
        plain(c.error_class),
        lasting(max(0.0, now - c.newest)) + " ago",
        short(c.event_id),
        plain(c.url),
        plain(c.reason),
    ]


def _shown(event: Event) -> dict[str, Any]:
    ask_ = msgspec.structs.replace(event.ask, headers=mask_headers_to_show(event.ask.headers))
    found: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(event, ask=ask_))
    return found


def _pretty(event: Event) -> str:
    return msgspec.json.format(msgspec.json.encode(_shown(event)), indent=2).decode()


def _summary(x: Letter) -> dict[str, Any]:
    return {
        "event_id": x.event,
        "topic": x.topic,
        "url": x.url,
        "host": x.host,
        "at": iso(x.at),
        "stage": x.stage,
        "class": x.error_class,
        "reason": x.reason,
        "fingerprint": x.fingerprint,
    }


def _document(x: Letter, row: EventRow | None, steps: list[Step]) -> dict[str, Any]:
    event = _event(x)
    return {
        **_summary(x),
        "trace_id": event.trace if event else None,
        "retry_count": row.attempts if row else 0,
        "starts": row.starts if row else 0,
        "response_status": row.response_status if row else None,
        "page": row.page if row else None,
        "detail": x.detail,
        "headers": _headers(x),
        "event": _shown(event) if event else None,
        "envelope_base64": base64.b64encode(x.envelope).decode(),
        "attempts": [step_document(s) for s in steps],
    }


def _full(id_: str, tx: Transaction) -> dict[str, Any] | None:
    letter = tx.letter_reports.letter(id_)
    if letter is None:
        return None
    row = tx.reports.event(id_)
    return _document(letter, row, tx.reports.history(row.n) if row else [])
