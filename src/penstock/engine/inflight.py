"""Events that a worker holds, with the state of each one. Reads them from deliveries."""

from __future__ import annotations

import asyncio
import enum
import math
from functools import partial

import msgspec

from penstock.engine.messages import PageMessage, RecordsMessage
from penstock.engine.settings import HostKind, Stage
from penstock.errors import BadEnvelope
from penstock.model import Event, decode_event
from penstock.ports import Admitted, Cancellable, Delivery, Extracted, PageMeta, Response
from penstock.rules.identity import BadUrl, canonical_url, host_key

# Characters of an id, trace, host key, source, cause or parent. Indexes of database servers accept
# only a few times as many.
MAX_NAME = 512


class State(enum.Enum):
    """State of a held event: the step that it waits for."""

    ADMISSION = "admission"  # the decision whether it may start, and its slot
    SLOT = "slot"  # the time of its slot, with a timer
    PERMIT = "permit"  # a permit, in the queue of ready events
    HOST = "host"  # a request of its host to end, because the host is at its concurrency limit
    START = "start"  # the transaction that counts the start
    HANDLER = "handler"  # the stages of this worker, or a batch of one of them
    OUTCOME = "outcome"  # the transaction that records its end


UNSTARTED = frozenset({State.ADMISSION, State.SLOT, State.PERMIT, State.HOST, State.START})


class InflightEvent(msgspec.Struct, eq=False):
    """An event whose delivery this worker holds, from `receive` until its outcome is committed."""

    delivery: Delivery
    event: Event
    state: State = State.ADMISSION
    admitted: Admitted = msgspec.field(default_factory=partial(Admitted, verdict="go"))
    needs_request: bool = False  # False for example if a stored page is extracted
    slot: float = math.inf  # time at which the request may start, inf if it need not wait
    slot_requested: float = math.inf  # time at which the slot was requested
    timer: asyncio.TimerHandle | None = None  # of the state SLOT
    fence: int = 0  # of the counted start
    started: float = 0.0  # time of the counted start
    task: Cancellable | None = None  # request or task in progress
    meta: PageMeta | None = None
    body: bytes = b""
    response: Response | None = None
    extracted: Extracted | None = None
    depends_on: str = ""  # dependencies of `extracted`, as in rules.dependencies


def read_delivery(d: Delivery, stage: Stage, host_by: HostKind) -> InflightEvent:
    """Decode a message of the stage's topic. Raise BadEnvelope if it is not valid."""
    if stage == "fetch":
        return InflightEvent(d, _canonical_event(decode_event(d.body), host_by))
    if stage == "extract":
        page = PageMessage.read(d.body)
        item = InflightEvent(d, decode_event(page.event))
        item.meta = page.page
        return item
    message = RecordsMessage.read(d.body)
    item = InflightEvent(d, decode_event(message.event))
    item.meta = message.page
    item.extracted = Extracted(
        records=message.records, links=message.links, matched=message.matched
    ).pack_links()
    item.depends_on = message.depends_on
    return item


def _canonical_event(event: Event, host_by: HostKind) -> Event:
    """Bring an event that bypassed intake into canonical form.

    Deduplication and rate limits use that form. Raise BadEnvelope if a name is too long for an
    index or contains NUL, or if the URL cannot be fetched.
    """
    names = event.id, event.trace, event.key, event.source, event.cause, event.parent or ""
    together = "".join(names)
    if (len(together) > MAX_NAME and max(map(len, names)) > MAX_NAME) or "\0" in together:
        raise BadEnvelope(
            f"an id, trace, key, source or cause of more than {MAX_NAME} characters, or with a NUL"
        )
    try:
        url = canonical_url(event.url)
    except BadUrl as e:
        raise BadEnvelope(f"its URL cannot be fetched: {e.reason}") from e
    if url != event.url or not event.key:
        return msgspec.structs.replace(event, url=url, key=host_key(url, host_by))
    return event
