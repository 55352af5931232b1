"""Tests of the ledger conformance suite: change detection, the sink outbox, changes for hooks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from penstock.model import REMOVED, Record
from penstock.ports import Line, Row, Transaction, UnitOfWork
from penstock.testing.ledger_rig import (
    TOPIC,
    URL,
    Begun,
    LedgerRig,
    a_record,
    an_end,
    key_of,
    new_event,
)
from penstock.testing.store_rig import sentence

PLENTY = 1 << 20  # bytes


class LedgerOutbox(LedgerRig):
    """Tests of the records in a ledger. The sink of these tests is called `out`."""

    async def _scrape(
        self,
        ledger: UnitOfWork,
        id_: str,
        *records: Record,
        url: str = URL,
        emit_unchanged: bool = False,
        hooks: bool = False,
        force: bool = False,
    ) -> Counter[str]:
        """End a new event with records, and append its records to the outbox. Return the counts."""
        event = new_event(id_, url, force=force)
        await self.accept(ledger, event)
        return await self._succeed(
            ledger,
            await self.begin(ledger, event),
            records,
            emit_unchanged=emit_unchanged,
            hooks=hooks,
        )

    async def _succeed(
        self,
        ledger: UnitOfWork,
        begun: Begun,
        records: Sequence[Record],
        *,
        emit_unchanged: bool = False,
        hooks: bool = False,
    ) -> Counter[str]:
        now = self.now()

        def work(tx: Transaction) -> Counter[str]:
            counts = {TOPIC: Counter[str]()}
            ends = tx.events.succeed([an_end(begun, "success", page=b"x", records=records)], now)
            lines = tx.outbox.diff(
                [(end, key_of(end.event)) for end in ends],
                counts,
                emit_unchanged=emit_unchanged,
                hooks=hooks,
            )
            if lines:
                tx.outbox.append("out", lines)
            tx.counters.add(TOPIC, {"success": 1, "in_flight": -1})
            return counts[TOPIC]

        return await ledger.write(work)

    async def _rows(self, ledger: UnitOfWork, after: int = 0, sink: str = "out") -> list[Row]:
        return await ledger.read(
            lambda tx: tx.outbox.rows(sink, after=after, limit=100, max_bytes=PLENTY)
        )

    async def _prices(self, ledger: UnitOfWork) -> list[int | None]:
        return [msgspec.json.decode(row.body).get("price") for row in await self._rows(ledger)]

    # -- change detection --------------------------------------------------------------------------

    @sentence()
    async def test_a_line_has_the_fields_of_its_record_and_its_origin(
        self, ledger: UnitOfWork
    ) -> None:
        await self._scrape(ledger, "e1", a_record("é", 7))
        (row,) = await self._rows(ledger)
        line = msgspec.json.decode(row.body)
        origin = line.pop("_penstock")
        assert line == {"sku": "é", "price": 7}
        assert (origin["event_id"], origin["url"], origin["key"], origin["extractor"]) == (
            "e1",
            URL,
            "é",
            "product",
        )
        assert (row.key, row.order) == ("é", (await self.state(ledger, "e1")).n)

    @sentence()
    async def test_an_unchanged_record_is_counted_and_not_sent(self, ledger: UnitOfWork) -> None:
        first = await self._scrape(ledger, "e1", a_record("a"), a_record("b", index=1))
        second = await self._scrape(ledger, "e2", a_record("a"), a_record("b", 2, index=1))
        assert await self._prices(ledger) == [1, 1, 2]
        assert dict(first) == {"records": 2}
        assert dict(second) == {"records": 1, "records_unchanged": 1, "changes": 1}

    @sentence()
    async def test_an_unchanged_record_is_sent_if_forced_or_configured(
        self, ledger: UnitOfWork
    ) -> None:
        await self._scrape(ledger, "e1", a_record("a"))
        await self._scrape(ledger, "e2", a_record("a"), force=True)
        await self._scrape(ledger, "e3", a_record("a"), emit_unchanged=True)
        await self._scrape(ledger, "e4", a_record("a"))
        assert len(await self._rows(ledger)) == 3

    @sentence()
    async def test_the_same_key_from_another_url_or_extractor_is_a_new_record(
        self, ledger: UnitOfWork
    ) -> None:
        await self._scrape(ledger, "e1", a_record("a"))
        count = await self._scrape(ledger, "e2", a_record("a"), url=URL + "2")
        await self._scrape(ledger, "e3", a_record("a", extractor="offer"), url=URL + "2")
        assert len(await self._rows(ledger)) == 3
        assert count["changes"] == 0

    @sentence()
    async def test_long_record_keys_that_differ_at_their_end_are_different(
        self, ledger: UnitOfWork
    ) -> None:
        long = "".join(chr(0x4E00 + i % 5000) for i in range(3999))
        for id_, key in (("e1", long + "a"), ("e2", long + "a"), ("e3", long + "b")):
            await self._scrape(ledger, id_, a_record(key))
        assert [row.key[-1] for row in await self._rows(ledger)] == ["a", "b"]

    @sentence()
    async def test_records_that_share_a_key_are_compared_as_one_group(
        self, ledger: UnitOfWork
    ) -> None:
        both = (a_record("a", 1), a_record("a", 2, index=1))
        await self._scrape(ledger, "e1", *both)
        await self._scrape(ledger, "e2", *both)
        assert await self._prices(ledger) == [1, 2]

    @sentence()
    async def test_an_older_event_that_ends_later_does_not_replace_the_newer_record(
        self, ledger: UnitOfWork
    ) -> None:
        elder = new_event("elder", URL)
        await self.accept(ledger, elder)
        begun = await self.begin(ledger, elder)
        await self._scrape(ledger, "newer", a_record("a", 2))
        counts = await self._succeed(ledger, begun, [a_record("a", 1)])
        assert counts["changes"] == 0
        first, second = await self._rows(ledger)
        assert first.order > second.order, "a keyed sink keeps the row with the higher order"
        again = await self._scrape(ledger, "third", a_record("a", 2))
        assert again["records_unchanged"] == 1, "the newer record is still the last one"

    @sentence()
    async def test_a_removed_record_is_sent_once_and_an_older_event_does_not_undo_it(
        self, ledger: UnitOfWork
    ) -> None:
        await self._scrape(ledger, "e1", a_record("a"))
        late = new_event("late", URL + "2")
        await self.accept(ledger, late)
        begun = await self.begin(ledger, late)
        removed = a_record("a", hash=REMOVED, deleted=True, fields=b'{"sku":"a"}')
        await self._scrape(ledger, "e2", removed)

        await self._succeed(ledger, begun, [a_record("a", 7)])
        await self._scrape(ledger, "e3", removed)
        assert await self._prices(ledger) == [1, None]
        body = msgspec.json.decode((await self._rows(ledger))[1].body)
        assert body["_penstock"]["deleted"] is True
        await self._scrape(ledger, "e4", a_record("a", 8))
        assert await self._prices(ledger) == [1, None, 8]

    # -- the outbox --------------------------------------------------------------------------------

    @sentence()
    async def test_outbox_rows_keep_their_order_and_have_no_gap_after_a_flush(
        self, ledger: UnitOfWork
    ) -> None:
        assert await ledger.read(lambda tx: tx.outbox.position("out")) == (0, "")
        for i in range(3):
            await self._scrape(ledger, f"e{i}", a_record("a", i), a_record("b", i, index=1))
            if i == 1:
                await ledger.write(lambda tx: tx.outbox.mark_flushed("out", upto=3, mark="77"))
        rows = await self._rows(ledger, after=3)
        assert [(r.n, r.key) for r in rows] == [(4, "b"), (5, "a"), (6, "b")]
        assert await self._rows(ledger) == rows, "flushed rows are deleted"
        assert await self._rows(ledger, after=5) == rows[2:]

        def work(tx: Transaction) -> tuple[tuple[int, str], int, int]:
            outbox = tx.outbox
            return outbox.position("out"), outbox.backlog("out"), outbox.backlog("never")

        other = await self.open()
        assert await other.read(work) == ((3, "77"), 3, 0)
        await ledger.write(lambda tx: tx.outbox.mark_flushed("out", upto=6, mark="99"))
        await self._scrape(ledger, "e9", a_record("c"))
        assert [r.n for r in await self._rows(ledger)] == [7], "numbers are not used again"

    @sentence()
    async def test_an_undone_transaction_leaves_no_gap_in_the_outbox(
        self, ledger: UnitOfWork
    ) -> None:
        lines = [Line("product", "a", b"{}", 1), Line("product", "b", b"{}", 1)]

        def fails(tx: Transaction) -> None:
            tx.outbox.append("out", lines)
            raise ZeroDivisionError

        for _ in range(2):
            await ledger.write(lambda tx: tx.outbox.append("out", lines))
            try:
                await ledger.write(fails)
            except ZeroDivisionError:
                pass
        assert [r.n for r in await self._rows(ledger)] == [1, 2, 3, 4]

    @sentence()
    async def test_each_sink_has_its_own_rows_and_position(self, ledger: UnitOfWork) -> None:
        for sink, bodies in (("x", [b"1", b"2"]), ("y", [b"3"])):
            lines = [Line("product", "k", body, 1) for body in bodies]
            await ledger.write(lambda tx: tx.outbox.append(sink, lines))  # noqa: B023 (awaited here)
        await ledger.write(lambda tx: tx.outbox.mark_flushed("x", upto=1, mark="m"))
        assert [r.body for r in await self._rows(ledger, sink="x")] == [b"2"]
        assert [r.body for r in await self._rows(ledger, sink="y")] == [b"3"]
        states = await ledger.read(lambda tx: tx.status_reports.sinks())
        assert {s.name: (s.flushed, s.backlog, s.mark) for s in states} == {
            "x": (1, 1, "m"),
            "y": (0, 1, ""),
        }

    @sentence()
    async def test_rows_are_limited_by_number_and_by_bytes(self, ledger: UnitOfWork) -> None:
        lines = [Line("product", "k", b"x" * 100, 1) for _ in range(6)]
        await ledger.write(lambda tx: tx.outbox.append("out", lines))

        async def numbers(limit: int, max_bytes: int) -> list[int]:
            rows = await ledger.read(
                lambda tx: tx.outbox.rows("out", after=1, limit=limit, max_bytes=max_bytes)
            )
            return [row.n for row in rows]

        assert await numbers(3, PLENTY) == [2, 3, 4]
        assert await numbers(9, 250) == [2, 3, 4], "one row beyond the limit"
        assert await numbers(9, 0) == [2], "a large row alone is returned"

    @sentence()
    async def test_the_outage_of_a_sink_is_recorded_and_keeps_its_rows(
        self, ledger: UnitOfWork
    ) -> None:
        now, other = self.now(), await self.open()
        assert await ledger.read(lambda tx: tx.outbox.outage("out")) == ""
        lines = [Line("product", "k", b"1", 1)]
        await ledger.write(lambda tx: tx.outbox.append("out", lines))
        await ledger.write(lambda tx: tx.outbox.set_outage("out", "disk full", since=now))
        assert await other.read(lambda tx: tx.outbox.outage("out")) == "disk full"
        assert await other.read(lambda tx: tx.outbox.outage("another")) == ""
        assert len(await self._rows(other)) == 1
        await ledger.write(lambda tx: tx.outbox.set_outage("out", "", since=None))
        assert await other.read(lambda tx: tx.outbox.outage("out")) == ""

    # -- changes for hooks -------------------------------------------------------------------------

    @sentence()
    async def test_a_change_waits_for_its_hook_and_is_tried_again_after_a_failure(
        self, ledger: UnitOfWork
    ) -> None:
        await self._scrape(ledger, "e1", a_record("a", 1), hooks=True)
        assert not await ledger.read(lambda tx: tx.outbox.has_changes())
        await self._scrape(ledger, "e2", a_record("a", 2), hooks=True)
        await self._scrape(ledger, "e3", a_record("a", 3), hooks=True)
        found = await ledger.read(lambda tx: tx.outbox.changes(10))
        changes = [msgspec.msgpack.decode(body) for _, body in found]
        assert [(c["event_id"], c["key"], c["fields"]) for c in changes] == [
            ("e2", "a", {"price": [1, 2]}),
            ("e3", "a", {"price": [2, 3]}),
        ]
        (first, _), (second, _) = found
        assert await ledger.read(lambda tx: tx.outbox.changes(1)) == found[:1]
        await ledger.write(lambda tx: tx.outbox.mark_hooks_run([first], [("boom", second)]))
        assert await ledger.read(lambda tx: tx.outbox.changes(10)) == found[1:]
        await ledger.write(lambda tx: tx.outbox.mark_hooks_run([second], []))
        assert not await ledger.read(lambda tx: tx.outbox.has_changes())
