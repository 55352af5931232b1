"""`penstock topics …`: shows the messages on the brokers, and pauses, purges or rewinds topics.

See `dlq` for dead letters.
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from cyclopts import App, Parameter

from penstock.cli import find
from penstock.cli.options import DEFAULTS, Common, Json, Yes, ask, confirmed
from penstock.cli.output import (
    FOLD,
    RIGHT,
    plain,
    print_json,
    report,
    report_pause,
    say,
    show,
    styled,
    table,
)
from penstock.config import units
from penstock.errors import DIFFERENCES, OK, BadEnvelope, UsageError
from penstock.operate.figures import count, iso, lasting, moment, plural, short
from penstock.rules.masking import mask_headers_to_show
from penstock.rules.waiting import TOPIC

if TYPE_CHECKING:
    from rich.text import Text

    from penstock.ports import Out, Stats, Transaction
    from penstock.runtime.stores import Stores

app = App(name="topics", help="messages on the brokers: list, pause, resume, purge, rewind")
Name = Annotated[str, Parameter(help="the topic (`requests` stops all fetching)")]
_COLUMNS = ("topic", "group", ("ready", RIGHT))
Topic = Annotated[str, Parameter(help="requests, pages, records, or one of them with .dead")]


@app.command
def ls(*, json: Json = False, common: Common = DEFAULTS) -> None:
    """List topics and their groups, with the number of messages on the broker."""
    with common.stores() as stores:
        paused, rows = ask(stores, lambda tx: tx.queue.paused()), _figures(stores)
    if json:
        print_json(
            {
                "topics": [
                    {
                        "topic": topic,
                        "group": group,
                        "ready": s.ready,
                        "leased": s.in_flight,
                        "delayed": s.delayed,
                        "paused": paused.get(topic),
                        "broker": _broker(common, topic),
                    }
                    for topic, group, s in rows
                ]
            }
        )
        return
    columns = (*_COLUMNS, ("leased", RIGHT), ("delayed", RIGHT), "broker", ("paused", FOLD))
    cells = [
        (
            *_cells(topic, group, s),
            _broker(common, topic),
            styled(paused.get(topic, ""), "bold red"),
        )
        for topic, group, s in rows
    ]
    show(table(*columns, rows=cells))


@app.command
def stats(
    topic: Annotated[str | None, Parameter(help="one topic (else all)")] = None,
    /,
    *,
    json: Json = False,
    common: Common = DEFAULTS,
) -> None:
    """Show the counts of the brokers. `~` marks an estimate.

    On Kafka, --json has the lag of each partition. `penstock status` shows the ledger's counts.
    """
    with common.stores() as stores:
        _known(stores, topic)
        found = (
            stores.perform(lambda: _with_partitions(stores))
            if json
            else [(*row, []) for row in _figures(stores)]
        )
    rows = [row for row in found if topic in (None, row[0])]
    if json:
        print_json(
            {
                "topics": [
                    {"topic": name, "group": group, **msgspec.to_builtins(s), "partitions": parts}
                    for name, group, s, parts in rows
                ]
            }
        )
        return
    figures = ("in flight", "delayed", "dead", "oldest")
    cells = [
        (
            *_cells(name, group, s),
            _count(s.dead, s),
            "" if s.oldest_age is None else lasting(s.oldest_age),
        )
        for name, group, s, _ in rows
    ]
    show(table(*_COLUMNS, *((name, RIGHT) for name in figures), rows=cells))


@app.command
def ensure(*, json: Json = False, common: Common = DEFAULTS) -> int:
    """Create each missing topic on its broker. Existing topics keep their messages.

    Exit code 5 if a topic differs from the configuration.
    """
    from penstock.runtime.stores import TOPOLOGY

    with common.stores(create=True) as stores:
        drift = list(stores.perform(lambda: stores.topics.ensure(TOPOLOGY)))
    if json:
        print_json({"topics": [t.name for t in TOPOLOGY], "drift": drift})
    else:
        for sentence in drift:
            say(styled(plain(sentence), "yellow"))
        say(
            f"{plural(len(TOPOLOGY), 'topic')} declared"
            + (f", {plural(len(drift), 'difference')}" if drift else "")
        )
    return DIFFERENCES if drift else OK


@app.command
def peek(
    topic: Topic = "requests",
    /,
    *,
    limit: Annotated[int, Parameter(name=["--limit", "-n"], help="messages to show")] = 10,
    json: Json = False,
    common: Common = DEFAULTS,
) -> None:
    """Show messages that wait on a topic, oldest first. They are not consumed."""
    with common.stores() as stores:
        _known(stores, topic)
        found = stores.perform(lambda: stores.topics.peek(topic, max(1, limit)))
    if json:
        print_json({"topic": topic, "messages": [_message(m) for m in found]})
        return
    rows = [
        (
            short(m.id),
            plain(m.key),
            count(len(m.body)),
            moment(m.not_before) if m.not_before else "",
            plain(_url(m) or "no event"),
        )
        for m in found
    ]
    show(table("event", "key", ("size", RIGHT), "not before", ("url", FOLD), rows=rows))
    if not found:
        say(f"no message waits on {topic}")


@app.command
def pause(
    topic: Name = "requests",
    /,
    *,
    reason: Annotated[str, Parameter(help="shown by status")] = "paused by hand",
    common: Common = DEFAULTS,
) -> None:
    """Stop deliveries of a topic. Work in flight finishes, new messages wait."""
    _pause(common, topic, reason)


@app.command
def resume(topic: Name = "requests", /, *, common: Common = DEFAULTS) -> None:
    """Resume a paused topic. Hosts and extractors that the breaker paused stay paused."""
    _pause(common, topic, None)


@app.command
def purge(
    topic: Topic,
    /,
    *,
    yes: Yes = False,
    json: Json = False,
    common: Common = DEFAULTS,
) -> None:
    """Remove the waiting messages of a topic, after a confirmation.

    Their events become dead letters. `penstock dlq retry` redrives them.
    """
    from penstock.model import Reason
    from penstock.rules.reasons import sentence

    with common.stores(create=True) as stores:
        _known(stores, topic)
        if not confirmed(f"remove all waiting messages of {topic}", yes=yes):
            say("nothing purged")
            return
        gone = stores.perform(lambda: stores.dead_letters.purge(topic, sentence(Reason.PURGED)))
    text = f"purged {plural(gone, 'message')} of {topic}"
    report({"topic": topic, "purged": gone}, text, json=json)


@app.command
def rewind(
    topic: Topic,
    /,
    *,
    group: Annotated[
        str, Parameter(help="the group that gets the messages again (`main` is the pipeline)")
    ],
    since: Annotated[
        str,
        Parameter(help="how long ago (1h, 2d), a time (2026-11-16T08:00:00+00:00), or `beginning`"),
    ] = "beginning",
    offset: Annotated[
        list[str],
        Parameter(help="Kafka: start at this offset of a partition, PARTITION:OFFSET (repeatable)"),
    ] = [],  # noqa: B006
    json: Json = False,
    common: Common = DEFAULTS,
) -> None:
    """Deliver messages to a group again, if the broker keeps history.

    Events that have ended are not processed again.
    """
    with common.stores(create=True) as stores:
        _known(stores, topic)
        at = _moment(since, stores.clock.now())
        if not stores.topics.caps_of(topic).replay:
            raise UsageError(
                f"{_broker(common, topic)} keeps no history, so it cannot rewind",
                hint="use a Kafka, Redis, Postgres or SQLite broker",
            )
        offsets = _offsets(offset) if offset else None
        if offsets and not _broker(common, topic).startswith("kafka"):
            raise UsageError(
                f"--offset is for Kafka, and {topic} is on {_broker(common, topic)}", hint="--since"
            )
        n = stores.perform(lambda: stores.topics.replay(topic, group, since=at, offsets=offsets))
    report(
        {"topic": topic, "group": group, "since": iso(at), "messages": n},
        f"{plural(n, 'message')} of {topic} will be delivered to {group} again",
        json=json,
    )


# -- helpers ---------------------------------------------------------------------------------------


def _pause(common: Common, topic: str, reason: str | None) -> None:
    with common.stores(create=True) as stores:

        def work(tx: Transaction) -> bool:
            known = tx.queue.pause(topic, reason)
            if reason is None:
                # Otherwise the next dead event would open the breaker again.
                tx.breakers.reset_ends(TOPIC + topic)
                tx.breakers.stop_counting()
            return known

        if not stores.uow.write_now(work):
            raise _no_such(topic)
    report_pause("topics", topic, paused=reason is not None)


def _figures(stores: Stores) -> list[tuple[str, str, Stats]]:
    groups = ask(stores, lambda tx: tx.queue_reports.groups())

    async def read_all() -> list[tuple[str, str, Stats]]:
        return [(topic, group, await stores.topics.stats(topic, group)) for topic, group in groups]

    return stores.perform(read_all)


async def _with_partitions(stores: Stores) -> list[tuple[str, str, Stats, list[dict[str, Any]]]]:
    return [
        (
            topic,
            group,
            await stores.topics.stats(topic, group),
            await stores.topics.partitions(topic, group),
        )
        for topic, group in await stores.uow.read(lambda tx: tx.queue_reports.groups())
    ]


def _known(stores: Stores, topic: str | None) -> None:
    from penstock.runtime.stores import TOPOLOGY

    if topic is not None and topic not in {t.name for t in TOPOLOGY} | {
        name for name, _ in ask(stores, lambda tx: tx.queue_reports.groups())
    }:
        raise _no_such(topic)


def _no_such(topic: str) -> find.NotFound:
    from penstock.runtime.stores import TOPOLOGY

    return find.NotFound(f"there is no topic {topic!r}", hint=", ".join(t.name for t in TOPOLOGY))


def _broker(common: Common, topic: str) -> str:
    """Return the scheme of the topic's broker. The rest of the DSN may contain a password."""
    topics = common.load().config.topics
    return str(getattr(topics, topic.removesuffix(".dead"), topics.requests)).partition(":")[0]


def _cells(topic: str, group: str, s: Stats) -> list[str | Text]:
    """Return the cells of `_COLUMNS`, and those for leased and delayed messages."""
    counts = [_count(n, s) for n in (s.ready, s.in_flight, s.delayed)]
    return [styled(topic, "bold"), plain(group), *counts]


def _count(n: int, s: Stats) -> str:
    return count(n) if s.exact else f"~{count(n)}"


def _moment(text: str, now: float) -> float:
    if text == "beginning":
        return 0.0
    try:
        return now - units.duration(text)
    except ValueError:
        pass
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise UsageError(
            f"--since {text!r} is not a time",
            hint="1h, 2d, 2026-11-16T08:00:00+00:00 or beginning",
        ) from None


def _offsets(given: list[str]) -> dict[int, int]:
    try:
        return {
            int(partition): int(offset)
            for partition, _, offset in (text.partition(":") for text in given)
        }
    except ValueError:
        raise UsageError(
            "--offset needs a partition and an offset", hint="--offset 0:1500 --offset 1:0"
        ) from None


def _url(m: Out) -> str | None:
    from penstock.engine.messages import PageMessage, RecordsMessage
    from penstock.model import decode_event

    try:
        match m.topic.removesuffix(".dead"):
            case "pages":
                return decode_event(PageMessage.read(m.body).event).url
            case "records":
                return decode_event(RecordsMessage.read(m.body).event).url
            case _:
                return decode_event(m.body).url
    except BadEnvelope:
        return None


def _message(m: Out) -> dict[str, Any]:
    return {
        "event_id": m.id,
        "key": m.key,
        "url": _url(m),
        "priority": m.priority,
        "headers": mask_headers_to_show(m.headers),
        "not_before": iso(m.not_before) if m.not_before else None,
        "size": len(m.body),
    }
