"""API of users: Pipeline and its declarations. It runs no extractor and opens no connection.

See `load` for the loader of pipeline files, and `checks` for checks of a whole pipeline.
"""

from __future__ import annotations

import fnmatch
import hashlib
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar, overload

from penstock.authoring.changes import Change
from penstock.authoring.routing import (
    WrongValue,
    check_outside_route,
    read_priority,
    read_route,
    read_window,
    read_window_mode,
)
from penstock.config import units
from penstock.errors import ConfigError
from penstock.model import Route
from penstock.rules.masking import are_hosts, mask

F = TypeVar("F", bound=Callable[..., Any])
Key: TypeAlias = str | Sequence[str] | Callable[[dict[str, Any]], Any] | None
Line: TypeAlias = tuple[str, int]  # the file and the line of a declaration

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


# -- declarations ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Extractor:
    """A function of the user for pages: a generator function with a Page as argument."""

    name: str
    version: int
    match: tuple[str, ...]  # globs on the URL, empty for every page
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
    url: str  # as written. A relative path is relative to the directory in which the pipeline runs.
    options: dict[str, Any]
    # The Kafka Connect connector that reads the topic. Only for `penstock connect`.
    connect: dict[str, Any] | None = None
    only: tuple[str, ...] = ()  # names of extractors, empty for all of them
    line: Line | None = field(default=None, repr=False, compare=False)

    def takes(self, extractor: str) -> bool:
        return not self.only or extractor in self.only


@dataclass(frozen=True, slots=True)
class SourceSpec:
    url: str
    name: str  # name of its cursor, and the source of its events
    every: float | None  # seconds
    route: Route
    priority: int
    window: float | None  # seconds
    window_mode: str | None  # "delay" | "drop"
    map: dict[str, str]  # name -> JMESPath over a finding's payload: see penstock.intake.mapping
    where: str | None  # JMESPath. Findings for which it is false are skipped.
    hook: Callable[[dict[str, Any]], Any] | None
    options: dict[str, Any]  # of the adapter
    # The Kafka Connect connector that fills the topic. Only for `penstock connect`.
    connect: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Hook:
    fn: Callable[[Change], Any]
    fields: frozenset[str] | None  # None for any field
    extractor: str | None  # None for every extractor
    line: Line | None = field(default=None, repr=False, compare=False)

    def takes(self, extractor: str) -> bool:
        return self.extractor is None or self.extractor == extractor

    def wants(self, change: Change) -> bool:
        return self.takes(change.extractor) and (
            self.fields is None or not self.fields.isdisjoint(change.fields)
        )


# -- the pipeline ----------------------------------------------------------------------------------


class Pipeline:
    """Declares which records are extracted from which pages, and the sinks for them.

    A declaration runs nothing. `penstock run FILE` runs the pipeline.
    """

    def __init__(self, name: str) -> None:
        self.name = _check_name(name, "the pipeline")
        self.path: str | None = None  # the file it was loaded from, for child processes
        self.files_hash = ""  # of that file and of the modules it imports from its folder
        self._extractors: list[Extractor] = []
        self._sinks: list[SinkSpec] = []
        self._sources: list[SourceSpec] = []
        self._hooks: list[Hook] = []
        # Extractors that are known to yield records: those of a TOML file that have fields.
        self.yielding: set[str] = set()
        # Extractors whose records no sink or hook takes. Set when a pipeline with a sink or hook
        # is loaded.
        self.untaken: frozenset[str] = frozenset()

    def __repr__(self) -> str:
        return (
            f"<Pipeline {self.name}: {len(self._extractors)} extractors, "
            f"{len(self._sinks)} sinks, {len(self._sources)} sources>"
        )

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
        """Declare an extractor.

        The function is returned unchanged, so that a test can call it: `list(product(page))`.

        `match` is a glob on the URL, or several. Default: every page. Raise `version` to extract
        stored pages again. `key` is the field that identifies a record, several fields, or a
        function of the record. Default: the page's URL.
        """
        if fn is not None and not callable(fn):
            raise ConfigError(
                f"@extract was given {fn!r}",
                hint='name its arguments: @pipeline.extract(match="*/product/*", key="sku")',
            )

        def declare(fn: F) -> F:
            label = _check_function(fn, "@extract", name)
            if any(e.name == label for e in self._extractors):
                raise ConfigError(
                    f"two extractors are called {label!r}",
                    hint='rename one function, or give it a name: @pipeline.extract(name="…")',
                )
            if isinstance(version, bool) or not isinstance(version, int) or version < 1:
                raise ConfigError(
                    f"extractor {label}: version {version!r} is not a whole number from 1",
                    hint="start with version=1, and raise it when its records change",
                )
            globs = _globs(match, label)
            pattern = re.compile("|".join(fnmatch.translate(g) for g in globs)) if globs else None
            self._extractors.append(Extractor(label, version, globs, _key(key, label), fn, pattern))
            return fn

        return declare if fn is None else declare(fn)

    def sink(
        self,
        url: str,
        *,
        only: str | Sequence[str] | None = None,
        connect: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Declare where records are written: `jsonl:products.jsonl`, `csv:…`, `sqlite:…`.

        `only` is the name of an extractor, or several. Default: the records of all extractors.
        `connect` is the Kafka Connect connector that reads the records from a Kafka topic.
        """
        where = f"sink {mask(_url(url, 'sink'))!r}"
        names = (only,) if isinstance(only, str) else only
        if names is not None and (
            not isinstance(names, (list, tuple))
            or not names
            or not all(isinstance(name, str) for name in names)
        ):
            raise ConfigError(
                f"{where}: only={only!r} names no extractor",
                hint='write only="product" or only=["product"], or leave it out for all extractors',
            )
        self._sinks.append(
            SinkSpec(url, options, _connect(connect, url, where), tuple(names or ()), _line())
        )

    def source(
        self,
        url: str,
        *,
        name: str | None = None,
        every: str | float | None = None,
        route: Route | dict[str, Any] | None = None,
        priority: str | int = "normal",
        window: str | float | None = None,
        window_mode: str | None = None,
        map: Any = None,
        where: str | None = None,
        hook: Callable[[dict[str, Any]], Any] | None = None,
        connect: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Declare a source of changes.

        `every` and `window` are in seconds, or "30s", "5m", "1h", "1d".
        `name` is the name of its cursor. By default it is made from the URL, so that a source with
        another URL starts from the beginning.
        `map` sets fields of an event from the payload, by JMESPath: {"url": "after.link",
        "priority": "after.rank", "geo": …}.
        `where` is a JMESPath condition. Findings for which it is false are skipped.
        `hook` is a function of the payload that returns the same keys as `map`, or None to skip the
        finding. Use it if JMESPath is not enough.
        `connect` is the Kafka Connect connector that fills this topic, for `penstock connect`.
        """
        where_ = f"source {mask(_url(url, 'source'))!r}"
        try:
            hints = Route() if route is None else read_route(route)
            priority_class, window_ = read_priority(priority), read_window(window)
            read_window_mode(window_mode)
            check_outside_route(options)
        except WrongValue as e:
            raise ConfigError(f"{where_}: {e.message}", hint=e.hint) from None
        if (hook is not None and not inspect.isroutine(hook)) or inspect.iscoroutinefunction(hook):
            raise ConfigError(
                f"{where_}: hook is not a plain function",
                hint="write def hook(payload): return {'priority': 'high'}",
            )
        if map is not None and not (
            isinstance(map, dict) and all(isinstance(key, str) for key in map)
        ):
            raise ConfigError(
                f"{where_}: map is not a table",
                hint='write map={"url": "after.link", "priority": "after.rank"}',
            )
        cursor_name = _check_name(name, "a source") if name is not None else _source_name(url)
        if any(s.name == cursor_name for s in self._sources):
            raise ConfigError(
                f"two sources are called {cursor_name!r}", hint='give one of them a name: name="…"'
            )
        every_ = _seconds(every, f"{where_}: every")
        connector = _connect(connect, url, where_)
        connector_route = connector.get("route") if connector else None
        # Events get the route that the connector adds to each record, unless `map` sets another.
        map = {
            **(
                {hint: f'_kafka.headers."penstock-{hint}"' for hint in connector_route}
                if isinstance(connector_route, dict)
                else {}
            ),
            **(map or {}),
        }
        self._sources.append(
            SourceSpec(
                url,
                cursor_name,
                every_,
                hints,
                priority_class,
                window_,
                window_mode,
                map,
                where,
                hook,
                options,
                connector,
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
        """Declare a function that is called with a Change after the record was written.

        An async function is awaited. It is called at least once for each change, so use
        `change.event_id` if a second call would do harm.
        """
        if fields is not None and (
            isinstance(fields, str) or not fields or not all(isinstance(f, str) for f in fields)
        ):
            raise ConfigError(
                f"@on_change: fields={fields!r} is not a list of field names",
                hint='write fields=["price"], or leave it out for every field',
            )

        line = _line()

        def declare(fn: F) -> F:
            _check_function(fn, "@on_change", "hook")
            wanted = None if fields is None else frozenset(fields)
            self._hooks.append(Hook(fn, wanted, extractor, line))
            return fn

        return declare if fn is None else declare(fn)

    def matching(self, url: str, requested: str | None = None) -> list[Extractor]:
        """Return the extractors for a page, by its URL or the URL that was requested."""
        return [
            e
            for e in self._extractors
            if e.fits(url) or (requested is not None and requested != url and e.fits(requested))
        ]

    def names_for(self, url: str, requested: str) -> list[str]:
        """Return the names of the extractors for a page."""
        return [e.name for e in self.matching(url, requested)]

    def signature(self, url: str, requested: str | None = None) -> str:
        """Return `name@version,…#HASH` of the extractors for this page and of the loaded files.

        If the signature has changed, an unchanged page is extracted again.
        """
        return ",".join([e.label for e in self.matching(url, requested)]) + "#" + self.files_hash

    def takes(self, extractor: str) -> bool:
        """Return True if a sink or hook takes records of this extractor."""
        return any(sink.takes(extractor) for sink in self._sinks) or any(
            hook.takes(extractor) for hook in self._hooks
        )


def _line() -> Line:
    """Return the file and the line that called the method that calls this function."""
    frame = sys._getframe(2)
    return frame.f_code.co_filename, frame.f_lineno


def _check_name(name: object, what: str) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(
            f"{what} cannot be called {name!r}",
            hint="use 1 to 64 letters, digits, '_', '-' or '.', with a letter or digit first",
        )
    return name


def _check_function(fn: Any, decorator: str, name: str | None) -> str:
    if not callable(fn) or isinstance(fn, type):
        raise ConfigError(
            f"{decorator} needs a function, not {fn!r}", hint="put it above a `def name(page): …`"
        )
    label = name if name is not None else getattr(fn, "__name__", None)
    # A hook may be async, because it is awaited.
    if inspect.isasyncgenfunction(fn) or (
        inspect.iscoroutinefunction(fn) and decorator == "@extract"
    ):
        raise ConfigError(
            f"{decorator}: {label} is async",
            hint="write it as a plain `def`: the page is already loaded, "
            "and the function runs in a separate process",
        )
    if label == "<lambda>":
        raise ConfigError(f"{decorator}: a lambda has no name", hint='use `def`, or give name="…"')
    return _check_name(label, "an extractor")


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
            f"extractor {label}: match {match!r} is not a glob",
            hint='write match="*/product/*", or leave it out for every page',
        )
    return globs


def _key(key: Any, label: str) -> Key:
    if key is None or callable(key):
        return key  # type: ignore[no-any-return]
    names = (key,) if isinstance(key, str) else tuple(key) if isinstance(key, (list, tuple)) else ()
    if not names or any(not isinstance(n, str) or not n for n in names):
        raise ConfigError(
            f"extractor {label}: key {key!r} names no field",
            hint='write key="sku", key=("shop", "sku"), or a function of the record',
        )
    return names[0] if len(names) == 1 else names


def _url(url: Any, what: str) -> str:
    if not isinstance(url, str) or not re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", url):
        example = "jsonl:products.jsonl" if what == "sink" else "feed+https://example.com/feed.xml"
        raise ConfigError(
            f"{what} {mask(str(url))!r} does not begin with a kind", hint=f"for example {example}"
        )
    return url


def _connect(given: Any, url: str, where: str) -> dict[str, Any] | None:
    """Check that a connector is a table of a topic. `penstock.connect` checks the rest."""
    if given is None:
        return None
    if not isinstance(given, dict) or not isinstance(given.get("kind"), str):
        raise ConfigError(
            f"{where}: connect is not a table with a kind",
            hint='write connect={"kind": "debezium-postgres", …}, '
            "see `penstock connect init --help`",
        )
    if url.partition(":")[0].partition("+")[0] != "kafka":
        raise ConfigError(
            f"{where}: connect is for kafka:// URLs",
            hint="a connector reads or fills a Kafka topic: kafka://127.0.0.1:9092/products",
        )
    return dict(given)


def _source_name(url: str) -> str:
    """Make a name from the URL's scheme, host and path, never from user, password or query."""
    scheme, _, rest = url.partition(":")
    authority = re.split(r"[/?#]", rest.removeprefix("//"), maxsplit=1)[0]
    if ":" in rest and not (rest.startswith("//") and are_hosts(authority.rpartition("@")[2])):
        # The URL is malformed. What looks like its host or path may be a part of the password.
        rest = mask(url).partition(":")[2]
    place = re.sub(r"^//([^/?#]*@)?", "", rest).partition("?")[0].partition("#")[0]
    if scheme == "webhook":
        return _check_name(place, "a webhook")
    text = "-".join(re.findall(r"[A-Za-z0-9_.]+", f"{scheme} {place}"))
    return (
        text
        if len(text) <= 64
        else f"{text[:55]}-{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}"
    )


def _seconds(value: str | float | None, where: str) -> float | None:
    try:
        return None if value is None else units.duration(value)
    except ValueError:
        raise ConfigError(
            f"{where}: {value!r} is not a length of time",
            hint='write seconds, or "30s", "5m", "1h", "1d"',
        ) from None
