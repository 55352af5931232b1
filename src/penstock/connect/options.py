"""Reads a `connect` table: validates each option, and reads secrets by reference.

See `connectors` for the meaning of the options.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import parse_qs, unquote, urlsplit

from penstock.config import units
from penstock.config.options import resolve_env, suggest
from penstock.errors import ConfigError
from penstock.rules.masking import mask

T = TypeVar("T")
# ${env:NAME} and ${file:PATH:KEY} are resolved by configuration providers of the Connect worker, so
# Penstock never sees the value.
PLACEHOLDER = re.compile(r"\$\{[A-Za-z0-9_-]+:[^{}]+\}")
_SECRET = re.compile(
    r"(?i)pass|secret|token|credential|private.?key|keyfile|access.?key|authorization|jaas"
)
MASKED = "***"


def is_placeholder(value: str) -> bool:
    return PLACEHOLDER.fullmatch(value) is not None


def is_secret(option: str, value: str, secrets: frozenset[str] = frozenset()) -> bool:
    """Return True if the value is a secret. A placeholder and the path of a key file are not."""
    if not value or is_placeholder(value) or (option == "keyfile" and value.startswith("/")):
        return False
    return option in secrets or _SECRET.search(option) is not None


def shown(option: str, value: str, secrets: frozenset[str] = frozenset()) -> str:
    """Return a value that may be printed, with secrets masked."""
    if is_secret(option, value, secrets):
        return MASKED
    return mask(value) if "://" in value else value


@dataclass(frozen=True, slots=True)
class Database:
    host: str
    port: int
    name: str
    user: str
    password: str  # "" if not set
    sslmode: str


class ConnectOptions:
    """Reader of one `connect` table. `done` raises an error for options that were not read."""

    def __init__(
        self, where: str, given: Mapping[str, Any], environment: Mapping[str, str] | None = None
    ) -> None:
        self.where, self._given, self._known = where, given, ["kind"]
        self._environment = environment

    def wrong(self, name: str, problem: str, hint: str) -> ConfigError:
        return ConfigError(f"{self.where}: connect.{name} {problem}", hint=hint)

    def _value(self, name: str) -> Any:
        self._known.append(name)
        return self._given.get(name)

    # -- kinds of options --------------------------------------------------------------------------

    def text(self, name: str, default: str | None = None, *, example: str = "") -> str:
        """Return a text. `env:NAME` is read from the environment of this command."""
        value = self._value(name)
        if value is None and default is not None:
            return default
        if value is None:
            raise self.wrong(name, "is missing", f'"{name}": "{example}"')
        if not isinstance(value, str) or not value or "\n" in value:
            raise self.wrong(name, "is not a line of text", f'"{name}": "{example or "…"}"')
        return self._from_environment(name, value)

    def _from_environment(self, name: str, value: str) -> str:
        hint = (
            f"export {value.removeprefix('env:')}=…, "
            f"or use ${{{value}}} so that the Connect worker reads its own variable"
        )
        return resolve_env(f"{self.where}: connect.{name}", value, self._environment, hint=hint)

    def choice(self, name: str, default: str, choices: Sequence[str]) -> str:
        value = self.text(name, default)
        if value not in choices:
            raise self.wrong(name, f"is {value!r}", f"one of {', '.join(choices)}")
        return value

    def _checked(
        self, name: str, default: T, fits: Callable[[Any], bool], *, hint: str, problem: str = ""
    ) -> T:
        """Return a value, or the default if it is not set. Raise ConfigError if it does not fit."""
        value: T | None = self._value(name)
        if value is None:
            return default
        if not fits(value):
            raise self.wrong(name, problem or f"is {value!r}", hint)
        return value

    def number(self, name: str, default: int, low: int, high: int) -> int:
        return self._checked(
            name,
            default,
            lambda v: isinstance(v, int) and not isinstance(v, bool) and low <= v <= high,
            hint=f"a whole number from {low} to {high}",
        )

    def flag(self, name: str, default: bool) -> bool:
        return self._checked(name, default, lambda v: isinstance(v, bool), hint="true or false")

    def names(self, name: str, default: Sequence[str]) -> list[str]:
        value = self._checked(
            name,
            default,
            lambda v: (
                isinstance(v, str | list | tuple)
                and len(v) > 0
                and all(isinstance(each, str) and each for each in v)
            ),
            problem="is not a list of names",
            hint=f'"{name}": ["…"]',
        )
        return [value] if isinstance(value, str) else list(value)

    def pairs(self, name: str) -> dict[str, str]:
        """Return a table of plain values as texts."""
        nothing: dict[str, Any] = {}
        value = self._checked(
            name,
            nothing,
            lambda v: (
                isinstance(v, Mapping)
                and all(
                    isinstance(k, str) and k and isinstance(each, str | int | float | bool)
                    for k, each in v.items()
                )
            ),
            problem="is not a table of plain values",
            hint=f'"{name}": {{"…": "…"}}',
        )
        return {
            key: self._from_environment(f"{name}.{key}", _written(v)) for key, v in value.items()
        }

    def milliseconds(self, name: str, default: str) -> str:
        value = self._value(name)
        try:
            return str(round(units.duration(default if value is None else value) * 1000))
        except ValueError:
            raise self.wrong(name, f"is {value!r}", '"20ms", "30s", "5m"') from None

    def database(self, name: str = "database") -> Database:
        """Return the database of `postgres://user:password@host:port/name`.

        The password may be a placeholder. It may also be in the option `password`.
        """
        example = "postgres://shop@db.example:5432/shop"
        url = self.text(name, example=example)
        password = self.text("password", "")
        try:
            parts = urlsplit(url)
            port = parts.port or 5432
        except ValueError:
            parts, port = urlsplit(""), 0
        database = unquote(parts.path.strip("/"))
        if (
            parts.scheme not in ("postgres", "postgresql")
            or not parts.hostname
            or not parts.username
            or not database
            or "/" in database
        ):
            raise self.wrong(name, f"is {mask(url)!r}, without a user, host or database", example)
        if not password and parts.password:
            password = parts.password if is_placeholder(parts.password) else unquote(parts.password)
        sslmode = parse_qs(parts.query).get("sslmode", [""])[-1]
        return Database(parts.hostname, port, database, unquote(parts.username), password, sslmode)

    def done(self) -> None:
        for name in self._given:
            if name not in self._known:
                hint = suggest(str(name), self._known, f"it has {', '.join(sorted(self._known))}")
                raise self.wrong(str(name), "is not an option of this kind", hint)


def _written(value: str | float | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
