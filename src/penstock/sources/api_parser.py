"""Parses one result page of an API: its JSON or CSV items with keys and hashes, and the next page.

Does no I/O.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from itertools import zip_longest
from typing import Any

import msgspec

from penstock.authoring.pipeline import SourceSpec
from penstock.errors import PenstockError
from penstock.rules.expressions import Expression, Unfit
from penstock.sources.json_documents import decode_json
from penstock.sources.markup import UnreadableDocument, encoding_of, gunzip

MAX_BYTES = 16 << 20  # bytes of one decompressed result page
MAX_LINE = 1 << 20  # characters of a line of CSV
MAX_COLUMNS = 10_000
MAX_CELLS = 2_000_000  # of a CSV page, with those that a short row lacks
_link = re.compile(
    r'<([^<>]{1,8192})>((?:\s*;\s*[\w*-]+\s*=\s*(?:"[^"]{0,1000}"|[^\s",;]{0,1000}))*)'
)
_delimiters = ",;\t|"


class ApiError(PenstockError):
    """The body is not a page of items. The reason completes the sentence "it …"."""

    def __init__(
        self,
        reason: str,
        *,
        hint: str = "open the URL in a browser: it should show JSON or CSV",
    ) -> None:
        super().__init__(f"not a page of items: it {reason}", hint=hint)
        self.reason = reason


class Item(msgspec.Struct, frozen=True):
    key: str
    hash: str
    payload: dict[str, Any]
    refused: str = ""


class Page(msgspec.Struct, frozen=True):
    # Items are made when they are read, because all of them together would take too much memory.
    # Reading may raise ApiError.
    items: Iterator[Item]
    next: Any = None  # result of the `next` expression


class ItemFormat:
    """Format of an endpoint's result pages, from the options of the source.

    Raises ConfigError if an expression is invalid.
    """

    def __init__(
        self,
        spec: SourceSpec,
        *,
        format: str | None,
        items: str,
        key: str | None,
        ignore: list[str],
        next: str | None,
        delimiter: str | None,
    ) -> None:
        self._format, self._delimiter = format, delimiter
        self._items = Expression(items, f"source {spec.name}: items", "data.items")
        self._key = None if key is None else Expression(key, f"source {spec.name}: key", "sku")
        self._next = (
            None if next is None else Expression(next, f"source {spec.name}: next", "links.next")
        )
        self._ignore = [path.split(".") for path in ignore]

    def page(self, body: bytes, content_type: str | None) -> Page:
        """Parse a result page. Raises ApiError, and no other exception, for any bytes."""
        with _errors():
            body = gunzip(body, MAX_BYTES)
            if self._is_csv(body, content_type):
                return Page(self._items_of(self._rows(body, content_type)))
            document = decode_json(body)
            found = self._items.search(document)
            if not isinstance(found, list):
                lists = (
                    [name for name, value in document.items() if isinstance(value, list)]
                    if isinstance(document, dict)
                    else []
                )
                what = "nothing" if found is None else "no list"
                raise ApiError(
                    f"has {what} where the items should be",
                    hint=f'items = "{lists[0] if lists else "data.items"}", a JMESPath expression',
                )
            return Page(
                self._items_of(found),
                self._next.search(document) if self._next is not None else None,
            )

    def _items_of(self, found: Iterable[Any]) -> Iterator[Item]:
        with _errors():
            for item in found:
                yield self._item(item)

    def _is_csv(self, body: bytes, content_type: str | None) -> bool:
        if self._format is not None:
            return self._format == "csv"
        kind = (content_type or "").partition(";")[0].strip().lower()
        if "json" in kind or "csv" in kind or "tab-separated" in kind:
            return "json" not in kind
        return body.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] not in (b"{", b"[", b"<", b"")

    def _rows(self, body: bytes, content_type: str | None) -> Iterator[dict[str, Any]]:
        """Yield the rows of a CSV page. The page is decoded line by line."""
        encoding = encoding_of(body, content_type)
        start = body[:65536].decode(encoding, "replace").lstrip("\ufeff").lstrip()
        head = start.partition("\n")[0]
        if not head.strip() or head.startswith("<"):
            raise UnreadableDocument("is an HTML page or XML, not CSV" if head else "is empty")
        delimiter = self._delimiter or max(_delimiters, key=head.count)
        cells = 0
        try:
            rows = csv.reader(_lines(body, encoding), delimiter=delimiter, strict=True)
            columns = next((row for row in rows if row), [])
            if len(columns) > MAX_COLUMNS:
                raise UnreadableDocument(f"has {len(columns)} columns, of at most {MAX_COLUMNS}")
            for row in rows:
                # A row without some cells gets them, so a short row costs as much as a long one.
                cells += max(len(columns), len(row))
                if cells > MAX_CELLS:
                    raise UnreadableDocument(f"has more than {MAX_CELLS} values")
                if row:
                    yield {
                        name.strip(): value
                        for name, value in zip_longest(columns, row[: len(columns)])
                    }
        except csv.Error as e:
            raise UnreadableDocument(f"is broken CSV: {e}") from None

    def _item(self, item: Any) -> Item:
        payload: dict[str, Any] = (
            item
            if isinstance(item, dict)
            else {"url": item}
            if isinstance(item, str)
            else {"value": item}
        )
        compared = payload
        for path in self._ignore:
            compared = _without(compared, path)
        digest = blake2b(msgspec.json.encode(compared, order="sorted"), digest_size=16).hexdigest()
        if self._key is None:
            found = next(
                (
                    value
                    for name in ("id", "sku", "url")
                    if (value := payload.get(name)) not in (None, "")
                ),
                digest,
            )
        else:
            found = self._key.search(item)
        if found is None or found in ("", [], {}):
            return Item(f"without a key {digest}", digest, payload, "its key is empty")
        return Item(
            found
            if isinstance(found, str)
            else msgspec.json.encode(found, order="sorted").decode(),
            digest,
            payload,
        )


def next_link(headers: Mapping[str, str]) -> str | None:
    """Return the URL of a `Link: <…>; rel="next"` header (RFC 8288), or None."""
    for m in _link.finditer(headers.get("link", "")[:65536]):
        rel = re.search(r';\s*rel\s*=\s*(?:"([^"]*)"|([^\s",;]+))', m[2], re.I)
        if rel and "next" in (rel[1] or rel[2] or "").lower().split():
            return m[1]
    return None


@contextmanager
def _errors() -> Iterator[None]:
    """Raise ApiError for each error of a document."""
    try:
        yield
    except UnreadableDocument as e:
        raise ApiError(e.reason) from None
    except (Unfit, RecursionError, TypeError, ValueError) as e:
        raise ApiError(
            f"does not fit the source's expressions: {' '.join(str(e)[:1000].split())[:200]}"
        ) from None


def _lines(body: bytes, encoding: str) -> Iterator[str]:
    """Yield the lines of a CSV page, with their ends. Raises UnreadableDocument."""
    text = io.TextIOWrapper(io.BytesIO(body), encoding, errors="replace", newline="")
    is_first = True
    while line := text.readline(MAX_LINE + 1):
        if len(line) > MAX_LINE:
            raise UnreadableDocument(f"has a line of more than {MAX_LINE} characters")
        yield (line.lstrip("\ufeff") if is_first else line).replace("\0", "")
        is_first = False


def _without(value: Any, path: list[str]) -> Any:
    """Return a copy without the field at this path, in every item if the value is a list."""
    if isinstance(value, list):
        return [_without(item, path) for item in value]
    if not isinstance(value, dict) or path[0] not in value:
        return value
    if len(path) == 1:
        return {name: item for name, item in value.items() if name != path[0]}
    return {
        name: _without(item, path[1:]) if name == path[0] else item for name, item in value.items()
    }
