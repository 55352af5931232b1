"""Cost of `status` in SQLite: virtual machine steps, rows of full scans, and scanned tables."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import apsw

from penstock.cli.status import document, look
from penstock.config import files as config
from penstock.runtime.stores import open_stores

SCAN = re.compile(r"SCAN (\w+)$")  # a scan without an index


@dataclass
class Steps:
    steps: int = 0
    scanned: int = 0
    scans: set[str] = field(default_factory=set)
    statements: list[str] = field(default_factory=list)


def steps_of_status(directory: Path) -> Steps:
    """Run the code of the command, with a trace of each statement."""
    stores = open_stores(config.load({}, {}, directory).config, create=False, inline=True)
    found = Steps()

    def seen(event: dict[str, Any]) -> None:
        status = event["stmt_status"]
        found.steps += status["SQLITE_STMTSTATUS_VM_STEP"]
        found.scanned += status["SQLITE_STMTSTATUS_FULLSCAN_STEP"]
        found.statements.append(event["sql"])

    connection = stores.db._writer  # an inline store also reads with this connection
    try:
        connection.trace_v2(apsw.SQLITE_TRACE_PROFILE, seen)
        document(*look(stores))
        connection.trace_v2(0, None)
        for sql in found.statements:
            if sql.lstrip().upper().startswith("SELECT"):
                plan = connection.execute(f"EXPLAIN QUERY PLAN {sql}", (None,) * sql.count("?"))
                found.scans |= {m[1] for row in plan if (m := SCAN.search(row[3]))}
    finally:
        stores.close()
    return found
