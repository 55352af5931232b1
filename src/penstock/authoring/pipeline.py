"""The user's API: Pipeline, what is declared on it, and how a pipeline file is loaded. It runs
nothing and opens nothing.
"""

from __future__ import annotations

import fnmatch
import hashlib
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar, overload

import msgspec

from penstock.config import units
from penstock.errors import ConfigError
from penstock.model import Priority, Route
from penstock.rules.masking import mask

F = TypeVar("F", bound=Callable[..., Any])
Key: TypeAlias = str | Sequence[str] | Callable[[dict[str, Any]], Any] | None

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


# -- what a declaration becomes --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Extractor:
    """User code for pages: a generator function taking a Page."""

    name: str
    version: int
    match: tuple[str, ...]  # globs on the URL; none: every page
    key: Key
    fn: Callable[..., Any]
    _pattern: re.Pattern[str] | None = field(repr=False, compare=False, default=None)

    label: str = field(init=False, repr=False, compare=False)  # name@version

    def __post_init__(self) -> None:
        object.__setattr__(self, "label", f"{self.name}@{self.version}")

    def fits(self, url: str) -> bool:
        return self._pattern is None or self._pattern.match(url) is not None


@dataclass(frozen=True, slots=True)
class SinkSpec:
    url: str  # as written; a relative path in it is relative to where the pipeline runs
    options: dict[str, Any]
    connect: dict[str, Any] | None = (
        # the Kafka Connect connector that takes it from there: for `penstock connect`, never for
        # the adapter
        None
    )


@dataclass(frozen=True, slots=True)
class SourceSpec:
    url: str
    name: str  # of its cursor; events say it as their source
    every: float | None  # seconds
    route: Route
    priority: int
    window: float | None  # seconds
    window_mode: str | None  # "delay" | "drop"
    map: dict[
        str, str
    ]  # JMESPath over a finding's payload, by what it gives: see penstock.intake.mapping
    where: str | None  # JMESPath: findings for which it is false are passed over
    hook: Callable[[dict[str, Any]], Any] | None
    options: dict[str, Any]  # the adapter's own
    connect: dict[str, Any] | None = (
        # the Kafka Connect connector that feeds it: for `penstock connect`, never for the adapter
        None
    )


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """What an `on_change` hook is given: a record that is not what it was. A record seen for the
    first time is no change.
    """

    event_id: str
    trace_id: str
    url: str
    extractor: str
    key: str
    old: dict[str, Any]
    new: dict[str, Any]
    fields: dict[str, list[Any]]  # name: [old, new], only those that differ


@dataclass(frozen=True, slots=True)
class Hook:
    fn: Callable[[Change], Any]
    fields: frozenset[str] | None  # None: any field
    extractor: str | None  # None: every extractor

    def wants(self, change: Change) -> bool:
        return (self.extractor is None or self.extractor == change.extractor) and (
            self.fields is None or not self.fields.isdisjoint(change.fields)
        )


# -- the pipeline ----------------------------------------------------------------------------------


class Pipeline:
    """What to extract from which pages, and where the records go. Declaring only records; `penstock
    run FILE` runs it.
    """

    def __init__(self, name: str) -> None:
        self.name = _named(name, "the pipeline")
        self.path: str | None = None  # the file it was loaded from; a child process loads it again
        self._extractors: list[Extractor] = []
        self._sinks: list[SinkSpec] = []
        self._sources: list[SourceSpec] = []
        self._hooks: list[Hook] = []

    def __repr__(self) -> str:
        return f"<Pipeline {self.name}: {len(self._extractors)} extractors, {len(self._sinks)} sinks, {len(self._sources)} sources>"

    @property
    def extractors(self) -> tuple[Extractor, ...]:
        return tuple(self._extractors)

    @property
    def sinks(self) -> tuple[SinkSpec, ...]:
        return tuple(self._sinks)

    @property
    def sources(self) -> tuple[SourceSpec, ...]:
        return tuple(self._sources)

    @property
    def hooks(self) -> tuple[Hook, ...]:
        return tuple(self._hooks)

    @overload
    def extract(self, fn: F, /) -> F: ...
    @overload
    def extract(
        self,
        fn: None = None,
        /,
        *,
        match: str | Sequence[str] | None = None,
        version: int = 1,
        key: Key = None,
        name: str | None = None,
    ) -> Callable[[F], F]: ...
    def extract(
        self,
        fn: Any = None,
        /,
        *,
        match: str | Sequence[str] | None = None,
        version: Any = 1,
        key: Key = None,
        name: str | None = None,
    ) -> Any:
        """Declare an extractor; the function stays what it was, so a test calls it:
        `list(product(page))`.

        `match`: glob on the URL (or several); none: every page. `version`: raise it to extract
        known pages again. `key`: the field that names a record, several of them, or a function of
        the record; none: the page's URL.
        """
        if fn is not None and not callable(fn):
            raise ConfigError(
                f"@extract was given {fn!r}",
                hint='name its arguments: @pipeline.extract(match="*/product/*", key="sku")',
            )

        def declare(fn: F) -> F:
            label = _function(fn, "@extract", name)
            if any(e.name == label for e in self._extractors):
                raise ConfigError(
                    f"two extractors are called {label!r}",
                    hint='rename one function, or give it a name: @pipeline.extract(name="…")',
                )
            if isinstance(version, bool) or not isinstance(version, int) or version < 1:
                raise ConfigError(
                    f"extractor {label}: version {version!r} is no whole number from 1 up",
                    hint="version=1, then more whenever its records change",
                )
            globs = _globs(match, label)
            pattern = re.compile("|".join(fnmatch.translate(g) for g in globs)) if globs else None
            self._extractors.append(Extractor(label, version, globs, _key(key, label), fn, pattern))
            return fn

        return declare if fn is None else declare(fn)

    def sink(self, url: str, *, connect: dict[str, Any] | None = None, **options: Any) -> None:
        """Where records go: `jsonl:products.jsonl`, `csv:…`, `sqlite:…`. `connect`: the connector
        that carries them on from a Kafka topic.
        """
        self._sinks.append(
            SinkSpec(_url(url, "sink"), options, _connect(connect, url, f"sink {mask(url)!r}"))
        )

    def source(
        self, url: str, *, name: str | None = None, every: str | float | None = None, route: Route | dict[str, Any] | None = None,
        priority: str = "normal", window: str | float | None = None, window_mode: str | None = None, map: Any = None,
        where: str | None = None, hook: Callable[[dict[str, Any]], Any] | None = None, connect: dict[str, Any] | None = None, **options: Any,
    ) -> None:  # fmt: skip
        """What tells us that something changed. `every` and `window` in seconds, or "30s", "5m",
        "1h", "1d".

        `name`: what its position is kept under (else made from the URL: another URL, and it begins
        anew). `map`: what else an event gets from the payload, by JMESPath: {"url": "after.link",
        "priority": "after.rank", "geo": …}. `where`: a JMESPath condition; what it does not hold
        for is passed over. `hook`: a function of the payload that gives the same keys as `map` (or
        None: pass it over), for what JMESPath cannot say. `connect`: the Kafka Connect connector
        that fills this topic, for `penstock connect`.
        """
        where_ = f"source {mask(_url(url, 'source'))!r}"
        try:
            hints = route if isinstance(route, Route) else msgspec.convert(route or {}, Route)
        except msgspec.ValidationError as e:
            raise ConfigError(
                f"{where_}: route: {e}", hint="a route has geo, pool, account and render"
            ) from None
        try:
            rank = Priority.named(priority)
        except (KeyError, AttributeError):
            raise ConfigError(
                f"{where_}: priority {priority!r} is not known", hint="high, normal or low"
            ) from None
        if window_mode not in (None, "delay", "drop"):
            raise ConfigError(
                f"{where_}: window_mode {window_mode!r} is not known", hint="delay or drop"
            )
        if (hook is not None and not inspect.isroutine(hook)) or inspect.iscoroutinefunction(hook):
            raise ConfigError(
                f"{where_}: hook is no plain function",
                hint="def hook(payload): return {'priority': 'high'}",
            )
        if map is not None and not (
            isinstance(map, dict) and all(isinstance(key, str) for key in map)
        ):
            raise ConfigError(
                f"{where_}: map is no table",
                hint='map={"url": "after.link", "priority": "after.rank"}',
            )
        called = _named(name, "a source") if name is not None else _source_name(url)
        if any(s.name == called for s in self._sources):
            raise ConfigError(
                f"two sources are called {called!r}", hint='give one a name of its own: name="…"'
            )
        every_, window_ = _seconds(every, f"{where_}: every"), _seconds(window, f"{where_}: window")
        fed = _connect(connect, url, where_)
        hinted = fed.get("route") if fed else None
        # What its connector puts on each record is what an event gets, unless the pipeline says
        # otherwise.
        map = {
            **(
                {hint: f'_kafka.headers."penstock-{hint}"' for hint in hinted}
                if isinstance(hinted, dict)
                else {}
            ),
            **(map or {}),
        }
        self._sources.append(
            SourceSpec(
                url,
                called,
                every_,
                hints,
                rank,
                window_,
                window_mode,
                map,
                where,
                hook,
                options,
                fed,
            )
        )

    @overload
    def on_change(self, fn: F, /) -> F: ...
    @overload
    def on_change(
        self,
        fn: None = None,
        /,
        *,
        fields: Sequence[str] | None = None,
        extractor: str | None = None,
    ) -> Callable[[F], F]: ...
    def on_change(
        self,
        fn: Any = None,
        /,
        *,
        fields: Sequence[str] | None = None,
        extractor: str | None = None,
    ) -> Any:
        """Called (awaited, if async) with a Change after the record was written; at least once, so
        use `change.event_id` where twice would hurt.
        """
        if fields is not None and (
            isinstance(fields, str) or not fields or not all(isinstance(f, str) for f in fields)
        ):
            raise ConfigError(
                f"@on_change: fields={fields!r} is no list of field names",
                hint='fields=["price"]; leave it out for every field',
            )

        def declare(fn: F) -> F:
            _function(fn, "@on_change", "hook")
            self._hooks.append(Hook(fn, None if fields is None else frozenset(fields), extractor))
            return fn

        return declare if fn is None else declare(fn)

    def matching(self, url: str, requested: str | None = None) -> list[Extractor]:
        """The extractors for a page: its own URL counts, and the one that was asked for."""
        return [
            e
            for e in self._extractors
            if e.fits(url) or (requested is not None and requested != url and e.fits(requested))
        ]

    def signature(self, url: str) -> str:
        """`name@version,…` of the extractors for this URL: another signature, and an unchanged page
        is extracted again.
        """
        return ",".join([e.label for e in self._extractors if e.fits(url)])

    def check(self) -> None:
        """What can only be known when everything has been declared."""
        names = [e.name for e in self._extractors]
        for hook in self._hooks:
            if hook.extractor is not None and hook.extractor not in names:
                raise ConfigError(
                    f"@on_change: there is no extractor {hook.extractor!r}",
                    hint=f"known: {', '.join(names) or 'none'}",
                )


def _named(name: object, what: str) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(
            f"{what} cannot be called {name!r}",
            hint="1 to 64 letters, digits, '_', '-' or '.', a letter or digit first",
        )
    return name


def _function(fn: Any, decorator: str, name: str | None) -> str:
    if not callable(fn) or isinstance(fn, type):
        raise ConfigError(
            f"{decorator} needs a function, not {fn!r}", hint="put it above a `def name(page): …`"
        )
    label = name if name is not None else getattr(fn, "__name__", None)
    if inspect.isasyncgenfunction(fn) or (
        inspect.iscoroutinefunction(fn) and decorator == "@extract"
    ):  # a hook may be async: it is awaited
        raise ConfigError(
            f"{decorator}: {label} is async",
            hint="write it as a plain `def`: the page is already there, and it runs in a process of its own",
        )
    if label == "<lambda>":
        raise ConfigError(f"{decorator}: a lambda has no name", hint='use `def`, or give name="…"')
    return _named(label, "an extractor")


def _globs(match: Any, label: str) -> tuple[str, ...]:
    globs = (
        ()
        if match is None
        else (match,)
        if isinstance(match, str)
        else tuple(match)
        if isinstance(match, (list, tuple))
        else (match,)
    )
    if any(not isinstance(g, str) or not g for g in globs):
        raise ConfigError(
            f"extractor {label}: match {match!r} is no glob",
            hint='match="*/product/*"; leave it out for every page',
        )
    return globs


def _key(key: Any, label: str) -> Key:
    if key is None or callable(key):
        return key  # type: ignore[no-any-return]
    names = (key,) if isinstance(key, str) else tuple(key) if isinstance(key, (list, tuple)) else ()
    if not names or any(not isinstance(n, str) or not n for n in names):
        raise ConfigError(
            f"extractor {label}: key {key!r} names no field",
            hint='key="sku", key=("shop", "sku"), or a function of the record',
        )
    return names[0] if len(names) == 1 else names


def _url(url: Any, what: str) -> str:
    if not isinstance(url, str) or not re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", url):
        example = "jsonl:products.jsonl" if what == "sink" else "feed+https://example.com/feed.xml"
        raise ConfigError(
            f"{what} {url!r} does not begin with a kind", hint=f"for example {example}"
        )
    return url


def _connect(given: Any, url: str, where: str) -> dict[str, Any] | None:
    """What a connector's table says is checked by penstock.connect; here only that it is one, on a
    topic.
    """
    if given is None:
        return None
    if not isinstance(given, dict) or not isinstance(given.get("kind"), str):
        raise ConfigError(
            f"{where}: connect is no table with a kind",
            hint='connect={"kind": "debezium-postgres", …}; see penstock connect init --help',
        )
    if url.partition(":")[0].partition("+")[0] != "kafka":
        raise ConfigError(
            f"{where}: connect is for kafka:// URLs",
            hint="a connector reads or fills a Kafka topic: kafka://127.0.0.1:9092/products",
        )
    return dict(given)


def _source_name(url: str) -> str:
    """From what names the place, never from user, password or query."""
    scheme, _, rest = url.partition(":")
    place = re.sub(r"^//([^/@]*@)?", "", rest).partition("?")[0].partition("#")[0]
    if scheme == "webhook":
        return _named(place, "a webhook")
    words = "-".join(re.findall(r"[A-Za-z0-9_.]+", f"{scheme} {place}"))
    return (
        words
        if len(words) <= 64
        else f"{words[:55]}-{hashlib.blake2b(words.encode(), digest_size=4).hexdigest()}"
    )


def _seconds(value: str | float | None, where: str) -> float | None:
    try:
        return None if value is None else units.duration(value)
    except ValueError:
        raise ConfigError(
            f"{where}: {value!r} is no length of time", hint='seconds, or "30s", "5m", "1h", "1d"'
        ) from None
