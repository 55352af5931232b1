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
# Bytes that a decoder may output in one call, so that the size limit is checked often enough.
_STEP = 1 << 18
_WINDOW = 1 << 23  # bytes of the largest zstd window that RFC 9659 allows

Out = Callable[[bytes], None]


class DecodedTooLarge(Exception):
    """More decoded bytes than the limit."""


class TooManyCodings(Exception):
    """More nested codings than `MAX_NESTED`. No honest server uses more."""


class BrokenCoding(Exception):
    """The body does not match its Content-Encoding, or ends too early."""


class _Stage(Protocol):
    def feed(self, data: bytes) -> None: ...

    def end(self) -> None: ...


class _Inflate:
    """Decodes gzip with several members, zlib, and raw deflate, which some servers send."""

    def __init__(self, out: Out, gzip: bool) -> None:
        self._out, self._gzip, self._seen = out, gzip, False
        self._d = _inflater(wbits=31 if gzip else 15)

    def feed(self, data: bytes) -> None:
        out = self._out
        while data:
            d = self._d
            if d.eof:
                if not self._gzip or data[:1] != b"\x1f":
                    return  # padding after the last member, which all browsers ignore
                d = self._d = _inflater(wbits=31)
            try:
                chunk = d.decompress(data, _STEP)
            except _InflateError as e:
                if self._gzip or self._seen:
                    raise BrokenCoding(str(e)) from e
                d = self._d = _inflater(wbits=-15)
                self._seen = True
                continue
            self._seen = True
            if chunk:
                out(chunk)
            # After a full step the decoder may still hold output, even if it has read all input.
            data = d.unused_data if d.eof else d.unconsumed_tail
            if not data and not d.eof and len(chunk) == _STEP:
                self._drain()

    def _drain(self) -> None:
        while not self._d.eof:
            chunk = self._d.decompress(b"", _STEP)
            if not chunk:
                return
            self._out(chunk)

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
            chunk = d.process(data, output_buffer_limit=_STEP)
            if chunk:
                out(chunk)
            # `can_accept_more_data` is about input only. After a full step, output may be left.
            while len(chunk) >= _STEP or not d.can_accept_more_data():
                chunk = d.process(b"", output_buffer_limit=_STEP)
                if chunk:
                    out(chunk)
        except brotli.error as e:
            raise BrokenCoding(str(e)) from e

    def end(self) -> None:
        if self._seen and not self._d.is_finished():
            raise BrokenCoding("it ends in the middle of the stream")


class _Zstd:
    """Decodes zstd with the writer of python-zstandard.

    The writer outputs bounded blocks, so an exception from `out` stops a bomb inside one call.
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
        # The library does not report if a frame is complete. Only after a complete frame is the
        # probe decoded correctly.
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
    """File object that the zstd writer writes to."""

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


class _OutputLimit:
    """Counts the output of a stage against the limit, and passes it on.

    It and the stages have no reference to the decoder. So there is no cycle, and a decoder and its
    up to 100 kB are freed as soon as the last reference ends.
    """

    def __init__(self, limit: int, out: Out) -> None:
        self.left, self._out = limit, out

    def take(self, chunk: bytes) -> None:
        self.left -= len(chunk)
        if self.left < 0:
            raise DecodedTooLarge
        self._out(chunk)


class Decoder:
    """Decodes an arriving body. Raises DecodedTooLarge or BrokenCoding as early as possible."""

    def __init__(self, names: tuple[str, ...], limit: int) -> None:
        self._parts: list[bytes | bytearray] = []
        self._stages: list[_Stage] = []
        out: Out = partial(add, self._parts)
        self._limit, self._output = limit, _OutputLimit(limit, out)
        for n, name in enumerate(names):  # the coding that was applied first is decoded last
            stage = _STAGES[name]((_OutputLimit(limit, out) if n else self._output).take)
            self._stages.insert(0, stage)
            out = stage.feed
        self.feed = out

    @property
    def size(self) -> int:
        """Decoded bytes so far."""
        return self._limit - self._output.left

    def finish(self) -> bytes:
        for stage in self._stages:
            stage.end()
        return joined(self._parts)
