"""Claims on URLs."""

from __future__ import annotations

import msgspec


class Holder(msgspec.Struct, frozen=True):
    """Who has the claim on a URL: the event that owns it, the last success before that, the one
    event delayed to the window's end.
    """

    owner: str
    good: str | None
    next: str | None
