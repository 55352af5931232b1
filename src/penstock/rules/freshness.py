"""Who may fetch a URL now: duplicates, the freshness window, and the trailing event that is delayed
rather than dropped.
"""

from __future__ import annotations

import msgspec


class Claim(msgspec.Struct, frozen=True):
    """The right to a URL. `began` is 0 until the owner's GET begins, and again while it waits for a
    retry.
    """

    owner: str
    began: float
    ended: bool
    next: str | None = None  # the one event delayed to the window's end


class Take(msgspec.Struct, frozen=True):
    pass


class Duplicate(msgspec.Struct, frozen=True):
    of: str


class Delay(msgspec.Struct, frozen=True):
    until: float
    becomes_next: bool


Verdict = Take | Duplicate | Delay
BUSY_AGAIN = 1.0  # the owner is still at it beyond the window: look again


def decide(
    claim: Claim | None,
    event_id: str,
    *,
    accepted: float,
    now: float,
    window: float,
    settle: float,
    drop: bool = False,
) -> Verdict:
    """An event accepted before the owner's GET (or within `settle` after it) learns nothing new
    from another GET.
    """
    if claim is None or claim.owner == event_id:
        return Take()
    if not claim.began:  # the owner has not asked yet, or will ask again
        return Duplicate(claim.owner)
    ends = claim.began + window
    if claim.next == event_id:
        if not claim.ended:
            return Delay(max(ends, now + BUSY_AGAIN), becomes_next=False)
        return Take() if now >= ends else Delay(ends, becomes_next=False)
    if accepted <= claim.began + settle:
        return Duplicate(claim.owner)
    if claim.ended and now >= ends:
        return Duplicate(claim.next) if claim.next else Take()
    if drop:
        return Duplicate(claim.owner)
    if claim.next:
        return Duplicate(claim.next)
    return Delay(ends if now < ends else now + BUSY_AGAIN, becomes_next=True)
