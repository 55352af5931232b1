"""Parses one result page of an API: its JSON or CSV items with keys and hashes, and the next page.

Does no I/O.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import msgspec

from penstock.authoring.pipeline import SourceSpec
from penstock.errors import PenstockError
from penstock.rules.expressions import Expression, Unfit
from penstock.sources.markup import UnreadableDocument, encoding_of, gunzip

MAX_BYTES = 16 << 20  # bytes of one decompressed result page
MAX_VALUES = 2_000_000  # of one result page: a small value takes about a hundred bytes of memory
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
    items: list[Item]
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
        try:
            body = gunzip(body, MAX_BYTES)
            if self._is_csv(body, content_type):
                return Page([self._item(row) for row in self._rows(body, content_type)])
            document = _json(body)
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
                [self._item(item) for item in found],
                self._next.search(document) if self._next is not None else None,
            )
        except UnreadableDocument as e:
            raise ApiError(e.reason) from None
        except (Unfit, RecursionError, TypeError, ValueError) as e:
            raise ApiError(
                f"does not fit the source's expressions: {' '.join(str(e).split())[:200]}"
            ) from None

    def _is_csv(self, body: bytes, content_type: str | None) -> bool:
        if self._format is not None:
            return self._format == "csv"
        kind = (content_type or "").partition(";")[0].strip().lower()
        if "json" in kind or "csv" in kind or "tab-separated" in kind:
            return "json" not in kind
        return body.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] not in (b"{", b"[", b"<", b"")

    def _rows(self, body: bytes, content_type: str | None) -> list[dict[str, Any]]:
        text = (
            body.decode(encoding_of(body, content_type), "replace")
            .lstrip("\ufeff")
            .replace("\0", "")
        )
        head = text[:65536].lstrip().partition("\n")[0]
        if not head.strip() or head.startswith("<"):
            raise UnreadableDocument("is an HTML page or XML, not CSV" if head else "is empty")
        delimiter = self._delimiter or max(_delimiters, key=head.count)
        if text.count(delimiter) + text.count("\n") > MAX_VALUES:
            raise UnreadableDocument(f"has more than {MAX_VALUES} values")
        try:
            rows = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
            return [
                {name.strip(): value for name, value in row.items() if isinstance(name, str)}
                for row in rows
            ]
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


def _json(body: bytes) -> Any:
    if not body.strip():
        raise UnreadableDocument("is empty")
    if body.count(b",") + body.count(b"[") + body.count(b"{") > MAX_VALUES:
        raise UnreadableDocument(f"has more than {MAX_VALUES} values")
    encoding = encoding_of(body, None)
    try:
        return msgspec.json.decode(
            body.removeprefix(b"\xef\xbb\xbf")
            if encoding == "utf-8"
            else body.decode(encoding, "replace").lstrip("\ufeff")
        )
    except (msgspec.MsgspecError, ValueError, RecursionError) as e:
        html = re.match(rb"\s*<(!doctype|html)", body[:200], re.I)
        raise UnreadableDocument(
            "is an HTML page" if html else f"is not JSON: {' '.join(str(e).split())[:200]}"
        ) from None


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
