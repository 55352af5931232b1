"""What a `postgres+cdc:` or `postgres+table:` URL and its options say, checked. Nothing is asked of
a server here.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

from penstock.authoring.pipeline import SourceSpec
from penstock.config import units
from penstock.config.schema import Config
from penstock.errors import ConfigError
from penstock.sources.base import options
from penstock.stores.postgres.url import Address

TABLE = "scrape_requests"
CDC = {
    "table": None,
    "slot": "",
    "publication": "",
    "operations": "insert",
    "snapshot": False,
    "max_lag": None,
    "max_spill": None,
    "on_limit": "stop",
}
CLAIMED = {
    "table": TABLE,
    "key": None,
    "done": "mark",
    "column": "",
    "waiting": "pending",
    "taken": "taken",
    "listen": "",
}
GIB = 1 << 30
_SLOT = re.compile(r"[a-z0-9_]{1,63}")


@dataclass(frozen=True)
class Table:
    schema: str
    name: str

    @property
    def label(self) -> str:
        return f"{self.schema}.{self.name}"

    @property
    def quoted(self) -> str:
        """As a value, for to_regclass."""
        return f"{identifier(self.schema)}.{identifier(self.name)}"

    @property
    def inline(self) -> str:
        """As part of a statement that takes parameters."""
        return self.quoted.replace("%", "%%")


@dataclass(frozen=True)
class CdcSettings:
    source: str  # its name, for messages
    address: Address
    tables: tuple[Table, ...]
    slot: str
    publication: str
    owned: bool  # the publication is ours to make and to change; one that was named is the user's
    operations: frozenset[str]
    snapshot: bool
    max_lag: int  # bytes of WAL that the slot may hold for us
    max_spill: int  # bytes of the file that takes what a full queue does not
    on_limit: str  # stop | drop


@dataclass(frozen=True)
class ClaimSettings:
    source: str
    address: Address
    table: Table
    key: tuple[str, ...]  # none: the primary key
    done: str  # mark | status | delete
    column: str
    waiting: str
    taken: str
    listen: str


def cdc_settings(spec: SourceSpec, config: Config) -> CdcSettings:
    """Raises ConfigError."""
    address, chosen = _parts(spec, CDC)
    where = f"source {spec.name}"
    derived = derived_name(config.namespace or "penstock", spec.name)
    slot = chosen["slot"] or derived
    if not _SLOT.fullmatch(slot):
        raise ConfigError(
            f"{where}: slot {slot!r} cannot be a slot's name",
            hint="1 to 63 small letters, digits and _",
        )
    publication = chosen["publication"] or derived
    if len(publication.encode()) > 63 or "\0" in publication:
        raise ConfigError(
            f"{where}: publication {publication[:80]!r} is too long for a name",
            hint="at most 63 bytes",
        )
    operations = frozenset(word.strip() for word in chosen["operations"].split(","))
    if not operations or not operations <= {"insert", "update"}:
        raise ConfigError(
            f"{where}: operations is {chosen['operations']!r}",
            hint='"insert", "update" or "insert,update"',
        )
    if chosen["on_limit"] not in ("stop", "drop"):
        raise ConfigError(
            f"{where}: on_limit is {chosen['on_limit']!r}",
            hint='"stop", or "drop" to give up the slot rather than fill the server\'s disk',
        )
    return CdcSettings(
        source=spec.name,
        address=address,
        tables=_tables(chosen["table"] if chosen["table"] is not None else TABLE, where),
        slot=slot,
        publication=publication,
        owned=not chosen["publication"],
        operations=operations,
        snapshot=chosen["snapshot"],
        max_lag=_size(chosen["max_lag"], GIB, 1 << 20, f"{where}: max_lag"),
        max_spill=_size(chosen["max_spill"], GIB, 0, f"{where}: max_spill"),
        on_limit=chosen["on_limit"],
    )


def claim_settings(spec: SourceSpec) -> ClaimSettings:
    """Raises ConfigError."""
    address, chosen = _parts(spec, CLAIMED)
    where = f"source {spec.name}"
    tables = _tables(chosen["table"], where)
    if len(tables) != 1:
        raise ConfigError(
            f"{where}: table names {len(tables)} tables",
            hint="one table for one source; declare a source for each",
        )
    if chosen["done"] not in ("mark", "status", "delete"):
        raise ConfigError(
            f"{where}: done is {chosen['done']!r}",
            hint='"mark" sets penstock_taken_at, "status" sets a status column, "delete" removes the row',
        )
    key = chosen["key"]
    names = (
        ()
        if key is None
        else tuple(word.strip() for word in key.split(","))
        if isinstance(key, str)
        else tuple(key)
        if isinstance(key, list)
        else (key,)
    )
    if not all(isinstance(name, str) and name for name in names):
        raise ConfigError(
            f"{where}: key is {key!r}",
            hint='key = "id", or "shop,sku"; leave it out for the primary key',
        )
    column = (
        chosen["column"]
        or {"mark": "penstock_taken_at", "status": "status", "delete": ""}[chosen["done"]]
    )
    return ClaimSettings(
        source=spec.name,
        address=address,
        table=tables[0],
        key=names,
        done=chosen["done"],
        column=column,
        waiting=chosen["waiting"],
        taken=chosen["taken"],
        listen=chosen["listen"],
    )


def derived_name(namespace: str, source: str) -> str:
    """A slot's name may hold little; two sources do not share one."""
    words = re.sub(r"[^a-z0-9]+", "_", f"{namespace}_{source}".lower()).strip("_")
    return (
        words
        if len(words) <= 63
        else f"{words[:54]}_{hashlib.blake2b(words.encode(), digest_size=4).hexdigest()}"
    )


def identifier(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def inline(name: str) -> str:
    """As part of a statement that takes parameters."""
    return identifier(name).replace("%", "%%")


def _parts(spec: SourceSpec, known: Mapping[str, Any]) -> tuple[Address, dict[str, Any]]:
    """(where it is, what else was said). Options may stand in the URL's query; what is not ours
    there is the connection's (sslmode, …).
    """
    rest = spec.url.partition(":")[2]
    if not rest.startswith("//"):
        raise ConfigError(
            f"source {spec.name}: the URL has no //",
            hint="postgres+cdc://user:password@host:5432/database?table=public.scrape_requests",
        )
    base, _, query = rest.partition("?")
    given: dict[str, Any] = {}
    others: list[tuple[str, str]] = []
    for name, text in parse_qsl(query, keep_blank_values=True):
        if name not in known:
            if not re.fullmatch(
                r"[a-z_]+", name
            ):  # not shown: where a password holds a ?, this is the other half of it
                raise ConfigError(
                    f"source {spec.name}: what stands behind the ? of its URL is no option",
                    hint="?, @, / and % in a password are written %3F, %40, %2F and %25",
                )
            others.append((name, text))
            continue
        if name in spec.options or name in given:
            raise ConfigError(
                f"source {spec.name}: {name} is said twice",
                hint="say it in the URL or as an option",
            )
        given[name] = (
            _flag(text, f"source {spec.name}: {name}") if isinstance(known[name], bool) else text
        )
    tail = f"?{urlencode(others, quote_via=quote)}" if others else ""
    chosen = options(dataclasses.replace(spec, options={**given, **spec.options}), known)
    return Address.parse(f"postgres:{base}{tail}"), chosen


def _flag(text: str, where: str) -> bool:
    if text.lower() not in ("true", "false", "1", "0", "yes", "no"):
        raise ConfigError(f"{where} is {text!r}", hint="true or false")
    return text.lower() in ("true", "1", "yes")


def _tables(value: Any, where: str) -> tuple[Table, ...]:
    words = value.split(",") if isinstance(value, str) else value
    found = []
    for word in words if isinstance(words, list) else [words]:
        match = (
            re.fullmatch(r"\s*(?:([^.\0]+)\.)?([^.\0]+?)\s*", word)
            if isinstance(word, str)
            else None
        )
        if match is None:
            raise ConfigError(
                f"{where}: table {word!r} names no table",
                hint='table = "public.scrape_requests", or several with commas between them',
            )
        found.append(Table((match[1] or "public").strip('"'), match[2].strip('"')))
    return tuple(dict.fromkeys(found))


def _size(value: Any, default: int, low: int, where: str) -> int:
    try:
        size = default if value is None else units.size(value)
    except ValueError:
        size = -1
    if size < low:
        raise ConfigError(
            f"{where} is {value!r}",
            hint=f'a size such as "512MiB" or "10GiB", at least {units.write_size(low) if low else "0"}',
        )
    return size
