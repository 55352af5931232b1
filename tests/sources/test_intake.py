"""Intake on a real ledger: a finding that makes no event becomes a dead letter, for any contents,
and the other findings are accepted.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql
from tests.servers import Handle
from tests.sources.seeds_rig import spec_of

from penstock.clock import SystemClock
from penstock.config import files as config
from penstock.intake.accept import Intake
from penstock.intake.mapping import Mapping
from penstock.ports import Accepted, Batch, Finding
from penstock.runtime.stores import Stores, open_stores
from penstock.stores.postgres.store import PostgresStore


class Rude:
    """A value whose `repr` raises."""

    def __repr__(self) -> str:
        raise RuntimeError("no")


STRANGE: list[tuple[str, dict[str, Any]]] = [
    ("https://a\0.test/", {"x": "a\0b"}),
    ("no url \ud800", {"x": "\ud800"}),
    ("no url", {"x": object()}),
    ("no url", {"x": Rude()}),
    ("no url", {"x": 10**5000}),
    ("https://shop.test/strange", {"x": object()}),
]


async def strange_findings_are_letters(stores: Stores) -> None:
    """Take findings with payloads that only a hook can make, and check their dead letters."""
    findings = [
        Finding(id=f"{n:032}", url=url, payload=payload, cause="\ud800\0")
        for n, (url, payload) in enumerate(STRANGE)
    ]
    findings.insert(
        3, Finding(id="f" * 32, url="https://shop.test/good", payload={"x": 1}, cause="a\ud800\0")
    )
    intake = Intake(
        stores.lifecycle, Mapping(spec_of("seeds:list", name="list")), SystemClock(), source="list"
    )
    for _ in range(2):
        taken = await intake.take(Batch(findings=findings, cursor=b"1"))
        assert len(taken.refused) == len(STRANGE)
        assert [e.url for e in taken.events] == ["https://shop.test/good"]
    assert taken.answers == [Accepted.KNOWN]
    letters = stores.db.read_now(
        lambda tx: [
            (reason, json.loads(bytes(envelope)))
            for reason, envelope in tx.execute("SELECT reason, envelope FROM dead")
        ]
    )
    assert len(letters) == len(STRANGE), "one dead letter each, even if they are read twice"
    assert all(
        reason and document["source"] == "list" and document["id"] for reason, document in letters
    )


def opened(directory: Path, url: str = "") -> Stores:
    places = {"ledger.url": url, "broker.url": url} if url else {}
    return open_stores(
        config.load(
            {"state.dir": str(directory), **places},
            {"PENSTOCK_NAMESPACE": f"t{uuid.uuid4().hex[:8]}"},
            directory,
        ).config
    )


async def test_findings_that_cannot_be_stored_become_dead_letters(tmp_path: Path) -> None:
    stores = opened(tmp_path)
    try:
        await strange_findings_are_letters(stores)
    finally:
        stores.close()


@pytest.mark.server("postgres")
async def test_findings_that_cannot_be_stored_become_dead_letters_on_postgres(
    tmp_path: Path, server: Callable[[str], Handle]
) -> None:
    stores = opened(tmp_path, server("postgres").url)
    try:
        await strange_findings_are_letters(stores)
    finally:
        stores.close()
        assert isinstance(stores.db, PostgresStore)
        with psycopg.connect(server("postgres").url, autocommit=True) as connection:
            connection.execute(
                sql.SQL("DROP SCHEMA {} CASCADE").format(sql.Identifier(stores.db.namespace))
            )
