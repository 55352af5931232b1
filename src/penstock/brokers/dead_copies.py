"""Copies of dead deliveries in the topic `.dead`, which other tools read."""

from __future__ import annotations

from penstock.ports import Delivery, Out

DEAD = ".dead"  # suffix of the topic
REASON = "penstock-reason"


def dead_headers(d: Delivery, reason: str) -> dict[str, str]:
    return {**d.headers, REASON: reason, "penstock-position": str(d.position)}


def dead_copy(d: Delivery, reason: str) -> Out:
    return Out(
        topic=d.topic + DEAD, id=d.id, key=d.key, body=d.body, headers=dead_headers(d, reason)
    )
