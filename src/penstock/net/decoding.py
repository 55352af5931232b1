"""Decoders of content codings with a size limit: gzip, deflate, br and zstd, at most two nested.

No sockets, no charsets.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import brotli
import zstandard

try:
    from isal import isal_zlib as zlib  # twice as fast as zlib on pages
except ImportError:  # no wheel for this platform: the same results, slower
    import zlib  # type: ignore[no-redef]

_zlib: Any = zlib
_inflater = _zlib.decompressobj
_InflateError: type[Exception] = _zlib.error
ACCEPT_ENCODING = "gzip, deflate, br, zstd"
MAX_NESTED = 2
# Bytes that one step may output, so that limits are checked often. A step takes about 1 ms.
_STEP = 1 << 18
# Bytes of input for one step. The decoders of gzip and deflate copy the rest of their input for
# each member, so the rest must be short.
_SLICE = 1 << 14
# Bytes. A brotli block of 465 bytes can need 0.4 ms: 256 trees and a context map of 16384 entries.
_BROTLI_SLICE = 1 << 12
_ZSTD_BLOCK = 1 << 17  # bytes of the largest decoded zstd block (RFC 8878)
_WINDOW = 1 << 23  # bytes of the largest zstd window that RFC 9659 allows
_STATE = 1 << 15  # bytes of a decoder without its window, rounded
# gzip members or zstd frames of a body. A member without output costs 20 bytes and 10 µs. Tools
# that write many members put 64 KiB into each.
MAX_MEMBERS = 4096
# zstd blocks of a body. An empty block costs 3 bytes and 1 µs. Encoders put 128 KiB into a block,
# and less only if a server flushes its output.
MAX_BLOCKS = 1 << 16
# Bytes between two nested codings: this number, and 16 for each received byte. They are compressed
# data, which does not become much smaller when it is compressed again.
_MIN_BETWEEN, _BETWEEN_RATIO = 1 << 20, 16


class DecodedTooLarge(Exception):
    """More decoded bytes or members than the limit. The text is the limit with its unit."""


class TooManyCodings(Exception):
    """More nested codings than `MAX_NESTED`. No honest server uses more."""


class BrokenCoding(Exception):
    """The body does not match its Content-Encoding, or ends too early."""


class _Stage(Protocol):
    """Decoder of one coding, which works in bounded steps."""

    pending: bool  # input or output is left for another step

    def give(self, data: bytes) -> None:
        """Set the next input. Only allowed if `pending` is False."""

    def step(self) -> bytes:
        """Decode a bounded part of the input, and return its output, which may be empty."""

    def end(self) -> None:
        """Raise BrokenCoding if the stream is not complete."""

    def window(self, size: int) -> int:
        """Return the bytes of history in memory after `size` bytes of output."""


class _Inflate:
    """Decodes gzip with several members, zlib, and raw deflate, which some servers send."""

    def __init__(self, gzip: bool) -> None:
        self.pending, self._members = False, 1
        self._gzip, self._seen, self._ended = gzip, False, False
        self._data, self._at = b"", 0
        self._d = _inflater(wbits=31 if gzip else 15)

    def give(self, data: bytes) -> None:
        self._data, self._at, self.pending = data, 0, bool(data) and not self._ended

    def step(self) -> bytes:
        data, at, d = self._data, self._at, self._d
        part = data if not at and len(data) <= _SLICE else memoryview(data)[at : at + _SLICE]
        if d.eof:
            if not self._gzip or part[:1] != b"\x1f":
                # Padding after the last member, which all browsers ignore.
                self._ended, self.pending = True, False
                return b""
            self._members += 1
            if self._members > MAX_MEMBERS:
                raise DecodedTooLarge(f"{MAX_MEMBERS} gzip members")
            d = self._d = _inflater(wbits=31)
        try:
            chunk: bytes = d.decompress(part, _STEP)
        except _InflateError as e:
            if self._gzip or self._seen:
                raise BrokenCoding(str(e)) from e
            self._d, self._seen = _inflater(wbits=-15), True
            return b""
        self._seen = True
        ended = d.eof
        self._at = at = at + len(part) - len(d.unused_data if ended else d.unconsumed_tail)
        # After a full step the decoder may still hold output, even if it has read all input.
        self.pending = at < len(data) or (len(chunk) == _STEP and not ended)
        return chunk

    def end(self) -> None:
        if self._seen and not self._d.eof:
            raise BrokenCoding("it ends in the middle of the stream")

    def window(self, size: int) -> int:
        return 0  # 32 KiB, part of _STATE


class _Brotli:
    def __init__(self) -> None:
        self.pending, self._seen = False, False
        self._data, self._at = b"", 0
        # Bytes of the window, and True if the decoder has filled it before its output was read.
        self._window, self._ahead = 0, False
        self._d: Any = brotli.Decompressor()

    def give(self, data: bytes) -> None:
        if data and not self._window:
            self._window = _brotli_window(data[0])
        self._data, self._at = data, 0
        self.pending = bool(data) and not self._d.is_finished()

    def step(self) -> bytes:
        d, at, part = self._d, self._at, b""
        self._seen = True
        try:
            if d.can_accept_more_data():
                part = self._data[at : at + _BROTLI_SLICE]
                self._at = at = at + len(part)
            chunk: bytes = d.process(part, output_buffer_limit=_STEP)
            if d.is_finished():
                self.pending = self._ahead = False
                return chunk
            # `can_accept_more_data` is about input only. After a full step, output may be left.
            full = len(chunk) >= _STEP or not d.can_accept_more_data()
        except brotli.error as e:
            raise BrokenCoding(str(e)) from e
        if full and not part and not chunk:
            raise BrokenCoding("the decoder makes no progress")
        self._ahead = full
        self.pending = full or at < len(self._data)
        return chunk

    def end(self) -> None:
        if self._seen and not self._d.is_finished():
            raise BrokenCoding("it ends in the middle of the stream")

    def window(self, size: int) -> int:
        return self._window if self._ahead else min(size, self._window)


def _brotli_window(first: int) -> int:
    """Return the bytes of the window, 1 KiB to 16 MiB, from the first byte of a stream."""
    if not first & 1:
        bits = 16
    elif n := first >> 1 & 7:
        bits = 17 + n
    else:
        bits = 8 + n if (n := first >> 4 & 7) else 17
    return 1 << bits


# Parts of a zstd stream (RFC 8878).
_MAGIC, _SKIP_SIZE, _DESCRIPTOR, _BLOCK_HEAD, _CONTENT = range(5)
_PART_BYTES = {_MAGIC: 4, _SKIP_SIZE: 4, _DESCRIPTOR: 1, _BLOCK_HEAD: 3}


class _Zstd:
    """Decodes zstd block by block.

    python-zstandard cannot limit the output of a call. A block has at most 128 KiB of output, so
    this class finds the ends of blocks, and gives the library only a few blocks at a time.
    """

    def __init__(self) -> None:
        self.pending, self._frames, self._blocks = False, 0, 0
        self._data, self._at = b"", 0
        # The current part, the number of its bytes that have not arrived, and those that have.
        # Content (of a header, a block or a skipped frame) is not kept. `_after` follows it.
        self._part, self._missing, self._head, self._after = _MAGIC, 4, b"", _MAGIC
        self._checksum = 0  # bytes of the current frame's checksum
        self._d: Any = zstandard.ZstdDecompressor(max_window_size=_WINDOW).decompressobj(
            write_size=_STEP, read_across_frames=True
        )

    def give(self, data: bytes) -> None:
        self._data, self._at, self.pending = data, 0, bool(data)

    def step(self) -> bytes:
        data, begin = self._data, self._at
        at, end = begin, min(len(data), begin + _SLICE)
        output = 0  # the most bytes that the blocks of this step can have
        while at < end and output <= _STEP - _ZSTD_BLOCK:
            size = min(self._missing, end - at)
            if self._part != _CONTENT:
                self._head += data[at : at + size]
            at += size
            self._missing -= size
            while not self._missing:
                output += self._end_part()
        self._at, self.pending = at, at < len(data)
        try:
            part = data if at - begin == len(data) else data[begin:at]
            chunk: bytes = self._d.decompress(part)
        except zstandard.ZstdError as e:
            raise BrokenCoding(str(e)) from e
        return chunk

    def _end_part(self) -> int:
        """Find the part after a complete one. Return the largest output of a block that begins."""
        head, part, self._head = self._head, self._part, b""
        if part == _BLOCK_HEAD:
            self._blocks += 1
            if self._blocks > MAX_BLOCKS:
                raise DecodedTooLarge(f"{MAX_BLOCKS} zstd blocks")
            value = int.from_bytes(head, "little")
            kind, size = value >> 1 & 3, value >> 3
            self._part, self._after, self._missing = _CONTENT, _BLOCK_HEAD, size
            if value & 1:  # the last block of its frame
                self._after = _MAGIC
                self._missing += self._checksum
            if kind == 1:  # the block repeats one byte
                self._missing += 1 - size
            return _ZSTD_BLOCK if kind == 2 else min(size, _ZSTD_BLOCK)
        if part == _CONTENT:
            self._part = self._after
        elif part == _MAGIC:
            self._frames += 1
            if self._frames > MAX_MEMBERS:
                raise DecodedTooLarge(f"{MAX_MEMBERS} zstd frames")
            if head == b"\x28\xb5\x2f\xfd":
                self._part = _DESCRIPTOR
            elif head[1:] == b"\x2a\x4d\x18" and head[0] & 0xF0 == 0x50:
                self._part = _SKIP_SIZE
            else:
                raise BrokenCoding("it is not a zstd frame")
        elif part == _SKIP_SIZE:
            self._part, self._after = _CONTENT, _MAGIC
            self._missing = int.from_bytes(head, "little")
            return 0
        else:
            flags = head[0]
            self._checksum = flags & 4
            single = flags >> 5 & 1
            # The window, the dictionary id and the size of the content.
            self._missing = 1 - single + (0, 1, 2, 4)[flags & 3] + (single, 2, 4, 8)[flags >> 6]
            self._part, self._after = _CONTENT, _BLOCK_HEAD
            return 0
        self._missing = _PART_BYTES[self._part]
        return 0

    def end(self) -> None:
        if self._part != _MAGIC or self._head:
            raise BrokenCoding("it ends in the middle of the stream")

    def window(self, size: int) -> int:
        return min(size, _WINDOW)


_STAGES: dict[str, Callable[[], _Stage]] = {
    "gzip": partial(_Inflate, True),
    "x-gzip": partial(_Inflate, True),
    "deflate": partial(_Inflate, False),
    "br": _Brotli,
    "zstd": _Zstd,
}


def codings(header: str) -> tuple[str, ...]:
    """Return the codings of a Content-Encoding header, in the order in which they were applied.

    Return () if one is unknown. The body then stays unchanged, as in browsers, because servers
    also put charsets there. Raise TooManyCodings if there are more than `MAX_NESTED`.
    """
    names = [
        n for n in (part.strip().lower() for part in header.split(",")) if n and n != "identity"
    ]
    if not all(n in _STAGES for n in names):
        return ()
    if len(names) > MAX_NESTED:
        raise TooManyCodings(f"{len(names)} nested content codings")
    return tuple(names)


def add(parts: list[bytes | bytearray], chunk: bytes) -> None:
    """Append a chunk. Merge small chunks: separate objects take many times their size."""
    if len(chunk) > 1024 or not parts:
        parts.append(chunk)
    elif type(last := parts[-1]) is bytearray:
        last += chunk
    else:
        parts.append(bytearray(chunk))


def joined(parts: list[bytes | bytearray]) -> bytes:
    return parts[0] if len(parts) == 1 and type(parts[0]) is bytes else b"".join(parts)


class Decoder:
    """Decodes an arriving body. Raises DecodedTooLarge or BrokenCoding as early as possible.

    `start` and `proceed` each do one bounded step, so that an event loop can do other work between
    them. `feed` does all steps, for callers outside of an event loop. The output of both stages of
    a nested coding counts against the limit.

    There is no reference cycle, so a decoder is freed as soon as the last reference ends.
    """

    __slots__ = (
        "__weakref__",
        "_between",
        "_first",
        "_last",
        "_limit",
        "_parts",
        "_received",
        "size",
    )

    def __init__(self, names: tuple[str, ...], limit: int) -> None:
        self._parts: list[bytes | bytearray] = []
        self._limit = limit
        # The coding that was applied first is decoded last.
        self._last = _STAGES[names[0]]()
        self._first = _STAGES[names[1]]() if len(names) > 1 else None
        self.size = 0  # decoded bytes so far
        self._received, self._between = 0, 0  # bytes of the body, and of the first stage's output

    def feed(self, chunk: bytes) -> None:
        """Decode a whole chunk."""
        done = self.start(chunk)
        while not done:
            done = self.proceed()

    def start(self, chunk: bytes) -> bool:
        """Take a chunk and decode its beginning. Return True if all of it is decoded.

        Otherwise, call `proceed` until it returns True, before the next chunk.
        """
        if self._first is None:
            self._last.give(chunk)
        else:
            self._received += len(chunk)
            self._first.give(chunk)
        return self.proceed()

    def proceed(self) -> bool:
        """Decode a bounded part of the chunk. Return True if all of the chunk is decoded."""
        last, first = self._last, self._first
        if last.pending:
            if output := last.step():
                self.size += len(output)
                if self.size + self._between > self._limit:
                    raise DecodedTooLarge(f"{self._limit} bytes")
                add(self._parts, output)
        elif first is not None and first.pending:
            output = first.step()
            self._between += len(output)
            most = min(self._limit, _MIN_BETWEEN + _BETWEEN_RATIO * self._received)
            if self._between > most:
                raise DecodedTooLarge(f"{most} bytes between two content codings")
            last.give(output)
        return not (last.pending or (first is not None and first.pending))

    @property
    def is_lean(self) -> bool:
        """True if one step needs less than 1 MiB. brotli fills its window in one step."""
        return self._first is None and not isinstance(self._last, _Brotli)

    @property
    def held_bytes(self) -> int:
        """Memory of the decoded bytes, the decoders, their windows and the bytes between them."""
        held = self.size + self._last.window(self.size) + _STATE
        if self._first is not None:
            held += self._first.window(self._between) + _STATE + _STEP
        return held

    def finish(self) -> bytes:
        if self._first is not None:
            self._first.end()
        self._last.end()
        return joined(self._parts)
