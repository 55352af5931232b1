"""`penstock topics …`: what the broker holds, and the switch that a person or a breaker turns."""

from __future__ import annotations

from typing import Annotated, Any

from cyclopts import App, Parameter

from penstock.cli import find
from penstock.cli.options import DEFAULTS, Common, Json, ask
from penstock.cli.output import FOLD, RIGHT, count, plain, print_json, say, show, styled, table

app = App(name="topics", help="list, pause and resume topics")
Name = Annotated[str, Parameter(help="the topic; `requests` stops all fetching")]


@app.command
def ls(*, json: Json = False, common: Common = DEFAULTS) -> int:
    """Topics and their groups, with what the broker holds for each."""
    with common.stores() as stores:
        rows = ask(stores, stores.broker.topics_in)
    if json:
        print_json(
            {
                "topics": [
                    {"topic": t, "group": g, "ready": ready, "leased": leased, "delayed": delayed, "paused": paused}
                    for t, g, ready, leased, delayed, paused in rows
                ]
            }
        )
        return 0
    made = table("topic", "group", ("ready", RIGHT), ("leased", RIGHT), ("delayed", RIGHT), ("paused", FOLD))
    for topic, group, ready, leased, delayed, paused in rows:
        made.add_row(styled(topic, "bold"), plain(group), count(ready), count(leased), count(delayed), styled(paused or "", "bold red"))
    show(made)
    return 0


@app.command
def pause(topic: Name = "requests", /, *, reason: Annotated[str, Parameter(help="shown by status")] = "paused by hand", common: Common = DEFAULTS) -> int:
    """Hand out nothing of a topic; what is in flight is finished, what is pushed waits."""
    _set(common, topic, reason)
    say(f"{topic} is paused; penstock topics resume {topic} goes on")
    return 0


@app.command
def resume(topic: Name = "requests", /, *, common: Common = DEFAULTS) -> int:
    """Go on with a paused topic; an open breaker is closed, and counts from here."""
    _set(common, topic, None)
    say(f"{topic} goes on")
    return 0


def _set(common: Common, topic: str, reason: str | None) -> None:
    with common.stores(create=True) as stores:

        def work(tx: Any) -> bool:
            known: bool = stores.broker.pause_in(tx, topic, reason)
            if reason is None:
                # Or the same deaths would open the breaker again at the next one.
                tx.execute("DELETE FROM tally WHERE topic=?", (topic,))
            return known

        if not stores.db.write_now(work):
            names = sorted({row[0] for row in ask(stores, stores.broker.topics_in)})
            raise find.NotFound(f"there is no topic {topic!r}", hint=", ".join(names))
