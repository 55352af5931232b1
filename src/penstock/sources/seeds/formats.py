"""What a line of a seed list says: text, CSV or JSON lines to URL and payload. Where lines begin
and end is in seeds_lines.py.
"""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

SUFFIXES = {"txt": "txt", "csv": "csv", "jsonl": "jsonl", "ndjson": "jsonl"}
FORMATS = tuple(dict.fromkeys(SUFFIXES.values()))
SHOWN = 500  # characters of a line that cannot be read


class Bad(Exception):
    """This line says nothing that can be used; why, for people."""


def short(text: str) -> bytes:
    """Eight bytes that stand for it in a position."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()


def format_of(name: str) -> tuple[str, bool] | None:
    """(format, whether it is gzip) by the end of a name."""
    stem = name.lower()
    squeezed = stem.endswith(".gz")
    suffix = stem.removesuffix(".gz").rpartition(".")[2]
    return (SUFFIXES[suffix], squeezed) if suffix in SUFFIXES and "." in stem else None


class Format(Protocol):
    """Reads the records of one object."""

    def read(self, text: str) -> tuple[str | None, dict[str, Any]] | None:
        """URL, where it is known, and payload; None: a line that means nothing. Raises Bad."""


class Text:
    """A URL a line; what begins with # is a comment."""

    def read(self, text: str) -> tuple[str | None, dict[str, Any]] | None:
        url = text.strip()
        return None if not url or url.startswith("#") else (url, {"url": url})


class JsonLines:
    """An object a line, or a string that is the URL."""

    def __init__(self) -> None:
        self._decode = msgspec.json.Decoder().decode

    def read(self, text: str) -> tuple[str | None, dict[str, Any]] | None:
        if not text.strip():
            return None
        try:
            found = self._decode(text)
        except (msgspec.DecodeError, ValueError, RecursionError) as e:
            raise Bad(f"the line is no JSON: {str(e)[:200]}") from None
        if isinstance(found, str):
            return found, {"url": found}
        if not isinstance(found, dict):
            raise Bad(f"the line is JSON, but no object but {type(found).__name__}")
        return None, found


class Csv:
    """A record; its columns by the header, or as the source's options name them."""

    def __init__(self, columns: Sequence[str], url: str, delimiter: str) -> None:
        self._columns, self._url, self._delimiter = list(columns), url, delimiter

    def read(self, text: str) -> tuple[str | None, dict[str, Any]] | None:
        fields = row(text, self._delimiter)
        if not any(fields):
            return None
        if len(fields) > len(self._columns):
            raise Bad(f"the line has {len(fields)} fields, the header {len(self._columns)}")
        payload: dict[str, Any] = dict(zip(self._columns, fields, strict=False))
        url = payload.get(self._url)
        return (url.strip() if url else None), payload


def row(text: str, delimiter: str) -> list[str]:
    """Raises Bad."""
    if '"' not in text:
        return text.split(delimiter) if text else []
    try:
        return next(csv.reader([text], delimiter=delimiter), [])
    except csv.Error as e:
        raise Bad(f"the line is no CSV: {e}") from None
