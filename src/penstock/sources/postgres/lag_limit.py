"""How much log a slot may hold on its server, and what is done about it: a warning, a file, the
end. Decides; others read and write.
"""

from __future__ import annotations

import logging
from typing import Literal

from penstock.config import units
from penstock.errors import SourceDown
from penstock.sources.postgres.settings import CdcSettings
from penstock.sources.postgres.slot import Slot
from penstock.sources.postgres.spill import Spill

log = logging.getLogger("penstock")


class Guard:
    """Half of the limit: a warning. Three quarters, and the queue is full: into the file. All of
    it, the file full too, and nobody takes anything: the end.
    """

    def __init__(self, s: CdcSettings) -> None:
        self._s = s
        self._warned = False

    def judge(
        self, slot: Slot, spill: Spill, *, full: bool, stays: bool
    ) -> Literal["on", "spill", "end"]:
        """`full`: what was read waits to be taken. Only then is it in our hands what the slot
        holds. `stays`: for longer than a moment, which it is whenever the reader is the quicker
        one.
        """
        s = self._s
        if slot.held < s.max_lag // 2:
            self._warned = False
        elif not self._warned:
            self._warned = True
            behind = (
                "because its reader is behind"
                if slot.backlog >= slot.held // 2
                else "for a transaction that has been open for long"
            )
            log.warning(
                "source %s: slot %s holds %s of WAL on the server, %s; the limit is %s",
                s.source,
                s.slot,
                _size(slot.held),
                "because the queue is full" if full else behind,
                units.write_size(s.max_lag),
            )
        # Not what is behind the last confirmation: one large transaction that is not accepted holds
        # the log from its beginning on.
        if stays and slot.held >= s.max_lag and (not s.max_spill or spill.full):
            return "end"
        if full and slot.held >= s.max_lag * 3 // 4 and not spill.active and s.max_spill:
            return "spill"
        return "on"

    def ended(self, slot: Slot) -> SourceDown:
        """Said loudly, and raised when there is somebody to hear it: a full queue listens to
        nobody.
        """
        s = self._s
        what = f"source {s.source}: slot {s.slot} holds {_size(slot.held)} of WAL, the limit is {units.write_size(s.max_lag)}"
        if s.on_limit == "drop":
            log.error("%s; it is dropped, and what changes from now on is not seen", what)
            return SourceDown(
                f"{what}; it was dropped",
                hint=f"penstock sources reset {s.source} --to start makes a new one",
            )
        log.error("%s, and the queue stays full; nothing more is read", what)
        return SourceDown(
            f"{what}, and the queue stays full",
            hint='let work be done (penstock status), raise max_lag or max_spill, or on_limit = "drop" to give up the slot instead',
        )


def _size(count: int) -> str:
    return units.write_size(count >> 20 << 20)
