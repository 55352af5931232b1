"""Converts changes of the log into findings: which changes are used, their payload and id."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.model import mint
from penstock.ports import Finding
from penstock.sources.postgres.pgoutput import Begin, Insert, Update, lsn_text
from penstock.sources.postgres.settings import CdcSettings

Known = Callable[[int, int, str, dict[str, Any]], bool]


class Findings:
    def __init__(self, s: CdcSettings, system: str, known: Known | None) -> None:
        """`known(commit, xid, table, row)` is True for an insert that the snapshot included."""
        self._operations, self._labels = s.operations, {table.label for table in s.tables}
        self._system, self._publication, self._known = system, s.publication, known

    def of(self, begin: Begin, index: int, change: Insert | Update) -> Finding | None:
        """Return the finding, or None if the change is not configured or is known already."""
        operation, label = (
            "insert" if isinstance(change, Insert) else "update",
            change.relation.label,
        )
        if operation not in self._operations or label not in self._labels:
            return None
        if (
            self._known is not None
            and operation == "insert"
            and self._known(begin.commit, begin.xid, label, change.row)
        ):
            return None
        lsn = lsn_text(begin.commit)
        meta: dict[str, Any] = {
            "op": operation,
            "table": label,
            "lsn": lsn,
            "index": index,
            "xid": begin.xid,
            "at": begin.at,
        }
        if isinstance(change, Update):
            if change.old is not None:
                meta["old"] = change.old
            if change.unchanged:
                meta["unchanged"] = list(change.unchanged)
        # The index counts changes of this publication. In another publication the same number
        # means another change, so the publication is part of the id.
        id_ = mint("cdc", self._system, self._publication, lsn, str(index))
        return Finding(
            id=id_,
            cause=f"{label}: {operation} at {lsn}",
            payload={**change.row, "_cdc": meta},
            at=begin.at,
        )
