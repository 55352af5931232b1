"""What every sink shares: how its URL is read, how a record becomes columns. No target is touched
here.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote

import msgspec

from penstock.errors import ConfigError

PROVENANCE = ("event_id", "trace_id", "url", "key", "extractor", "version", "fetched_at")
PREFIX = "_penstock_"
PROVENANCE_COLUMNS = tuple(PREFIX + name for name in PROVENANCE)
REST = (
    PREFIX + "rest"
)  # what has no column of its own, as a JSON object: a row that is accepted must never be what blocks a sink
DELETED = PREFIX + "deleted"
MAX_COLUMNS = 1000


def file_url(
    url: str, options: Mapping[str, Any], base: Path, *, scheme: str, known: tuple[str, ...]
) -> tuple[Path, dict[str, Any]]:
    """The path and the checked options of `scheme:path?option=value`. Reads no disk. Raises
    ConfigError.
    """
    example = f"write {scheme}:products.{'db' if scheme == 'sqlite' else scheme}"
    if not url.startswith(scheme + ":"):
        raise ConfigError(f"sink {url!r} is no {scheme} URL", hint=example)
    path, _, query = url.removeprefix(scheme + ":").partition("?")
    if path.startswith("//") and not path.startswith("///"):
        raise ConfigError(
            f"sink {url!r} names a host where a path belongs",
            hint=f"{scheme}:relative/path or {scheme}:///absolute/path",
        )
    path = unquote(path.removeprefix("//"))
    if not path or path.endswith("/") or path in (".", "..", "-", ":memory:") or "\0" in path:
        raise ConfigError(f"sink {url!r} names no file", hint=example)
    given = dict(parse_qsl(query, keep_blank_values=True)) | dict(options)
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = (
                f"did you mean {near[0]!r}?"
                if near
                else f"{scheme} sinks know: {', '.join(known) or 'no options'}"
            )
            raise ConfigError(f"sink {url!r}: unknown option {name!r}", hint=hint)
    return Path(os.path.abspath(base / Path(path).expanduser())), given


def option_max_columns(url: str, given: Mapping[str, Any], *, most: int) -> int:
    raw = given.get("max_columns", MAX_COLUMNS)
    least = len(PROVENANCE) + 3
    try:
        value = int(str(raw))
    except ValueError:
        value = -1
    if not least <= value <= most:
        raise ConfigError(
            f"sink {url!r}: max_columns is {raw!r}", hint=f"a number from {least} to {most}"
        )
    return value


class Flat(NamedTuple):
    fields: dict[str, Any]
    provenance: dict[str, Any]  # by column name
    rest: dict[str, Any]
    deleted: bool = False  # there is no such record any more; `fields` are no more than its key


def flatten(body: bytes) -> Flat:
    """A row's body as columns. Never raises: what is no JSON object is kept as text in `rest`."""
    try:
        record = msgspec.json.decode(body)
        if not isinstance(record, dict):
            raise ValueError
    except (ValueError, RecursionError):  # msgspec's and Unicode's errors are ValueErrors
        return Flat({}, {}, {"body": body.decode("utf-8", "replace")})
    origin = record.pop("_penstock", None)
    rest: dict[str, Any] = {}
    if not isinstance(origin, dict):
        origin = {}
    if any(name.startswith(PREFIX) for name in record):  # ours; the user's are kept all the same
        rest = {name: record.pop(name) for name in list(record) if name.startswith(PREFIX)}
    deleted = origin.get("deleted") is True
    if deleted:
        rest[DELETED] = True  # where rows are only added, it is the mark of this one
    return Flat(record, {PREFIX + name: origin.get(name) for name in PROVENANCE}, rest, deleted)


def json_text(value: Any) -> str:
    return msgspec.json.encode(value).decode()
