"""`penstock extractors …`: lists paused extractors, and pauses or resumes them.

See `engine.breakers` for the breaker that pauses them.
"""

from __future__ import annotations

from typing import Annotated

from cyclopts import App, Parameter

from penstock.cli.find import NotFound
from penstock.cli.options import DEFAULTS, Common, Json, ask
from penstock.cli.output import FOLD, RIGHT, plain, print_json, report_pause, say, show, table
from penstock.operate.figures import count, iso, moment, plural
from penstock.operate.waiting import pause_extractor, resume_extractor, waits_in
from penstock.rules.waiting import EXTRACTOR

app = App(name="extractors", help="extractors that are paused: list, pause, resume")
Name = Annotated[str, Parameter(help="name of the extractor in the pipeline")]


@app.command
def ls(*, json: Json = False, common: Common = DEFAULTS) -> None:
    """List the extractors that the breaker or an operator paused, and their waiting events."""
    with common.stores() as stores:
        waits = ask(stores, waits_in)
    found = [w for w in waits if w.cause.startswith(EXTRACTOR)]
    if json:
        print_json(
            {
                "extractors": [
                    {
                        "name": w.cause.removeprefix(EXTRACTOR),
                        "events": w.events,
                        "reason": w.reason,
                        "since": iso(w.since),
                    }
                    for w in found
                ]
            }
        )
        return
    if not found:
        say("no extractor is paused")
        return
    rows = [
        (
            plain(w.cause.removeprefix(EXTRACTOR)),
            count(w.events),
            moment(w.since) if w.since is not None else "",
            plain(w.reason),
        )
        for w in found
    ]
    show(table("paused extractor", ("waiting", RIGHT), "since", ("why", FOLD), rows=rows))


@app.command
def pause(
    name: Name,
    /,
    *,
    reason: Annotated[str, Parameter(help="shown by status")] = "paused by hand",
    common: Common = DEFAULTS,
) -> None:
    """Stop the extraction of pages that match this extractor. They are fetched, stored and wait."""
    with common.stores(create=True) as stores:
        pause_extractor(stores.uow, name, " ".join(reason.split()), stores.clock)
    report_pause("extractors", name, paused=True)


@app.command
def resume(name: Name, /, *, common: Common = DEFAULTS) -> None:
    """Resume a paused extractor. Its stored pages are extracted, and no page is fetched again."""
    with common.stores(create=True) as stores:
        freed = resume_extractor(stores.uow, name, stores.clock)
    if freed is None:
        raise NotFound(f"extractor {name!r} is not paused", hint="penstock extractors ls")
    report_pause("extractors", name, paused=False)
    if freed:
        say(f"{plural(freed, 'delayed event')} released")
