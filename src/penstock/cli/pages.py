"""`penstock pages …`: shows, lists and prunes stored responses."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from penstock.cli import find
from penstock.cli.options import (
    DEFAULTS,
    WITH_OUTPUT,
    Common,
    CommonWithOutput,
    Json,
    ask,
    read_value,
)
from penstock.cli.output import (
    FIXED,
    FOLD,
    RIGHT,
    console,
    plain,
    print_bytes,
    print_json,
    report,
    say,
    styled,
    table,
)
from penstock.cli.output import (
    show as show_table,
)
from penstock.config import units
from penstock.errors import PenstockError
from penstock.operate.figures import iso, moment, plural, short, size
from penstock.rules.masking import mask_headers_to_show

if TYPE_CHECKING:
    from penstock.ports import Transaction
    from penstock.ports.reports import EventRow
    from penstock.runtime.stores import Stores

app = App(name="pages", help="stored pages: show, list, prune")


@app.command
def show(
    what: Annotated[
        str,
        Parameter(help="a page id or event id (or a unique prefix), a URL, or `last`"),
    ],
    /,
    *,
    output: Annotated[
        str | None, Parameter(name=["--output", "-o"], help="a file (else stdout)")
    ] = None,
    headers: Annotated[bool, Parameter(help="show its metadata instead of its bytes")] = False,
    raw: Annotated[
        bool, Parameter(help="write its control characters to a terminal too (a pipe gets all)")
    ] = False,
    json: Json = False,
    common: CommonWithOutput = WITH_OUTPUT,
) -> None:
    """Write the bytes of a stored page, unchanged.

    On a terminal, control characters are escaped, because a site could control the terminal.
    """
    with common.stores() as stores:
        page, row = ask(stores, lambda tx: _find(stores, tx, what))
        body = ask(stores, lambda tx: tx.pages.read(page))
        if row is None and (json or headers):
            row = ask(stores, lambda tx: tx.page_reports.event_of_page(page))
    if body is None:
        raise find.NotFound(
            f"page {short(page)} is no longer stored: retention removed it",
            hint="push the URL again with --force, or keep pages longer with `pages.keep`",
        )
    if json or headers:
        meta = row.meta if row else None
        about = {
            "page": page,
            "size": len(body),
            "url": meta.url if meta else None,
            "requested_url": row.url if row else None,
            "status": meta.status if meta else None,
            # An older release stored the headers unmasked.
            "headers": mask_headers_to_show(meta.headers) if meta else {},
            "fetched_at": iso(meta.fetched_at) if meta else None,
            "event_id": row.id if row else None,
        }
        if json:
            print_json(about)
        else:
            for name, value in about.items():
                lines = value if isinstance(value, dict) else {}
                say(styled(f"{name:<14}", "dim"), "" if lines or value is None else str(value))
                for key, text in lines.items():
                    say(f"  {key}: {text}")
    if output is not None:
        Path(output).write_bytes(body)
        console(stderr=True).print(f"{size(len(body))} in {plain(output)}")
    elif not (json or headers):
        print_bytes(body, raw=raw)


@app.command
def ls(
    *,
    host: Annotated[str | None, Parameter(help="only of this host")] = None,
    limit: Annotated[int, Parameter(name=["--limit", "-n"], help="at most this many (50)")] = 50,
    json: Json = False,
    common: Common = DEFAULTS,
) -> None:
    """List the newest pages, and the total that is stored."""
    with common.stores() as stores:
        rows, (pages, on_disk) = ask(
            stores,
            lambda tx: (
                list(tx.page_reports.paged_events(max(1, limit), tx.pages.sizes, host)),
                tx.pages.totals(),
            ),
        )
    if json:
        listed = [
            {
                "page": row.page,
                "url": row.url,
                "status": m.status if (m := row.meta) else None,
                "size": m.size if m else stored,
                "fetched_at": iso(m.fetched_at) if m else None,
                "event_id": row.id,
                "stored": stored is not None,
            }
            for row, stored in rows
        ]
        print_json({"pages": listed, "total": {"pages": pages, "bytes_on_disk": on_disk}})
        return
    now = time.time()
    columns = (
        *(("page", FIXED), ("size", RIGHT), ("http", RIGHT), ("fetched", FIXED), ("url", FOLD)),
        "",
    )
    cells = [
        (
            short(row.page or ""),
            size(m.size if (m := row.meta) else stored or 0),
            str(m.status) if m else "",
            moment(m.fetched_at if m else None, now),
            plain(row.url),
            "" if stored is not None else "removed",
        )
        for row, stored in rows
    ]
    if rows:
        show_table(table(*columns, rows=cells))
    say(styled(f"{plural(pages, 'page')} stored, {size(on_disk)} on disk", "dim"))


@app.command
def prune(
    *,
    keep: Annotated[
        str | None,
        Parameter(help="remove pages last seen longer ago than this, e.g. 30d (else pages.keep)"),
    ] = None,
    max_bytes: Annotated[
        str | None,
        Parameter(help="remove the oldest above this total, e.g. 10GiB (else pages.max_bytes)"),
    ] = None,
    json: Json = False,
    common: Common = DEFAULTS,
) -> None:
    """Remove old pages now, except pages that an open or dead event still needs.

    A running worker does this every minute.
    """
    config = common.load().config
    age = config.pages.keep if keep is None else read_value("--keep", keep, units.KEEP)
    limit = (
        config.pages.max_bytes
        if max_bytes is None
        else read_value("--max-bytes", max_bytes, units.sizes(0))
    )
    from penstock.runtime.periodic import retain

    with common.stores(create=True, config=config) as stores:
        pages, freed = asyncio.run(
            retain(stores, pages_keep=age, pages_bytes=limit, history_keep=None)
        )
        stores.uow.write_now(lambda tx: tx.pages.sweep())
    sentence = f"removed {plural(pages, 'page')}, freed {size(freed)}"
    report({"removed": pages, "freed_bytes": freed}, sentence, json=json)


def _find(stores: Stores, tx: Transaction, what: str) -> tuple[str, EventRow | None]:
    """Return the page id, and the event that fetched it. The event is None for a page id."""
    if what == "last" or find.is_url(what):
        row = find.event_for(stores, tx, what)
        page = tx.page_reports.page_of_url(find.key_of(stores, row.url), tx.pages.sizes) or row.page
        if page is None:
            raise PenstockError(
                f"no page of {row.url} is stored: its newest event is {row.status}",
                hint=f"penstock trace {short(row.id)}",
            )
        return page, next(
            (r for r in tx.reports.of_url(find.key_of(stores, row.url), 100) if r.page == page),
            row,
        )
    pages = tx.pages.find(what) if set(what) <= set("0123456789abcdef") else []
    events = tx.reports.ids_like(what, find.MAX_LISTED)
    if what in pages or not events:
        page = find.one(
            pages, what, "page", "a URL, an event id, or a page id from `penstock pages ls`"
        )
        return page, None
    if pages:
        find.ambiguous(what, "page or event", [*pages, *events])
    row = find.event_for(stores, tx, find.one(events, what, "event", ""))
    if row.page is None:
        raise PenstockError(
            f"event {short(row.id)} has no page: it is {row.status}",
            hint=f"penstock trace {short(row.id)}",
        )
    return row.page, row
