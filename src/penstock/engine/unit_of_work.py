"""What everything that writes to the books rests on: one transaction, then what it decided for a
broker apart; and how an event gets its message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from penstock.errors import StoreUnavailable
from penstock.model import Event, encode_event
from penstock.ports import Out, Published, Store
from penstock.rules import breaker

T = TypeVar("T")


def out_of(e: Event, body: bytes) -> Out:
    return Out(
        topic=e.topic, id=e.id, key=e.key, body=body, priority=int(e.priority)
    )  # a name for a number is not a number on every wire


class SinkBinding(msgspec.Struct, frozen=True):
    """How records reach one sink: through its outbox, or by `write` inside the transaction when its
    table lies in the same file.
    """

    name: str
    only: tuple[str, ...] = ()  # extractors; () is all
    write: Callable[[Any, Sequence[tuple[str, bytes, int]]], None] | None = None


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    group: str = "main"
    max_pending: int = 10_000_000
    window: float = 60.0
    settle: float = 2.0
    drop: bool = False
    follow_window: float = 24 * 3600.0
    follow_depth: int = 10
    follow_same_domain: bool = True
    emit_unchanged: bool = False
    hooks: bool = False
    sinks: tuple[SinkBinding, ...] = ()
    host_by: Literal["host", "domain"] = "host"
    breaker: breaker.Limits = breaker.Limits()


class Desk:
    """Needs a broker, ledger, outbox, claims and pages whose `_in` methods take the store's
    transaction.
    """

    def __init__(
        self,
        store: Store,
        *,
        broker: Any,
        ledger: Any,
        outbox: Any,
        claims: Any,
        pages: Any,
        settings: Settings,
        worker: str,
        clock: Any,
    ) -> None:
        self.store, self.broker, self.ledger, self.outbox, self.claims, self.pages = (
            store,
            broker,
            ledger,
            outbox,
            claims,
            pages,
        )
        self.settings, self.worker, self.clock = settings, worker, clock

    async def write(self, work: Callable[[Any], T], *, durable: bool = True) -> T:
        """One transaction, and then what it decided for a broker apart. What is told there must
        outlive a power cut here.
        """
        if not self.broker.apart:
            return await self.store.write(work, durable=durable)

        def job(tx: Any) -> tuple[T, Any]:
            with self.broker.collecting(tx) as after:
                return work(tx), after

        result, after = await self.store.write(job, durable=durable)
        await self.broker.follow_up(after)
        return result

    def publish_in(self, tx: Any, batch: Sequence[Out]) -> list[int]:
        """The positions. What an open event hangs on is placed or the transaction fails: a full
        topic is back-pressure, never a loss.
        """
        placed = self.broker.place_in(tx, batch)
        for out, (answer, _) in zip(batch, placed, strict=True):
            if answer is not Published.OK:
                raise StoreUnavailable(
                    f"topic {out.topic} is full",
                    hint="start more workers that read it, or raise its max_depth",
                )
        return [position for _, position in placed]

    def republish_in(
        self,
        tx: Any,
        n: int,
        event: Event,
        was: str,
        reason: str,
        now: float,
        *,
        promoted: bool = False,
    ) -> None:
        body = encode_event(
            msgspec.structs.replace(event, accepted_at=round(now, 3))
        )  # a new chance has its whole life before it
        (position,) = self.publish_in(tx, [out_of(event, body)])
        self.ledger.reopen_in(
            tx,
            n,
            event.topic,
            was,
            reason,
            now,
            promoted=promoted,
            envelope=body,
            position=position,
        )
