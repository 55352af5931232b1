"""Functions for transactions that publish the message of an event."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from penstock.errors import NewerMessage, StoreUnavailable
from penstock.model import Event, decode_event, encode_event
from penstock.ports import (
    Delivery,
    EventState,
    NewEvent,
    Out,
    Published,
    StoredEvent,
    Transaction,
)
from penstock.rules.envelopes import encode_again

GROUP = "main"  # the group whose outcomes the ledger records


def message_for(event: Event, body: bytes) -> Out:
    # Convert to `int`: not every broker accepts a member of the enumeration as a number.
    return Out(
        topic=event.topic, id=event.id, key=event.key, body=body, priority=int(event.priority)
    )


def insert_events(tx: Transaction, events: Sequence[Event], now: float, pipeline: str) -> None:
    """Publish the messages of new events, and insert the events with the messages' positions."""
    accepted_at = round(now, 3)
    stamped = [
        msgspec.structs.replace(e, accepted_at=accepted_at, pipeline=pipeline) for e in events
    ]
    messages = [message_for(e, encode_event(e)) for e in stamped]
    placed = tx.queue.enqueue(messages)
    assert all(answer is Published.OK for answer, _ in placed), (
        "intake limits the pending events, not the broker"
    )
    rows = [
        NewEvent(e, message.body, position)
        for e, message, (_, position) in zip(stamped, messages, placed, strict=True)
    ]
    tx.events.enter(rows, now)


def message_again(d: Delivery, *, not_before: float, elsewhere: bool = False) -> Out:
    """Return the message of a delivery, to be published when it is due.

    With `elsewhere` its key differs each time, because Kafka chooses the partition by the key, and
    so the worker. No reader needs the key of the message: the envelope has the host key.
    """
    return Out(
        topic=d.topic,
        id=d.id,
        key=f"{d.id}@{not_before:.0f}" if elsewhere else d.key,
        body=d.body,
        headers=d.headers,
        priority=d.priority,
        not_before=not_before,
    )


def state_of(tx: Transaction, id: str) -> EventState | None:
    return tx.lookup.states([id]).get(id)


def publish(tx: Transaction, batch: Sequence[Out]) -> list[int]:
    """Publish messages of open events. Return their positions.

    Raises StoreUnavailable if a topic is full. Then the transaction is rolled back, and no event is
    lost.
    """
    placed = tx.queue.enqueue(batch)
    for out, (answer, _) in zip(batch, placed, strict=True):
        if answer is not Published.OK:
            raise StoreUnavailable(
                f"topic {out.topic} is full",
                hint="start more workers that read it, or raise its max_depth",
            )
    return [position for _, position in placed]


def publish_again(tx: Transaction, envelope: bytes) -> bool:
    """Publish the message of an open event from its envelope.

    Return False if only a newer release can read the envelope. Its workers publish the message.
    """
    try:
        event = decode_event(envelope)
    except NewerMessage:
        return False
    publish(tx, [message_for(event, envelope)])
    return True


def requeue(
    tx: Transaction,
    n: int,
    event: Event,
    before: bytes,
    *,
    was: str,
    reason: str,
    now: float,
    promoted: bool = False,
) -> None:
    """Reopen an ended event and publish its message again.

    Resets `accepted_at`, so that `retry.max_age` counts from now. `before` is the event's envelope.
    Its fields that only a newer release knows are kept.
    """
    fresh = msgspec.structs.replace(event, accepted_at=round(now, 3))
    body = encode_again(fresh, before)
    (position,) = publish(tx, [message_for(event, body)])
    tx.events.reopen(
        event,
        n,
        was=was,
        reason=reason,
        envelope=body,
        position=position,
        now=now,
        promoted=promoted,
    )


def reopen_duplicate(
    tx: Transaction, duplicate: StoredEvent, *, reason: str, now: float, promoted: bool = False
) -> None:
    """Reopen a duplicate, for example because its owner is dead.

    If only a newer release can read its envelope, the message has the envelope unchanged.
    """
    n, before = duplicate.n, duplicate.envelope
    try:
        event = decode_event(before)
    except NewerMessage:
        event = Event(id=duplicate.id, url=duplicate.url, key=duplicate.host, topic=duplicate.topic)
        (position,) = publish(tx, [message_for(event, before)])
        tx.events.reopen(
            event,
            n,
            was="duplicate",
            reason=reason,
            envelope=before,
            position=position,
            now=now,
            promoted=promoted,
        )
        return
    requeue(tx, n, event, before, was="duplicate", reason=reason, now=now, promoted=promoted)


def end_delays(
    tx: Transaction, rows: Sequence[tuple[int, str, int]], topics: Iterable[str], now: float
) -> None:
    """End the delay of events now, and let the broker deliver their messages.

    A row has the event's row number, its host, and the position of its message on these topics.
    """
    tx.maintenance.make_due([n for n, _, _ in rows], now)
    messages: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for n, host, position in rows:
        messages[host].append((n, position))
    for topic in topics:
        for host, some in messages.items():
            tx.queue.make_due(topic, GROUP, host, some)
