"""The page store in segment files passes the conformance suite."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.stores.workers import OnSqlite

from penstock.pages import segments
from penstock.testing.pages_suite import PagesConformance, PagesWorker


class TestSegmentPages(OnSqlite, PagesConformance):
    """A segment holds one write, because retention by size deletes whole segments."""

    @pytest.fixture(autouse=True)
    def _small_segments(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(segments, "SEGMENT_BYTES", 1)

    async def open(self) -> PagesWorker:
        engine = self.worker(self)
        return PagesWorker(engine.pages, engine.uow)

    async def damage(self, worker: PagesWorker, page: str) -> None:
        path = self._segment()
        data = bytearray(path.read_bytes())
        data[500] ^= 1
        path.write_bytes(bytes(data))

    async def lose(self, worker: PagesWorker, page: str) -> None:
        self._segment().unlink()

    def _segment(self) -> Path:
        """Return the first segment, which the tests of damage write first."""
        return min((self.directory / "pages").glob("*.seg"), key=lambda path: path.name)
