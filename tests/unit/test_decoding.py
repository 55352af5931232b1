"""Content codings: what was encoded comes back, what lies about itself is refused, and no bomb gets
past its cap.
"""

from __future__ import annotations

import gc
import gzip
import random
import resource
import weakref
import zlib
from collections.abc import Callable

import brotli
import pytest
import zstandard

from penstock.net.decoding import BrokenCoding, DecodedTooLarge, Decoder, TooManyCodings, codings

LIMIT = 16 << 20


def _raw_deflate(data: bytes) -> bytes:
    c = zlib.compressobj(wbits=-15)
    return c.compress(data) + c.flush()


ENCODE: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "br": lambda data: brotli.compress(data, quality=4),
    "zstd": lambda data: zstandard.ZstdCompressor(level=3).compress(data),
}


def decode(names: tuple[str, ...], data: bytes, *, limit: int = LIMIT, chunk: int = 16384) -> bytes:
    decoder = Decoder(names, limit)
    for i in range(0, len(data), chunk):
        decoder.feed(data[i : i + chunk])
    return decoder.finish()


def _body(size: int) -> bytes:
    rng = random.Random(size)
    return (bytes(rng.getrandbits(5) for _ in range(min(size, 40_000))) * (size // 40_000 + 1))[
        :size
    ]


@pytest.mark.parametrize("name", ENCODE)
@pytest.mark.parametrize(
    "size", [0, 1, 20_000, (1 << 18) - 1, 1 << 18, (1 << 18) + 1, 1 << 19, 3_000_000]
)
def test_a_body_comes_back_whatever_its_chunks(name: str, size: int) -> None:
    body = _body(size)
    encoded = ENCODE[name](body)
    for chunk in (1 if size <= 20_000 else 1000, 16384, 1 << 22):
        assert decode((name,), encoded, chunk=chunk) == body


@pytest.mark.parametrize("inner", ENCODE)
@pytest.mark.parametrize("outer", ENCODE)
def test_two_nested_codings_are_undone_last_first(inner: str, outer: str) -> None:
    body = _body(50_000)
    assert decode((inner, outer), ENCODE[outer](ENCODE[inner](body))) == body


def test_deflate_without_its_wrapper_is_understood() -> None:
    body = _body(50_000)
    assert decode(("deflate",), _raw_deflate(body), chunk=7) == body


def test_gzip_members_in_a_row_are_one_body_and_padding_is_ignored() -> None:
    data = gzip.compress(b"one ") + gzip.compress(b"two") + b"\x00" * 100
    assert decode(("gzip",), data, chunk=5) == b"one two"


def test_zstd_frames_in_a_row_are_one_body() -> None:
    assert decode(("zstd",), ENCODE["zstd"](b"one ") + ENCODE["zstd"](b"two")) == b"one two"


@pytest.mark.parametrize("name", ENCODE)
@pytest.mark.parametrize("cut", [1, 5, 1000])
def test_a_body_that_ends_too_early_is_broken(name: str, cut: int) -> None:
    encoded = ENCODE[name](bytes(random.Random(1).randbytes(5000)))
    with pytest.raises(BrokenCoding):
        decode((name,), encoded[:-cut])


@pytest.mark.parametrize("name", ENCODE)
def test_bytes_that_are_something_else_are_broken(name: str) -> None:
    with pytest.raises(BrokenCoding):
        decode((name,), b"<html>not compressed at all</html>" * 10)


@pytest.mark.parametrize("name", ENCODE)
def test_no_body_at_all_is_an_empty_body(name: str) -> None:
    assert decode((name,), b"") == b""


@pytest.mark.parametrize("name", ENCODE)
def test_mutated_bytes_never_raise_anything_else(name: str) -> None:
    rng = random.Random(7)
    for _ in range(300):
        data = bytearray(ENCODE[name](_body(rng.randrange(1, 3000))))
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.getrandbits(8)
        try:
            decode((name,), bytes(data), limit=1 << 20, chunk=rng.choice((1, 13, 5000)))
        except (BrokenCoding, DecodedTooLarge):
            pass


def test_the_limit_is_exact() -> None:
    for name, encode in ENCODE.items():
        assert len(decode((name,), encode(bytes(1000)), limit=1000)) == 1000
        with pytest.raises(DecodedTooLarge):
            decode((name,), encode(bytes(1001)), limit=1000)


def _gigabyte(name: str) -> bytes:
    """1 GiB of zeros, encoded without ever holding them."""
    block = bytes(1 << 20)
    if name == "gzip":
        c = zlib.compressobj(9, wbits=-15)
        piece = c.compress(block) + c.flush(
            zlib.Z_FULL_FLUSH
        )  # stands alone, so it may be repeated; nobody gets as far as the checksum
        return gzip.compress(b"")[:10] + piece * 1024
    if name == "br":
        b = brotli.Compressor(quality=1)
        return b"".join(b.process(block) for _ in range(1024)) + b.finish()
    z = zstandard.ZstdCompressor(level=1).compressobj()
    return b"".join(z.compress(block) for _ in range(1024)) + z.flush()


@pytest.mark.parametrize(
    "names",
    [("gzip",), ("br",), ("zstd",), ("gzip", "gzip"), ("br", "gzip"), ("zstd", "br")],
    ids="+".join,
)
def test_a_gigabyte_bomb_stops_at_the_cap_without_the_memory(names: tuple[str, ...]) -> None:
    data = _gigabyte(names[0])
    for name in names[1:]:
        data = ENCODE[name](data)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DecodedTooLarge):
        decode(names, data, chunk=1 << 17)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


def test_a_zstd_frame_that_wants_a_huge_window_is_refused() -> None:
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=27)
    c = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    with pytest.raises(BrokenCoding):
        decode(("zstd",), c.compress(b"x" * 1000) + c.flush())


@pytest.mark.parametrize(
    ("header", "names"),
    [
        ("gzip", ("gzip",)),
        ("GZIP", ("gzip",)),
        (" br , gzip ", ("br", "gzip")),
        ("identity", ()),
        ("identity, zstd", ("zstd",)),
        ("", ()),
        ("utf-8", ()),  # a charset in the wrong place
        ("gzip, rot13", ()),
    ],
)
def test_the_header_says_what_to_undo(header: str, names: tuple[str, ...]) -> None:
    assert codings(header) == names


def test_more_than_two_codings_are_refused() -> None:
    with pytest.raises(TooManyCodings):
        codings("gzip, gzip, gzip")


@pytest.mark.parametrize(
    "names", [("gzip",), ("deflate",), ("br",), ("zstd",), ("gzip", "br"), ("zstd", "gzip")]
)
def test_a_decoder_that_is_let_go_is_gone_at_once(names: tuple[str, ...]) -> None:
    """Our collector of cycles seldom runs: pages by the thousand would wait for it, each with a
    decoder's state.
    """
    decoder = Decoder(names, 1 << 20)
    gone = weakref.ref(decoder._stages[0]), weakref.ref(decoder)
    gc.disable()
    try:
        del decoder
        assert [reference() for reference in gone] == [None, None]
    finally:
        gc.enable()
