"""Loads command line, environment and penstock.toml into one frozen Config, and checks it.

No store or server is opened here.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import msgspec

from penstock.config.options import suggest
from penstock.config.pools import check_pools, pool_names
from penstock.config.schema import (
    BY_PATH,
    OPTIONS,
    POOL,
    PREFIX,
    SECTIONS,
    Config,
    Option,
    ProxyPoolConfig,
    pool_options,
)
from penstock.errors import ConfigError

__all__ = ["OPTIONS", "Config", "Loaded", "Option", "Shown", "load", "options", "show"]

FILE_NAME = "penstock.toml"
# Variables with the prefix PENSTOCK_ that are not options: the configuration file, the virtual
# environment of ./dev, and options of the Kafka client.
OTHER_VARIABLES = frozenset({"PENSTOCK_CONFIG", "PENSTOCK_VENV", "PENSTOCK_KAFKA_OPTIONS"})
STORES = (
    "broker.url",
    "topics.requests",
    "topics.pages",
    "topics.records",
    "ledger.url",
    "claims.url",
    "pages.url",
)
# Kubernetes sets these variables in every pod if a Service has a name that begins with "penstock".
_INJECTED = re.compile(
    r"_SERVICE_(HOST|PORT(_\w+)?)$|_PORT_\d+_(TCP|UDP|SCTP)(_(ADDR|PORT|PROTO))?$"
)


# -- loading ---------------------------------------------------------------------------------------


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration, the origin of each value, and the file that was read (if any)."""

    config: Config
    origins: Mapping[str, str]
    file: Path | None = None


class Shown(NamedTuple):
    path: str
    value: str
    origin: str


def load(cli: Mapping[str, str], env: Mapping[str, str], cwd: Path) -> Loaded:
    """Load the configuration: command line > environment > penstock.toml > defaults.

    Raise only ConfigError. `cli` maps option paths ("fetch.concurrency") to texts. Its key "config"
    names the file, as PENSTOCK_CONFIG does. Relative paths are relative to `cwd`, not to the file.
    An empty variable counts as unset.
    """
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    file = _file(cli.get("config") or env.get("PENSTOCK_CONFIG"), cwd)
    document, shown = _document(file, cwd)
    pools = pool_names(document, env, cli, shown)
    table = _KnownOptions(
        [*OPTIONS, *(option for name in pools for option in pool_options(name))], pools
    )
    for option, origin, value in (
        *_from_file(document, shown, table),
        *_from_env(env, cwd, table),
        *_from_cli(cli, table),
    ):
        values[option.path], origins[option.path] = value, origin
    _derive(values, cwd)
    _check_consistency(values, origins)
    config = _build(Config, values)
    if pools:
        config = msgspec.structs.replace(
            config,
            proxies={name: _build(ProxyPoolConfig, values, f"{POOL}.{name}.") for name in pools},
        )
        check_pools(config.proxies)
    return Loaded(
        config=config,
        origins={path: origins.get(path, "default") for path in table.by_path},
        file=file,
    )


def options(config: Config) -> tuple[Option, ...]:
    """Return all options, with those of every proxy pool of this configuration."""
    return (*OPTIONS, *(option for name in config.proxies for option in pool_options(name)))


def show(loaded: Loaded) -> list[Shown]:
    """Return every option with its value and origin, in the order of definition.

    Passwords are masked.
    """
    return [
        Shown(
            option.path,
            _written(option, _at(loaded.config, option.path)),
            loaded.origins[option.path],
        )
        for option in options(loaded.config)
    ]


class _KnownOptions:
    """All known options, with those of the user's proxy pools."""

    def __init__(self, found: list[Option], pools: list[str]) -> None:
        self.by_path = {option.path: option for option in found}
        self.by_variable = {variable: option for option in found for variable in option.variables}
        self.sections = SECTIONS | {POOL} | {f"{POOL}.{name}" for name in pools}


_Found = tuple[Option, str, Any]


def _file(named: str | None, cwd: Path) -> Path | None:
    if named:
        return cwd / named
    return cwd / FILE_NAME if (cwd / FILE_NAME).exists() else None


def _document(file: Path | None, cwd: Path) -> tuple[dict[str, Any], str]:
    if file is None:
        return {}, ""
    shown = str(file.relative_to(cwd)) if file.is_relative_to(cwd) else str(file)
    try:
        return tomllib.loads(file.read_bytes().decode("utf-8-sig")), shown
    except FileNotFoundError:
        raise ConfigError(
            f"{shown}: there is no such file", hint="run `penstock init`, or use another --config"
        ) from None
    except OSError as e:
        raise ConfigError(
            f"{shown}: cannot be read ({e.strerror})",
            hint="check its permissions, or use another --config",
        ) from e
    except UnicodeDecodeError as e:
        raise ConfigError(
            f"{shown}: is not UTF-8 text (byte {e.start})", hint="save it as UTF-8"
        ) from e
    except (tomllib.TOMLDecodeError, RecursionError) as e:
        raise ConfigError(
            f"{shown}: is not valid TOML: {e}",
            hint='write key = value, with texts and durations in quotes: lease = "30s"',
        ) from e


def _from_file(document: Mapping[str, Any], shown: str, known: _KnownOptions) -> Iterator[_Found]:
    for path, value in _leaves(document, "", shown, known):
        yield known.by_path[path], shown, _read(known.by_path[path], value, shown, is_file=True)


def _leaves(
    table: Mapping[str, Any], prefix: str, shown: str, known: _KnownOptions
) -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        path = prefix + key
        if path in known.by_path:
            yield path, value
        elif path in known.sections:
            if not isinstance(value, dict):
                inside = next(
                    option
                    for option in known.by_path.values()
                    if option.path.startswith(path + ".")
                )
                raise ConfigError(
                    f"{path}: is a section of {shown}, not a value",
                    hint=_toml(inside, with_section=True),
                )
            yield from _leaves(value, path + ".", shown, known)
        else:
            raise ConfigError(
                f"{path}: there is no such option (in {shown})",
                hint=_suggest(path, [*known.by_path, *sorted(known.sections)]),
            )


def _from_env(env: Mapping[str, str], cwd: Path, table: _KnownOptions) -> Iterator[_Found]:
    seen: dict[str, str] = {}
    for variable in sorted(env):
        if not variable.startswith(PREFIX) or variable in OTHER_VARIABLES or not env[variable]:
            continue
        option, text = table.by_variable.get(variable), env[variable]
        if option is None:
            option = table.by_variable.get(variable.removesuffix("_FILE"))
            if option is None or not option.secret:
                if _INJECTED.search(variable) or (variable.endswith("_PORT") and "://" in text):
                    continue
                known = [
                    *table.by_variable,
                    *(f"{v}_FILE" for v, o in table.by_variable.items() if o.secret),
                ]
                raise ConfigError(
                    f"{variable}: there is no such variable", hint=_suggest(variable, known)
                )
            text = _content(variable, cwd / text)
        if option.path in seen:
            raise ConfigError(
                f"{option.path}: both {seen[option.path]} and {variable} are set",
                hint=f"unset {variable}",
            )
        seen[option.path] = variable
        yield option, variable, _read(option, text, variable)


def _content(variable: str, file: Path) -> str:
    try:
        return file.read_text("utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as e:
        reason = e.strerror if isinstance(e, OSError) else "not UTF-8 text"
        raise ConfigError(
            f"{variable}: {file} cannot be read ({reason})",
            hint=f"put the value into that file, or set {variable.removesuffix('_FILE')}",
        ) from e


def _from_cli(cli: Mapping[str, str], known: _KnownOptions) -> Iterator[_Found]:
    for path, text in cli.items():
        if path == "config":
            continue
        if path not in known.by_path:
            raise ConfigError(
                f"{path}: there is no such option", hint=_suggest(path, list(known.by_path))
            )
        yield known.by_path[path], "command line", _read(known.by_path[path], text, "command line")


# -- one value -------------------------------------------------------------------------------------


def _read(option: Option, value: object, origin: str, *, is_file: bool = False) -> Any:
    try:
        return option.kind.read(value)
    except (ValueError, OverflowError):
        pass
    if is_file:
        where, hint = option.path, _toml(option)
    else:
        where = f"{option.path} ({origin})"
        hint = (
            f"{origin}={option.example}"
            if origin.startswith(PREFIX)
            else f"{option.path}={option.example}"
        )
    if origin.endswith("_FILE"):
        hint = f"a file that contains {option.example}"
    raise ConfigError(
        f"{where}: expected {option.kind.expected}, got {_describe(option, value)}", hint=hint
    )


def _describe(option: Option, value: object) -> str:
    if option.secret:
        return "another value (not shown, because it may contain a password)"
    if isinstance(value, str):
        return (
            '"'
            + value[:80].encode("unicode_escape").decode().replace('"', '\\"')
            + ('…"' if len(value) > 80 else '"')
        )
    if isinstance(value, bool):
        return str(value).lower()
    return (
        "a table"
        if isinstance(value, dict)
        else "a list"
        if isinstance(value, list)
        else str(value)[:80]
    )


def _toml(option: Option, *, with_section: bool = False) -> str:
    section, _, key = option.path.rpartition(".")
    value = f'"{option.example}"' if option.kind.quoted else option.example
    return f"[{section}] {key} = {value}" if with_section else f"{key} = {value}"


def _suggest(name: str, known: list[str]) -> str:
    last = re.split(r"[._]", name)[-1]
    # A known key, given in the wrong section.
    elsewhere = [f"did you mean {path}?" for path in known if path.rpartition(".")[2] == last]
    otherwise = [*elsewhere, "`penstock config show` lists every option"]
    return suggest(name, known, otherwise[0], cutoff=0.75)


def _written(option: Option, value: Any) -> str:
    if value in ("", ()):
        return ""
    if not option.secret:
        return option.kind.write(value)
    return option.kind.masked(value) if option.kind.masked is not None else "***"


# -- the whole configuration -----------------------------------------------------------------------


def _derive(values: dict[str, Any], cwd: Path) -> None:
    """Set defaults that depend on other options, and make relative paths absolute.

    So a later chdir has no effect.
    """
    state = cwd.absolute() / values.get("state.dir", ".penstock")
    values["state.dir"] = state
    _derive_stores(values, state)
    for path in STORES:
        scheme, _, rest = values[path].partition(":")
        if scheme in ("sqlite", "file") and rest and not rest.startswith(("/", ":")):
            values[path] = f"{scheme}:{cwd.absolute() / rest}"
    in_flight = values.get("fetch.concurrency", BY_PATH["fetch.concurrency"].default)
    # With an unlimited rate, a lower default here would limit the rate again.
    values.setdefault("pace.concurrency", in_flight if values.get("pace.rate") == math.inf else 8)
    values.setdefault("fetch.prefetch", min(4 * in_flight, 100_000))


def _derive_stores(values: dict[str, Any], state: Path) -> None:
    """Set stores that are not given to the broker's server, which the whole fleet can reach.

    With a server as broker, a store is never silently a file of this machine.
    """
    broker = values.setdefault("broker.url", f"sqlite:{state / 'penstock.db'}")
    for topic in ("topics.requests", "topics.pages", "topics.records"):
        values.setdefault(topic, broker)
    if _kind(broker) == "sqlite":
        ledger = values.setdefault("ledger.url", broker)
        in_sql = _kind(ledger) in ("sqlite", "postgres")
        values.setdefault("claims.url", ledger if in_sql else broker)
        in_postgres = _kind(ledger) == "postgres"
        values.setdefault("pages.url", ledger if in_postgres else f"file:{state / 'pages'}")
        return
    servers = [url for url in (values.get("ledger.url"), broker) if url]
    for path, kinds in (
        ("ledger.url", ("postgres",)),
        ("claims.url", ("redis", "postgres")),
        ("pages.url", ("postgres",)),
    ):
        # If none fits, the error is raised when the stores are opened. `config show` does not need
        # them.
        found = next((url for kind in kinds for url in servers if _kind(url) == kind), "")
        values.setdefault(path, found)


def _kind(url: str) -> str:
    scheme = url.partition(":")[0].partition("+")[0]
    return {"postgresql": "postgres", "rediss": "redis", "amqps": "amqp"}.get(scheme, scheme)


def _check_consistency(values: dict[str, Any], origins: Mapping[str, str]) -> None:
    """Raise ConfigError for valid values that contradict each other.

    A default is lowered to a smaller limit that was set.
    """
    rules = (
        ("retry.base", "retry.max", "the first back-off is longer than the longest"),
        (
            "net.timeout.connect",
            "net.timeout.total",
            "connecting may take longer than the whole exchange",
        ),
        (
            "net.timeout.first_byte",
            "net.timeout.total",
            "the first byte may take longer than the whole exchange",
        ),
        (
            "fetch.concurrency",
            "fetch.prefetch",
            "a worker cannot have more requests in flight than it holds events",
        ),
        ("breaker.alert", "breaker.dead_share", "the alert would come after the pause"),
        ("net.max_body", "fetch.bytes", "one body may be larger than the memory for all bodies"),
    )
    for small, large, problem in rules:
        low, high = (values.get(path, BY_PATH[path].default) for path in (small, large))
        if low <= high:
            continue
        if small not in origins:
            values[small] = high
            continue
        shown = ", ".join(
            f"{path} = {BY_PATH[path].kind.write(value)}"
            for path, value in ((small, low), (large, high))
        )
        hint = f"raise {large} or lower {small}" if large in origins else f"set {large} as well"
        raise ConfigError(f"{small}: {problem} ({shown})", hint=hint)


def _build(section: type[Any], values: Mapping[str, Any], prefix: str = "") -> Any:
    found: dict[str, Any] = {}
    for field in msgspec.structs.fields(section):
        path = prefix + field.name
        if path in SECTIONS:
            found[field.name] = _build(get_type_hints(section)[field.name], values, path + ".")
        elif path in values:
            found[field.name] = values[path]
    return section(**found)


def _at(config: Config, path: str) -> Any:
    value: Any = config
    for name in path.split("."):
        value = value[name] if isinstance(value, Mapping) else getattr(value, name)
    return value
