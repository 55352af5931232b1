"""Settings of `postgres+cdc:` and `postgres+table:` sources, parsed from the URL and its options.

Does not connect to a server.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

from penstock.authoring.pipeline import SourceSpec
from penstock.config import units
from penstock.config.options import read_option
from penstock.config.schema import Config
from penstock.errors import ConfigError
from penstock.sources.base import options
from penstock.stores.postgres.url import Address

TABLE = "scrape_requests"
CDC_OPTIONS = {
    "table": None,
    "slot": "",
    "publication": "",
    "operations": "insert",
    "snapshot": False,
    "max_lag": None,
    "max_spill": None,
    "on_limit": "stop",
}
TABLE_OPTIONS = {
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
class TableName:
    schema: str
    name: str

    @property
    def label(self) -> str:
        return f"{self.schema}.{self.name}"

    @property
    def quoted(self) -> str:
        """Quoted name, as a value for to_regclass."""
        return f"{identifier(self.schema)}.{identifier(self.name)}"

    @property
    def inline(self) -> str:
        """Quoted name as part of a statement with parameters: % is written %%."""
        return self.quoted.replace("%", "%%")


@dataclass(frozen=True)
class CdcSettings:
    source: str  # name of the source, for messages
    address: Address
    tables: tuple[TableName, ...]
    slot: str
    publication: str
    # True if Penstock may create, change and drop the publication. A publication that is named in
    # the configuration belongs to the user.
    owned: bool
    operations: frozenset[str]
    snapshot: bool
    max_lag: int  # bytes of WAL that the slot may hold
    max_spill: int  # largest size of the spill file, in bytes
    on_limit: str  # stop | drop


@dataclass(frozen=True)
class TableSettings:
    source: str
    address: Address
    table: TableName
    key: tuple[str, ...]  # empty: use the primary key
    done: str  # mark | status | delete
    column: str
    waiting: str
    taken: str
    listen: str


def cdc_settings(spec: SourceSpec, config: Config) -> CdcSettings:
    """Parse the settings of a `postgres+cdc:` source. Raises ConfigError."""
    address, chosen = _parts(spec, CDC_OPTIONS)
    where = f"source {spec.name}"
    derived = derived_name(config.namespace or "penstock", spec.name)
    slot = chosen["slot"] or derived
    if not _SLOT.fullmatch(slot):
        raise ConfigError(
            f"{where}: {slot!r} is not a valid slot name",
            hint="use 1 to 63 lower-case letters, digits and _",
        )
    publication = chosen["publication"] or derived
    if len(publication.encode()) > 63 or "\0" in publication:
        raise ConfigError(
            f"{where}: {publication[:80]!r} is not a valid publication name",
            hint="use at most 63 bytes, without NUL",
        )
    operations = frozenset(word.strip() for word in chosen["operations"].split(","))
    if not operations or not operations <= {"insert", "update", "delete"}:
        raise ConfigError(
            f"{where}: operations is {chosen['operations']!r}",
            hint='use "insert", "update" and "delete", separated by commas',
        )
    if chosen["on_limit"] not in ("stop", "drop"):
        raise ConfigError(
            f"{where}: on_limit is {chosen['on_limit']!r}",
            hint='use "stop", or "drop" to drop the slot before it fills the server\'s disk',
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
        max_lag=_size(where, chosen, "max_lag", low=1 << 20),
        max_spill=_size(where, chosen, "max_spill", low=0),
        on_limit=chosen["on_limit"],
    )


def table_settings(spec: SourceSpec) -> TableSettings:
    """Parse the settings of a `postgres+table:` source. Raises ConfigError."""
    address, chosen = _parts(spec, TABLE_OPTIONS)
    where = f"source {spec.name}"
    tables = _tables(chosen["table"], where)
    if len(tables) != 1:
        raise ConfigError(
            f"{where}: option table has {len(tables)} tables",
            hint="declare one source for each table",
        )
    if chosen["done"] not in ("mark", "status", "delete"):
        raise ConfigError(
            f"{where}: done is {chosen['done']!r}",
            hint='use "mark" to set penstock_taken_at, "status" to set a status column, or '
            '"delete" to delete the row',
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
            hint='use key = "id" or key = "shop,sku", or omit it to use the primary key',
        )
    column = (
        chosen["column"]
        or {"mark": "penstock_taken_at", "status": "status", "delete": ""}[chosen["done"]]
    )
    return TableSettings(
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
    """Return the default name of a source's slot and publication.

    It has at most 63 characters of [a-z0-9_]. A longer name is cut and gets a hash, so that two
    sources do not share a slot.
    """
    name = re.sub(r"[^a-z0-9]+", "_", f"{namespace}_{source}".lower()).strip("_")
    return (
        name
        if len(name) <= 63
        else f"{name[:54]}_{hashlib.blake2b(name.encode(), digest_size=4).hexdigest()}"
    )


def identifier(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def inline(name: str) -> str:
    """Quote an identifier for a statement with parameters: % is written %%."""
    return identifier(name).replace("%", "%%")


def as_text(names: Iterable[str]) -> str:
    """Return the columns as text, for the list of a SELECT."""
    return ", ".join(f"{inline(name)}::text" for name in names)


def _parts(spec: SourceSpec, known: Mapping[str, Any]) -> tuple[Address, dict[str, Any]]:
    """Return the server's address and the options of the source. Raises ConfigError.

    Options may also be in the URL's query. Unknown parameters there belong to the connection
    (sslmode, …).
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
            # The name is not shown: it is a part of the password if the password contains a ?.
            if not re.fullmatch(r"[a-z_]+", name):
                raise ConfigError(
                    f"source {spec.name}: the URL has an invalid option after the ?",
                    hint="write ?, @, / and % in a password as %3F, %40, %2F and %25",
                )
            others.append((name, text))
            continue
        if name in spec.options or name in given:
            raise ConfigError(
                f"source {spec.name}: {name} is set twice",
                hint="set it either in the URL or as an option",
            )
        given[name] = (
            read_option(f"source {spec.name}", name, text, units.FLAG)
            if isinstance(known[name], bool)
            else text
        )
    tail = f"?{urlencode(others, quote_via=quote)}" if others else ""
    chosen = options(dataclasses.replace(spec, options={**given, **spec.options}), known)
    return Address.parse(f"postgres:{base}{tail}"), chosen


def _tables(value: Any, where: str) -> tuple[TableName, ...]:
    names = value.split(",") if isinstance(value, str) else value
    found = []
    for name in names if isinstance(names, list) else [names]:
        match = (
            re.fullmatch(r"\s*(?:([^.\0]+)\.)?([^.\0]+?)\s*", name)
            if isinstance(name, str)
            else None
        )
        if match is None:
            raise ConfigError(
                f"{where}: {name!r} is not a table name",
                hint='use table = "public.scrape_requests", or several separated by commas',
            )
        found.append(TableName((match[1] or "public").strip('"'), match[2].strip('"')))
    return tuple(dict.fromkeys(found))


def _size(where: str, chosen: Mapping[str, Any], name: str, *, low: int) -> int:
    value = GIB if chosen[name] is None else chosen[name]
    size: int = read_option(where, name, value, units.sizes(low))
    return size
