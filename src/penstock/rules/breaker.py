"""Circuit breaker: decides which host or extractor with many dead letters is paused.

Also decides whether enough hosts are paused to pause the whole topic.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from penstock.model import ErrorClass
from penstock.rules.waiting import EXTRACTOR, HOST

TOPIC_HOSTS = 5  # paused hosts with the same cause that pause the topic
LEAST_HOSTS = 2  # paused hosts that pause the topic if they are half of the active hosts


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    dead_share: float = 0.2  # share of dead events above which a host or extractor is paused
    at_least: int = 50  # dead events before a host or extractor is paused
    window: float = 60.0  # seconds
    alert_share: float = 0.02  # share of dead events above which an alert is raised


def judge(limits: Limits, ended: int, dead: int) -> Literal["open", "alert", ""]:
    """Return the action for these counts. Both are of the window, and `ended` includes the dead."""
    if dead >= limits.at_least and dead > limits.dead_share * ended:
        return "open"
    return "alert" if dead and dead > limits.alert_share * ended else ""


def blamed(stage: str, error_class: str, host: str, extractors: Sequence[str]) -> list[str]:
    """Return what a dead event counts against: its host, or extractors.

    A failed extraction, also a crash of the child, counts against the extractor that failed. If
    that is not known, it counts against all extractors of the page. Every other failure counts
    against the host, also a failure of Penstock itself: if it hits all hosts, the topic is paused.
    `not_found` is an answer about one URL and counts against nothing.
    """
    if error_class == ErrorClass.NOT_FOUND:
        return []
    if stage == "extract" and extractors:
        return [EXTRACTOR + name for name in extractors]
    return [HOST + host]


def ended_and_dead(ends: Mapping[str, int]) -> tuple[int, int]:
    """Return (ended, dead) of ends by class. The class "" is that of ends that are not dead."""
    ended = sum(ends.values())
    return ended, ended - ends.get("", 0)


def main_cause(ends: Mapping[str, int]) -> str:
    """Return the most frequent class of the dead ends, and the first in order if several are."""
    return min((kind for kind in ends if kind), key=lambda kind: (-ends[kind], kind), default="")


def pauses_topic(causes: Sequence[str], active: int) -> str:
    """Return the cause for which the topic is paused, or "".

    `causes` has the cause of each host that the breaker paused. `active` is the number of hosts
    with ends in the window, and of paused hosts.
    """
    for cause, n in sorted(Counter(causes).items(), key=lambda item: (-item[1], item[0])):
        if n >= TOPIC_HOSTS or (n >= LEAST_HOSTS and 2 * n >= active):
            return cause
    return ""
