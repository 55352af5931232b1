"""What travels on `pages` and `records` when stages run in different processes. JSON, so that other tools can read it."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from penstock.errors import BadEnvelope
from penstock.model import Link, Record
from penstock.ports import PageMeta

M = TypeVar("M", bound="Message")


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


class PageMessage(Message, frozen=True, kw_only=True, tag="penstock.page.v1"):
    page: PageMeta


class RecordsMessage(Message, frozen=True, kw_only=True, tag="penstock.records.v1"):
    page: PageMeta | None
    records: list[Record]
    links: list[Link]
    matched: bool
