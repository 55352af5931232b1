"""Decompression of gzip data with several members, in bounded steps. Does no I/O."""

from __future__ import annotations

import zlib

# Bytes of input for one call of zlib. After each member zlib copies the rest of its input, so the
# rest must be short. With longer input, many small members take quadratic time.
_SLICE = 1 << 12


class BrokenGzip(Exception):
    """The bytes are not gzip. The text is zlib's reason."""


class GzipMembers:
    """Decompressor of one gzip file. Zero bytes between members are padding.

    The work is linear in the bytes of input and output.
    """

    def __init__(self, *, ignore_rest: bool = False) -> None:
        """`ignore_rest`: ignore bytes after a member that do not begin a member, as browsers do."""
        self._ignore_rest = ignore_rest
        self._data, self._at = memoryview(b""), 0
        self._inflate = zlib.decompressobj(31)
        self.in_member = False  # True after the first byte of a member, until its last byte
        self.members = 0  # members that have begun

    @property
    def needs_input(self) -> bool:
        return self._at >= len(self._data)

    def feed(self, data: bytes) -> None:
        """Set the next input. Call it only if `needs_input` is True."""
        self._data, self._at = memoryview(data), 0

    def take(self, limit: int, max_members: int | None = None) -> bytes:
        """Return up to `limit` decompressed bytes. Fewer are returned if the input is used up.

        Stop when a member begins that is not one of the first `max_members`. Raises BrokenGzip.
        """
        found = bytearray()
        while not self.needs_input and len(found) < limit:
            part = self._data[self._at : self._at + _SLICE]
            if not self.in_member:
                if padding := len(part) - len(bytes(part).lstrip(b"\0")):
                    self._at += padding
                    continue
                if self._ignore_rest and self.members and part[0] != 0x1F:
                    self._data, self._at = memoryview(b""), 0
                    break
                self._inflate, self.in_member = zlib.decompressobj(31), True
                self.members += 1
                if max_members is not None and self.members > max_members:
                    break
            try:
                found += self._inflate.decompress(part, limit - len(found))
            except zlib.error as e:
                raise BrokenGzip(str(e)) from None
            if self._inflate.eof:
                self.in_member, left = False, self._inflate.unused_data
            else:
                left = self._inflate.unconsumed_tail
            self._at += len(part) - len(left)
        return bytes(found)
