"""Messages of the topics `pages` and `records`, used when stages run in different processes.

The messages are JSON, so that other tools can read them.
"""

from __future__ import annotations

from typing import ClassVar, TypeVar

import msgspec
import zstandard

from penstock.errors import BadEnvelope, NewerMessage
from penstock.model import Link, Record, major_version, page_id
from penstock.ports import PageMeta

M = TypeVar("M", bound="Message")
# Bytes of the largest body that is unpacked from a message, independent of the sender's settings.
MAX_INLINE_BODY = 4 << 20
# Version of the messages, at the end of their type. A newer version is not understood. A new field
# that readers may ignore does not change the version.
VERSION = 1


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the messages."""

    stem: ClassVar[str] = ""  # of the type, before the version

    event: bytes  # envelope of the request, unchanged

    def write(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def read(cls: type[M], raw: bytes) -> M:
        """Decode a message. Raise BadEnvelope if it is not valid, NewerMessage if it is newer."""
        try:
            return msgspec.json.decode(raw, type=cls)
        except (msgspec.MsgspecError, UnicodeError, RecursionError, ValueError) as e:
            if cls.stem and (version := major_version(raw, cls.stem)) > VERSION:
                raise NewerMessage(cls.__name__, version, VERSION) from e
            raise BadEnvelope(f"not a {cls.__name__}: {e}") from e


class Inline(msgspec.Struct, frozen=True, kw_only=True):
    """A body inside its message."""

    # Codec: "raw" or "zstd". An unknown codec is not an error, because the page store has the body.
    codec: str
    data: bytes


class PageMessage(
    Message, frozen=True, kw_only=True, omit_defaults=True, tag=f"penstock.page.v{VERSION}"
):
    """A fetched page. `page` always refers to the page store.

    A reader that does not know `inline` ignores it and reads the body from the page store.
    """

    stem: ClassVar[str] = "penstock.page.v"

    page: PageMeta
    inline: Inline | None = None

    def body(self) -> bytes | None:
        """Return the body in the message.

        Return None if the message has no body, a body of another page, a body larger than
        MAX_INLINE_BODY, or an unknown codec.
        """
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
    """Encode a page message. Include the body if both limits allow it, else only a reference.

    `inline_max` is the size of the largest included body in bytes, 0 for none. `largest` is the
    size of the largest message that the broker accepts in bytes, None for no limit.
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
    """Return the decoded body, or None if it is not valid or has another size than `size`."""
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


class RecordsMessage(Message, frozen=True, kw_only=True, tag=f"penstock.records.v{VERSION}"):
    """The extraction result of a page."""

    stem: ClassVar[str] = "penstock.records.v"

    page: PageMeta | None
    records: list[Record]
    links: list[Link]
    matched: bool
    depends_on: str = ""  # dependencies of the extraction, as in rules.dependencies
