"""Lists as PostgreSQL arrays in the server's own binary form, so that one statement takes a whole
batch. Bind one where the statement says `?::bigint[]`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

_HEAD = struct.Struct(
    ">iiiii"
)  # dimensions, has nulls, type of the elements, how many, number of the first
_SIZE = struct.Struct(">i")
_BYTEA, _BIGINT, _TEXT, _DOUBLE = 17, 20, 25, 701


def bigints(values: Sequence[int]) -> bytes:
    return _fixed(_BIGINT, "q", values)


def doubles(values: Sequence[float]) -> bytes:
    return _fixed(_DOUBLE, "d", values)


def byteas(values: Sequence[bytes]) -> bytes:
    return _sized(_BYTEA, values, False)


def texts(values: Sequence[str | None]) -> bytes:
    """Raises UnicodeEncodeError for what is no Unicode text. A NUL is the caller's to refuse: the
    server does.
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
