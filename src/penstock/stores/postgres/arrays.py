"""Encoders of PostgreSQL arrays in binary format, so that one statement takes a whole batch.

Bind an array to a placeholder with a cast, such as `?::bigint[]`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

# Dimensions, flag for NULL values, type OID of the elements, count, index of the first element.
_HEAD = struct.Struct(">iiiii")
_SIZE = struct.Struct(">i")
_BYTEA, _BIGINT, _TEXT, _DOUBLE = 17, 20, 25, 701  # type OIDs


def bigints(values: Sequence[int]) -> bytes:
    return _fixed(_BIGINT, "q", values)


def doubles(values: Sequence[float]) -> bytes:
    return _fixed(_DOUBLE, "d", values)


def byteas(values: Sequence[bytes]) -> bytes:
    return _sized(_BYTEA, values, False)


def texts(values: Sequence[str | None]) -> bytes:
    """Encode texts. Raises UnicodeEncodeError if a value is not valid Unicode.

    The caller must reject NUL characters, which the server does not accept.
    """
    return _sized(_TEXT, [None if v is None else v.encode() for v in values], None in values)


def _fixed(kind: int, code: str, values: Sequence[float]) -> bytes:
    flat: list[float] = [8] * (2 * len(values))
    flat[1::2] = values
    return _HEAD.pack(1, 0, kind, len(values), 1) + struct.pack(
        ">" + f"i{code}" * len(values), *flat
    )


def _sized(kind: int, values: Sequence[bytes | None], nulls: bool) -> bytes:
    parts = [_HEAD.pack(1, nulls, kind, len(values), 1)]
    for value in values:
        if value is None:
            parts.append(_SIZE.pack(-1))
        else:
            parts += (_SIZE.pack(len(value)), value)
    return b"".join(parts)
