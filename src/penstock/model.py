"""The values that travel: Event, Route, Record, Outcome, Failure, and the one codec. No clock, no
I/O.
"""

from __future__ import annotations

import enum
import hashlib
from typing import Any, TypeAlias

import msgspec
from blake3 import blake3

from penstock.errors import BadEnvelope

CODEC_VERSION = 1
EVENT_TYPE = f"penstock.request.v{CODEC_VERSION}"


# -- events ----------------------------------------------------------------------------------------


class Priority(enum.IntEnum):
    """The three ordinary classes. Weighted, never strict: low is slow, not starved."""

    HIGH = 0
    NORMAL = 1
    LOW = 2

    @classmethod
    def named(cls, name: str) -> Priority:
        return cls[name.upper()]


class Route(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Hints put on the event when it is published and read when it is fetched."""

    geo: str | None = None
    pool: str | None = None
    account: str | None = None
    render: bool = False


class Ask(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What to send, where it is more than a GET."""

    method: str = "GET"
    headers: dict[str, str] = {}
    body: bytes | None = None


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """This URL, for this reason."""

    id: str
    url: str  # canonical
    key: str  # host key: politeness, order, partitioning
    topic: str = "requests"
    source: str = "push"
    trace: str = ""
    cause: str = ""  # what happened outside: an LSN, an entry id, a parent's id
    route: Route = Route()
    priority: int = Priority.NORMAL
    depth: int = 0
    parent: str | None = None
    force: bool = False  # bypasses dedup and freshness
    window: float | None = None  # freshness window of its own, seconds
    window_mode: str | None = None  # "delay" | "drop"
    accepted_at: float = 0.0  # the millisecond it was queued; set by intake
    ask: Ask = Ask()
    data: dict[str, Any] = {}  # the source's own payload, for extractors


def mint(*cause: str) -> str:
    """Same cause, same id: 32 hex digits of the parts, unambiguous whatever they contain."""
    digest = hashlib.blake2b(digest_size=16)
    for part in cause:
        raw = part.encode("utf-8", "surrogatepass")
        digest.update(len(raw).to_bytes(8, "big") + raw)
    return digest.hexdigest()


def child_id(parent: str, extractor: str, url: str) -> str:
    """A replayed parent yields the same children, so nothing downstream sees a new id."""
    return mint("child", parent, extractor, url)


class _Data(msgspec.Struct, kw_only=True, omit_defaults=True):
    url: str
    key: str
    topic: str = "requests"
    cause: str = ""
    route: Route = Route()
    depth: int = 0
    parent: str | None = None
    force: bool = False
    window: float | None = None
    window_mode: str | None = None
    accepted_at: float = 0.0
    ask: Ask = Ask()
    data: dict[str, Any] = {}


class _CloudEvent(msgspec.Struct, kw_only=True, omit_defaults=True):
    """CloudEvents 1.0, structured JSON; extension attributes are lower-case by that standard."""

    specversion: str
    id: str
    source: str
    type: str
    datacontenttype: str = "application/json"
    subject: str = ""
    traceid: str = ""
    priority: int = int(Priority.NORMAL)
    data: _Data


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(_CloudEvent).decode
_SOURCE_PREFIX = "/penstock/"


def encode_event(e: Event) -> bytes:
    return _encode(
        _CloudEvent(
            specversion="1.0", id=e.id, source=_SOURCE_PREFIX + e.source, type=EVENT_TYPE, subject=e.url, traceid=e.trace, priority=e.priority,
            data=_Data(
                url=e.url, key=e.key, topic=e.topic, cause=e.cause, route=e.route, depth=e.depth, parent=e.parent, force=e.force,
                window=e.window, window_mode=e.window_mode, accepted_at=e.accepted_at, ask=e.ask, data=e.data,
            ),
        )
    )  # fmt: skip


def decode_event(raw: bytes) -> Event:
    """Raises BadEnvelope, and nothing else, for any bytes."""
    try:
        c = _decode(raw)
    except (msgspec.MsgspecError, UnicodeError, RecursionError, ValueError) as e:
        raise BadEnvelope(f"not a CloudEvents JSON envelope: {e}") from e
    if c.specversion != "1.0":
        raise BadEnvelope(f"CloudEvents specversion {c.specversion!r} is not 1.0")
    if c.type != EVENT_TYPE:
        raise BadEnvelope(
            f"event type {c.type!r} is not {EVENT_TYPE!r}",
            hint="run the version of Penstock that wrote it, or upgrade this one",
        )
    d = c.data
    if not c.id or not d.url:
        raise BadEnvelope(
            f"an event needs an id and a url; this one has no {'url' if c.id else 'id'}"
        )
    return Event(
        id=c.id, url=d.url, key=d.key, topic=d.topic, source=c.source.removeprefix(_SOURCE_PREFIX), trace=c.traceid, cause=d.cause, route=d.route,
        priority=c.priority, depth=d.depth, parent=d.parent, force=d.force, window=d.window, window_mode=d.window_mode, accepted_at=d.accepted_at,
        ask=d.ask, data=d.data,
    )  # fmt: skip


# -- pages and records -----------------------------------------------------------------------------


def page_id(body: bytes) -> str:
    """A page's name is its content: stored once, however often it is fetched."""
    return blake3(body).hexdigest()


class Follow(msgspec.Struct, frozen=True):
    """A link an extractor wants followed; `page.follow()` yields these."""

    url: str
    priority: int = Priority.NORMAL
    route: Route | None = None
    window: float | None = None


class Removed(msgspec.Struct, frozen=True):
    """There is no such record any more: `yield Removed("A-1")`, or `Removed({"shop": "s", "sku":
    "A-1"})` where several fields are the key.

    Nothing: the record that goes by the page's URL.
    """

    key: Any = None


REMOVED = bytes(16)  # the hash of a record that is not there


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One extracted row, encoded where it was made (in the child), so nobody decodes it on the way
    to a sink.
    """

    extractor: str
    version: int
    key: str
    index: int  # position among the page's outputs: (event, index) is the line's identity
    fields: bytes  # a JSON object; of one that is removed, no more than its key
    hash: bytes
    deleted: bool = False


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """A followed link on its way to intake: canonical URL, host key and id already known."""

    url: str
    extractor: str
    priority: int = Priority.NORMAL
    route: Route | None = None
    window: float | None = None


# -- what became of a delivery ---------------------------------------------------------------------


class ErrorClass(enum.StrEnum):
    THROTTLED = "throttled"
    TRANSIENT = "transient"
    BLOCKED = "blocked"
    PERMANENT = "permanent"
    POISON = "poison"
    OURS = "ours"


class Failure(Exception):
    """Raised on purpose by a stage. Any other exception is a bug: retried as transient, its
    traceback kept.
    """

    def __init__(
        self,
        kind: ErrorClass,
        reason: str,
        *,
        after: float | None = None,
        status: int | None = None,
        detail: str = "",
    ) -> None:
        super().__init__(reason)
        self.kind, self.reason, self.after, self.status, self.detail = (
            kind,
            reason,
            after,
            status,
            detail,
        )


class Ack(msgspec.Struct, frozen=True, tag=True):
    pass


class Retry(msgspec.Struct, frozen=True, tag=True):
    delay: float
    reason: str


class Release(msgspec.Struct, frozen=True, tag=True):
    """Give back at once (shutdown, pause). Costs no attempt."""


class Dead(msgspec.Struct, frozen=True, tag=True):
    reason: str


Outcome: TypeAlias = Ack | Retry | Release | Dead
