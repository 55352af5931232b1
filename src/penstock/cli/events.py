"""`penstock events ls`: accepted events, newest first."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter

from penstock.cli import find
from penstock.cli.options import DEFAULTS, Common, Json, ask
from penstock.cli.output import (
    FIXED,
    FOLD,
    RIGHT,
    plain,
    print_json,
    say,
    show,
    status_text,
    styled,
    table,
)
from penstock.cli.trace import row_document
from penstock.errors import UsageError
from penstock.operate.figures import lasting, moment, short
from penstock.ports.reports import SCAN, EventRow

if TYPE_CHECKING:
    from rich.text import Text

app = App(name="events", help="list events")
STATUSES = ("pending", "in_flight", "delayed", "writing", "success", "duplicate", "dead")

COLUMNS = (
    ("event", FIXED),
    "status",
    ("accepted", FIXED),
    ("took", RIGHT),
    ("http", RIGHT),
    ("tries", RIGHT),
    ("url", FOLD),
    ("reason", FOLD),
)


@app.command
def ls(
    *,
    status: Annotated[str | None, Parameter(help="only " + ", ".join(STATUSES))] = None,
    host: Annotated[str | None, Parameter(help="only of this host")] = None,
    source: Annotated[str | None, Parameter(help="only from this source, e.g. push")] = None,
    result: Annotated[
        Literal["gone", "missing"] | None,
        Parameter(help="only successes without a page: gone (removed), missing (404 so far)"),
    ] = None,
    url: Annotated[str | None, Parameter(help="only for this URL")] = None,
    limit: Annotated[int, Parameter(name=["--limit", "-n"], help="at most this many (50)")] = 50,
    everything: Annotated[
        bool, Parameter(name="--all", help="filter all events, not only the newest 200,000")
    ] = False,
    json: Json = False,
    common: Common = DEFAULTS,
) -> None:
    """List events, newest first. With `--status delayed`: the next due first."""
    if status is not None and status not in STATUSES:
        raise UsageError(f"there is no status {status!r}", hint=", ".join(STATUSES))
    with common.stores() as stores:
        key = None if url is None else find.key_of(stores, url)
        listing = ask(
            stores,
            lambda tx: tx.reports.events(
                status=status,
                host=host,
                source=source,
                result=result,
                url_key=key,
                limit=max(1, limit),
                everything=everything,
            ),
        )
    if json:
        print_json(
            {"events": [row_document(row) for row in listing.events], "complete": listing.complete}
        )
        return
    if listing.events:
        now = time.time()
        show(table(*COLUMNS, rows=[_cells(row, now) for row in listing.events]))
    else:
        say("no such events" if status or host or source or result or url else "no events yet")
    if not listing.complete:
        say(styled(f"searched the newest {SCAN:,} events (--all searches every one)", "dim"))


def _cells(row: EventRow, now: float) -> list[str | Text]:
    took = (
        lasting(row.finished_at - row.accepted_at)
        if row.finished_at
        else f"in {lasting(max(0.0, row.not_before - now))}"
        if row.status == "delayed" and row.not_before
        else ""
    )
    return [
        short(row.id),
        status_text(row.status),
        moment(row.accepted_at, now),
        took,
        str(row.response_status or ""),
        str(row.starts or ""),
        plain(row.url),
        plain(f"of {short(row.duplicate_of)}" if row.duplicate_of else row.reason or ""),
    ]
