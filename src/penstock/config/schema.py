"""Definitions of all options: type, default and one line of help.

They are frozen structs, and a table that is made from them. See `config.files` for loading.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from penstock.config import units
from penstock.config.limits import LimitsConfig
from penstock.config.section import Opt, Section

PREFIX = "PENSTOCK_"


def _store(what: str, derived: str) -> Opt:
    return Opt(
        units.DSN,
        what,
        example=derived.replace("<state.dir>", "./.penstock"),
        derived=derived,
        secret=True,
    )


_DB = "sqlite:<state.dir>/penstock.db"
# -- the options, with type, default and one line of help ------------------------------------------


class StateConfig(Section, frozen=True, kw_only=True):
    dir: Annotated[
        Path,
        Opt(
            units.PATH,
            "directory of the embedded stores",
            derived="./.penstock",
            alias="PENSTOCK_STATE",
        ),
    ]


class BrokerConfig(Section, frozen=True, kw_only=True):
    url: Annotated[str, _store("broker that carries the topics", _DB)]


def _topic(what: str) -> Opt:
    return Opt(
        units.DSN,
        f"broker that carries {what}",
        example="kafka://127.0.0.1:9092",
        derived="broker.url",
        secret=True,
    )


class TopicsConfig(Section, frozen=True, kw_only=True):
    """The broker of each topic. By default one broker carries all topics."""

    requests: Annotated[str, _topic("requests: events that will be fetched, and their retries")]
    pages: Annotated[str, _topic("pages: fetched pages for other processes")]
    records: Annotated[str, _topic("records: extracted records for other processes")]


class LedgerConfig(Section, frozen=True, kw_only=True):
    url: Annotated[str, _store("store of the ledger: events, dead letters, outbox", _DB)]


class ClaimsConfig(Section, frozen=True, kw_only=True):
    url: Annotated[str, _store("store of claims, slots and robots.txt, shared by the fleet", _DB)]


class PagesConfig(Section, frozen=True, kw_only=True):
    url: Annotated[str, _store("store of raw pages", "file:<state.dir>/pages")]
    keep: Annotated[float | None, Opt(units.KEEP, "how long pages are kept")] = 30 * 86400.0
    max_bytes: Annotated[
        int, Opt(units.sizes(2**20), "total size above which the oldest pages are removed")
    ] = 10 * 2**30
    inline_max: Annotated[
        int,
        Opt(
            units.sizes(0, 512 * 2**10),
            "bodies up to this size are also sent in the messages of `pages` (0 sends references)",
        ),
    ] = 0


class RetryConfig(Section, frozen=True, kw_only=True):
    base: Annotated[
        float, Opt(units.durations(0.001, 86400), "first back-off, then exponential with jitter")
    ] = 10.0
    max: Annotated[float, Opt(units.durations(0.001, 7 * 86400), "longest back-off")] = 900.0
    budget: Annotated[int, Opt(units.counts(0, 1000), "retries after the first attempt")] = 3
    next_pool: Annotated[
        bool,
        Opt(units.FLAG, "retry a blocked event with the next proxy pool of its route"),
    ] = True
    max_age: Annotated[
        float,
        Opt(
            units.durations(1),
            "age above which an event that failed, or found no proxy, is not retried",
        ),
    ] = 7 * 86400.0


class TimeoutConfig(Section, frozen=True, kw_only=True):
    connect: Annotated[
        float, Opt(units.durations(0.001, 3600), "time to connect, TLS included")
    ] = 10.0
    first_byte: Annotated[
        float, Opt(units.durations(0.001, 3600), "time to the first byte of an answer")
    ] = 30.0
    total: Annotated[float, Opt(units.durations(0.001, 86400), "time of a whole exchange")] = 60.0


class NetConfig(Section, frozen=True, kw_only=True):
    allow: Annotated[
        tuple[str, ...],
        Opt(
            units.TARGETS,
            "private targets to which requests are allowed",
            example="127.0.0.1:8000",
        ),
    ] = ()
    ports: Annotated[tuple[int, ...], Opt(units.PORTS, "allowed ports of public targets")] = (
        80,
        443,
        8080,
        8443,
    )
    user_agent: Annotated[
        str, Opt(units.LINE, "User-Agent header, with a URL at which site owners can find you")
    ] = "penstock/0.1 (+https://penstock.example/bot)"
    max_body: Annotated[int, Opt(units.sizes(1024), "largest decoded body")] = 16 * 2**20
    remote_dns: Annotated[
        bool,
        Opt(
            units.FLAG,
            "let proxies resolve names, unchecked by the guard (recorded as an exception)",
        ),
    ] = False
    timeout: TimeoutConfig = TimeoutConfig()


class PaceConfig(Section, frozen=True, kw_only=True):
    rate: Annotated[float, Opt(units.RATE, "requests a second for each host, with jitter")] = 1.0
    burst: Annotated[
        int, Opt(units.counts(1, 10_000), "requests a host may get in a burst after an idle time")
    ] = 1
    concurrency: Annotated[
        int,
        Opt(
            units.counts(1, 10_000),
            "requests in flight to one host in one worker",
            example="8",
            derived="8, or fetch.concurrency with an unlimited rate",
        ),
    ]
    by: Annotated[
        Literal["host", "domain"],
        Opt(
            units.choices("host", "domain"),
            "limits, pauses and order apply to each host, or to each registrable domain",
        ),
    ] = "host"


class DedupConfig(Section, frozen=True, kw_only=True):
    window: Annotated[
        float, Opt(units.durations(), "a URL is fetched at most once in this time")
    ] = 60.0
    settle: Annotated[
        float,
        Opt(units.durations(0, 3600), "an event this soon after the request began is a duplicate"),
    ] = 2.0
    mode: Annotated[
        Literal["delay", "drop"],
        Opt(units.choices("delay", "drop"), "treatment of a later event inside the window"),
    ] = "delay"
    tracking: Annotated[
        tuple[str, ...],
        Opt(
            units.PARAMETERS,
            "query parameters to ignore, in addition to the usual ones (utm_*, gclid, …)",
            example="ref,-gclid",
        ),
    ] = ()


class FollowConfig(Section, frozen=True, kw_only=True):
    window: Annotated[float, Opt(units.durations(), "window of followed links")] = 86400.0
    depth: Annotated[
        int, Opt(units.counts(0, 10_000), "longest chain of followed links from the first page")
    ] = 10
    same_domain: Annotated[bool, Opt(units.FLAG, "follow only inside the registrable domain")] = (
        True
    )


class FetchConfig(Section, frozen=True, kw_only=True):
    concurrency: Annotated[
        int, Opt(units.counts(1, 10_000), "requests in flight in one worker")
    ] = 256
    prefetch: Annotated[
        int,
        Opt(
            units.counts(1, 100_000),
            "events one worker holds",
            example="1024",
            derived="4 x fetch.concurrency",
        ),
    ]
    bytes: Annotated[int, Opt(units.sizes(2**20), "bodies one worker holds in memory")] = 64 * 2**20
    deadline: Annotated[
        float, Opt(units.durations(0.1, 86400), "time for one event, with redirects and waits")
    ] = 600.0
    allow_downgrade: Annotated[bool, Opt(units.FLAG, "follow redirects from https to http")] = False
    soft_404: Annotated[
        bool, Opt(units.FLAG, "treat a short page with “not found” and status 200 as a block")
    ] = False


class ExtractConfig(Section, frozen=True, kw_only=True):
    isolation: Annotated[
        Literal["process", "none"],
        Opt(units.choices("process", "none"), "where the pipeline's code runs"),
    ] = "process"
    processes: Annotated[int, Opt(units.counts(1, 1024), "child processes of one worker")] = 1
    seconds: Annotated[float, Opt(units.durations(0.01, 86400), "time for one page")] = 30.0
    memory: Annotated[int, Opt(units.sizes(64 * 2**20), "memory of a child process")] = 512 * 2**20
    output: Annotated[int, Opt(units.sizes(1024), "records and links of one page, encoded")] = (
        16 * 2**20
    )
    group: Annotated[int, Opt(units.counts(1, 10_000), "pages per batch for a child process")] = 32


class SinkConfig(Section, frozen=True, kw_only=True):
    max_backlog: Annotated[
        int, Opt(units.counts(1), "rows waiting for a sink above which fetching pauses")
    ] = 100_000
    give_up_after: Annotated[
        float,
        Opt(units.durations(1), "time without progress of a sink after which --until-idle ends"),
    ] = 60.0


class IntakeConfig(Section, frozen=True, kw_only=True):
    max_pending: Annotated[
        int, Opt(units.counts(1), "open events above which new ones are refused")
    ] = 10_000_000


class ServeConfig(Section, frozen=True, kw_only=True):
    host: Annotated[str, Opt(units.ADDRESS, "address on which webhooks are served")] = "127.0.0.1"
    port: Annotated[int, Opt(units.counts(0, 65535), "port (0 is any free port)")] = 8787
    max_connections: Annotated[int, Opt(units.counts(1, 100_000), "open connections")] = 256
    max_per_address: Annotated[
        int, Opt(units.counts(1, 100_000), "open connections of one address (IPv6: of a /64)")
    ] = 64
    trusted_proxies: Annotated[
        tuple[str, ...],
        Opt(
            units.NETWORKS,
            "proxies whose X-Forwarded-For names the sender. All others are not trusted",
            example="10.1.0.0/16",
        ),
    ] = ()
    timeout: Annotated[
        float, Opt(units.durations(0.05, 3600), "time in which a request must be received")
    ] = 10.0


class BreakerConfig(Section, frozen=True, kw_only=True):
    dead_share: Annotated[
        float, Opt(units.SHARE, "share of dead events that pauses a host or extractor")
    ] = 0.2
    min: Annotated[int, Opt(units.counts(1), "dead events needed to pause it")] = 50
    window: Annotated[
        float, Opt(units.durations(1, 86400), "time over which events are counted")
    ] = 60.0
    alert: Annotated[float, Opt(units.SHARE, "share of dead events that causes a warning")] = 0.02


class GoneConfig(Section, frozen=True, kw_only=True):
    after: Annotated[int, Opt(units.counts(1, 1000), "404 visits until a known URL is gone")] = 2
    limit: Annotated[
        float, Opt(units.SHARE, "share of a host's URLs that may be gone without an approval")
    ] = 0.3
    settle: Annotated[
        float, Opt(units.durations(0, 3600), "time without another 404 of the host before removals")
    ] = 60.0


class HistoryConfig(Section, frozen=True, kw_only=True):
    keep: Annotated[
        float | None, Opt(units.KEEP, "how long ended events and their transitions are kept")
    ] = 30 * 86400.0


class OutputConfig(Section, frozen=True, kw_only=True):
    unchanged: Annotated[
        Literal["skip", "emit"], Opt(units.choices("skip", "emit"), "what an unchanged page writes")
    ] = "skip"


class ProxyPoolConfig(Section, frozen=True, kw_only=True):
    """One `[proxies.NAME]` table. There may be any number of them."""

    urls: Annotated[
        tuple[str, ...],
        Opt(
            units.PROXIES,
            "proxies of the pool, optionally with weights",
            example="http://user:password@proxy.example:8080",
            secret=True,
        ),
    ] = ()
    list_url: Annotated[
        str,
        Opt(
            units.PROXY_LIST,
            "a provider's list of proxies, one per line",
            example="https://provider.example/list.txt",
            secret=True,
        ),
    ] = ""
    list_every: Annotated[
        float, Opt(units.durations(1, 7 * 86400), "how often the list is fetched")
    ] = 600.0
    geo: Annotated[
        tuple[str, ...],
        Opt(units.NAMES, "locations of its exits: serves routes with this geo", example="de,at"),
    ] = ()
    account: Annotated[
        tuple[str, ...], Opt(units.NAMES, "accounts it is reserved for (* is any)", example="alice")
    ] = ()
    weight: Annotated[
        float, Opt(units.WEIGHT, "its share among pools that serve the same route")
    ] = 1.0
    cooldown: Annotated[
        float,
        Opt(
            units.durations(0, 86400),
            "cooldown of a proxy after its first failure at a host, then doubled (0 turns it off)",
        ),
    ] = 30.0
    cooldown_max: Annotated[float, Opt(units.durations(0, 7 * 86400), "longest cooldown")] = 3600.0
    sticky: Annotated[
        bool, Opt(units.FLAG, "use the same proxy for an account while the proxy works")
    ] = True
    next: Annotated[
        str, Opt(units.NAME, "pool for events that were blocked in this pool", example="backup")
    ] = ""
    bytes_per_day: Annotated[
        int,
        Opt(units.sizes(0), "bytes a day through the pool (0 uses limits.pool_bytes_per_day)"),
    ] = 0


class ConnectConfig(Section, frozen=True, kw_only=True):
    url: Annotated[
        str,
        Opt(
            units.REST_URL,
            "REST interface of the Kafka Connect worker for `penstock connect`",
            secret=True,
        ),
    ] = "http://127.0.0.1:8083"


class Config(Section, frozen=True, kw_only=True):
    """All options, checked. `pipeline` and `namespace` are empty if they are not set."""

    pipeline: Annotated[
        str,
        Opt(units.PATH, "pipeline that `penstock run` uses without an argument", example="shop.py"),
    ] = ""
    namespace: Annotated[
        str,
        Opt(
            units.NAME,
            "prefix of names on servers, so that pipelines can share them",
            example="shop",
        ),
    ] = ""
    durability: Annotated[
        Literal["full", "process"],
        Opt(
            units.choices("full", "process"),
            "full survives a power cut, process survives a killed process",
        ),
    ] = "full"
    lease: Annotated[
        float,
        Opt(
            units.durations(1, 12 * 3600),
            "time without a heartbeat after which a worker's work goes to another worker",
        ),
    ] = 30.0
    grace: Annotated[
        float, Opt(units.durations(0, 3600), "time to finish work in flight after SIGTERM")
    ] = 25.0
    robots: Annotated[
        Literal["obey", "ignore"],
        Opt(units.choices("obey", "ignore"), "obey or ignore robots.txt"),
    ] = "obey"
    state: StateConfig
    broker: BrokerConfig
    topics: TopicsConfig
    ledger: LedgerConfig
    claims: ClaimsConfig
    pages: PagesConfig
    retry: RetryConfig = RetryConfig()
    net: NetConfig = NetConfig()
    pace: PaceConfig
    dedup: DedupConfig = DedupConfig()
    follow: FollowConfig = FollowConfig()
    fetch: FetchConfig
    extract: ExtractConfig = ExtractConfig()
    sink: SinkConfig = SinkConfig()
    intake: IntakeConfig = IntakeConfig()
    limits: LimitsConfig = LimitsConfig()
    serve: ServeConfig = ServeConfig()
    breaker: BreakerConfig = BreakerConfig()
    gone: GoneConfig = GoneConfig()
    history: HistoryConfig = HistoryConfig()
    output: OutputConfig = OutputConfig()
    connect: ConnectConfig = ConnectConfig()
    proxies: Mapping[str, ProxyPoolConfig] = {}  # by name. See POOL and `pool_options`.


# -- the table, as data ----------------------------------------------------------------------------


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """One option of the reference."""

    path: str
    env: str
    alias: str
    kind: units.Kind
    default: Any  # msgspec.NODEFAULT if it is derived
    default_text: str
    help: str
    example: str
    secret: bool

    @property
    def variables(self) -> tuple[str, ...]:
        return (self.env, self.alias) if self.alias else (self.env,)


# The user chooses the names of these tables, so their options are made when the names are known.
POOL = "proxies"


def _options(section: type[Section], prefix: str = "") -> Iterator[Option]:
    hints = get_type_hints(section, include_extras=True)
    for field in msgspec.structs.fields(section):
        hint, path = hints[field.name], prefix + field.name
        if path == POOL:
            continue
        if get_origin(hint) is not Annotated:
            yield from _options(hint, path + ".")
            continue
        opt: Opt = next(extra for extra in get_args(hint) if isinstance(extra, Opt))
        text = opt.derived or ("" if field.default in ("", ()) else opt.kind.write(field.default))
        yield Option(
            path=path,
            env=PREFIX + path.upper().replace(".", "_"),
            alias=opt.alias,
            kind=opt.kind,
            default=field.default,
            default_text=text,
            help=opt.help,
            example=opt.example or text,
            secret=opt.secret,
        )


OPTIONS: tuple[Option, ...] = tuple(_options(Config))
BY_PATH = {option.path: option for option in OPTIONS}
SECTIONS = {path[: match.start()] for path in BY_PATH for match in re.finditer(r"\.", path)}


def pool_options(name: str) -> tuple[Option, ...]:
    """Return the options of one `[proxies.NAME]` table.

    `-` in a name becomes `_` in its variables: PENSTOCK_PROXIES_NAME_URLS.
    """
    return tuple(
        msgspec.structs.replace(option, env=option.env.replace("-", "_"))
        for option in _options(ProxyPoolConfig, f"{POOL}.{name}.")
    )
