"""CPU time and memory of every parser of outside bytes grow at most linearly with the input.

Each case is a hostile document that is repeated to the size of the doubling.
"""

from __future__ import annotations

import gzip
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.doubling import DOUBLINGS, SHORT_DOUBLINGS, grows_linearly

from penstock.authoring.pipeline import Pipeline
from penstock.errors import RequestRefused
from penstock.net.headers import parse_head
from penstock.rules.identity import BadUrl, canonical_url
from penstock.sources import feed_parser, sitemap_parser, webhook_bodies
from penstock.sources.api_parser import ApiError, ItemFormat, next_link
from penstock.sources.kafka.messages import Message, MessageReader
from penstock.sources.markup import parse_date
from penstock.sources.postgres.pgoutput import BadChange, Decoder

pytestmark = pytest.mark.slow

Make = Callable[[int], bytes]
Sizes = tuple[int, ...]
each_size = pytest.mark.parametrize("sizes", [DOUBLINGS, SHORT_DOUBLINGS], ids=["long", "short"])
PEAK = 64 << 20  # bytes that one document may add to the memory of the process
SHORT = 32 << 10  # bytes of a short document
LARGEST = 15 << 20  # bytes, below the largest body of a response


def repeat(before: bytes, part: bytes, after: bytes = b"") -> Make:
    """Return a maker of documents. `%d` in a part is its number."""

    def make(size: int) -> bytes:
        if b"%d" not in part:
            return before + part * (size // len(part)) + after
        numbered, length, n = [], 0, 0
        while length < size:
            numbered.append(part.replace(b"%d", b"%d" % n))
            length += len(numbered[-1])
            n += 1
        return before + b"".join(numbered) + after

    return make


def halves(before: bytes, first: bytes, middle: bytes, second: bytes, after: bytes = b"") -> Make:
    """Return a maker of documents: many of `first`, then many of `second`."""
    return lambda size: (
        before
        + first * (size // 2 // len(first))
        + middle
        + second * (size // 2 // len(second))
        + after
    )


def quietly(parse: Callable[[bytes], Any], *errors: type[Exception]) -> Callable[[bytes], None]:
    """Return a parser that ignores the errors that it declares."""

    def run(body: bytes) -> None:
        try:
            parse(body)
        except errors:
            pass

    return run


# -- feeds and sitemaps ----------------------------------------------------------------------------

RSS, RSS_END = b"<rss><channel>", b"</channel></rss>"
ITEM, ITEM_END = RSS + b"<item>", b"</item>" + RSS_END
JSON_FEED = b'{"version":"https://jsonfeed.org/version/1","items":['

FEEDS: dict[str, Make] = {
    "items": repeat(RSS, b"<item><link>/%d</link></item>", RSS_END),
    "nesting": repeat(b"<rss>", b"<a>"),
    "categories": repeat(ITEM, b"<category>a</category>", ITEM_END),
    "attributes": repeat(RSS + b"<item ", b'a%d="" ', b"/>" + RSS_END),
    "namespaces": repeat(RSS + b"<item ", b'xmlns:a%d="u%d" ', b"/>" + RSS_END),
    "ampersands": repeat(ITEM + b"<title>", b"&", b"</title>" + ITEM_END),
    "entities": repeat(ITEM + b"<title>", b"&nbsp;", b"</title>" + ITEM_END),
    "unterminated tags": repeat(RSS, b"<item"),
    "CDATA": repeat(ITEM + b"<title>", b"<![CDATA[a]]>", b"</title>" + ITEM_END),
    "long name": lambda size: RSS + b"<" + b"a" * size + b"/>" + RSS_END,
    "long words": repeat(ITEM + b"<title>", b"ab ", b"</title>" + ITEM_END),
    "long date": repeat(ITEM + b"<pubDate>", b"12 ", b"</pubDate>" + ITEM_END),
    "long xml:base": halves(
        b'<rss xml:base="http://a/', b"a", b'"><channel>', b"<item><link>x</link></item>", RSS_END
    ),
    "xml:base of links": halves(
        b'<feed xmlns="http://www.w3.org/2005/Atom" xml:base="http://a/',
        b"a",
        b'"><entry>',
        b'<link href="x"/>',
        b"</entry></feed>",
    ),
    "space before the root": repeat(
        b'<?xml version="1.0"?>', b"\n", b"<rss><channel><![CDATA[<item>]]></channel></rss>"
    ),
    "attributes of the root": repeat(b"<rss ", b"a=b ", b"><channel><item/></channel></rss>"),
    "JSON items": repeat(JSON_FEED, b"{},", b"{}]}"),
}
URLSET, URL = b"<urlset>", b"<urlset><url>"
SITEMAPS: dict[str, Make] = {
    "URLs": repeat(URLSET, b"<url><loc>/%d</loc></url>", b"</urlset>"),
    "bad URLs": repeat(URLSET, b"<url><loc>http://[%d/</loc></url>", b"</urlset>"),
    "tiny elements": repeat(URL, b"<a/>"),
    "names": repeat(URL, b"<a%d>x</a%d>"),
    "long name above tiny elements": halves(URL + b"<", b"n", b">", b"<a>x</a>"),
    "open tag": lambda size: URL + b"<a " + b"b" * size,
    "open comment": lambda size: URL + b"<!--" + b"b" * size,
    "DTD": lambda size: b"<!DOCTYPE " + b"a" * size,
    "ampersands": repeat(URL + b"<loc>", b"a=1&b"),
    "images": repeat(URL, b"<image:image><image:loc>a</image:loc></image:image>"),
    "lines": repeat(b"", b"http://a.example/%d\n"),
    "lines that are no URLs": repeat(b"http://a/\n", b"x\n"),
}


def parse_feed(body: bytes) -> object:
    return feed_parser.parse(body, None)


def parse_sitemap(body: bytes) -> object:
    return sitemap_parser.parse(body, "https://a.example/sitemap.xml")


@each_size
@pytest.mark.parametrize("shape", FEEDS)
def test_feeds_take_linear_time_and_memory(shape: str, sizes: Sizes) -> None:
    grows_linearly(FEEDS[shape], quietly(parse_feed, feed_parser.FeedError), sizes)


# Parsers may have other ways for short documents. feedparser needed 12 s for 32 KiB of line feeds.
@pytest.mark.parametrize("shape", FEEDS)
def test_a_short_feed_takes_a_short_time(shape: str) -> None:
    start = time.thread_time()
    quietly(parse_feed, feed_parser.FeedError)(FEEDS[shape](SHORT))
    assert time.thread_time() - start < 0.5


@pytest.mark.parametrize("shape", SITEMAPS)
def test_sitemaps_take_linear_time_and_memory(shape: str) -> None:
    grows_linearly(SITEMAPS[shape], quietly(parse_sitemap, sitemap_parser.SitemapError))


# -- JSON and CSV ----------------------------------------------------------------------------------

JSON: dict[str, Make] = {
    "nesting": repeat(b"", b"["),
    "nested objects": repeat(b"", b'{"a":'),
    "numbers": repeat(b"[", b"1,", b"1]"),
    "objects": repeat(b"[", b'{"a":{}},', b"{}]"),
    "digits": repeat(b"[", b"1", b"]"),
    "digits of a fraction": repeat(b"[1.", b"1", b"]"),
    "digits of an exponent": repeat(b"[1e", b"1", b"]"),
    "numbers of 4000 digits": repeat(b"[", b"1" * 4000 + b",", b"1]"),
    "keys": repeat(b"{", b'"a%d":"' + b"v" * 30 + b'",', b'"b":1}'),
    "same keys": repeat(b"{", b'"a":1,', b'"b":1}'),
    "backslashes": repeat(b'["', b"\\\\", b'"]'),
    "surrogates": repeat(b'["', b"\\ud83d\\ude00", b'"]'),
    "open quote": repeat(b'["', b"a"),
    "invalid UTF-8": repeat(b'["', b"\xe9\xa0", b'"]'),
    "lines": repeat(b"", b"{}\n"),
}
CSV: dict[str, Make] = {
    "commas": repeat(b"a,b\n", b","),
    "short rows": repeat(b"a,b\n", b"%d,\n"),
    "short rows below a wide header": lambda size: (
        b",".join(b"a%d" % n for n in range(size // 16)) + b"\n" + b"1\n" * (size // 4)
    ),
    "quotes": repeat(b"a,b\n", b'"'),
    "open quote": repeat(b'a,b\n"', b"x,\n"),
    "carriage returns": repeat(b"a,b\n", b"x\r"),
    "digits": repeat(b"a,b\n", b"1"),
}


def item_format(**given: Any) -> ItemFormat:
    pipeline = Pipeline("shop")
    pipeline.source("api+https://a.example/")
    defaults: dict[str, Any] = {
        "format": None,
        "items": "@",
        "key": None,
        "ignore": [],
        "next": None,
        "delimiter": None,
    }
    return ItemFormat(pipeline.sources[0], **{**defaults, **given})


def read_page(format: ItemFormat) -> Callable[[bytes], None]:
    def read(body: bytes) -> None:
        for _ in format.page(body, None).items:
            pass

    return quietly(read, ApiError)


@each_size
@pytest.mark.parametrize("shape", JSON)
def test_json_of_an_api_takes_linear_time_and_memory(shape: str, sizes: Sizes) -> None:
    grows_linearly(JSON[shape], read_page(item_format(ignore=["a.b"])), sizes)


@pytest.mark.parametrize("shape", CSV)
def test_csv_of_an_api_takes_linear_time_and_memory(shape: str) -> None:
    grows_linearly(CSV[shape], read_page(item_format(format="csv")))


@pytest.mark.parametrize("shape", JSON)
def test_bodies_of_webhooks_take_linear_time_and_memory(shape: str) -> None:
    headers = {"content-type": [f"application/{'x-ndjson' if shape == 'lines' else 'json'}"]}
    grows_linearly(
        JSON[shape],
        quietly(lambda body: webhook_bodies.items(headers, body, 1000), RequestRefused),
    )


# With the same keys, a message has one value until it is refused. Then its text is kept.
@each_size
@pytest.mark.parametrize("shape", [shape for shape in JSON if shape != "same keys"])
def test_kafka_messages_take_linear_time_and_memory(shape: str, sizes: Sizes) -> None:
    reader = MessageReader()
    grows_linearly(
        JSON[shape], lambda body: reader.finding(Message("t", 0, 0, 0.0, None, body, ())), sizes
    )


# -- headers ---------------------------------------------------------------------------------------

LINKS: dict[str, Make] = {
    "parts": repeat(b"", b'</%d>; rel="x", '),
    "parameters": repeat(b"<a>", b"; a=b"),
    "spaces": repeat(b"<a>;", b" "),
    "brackets": repeat(b"", b"<"),
    "long targets": repeat(b"", b"<" + b"a" * 8000),
    "open quote": repeat(b'<a>; a="', b"b"),
    "relations": repeat(b'<a>; rel="', b"a ", b'"'),
}
LOCATIONS: dict[str, Make] = {
    "dots": repeat(b"/", b"../"),
    "encoded dots": repeat(b"/", b"%2e%2e/"),
    "escapes": repeat(b"/", b"%25"),
    "labels": repeat(b"http://", b"a."),
    "other letters": repeat(b"http://", b"\xc3\xa9"),
    "at signs": repeat(b"http://", b"@"),
    "tabs": repeat(b"", b"\t"),
}
HEADS: dict[str, Make] = {
    "names": repeat(b"", b"a%d: b\r\n"),
    "same name": repeat(b"", b"link: b\r\n"),
    "cookies": repeat(b"", b"set-cookie: a\r\n"),
    "folds": repeat(b"a: b\r\n", b" b\r\n"),
    "heads": repeat(b"", b"\r\nHTTP/1.1 200\r\n"),
}


@pytest.mark.parametrize("shape", LINKS)
def test_the_link_header_takes_linear_time_and_memory(shape: str) -> None:
    grows_linearly(LINKS[shape], lambda body: next_link({"link": body.decode("latin-1")}))


@pytest.mark.parametrize("shape", LOCATIONS)
def test_the_location_header_takes_linear_time_and_memory(shape: str) -> None:
    def resolve(body: bytes) -> None:
        text = body.decode("latin-1")
        # A longer URL is refused before it is parsed, so the work is that of many URLs.
        for at in (0, *range(0, len(text), 8192)):
            try:
                canonical_url(text[at : at + 8192] if at else text, "https://a.example/x")
            except BadUrl:
                pass

    grows_linearly(LOCATIONS[shape], resolve)


@pytest.mark.parametrize("shape", HEADS)
def test_the_head_of_a_response_takes_linear_time_and_memory(shape: str) -> None:
    grows_linearly(
        HEADS[shape],
        lambda body: parse_head([b"HTTP/1.1 200 OK\r\n", *body.splitlines(keepends=True), b"\r\n"]),
    )


@pytest.mark.parametrize("part", [b"1", b"1 ", b"T", b"+00:00 "])
def test_dates_take_linear_time_and_memory(part: bytes) -> None:
    grows_linearly(repeat(b"2026", part), lambda body: parse_date(body.decode()))


# -- pgoutput --------------------------------------------------------------------------------------

TYPES = {"bool": 16, "bytea": 17, "bigint": 20, "json": 114, "real": 700, "timestamp": 1114}


def _relation(columns: list[tuple[bytes, int]]) -> bytes:
    return (
        b"R"
        + struct.pack(">I", 1)
        + b"s\0t\0d"
        + struct.pack(">H", len(columns))
        + b"".join(b"\0" + name + b"\0" + struct.pack(">Ii", oid, -1) for name, oid in columns)
    )


@pytest.mark.parametrize(
    ("type_", "text"),
    [
        ("bool", b"t"),
        ("bytea", b"\\x1"),
        ("bigint", b"1"),
        ("json", b"1"),
        ("json", b"["),
        ("real", b"1"),
        ("real", b"1e1"),
        ("timestamp", b"2026-01-01 00:00:00.1"),
    ],
)
def test_values_of_pgoutput_take_linear_time_and_memory(type_: str, text: bytes) -> None:
    decoder = Decoder()
    decoder.decode(_relation([(b"a", TYPES[type_])]))

    def make(size: int) -> bytes:
        value = text[:-1] + text[-1:] * (size - len(text))
        row = b"N" + struct.pack(">H", 1) + b"t" + struct.pack(">I", len(value)) + value
        return b"I" + struct.pack(">I", 1) + row

    grows_linearly(make, decoder.decode)


MESSAGES: dict[str, Make] = {
    "columns": lambda size: _relation([(b"c" * (size // 60_000), 25)] * 60_000),
    "truncated tables": lambda size: (
        b"T" + struct.pack(">IB", size // 4, 0) + b"\0\0\0\1" * (size // 4)
    ),
    "long name": lambda size: b"O" + bytes(8) + b"a" * size,
}


@pytest.mark.parametrize("shape", MESSAGES)
def test_messages_of_pgoutput_take_linear_time_and_memory(shape: str) -> None:
    grows_linearly(MESSAGES[shape], quietly(lambda body: Decoder().decode(body), BadChange))


# -- memory of the whole process -------------------------------------------------------------------

# `tracemalloc` does not see the memory of lxml and expat, so these run in processes of their own.
WIDE = "\U0001f600".encode()


def gzipped(make: Make) -> Make:
    """Return a maker of gzip files whose content is three times as large."""
    return lambda size: gzip.compress(make(3 * size), 1)


LARGE: dict[str, tuple[Make, Callable[[bytes], object]]] = {
    **{f"feed: {shape}": (FEEDS[shape], parse_feed) for shape in FEEDS},
    "feed: wide text": (
        repeat(ITEM + b"<title>" + WIDE, b"a", b"</title>" + ITEM_END),
        parse_feed,
    ),
    "feed: wide entries": (
        repeat(RSS, b"<item><title>" + WIDE + b"a" * 3900 + b"</title></item>", RSS_END),
        parse_feed,
    ),
    **{f"sitemap: {shape}": (gzipped(SITEMAPS[shape]), parse_sitemap) for shape in SITEMAPS},
    "sitemap: wide": (
        gzipped(
            repeat(URLSET, b"<url><loc>/%d</loc><image><loc>" + WIDE + b"</loc></image></url>")
        ),
        parse_sitemap,
    ),
    "sitemap: long URLs": (
        gzipped(repeat(URLSET, b"<url><loc>/%d/" + b"a" * 1900 + b"</loc></url>")),
        parse_sitemap,
    ),
    **{f"JSON: {shape}": (JSON[shape], read_page(item_format())) for shape in JSON},
    "JSON: wide text": (repeat(b'["' + WIDE, b"a", b'"]'), read_page(item_format())),
    "JSON: escaped wide text": (
        repeat(b'["\\ud83d\\ude00', b"a", b'"]'),
        read_page(item_format()),
    ),
    **{f"CSV: {shape}": (CSV[shape], read_page(item_format(format="csv"))) for shape in CSV},
}


def _memory(name: str) -> int:
    """Return a value of this process in bytes: VmRSS is its memory, VmHWM the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(name + ":"))) << 10


def print_peaks() -> None:
    """Print the memory that each large document adds, each measured in its own process."""
    for name, (make, parse) in LARGE.items():
        if (child := os.fork()) == 0:
            body = make(LARGEST)[:LARGEST]
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
            before = _memory("VmRSS")
            quietly(parse, feed_parser.FeedError, sitemap_parser.SitemapError)(body)
            print(f"{_memory('VmHWM') - before}\t{name}", flush=True)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0, name


def _peaks() -> Iterator[tuple[int, str]]:
    found = subprocess.run(
        [sys.executable, "-c", f"from {__name__} import print_peaks; print_peaks()"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    for line in found.stdout.splitlines():
        size, _, name = line.partition("\t")
        yield int(size), name


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
def test_the_largest_documents_take_at_most_64_mib() -> None:
    peaks = sorted(_peaks(), reverse=True)
    assert len(peaks) == len(LARGE)
    assert peaks[0][0] <= PEAK, peaks[:10]
