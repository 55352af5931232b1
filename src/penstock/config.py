"""Command line, environment and penstock.toml become one frozen Config here, checked before anything opens; nothing is opened here."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import msgspec

from penstock import units
from penstock.errors import ConfigError
from penstock.options import BY_PATH, BY_VARIABLE, OPTIONS, PREFIX, SECTIONS, Config, Option

__all__ = ["OPTIONS", "Config", "Loaded", "Option", "Shown", "load", "show"]

FILE_NAME = "penstock.toml"
# Variables with our prefix that are no options: where the file is, and where ./dev keeps its environment.
OTHER_VARIABLES = frozenset({"PENSTOCK_CONFIG", "PENSTOCK_VENV"})
# Kubernetes puts these into every pod beside a Service whose name begins with "penstock".
_INJECTED = re.compile(r"_SERVICE_(HOST|PORT(_\w+)?)$|_PORT_\d+_(TCP|UDP|SCTP)(_(ADDR|PORT|PROTO))?$")


# -- loading -----------------------------------------------------------------------------------------------------------


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration, where each value came from, and the file that was read (if any)."""

    config: Config
    origins: Mapping[str, str]
    file: Path | None = None


class Shown(NamedTuple):
    path: str
    value: str
    origin: str


def load(cli: Mapping[str, str], env: Mapping[str, str], cwd: Path) -> Loaded:
    """Command line > environment > penstock.toml > defaults. Raises ConfigError, and nothing else.

    `cli` maps option paths ("fetch.concurrency") to texts; its key "config" names the file, as PENSTOCK_CONFIG does.
    Relative paths are relative to `cwd`, wherever the file is. An empty variable counts as unset.
    """
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    file = _file(cli.get("config") or env.get("PENSTOCK_CONFIG"), cwd)
    for option, origin, value in (*_from_file(file, cwd), *_from_env(env, cwd), *_from_cli(cli)):
        values[option.path], origins[option.path] = value, origin
    _derive(values, cwd)
    _agree(values, origins)
    return Loaded(config=_build(Config, values), origins={path: origins.get(path, "default") for path in BY_PATH}, file=file)


def show(loaded: Loaded) -> list[Shown]:
    """Every option with its value and origin, in the order of the table; passwords masked."""
    return [Shown(option.path, _written(option, _at(loaded.config, option.path)), loaded.origins[option.path]) for option in OPTIONS]


_Found = tuple[Option, str, Any]


def _file(named: str | None, cwd: Path) -> Path | None:
    if named:
        return cwd / named
    return cwd / FILE_NAME if (cwd / FILE_NAME).exists() else None


def _from_file(file: Path | None, cwd: Path) -> Iterator[_Found]:
    if file is None:
        return
    shown = str(file.relative_to(cwd)) if file.is_relative_to(cwd) else str(file)
    try:
        document = tomllib.loads(file.read_bytes().decode("utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(f"{shown}: there is no such file", hint="penstock init, or give another --config") from None
    except OSError as e:
        raise ConfigError(f"{shown}: cannot be read ({e.strerror})", hint="check its permissions, or give another --config") from e
    except UnicodeDecodeError as e:
        raise ConfigError(f"{shown}: is not UTF-8 text (byte {e.start})", hint="save it as UTF-8") from e
    except (tomllib.TOMLDecodeError, RecursionError) as e:
        raise ConfigError(f"{shown}: is not valid TOML: {e}", hint='a line reads key = value; texts and durations are in quotes: lease = "30s"') from e
    for path, value in _leaves(document, "", shown):
        yield BY_PATH[path], shown, _read(BY_PATH[path], value, shown, is_file=True)


def _leaves(table: Mapping[str, Any], prefix: str, shown: str) -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        path = prefix + key
        if path in BY_PATH:
            yield path, value
        elif path in SECTIONS:
            if not isinstance(value, dict):
                inside = next(option for option in OPTIONS if option.path.startswith(path + "."))
                raise ConfigError(f"{path}: is a section of {shown}, not a value", hint=_toml(inside, whole=True))
            yield from _leaves(value, path + ".", shown)
        else:
            raise ConfigError(f"{path}: there is no such option (in {shown})", hint=_suggest(path, [*BY_PATH, *sorted(SECTIONS)]))


def _from_env(env: Mapping[str, str], cwd: Path) -> Iterator[_Found]:
    seen: dict[str, str] = {}
    for variable in sorted(env):
        if not variable.startswith(PREFIX) or variable in OTHER_VARIABLES or not env[variable]:
            continue
        option, text = BY_VARIABLE.get(variable), env[variable]
        if option is None:
            option = BY_VARIABLE.get(variable.removesuffix("_FILE"))
            if option is None or not option.secret:
                if _INJECTED.search(variable) or (variable.endswith("_PORT") and "://" in text):
                    continue
                known = [*BY_VARIABLE, *(f"{v}_FILE" for v, o in BY_VARIABLE.items() if o.secret)]
                raise ConfigError(f"{variable}: there is no such variable", hint=_suggest(variable, known))
            text = _content(variable, cwd / text)
        if option.path in seen:
            raise ConfigError(f"{option.path}: both {seen[option.path]} and {variable} are set", hint=f"unset {variable}")
        seen[option.path] = variable
        yield option, variable, _read(option, text, variable)


def _content(variable: str, file: Path) -> str:
    try:
        return file.read_text("utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as e:
        reason = e.strerror if isinstance(e, OSError) else "not UTF-8 text"
        raise ConfigError(f"{variable}: {file} cannot be read ({reason})", hint=f"put the value into that file, or set {variable.removesuffix('_FILE')}") from e


def _from_cli(cli: Mapping[str, str]) -> Iterator[_Found]:
    for path, text in cli.items():
        if path == "config":
            continue
        if path not in BY_PATH:
            raise ConfigError(f"{path}: there is no such option", hint=_suggest(path, list(BY_PATH)))
        yield BY_PATH[path], "command line", _read(BY_PATH[path], text, "command line")


# -- one value ---------------------------------------------------------------------------------------------------------


def _read(option: Option, value: object, origin: str, *, is_file: bool = False) -> Any:
    try:
        return option.kind.read(value)
    except (ValueError, OverflowError):
        pass
    if is_file:
        where, hint = option.path, _toml(option)
    else:
        where = f"{option.path} ({origin})"
        hint = f"{origin}={option.example}" if origin.startswith(PREFIX) else f"{option.path}={option.example}"
    if origin.endswith("_FILE"):
        hint = f"a file that holds {option.example}"
    raise ConfigError(f"{where}: expected {option.kind.expected}, got {_told(option, value)}", hint=hint)


def _told(option: Option, value: object) -> str:
    if option.secret:
        return "something else (not shown: it may hold a password)"
    if isinstance(value, str):
        return '"' + value[:80].encode("unicode_escape").decode().replace('"', '\\"') + ('…"' if len(value) > 80 else '"')
    if isinstance(value, bool):
        return str(value).lower()
    return "a table" if isinstance(value, dict) else "a list" if isinstance(value, list) else str(value)[:80]


def _toml(option: Option, *, whole: bool = False) -> str:
    section, _, key = option.path.rpartition(".")
    value = f'"{option.example}"' if option.kind.quoted else option.example
    return f"[{section}] {key} = {value}" if whole else f"{key} = {value}"


def _suggest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    if not close:  # the right key in the wrong section
        last = re.split(r"[._]", name)[-1]
        close = [path for path in known if re.split(r"\.", path)[-1] == last][:1]
    return f"did you mean {close[0]}?" if close else "penstock config show lists every option"


def _written(option: Option, value: Any) -> str:
    if value in ("", ()):
        return ""
    text = option.kind.write(value)
    if not option.secret:
        return text
    return units.mask(text) if option.kind is units.DSN else "***"


# -- the whole ---------------------------------------------------------------------------------------------------------


def _derive(values: dict[str, Any], cwd: Path) -> None:
    """Defaults that depend on other options; relative paths become absolute, so a later chdir changes nothing."""
    state = cwd.absolute() / values.get("state.dir", ".penstock")
    values["state.dir"] = state
    for path, default in (("broker.url", "sqlite"), ("ledger.url", "sqlite"), ("claims.url", "sqlite"), ("pages.url", "file")):
        url = values.get(path) or f"{default}:{state / ('penstock.db' if default == 'sqlite' else 'pages')}"
        scheme, _, rest = url.partition(":")
        if scheme in ("sqlite", "file") and rest and not rest.startswith(("/", ":")):
            url = f"{scheme}:{cwd.absolute() / rest}"
        values[path] = url
    values.setdefault("fetch.prefetch", min(8 * values.get("fetch.concurrency", BY_PATH["fetch.concurrency"].default), 100_000))


def _agree(values: dict[str, Any], origins: Mapping[str, str]) -> None:
    """Values that are each fine and together are not. A default gives way to a smaller limit that was set."""
    rules = (
        ("retry.base", "retry.max", "the first back-off is longer than the longest"),
        ("net.timeout.connect", "net.timeout.total", "connecting may take longer than the whole exchange"),
        ("net.timeout.first_byte", "net.timeout.total", "the first byte may take longer than the whole exchange"),
        ("fetch.concurrency", "fetch.prefetch", "a worker cannot have more in flight than it holds"),
        ("breaker.alert", "breaker.dead_share", "the alert comes after the stop"),
        ("net.max_body", "fetch.bytes", "one body is larger than all that a worker may hold"),
    )
    for small, large, why in rules:
        low, high = (values.get(path, BY_PATH[path].default) for path in (small, large))
        if low <= high:
            continue
        if small not in origins:
            values[small] = high
            continue
        shown = ", ".join(f"{path} = {BY_PATH[path].kind.write(value)}" for path, value in ((small, low), (large, high)))
        hint = f"raise {large} or lower {small}" if large in origins else f"set {large} as well"
        raise ConfigError(f"{small}: {why} ({shown})", hint=hint)


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
        value = getattr(value, name)
    return value
