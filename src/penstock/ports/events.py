"""Values that describe an event on its way through the ledger."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from penstock.model import Event, Link, Record
from penstock.ports.broker import Delivery, Out


class Status(enum.StrEnum):
    PENDING = "pending"
    IN_FLIGHT = "in_flight"
    DELAYED = "delayed"
    WRITING = "writing"
    SUCCESS = "success"
    DEAD = "dead"
    DUPLICATE = "duplicate"


class Accepted(enum.StrEnum):
    NEW = "new"
    KNOWN = "known"  # the same id was accepted before: one event
    FULL = "full"


class Baseline(msgspec.Struct, frozen=True, kw_only=True):
    """What the last success of a URL left behind: for conditional requests and change detection."""

    etag: str | None = None
    last_modified: str | None = None
    response_hash: str | None = None
    page: str | None = None  # page id (hash) in the page store
    extractors: str = ""  # "name@version,…" that made its records


class Admitted(msgspec.Struct, kw_only=True):
    """Answer of the books to a delivery that just arrived."""

    verdict: Literal[
        "go", "settled"
    ]  # settled: duplicate, delayed, already ended; nothing more to do
    row: int = 0  # the ledger's own number of the event: End gives it back
    fence: int | None = (
        None  # where it was pending: then begin need not look again before it counts the start
    )
    # nobody had claimed its URL: begin tries to take the claim before it looks whose it is
    free: bool = False
    slot: float = 0.0  # when its host may be asked
    starts: int = 0
    attempts: int = 0  # recorded failures
    failures: Mapping[
        str, int
    ] = {}  # the same by error class; only for events with a route, since only a route can change
    crashes: int = 0  # starts that never ended: makes a suspect, not a culprit
    baseline: Baseline | None = None
    page: str | None = None  # the ledger knows the page already: do not fetch again
    page_meta: bytes = b""


class PageMeta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A stored page, apart from its bytes; travels on `pages` and lies in the ledger."""

    page: str  # its id: BLAKE3 of the body, hex
    url: str
    status: int
    headers: dict[str, str]
    fetched_at: float
    size: int
    encoding: str = ""  # content-encoding the stored bytes still have


class End(msgspec.Struct, kw_only=True):
    """Everything that becomes true when a handler ends; the books write it in one transaction or
    not at all.
    """

    event: Event
    delivery: Delivery
    row: int
    fence: int  # from begin; an older one changes nothing (I12)
    outcome: Literal["success", "retry", "park", "release", "dead", "handover", "writing"]
    reason: str = ""
    error_class: str = ""
    stage: str = ""
    detail: str = ""  # traceback and the like, for the dead letter
    fingerprint: str = ""
    until: float = 0.0  # retry, park
    meta: PageMeta | None = None
    records: Sequence[Record] = ()
    links: Sequence[Link] = ()
    extractors: str = ""
    response_status: int | None = None
    response_hash: str | None = None
    charged: bool = True  # retry that spends the budget
    publish: Sequence[Out] = ()  # handover, writing: the next topic's message
    was_writing: bool = False
    restarted: bool = False  # not its first start: something may have been noted for it before
