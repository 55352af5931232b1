"""Start of a slot reader: checks the slot for a known cursor, or creates it on a first start."""

from __future__ import annotations

from typing import Any

from penstock.errors import SourceDown
from penstock.sources.postgres import slot as slots
from penstock.sources.postgres.pgoutput import lsn_text
from penstock.sources.postgres.position import Cursor, Reading
from penstock.sources.postgres.settings import CdcSettings


def check_cursor(s: CdcSettings, session: Any, cursor: Cursor, system: str, database: str) -> None:
    """Check that the slot has the changes after the cursor, and extend the publication.

    Raises SourceDown, for example if the slot is missing, because changes are lost.
    """
    if cursor.system != system:
        raise SourceDown(
            f"source {s.source}: its position {lsn_text(cursor.lsn)} belongs to "
            f"another server than {s.address.label}",
            hint="change the URL back to the first server, or run "
            f"`penstock sources reset {s.source} --to start`",
        )
    slot = slots.find(s, session)
    if slot is None:
        raise SourceDown(
            f"source {s.source}: slot {s.slot} does not exist any longer, so changes after "
            f"{lsn_text(cursor.lsn)} are lost",
            hint=f"run `penstock sources reset {s.source} --to start` to create a new slot "
            "(with snapshot = true the table is read again)",
        )
    slots.check_usable(s, slot, database)
    # Otherwise new changes with an LSN below the cursor would be skipped as already read.
    if cursor.lsn > slot.current_lsn:
        raise SourceDown(
            f"source {s.source}: its position {lsn_text(cursor.lsn)} is ahead of "
            f"{s.address.label}, which is at {lsn_text(slot.current_lsn)}:"
            " the server was restored from a backup, or replaced by another server",
            hint=f"run `penstock sources reset {s.source} --to start` (or `--to now`)",
        )
    slots.ensure_publication(s, session)


def first_start(
    s: CdcSettings, session: Any, replication: Any, system: str, database: str
) -> tuple[Cursor, str | None]:
    """Create the publication and the slot, unless they exist. Raises SourceDown.

    Return the cursor at the start of the slot, and the name of the snapshot that a new slot
    exported, or None.
    """
    exported = None
    slot = slots.find(s, session)
    # Before the slot: a slot cannot use a publication that was created after it.
    slots.ensure_publication(s, session)
    if slot is None:
        slots.warn_if_unlimited(s, session)
        if s.snapshot:
            exported = slots.create_exporting(s, replication)
        else:
            slots.create(s, session)
        slot = slots.find_created(s, session)
    slots.check_usable(s, slot, database)
    reading = Reading(0, None) if s.snapshot else None
    return Cursor(system, slot.confirmed, 0, reading), exported
