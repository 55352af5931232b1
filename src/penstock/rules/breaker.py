"""Circuit breaker: decides if a topic with many dead letters is paused or only raises an alert."""

from __future__ import annotations

from typing import Literal

import msgspec


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    dead_share: float = 0.2  # share of dead events above which the topic is paused
    at_least: int = 50  # dead events, below which the topic is not paused
    window: float = 60.0  # seconds
    alert_share: float = 0.02  # share of dead events above which an alert is raised


def judge(limits: Limits, ended: int, dead: int) -> Literal["open", "alert", ""]:
    """Return the action for these counts. Both are of the window, and `ended` includes the dead."""
    if dead >= limits.at_least and dead > limits.dead_share * ended:
        return "open"
    return "alert" if dead and dead > limits.alert_share * ended else ""
