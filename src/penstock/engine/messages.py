"""Messages of the topics `pages` and `records`, used when stages run in different processes.

They are JSON, so that other tools can read them.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec
import zstandard

from penstock.errors import BadEnvelope
from penstock.model import Link, Record, page_id
from penstock.ports import PageMeta

M = TypeVar("M", bound="Message")
# Bytes of the largest body that is unpacked from a message, independent of the sender's settings.
MAX_INLINE_BODY = 4 << 20


class Message(msgspec.Struct, frozen=True, kw_only=True):
    event: bytes  # the envelope of the request, unchanged

    def write(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def read(cls: type[M], raw: bytes) -> M:
        try:
            return msgspec.json.decode(raw, type=cls)
        except (msgspec.MsgspecError, UnicodeError, RecursionError, ValueError) as e:
            raise BadEnvelope(f"not a {cls.__name__}: {e}") from e


class Inline(msgspec.Struct, frozen=True, kw_only=True):
    """A body inside its message."""

    # "raw" or "zstd". An unknown codec is not an error: the page store has the body too.
    codec: str
    data: bytes


class PageMessage(Message, frozen=True, kw_only=True, omit_defaults=True, tag="penstock.page.v1"):
    """A fetched page. `page` always refers to the page store.

    A reader that does not know `inline` ignores it and reads the body from the page store.
    """

    page: PageMeta
    inline: Inline | None = None

    def body(self) -> bytes | None:
        """Return the body in the message, or None if it has no body or the body of another page."""
        if self.inline is None or not 0 <= self.page.size <= MAX_INLINE_BODY:
            return None
        found = _unpack(self.inline, self.page.size)
        return (
            found
            if found is not None
            and len(found) == self.page.size
            and page_id(found) == self.page.page
            else None
        )


def page_message(
    event: bytes, page: PageMeta, body: bytes, *, inline_max: int, largest: int | None
) -> bytes:
    """Encode a page message, with the body if both limits allow it, else only a reference.

    `inline_max` is the largest body in bytes, 0 for none. `largest` is the largest message that the
    broker accepts.
    """
    if inline_max and len(body) <= inline_max:
        packed = zstandard.compress(body)
        inline = (
            Inline(codec="zstd", data=packed)
            if len(packed) < len(body)
            else Inline(codec="raw", data=body)
        )
        message = PageMessage(event=event, page=page, inline=inline).write()
        if largest is None or len(message) <= largest:
            return message
    return PageMessage(event=event, page=page).write()


def _unpack(inline: Inline, size: int) -> bytes | None:
    if inline.codec == "raw":
        return inline.data
    if inline.codec != "zstd":
        return None
    try:
        # The frame header states the decompressed size, and that much memory is allocated. Accept
        # the frame only if the size matches the page.
        return (
            zstandard.decompress(inline.data)
            if zstandard.frame_content_size(inline.data) == size
            else None
        )
    except zstandard.ZstdError:
        return None


class RecordsMessage(Message, frozen=True, kw_only=True, tag="penstock.records.v1"):
    page: PageMeta | None
    records: list[Record]
    links: list[Link]
    matched: bool
