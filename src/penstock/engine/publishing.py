"""Functions for transactions that publish the message of an event."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.errors import StoreUnavailable
from penstock.model import Event, encode_event
from penstock.ports import Delivery, EventState, Out, Published, Transaction


def message_for(event: Event, body: bytes) -> Out:
    # Convert to `int`: not every broker accepts a member of the enumeration as a number.
    return Out(
        topic=event.topic, id=event.id, key=event.key, body=body, priority=int(event.priority)
    )


def message_again(d: Delivery, *, not_before: float) -> Out:
    """Return the message of a delivery, to be published when it is due."""
    return Out(
        topic=d.topic,
        id=d.id,
        key=d.key,
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


def requeue(
    tx: Transaction,
    n: int,
    event: Event,
    *,
    was: str,
    reason: str,
    now: float,
    promoted: bool = False,
) -> None:
    """Reopen an ended event and publish its message again.

    Resets `accepted_at`, so that `retry.max_age` counts from now.
    """
    body = encode_event(msgspec.structs.replace(event, accepted_at=round(now, 3)))
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
