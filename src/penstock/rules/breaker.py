"""When a topic that dead-letters everything is paused, and when it is only worth an alert."""

from __future__ import annotations

from typing import Literal

import msgspec


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    dead_share: float = 0.2
    at_least: int = 50
    window: float = 60.0
    alert_share: float = 0.02


def judge(limits: Limits, ended: int, dead: int) -> Literal["open", "alert", ""]:
    """`ended` includes the dead, both within the window."""
    if dead >= limits.at_least and dead > limits.dead_share * ended:
        return "open"
    return "alert" if dead and dead > limits.alert_share * ended else ""
