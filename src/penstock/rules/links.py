"""Links of one page in encoded chunks, which need about a quarter of the memory of Link objects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from penstock.model import Link

CHUNK = 100  # links in one chunk. A stored chunk is written again when it gets shorter.
UNPACKED = 500  # links of a page that are not packed. One transaction decides at most as many.

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[Link]).decode


class PackedLinks(msgspec.Struct, frozen=True):
    """Some links of one page, encoded."""

    count: int
    body: bytes


def pack(links: Sequence[Link]) -> list[PackedLinks]:
    chunks = (links[i : i + CHUNK] for i in range(0, len(links), CHUNK))
    return [PackedLinks(len(chunk), _encode(chunk)) for chunk in chunks]


def unpack(body: bytes) -> list[Link]:
    return _decode(body)


def unpack_all(chunks: Iterable[PackedLinks]) -> Iterator[Link]:
    for chunk in chunks:
        yield from unpack(chunk.body)
