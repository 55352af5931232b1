"""Common parts of sinks: URL options, and records as columns."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import msgspec

from penstock.config import units
from penstock.config.options import check_names, query_options, read_option
from penstock.errors import ConfigError

PROVENANCE = ("event_id", "trace_id", "url", "key", "extractor", "version", "fetched_at")
PREFIX = "_penstock_"
PROVENANCE_COLUMNS = tuple(PREFIX + name for name in PROVENANCE)
# Fields without a column, as a JSON object. So an accepted row can never block a sink.
REST = PREFIX + "rest"
DELETED = PREFIX + "deleted"
MAX_COLUMNS = 1000


def file_url(
    url: str, options: Mapping[str, Any], base: Path, *, scheme: str, known: tuple[str, ...]
) -> tuple[Path, dict[str, Any]]:
    """Return the path and the checked options of `scheme:path?option=value`.

    Reads no disk. Raise ConfigError if the URL or an option is not valid.
    """
    example = f"write {scheme}:products.{'db' if scheme == 'sqlite' else scheme}"
    if not url.startswith(scheme + ":"):
        raise ConfigError(f"sink {url!r} is not a {scheme} URL", hint=example)
    path, _, query = url.removeprefix(scheme + ":").partition("?")
    if path.startswith("//") and not path.startswith("///"):
        raise ConfigError(
            f"sink {url!r} has a host where a path must be",
            hint=f"write {scheme}:relative/path or {scheme}:///absolute/path",
        )
    path = unquote(path.removeprefix("//"))
    if not path or path.endswith("/") or path in (".", "..", "-", ":memory:") or "\0" in path:
        raise ConfigError(f"sink {url!r} has no file name", hint=example)
    given = {**query_options(query), **options}
    check_names(f"sink {url!r}", given, known)
    return Path(os.path.abspath(base / Path(path).expanduser())), given


def option_max_columns(url: str, given: Mapping[str, Any], *, limit: int) -> int:
    kind = units.counts(len(PROVENANCE) + 3, limit)
    count: int = read_option(
        f"sink {url!r}", "max_columns", given.get("max_columns", MAX_COLUMNS), kind
    )
    return count


class Flat(NamedTuple):
    fields: dict[str, Any]
    provenance: dict[str, Any]  # by column name
    rest: dict[str, Any]  # fields without a column
    deleted: bool = False  # the record was removed, and `fields` has only its key


def flatten(body: bytes) -> Flat:
    """Return a row's body as columns. Never raises: other text than a JSON object is in `rest`."""
    try:
        record = msgspec.json.decode(body)
        if not isinstance(record, dict):
            raise ValueError
    except (ValueError, RecursionError):  # msgspec and Unicode errors are ValueErrors
        return Flat({}, {}, {"body": body.decode("utf-8", "replace")})
    origin = record.pop("_penstock", None)
    rest: dict[str, Any] = {}
    if not isinstance(origin, dict):
        origin = {}
    # Names with this prefix are reserved. Fields of the user with such names are kept in `rest`.
    if any(name.startswith(PREFIX) for name in record):
        rest = {name: record.pop(name) for name in list(record) if name.startswith(PREFIX)}
    deleted = origin.get("deleted") is True
    if deleted:
        rest[DELETED] = True  # marks the row in a target to which rows are only appended
    return Flat(record, {PREFIX + name: origin.get(name) for name in PROVENANCE}, rest, deleted)


def json_text(value: Any) -> str:
    return msgspec.json.encode(value).decode()
