"""Parses one line of a seed list, as text, CSV or JSON, into URL and payload.

See `lines` for how an object is split into lines.
"""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

SUFFIXES = {"txt": "txt", "csv": "csv", "jsonl": "jsonl", "ndjson": "jsonl"}
FORMATS = tuple(dict.fromkeys(SUFFIXES.values()))
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


class Format(Protocol):
    """Parser for the records of one object."""

    def read(self, text: str) -> tuple[str | None, dict[str, Any]] | None:
        """Return URL (or None) and payload, or None for a blank line or comment. Raises BadLine."""


class Text:
    """Parser for text with one URL per line. A line that starts with # is a comment."""

    def read(self, text: str) -> tuple[str | None, dict[str, Any]] | None:
        url = text.strip()
        return None if not url or url.startswith("#") else (url, {"url": url})


class JsonLines:
    """Parser for lines with one JSON object or one URL as a JSON string."""

    def __init__(self) -> None:
        self._decode = msgspec.json.Decoder().decode

    def read(self, text: str) -> tuple[str | None, dict[str, Any]] | None:
        if not text.strip():
            return None
        try:
            found = self._decode(text)
        except (msgspec.DecodeError, ValueError, RecursionError) as e:
            raise BadLine(f"the line is no JSON: {str(e)[:200]}") from None
        if isinstance(found, str):
            return found, {"url": found}
        if not isinstance(found, dict):
            raise BadLine(f"the line is JSON, but no object but {type(found).__name__}")
        return None, found


class Csv:
    """Parser for CSV records. The columns come from the header or from the source's options."""

    def __init__(self, columns: Sequence[str], url: str, delimiter: str) -> None:
        self._columns, self._url, self._delimiter = list(columns), url, delimiter

    def read(self, text: str) -> tuple[str | None, dict[str, Any]] | None:
        fields = row(text, self._delimiter)
        if not any(fields):
            return None
        if len(fields) > len(self._columns):
            raise BadLine(f"the line has {len(fields)} fields, the header {len(self._columns)}")
        payload: dict[str, Any] = dict(zip(self._columns, fields, strict=False))
        url = payload.get(self._url)
        return (url.strip() if url else None), payload


def row(text: str, delimiter: str) -> list[str]:
    """Split a CSV record into fields. Raises BadLine."""
    if '"' not in text:
        return text.split(delimiter) if text else []
    try:
        return next(csv.reader([text], delimiter=delimiter), [])
    except csv.Error as e:
        raise BadLine(f"the line is no CSV: {e}") from None
