"""Checks that the parsers of sources take linear time and memory for their worst inputs."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Callable

import pytest
from tests.unit.doubling import grows_linearly

from penstock.sources import sitemap_parser
from penstock.sources.gzip_members import GzipMembers
from penstock.sources.markup import UnreadableDocument, gunzip, without_controls
from penstock.sources.seeds.files import SeedObject
from penstock.sources.seeds.lines import Lines, SizeLimits, Stream

pytestmark = pytest.mark.slow

EMPTY_MEMBER = gzip.compress(b"", mtime=0)
ONE_BYTE_MEMBER = gzip.compress(b"a", mtime=0)
LIMITS = SizeLimits(max_record=1 << 20, max_size=1 << 30, ratio=250.0)


class Given:
    """An object of a seed list in memory."""

    def __init__(self, body: bytes) -> None:
        self.found = SeedObject(name="list", path="list", stamp=b"", size=len(body), at=0.0)
        self._body = body

    def read_at(self, offset: int, length: int) -> bytes:
        # A slice of the whole body would be no copy, and take no memory.
        return bytes(memoryview(self._body)[offset : offset + length])

    def close(self) -> None: ...


def repeated(part: bytes) -> Callable[[int], bytes]:
    return lambda size: part * (size // len(part))


def read_lines(body: bytes, *, gzip: bool = False, delimiter: str | None = None) -> int:
    lines = Lines(Stream(Given(body), LIMITS, gzip=gzip), LIMITS, delimiter=delimiter)
    records = 0
    while not lines.ended:
        lines.budget = 8
        while lines.record() is not None:
            records += 1
    return records


@pytest.mark.parametrize("member", [EMPTY_MEMBER, ONE_BYTE_MEMBER], ids=["empty", "one byte"])
def test_small_gzip_members_take_linear_time(member: bytes) -> None:
    def decompress(body: bytes) -> None:
        members = GzipMembers()
        members.feed(body)
        while not members.needs_input:
            members.take(1 << 16)

    grows_linearly(repeated(member), decompress)


@pytest.mark.parametrize("member", [EMPTY_MEMBER, ONE_BYTE_MEMBER], ids=["empty", "one byte"])
def test_a_url_list_of_small_gzip_members_takes_linear_time(member: bytes) -> None:
    grows_linearly(repeated(member), lambda body: read_lines(body, gzip=True))


def test_a_sitemap_of_empty_gzip_members_is_refused_in_linear_time() -> None:
    def parse(body: bytes) -> None:
        with pytest.raises(sitemap_parser.SitemapError, match="gzip members"):
            sitemap_parser.parse(body, "http://shop.test/sitemap.xml.gz")

    grows_linearly(repeated(EMPTY_MEMBER), parse)


def test_a_bomb_of_empty_gzip_members_is_refused() -> None:
    with pytest.raises(UnreadableDocument, match="gzip members"):
        gunzip(gzip.compress(EMPTY_MEMBER * 1_000_000), 50 << 20)


def test_bytes_after_the_last_gzip_member_are_ignored() -> None:
    assert gunzip(gzip.compress(b"a") + gzip.compress(b"b") + b"\0\0 junk", 99) == b"ab"


def test_other_threads_continue_while_controls_are_removed() -> None:
    text = "\x01" + "\xe9\u0101" * (4 << 20)
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(without_controls(text)))
    turns = 0
    thread.start()
    while thread.is_alive():
        time.sleep(0.001)
        turns += 1
    assert found == [text[1:]]
    assert turns > 10  # With one call of `translate`, there are two or three.


def test_quotes_that_never_close_are_not_searched_for_each_line() -> None:
    # Each of these lines begins a field that stays open until the end of the search, 64 KiB later.
    body = b"url\n" + b'x","\n' * 20_000
    began = time.thread_time()
    read_lines(body, delimiter=",")
    assert time.thread_time() - began < 5  # seconds. Without the limit it takes 37 s.


def test_a_record_of_several_lines_is_read_after_a_stray_quote() -> None:
    body = b'url,text\n"stray\n' + b"a,b\n" * 20_000 + b'"x\ny",z\n'
    lines = Lines(Stream(Given(body), LIMITS, gzip=False), LIMITS, delimiter=",")
    records = []
    while not lines.ended:
        lines.budget = 8
        while (record := lines.record()) is not None:
            records.append(record)
    assert [r.raw for r in records if r.wrong] == [b'"stray']
    assert records[-1].raw == b'"x\ny",z'
