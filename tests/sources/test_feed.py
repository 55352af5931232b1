"""Feeds of every format: one finding for each new or updated entry.

An invalid or hostile document is a FeedError.
"""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.sources.web_rig import polled_source, run

from penstock.errors import ConfigError, SourceDown, UsageError
from penstock.model import Failure, mint
from penstock.sources.feed import FeedError, Hints, parse
from penstock.sources.markup import parse_date
from penstock.testing.web import Request, Web, reply, tagged

RSS = "application/rss+xml"
ATOM = '<feed xmlns="http://www.w3.org/2005/Atom" xml:base="http://shop.test/a/">{}</feed>'
MOON = 1577836800.0  # 2020-01-01T00:00:00Z


def rss(items: str, head: str = "") -> str:
    return (
        '<?xml version="1.0"?><rss '
        f'version="2.0"><channel><title>News</title>{head}{items}</channel></rss>'
    )


def item(n: int, **more: str) -> str:
    inner = "".join(
        f"<{name}>{text}</{name}>"
        for name, text in {"guid": f"g{n}", "link": f"/p/{n}", "title": f"No {n}", **more}.items()
    )
    return f"<item>{inner}</item>"


# -- parse -----------------------------------------------------------------------------------------

FORMATS = {
    "rss 0.91": '<rss version="0.91"><channel><item><title>T</title><link>http://shop.test/1</link></item></channel></rss>',
    "rss 2.0": rss(
        '<item><guid isPermaLink="false">1</guid><title>T</title><link>http://shop.test/1</link></item>'
    ),
    "rss 2.0, the guid is the link": rss(
        "<item><guid>http://shop.test/1</guid><title>T</title></item>"
    ),
    "rss 2.0, atom:link": rss(
        '<item xmlns:a="http://www.w3.org/2005/Atom"><title>T</title><a:link href="http://shop.test/1"/></item>'
    ),
    "rss 0.90": (
        '<rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#" xmlns="http://my.netscape.com/rdf/simple/0.9/"><channel><title>x</title></channel>'
        "<item><title>T</title><link>http://shop.test/1</link></item></rdf:RDF>"
    ),
    "rss 1.0": (
        '<rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#" xmlns="http://purl.org/rss/1.0/"><channel><title>x</title></channel>'
        '<item rdf:about="http://shop.test/1"><title>T</title></item></rdf:RDF>'
    ),
    "atom 1.0": ATOM.format(
        '<entry><id>1</id><title>T</title><link rel="self" href="x"/><link href="../1"/></entry>'
    ),
    "atom 1.0, prefixed": (
        '<a:feed xmlns:a="http://www.w3.org/2005/Atom"><a:entry><a:title>T</a:title><a:link '
        'href="http://shop.test/1"/></a:entry></a:feed>'
    ),
    "atom 0.3": (
        '<feed version="0.3" xmlns="http://purl.org/atom/ns#"><entry><title>T</title><link '
        'rel="alternate" href="http://shop.test/1"/></entry></feed>'
    ),
    "json feed 1.0": '{"version":"https://jsonfeed.org/version/1","items":[{"id":"1","title":"T","url":"http://shop.test/1"}]}',
    "json feed 1.1": '{"version":"https://jsonfeed.org/version/1.1","items":[{"id":1,"title":"T","external_url":"http://shop.test/1"}]}',
}


@pytest.mark.parametrize("text", FORMATS.values(), ids=FORMATS)
def test_every_format_gives_the_same_entry(text: str) -> None:
    (entry,) = parse(text.encode(), None)
    assert (entry.url, entry.title) == ("http://shop.test/1", "T")
    assert entry.id


ILL = {
    "raw ampersands": rss(item(1, title="AT&T", link="http://shop.test/1?a=1&b=2")),
    "HTML entities": rss(item(1, title="caf&eacute;&nbsp;&bogus;")),
    "an undeclared prefix": rss(item(1) + "<x:y>1</x:y>"),
    "control characters": rss(item(1, title="a\x01\x0bb")),
    "words before it": "Warning: mysql_connect()<br/>\n" + rss(item(1)),
    "no root": "<channel>" + item(1) + "</channel>",
    "tags that do not match": rss(item(1, title="<b>bold")),
    "cut off in the second entry": rss(item(1) + item(2))[:-45],
    "attributes without quotes": rss(item(1)).replace('"2.0"', "2.0"),
    "attributes without a space": rss(item(1)).replace('"2.0"', '"2.0"a="b"'),
    "an attribute without a value": rss(item(1)).replace("<rss", "<rss hidden"),
}


@pytest.mark.parametrize("text", ILL.values(), ids=ILL)
def test_the_complete_entries_of_an_ill_formed_feed_are_read(text: str) -> None:
    (entry,) = parse(text.encode(), RSS)
    assert entry.id == "g1"


@pytest.mark.parametrize(
    "encoding",
    [
        "utf-8",
        "utf-8-sig",
        "utf-16",
        "utf-16-le",
        "utf-16-be",
        "utf-32",
        "iso-8859-1",
        "windows-1252",
        "koi8-r",
        "shift_jis",
        "gbk",
    ],
)
def test_a_feed_is_decoded_with_its_declared_encoding(encoding: str) -> None:
    title = {"koi8-r": "цена", "shift_jis": "価格です", "gbk": "价格"}.get(encoding, "café")
    text = (
        f'<?xml version="1.0" encoding="{encoding.removesuffix("-sig")}"?>'
        + rss(item(1, title=title)).partition("?>")[2]
    )
    assert parse(text.encode(encoding), RSS)[0].title == title


@pytest.mark.parametrize(
    ("declared", "header", "real"),
    [
        ("utf-8", None, "latin-1"),
        ("iso-8859-1", None, "utf-8"),
        (None, "iso-8859-1", "utf-8"),
        ("x-nobody-knows", "x-other", "utf-8"),
        ("utf-16", None, "utf-8"),
    ],
)
def test_a_feed_with_a_wrong_encoding_declaration_is_decoded_correctly(
    declared: str | None, header: str | None, real: str
) -> None:
    text = (
        f'<?xml version="1.0"{f" encoding={chr(34)}{declared}{chr(34)}" if declared else ""}?>'
        + rss(item(1, title="café")).partition("?>")[2]
    )
    assert (
        parse(text.encode(real), f"text/xml; charset={header}" if header else None)[0].title
        == "café"
    )


BOMB = (
    '<?xml version="1.0" encoding="{}"?><!DOCTYPE rss [<!ENTITY a "aaaaaaaaaa"><!ENTITY b '
    '"&a;&a;&a;&a;&a;&a;&a;&a;">]>'
) + rss(item(1, title="&b;")).partition("?>")[2]
NO_FEED = {
    "nothing": (b"", "is empty"),
    "blanks": (b" \n ", "is empty"),
    "noise": (bytes(range(128, 256)) * 9, "is not XML"),
    "HTML 5": (b"<!doctype html><html><body>404</body></html>", "is an HTML page"),
    "HTML": (b"<html><head></head><body><p>busy<br></body></html>", "is an HTML page"),
    "XHTML": (b'<html xmlns="http://www.w3.org/1999/xhtml"><body/></html>', "is an HTML page"),
    "a sitemap": (
        b'<urlset xmlns="http://www.sitemaps.org/schemas/sitemap/0.9"><url><loc>http://a.test/</loc></url></urlset>',
        "neither RSS nor Atom",
    ),
    "JSON": (b'{"items": []}', "not a JSON Feed"),
    "deep JSON": (b"[" * 100_000, "is not JSON"),
    "an external DTD": (
        b'<!DOCTYPE rss SYSTEM "file:///etc/passwd">' + rss(item(1)).partition("?>")[2].encode(),
        "DTD",
    ),
    "an entity without a DTD": (b"<rss><!ENTITY a 'b'><channel/></rss>", "DTD"),
    "deep nesting": (b"<rss><channel>" + b"<a>" * 100_000, "nested too deeply"),
    "50 MB": (b"<rss><channel>" + b" " * 50_000_000, "bytes, of at most"),
    "a gzip bomb": (gzip.compress(b"<rss>" + bytes(50_000_000)), "when it is decompressed"),
    "broken gzip": (b"\x1f\x8b\x08\x00" + b"x" * 99, "broken gzip"),
    "a million tags": (b"<rss>" + b"<a/>" * 1_000_000, "too large to be parsed"),
    "ampersands": (b"<rss>" + b"&" * 1_000_000, "entities"),
    "a bomb": (BOMB.format("utf-8").encode(), "DTD"),
    "a bomb behind an instruction that seems to begin a comment": (
        (
            b"<?x <!-- ?><!DOCTYPE rss [<!ENTITY a 'b'>]><!-- "
            b"--><rss><channel><item><title>&a;</title></item></channel></rss>"
        ),
        "DTD",
    ),
    "a bomb with a NUL in the word": (
        BOMB.format("utf-8").replace("DOCTYPE", "DOC\0TYPE").encode(),
        "DTD",
    ),
    **{
        f"a bomb in {e}": (BOMB.format(e).encode(e), "DTD")
        for e in ("utf-16", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be", "utf-7")
    },
    "a bomb in utf-7 with its angles hidden": (
        BOMB.format("utf-7").replace("<", "+ADw-").encode(),
        "is not XML",
    ),
    "a bomb in EBCDIC": (BOMB.format("cp037").encode("cp037"), "is not XML"),
}


@pytest.mark.parametrize(("body", "reason"), NO_FEED.values(), ids=NO_FEED)
def test_a_document_that_is_not_a_feed_is_refused_with_its_reason(body: bytes, reason: str) -> None:
    with pytest.raises(FeedError, match=reason):
        parse(body, RSS)


def test_a_doctype_inside_cdata_or_a_comment_is_text() -> None:
    (entry,) = parse(
        rss(
            item(1, title="<![CDATA[How to write <!DOCTYPE html>]]>") + "<!-- <!ENTITY -->"
        ).encode(),
        RSS,
    )
    assert entry.title == "How to write <!DOCTYPE html>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2020-01-01T00:00:00Z", MOON),
        ("2020-01-01T01:00:00+01:00", MOON),
        ("2020-01-01T00:00:00.123456789Z", MOON + 0.123456),
        ("2020-01-01", MOON),
        ("2020-01", MOON),
        ("2020", MOON),
        ("Wed, 01 Jan 2020 00:00:00 GMT", MOON),
        ("01 Jan 20 00:00:00 +0000", MOON),
        ("Wed, 1 Jan 2020 00:00:00 -0100", MOON + 3600),
        ("10:00", None),
        ("Friday", None),
        ("1", None),
        ("", None),
        (None, None),
        ("yesterday", None),
        ("2020-13-45", None),
        ("x" * 1000, None),
        ("9" * 60, None),
    ],
)
def test_a_date_that_cannot_be_parsed_is_none_and_is_not_guessed(
    text: str | None, expected: float | None
) -> None:
    assert (
        parse_date(text) == pytest.approx(expected)
        if expected is not None
        else parse_date(text) is None
    )


def test_an_entry_without_an_id_gets_one_and_shared_ids_are_made_unique() -> None:
    found = parse(
        rss("<item><link>/a</link></item><item><title>only words</title></item>").encode(), RSS
    )
    assert found[0].id == "/a"
    assert found[1].id.startswith("content:")
    same = parse(
        rss("".join(f"<item><guid>1</guid><link>/{n}</link></item>" for n in (1, 2, 2))).encode(),
        RSS,
    )
    assert len({e.id for e in same}) == len(same) == 2


@given(
    st.binary(max_size=300),
    st.sampled_from(
        [None, RSS, "text/xml; charset=utf-7", "application/json", "text/html; charset=\xff"]
    ),
)
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_parsed_or_raise_a_feed_error(body: bytes, kind: str | None) -> None:
    try:
        assert isinstance(parse(body, kind), list)
    except FeedError:
        pass


PIECES = [
    t.encode()
    for t in (
        *FORMATS.values(),
        *ILL.values(),
        "<![CDATA[",
        "]]>",
        "<!--",
        "<!DOCTYPE",
        "&#0;",
        "&#x110000;",
        "xml:base='http://['",
        "<item>",
        "\0",
    )
]


@given(
    st.lists(st.sampled_from(PIECES), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 10**6), st.binary(max_size=3)), max_size=6),
)
@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_corrupted_feed_is_parsed_or_raises_a_feed_error(
    pieces: list[bytes], edits: list[tuple[int, bytes]]
) -> None:
    body = bytearray(b"".join(pieces))
    for at, new in edits:
        body[at % len(body) : at % len(body) + 2] = new or b"<"
    try:
        for entry in parse(bytes(body), None):
            assert entry.id
    except FeedError:
        pass


# -- hints -----------------------------------------------------------------------------------------


def test_polling_hints_are_read_from_a_feed() -> None:
    head = (
        "<ttl>90</ttl><skipHours><hour>1</hour><hour>2</hour></skipHours>"
        "<skipDays><day>Thursday</day></skipDays>"
    )
    assert parse(rss("", head).encode(), RSS).hints == Hints(5400.0, (1, 2), (3,))
    sy = '<x:updatePeriod xmlns:x="http://purl.org/rss/1.0/modules/syndication/">daily</x:updatePeriod>'
    twice = '<x:updateFrequency xmlns:x="http://purl.org/rss/1.0/modules/syndication/">2</x:updateFrequency>'
    assert parse(rss("", sy + twice).encode(), RSS).hints.least == 43200.0
    assert parse(rss("", "<ttl>soon</ttl>").encode(), RSS).hints == Hints()


@pytest.mark.parametrize(
    ("hints", "every", "wait"),
    [
        (Hints(), 60, 60),
        (Hints(3600.0), 60, 3600),
        (Hints(60.0), 900, 900),
        (Hints(10**9), 60, 86400),
        (Hints(0, (0, 1)), 60, 7200),
        (Hints(0, (), (2,)), 60, 86400),
        (Hints(0, tuple(range(24))), 60, 60),
    ],
)
def test_hints_can_lengthen_the_wait_by_at_most_a_day(
    hints: Hints, every: float, wait: float
) -> None:
    assert hints.next_look(MOON, every) == MOON + wait  # a Wednesday, midnight


# -- the source ------------------------------------------------------------------------------------


class Paper:
    """An editable feed with an ETag."""

    def __init__(self, *items: str, head: str = "") -> None:
        self.items, self.head, self.asked = list(items), head, list[dict[str, str]]()
        self.body: bytes | None = None

    def __call__(self, request: Request) -> Any:
        self.asked.append(dict(request.headers))
        return tagged(
            request,
            reply(self.body if self.body is not None else rss("".join(self.items), self.head), RSS),
        )


def serving(paper: Any) -> Web:
    web = Web()
    web.route("/feed.xml", paper)
    return web


def test_each_new_or_updated_entry_is_one_finding_and_an_unchanged_feed_none(
    tmp_path: Path,
) -> None:
    async def work() -> None:
        paper = Paper(item(2), item(1))
        async with (
            serving(paper) as web,
            polled_source(web, "feed+http://{}/feed.xml", tmp_path) as it,
        ):
            first = await it.round()
            assert [f.cause for f in first] == ["g1", "g2"]  # oldest first
            assert it.urls(first) == [web.url("/p/1"), web.url("/p/2")]
            assert first[0].payload["title"] == "No 1"
            assert await it.round() == []
            assert "if-none-match" in paper.asked[-1]
            paper.items = [item(3), item(2, title="changed"), item(1)]
            assert [f.cause for f in await it.round()] == ["g2", "g3"]
            paper.items = [item(3), item(2), item(1)]  # the previous content again
            (back,) = await it.round()
            assert back.id not in {f.id for f in first}
            assert back.id == mint(
                "feed", web.url("/feed.xml"), "g2", parse(rss(item(2)).encode(), RSS)[0].hash, "1"
            )
            paper.items = [item(4)]
            assert [f.cause for f in await it.round()] == ["g4"]
            paper.items = [item(4), item(1)]
            assert await it.round() == []  # an entry that returns unchanged is not new
            assert it.source.describe(it.cursor) == "4 entries known"

    run(work())


def test_an_interrupted_poll_is_repeated_with_the_same_ids(tmp_path: Path) -> None:
    async def work() -> None:
        async with (
            serving(Paper(*(item(n) for n in range(2500)))) as web,
            polled_source(web, "feed+http://{}/feed.xml", tmp_path) as it,
        ):
            cut = await it.round(killed_after=1)
            complete = await it.round()
            assert [f.id for f in cut] == [f.id for f in complete][:2000]
            assert len({f.id for f in complete}) == 2500
            assert await it.round() == []

    run(work())


def test_an_entry_with_an_updated_date_is_a_finding_only_when_the_date_changes(
    tmp_path: Path,
) -> None:
    async def work() -> None:
        entry = (
            "<entry><id>1</id><title>{}</title><link "
            "href='/p/1'/><updated>2020-01-0{}T00:00:00Z</updated></entry>"
        )
        paper = Paper()
        paper.body = ATOM.format(entry.format("a", 1)).encode()
        async with (
            serving(paper) as web,
            polled_source(web, "feed+http://{}/feed.xml", tmp_path) as it,
        ):
            (first,) = await it.round()
            assert (first.at, first.id) == (
                MOON,
                mint("feed", web.url("/feed.xml"), "1", f"{MOON:.3f}"),
            )
            paper.body = ATOM.format(entry.format("words", 1)).encode()
            assert await it.round() == []
            paper.body = ATOM.format(entry.format("words", 2)).encode()
            assert len(await it.round()) == 1

    run(work())


@pytest.mark.parametrize(
    ("first", "causes"), [("all", ["g1", "g2"]), ("latest", ["g2"]), ("none", [])]
)
def test_the_first_poll_follows_the_option_first_and_later_polls_find_new_entries(
    first: str, causes: list[str], tmp_path: Path
) -> None:
    async def work() -> None:
        paper = Paper(
            item(2, pubDate="Thu, 02 Jan 2020 00:00:00 GMT"),
            item(1, pubDate="Wed, 01 Jan 2020 00:00:00 GMT"),
        )
        async with (
            serving(paper) as web,
            polled_source(web, "feed+http://{}/feed.xml", tmp_path, first=first) as it,
        ):
            assert [f.cause for f in await it.round()] == causes
            paper.items.insert(0, item(3))
            assert [f.cause for f in await it.round()] == ["g3"]

    run(work())


def test_the_ttl_of_a_feed_delays_the_next_poll_across_restarts(tmp_path: Path) -> None:
    async def work() -> None:
        paper = Paper(item(1), head="<ttl>60</ttl>")
        async with serving(paper) as web:
            async with polled_source(web, "feed+http://{}/feed.xml", tmp_path, every="1s") as it:
                await it.round()
                assert it.source.due(0.0) is not None
                cursor = it.cursor
            async with polled_source(web, "feed+http://{}/feed.xml", tmp_path, every="1s") as again:
                again.cursor = cursor
                assert await again.round() == []
                assert len(paper.asked) == 1
                paper.items.insert(0, item(2))
                assert [f.cause for f in await again.source.preview(cursor, 9)] == [
                    "g2"
                ]  # a preview ignores the wait
                del paper.items[0]
            async with polled_source(
                web, "feed+http://{}/feed.xml", tmp_path, every="1s", hints=False
            ) as without_hints:
                without_hints.cursor = cursor
                await without_hints.round()
                assert len(paper.asked) == 3

    run(work())


@pytest.mark.parametrize(
    "body",
    [
        b"<html>busy</html>",
        BOMB.format("utf-16").encode("utf-16"),
        b"<rss>" + b" " * (17 << 20),
        b"",
    ],
)
def test_a_broken_feed_is_an_error_and_the_source_continues_at_its_cursor(
    body: bytes, tmp_path: Path
) -> None:
    async def work() -> None:
        paper = Paper(item(1))
        async with (
            serving(paper) as web,
            polled_source(web, "feed+http://{}/feed.xml", tmp_path) as it,
        ):
            await it.round()
            paper.body = body
            with pytest.raises((SourceDown, Failure)):
                await it.round()
            paper.body, paper.items = None, [item(2), item(1)]
            assert [f.cause for f in await it.round()] == ["g2"]

    run(work())


def test_now_is_a_valid_position_and_yesterday_is_refused(tmp_path: Path) -> None:
    async def work() -> None:
        paper = Paper(item(1))
        async with (
            serving(paper) as web,
            polled_source(web, "feed+http://{}/feed.xml", tmp_path) as it,
        ):
            it.cursor = await it.source.place("now")
            assert await it.round() == []
            with pytest.raises(UsageError):
                await it.source.place("yesterday")
            it.cursor = b"of another version"
            assert [f.cause for f in await it.round()] == ["g1"]

    run(work())


@pytest.mark.parametrize(
    ("url", "more"),
    [
        ("feed+ftp://x/", {}),
        ("feed:https://x/", {}),
        ("feed+http://u:p@x/", {}),
        ("feed+http://x/", {"first": "some"}),
        ("feed+http://x/", {"frist": "all"}),
    ],
)
def test_an_invalid_declaration_is_an_error_with_a_hint(
    url: str, more: dict[str, Any], tmp_path: Path
) -> None:
    async def work() -> None:
        async with polled_source(Web(), url, tmp_path, **more):
            pass

    with pytest.raises(ConfigError) as caught:
        run(work())
    assert caught.value.hint
