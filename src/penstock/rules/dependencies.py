"""Dependencies of an extraction besides the bytes of its page, as a text that the ledger stores.

The text is `name@version,…#HASH`, with the hash of the pipeline's files. Words behind it name other
values that the extractors have read: `url:HASH`, `data:HASH` and `headers`. Whole texts are
compared, so a text of an earlier release never equals a new one.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

_canonical = msgspec.json.Encoder(order="deterministic").encode
# Headers differ at each request, and a 304 has only some of them. So an extraction that has read
# them is never skipped.
_HEADERS = " headers"
_DATA = " data:"


def dependencies(
    signature: str,
    *,
    url: str,
    requested_url: str,
    data: dict[str, Any] | None,
    headers: bool = False,
) -> str:
    """Return the text. `data` is the event's data if an extractor has read it, else None.

    `headers` is True if an extractor has read the headers of the response.
    """
    text = signature
    if url != requested_url:  # the address after redirects selects extractors and is a default key
        text += f" url:{_digest(url.encode('utf-8', 'surrogatepass'))}"
    if data is not None:
        text += _DATA + data_hash(data)
    return text + _HEADERS if headers else text


def are_unchanged(
    stored: str, signature: str, *, url: str, requested_url: str, data: dict[str, Any]
) -> bool:
    """Return True if an extraction with these values would read what the stored one has read."""
    if stored.endswith(_HEADERS):
        return False
    read = data if reads_data(stored) else None
    return stored == dependencies(signature, url=url, requested_url=requested_url, data=read)


def reads_data(stored: str) -> bool:
    """Return True if the stored extraction has read the event's data."""
    return _DATA in stored


def read_other_data(stored: str, data: dict[str, Any]) -> bool:
    """Return True if the stored extraction has read event data that differs from `data`."""
    _, found, rest = stored.partition(_DATA)
    return bool(found) and rest.partition(" ")[0] != data_hash(data)


def labels_of(stored: str) -> str:
    """Return `name@version,…` of a stored text."""
    return stored.partition("#")[0]


def data_hash(data: dict[str, Any]) -> str:
    return _digest(_canonical(data))


def _digest(raw: bytes) -> str:
    return hashlib.blake2b(raw, digest_size=12).hexdigest()
