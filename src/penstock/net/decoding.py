"""Content codings undone chunk by chunk under a cap (gzip, deflate, br, zstd, at most two nested).
No sockets, no charset.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import brotli
import zstandard

try:
    from isal import isal_zlib as zlib  # twice as fast as zlib on pages
except ImportError:  # no wheel for this platform: the same answers, slower
    import zlib  # type: ignore[no-redef]

_zlib: Any = zlib
_inflater = _zlib.decompressobj
_InflateError: type[Exception] = _zlib.error
ACCEPT_ENCODING = "gzip, deflate, br, zstd"
MAX_NESTED = 2
_STEP = 1 << 18  # the most any decoder may emit at once, so a cap is noticed long before memory is
_WINDOW = 1 << 23  # zstd: what RFC 9659 lets a server ask of us

Out = Callable[[bytes], None]


class DecodedTooLarge(Exception):
    """More decoded bytes than the limit."""


class TooManyCodings(Exception):
    """More nested codings than any honest server uses."""


class BrokenCoding(Exception):
    """The bytes are not what Content-Encoding says, or end too early."""


class _Stage(Protocol):
    def feed(self, data: bytes) -> None: ...

    def end(self) -> None: ...


class _Inflate:
    """gzip (several members in a row), zlib, and the raw deflate that some servers call deflate."""

    def __init__(self, out: Out, gzip: bool) -> None:
        self._out, self._gzip, self._seen = out, gzip, False
        self._d = _inflater(wbits=31 if gzip else 15)

    def feed(self, data: bytes) -> None:
        out = self._out
        while data:
            d = self._d
            if d.eof:
                if not self._gzip or data[:1] != b"\x1f":
                    return  # padding after the last member: every browser ignores it
                d = self._d = _inflater(wbits=31)
            try:
                piece = d.decompress(data, _STEP)
            except _InflateError as e:
                if self._gzip or self._seen:
                    raise BrokenCoding(str(e)) from e
                d = self._d = _inflater(wbits=-15)
                self._seen = True
                continue
            self._seen = True
            if piece:
                out(piece)
            # A full step may leave output inside the decoder even when it took all input.
            data = d.unused_data if d.eof else d.unconsumed_tail
            if not data and not d.eof and len(piece) == _STEP:
                self._drain()

    def _drain(self) -> None:
        while not self._d.eof:
            piece = self._d.decompress(b"", _STEP)
            if not piece:
                return
            self._out(piece)

    def end(self) -> None:
        if self._seen and not self._d.eof:
            raise BrokenCoding("it ends in the middle of the stream")


class _Brotli:
    def __init__(self, out: Out) -> None:
        self._out, self._seen = out, False
        self._d: Any = brotli.Decompressor()

    def feed(self, data: bytes) -> None:
        d, out = self._d, self._out
        if d.is_finished():
            return
        self._seen = True
        try:
            piece = d.process(data, output_buffer_limit=_STEP)
            if piece:
                out(piece)
            # "Can accept more" speaks of input only: a full step may have left output behind as
            # well.
            while len(piece) >= _STEP or not d.can_accept_more_data():
                piece = d.process(b"", output_buffer_limit=_STEP)
                if piece:
                    out(piece)
        except brotli.error as e:
            raise BrokenCoding(str(e)) from e

    def end(self) -> None:
        if self._seen and not self._d.is_finished():
            raise BrokenCoding("it ends in the middle of the stream")


class _Zstd:
    """The writer of python-zstandard: it pushes bounded blocks, so an exception from `out` stops a
    bomb inside one call.
    """

    _PROBE = zstandard.ZstdCompressor().compress(b"\x00probe\x00")

    def __init__(self, out: Out) -> None:
        self._blocks, self._seen = _Blocks(out), False
        self._w = zstandard.ZstdDecompressor(max_window_size=_WINDOW).stream_writer(
            self._blocks,  # type: ignore[arg-type]
            write_size=_STEP,
            closefd=False,
        )

    def feed(self, data: bytes) -> None:
        self._seen = True
        try:
            self._w.write(data)
        except zstandard.ZstdError as e:
            raise BrokenCoding(str(e)) from e

    def end(self) -> None:
        # The library does not say whether a frame is complete; a known frame comes out unharmed
        # only after a complete one.
        if not self._seen:
            return
        self._blocks.out, self._blocks.last = _ignore, b""
        try:
            self._w.write(self._PROBE)
        except zstandard.ZstdError as e:
            raise BrokenCoding("it ends in the middle of the stream") from e
        if self._blocks.last != b"\x00probe\x00":
            raise BrokenCoding("it ends in the middle of the stream")


class _Blocks:
    """What the writer writes to."""

    def __init__(self, out: Out) -> None:
        self.out, self.last = out, b""

    def write(self, data: bytes) -> int:
        self.last = bytes(data)
        self.out(self.last)
        return len(data)


def _ignore(_: bytes) -> None:
    return None


_STAGES: dict[str, Callable[[Out], _Stage]] = {
    "gzip": lambda out: _Inflate(out, True),
    "x-gzip": lambda out: _Inflate(out, True),
    "deflate": lambda out: _Inflate(out, False),
    "br": _Brotli,
    "zstd": _Zstd,
}


def codings(header: str) -> tuple[str, ...]:
    """What Content-Encoding asks us to undo, in the order it was applied. One we do not know leaves
    the body as it came, as in browsers (servers put charsets there). Raises TooManyCodings.
    """
    names = [
        n for n in (part.strip().lower() for part in header.split(",")) if n and n != "identity"
    ]
    if not all(n in _STAGES for n in names):
        return ()
    if len(names) > MAX_NESTED:
        raise TooManyCodings(f"{len(names)} nested content codings")
    return tuple(names)


def add(parts: list[bytes | bytearray], piece: bytes) -> None:
    """Crumbs are put together at once: an object for each takes many times their size."""
    if len(piece) > 1024 or not parts:
        parts.append(piece)
    elif type(last := parts[-1]) is bytearray:
        last += piece
    else:
        parts.append(bytearray(piece))


def joined(parts: list[bytes | bytearray]) -> bytes:
    return parts[0] if len(parts) == 1 and type(parts[0]) is bytes else b"".join(parts)


class _Room:
    """What may still come out, and where it goes. Nothing here or in a stage leads back to the
    decoder: one that is let go is gone at once, with the hundred kilobytes that it may hold, and
    need not wait for the collector of cycles.
    """

    def __init__(self, room: int, out: Out) -> None:
        self.left, self._out = room, out

    def take(self, piece: bytes) -> None:
        self.left -= len(piece)
        if self.left < 0:
            raise DecodedTooLarge
        self._out(piece)


class Decoder:
    """Takes the body as it arrives. Raises DecodedTooLarge or BrokenCoding as soon as either is
    known.
    """

    def __init__(self, names: tuple[str, ...], limit: int) -> None:
        self._parts: list[bytes | bytearray] = []
        self._stages: list[_Stage] = []
        out: Out = partial(add, self._parts)
        self._limit, self._room = limit, _Room(limit, out)
        for n, name in enumerate(names):  # the first was applied first, so it is undone last
            stage = _STAGES[name]((_Room(limit, out) if n else self._room).take)
            self._stages.insert(0, stage)
            out = stage.feed
        self.feed = out

    @property
    def size(self) -> int:
        """Decoded bytes so far."""
        return self._limit - self._room.left

    def finish(self) -> bytes:
        for stage in self._stages:
            stage.end()
        return joined(self._parts)
