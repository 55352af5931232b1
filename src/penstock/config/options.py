"""Options in URLs and in pipelines: checks their names, reads their values and `env:` references.

See `config.units` for the kinds of values, and `config.schema` for the options of Penstock itself.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from urllib.parse import parse_qsl

from penstock.config.units import Kind
from penstock.errors import ConfigError

Resolve = Callable[[str, object], object]


def suggest(
    name: str,
    known: Iterable[str],
    otherwise: str = "",
    *,
    cutoff: float = 0.6,
    command: str = "",
) -> str:
    """Return "did you mean X?" for the known name closest to `name`.

    Return `otherwise` if no name has a similarity of at least `cutoff`. `command` is put before X.
    """
    close = difflib.get_close_matches(name, list(known), 1, cutoff)
    return f"did you mean {command}{close[0]}?" if close else otherwise


def check_names(where: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise ConfigError for the first given option that is not known. `where` names the owner."""
    known = list(known)
    for name in given:
        if name not in known:
            raise ConfigError(
                f"{where}: there is no option {name!r}",
                hint=suggest(name, known, f"options: {', '.join(known) or 'none'}"),
            )


def _as_given(name: str, value: object) -> object:
    return value


def read_option(
    where: str, name: str, value: object, kind: Kind, resolve: Resolve = _as_given
) -> Any:
    """Return the value of an option. Raises ConfigError, which never shows a password.

    The error shows the given value, not what `resolve` made of it.
    """
    try:
        return kind.read(resolve(name, value))
    except (ValueError, OverflowError, TypeError):
        shown = "not valid" if "password" in name or "secret" in name else repr(value)
        raise ConfigError(f"{where}: {name} is {shown}", hint=f"use {kind.expected}") from None


def read_options(
    where: str,
    given: Mapping[str, object],
    known: Mapping[str, Kind],
    *,
    unchecked: tuple[str, ...] = (),
    resolve: Resolve = _as_given,
) -> dict[str, Any]:
    """Return the values of the given options. Raises ConfigError for an unknown name or value.

    Options whose names start with a prefix in `unchecked` are not checked. `resolve` gets the name
    and the value of each option, and returns the value to read.
    """
    names = [*known, *(f"{prefix}NAME" for prefix in unchecked)]
    check_names(where, (name for name in given if not name.startswith(unchecked)), names)
    return {
        name: read_option(where, name, value, known[name], resolve)
        if name in known
        else resolve(name, value)
        for name, value in given.items()
    }


def query_options(query: str) -> dict[str, str]:
    """Return the options of a URL's query. The last one of a name counts."""
    return dict(parse_qsl(query, keep_blank_values=True))


def resolve_env(
    where: str, value: str, env: Mapping[str, str] | None = None, *, hint: str = ""
) -> str:
    """Return the value of the environment variable NAME for `env:NAME`, or else the value itself.

    Raises ConfigError if the variable is not set. `where` names the option.
    """
    if not value.startswith("env:"):
        return value
    variable = value.removeprefix("env:")
    found = (os.environ if env is None else env).get(variable)
    if not found:
        raise ConfigError(
            f"{where} uses the variable {variable}, which is not set",
            hint=hint or f"export {variable}=…",
        )
    return found
