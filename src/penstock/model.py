"""Values that are passed between modules: Event, Route, Record, Reason, Outcome, Failure.

Also the codec of events. No clock, no I/O.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec
from blake3 import blake3

from penstock.errors import BadEnvelope, NewerMessage

# Version of the envelope. A reader refuses a newer major version. It ignores the fields that a
# newer minor version has added, and keeps them if it writes the envelope again.
CODEC_VERSION = 1
CODEC_MINOR = 0
_EVENT_STEM = "penstock.request.v"
EVENT_TYPE = f"{_EVENT_STEM}{CODEC_VERSION}"


# -- events ----------------------------------------------------------------------------------------


class Priority(enum.IntEnum):
    """Priority classes. They are weighted, not strict: low messages are slow but never starve."""

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
    """Request to send, if it is more than a GET."""

    method: str = "GET"
    headers: dict[str, str] = {}
    body: bytes | None = None


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One URL to fetch, with its cause."""

    id: str
    url: str  # canonical
    key: str  # host key, for rate limits, order and partitioning
    topic: str = "requests"
    source: str = "push"
    trace: str = ""
    cause: str = ""  # the outside change: an LSN, an entry id, a parent's id
    route: Route = Route()
    priority: int = Priority.NORMAL
    depth: int = 0
    parent: str | None = None
    force: bool = False  # ignores deduplication and freshness
    window: float | None = None  # freshness window of this event, in seconds
    window_mode: str | None = None  # "delay" | "drop"
    accepted_at: float = 0.0  # time when intake queued the event, in whole milliseconds
    pipeline: str = ""  # owner of the ledger with the event. Only set on an external broker.
    ask: Ask = Ask()
    data: dict[str, Any] = {}  # payload from the source, for extractors


def mint(*cause: str) -> str:
    """Return an id of 32 hexadecimal digits. The same parts always give the same id.

    The length of each part is hashed too. So different parts never give the same input.
    """
    digest = hashlib.blake2b(digest_size=16)
    for part in cause:
        raw = part.encode("utf-8", "surrogatepass")
        digest.update(len(raw).to_bytes(8, "big") + raw)
    return digest.hexdigest()


def child_id(parent: str, extractor: str, url: str) -> str:
    """Return the id of a followed link. A replayed parent gives the same ids."""
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
    pipeline: str = ""
    ask: Ask = Ask()
    data: dict[str, Any] = {}


class _CloudEvent(msgspec.Struct, kw_only=True, omit_defaults=True):
    """CloudEvents 1.0, structured JSON. The standard requires lower-case extension attributes."""

    specversion: str
    id: str
    source: str
    type: str
    datacontenttype: str = "application/json"
    subject: str = ""
    traceid: str = ""
    priority: int = int(Priority.NORMAL)
    penstockminor: int = 0  # minor version of the envelope. The type contains the major version.
    data: _Data


class MessageHead(msgspec.Struct):
    """The version of a message, which a reader of any version can read."""

    type: str
    penstockminor: int = 0


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(_CloudEvent).decode
_decode_head = msgspec.json.Decoder(MessageHead).decode
_SOURCE_PREFIX = "/penstock/"
_NOT_READABLE = (msgspec.MsgspecError, UnicodeError, RecursionError, ValueError)


def major_version(raw: bytes, stem: str) -> int:
    """Return N if the type of a JSON message is `stem` and N, or else 0. For any bytes."""
    try:
        return _version_in(_decode_head(raw).type, stem)
    except _NOT_READABLE:
        return 0


def _version_in(kind: str, stem: str) -> int:
    number = kind.removeprefix(stem)
    return int(number) if kind.startswith(stem) and number.isdecimal() and len(number) < 9 else 0


def encode_event(e: Event) -> bytes:
    return _encode(
        _CloudEvent(
            specversion="1.0",
            id=e.id,
            source=_SOURCE_PREFIX + e.source,
            type=EVENT_TYPE,
            subject=e.url,
            traceid=e.trace,
            priority=e.priority,
            penstockminor=CODEC_MINOR,
            data=_Data(
                url=e.url,
                key=e.key,
                topic=e.topic,
                cause=e.cause,
                route=e.route,
                depth=e.depth,
                parent=e.parent,
                force=e.force,
                window=e.window,
                window_mode=e.window_mode,
                accepted_at=e.accepted_at,
                pipeline=e.pipeline,
                ask=e.ask,
                data=e.data,
            ),
        )
    )


# The objects of an envelope: their path, and the names of their fields.
ENVELOPE_LEVELS: tuple[tuple[Sequence[str], frozenset[str]], ...] = (
    ((), frozenset(_CloudEvent.__struct_fields__)),
    (("data",), frozenset(_Data.__struct_fields__)),
    (("data", "route"), frozenset(Route.__struct_fields__)),
    (("data", "ask"), frozenset(Ask.__struct_fields__)),
)


def _decode_envelope(raw: bytes) -> _CloudEvent:
    try:
        return _decode(raw)
    except _NOT_READABLE as e:
        version = major_version(raw, _EVENT_STEM)
        if version > CODEC_VERSION:
            raise NewerMessage("envelope", version, CODEC_VERSION) from e
        try:
            if version and _decode_head(raw).penstockminor > CODEC_MINOR:
                return _decode(_without_unknown_hints(raw))
        except _NOT_READABLE:
            pass
        raise BadEnvelope(f"not a CloudEvents JSON envelope: {e}") from e


def _without_unknown_hints(raw: bytes) -> bytes:
    """Remove unknown fields of route and ask, which are mistakes unless the version is newer."""
    envelope = msgspec.json.decode(raw, type=dict[str, Any])
    data = envelope.get("data")
    for (*_, name), known in ENVELOPE_LEVELS[2:]:
        if isinstance(data, dict) and isinstance(data.get(name), dict):
            data[name] = {k: v for k, v in data[name].items() if k in known}
    return _encode(envelope)


def decode_event(raw: bytes) -> Event:
    """Decode an event. Raises BadEnvelope, and no other exception, for any bytes.

    The exception is NewerMessage if a newer release wrote the envelope.
    """
    c = _decode_envelope(raw)
    if c.type != EVENT_TYPE:
        version = _version_in(c.type, _EVENT_STEM)
        if version > CODEC_VERSION:
            raise NewerMessage("envelope", version, CODEC_VERSION)
        if not version:
            raise BadEnvelope(
                f"event type {c.type!r} is not {EVENT_TYPE!r}",
                hint="correct the program that published it: its messages are not for Penstock",
            )
    if c.specversion != "1.0":
        raise BadEnvelope(f"CloudEvents specversion {c.specversion!r} is not 1.0")
    d = c.data
    if not c.id or not d.url:
        raise BadEnvelope(
            f"an event needs an id and a url; this one has no {'url' if c.id else 'id'}"
        )
    return Event(
        id=c.id,
        url=d.url,
        key=d.key,
        topic=d.topic,
        source=c.source.removeprefix(_SOURCE_PREFIX),
        trace=c.traceid,
        cause=d.cause,
        route=d.route,
        priority=c.priority,
        depth=d.depth,
        parent=d.parent,
        force=d.force,
        window=d.window,
        window_mode=d.window_mode,
        accepted_at=d.accepted_at,
        pipeline=d.pipeline,
        ask=d.ask,
        data=d.data,
    )


# -- pages and records -----------------------------------------------------------------------------


def page_id(body: bytes) -> str:
    """Return the id of a page: the hash of its body. So equal bodies are stored once."""
    return blake3(body).hexdigest()


class Follow(msgspec.Struct, frozen=True):
    """Link that an extractor asks to follow. `page.follow()` yields these."""

    url: str
    priority: int = Priority.NORMAL
    route: Route | None = None
    window: float | None = None


class Removed(msgspec.Struct, frozen=True):
    """The record with this key no longer exists: `yield Removed("A-1")`.

    If the key has several fields: `Removed({"shop": "s", "sku": "A-1"})`. Without a key, it is the
    record whose key is the page's URL.
    """

    key: Any = None


REMOVED = bytes(16)  # the hash of a removed record


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One extracted row. The child process encodes it, and no other process decodes it.

    Sinks get the encoded fields.
    """

    extractor: str
    version: int
    key: str
    index: int  # position among the page's outputs. (event, index) identifies the row.
    fields: bytes  # JSON object. A removed record has only the key fields.
    hash: bytes
    deleted: bool = False


class Link(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Followed link, checked by the child process, for intake. Its URL is canonical."""

    url: str
    extractor: str
    priority: int = Priority.NORMAL
    route: Route | None = None
    window: float | None = None


# -- outcomes of a delivery ------------------------------------------------------------------------


class ErrorClass(enum.StrEnum):
    THROTTLED = "throttled"
    TRANSIENT = "transient"
    BLOCKED = "blocked"
    PERMANENT = "permanent"
    NOT_FOUND = "not_found"  # 404 or 410 of a URL without an earlier success
    POISON = "poison"
    OURS = "ours"


class Reason(enum.StrEnum):
    """Codes of the results of events, for programs.

    `rules.reasons` makes the sentence of a code, and finds the code of a stored sentence.
    """

    # A success
    UNCHANGED = "unchanged"
    EMPTY = "empty"  # an extractor matches the page, and yields nothing
    UNMATCHED = "unmatched"  # no extractor matches the page
    MISSING = "missing"  # a known URL answered 404, and not often enough to be gone
    GONE = "gone"  # a known URL no longer exists, and its records are removed
    # Not started, or started again
    DUPLICATE = "duplicate"
    WINDOW = "window"  # fetched less than its freshness window ago
    SLOT = "slot"  # waits for a slot of its host
    SLOT_FAR = "slot_far"  # a redirect needs a slot that is too far away
    DUE = "due"
    SHUTDOWN = "shutdown"
    WORKER_GONE = "worker_gone"
    REPUBLISHED = "republished"
    REDRIVEN = "redriven"
    PROMOTED = "promoted"
    NEWER_DATA = "newer_data"
    # An HTTP response
    HTTP = "http"
    RETRY_AFTER = "retry_after"
    EMPTY_BODY = "empty_body"
    CHALLENGE = "challenge"  # with a status of success
    CHALLENGE_ERROR = "challenge_error"  # with a status of failure
    SOFT_404 = "soft_404"
    UNASKED_304 = "unasked_304"
    NOT_FINAL = "not_final"
    NO_LOCATION = "no_location"
    # A libcurl error
    TRANSFER = "transfer"
    NAME_LOOKUP = "name_lookup"
    CONNECTION = "connection"
    TLS = "tls"
    # A limit or rule of Penstock
    HEADERS = "headers"
    CUT = "cut"
    BODY = "body"
    DECODED = "decoded"
    CODINGS = "codings"
    CODING = "coding"
    CONNECT = "connect"
    FIRST_BYTE = "first_byte"
    TOTAL = "total"
    RATE = "rate"
    SLOW = "slow"  # while other domains wait for permits
    BAD_URL = "bad_url"
    BAD_REQUEST = "bad_request"
    FORBIDDEN = "forbidden"
    ROBOTS = "robots"
    ROBOTS_LATER = "robots_later"
    REDIRECTS = "redirects"
    LOOP = "loop"
    DOWNGRADE = "downgrade"
    NOWHERE = "nowhere"
    HELD = "held"
    PROXY = "proxy"
    BAD_PROXY = "bad_proxy"
    SOCKET = "socket"
    CLOSED = "closed"
    # Proxy pools
    NO_POOL = "no_pool"  # no configured pool serves the route
    POOL_COOLING = "pool_cooling"
    POOL_EMPTY = "pool_empty"
    POOL_FAILED = "pool_failed"
    # Routes that cannot be served now
    NO_ROUTE = "no_route"  # no live worker has a pool for the route
    OTHER_WORKER = "other_worker"  # another live worker has a pool for the route
    RENDER = "render"  # render=true, and there is no renderer
    # Extraction
    KILLED = "killed"
    EXITED = "exited"
    TIME_LIMIT = "time_limit"
    MEMORY = "memory"
    OUTPUT = "output"
    PIPE = "pipe"  # user code wrote to the sandbox's pipe
    DESCRIPTORS = "descriptors"  # user code closed the sandbox's descriptors
    CANCELLED = "cancelled"
    NO_CHILD = "no_child"
    ZYGOTE = "zygote"
    SANDBOX_CLOSED = "sandbox_closed"
    NOT_ENCODABLE = "not_encodable"
    EMPTY_KEY = "empty_key"
    BAD_LINK = "bad_link"  # an extractor follows a link with a wrong priority, route or window
    NO_SINK = "no_sink"  # a record of an extractor that neither a sink nor a hook takes
    EXTRACTION = "extraction"  # not available
    # The worker, the store and the operator
    NEWER = "newer"  # the message was written by a newer release
    WATCHDOG = "watchdog"
    UNRECORDED = "unrecorded"  # the ledger did not accept the event's end
    TOO_OLD = "too_old"
    PAGE_GONE = "page_gone"
    MESSAGE_SIZE = "message_size"
    PURGED = "purged"
    BREAKER = "breaker"  # the circuit breaker paused a host, an extractor or a topic
    BREAKER_HOSTS = (
        "breaker_hosts"  # the breaker paused the topic, because it had paused many hosts
    )
    HOST_PAUSED = "host_paused"
    BUDGET = "budget"  # a budget of pages or bytes is used up
    EXTRACTOR_PAUSED = "extractor_paused"
    # Intake
    ENVELOPE = "envelope"
    REFUSED = "refused"  # a finding does not make a valid event
    HOOK = "hook"  # the hook of a source raised an exception
    # Text of user code, or text that this release does not know
    OTHER = "other"


class Failure(Exception):
    """Failure of a stage that is expected. Any other exception is a bug.

    A bug is retried as transient, and its traceback is stored. `reason` is the sentence that is
    stored, and `code` is its meaning for programs. `waits_for` names what the event waits for if
    time alone does not help, for example "host:shop.example". Then the event is delayed, and no
    attempt is charged.
    """

    def __init__(
        self,
        kind: ErrorClass,
        reason: str,
        *,
        code: Reason = Reason.OTHER,
        after: float | None = None,
        status: int | None = None,
        detail: str = "",
        waits_for: str = "",
    ) -> None:
        super().__init__(reason)
        self.kind, self.reason, self.code = kind, reason, code
        self.after, self.status, self.detail = after, status, detail
        self.waits_for = waits_for
        self.progress = b""  # of a redirect chain that was delayed, for the next attempt


class Ack(msgspec.Struct, frozen=True, tag=True):
    pass


class Retry(msgspec.Struct, frozen=True, tag=True):
    delay: float
    reason: str
    # This worker can never process the message. A broker that chooses the worker by the message's
    # key should choose another worker.
    elsewhere: bool = False


class Release(msgspec.Struct, frozen=True, tag=True):
    """Make the message ready for another worker now (shutdown, pause). Charges no attempt."""


class Dead(msgspec.Struct, frozen=True, tag=True):
    reason: str


Outcome: TypeAlias = Ack | Retry | Release | Dead
