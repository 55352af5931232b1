"""CPU time and memory of content decoders grow at most linearly with the body."""

from __future__ import annotations

import gzip
import random
import zlib
from collections.abc import Callable
from functools import partial

import brotli
import pytest
import zstandard
from tests.unit.doubling import grows_linearly

from penstock.net.decoding import BrokenCoding, DecodedTooLarge, Decoder

pytestmark = pytest.mark.slow

LIMIT = 64 << 20

ENCODE: dict[str, Callable[[bytes], bytes]] = {
    "gzip": partial(gzip.compress, compresslevel=1, mtime=0),
    "deflate": lambda data: zlib.compress(data, 1),
    "br": lambda data: brotli.compress(data, quality=1),
    "zstd": lambda data: zstandard.ZstdCompressor(level=1).compress(data),
}
NESTED = [("gzip", "br"), ("zstd", "gzip")]


def _decode(names: tuple[str, ...], data: bytes) -> None:
    decoder = Decoder(names, LIMIT)
    try:
        decoder.feed(data)
        decoder.finish()
    except (BrokenCoding, DecodedTooLarge):
        pass


def _text(size: int) -> bytes:
    """Return bytes that compress to about 60 %."""
    return bytes(byte & 0x1F for byte in random.Random(size).randbytes(size))


def _page(names: tuple[str, ...], size: int) -> bytes:
    """Return an encoded body of about `size` bytes."""
    data = _text(size * 3 // 2)
    for name in names:
        data = ENCODE[name](data)
    return data


def _members(names: tuple[str, ...], size: int) -> bytes:
    """Return at most 4096 members of one size, so that the limit on members is not reached."""
    pieces = [ENCODE[names[0]](_text(1024))] * (size // 1024)
    data = b"".join(pieces[:4000])
    for name in names[1:]:
        data = ENCODE[name](data)
    return data


def _empty(names: tuple[str, ...], size: int) -> bytes:
    """Return members without output, of `size` bytes before the second coding."""
    empty = ENCODE[names[0]](b"")
    data = empty * (size // len(empty))
    for name in names[1:]:
        data = ENCODE[name](data)
    return data


def _small_blocks(names: tuple[str, ...], size: int) -> bytes:
    return b"\x28\xb5\x2f\xfd\x00\x00" + bytes(size // 3 * 3) + b"\x01\x00\x00"


CASES = [
    *((_page, (name,)) for name in ENCODE),
    *((_page, names) for names in NESTED),
    (_members, ("gzip",)),
    (_members, ("zstd",)),
    (_members, ("gzip", "br")),
    (_empty, ("gzip",)),
    (_empty, ("zstd",)),
    (_empty, ("gzip", "br")),
    (_small_blocks, ("zstd",)),
]


@pytest.mark.parametrize(
    ("make", "names"), CASES, ids=[f"{make.__name__[1:]}-{'+'.join(n)}" for make, n in CASES]
)
def test_decoding_is_linear(
    make: Callable[[tuple[str, ...], int], bytes], names: tuple[str, ...]
) -> None:
    grows_linearly(partial(make, names), partial(_decode, names))
