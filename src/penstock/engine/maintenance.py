"""What people and time do to the books: letters put back or dropped, topics purged, workers that
are gone, delays that end, messages that a broker lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from penstock import locks
from penstock.engine.unit_of_work import Desk, out_of
from penstock.model import Event, decode_event
from penstock.ports import Out
from penstock.rules import breaker
from penstock.rules.fingerprint import fingerprint

WAITS = ("requests", "pages", "records")  # topics whose messages stand for open events


class Upkeep(Desk):
    _empty_looks = 0  # how often in a row a broker apart had nothing left

    def alerts_in(self, tx: Any) -> dict[str, tuple[int, int]]:
        """Topics with more dead ends of late than is usual, (ended, dead) each: worth a look, not a
        stop.
        """
        now, limits = self.clock.now(), self.settings.breaker
        recent = {
            topic: self.ledger.recent_in(tx, topic, limits.window, now)
            for topic in self.ledger.topics_in(tx)
        }
        return {topic: seen for topic, seen in recent.items() if breaker.judge(limits, *seen)}

    # -- dead letters ------------------------------------------------------------------------------

    async def redrive(
        self, ids: Sequence[str], change: Callable[[Event], Event] = lambda e: e
    ) -> int:
        """Dead letters go back to work with a new budget: published and removed in one transaction.
        Returns how many.
        """
        n = await self.write(lambda tx: self._redrive(tx, ids, change))
        self.broker.wake(["requests"])
        return n

    def _redrive(self, tx: Any, ids: Sequence[str], change: Callable[[Event], Event]) -> int:
        now = self.clock.now()
        n = 0
        for id_ in ids:
            found = self.ledger.redrivable_in(tx, id_)
            if found is None:
                continue
            row, envelope = found
            before = decode_event(envelope)
            event = change(before)
            if (event.id, event.topic, event.url) != (before.id, before.topic, before.url):
                raise ValueError(
                    "a redriven event keeps its id, topic and URL: the ledger's row does"
                )
            self.ledger.drop_letter_in(tx, id_)
            self.republish_in(tx, row, event, "dead", "redriven", now)
            n += 1
        return n

    async def drop(self, ids: Sequence[str]) -> int:
        """Forget letters; their events stay dead in the books."""

        return await self.write(
            lambda tx: sum(self.ledger.drop_letter_in(tx, id_, page=True) for id_ in ids)
        )

    async def purge(self, topic: str, reason: str) -> int:
        """What waits on a topic is given up: its events end dead and can be redriven, then the
        broker's messages go. What is in flight is finished.
        """
        given_up = 0
        while topic in WAITS and (
            n := await self.write(lambda tx: self._give_up(tx, topic, reason))
        ):
            given_up += n
        removed = await self.broker.purge(topic)
        return given_up if topic in WAITS else int(removed)

    def _give_up(self, tx: Any, topic: str, reason: str) -> int:
        rows = self.ledger.waiting_in(tx, topic, 500)
        for row in rows:
            self.ledger.give_up_in(
                tx, row, reason, fingerprint("intake", "permanent", reason), self.clock.now()
            )
        return len(rows)

    # -- upkeep ------------------------------------------------------------------------------------

    async def reclaim(self, directory: Path) -> list[str]:
        """Workers of this machine that are known to be gone: their leases end at once, not after
        the lease.
        """
        gone = locks.dead_workers(directory)
        for worker in gone:
            await self.write(partial(self._reclaim, worker))
            locks.forget_worker(directory, worker)
        if gone:
            self.broker.wake(["requests", "pages", "records"])
        return gone

    def _reclaim(self, worker: str, tx: Any) -> None:
        ids = self.broker.reclaim_in(tx, worker)
        self.ledger.lost_in(tx, ids, worker, self.clock.now())

    async def relay(self) -> None:
        """Several times a second: a broker apart is told what is due."""
        if self.broker.apart:
            await self.broker.tick()
            if rows := self.broker.too_large():
                await self.write(lambda tx: self._bury_too_large(tx, rows))

    def _bury_too_large(self, tx: Any, rows: Sequence[tuple[int, Out]]) -> None:
        """Published again, they would be refused again, for ever."""
        for n, out in rows:
            self.broker.forget_in(tx, n)
            row = self.ledger.waiting_one_in(tx, out.id)
            if row is not None:
                reason = f"its message for `{out.topic}` has {len(out.body)} bytes, more than the broker takes"
                self.ledger.give_up_in(
                    tx, row, reason, fingerprint("intake", "permanent", reason), self.clock.now()
                )

    async def recover(self) -> int:
        """Every lease: a broker apart that has nothing left, while the books have open events, has
        lost messages; they are published again.

        Twice in a row, since its figures and ours are not of one moment. A copy too many does no
        harm.
        """
        if not self.broker.apart:
            return 0
        empty = await self.broker.empty()
        self._empty_looks = self._empty_looks + 1 if empty else 0
        if self._empty_looks < 2:
            return 0
        self._empty_looks = 0
        return await self.write(self._recover)

    def _recover(self, tx: Any) -> int:
        lost = [
            row
            for row in self.ledger.open_in(tx, self.clock.now() - 2 * self.broker.lease, limit=500)
            if not self.broker.at_hand_in(tx, *row[:2])
        ]
        for n, _, envelope in lost:
            e = decode_event(envelope)
            self.publish_in(tx, [out_of(e, envelope)])
            self.ledger.note_in(
                tx,
                n,
                "pending",
                "published again: the broker had lost its message",
                self.clock.now(),
            )
        return len(lost)

    async def tick(self) -> None:
        """Once a second: we are alive, and delays that ended are pending again in the books."""
        now = self.clock.now()
        if self.broker.apart:
            await self.store.write(self.broker.beat_in, durable=False)
        if await self.store.read(lambda tx: self.ledger.has_due_in(tx, now)):
            await self.write(lambda tx: self.ledger.due_in(tx, now), durable=False)
