"""Values that describe the processing of an event."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from penstock.model import Event, Link, Record
from penstock.ports.broker import Delivery, Out
from penstock.rules.links import PackedLinks


class Status(enum.StrEnum):
    """Status of an event in the ledger."""

    PENDING = "pending"
    IN_FLIGHT = "in_flight"
    DELAYED = "delayed"
    WRITING = "writing"
    SUCCESS = "success"
    DEAD = "dead"
    DUPLICATE = "duplicate"


# Statuses of events that have not ended. Plain text, because stores compare it.
OPEN = frozenset({"pending", "delayed", "in_flight", "writing"})


class Accepted(enum.StrEnum):
    """Answer of the intake to an event."""

    NEW = "new"
    KNOWN = "known"  # an event with the same id was accepted before, so this is the same event
    FULL = "full"  # the topic has reached its limit of pending events


class Baseline(msgspec.Struct, frozen=True, kw_only=True):
    """Result of the last success of a URL, for conditional requests and change detection."""

    etag: str | None = None
    last_modified: str | None = None
    response_hash: str | None = None
    page: str | None = None  # id of the page in the page store (a hash)
    extractors: str = ""  # dependencies of its extraction, as in rules.dependencies
    headers: Mapping[str, str] = {}


class Admitted(msgspec.Struct, kw_only=True):
    """Decision of the admission about a delivery."""

    # "settled" if the event is a duplicate, delayed or ended, or if the message is invalid. Then
    # the delivery is settled.
    verdict: Literal["go", "settled"]
    row: int = 0  # row number of the event in the ledger, used again in End
    # Fence of the event if it was pending. Then `begin` counts the start without reading the row.
    fence: int | None = None
    # True if the URL had no claim at admission. Then `begin` tries to insert a claim before it
    # reads the owner.
    free: bool = False
    slot: float = 0.0  # time at which the host may be requested
    starts: int = 0
    attempts: int = 0  # recorded failures
    # Recorded failures by error class. Only for events with a proxy route, because failures can
    # change only a route.
    failures: Mapping[str, int] = {}
    crashes: int = 0  # crashed starts. They make the event a suspect, but do not prove the cause.
    baseline: Baseline | None = None
    page: str | None = None  # id of a page that is already fetched, and not fetched again
    page_meta: bytes = b""  # PageMeta of that page, as msgpack
    progress: bytes = b""  # of a redirect chain that was delayed


class PageMeta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A stored page without its body. It is part of `pages` messages and stored in the ledger."""

    page: str  # id of the page: BLAKE3 of the body, in hexadecimal
    url: str
    status: int  # HTTP status
    headers: dict[str, str]
    fetched_at: float
    size: int  # bytes of the body
    encoding: str = ""  # content-encoding that the stored body still has
    first: bool = False  # the URL had no success before, or was gone


class End(msgspec.Struct, kw_only=True):
    """Consequences of a handler's end. The ledger writes all of them in one transaction or none."""

    event: Event
    delivery: Delivery
    row: int
    fence: int  # fence from `begin`. An end with an older fence changes nothing (I12).
    # `absent` is a 404 or 410. Its transaction decides whether it is a success or dead.
    outcome: Literal["success", "retry", "park", "release", "dead", "handover", "writing", "absent"]
    reason: str = ""
    result: str = ""  # of a success without a page: "missing" or "gone"
    error_class: str = ""
    stage: str = ""
    detail: str = ""  # traceback or other details, for the dead letter
    fingerprint: str = ""
    until: float = 0.0  # time until which a retried or parked event is delayed
    # Cause of a delay that time alone does not end, for example "host:shop.example".
    waits_for: str = ""
    progress: bytes = b""  # of a redirect chain that is delayed
    had_progress: bool = False  # the ledger has the progress of an earlier attempt
    meta: PageMeta | None = None
    records: Sequence[Record] = ()
    links: Sequence[Link] = ()
    more_links: Sequence[PackedLinks] = ()  # the links after `links`
    extractors: str = ""  # dependencies of the extraction, as in rules.dependencies
    extracted: bool = False  # a success for which extractors ran, so the page was not unchanged
    failed_extractors: Sequence[str] = ()  # names, if the extraction failed
    response_status: int | None = None
    response_hash: str | None = None
    charged: bool = True  # a retry adds an attempt
    publish: Sequence[Out] = ()  # message for the next topic, if the outcome is handover or writing
    was_writing: bool = False  # the event had the status `writing`
    restarted: bool = False  # the event started before, so the ledger may have results of it
