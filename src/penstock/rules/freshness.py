"""Decides which event may fetch a URL now: duplicates, the freshness window and trailing events.

A trailing event came after the last GET. It is delayed to the end of the window, not dropped.
"""

from __future__ import annotations

import msgspec


class Claim(msgspec.Struct, frozen=True):
    """The right to fetch a URL. `began` is the time of the owner's GET.

    It is 0 before that GET, and again while the owner waits for a retry.
    """

    owner: str
    began: float
    ended: bool
    next: str | None = None  # the event that is delayed to the end of the window
    extractors: str = ""  # dependencies of the extraction of an ended owner


class Take(msgspec.Struct, frozen=True):
    pass


class Duplicate(msgspec.Struct, frozen=True):
    of: str


class Delay(msgspec.Struct, frozen=True):
    until: float
    becomes_next: bool


Verdict = Take | Duplicate | Delay
BUSY_RECHECK_DELAY = 1.0  # seconds until the next check if the owner runs beyond the window


def decide(
    claim: Claim | None,
    event_id: str,
    *,
    accepted: float,
    now: float,
    window: float,
    settle: float,
    drop: bool = False,
    other_data: bool = False,
    removed: bool = False,
) -> Verdict:
    """Decide if the event takes the claim, is a duplicate, or is delayed.

    An event accepted before the owner's GET, or within `settle` seconds after it, is a duplicate:
    another GET would return nothing new for it. It is not a duplicate if the extraction of the
    owner has read event data that differs from the event's own (`other_data`). An event that
    reports a removal (`removed`) is a duplicate only if the owner has not ended, so that its end
    considers the report, and if the report came before the GET.
    """
    if claim is None or claim.owner == event_id:
        return Take()
    if not claim.began:  # the owner's request is not sent yet, or will be repeated
        return Duplicate(claim.owner)
    ends = claim.began + window
    if claim.next == event_id:
        if not claim.ended:
            return Delay(max(ends, now + BUSY_RECHECK_DELAY), becomes_next=False)
        return Take() if now >= ends else Delay(ends, becomes_next=False)
    if removed:
        covered = accepted <= claim.began and not claim.ended
    else:
        covered = accepted <= claim.began + settle and not other_data
    if covered:
        return Duplicate(claim.owner)
    if claim.ended and now >= ends:
        return Duplicate(claim.next) if claim.next else Take()
    if drop:
        return Duplicate(claim.owner)
    if claim.next:
        return Duplicate(claim.next)
    return Delay(ends if now < ends else now + BUSY_RECHECK_DELAY, becomes_next=True)
