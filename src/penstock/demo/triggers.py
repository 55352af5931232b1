"""What sets the demo going: the shop's seed list, once, and its change list, again and again. Read like any page: guard, robots, pace."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

import msgspec

from penstock.app import Running
from penstock.errors import StoreUnavailable
from penstock.intake import event_of, push
from penstock.model import Failure, Priority, mint
from penstock.ports import Accepted
from penstock.rules.identity import BadUrl, host_key
from penstock.stages.fetch import FetchStage

log = logging.getLogger("penstock.demo")
EVERY = 1.0  # seconds between two looks at the change list
AGAIN = 0.5  # … between two tries of the seed list


class _Line(msgspec.Struct):
    id: int
    url: str


class _ChangeList(msgspec.Struct):
    changes: list[_Line]
    last: int


_decode = msgspec.json.Decoder(_ChangeList).decode


@dataclass
class Trigger:
    """How many events it made, and when it made the last."""

    name: str
    events: int = 0
    at: float | None = None


class Triggers:
    """Both readers, over an open worker. Cancel `run` before the worker is stopped."""

    def __init__(self, running: Running, base: str) -> None:
        self._running, self._base, self._clock = running, base, running.clock
        self._host = host_key(base + "/", by=running.stores.books.settings.host_by)
        self.seeds, self.changes = Trigger("seed list"), Trigger("change list")

    async def run(self) -> None:
        await self._push_seeds()
        cursor = await self._running.stores.db.read(lambda tx: self._running.stores.ledger.cursor_in(tx, "changes"))
        last = int(cursor or 0)
        while True:
            try:
                last = await self._read_changes(last)
            except (Failure, StoreUnavailable, msgspec.MsgspecError, BadUrl) as e:
                log.warning("the change list: %s", e)  # the same place is read again
            await self._clock.sleep(EVERY)

    async def _push_seeds(self) -> None:
        while True:
            try:
                urls = (await self._get("/seeds.txt")).decode().split()
                pushed = await push(self._running.stores.books, urls, clock=self._clock, source="seeds")
            except (Failure, StoreUnavailable, UnicodeDecodeError) as e:
                log.warning("the seed list: %s", e)
                await self._clock.sleep(AGAIN)
            else:
                self._made(self.seeds, pushed.new)
                return

    async def _read_changes(self, last: int) -> int:
        """What is new since `last`. Ids come from the cause and the cursor moves with the events, so a crash between two lines repeats none and skips none."""
        found = _decode(await self._get(f"/changes.json?after={last}"))
        books = self._running.stores.books
        by = books.settings.host_by
        events = [
            event_of(c.url, id_=mint("changes", str(c.id)), source="changes", cause=f"change {c.id}", priority=Priority.HIGH, host_by=by) for c in found.changes
        ]
        if events:
            answers = await books.accept(events, cursor=("changes", b"%d" % found.last))
            self._made(self.changes, answers.count(Accepted.NEW))
            return last if Accepted.FULL in answers else found.last
        return found.last

    async def _get(self, path: str) -> bytes:
        """In a slot of its own, as everything that asks a host. Raises Failure."""
        stage = next(w.fetch for w in self._running.workers if isinstance(w.fetch, FetchStage))
        (slot,) = (await self._running.stores.claims.reserve({self._host: 1}))[self._host]
        await asyncio.sleep(max(0.0, slot - self._clock.now()))
        response = await stage.fetch(event_of(self._base + path), None)
        self._running.signals.asked.append((self._clock.now(), self._host))
        return response.body

    def _made(self, trigger: Trigger, events: int) -> None:
        if events:
            trigger.events += events
            trigger.at = self._clock.now()
