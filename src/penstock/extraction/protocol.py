"""Messages between a worker, its zygote and its sandboxed children, and their encoding."""

from __future__ import annotations

import enum
import mmap
import struct
from collections.abc import Sequence

import msgspec

from penstock.authoring.page import Page
from penstock.ports import Extracted, FetchedPage

# -- worker -> zygote ------------------------------------------------------------------------------

# Fixed size, so that one read returns one message with the descriptors that were sent with it.
COMMAND = struct.Struct("<BxxxIQ")  # command, signal or progress index, child number


class Command(enum.IntEnum):
    FORK = 1  # with four descriptors: requests, results, crash file, memory for bodies
    SIGNAL = 2


# -- zygote -> worker ------------------------------------------------------------------------------

LENGTH = struct.Struct("<I")


class Ready(msgspec.Struct, tag="ready", array_like=True):
    pid: int


class LoadFailed(msgspec.Struct, tag="refused", array_like=True):
    """The pipeline file does not load."""

    error: str
    hint: str


class Started(msgspec.Struct, tag="started", array_like=True):
    child: int
    pid: int  # 0 if the child could not be forked
    error: str = ""


class Ended(msgspec.Struct, tag="ended", array_like=True):
    child: int
    exit_code: int  # negative if the child was ended by that signal


Notice = Ready | LoadFailed | Started | Ended
encode_notice = msgspec.msgpack.Encoder().encode
decode_notice = msgspec.msgpack.Decoder(Notice).decode

# -- worker -> child -------------------------------------------------------------------------------

# The head and the meta data are sent through the pipe. Bodies are in shared memory, because each
# body costs 20 µs through the pipe. Bodies that do not fit into the memory follow the meta data.
# A child has one request at a time, so the memory is free when the next request is made.

# Bytes of meta data, count, token, bytes of the first bodies in shared memory, kind.
REQUEST = struct.Struct("<IIQIBxxx")
SHARED_BYTES = 1 << 20  # holds a typical group of pages


class Kind(enum.IntEnum):
    PAGES = 1
    HOOKS = 2


class PageHead(msgspec.Struct, array_like=True):
    url: str
    requested_url: str  # "" if it is the same as `url`
    status: int
    headers: dict[str, str]
    fetched_at: float
    size: int
    event: bytes  # JSON, as in the envelope: msgpack cannot encode integers beyond 64 bits


_encode = msgspec.msgpack.Encoder().encode
_encode_event = msgspec.json.Encoder().encode
decode_heads = msgspec.msgpack.Decoder(list[PageHead]).decode
decode_changes = msgspec.msgpack.Decoder(list[bytes]).decode


def head_of(page: FetchedPage) -> PageHead:
    return PageHead(
        page.url,
        "" if page.requested_url == page.url else page.requested_url,
        page.status,
        page.headers,
        page.fetched_at,
        len(page.body),
        b"" if page.event is None else _encode_event(page.event),
    )


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


class NotEncodable(Exception):
    """A page cannot be encoded, for example because a header has lone surrogates."""


_UNENCODABLE = (UnicodeError, TypeError, ValueError, OverflowError, RecursionError)


def request(pages: Sequence[FetchedPage], token: int, memory: mmap.mmap) -> list[bytes]:
    """Write bodies to the shared memory, and return the data to send through the pipe."""
    try:
        meta = _encode([head_of(p) for p in pages])
    except _UNENCODABLE as e:
        raise NotEncodable from e
    shared, rest = 0, []
    for i, page in enumerate(pages):
        end = shared + len(page.body)
        if end > SHARED_BYTES:
            rest = [p.body for p in pages[i:]]
            break
        memory[shared:end] = page.body
        shared = end
    return [REQUEST.pack(len(meta), len(pages), token, shared, Kind.PAGES) + meta, *rest]


def encoding_error(page: FetchedPage) -> str:
    """Return why the page cannot be encoded, or "" if it can."""
    try:
        _encode(head_of(page))
    except _UNENCODABLE as e:
        return f"{type(e).__name__}: {e}".encode("utf-8", "replace").decode()
    return ""


def hook_request(changes: Sequence[bytes], token: int, _memory: mmap.mmap) -> list[bytes]:
    """Return the data to send through the pipe. Changes are small and need no shared memory."""
    meta = _encode(list(changes))
    return [REQUEST.pack(len(meta), len(changes), token, 0, Kind.HOOKS) + meta]


# -- child -> worker -------------------------------------------------------------------------------

# Bytes that follow, token, index of the first result, count, flag.
ANSWER = struct.Struct("<IQIIBxxx")
# msgpack array32. Results are encoded one by one, so that the size of each can be checked.
ARRAY32 = struct.Struct(">BI")
ENVELOPE = 1 << 20  # bytes that names, keys and hashes may add to a page's output
# Results of fast pages are collected and sent in one message, for at most 20 ms. So a crash loses
# at most 20 ms of finished work.
FLUSH_BYTES, FLUSH_SECONDS = 256 << 10, 0.02


class ResultFlag(enum.IntEnum):
    MORE = 0
    DONE = 1
    RETIRE = 2  # done, and this child exits now: many pages, much memory or many descriptors
    MEMORY = 3  # the page after the last result ran out of memory, and this child exits now
    OUTPUT = 4  # the output of that page is too large, and this child exits now


encode_result = msgspec.msgpack.Encoder().encode
decode_results = msgspec.msgpack.Decoder(list[Extracted]).decode
decode_lines = msgspec.msgpack.Decoder(list[str]).decode


def answer(parts: Sequence[bytes], token: int, first: int, flag: ResultFlag) -> bytes:
    size = ARRAY32.size + sum(map(len, parts))
    return b"".join(
        [ANSWER.pack(size, token, first, len(parts), flag), ARRAY32.pack(0xDD, len(parts)), *parts]
    )


# -- shared memory: the page in progress of each child, and its start ------------------------------

# Each child writes its own entry, and the worker reads it.
# Page index (-1: between pages), time.monotonic(). All processes of a machine share that clock.
PROGRESS = struct.Struct("<qd")
PROGRESS_BYTES = 64
BETWEEN = -1

# -- exit statuses of a child with a special meaning -----------------------------------------------

LOST_PIPES = 121
BROKEN = 122
