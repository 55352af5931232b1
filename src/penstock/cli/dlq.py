"""`penstock dlq …`: lists, shows, redrives, drops and exports dead letters."""

from __future__ import annotations

import asyncio
import base64
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from cyclopts import App, Parameter

from penstock.cli import find
from penstock.cli.options import (
    DEFAULTS,
    WITH_OUTPUT,
    Common,
    CommonWithOutput,
    Json,
    ask,
    confirmed,
)
from penstock.cli.output import (
    FIXED,
    FOLD,
    RIGHT,
    console,
    plain,
    print_json,
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
from penstock.ports.reports import EventRow, Filter, Letter, Step

if TYPE_CHECKING:
    from penstock.ports import Transaction
    from penstock.runtime.stores import Stores

app = App(name="dlq", help="dead letters: list, show, retry, drop, export")
BATCH = 500
SECRET = ("authorization", "cookie", "token", "secret", "password", "api-key", "apikey")

Reason = Annotated[str | None, Parameter(help="only where the reason contains this text")]
Host = Annotated[str | None, Parameter(help="only of this host")]
Class = Annotated[
    str | None,
    Parameter(
        name="--class",
        help="only of this class: throttled, transient, blocked, permanent, poison, ours",
    ),
]
Stage = Annotated[str | None, Parameter(help="only from this stage: intake, fetch, extract, sink")]
Fingerprint = Annotated[
    str | None, Parameter(help="only of this cause in `dlq ls` (or a prefix of it)")
]
Yes = Annotated[bool, Parameter(name=["--yes", "-y"], help="do not ask for confirmation")]


@app.command
def ls(
    *,
    all: Annotated[
        bool, Parameter(name="--all", help="list single dead letters, newest first, not causes")
    ] = False,
    reason: Reason = None,
    host: Host = None,
    class_: Class = None,
    stage: Stage = None,
    fingerprint: Fingerprint = None,
    limit: Annotated[int, Parameter(name=["--limit", "-n"], help="at most this many (50)")] = 50,
    json: Json = False,
    common: Common = DEFAULTS,
) -> int:
    """List causes of dead letters, the largest first, each with its newest dead letter."""
    which = Filter(
        reason=reason, host=host, error_class=class_, stage=stage, fingerprint=fingerprint
    )
    now = time.time()
    if all:
        found, total = common.read(
            lambda stores, tx: (
                tx.letter_reports.letters(which, limit=max(1, limit), newest_first=True),
                tx.letter_reports.letter_count(which),
            )
        )
        if json:
            print_json({"total": total, "letters": [_summary(letter) for letter in found]})
            return 0
        made = table(
            ("event", FIXED),
            ("dead since", FIXED),
            ("cause", FIXED),
            "stage",
            "class",
            ("url", FOLD),
            ("reason", FOLD),
        )
        for x in found:
            made.add_row(
                short(x.event),
                moment(x.at, now),
                short(x.fingerprint),
                plain(x.stage),
                plain(x.error_class),
                plain(x.url),
                plain(x.reason),
            )
    else:
        causes, total = common.read(
            lambda stores, tx: tx.letter_reports.letter_groups(which, max(1, limit))
        )
        if json:
            groups = [
                {
                    "fingerprint": c.fingerprint,
                    "count": c.letters,
                    "stage": c.stage,
                    "class": c.error_class,
                    "reason": c.reason,
                    "first_at": iso(c.first),
                    "newest_at": iso(c.newest),
                    "newest": {"event_id": c.event_id, "url": c.url},
                }
                for c in causes
            ]
            print_json({"total": total, "groups": groups})
            return 0
        made = table(
            ("count", RIGHT),
            ("cause", FIXED),
            "stage",
            "class",
            ("last", RIGHT),
            ("newest", FIXED),
            ("url", FOLD),
            ("reason", FOLD),
        )
        for c in causes:
            ago = lasting(max(0.0, now - c.newest)) + " ago"
            made.add_row(
                styled(count(c.letters), "bold red"),
                c.fingerprint,
                plain(c.stage),
                plain(c.error_class),
                ago,
                short(c.event_id),
                plain(c.url),
                plain(c.reason),
            )
    if not total:
        say("no dead letters" + (" match the filters" if which != Filter() else ""))
        return 0
    show_table(made)
    say(
        styled(
            f"{plural(total, 'dead letter')}: `penstock dlq show ID` shows one in full, "
            "`dlq retry ID | --fingerprint CAUSE | --all` redrives them",
            "dim",
        )
    )
    return 0


@app.command
def show(
    id: Annotated[str, Parameter(help="event id or a unique prefix of it, or a URL")],
    /,
    *,
    json: Json = False,
    common: Common = DEFAULTS,
) -> int:
    """Show one dead letter in full: reason, traceback, attempts, headers and the queued event."""

    with common.stores() as stores:

        def question(tx: Transaction) -> tuple[Letter, EventRow | None, list[Step]]:
            letter = _letter(stores, tx, id)
            row = tx.reports.event(letter.event)
            return letter, row, tx.reports.history(row.n) if row else []

        letter, row, steps = ask(stores, question)
    if json:
        print_json(_document(letter, row, steps))
        return 0
    event = _event(letter)
    facts = table(("", {"style": "dim", "no_wrap": True}), ("", FOLD))
    facts.show_header = False
    for name, value in (
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
    ):
        if value:
            facts.add_row(name, plain(value) if isinstance(value, str) else value)
    show_table(facts)
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
    return 0


@app.command
def retry(
    *ids: Annotated[str, Parameter(help="event ids or unique prefixes")],
    all: Annotated[bool, Parameter(name="--all", help="every dead letter")] = False,
    reason: Reason = None,
    host: Host = None,
    class_: Class = None,
    stage: Stage = None,
    fingerprint: Fingerprint = None,
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
) -> int:
    """Redrive dead letters with a new budget.

    Each event is queued and its dead letter removed in one transaction.
    """
    which = _which(
        ids,
        all,
        Filter(reason=reason, host=host, error_class=class_, stage=stage, fingerprint=fingerprint),
        "retry",
    )
    try:
        pace = units.rate(rate)
        rank = None if priority is None else Priority.named(priority)
    except ValueError:
        raise UsageError(f"--rate {rate!r} is not a rate", hint="5/s, 100/m or unlimited") from None
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
        chosen, total = _choose(stores, ids, which)
        if dry_run:
            _print_result(
                json,
                {"would_retry": total, "retried": 0, "skipped": 0},
                f"would retry {plural(total, 'dead letter')}",
            )
            return 0
        done = stores.perform(
            lambda: _process(
                chosen,
                total,
                pace,
                lambda batch: stores.dead_letters.redrive(batch, change),
                "retrying",
            )
        )
    skipped = total - done
    more = f", {plural(skipped, 'dead letter')} skipped (no readable event)" if skipped > 0 else ""
    _print_result(
        json,
        {"would_retry": total, "retried": done, "skipped": max(0, skipped)},
        f"retried {plural(done, 'dead letter')}{more}",
    )
    return 0


@app.command
def drop(
    *ids: Annotated[str, Parameter(help="event ids or unique prefixes")],
    all: Annotated[bool, Parameter(name="--all", help="every dead letter")] = False,
    reason: Reason = None,
    host: Host = None,
    class_: Class = None,
    stage: Stage = None,
    fingerprint: Fingerprint = None,
    yes: Yes = False,
    json: Json = False,
    common: Common = DEFAULTS,
) -> int:
    """Delete dead letters permanently, after a confirmation.

    Their events stay dead in the ledger.
    """
    which = _which(
        ids,
        all,
        Filter(reason=reason, host=host, error_class=class_, stage=stage, fingerprint=fingerprint),
        "drop",
    )
    with common.stores(create=True) as stores:
        chosen, total = _choose(stores, ids, which)
        if total and not confirmed(
            f"delete {plural(total, 'dead letter')} permanently",
            yes=yes,
            hint=" (`penstock dlq export` keeps a copy)",
        ):
            say("nothing dropped")
            return 0
        done = asyncio.run(_process(chosen, total, math.inf, stores.dead_letters.drop, "dropping"))
    _print_result(json, {"dropped": done}, f"dropped {plural(done, 'dead letter')}")
    return 0


@app.command
def export(
    *ids: Annotated[str, Parameter(help="event ids or unique prefixes (else all)")],
    reason: Reason = None,
    host: Host = None,
    class_: Class = None,
    stage: Stage = None,
    fingerprint: Fingerprint = None,
    output: Annotated[
        str | None, Parameter(name=["--output", "-o"], help="a file (else stdout)")
    ] = None,
    common: CommonWithOutput = WITH_OUTPUT,
) -> int:
    """Export dead letters as JSON lines, with the queued bytes in base64."""
    which = Filter(
        reason=reason, host=host, error_class=class_, stage=stage, fingerprint=fingerprint
    )
    written = 0
    with common.stores() as stores:
        chosen, _ = _choose(stores, ids, which)
        with nullcontext(sys.stdout.buffer) if output is None else open(output, "wb") as out:
            for batch in chosen:
                for id_ in batch:
                    line = ask(stores, lambda tx, id_=id_: _full(stores, tx, id_))  # type: ignore[misc]
                    if line is not None:
                        out.write(msgspec.json.encode(line) + b"\n")
                        written += 1
    if output is not None:
        console(stderr=True).print(f"{plural(written, 'dead letter')} in {plain(output)}")
    return 0


# -- selection -------------------------------------------------------------------------------------


def _which(ids: tuple[str, ...], all: bool, which: Filter, verb: str) -> Filter:
    ways = bool(ids) + all + (which != Filter())
    if ways == 0:
        raise UsageError(
            f"no dead letters selected to {verb}",
            hint=f"penstock dlq {verb} ID, or --fingerprint, --reason, --host, --class, --stage, "
            "or --all",
        )
    if ids and ways > 1:
        raise UsageError("ids and filters cannot be combined", hint="use ids or filters")
    return which


def _letter(stores: Stores, tx: Transaction, text: str) -> Letter:
    if find.is_url(text):
        for row in tx.reports.of_url(find.key_of(stores, text), 100):
            if row.status == "dead" and (found := tx.letter_reports.letter(row.id)):
                return found
        raise find.NotFound(
            f"no dead letter for {text}",
            hint="`penstock trace URL`, or `penstock dlq ls` for all dead letters",
        )
    found = tx.letter_reports.letter(
        find.one(
            tx.letter_reports.letters_like(text, find.MAX_LISTED),
            text,
            "dead letter",
            "penstock dlq ls lists them",
        ),
    )
    assert found is not None
    return found


def _letters_after(which: Filter, after: int, last: int, tx: Transaction) -> list[Letter]:
    return tx.letter_reports.letters(which, after=after, upto=last, limit=BATCH)


def _choose(stores: Stores, ids: tuple[str, ...], which: Filter) -> tuple[Iterator[list[str]], int]:
    """Return batches of event ids, and their number.

    Dead letters that are inserted later are not included.
    """
    if ids:
        named = list(
            dict.fromkeys(ask(stores, lambda tx: [_letter(stores, tx, text).event for text in ids]))
        )
        return iter([named]), len(named)
    last, total = ask(
        stores, lambda tx: (tx.letter_reports.last_letter(), tx.letter_reports.letter_count(which))
    )

    def batches() -> Iterator[list[str]]:
        after = 0
        while True:
            found = ask(stores, partial(_letters_after, which, after, last))
            if not found:
                return
            after = found[-1].n
            yield [letter.event for letter in found]

    return batches(), total


async def _process(
    chosen: Iterator[list[str]],
    total: int,
    rate: float,
    work: Callable[[list[str]], Any],
    verb: str,
) -> int:
    """Process at most `rate` events a second, in small steps. Show progress on a terminal."""
    done, started, sent = 0, time.monotonic(), 0
    with _progress(total, verb) as advance:
        for batch in chosen:
            step = len(batch) if math.isinf(rate) else max(1, int(rate / 4))
            for i in range(0, len(batch), step):
                part = batch[i : i + step]
                if not math.isinf(rate):
                    await asyncio.sleep(max(0.0, started + sent / rate - time.monotonic()))
                done += await work(part)
                sent += len(part)
                advance(len(part))
    return done


def _progress(total: int, verb: str) -> AbstractContextManager[Callable[[int], None]]:
    from penstock.cli.progress import bar

    return bar(verb, total)


def _print_result(json: bool, document: dict[str, Any], sentence: str) -> None:
    if json:
        print_json(document)
    else:
        say(sentence)


# -- output ----------------------------------------------------------------------------------------


def _event(letter: Letter) -> Event | None:
    try:
        return decode_event(letter.envelope)
    except BadEnvelope:
        return None


def _headers(letter: Letter) -> dict[str, str]:
    try:
        return _masked(msgspec.json.decode(letter.headers or "{}", type=dict[str, str]))
    except msgspec.MsgspecError:
        return {}


def _masked(headers: dict[str, str]) -> dict[str, str]:
    return {
        k: "***" if any(part in k.lower() for part in SECRET) else v for k, v in headers.items()
    }


def _shown(event: Event) -> dict[str, Any]:
    ask_ = msgspec.structs.replace(event.ask, headers=_masked(event.ask.headers))
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


def _full(stores: Stores, tx: Transaction, id_: str) -> dict[str, Any] | None:
    letter = tx.letter_reports.letter(id_)
    if letter is None:
        return None
    row = tx.reports.event(id_)
    return _document(letter, row, tx.reports.history(row.n) if row else [])
