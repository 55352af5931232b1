"""Decodes JSON documents from outside, if the result fits into a limit on memory."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from penstock.rules.json_limits import VALUE, count_values
from penstock.sources.markup import UnreadableDocument, encoding_of

MAX_MEMORY = 56 << 20  # bytes of memory for a decoded document
MAX_CONVERTED = 4 << 20  # bytes of a document that is not UTF-8
_wide = re.compile(rb"[\xf0-\xf4]|\\u[dD][89abAB]")
_not_latin = re.compile(rb"[\xc4-\xef]|\\u0[1-9a-fA-F]|\\u[1-9a-fA-F]")


def decode_json(body: bytes) -> Any:
    """Decode a document. Raises UnreadableDocument if it is not JSON, or takes too much memory."""
    if not body.strip():
        raise UnreadableDocument("is empty")
    encoding = encoding_of(body, None)
    if encoding == "utf-8":
        body = body.removeprefix(b"\xef\xbb\xbf")
    elif len(body) > MAX_CONVERTED:
        raise UnreadableDocument("is not UTF-8, and too large to be converted")
    else:
        body = body.decode(encoding, "replace").lstrip("\ufeff").encode("utf-8", "replace")
    values = count_values(body)
    # A character of a text takes four bytes if one of its characters is outside the first 65,536.
    width = 4 if _wide.search(body) else 2 if _not_latin.search(body) else 1
    if len(body) * width + values * VALUE > MAX_MEMORY:
        raise UnreadableDocument(f"is too large: it has {len(body)} bytes and {values} values")
    try:
        return msgspec.json.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as e:
        html = re.match(rb"\s*<(!doctype|html)", body[:200], re.I)
        raise UnreadableDocument(
            "is an HTML page" if html else f"is not JSON: {' '.join(str(e).split())[:200]}"
        ) from None
