"""What a worker, its zygote and its sandboxed children say to each other: the messages and their
encoding. No process is started here.
"""

from __future__ import annotations

import enum
import mmap
import struct
from collections.abc import Sequence

import msgspec

from penstock.authoring.page import Page
from penstock.ports import Extracted, FetchedPage

# -- worker -> zygote: fixed size, so that one read is one message and the descriptors that came wit

ORDER = struct.Struct("<BxxxIQ")  # order, signal or slot, child number


class Order(enum.IntEnum):
    FORK = 1  # with four descriptors: requests, answers, crash notes, memory for bodies
    SIGNAL = 2


# -- zygote -> worker ------------------------------------------------------------------------------

LENGTH = struct.Struct("<I")


class Ready(msgspec.Struct, tag="ready", array_like=True):
    pid: int


class Refused(msgspec.Struct, tag="refused", array_like=True):
    """The pipeline file does not load."""

    error: str
    hint: str


class Started(msgspec.Struct, tag="started", array_like=True):
    child: int
    pid: int  # 0: it could not be forked
    error: str = ""


class Ended(msgspec.Struct, tag="ended", array_like=True):
    child: int
    exit_code: int  # negative: the signal


Notice = Ready | Refused | Started | Ended
encode_notice = msgspec.msgpack.Encoder().encode
decode_notice = msgspec.msgpack.Decoder(Notice).decode

# -- worker -> child: head and meta through the pipe, the bodies in shared memory: through the pipe they cost 20 µs each. What
# finds no room there follows the meta. A child has one request at a time, so the memory is free when the next one is made. ----

REQUEST = struct.Struct(
    "<IIQIBxxx"
)  # bytes of meta, count, token, bytes of the first bodies that lie in shared memory, kind
SHARED_BYTES = 1 << 20  # a group of ordinary pages


class Kind(enum.IntEnum):
    PAGES = 1
    HOOKS = 2


class PageHead(msgspec.Struct, array_like=True):
    url: str
    requested_url: str  # "" where it is the same
    status: int
    headers: dict[str, str]
    fetched_at: float
    size: int
    event: bytes  # JSON, as on the wire: it holds integers of any size, which msgpack does not


_encode = msgspec.msgpack.Encoder().encode
_encode_event = msgspec.json.Encoder().encode
decode_heads = msgspec.msgpack.Decoder(list[PageHead]).decode
decode_changes = msgspec.msgpack.Decoder(list[bytes]).decode


def head_of(page: FetchedPage) -> PageHead:
    return PageHead(
        page.url, "" if page.requested_url == page.url else page.requested_url, page.status, page.headers, page.fetched_at, len(page.body),
        b"" if page.event is None else _encode_event(page.event),
    )  # fmt: skip


def page_of(head: PageHead, body: bytes) -> Page:
    return Page.received(
        head.url,
        body,
        head.status,
        head.headers,
        head.fetched_at,
        head.event or None,
        head.requested_url,
    )


class CannotTravel(Exception):
    """A page that cannot be encoded: lone surrogates in a header, say."""


_UNENCODABLE = (UnicodeError, TypeError, ValueError, OverflowError, RecursionError)


def request(pages: Sequence[FetchedPage], token: int, memory: mmap.mmap) -> list[bytes]:
    """What goes through the pipe; the rest is in the memory."""
    try:
        meta = _encode([head_of(p) for p in pages])
    except _UNENCODABLE as e:
        raise CannotTravel from e
    shared, rest = 0, []
    for i, page in enumerate(pages):
        end = shared + len(page.body)
        if end > SHARED_BYTES:
            rest = [p.body for p in pages[i:]]
            break
        memory[shared:end] = page.body
        shared = end
    return [REQUEST.pack(len(meta), len(pages), token, shared, Kind.PAGES) + meta, *rest]


def cannot_travel(page: FetchedPage) -> str:
    """Why; "" where it can."""
    try:
        _encode(head_of(page))
    except _UNENCODABLE as e:
        return f"{type(e).__name__}: {e}".encode("utf-8", "replace").decode()
    return ""


def hook_request(changes: Sequence[bytes], token: int) -> list[bytes]:
    meta = _encode(list(changes))
    return [REQUEST.pack(len(meta), len(changes), token, 0, Kind.HOOKS) + meta]


# -- child -> worker -------------------------------------------------------------------------------

ANSWER = struct.Struct(
    "<IQIIBxxx"
)  # bytes that follow, token, index of the first result, count, mark
MANY = struct.Struct(
    ">BI"
)  # msgpack array32: results are encoded one by one, so that each can be measured
ENVELOPE = 1 << 20  # what names, keys and hashes may add to a page's output
FLUSH_BYTES, FLUSH_SECONDS = (
    256 << 10,
    0.02,
)  # fast pages: one message a group; slow ones: a death loses 20 ms of work


class Mark(enum.IntEnum):
    MORE = 0
    DONE = 1
    RETIRE = 2  # done, and this child ends now: old or grown
    MEMORY = 3  # the page after the last result ran out of memory; this child ends now
    OUTPUT = 4  # its output is too large; this child ends now


encode_result = msgspec.msgpack.Encoder().encode
decode_results = msgspec.msgpack.Decoder(list[Extracted]).decode
decode_lines = msgspec.msgpack.Decoder(list[str]).decode


def answer(parts: Sequence[bytes], token: int, first: int, mark: Mark) -> bytes:
    size = MANY.size + sum(map(len, parts))
    return b"".join(
        [ANSWER.pack(size, token, first, len(parts), mark), MANY.pack(0xDD, len(parts)), *parts]
    )


# -- shared memory: which page a child is on, since when. One slot a child, written by it, read by t

PROGRESS = struct.Struct(
    "<qd"
)  # index (-1: between pages), time.monotonic(), which all processes of a machine share
SLOT_BYTES = 64
BETWEEN = -1

# -- exit statuses of a child that mean something here ---------------------------------------------

LOST_PIPES = 121
BROKEN = 122
