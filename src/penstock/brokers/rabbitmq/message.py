"""Decodes messages received from RabbitMQ, and defines Penstock's headers."""

from __future__ import annotations

import math
from typing import Any

import msgspec
from aiormq.abc import DeliveredMessage
from pamqp.commands import Basic

from penstock.brokers.dead_copies import REASON

# Penstock's own headers. They are hidden from the readers of a topic.
KEY, AT, DUE, COUNT = "x-penstock-key", "x-penstock-at", "x-penstock-due", "x-penstock-count"
DELIVERY_COUNT = "x-delivery-count"
HIDDEN = {KEY, AT, DUE, COUNT, DELIVERY_COUNT, "x-acquired-count", "x-death"}
DEATHS = ("x-first-death-", "x-last-death-")


class HeldMessage(msgspec.Struct, kw_only=True):
    """A message that the server has delivered to a channel."""

    tag: int
    priority: int
    id: str
    key: str
    body: bytes
    headers: dict[str, str]
    at: str
    due: float
    deliveries: int
    arrived: float = 0.0


def text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes | bytearray) else str(value)


def number(value: Any, default: float = 0.0) -> float:
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        return default
    return found if math.isfinite(found) else default


def read_message(message: DeliveredMessage, priority: int) -> HeldMessage:
    """Decode a message of Penstock or another program. Never raises, even for invalid headers."""
    properties = message.header.properties
    raw: dict[str, Any] = properties.headers or {}
    headers = {
        name: text(value)
        for name, value in raw.items()
        if name not in HIDDEN and not name.startswith(DEATHS)
    }
    if raw.get("x-first-death-reason") == "delivery_limit" and REASON not in headers:
        headers[REASON] = "the server gave it up: handed out too often without an end"
    delivery = message.delivery
    assert isinstance(delivery, Basic.Deliver | Basic.GetOk)
    return HeldMessage(
        tag=delivery.delivery_tag or 0,
        priority=priority,
        id=properties.message_id or "",
        key=text(raw[KEY]) if KEY in raw else (delivery.routing_key or "").split(".", 2)[-1],
        body=bytes(message.body),
        headers=headers,
        at=text(raw.get(AT, "")),
        due=number(raw.get(DUE)),
        deliveries=1 + int(number(raw.get(COUNT))) + int(number(raw.get(DELIVERY_COUNT))),
    )
