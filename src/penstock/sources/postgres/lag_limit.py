"""Limit on the WAL that a slot may hold: decides between a warning, the spill file and the end."""

from __future__ import annotations

import logging
from typing import Literal

from penstock.config import units
from penstock.errors import SourceDown
from penstock.sources.postgres.settings import CdcSettings
from penstock.sources.postgres.slot import Slot
from penstock.sources.postgres.spill import Spill

log = logging.getLogger("penstock")
# Checks in a row that find the queue full and unread before reading may stop. Elapsed time would
# also count a suspended machine.
FULL_CHECKS = 12


class WalLimit:
    """Actions by the WAL that the slot holds, as a share of `max_lag`.

    At one half, log a warning. At three quarters with a full queue, start the spill file. At the
    limit, end reading if the spill file is full too and the queue stays full.
    """

    def __init__(self, s: CdcSettings) -> None:
        self._s = s
        self._warned = False
        self._full_checks = self._taken = 0

    def check(
        self, slot: Slot, spill: Spill, *, full: bool, taken: int
    ) -> Literal["on", "spill", "end"]:
        """Return whether to continue, to start the spill file, or to end reading.

        `full`: the queue is full. Only then is this reader the cause of the WAL that is held.
        `taken`: number of chunks that were taken from the queue. A queue that is full only at one
        check is normal if the reader is faster than intake.
        """
        s = self._s
        self._full_checks = self._full_checks + 1 if full and taken == self._taken else 0
        self._taken = taken
        if slot.held < s.max_lag // 2:
            self._warned = False
        elif not self._warned:
            self._warned = True
            behind = (
                "because its reader is behind"
                if slot.backlog >= slot.held // 2
                else "because a transaction has been open for a long time"
            )
            log.warning(
                "source %s: slot %s holds %s of WAL on the server, %s (the limit is %s)",
                s.source,
                s.slot,
                _size(slot.held),
                "because the queue is full" if full else behind,
                units.write_size(s.max_lag),
            )
        # Use `held` and not `backlog`: a large transaction that is not accepted yet holds the WAL
        # from its beginning on.
        stays_full = self._full_checks >= FULL_CHECKS
        if stays_full and slot.held >= s.max_lag and (not s.max_spill or spill.full):
            return "end"
        if full and slot.held >= s.max_lag * 3 // 4 and not spill.active and s.max_spill:
            return "spill"
        return "on"

    def exceeded(self, slot: Slot) -> SourceDown:
        """Log the error and return it. It is raised only when the full queue has been read."""
        s = self._s
        what = (
            f"source {s.source}: slot {s.slot} holds {_size(slot.held)} of WAL, "
            f"the limit is {units.write_size(s.max_lag)}"
        )
        if s.on_limit == "drop":
            log.error("%s: dropping the slot, later changes are not read", what)
            return SourceDown(
                f"{what}, so it was dropped",
                hint=f"run `penstock sources reset {s.source} --to start` to create a new slot",
            )
        log.error("%s, and the queue stays full: reading stops", what)
        return SourceDown(
            f"{what}, and the queue stays full",
            hint="see `penstock status` for what fills the queue, raise max_lag or max_spill, or "
            'set on_limit = "drop" to drop the slot instead',
        )


def _size(count: int) -> str:
    return units.write_size(count >> 20 << 20)
