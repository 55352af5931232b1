"""Content codings: encoded bodies are restored, invalid ones refused, and bombs are limited."""

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

from penstock.net.decoding import (
    MAX_BLOCKS,
    MAX_MEMBERS,
    BrokenCoding,
    DecodedTooLarge,
    Decoder,
    TooManyCodings,
    codings,
)

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
def test_a_body_is_decoded_for_all_chunk_sizes(name: str, size: int) -> None:
    body = _body(size)
    encoded = ENCODE[name](body)
    for chunk in (1 if size <= 20_000 else 1000, 16384, 1 << 22):
        assert decode((name,), encoded, chunk=chunk) == body


@pytest.mark.parametrize("inner", ENCODE)
@pytest.mark.parametrize("outer", ENCODE)
def test_two_nested_codings_are_decoded_from_last_to_first(inner: str, outer: str) -> None:
    body = _body(50_000)
    assert decode((inner, outer), ENCODE[outer](ENCODE[inner](body))) == body


def test_raw_deflate_is_decoded() -> None:
    body = _body(50_000)
    assert decode(("deflate",), _raw_deflate(body), chunk=7) == body


def test_several_gzip_members_are_one_body_and_padding_is_ignored() -> None:
    data = gzip.compress(b"one ") + gzip.compress(b"two") + b"\x00" * 100
    assert decode(("gzip",), data, chunk=5) == b"one two"


def test_several_zstd_frames_are_one_body() -> None:
    assert decode(("zstd",), ENCODE["zstd"](b"one ") + ENCODE["zstd"](b"two")) == b"one two"


@pytest.mark.parametrize("name", ENCODE)
@pytest.mark.parametrize("cut", [1, 5, 1000])
def test_a_body_that_ends_too_early_is_broken(name: str, cut: int) -> None:
    encoded = ENCODE[name](bytes(random.Random(1).randbytes(5000)))
    with pytest.raises(BrokenCoding):
        decode((name,), encoded[:-cut])


@pytest.mark.parametrize("name", ENCODE)
def test_bytes_of_another_format_are_broken(name: str) -> None:
    with pytest.raises(BrokenCoding):
        decode((name,), b"<html>not compressed at all</html>" * 10)


@pytest.mark.parametrize("name", ENCODE)
def test_an_encoded_body_of_zero_bytes_is_empty(name: str) -> None:
    assert decode((name,), b"") == b""


@pytest.mark.parametrize("name", ENCODE)
def test_mutated_bytes_raise_only_decoding_errors(name: str) -> None:
    rng = random.Random(7)
    for _ in range(300):
        data = bytearray(ENCODE[name](_body(rng.randrange(1, 3000))))
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.getrandbits(8)
        try:
            decode((name,), bytes(data), limit=1 << 20, chunk=rng.choice((1, 13, 5000)))
        except (BrokenCoding, DecodedTooLarge):
            pass


def test_the_decoded_size_limit_is_exact() -> None:
    for name, encode in ENCODE.items():
        assert len(decode((name,), encode(bytes(1000)), limit=1000)) == 1000
        with pytest.raises(DecodedTooLarge):
            decode((name,), encode(bytes(1001)), limit=1000)


def _gigabyte(name: str) -> bytes:
    """Return 1 GiB of zeros, encoded in blocks so that they need little memory."""
    block = bytes(1 << 20)
    if name == "gzip":
        c = zlib.compressobj(9, wbits=-15)
        # The block is independent, so it can be repeated. The decoder stops before the checksum.
        piece = c.compress(block) + c.flush(zlib.Z_FULL_FLUSH)
        return gzip.compress(b"")[:10] + piece * 1024
    if name == "br":
        b = brotli.Compressor(quality=1)
        return b"".join([*(b.process(block) for _ in range(1024)), b.finish()])
    z = zstandard.ZstdCompressor(level=1).compressobj()
    return b"".join(z.compress(block) for _ in range(1024)) + z.flush()


@pytest.mark.parametrize(
    "names",
    [("gzip",), ("br",), ("zstd",), ("gzip", "gzip"), ("br", "gzip"), ("zstd", "br")],
    ids="+".join,
)
def test_a_gigabyte_bomb_stops_at_the_limit_and_needs_little_memory(names: tuple[str, ...]) -> None:
    data = _gigabyte(names[0])
    for name in names[1:]:
        data = ENCODE[name](data)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DecodedTooLarge):
        decode(names, data, chunk=1 << 17)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


def test_a_zstd_frame_with_a_huge_window_is_refused() -> None:
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
        ("utf-8", ()),  # a charset instead of a coding
        ("gzip, rot13", ()),
    ],
)
def test_the_codings_are_read_from_the_header(header: str, names: tuple[str, ...]) -> None:
    assert codings(header) == names


def test_more_than_two_codings_are_refused() -> None:
    with pytest.raises(TooManyCodings):
        codings("gzip, gzip, gzip")


@pytest.mark.parametrize(
    "names", [("gzip",), ("deflate",), ("br",), ("zstd",), ("gzip", "br"), ("zstd", "gzip")]
)
def test_a_decoder_is_freed_without_the_garbage_collector(names: tuple[str, ...]) -> None:
    """The garbage collector runs rarely. Thousands of decoders would wait for it."""
    decoder = Decoder(names, 1 << 20)
    gone = weakref.ref(decoder._last), weakref.ref(decoder)
    gc.disable()
    try:
        del decoder
        assert [reference() for reference in gone] == [None, None]
    finally:
        gc.enable()


_EMPTY = {
    "gzip": gzip.compress(b""),
    "zstd": zstandard.ZstdCompressor(write_content_size=False).compress(b""),
    "skipped": b"\x50\x2a\x4d\x18\x00\x00\x00\x00",  # a zstd frame that decoders skip
}


@pytest.mark.parametrize(
    ("names", "empty"),
    [(("gzip",), "gzip"), (("zstd",), "zstd"), (("zstd",), "skipped")],
    ids=["gzip", "zstd", "skipped"],
)
@pytest.mark.parametrize("chunk", [7, 16384, 1 << 22])
def test_the_number_of_members_is_limited(names: tuple[str, ...], empty: str, chunk: int) -> None:
    body = ENCODE[names[0]](b"x")
    allowed = _EMPTY[empty] * (MAX_MEMBERS - 1) + body
    assert decode(names, allowed, chunk=chunk) == b"x"
    with pytest.raises(DecodedTooLarge, match=f"{MAX_MEMBERS} (gzip members|zstd frames)"):
        decode(names, _EMPTY[empty] + allowed, chunk=chunk)


@pytest.mark.parametrize("outer", ENCODE)
@pytest.mark.parametrize("inner", ["gzip", "zstd"])
def test_the_number_of_members_inside_another_coding_is_limited(inner: str, outer: str) -> None:
    with pytest.raises(DecodedTooLarge, match=f"{MAX_MEMBERS} "):
        decode((inner, outer), ENCODE[outer](_EMPTY[inner] * 838_000), limit=64 << 20)


@pytest.mark.parametrize("outer", ENCODE)
def test_bytes_between_two_codings_count_against_the_limit(outer: str) -> None:
    body = random.Random(3).randbytes(500_000)
    data = ENCODE[outer](gzip.compress(body))
    assert decode(("gzip", outer), data, limit=1_010_000) == body
    with pytest.raises(DecodedTooLarge, match="900000 bytes"):
        decode(("gzip", outer), data, limit=900_000)


@pytest.mark.parametrize("outer", ENCODE)
def test_few_bytes_cannot_become_many_between_two_codings(outer: str) -> None:
    name = b"\x1f\x8b\x08\x08" + bytes(6) + b"n" * (12 << 20)  # a gzip header with a long file name
    with pytest.raises(DecodedTooLarge, match="bytes between two content codings"):
        decode(("gzip", outer), ENCODE[outer](name))


@pytest.mark.parametrize(
    ("names", "window"), [(("gzip",), 0), (("br",), 4 << 20), (("zstd",), 8 << 20)], ids=str
)
def test_the_windows_of_decoders_count_as_memory(names: tuple[str, ...], window: int) -> None:
    decoder = Decoder(names, LIMIT)
    decoder.feed(ENCODE[names[0]](bytes(12 << 20)))
    assert decoder.size == 12 << 20
    assert window <= decoder.held_bytes - decoder.size <= window + (64 << 10)


def test_a_window_between_two_codings_counts_as_memory() -> None:
    decoder = Decoder(("gzip", "br"), LIMIT)
    header = b"\x1f\x8b\x08\x08" + bytes(6) + b"n" * 1_000_000  # without output
    decoder.feed(brotli.compress(header))
    assert decoder.size == 0
    assert decoder.held_bytes > 1_000_000


@pytest.mark.parametrize("names", [*((n,) for n in ENCODE), ("gzip", "br"), ("br", "zstd")])
def test_each_step_of_a_decoder_has_a_small_output(names: tuple[str, ...]) -> None:
    data = bytes(8 << 20)
    for name in names:
        data = ENCODE[name](data)
    decoder = Decoder(names, LIMIT)
    done, before, steps = decoder.start(data), decoder.size, 1
    while not done:
        done = decoder.proceed()
        assert decoder.size - before <= 1 << 19
        before, steps = decoder.size, steps + 1
    assert decoder.finish() == bytes(8 << 20)
    assert steps >= 16


def test_the_number_of_zstd_blocks_is_limited() -> None:
    frame = b"\x28\xb5\x2f\xfd\x00\x00" + bytes(3 * (MAX_BLOCKS - 1))
    assert decode(("zstd",), frame + b"\x01\x00\x00") == b""
    with pytest.raises(DecodedTooLarge, match=f"{MAX_BLOCKS} zstd blocks"):
        decode(("zstd",), frame + b"\x00\x00\x00" + b"\x01\x00\x00")


@pytest.mark.parametrize("bits", range(10, 25))
def test_a_brotli_window_that_is_filled_in_advance_counts_as_memory(bits: int) -> None:
    data = brotli.compress(bytes(15 << 20), lgwin=bits)
    decoder = Decoder(("br",), LIMIT)
    assert not decoder.start(data)
    window = decoder.held_bytes - decoder.size
    assert 1 << bits <= window <= (1 << bits) + (64 << 10)
