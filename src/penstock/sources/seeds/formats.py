"""Parses one line of a seed list, as text, CSV or JSON, into URL and payload.

See `lines` for how an object is split into lines.
"""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec

SUFFIXES = {"txt": "txt", "csv": "csv", "jsonl": "jsonl", "ndjson": "jsonl"}
FORMATS = tuple(dict.fromkeys(SUFFIXES.values()))
# URL (or None) and payload of a line. A blank line or a comment has neither.
ParsedLine: TypeAlias = tuple[str | None, dict[str, Any]]
_decode = msgspec.json.Decoder().decode
SHOWN = 500  # characters of a line that cannot be parsed, in the payload


class BadLine(Exception):
    """The line cannot be parsed. The text is a readable reason."""


def short_hash(text: str) -> bytes:
    """Return a hash of eight bytes, which stands for the text in a cursor."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()


def format_of(name: str) -> tuple[str, bool] | None:
    """Return the format and whether it is gzip by the suffix, or None for an unknown suffix."""
    stem = name.lower()
    compressed = stem.endswith(".gz")
    suffix = stem.removesuffix(".gz").rpartition(".")[2]
    return (SUFFIXES[suffix], compressed) if suffix in SUFFIXES and "." in stem else None


def parse_text(text: str) -> ParsedLine | None:
    """Parse a line of text with one URL. A line that starts with # is a comment."""
    url = text.strip()
    return None if not url or url.startswith("#") else (url, {"url": url})


def parse_json(text: str) -> ParsedLine | None:
    """Parse a line with one JSON object or one URL as a JSON string. Raises BadLine."""
    if not text.strip():
        return None
    try:
        found = _decode(text)
    except (msgspec.DecodeError, ValueError, RecursionError) as e:
        raise BadLine(f"the line is no JSON: {str(e)[:200]}") from None
    if isinstance(found, str):
        return found, {"url": found}
    if not isinstance(found, dict):
        raise BadLine(f"the line is JSON, but no object but {type(found).__name__}")
    return None, found


def parse_csv(columns: Sequence[str], url: str, delimiter: str, text: str) -> ParsedLine | None:
    """Parse a CSV record. `url` is the column with the URL. Raises BadLine.

    The columns come from the header or from the source's options.
    """
    fields = row(text, delimiter)
    if not any(fields):
        return None
    if len(fields) > len(columns):
        raise BadLine(f"the line has {len(fields)} fields, the header {len(columns)}")
    payload = dict(zip(columns, fields, strict=False))
    found = payload.get(url)
    return (found.strip() if found else None), payload


def row(text: str, delimiter: str) -> list[str]:
    """Split a CSV record into fields. Raises BadLine."""
    if '"' not in text:
        return text.split(delimiter) if text else []
    try:
        return next(csv.reader([text], delimiter=delimiter), [])
    except csv.Error as e:
        raise BadLine(f"the line is no CSV: {e}") from None
