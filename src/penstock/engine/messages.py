"""What travels on `pages` and `records` when stages run in different processes. JSON, so that other
tools can read it.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec
import zstandard

from penstock.errors import BadEnvelope
from penstock.model import Link, Record, page_id
from penstock.ports import PageMeta

M = TypeVar("M", bound="Message")
LARGEST = (
    4 << 20
)  # bytes of a body that are unpacked from a message, whatever its sender was configured for


class Message(msgspec.Struct, frozen=True, kw_only=True):
    event: bytes  # the request's envelope, as it was

    def write(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def read(cls: type[M], raw: bytes) -> M:
        try:
            return msgspec.json.decode(raw, type=cls)
        except (msgspec.MsgspecError, UnicodeError, RecursionError, ValueError) as e:
            raise BadEnvelope(f"not a {cls.__name__}: {e}") from e


class Inline(msgspec.Struct, frozen=True, kw_only=True):
    """A body that travels with its message."""

    # "raw" or "zstd"; one that is not known here is no mistake, for the page store has the body as
    # well
    codec: str
    data: bytes


class PageMessage(Message, frozen=True, kw_only=True, omit_defaults=True, tag="penstock.page.v1"):
    """`page` always refers to the page store. Whoever does not know `inline` passes over it and
    asks there.
    """

    page: PageMeta
    inline: Inline | None = None

    def body(self) -> bytes | None:
        """What the message carries; None: nothing, or not the page that it speaks of."""
        if self.inline is None or not 0 <= self.page.size <= LARGEST:
            return None
        found = _unpacked(self.inline, self.page.size)
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
    """With the body where it is not larger than `inline_max` (0: never) and the broker takes a
    message of that size, `largest`; else a reference.
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


def _unpacked(inline: Inline, size: int) -> bytes | None:
    if inline.codec == "raw":
        return inline.data
    if inline.codec != "zstd":
        return None
    try:
        # The frame says how much comes out, and that much is allocated: believed only where it
        # agrees with the page.
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
