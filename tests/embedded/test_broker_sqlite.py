"""The embedded broker: the suite every broker passes, in a file and in memory, and what only SQLite promises."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.brokers.sqlite import SqliteBroker
from penstock.ports import Broker
from penstock.stores.sqlite import Database
from penstock.testing.clock import ManualClock
from penstock.testing.conformance import BrokerConformance


class _Rig(BrokerConformance):
    def _database(self) -> Database:
        raise NotImplementedError

    async def open(self) -> Broker:
        self.clock = ManualClock()
        self.db = self._database()
        return SqliteBroker(self.db, self.clock)

    async def shut(self, broker: Broker) -> None:
        self.db.close_now()

    async def sleep(self, seconds: float) -> None:
        self.clock.advance(seconds)

    def now(self) -> float:
        return self.clock.now()


class TestInMemory(_Rig):
    def _database(self) -> Database:
        return Database(":memory:")

    async def reopen(self, broker: Broker) -> Broker:
        return SqliteBroker(self.db, self.clock)


class TestInAFile(_Rig):
    @pytest.fixture(autouse=True)
    def _place(self, tmp_path: Path) -> None:
        self.path = tmp_path / "state.db"

    def _database(self) -> Database:
        return Database(str(self.path), durability="process")

    async def reopen(self, broker: Broker) -> Broker:
        self.db.close_now()
        self.db = self._database()
        return SqliteBroker(self.db, self.clock)
