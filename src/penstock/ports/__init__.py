"""Every seam of Penstock, its contract in the docstring. No behaviour lives here."""

from __future__ import annotations

import enum
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, runtime_checkable

import msgspec

from penstock.model import Event, Link, Outcome, Record

T = TypeVar("T")

# -- time ------------------------------------------------------------------------------------------


class Clock(Protocol):
    """Passed in everywhere, so that the whole pipeline also runs under a simulated one."""

    def now(self) -> float:
        """Seconds since the epoch; what the fleet agrees on (leases, slots, windows)."""

    async def sleep(self, seconds: float) -> None: ...


# -- the broker ------------------------------------------------------------------------------------


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a broker can do, as data; checked when the configuration is read, never silently
    downgraded.
    """

    order_per_key: Literal["native", "emulated", "none"]
    strict_priority: Literal["native", "emulated", "none"]
    delay: Literal["native", "emulated", "none"]
    replay: bool
    bounded: bool  # can answer `full` itself
    counts_deliveries: bool
    hold_keys: (
        bool  # can keep a host's work back until its slot, so it takes no place in the window
    )
    exact_stats: bool
    transactional: bool  # settle, publish and the ledger may share one transaction
    lease: Literal["time", "connection"] = (
        # what ends it: the clock, or the death of the connection or membership that holds it
        "time"
    )
    # a key with much work does not keep others waiting even where nobody sets per_key; else the
    # order of publication decides
    fair_keys: bool = True
    max_body: int | None = (
        None  # bytes that it always takes, whatever they are; None: more than we ever send
    )


class TopicSpec(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    groups: tuple[str, ...] = ("main",)
    ordered: bool = False  # one event of a key at a time, in the order of publication
    max_depth: int | None = None  # publish answers `full` beyond it
    retention: float = 24 * 3600.0  # history kept for replay after every group has settled


class Out(msgspec.Struct, frozen=True, kw_only=True):
    """What a producer hands over."""

    topic: str
    id: str
    key: str
    body: bytes
    headers: dict[str, str] = {}
    priority: int = 1
    not_before: float = 0.0


class Published(enum.StrEnum):
    OK = "ok"
    FULL = "full"
    FAILED = "failed"
    UNKNOWN = "unknown"  # it may or may not be there; publish again with the same id


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """An event as a broker handed it out. Lives in one process; must be settled."""

    topic: str
    group: str
    id: str
    key: str
    body: bytes
    headers: dict[str, str] = {}
    # audit and replay; no two deliveries of one subscription that are out at the same time have the
    # same
    position: int
    token: int  # fencing: a settle with an old token touches nothing
    deliveries: int  # times handed out, crashes included; not guilt
    priority: int = 1


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    ready: int
    delayed: int
    in_flight: int
    dead: int
    oldest_age: float | None
    exact: bool


class Subscription(Protocol):
    async def receive(
        self, limit: int, wait: float, *, per_key: int | None = None
    ) -> Sequence[Delivery]:
        """At most `limit`, possibly none after `wait` seconds; at most `per_key` of one key. Never
        raises for "nothing there".
        """

    async def settle(self, items: Sequence[tuple[Delivery, Outcome]]) -> Sequence[bool]:
        """In any order, late, or twice; durable when it returns. False: the lease was lost, nothing
        was touched. `Retry` and `Dead` never lose: where they cannot be atomic, publish with
        confirmation first, then ack, same id.
        """

    async def extend(self, deliveries: Sequence[Delivery], seconds: float) -> Sequence[bool]:
        """Still at work: the lease now ends `seconds` from now. False: it was lost already."""

    async def hold(self, until: Mapping[str, float]) -> None:
        """Hand out nothing of these keys before these times. A no-op where the broker cannot
        (caps.hold_keys).
        """

    async def close(self) -> None: ...


class Broker(Protocol):
    caps: Capabilities

    async def ensure(self, topology: Sequence[TopicSpec]) -> Sequence[str]:
        """Declare, idempotently. Returns drift in sentences; never changes what exists silently."""

    async def publish(self, batch: Sequence[Out]) -> Sequence[Published]:
        """One answer per message, durable when it is `ok`. The same id may be published twice
        (after `unknown`).
        """

    def subscribe(self, topic: str, group: str, *, owner: str, lease: float) -> Subscription: ...

    async def stats(self, topic: str, group: str) -> Stats: ...

    async def peek(self, topic: str, limit: int) -> Sequence[Out]:
        """What waits, oldest first, at most `limit`; nothing is consumed, counted or moved by
        looking.
        """

    async def purge(self, topic: str) -> int:
        """Remove what waits, for every group; what is in flight may be kept. Returns how many (an
        estimate where stats are).
        """

    async def replay(self, topic: str, group: str, *, since: float) -> int:
        """Hand everything published since then to `group` again. Only with caps.replay. Returns how
        many.
        """

    async def close(self) -> None: ...


class QueueAudit(msgspec.Struct, frozen=True, kw_only=True):
    """What a broker in the ledger's own store says about itself, counted over whole tables; for
    doctor.
    """

    unqueued: list[str]  # the first few open events that no default group holds
    unqueued_count: int
    lingering_count: int  # queued events that have ended; acked when they are handed out
    groups: list[
        tuple[str, str, tuple[int, int, int], tuple[int, int, int]]
    ]  # topic, group, noted and counted (ready, leased, delayed)
    expired: int  # leases that ran out and were not taken back


# -- the books -------------------------------------------------------------------------------------


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


class Holder(msgspec.Struct, frozen=True):
    """Who has the claim on a URL: the event that owns it, the last success before that, the one
    event delayed to the window's end.
    """

    owner: str
    good: str | None
    next: str | None


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


# -- stores ----------------------------------------------------------------------------------------


class Store(Protocol):
    """A transactional domain. Adapters that share one may commit together."""

    async def write(self, work: Callable[[Any], T], *, durable: bool = True) -> T:
        """Run `work(tx)` in a transaction shared with whoever else writes now (group commit).
        Returns after commit. `durable=False` may be forgotten by a power cut (never by a killed
        process). Raises StoreUnavailable; then nothing was written.
        """

    async def read(self, work: Callable[[Any], T]) -> T: ...

    async def close(self) -> None: ...


class StoreFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What this machine gives a store that lies in a file."""

    sqlite: tuple[int, ...]  # its version
    wal_reset_bug: bool
    file_system: str  # "" where nobody knows
    network: bool  # that file system is on another machine


class PageStore(Protocol):
    """Raw responses, content-addressed, compressed, stored once. Bytes first, then the row that
    names them, in the books' transaction. The `_in` methods are given the ledger's transaction,
    wherever the bytes lie.
    """

    remote: bool  # the bytes go over a network

    async def start(self) -> None:
        """Only where `remote`, before the first page: raises Unreachable where pages could not be
        stored and read.
        """

    def stage(self, pages: Iterable[tuple[str, bytes]]) -> Any:
        """Write what is new, of (id, body). Nobody can find it yet, and a crash now leaves nothing
        visible. Raises StoreUnavailable.
        """

    async def send(self, staged: Any) -> None:
        """The bytes are there, and durable, when it returns; before the books' transaction, which
        nobody should hold open for that long. Raises StoreUnavailable.
        """

    def index_in(self, tx: Any, staged: Any) -> Sequence[str]:
        """Make staged bytes durable and findable, inside the store's transaction. Returns ids that
        were taken for stored but are gone: stage them again.
        """

    def forget(self, staged: Any) -> None:
        """That transaction failed."""

    async def get(self, page: str) -> bytes | None:
        """The body as it was decoded off the wire, unchanged; None where retention took it."""

    def sizes_in(self, tx: Any, pages: Sequence[str]) -> Mapping[str, int]:
        """Of these, the ones that are stored, with the sizes of their bodies."""

    def totals_in(self, tx: Any) -> tuple[int, int]:
        """(pages stored, bytes they take)."""

    def problems_in(self, tx: Any) -> Sequence[str]:
        """What is wrong with the place they lie in, in sentences; [] is good. For doctor."""


# -- sinks -----------------------------------------------------------------------------------------


class Row(msgspec.Struct, frozen=True):
    """One line of a sink's outbox: its number, and the record as a JSON object with `_penstock`."""

    n: int
    key: str
    body: bytes
    order: int  # acceptance order of its event: a keyed sink never goes back


class Reopen(OSError):
    """Nothing was written; the target is not in the noted state any more (moved, rewritten). Open
    it again and write then.
    """


class Sink(Protocol):
    """Where records go; writing one twice leaves one. Fed in order by one flusher that holds its
    lock.
    """

    name: str
    # what the last open found that somebody should know ("" if nothing): a file that was replaced,
    # cut or edited
    notice: str

    def open(self, position: int, mark: str) -> str:
        """Bring the target to exactly the state noted after row `position` (truncate to the offset
        in `mark`). Blocking; may be called again. Returns the mark of the state it is in now; where
        that is another one, it must be noted before anything is written.
        """

    def write(self, rows: Sequence[Row]) -> str:
        """Append or upsert all rows, durable when it returns; returns the new mark (a byte offset,
        …). Blocking. Raises OSError or StoreUnavailable for an outage of the target: the rows stay
        in the outbox and are tried again.
        """

    def close(self) -> None: ...


@runtime_checkable
class FileSink(Sink, Protocol):
    """A sink whose target is a file that can be cut. On several machines these are several files,
    and their marks are kept side by side in one.
    """

    def restore(self, mark: str) -> None:
        """While it is not open: cut a file that is there to what is noted of it. Makes none, and
        touches none that `mark` does not know.
        """


@runtime_checkable
class TableSink(Sink, Protocol):
    """A sink whose table may lie in a database that is also a store: then it is written in the
    books' transaction, and needs no outbox.
    """

    def shares(self, url: str) -> bool:
        """Is this store's database the table's own?"""

    def prepare_in(self, tx: Any) -> None:
        """Before the first `write_in`. Raises ConfigError: the table is somebody else's."""

    def write_in(self, tx: Any, rows: Sequence[Row]) -> None:
        """As `write`, in the caller's transaction."""


# -- fetching --------------------------------------------------------------------------------------


class Hop(msgspec.Struct, frozen=True, kw_only=True):
    url: str
    status: int
    peer: str = ""
    seconds: float = 0.0


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """One exchange, no redirect followed. `body` is decoded; header names are lower case."""

    url: str
    status: int
    headers: dict[str, str]
    body: bytes
    peer: str = ""  # ip:port that was dialled
    seconds: float = 0.0
    first_byte: float = 0.0
    # until the request could be sent: TCP, proxy and TLS; near 0 on a connection that was open
    # already
    connect: float = 0.0
    http_version: str = ""
    hops: tuple[Hop, ...] = ()


class Fetcher(Protocol):
    """One exchange through the one egress object. Raises model.Failure, classified, and nothing
    else.
    """

    async def fetch(
        self,
        url: str,
        *,
        method: str = "GET",
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        proxy: str | None = None,
    ) -> Response: ...

    async def close(self) -> None: ...


Done: TypeAlias = Callable[[Response | BaseException], None]


class Cancellable(Protocol):
    def cancel(self) -> object: ...


@runtime_checkable
class DirectFetcher(Fetcher, Protocol):
    """One that needs no task for an exchange: at thousands a second, that is a tenth of the work."""

    def begin(self, url: str, headers: Mapping[str, str], done: Done) -> Cancellable | None:
        """A GET of a canonical URL, under way when this returns. `done` is called once, by the
        loop, with the answer, a Failure, or CancelledError where it was cancelled. None: something
        has to be found out first, or is wrong; `fetch` does that.
        """


class PageFetcher(Protocol):
    """An event to its answer: robots.txt, redirects, proxies and the verdict are its business.

    The slot of the event's own host was awaited before. Every further request takes one of its own.
    """

    def begin(self, event: Event, baseline: Baseline | None, done: Done) -> Cancellable | None:
        """Send without a task, where there is nothing to wait for but the answer. `done` gets what
        came. `is_final` says whether that is all. None: nothing was sent, and `fetch` has to do it.
        """

    def is_final(self, event: Event, response: Response) -> bool:
        """Is this answer, to what `begin` sent, the one to go on with? False: `fetch` has more to
        do. Raises Failure by its verdict.
        """

    async def fetch(
        self,
        event: Event,
        baseline: Baseline | None,
        *,
        turn: int = 0,
        answer: Response | None = None,
        sleep: Callable[[float], Awaitable[None]] | None = None,
        again: bool = False,
    ) -> Response:
        """The final answer, with the hops that led to it. Raises Failure for everything else.

        `turn`: how often the event was blocked. `answer`: to its first request, where `begin` sent
        it. `sleep`: how to wait for a slot. `again`: its slot was used already.
        """


class RobotsCache(Protocol):
    """robots.txt bodies per origin, shared by the fleet, with the time they are good until."""

    async def robots(self, origin: str) -> tuple[bytes | None, int, float] | None:
        """(body, HTTP status or 0 for unreachable, good until); None: not known."""

    async def keep_robots(
        self, origin: str, body: bytes | None, status: int, until: float
    ) -> None: ...

    def exempt(self, host: str) -> bool:
        """Is there a recorded exception, so that this host's robots.txt is not obeyed? A local view
        at most 100 ms old.
        """


class Pace(Protocol):
    """Slots: WHEN a host may be asked, fleet-wide. Each slot is given once."""

    async def reserve(
        self, wants: Mapping[str, int], *, within: float | None = None
    ) -> Mapping[str, Sequence[float]]:
        """For each host, that many moments (epoch seconds), in order; those more than `within`
        seconds away are told, but not given.
        """

    async def report(
        self, host: str, *, status: int, retry_after: float | None, seconds: float
    ) -> None:
        """What the host answered: throttling blocks the host for every worker. Of a host that
        nobody holds back (`blocked_until` is 0) only a 429 or 503 is news.
        """

    async def crawl_delay(self, host: str, seconds: float | None) -> None:
        """What robots.txt asks for between two requests (None: nothing); holds for every worker
        from the next reservation on.
        """

    def blocked_until(self, host: str) -> float:
        """0, or when the host may be asked again; a local view at most 100 ms old, for a last look
        before sending.
        """

    def voided(self, host: str) -> float:
        """0, or when the host was found to want more time between requests: a slot given out before
        that is not to be used. A local view.
        """

    def concurrency(self, host: str) -> int:
        """How many requests to the host may be in flight in one worker; a local view like the
        above.
        """

    async def refresh(self) -> None:
        """Bring the local view up to date."""


class Exempt(msgspec.Struct, frozen=True, omit_defaults=True):
    """One exception: which rule is not kept where, who said so and why, and from when to when."""

    kind: str
    host: str
    reason: str
    who: str
    at: float
    ended: float | None = None


class ProxyHealth(Protocol):
    """Trouble with proxies, per host (`*`: with any), shared by the fleet. Proxies go by an id and
    a label that hold no secret.
    """

    @property
    def view(self) -> Mapping[tuple[str, str], Any]:
        """(proxy, host) → rules.proxies.Health of all that had trouble; a local view at most
        seconds old.
        """

    async def failed(
        self,
        proxy: str,
        host: str,
        label: str,
        *,
        cooldown: float,
        longest: float,
        reason: str,
        least: float = 0.0,
    ) -> None: ...

    async def worked(self, proxy: str, host: str, label: str) -> None: ...

    async def listed(self, pool: str, members: int, error: str) -> None:
        """What became of fetching a pool's list; for people."""


# -- extraction ------------------------------------------------------------------------------------


class Extracted(msgspec.Struct, kw_only=True):
    """What the user's code made of one page. `error` excludes the rest."""

    records: list[Record] = []
    links: list[Link] = []
    matched: bool = True
    error: str = ""  # one line
    kind: str = ""  # ErrorClass value
    detail: str = ""  # traceback
    after: float | None = None  # the user's own wish for the next try


class FetchedPage(msgspec.Struct, frozen=True):
    """A page on its way to its extractors. Header names are lower case."""

    url: str
    body: bytes
    status: int
    headers: dict[str, str]
    fetched_at: float
    event: Event | None
    requested_url: str


@runtime_checkable
class Extraction(Protocol):
    """Runs the user's code on pages. Never raises for what that code does; a death is a result of
    the page that died alone.
    """

    async def extract(
        self, pages: Sequence[FetchedPage], *, alone: bool = False
    ) -> Sequence[Extracted]: ...

    async def hooks(self, changes: Sequence[bytes]) -> Sequence[str]:
        """Run on_change hooks on msgpack-encoded Changes; one error line (or "") for each."""

    async def close(self) -> None: ...


# -- sources ---------------------------------------------------------------------------------------


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One change outside, as its source tells it; the source's mapping makes the event of it. Same
    cause, same id.
    """

    id: str  # minted from the cause: a restart or a replay repeats it
    url: str | None = (
        None  # where the source itself knows it; else the mapping's, else payload["url"]
    )
    base: str | None = None  # what a relative URL is relative to, whoever gave it
    cause: str = ""  # for people: an LSN, an entry's id
    payload: dict[
        str, Any
    ] = {}  # what mappings and hooks are given, and what extractors find in `event.data`
    at: float | None = None  # when it happened outside
    # what came was no change that can be read, and why: a dead letter with the payload, whatever
    # the mapping says
    refused: str = ""


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """What was found in one piece, at most a few thousand, and where reading goes on after it."""

    findings: Sequence[Finding] = ()
    cursor: bytes | None = None  # None: the position stays
    idle: bool = False  # there is nothing more to read now
    lag: float | None = (
        None  # seconds between what is read and what is there, where the source knows
    )
    backlog: int | None = (
        None  # what is there and not read (bytes, messages, rows), where the source knows
    )


class Source(Protocol):
    """Opened without I/O (mistakes in its URL and options are ConfigError then); all else happens
    in `read`, `preview` and `place`.

    Run-time trouble is raised as errors.SourceDown, model.Failure or StoreUnavailable: the reader
    says so, waits, and calls `read` again.
    """

    name: str
    every: (
        float | None
    )  # seconds between two rounds of `read`; None: `read` goes on for ever, or there is only one round
    served: (
        bool  # it is told by requests (role `serve`) instead of looking, and `read` is never called
    )

    def read(self, cursor: bytes | None) -> AsyncGenerator[Batch, None]:
        """From the cursor on (None: from the beginning). A repeated finding carries the same id.

        When the generator is resumed, everything it yielded before is accepted and durable, and so
        is the cursor: only then may it acknowledge outside. Closed instead, it acknowledges nothing
        of its last batch. It yields at least every few seconds, if need be an empty batch.
        Returning ends a round.
        """

    def due(self, now: float) -> float | None:
        """When to look again, where the source knows better than `every` (a feed's ttl,
        Retry-After); None: it does not.
        """

    async def preview(self, cursor: bytes | None, limit: int) -> Sequence[Finding]:
        """What `read` would find next, without any effect outside."""

    async def place(self, to: str) -> bytes | None:
        """The cursor for what a person calls a position (`now`, an offset, a time); `start` is None
        everywhere and not asked for. Raises UsageError.
        """

    def describe(self, cursor: bytes | None) -> str:
        """The position in words."""

    async def close(self) -> None: ...


class SourceState(msgspec.Struct, frozen=True):
    """What the books know of a source."""

    name: str
    url: str  # without its secrets
    paused: str | None  # why, if it is
    generation: int  # of its position: a reset begins the next
    worker: str | None  # who reads it
    settled_at: float | None  # when there was last nothing left to read
    looked_at: float | None
    next_at: float | None
    event_at: float | None  # the last new event
    events: int
    known: int  # findings whose id was in the books already
    skipped: int  # passed over by `where` or a hook
    refused: int  # made no event; they are dead letters of stage `source`
    error: str | None
    error_at: float | None
    lag: float | None
    backlog: int | None
    position: str | None  # in words


class ServedSource(Protocol):
    """A source that is told rather than asked: `serving` calls it for each request to its path. No
    cursor, no rounds, no I/O.
    """

    name: str
    path: str  # of its endpoint
    served: bool
    signed: str  # by what its senders are known; "" where by nothing
    local: bool  # serves this machine only
    max_body: int
    rate: float  # requests a second
    burst: int

    def screen(self, method: str, headers: Mapping[str, Sequence[str]]) -> None:
        """All that can be said before the body is read. Raises errors.RequestRefused."""

    def findings(
        self, method: str, headers: Mapping[str, Sequence[str]], body: bytes, now: float
    ) -> Sequence[Finding]:
        """What the request tells, all of it or errors.RequestRefused; never anything else, whatever
        the bytes.
        """


class SlotInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a server keeps so that a reader misses nothing, and what that costs it."""

    name: str
    own: bool  # of the source that was asked; others are shown because they cost the same disk
    active: bool  # somebody reads it now
    position: str  # what was confirmed
    behind: int  # bytes of log after that
    held: int  # bytes of log that the server must keep for it
    status: str  # the server's word: reserved, extended, unreserved, lost


class Slotted(Protocol):
    """A source with a slot on its server; `penstock sources slots` asks for this by its methods.
    Raises SourceDown.
    """

    async def slots(self) -> Sequence[SlotInfo]: ...

    async def create_slot(self) -> SlotInfo: ...

    async def drop_slot(self) -> bool:
        """False: there was none."""


class SourceBooks(Protocol):
    """The state of sources in the ledger's store; each method belongs to a caller's transaction."""

    db: Any

    def declare_in(self, tx: Any, name: str, url: str) -> None: ...

    def state_in(self, tx: Any, name: str) -> SourceState | None: ...

    def count_in(
        self, tx: Any, name: str, *, new: int, known: int, skipped: int, refused: int, now: float
    ) -> None: ...

    def note_in(self, tx: Any, name: str, **values: Any) -> None: ...
