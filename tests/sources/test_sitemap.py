"""Sitemaps of every format: each new, changed or removed URL is one finding.

A failed child sitemap causes no removals, and a hostile document is an error.
"""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.sources.web_rig import PolledSource, polled_source, run

from penstock.errors import ConfigError, SourceDown
from penstock.model import Failure, mint
from penstock.ports import Finding
from penstock.sources.sitemap import Sitemap, SitemapError, parse
from penstock.testing.web import Reply, Request, Web, reply, tagged

XML = "application/xml"
HERE = "http://shop.test/maps/sitemap.xml"
MOON = 1577836800.0  # 2020-01-01T00:00:00Z


def urlset(*entries: str) -> bytes:
    return f'<?xml version="1.0" encoding="UTF-8"?>\n<urlset xmlns="http://www.sitemaps.org/schemas/sitemap/0.9">{"".join(entries)}</urlset>'.encode()


def url(loc: str, day: int | None = None, more: str = "") -> str:
    return (
        f"<url><loc>{loc}</loc>{f'<lastmod>2020-01-{day:02d}</lastmod>' if day else ''}{more}</url>"
    )


def index(*locs: str) -> bytes:
    entries = "".join(f"<sitemap><loc>{loc}</loc></sitemap>" for loc in locs)
    return f"<sitemapindex>{entries}</sitemapindex>".encode()


# -- parse -----------------------------------------------------------------------------------------

FORMS = {
    "xml": urlset(url("http://shop.test/1")),
    "without a namespace": b"<urlset><url><loc>http://shop.test/1</loc></url></urlset>",
    "with a prefix": b'<s:urlset xmlns:s="http://www.sitemaps.org/schemas/sitemap/0.9"><s:url><s:loc>http://shop.test/1</s:loc></s:url></s:urlset>',
    "blanks before it": b"\n  " + urlset(url("\n http://shop.test/1 \n")),
    "gzip": gzip.compress(urlset(url("http://shop.test/1"))),
    "gzip twice": gzip.compress(gzip.compress(urlset(url("http://shop.test/1")))),
    "utf-16": urlset(url("http://shop.test/1")).decode().encode("utf-16"),
    "text": b"\xef\xbb\xbfhttp://shop.test/1\r\n\r\n",
    "text, gzip": gzip.compress(b"http://shop.test/1"),
    "relative": urlset(url("../1")),
    "rss": b"<rss version='2.0'><channel><item><link>http://shop.test/1</link></item></channel></rss>",
    "atom": b'<feed xmlns="http://www.w3.org/2005/Atom"><entry><link href="http://shop.test/1"/></entry></feed>',
}


@pytest.mark.parametrize("body", FORMS.values(), ids=FORMS)
def test_every_format_gives_the_same_entry(body: bytes) -> None:
    found = parse(body, HERE)
    assert found.kind == "urlset"
    assert [e.loc for e in found.entries] == ["http://shop.test/1"]


def test_an_entry_has_the_values_of_its_extensions() -> None:
    more = """<changefreq>daily</changefreq><priority>0.8</priority>\
<image:image><image:loc>http://cdn.test/a.jpg</image:loc></image:image>
        <image:image><image:loc>http://cdn.test/b.jpg</image:loc>\
<image:title>B</image:title></image:image>
        <news:news><news:publication><news:name>The Weir</news:name></news:publication>\
<news:title>Flood &amp; ebb</news:title>
        <news:publication_date>2020-01-01T01:00:00+01:00</news:publication_date></news:news>
        <video:video><video:content_loc>http://cdn.test/v.mp4</video:content_loc></video:video>
        <xhtml:link rel="alternate" hreflang="de" href="http://shop.test/de/1"/>"""
    (entry,) = parse(urlset(url("http://shop.test/1", 1, more)), HERE).entries
    assert (entry.lastmod, entry.changefreq, entry.priority) == (MOON, "daily", 0.8)
    assert entry.images == ("http://cdn.test/a.jpg", "http://cdn.test/b.jpg")
    assert entry.videos == ("http://cdn.test/v.mp4",)
    assert (entry.news_title, entry.news_date) == ("Flood & ebb", MOON)
    assert entry.alternates == (("de", "http://shop.test/de/1"),)


def test_an_index_has_children_and_no_entries() -> None:
    found = parse(index("/a.xml", "http://shop.test/b.xml.gz"), HERE)
    assert (found.kind, found.entries) == ("index", ())
    assert [c.loc for c in found.children] == [
        "http://shop.test/a.xml",
        "http://shop.test/b.xml.gz",
    ]


def test_invalid_entries_are_left_out_and_counted() -> None:
    bad = [
        "<url/>",
        url(""),
        url("mailto:x@shop.test"),
        url("http://u:p@shop.test/"),
        url("http://shop.test/" + "x" * 2048),
        "<other><loc>http://no/</loc></other>",
    ]
    found = parse(
        urlset(
            url("http://shop.test/1", more="<lastmod>soon</lastmod>"),
            *bad,
            url("http://shop.test/2?a=1&b=2"),
        ),
        HERE,
    )
    assert [e.loc for e in found.entries] == ["http://shop.test/1", "http://shop.test/2?a=1&b=2"]
    assert sum(found.left_out.values()) == 6  # five entries and a lastmod
    assert found.left_out["no loc"] == 2


def test_entries_beyond_fifty_thousand_are_left_out_and_counted() -> None:
    found = parse(urlset(*(url(f"http://shop.test/{n}") for n in range(50_002))), HERE)
    assert len(found.entries) == 50_000
    assert sum(found.left_out.values()) == 2


BOMB = '<?xml version="1.0" encoding="{}"?><!DOCTYPE urlset [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;&a;&a;">]><urlset><url><loc>http://a.test/&b;</loc></url></urlset>'
NO_SITEMAP = {
    "nothing": (b"", "is empty"),
    "HTML": (b"<!doctype html><html><body>gone", "is an HTML page"),
    "XHTML": (
        b'<?xml version="1.0"?><html xmlns="http://www.w3.org/1999/xhtml"><body/></html>',
        "is an HTML page",
    ),
    "words": (b"there is nothing here", "neither XML nor a list"),
    "noise": (bytes(range(256)) * 99, "neither XML nor a list"),
    "JSON": (b'{"urls": []}', "not a JSON Feed"),
    "another root": (b"<foo/>", "neither urlset nor sitemapindex"),
    "cut off": (urlset(url("http://shop.test/1"))[:-20], "ill-formed"),
    "deep nesting": (b"<urlset>" + b"<a>" * 100_000, "nested more than"),
    "50 MB and more": (b"<urlset>" + b" " * (50 << 20), "bytes, of at most"),
    "a gzip bomb": (gzip.compress(bytes(200 << 20)), "when it is decompressed"),
    "broken gzip": (gzip.compress(urlset())[:-9], "broken gzip"),
    "gzip three times": (
        gzip.compress(gzip.compress(gzip.compress(urlset()))),
        "compressed more than",
    ),
    "an external DTD": (b'<!DOCTYPE urlset SYSTEM "file:///etc/passwd"><urlset/>', "DTD"),
    **{
        f"a bomb in {e}": (BOMB.format(e).encode(e), "DTD")
        for e in ("utf-8", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-7")
    },
    "a bomb in utf-7 with its angles hidden": (
        BOMB.format("utf-7").replace("<", "+ADw-").encode(),
        "neither XML nor a list",
    ),
    "a bomb with a NUL in the word": (
        BOMB.format("utf-8").replace("DOCTYPE", "DOC\0TYPE").encode(),
        "DTD",
    ),
}


@pytest.mark.parametrize(("body", "reason"), NO_SITEMAP.values(), ids=NO_SITEMAP)
def test_a_document_that_is_not_a_sitemap_is_refused_with_its_reason(
    body: bytes, reason: str
) -> None:
    with pytest.raises(SitemapError, match=reason):
        parse(body, HERE)


PIECES = [
    *FORMS.values(),
    index("/a.xml"),
    b"<url>",
    b"</url>",
    b"<loc>",
    b"<![CDATA[",
    b"]]>",
    b"<!DOCTYPE x",
    b"&",
    b"&#0;",
    b"\0",
    b"http://[",
    b"\x1f\x8b",
]


@given(
    st.lists(st.sampled_from(PIECES) | st.binary(max_size=40), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 10**6), st.binary(max_size=3)), max_size=6),
)
@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_bytes_are_parsed_or_raise_a_sitemap_error(
    pieces: list[bytes], edits: list[tuple[int, bytes]]
) -> None:
    body = bytearray(b"".join(pieces))
    for at, new in edits:
        if body:
            body[at % len(body) : at % len(body) + 2] = new or b"<"
    try:
        assert isinstance(parse(bytes(body), HERE), Sitemap)
    except SitemapError:
        pass


# -- the source ------------------------------------------------------------------------------------


class Site:
    """Editable documents with ETags. A missing document is 404."""

    def __init__(self, **documents: bytes | int) -> None:
        self.documents = {f"/{name.replace('_', '.')}": body for name, body in documents.items()}
        self.asked: list[tuple[str, int]] = []

    def __call__(self, request: Request) -> Reply:
        found = self.documents.get(request.path, 404)
        answer = (
            reply("no", "text/plain", found, **({"retry_after": "7"} if found == 429 else {}))
            if isinstance(found, int)
            else tagged(request, reply(found, XML))
        )
        self.asked.append((request.path, answer.status))
        return answer


def changes(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(f.payload["change"], (f.url or "").rpartition("/")[2]) for f in findings]


async def at(web: Web, site: Site, name: str, *entries: tuple[int, int | None]) -> None:
    site.documents[f"/{name}"] = urlset(*(url(web.url(f"/p/{n}"), day) for n, day in entries))


def test_new_changed_and_removed_urls_are_one_finding_each(tmp_path: Path) -> None:
    async def work() -> None:
        site = Site()
        async with (
            Web(site) as web,
            polled_source(web, "sitemap+http://{}/sitemap.xml", tmp_path) as it,
        ):
            await at(web, site, "sitemap.xml", (1, 1), (2, 1), (3, None))
            first = await it.round()
            assert changes(first) == [("new", "1"), ("new", "2"), ("new", "3")]
            assert first[0].id == mint("sitemap", web.url("/p/1"), f"{MOON:.3f}")
            assert await it.round() == []
            assert site.asked[-1] == ("/sitemap.xml", 304)
            await at(web, site, "sitemap.xml", (1, 2), (3, None), (4, 1))
            assert changes(await it.round()) == [("changed", "1"), ("new", "4"), ("removed", "2")]
            await at(web, site, "sitemap.xml", (1, None), (3, 1), (2, 1))
            again = await it.round()
            assert changes(again) == [("changed", "3"), ("new", "2"), ("removed", "4")]
            assert again[1].id not in {
                f.id for f in first
            }  # a URL that returns unchanged is a new finding
            gone: list[str] = []
            for _ in range(3):
                await at(web, site, "sitemap.xml", (1, None), (3, 1))
                gone += [f.id for f in await it.round()]
                await at(web, site, "sitemap.xml", (1, None), (3, 1), (2, 1))
                gone += [f.id for f in await it.round()]
            assert len(set(gone)) == 6
            assert it.source.describe(it.cursor) == "3 URLs in 1 documents"

    run(work())


def test_all_documents_of_an_index_are_read_and_each_is_revalidated(
    tmp_path: Path,
) -> None:
    async def work() -> None:
        site = Site()
        async with (
            Web(site) as web,
            polled_source(web, "sitemap+http://{}/sitemap.xml", tmp_path) as it,
        ):
            site.documents["/sitemap.xml"] = index(
                web.url("/a.xml.gz"), web.url("/more.xml"), web.url("/sitemap.xml")
            )
            site.documents["/a.xml.gz"] = gzip.compress(urlset(url(web.url("/p/1"), 1)))
            site.documents["/more.xml"] = index(web.url("/list.txt"), web.url("/a.xml.gz"))
            site.documents["/list.txt"] = f"{web.url('/p/2')}\n{web.url('/p/1')}\n".encode()
            assert changes(await it.round()) == [("new", "1"), ("new", "2")]
            site.asked.clear()
            assert await it.round() == []
            assert sorted(site.asked) == [
                ("/a.xml.gz", 304),
                ("/list.txt", 304),
                ("/more.xml", 304),
                ("/sitemap.xml", 304),
            ]
            site.documents["/list.txt"] = f"{web.url('/p/3')}\n".encode()
            assert changes(await it.round()) == [("new", "3"), ("removed", "2")]

    run(work())


@pytest.mark.parametrize(
    "broken", [404, 500, 429, b"<html>busy</html>", BOMB.format("utf-8").encode(), b"<urlset>"]
)
def test_a_failed_child_sitemap_is_an_error_and_causes_no_removals(
    broken: Any, tmp_path: Path
) -> None:
    async def work() -> None:
        site = Site()
        async with (
            Web(site) as web,
            polled_source(web, "sitemap+http://{}/sitemap.xml", tmp_path) as it,
        ):
            site.documents["/sitemap.xml"] = index(web.url("/a.xml"), web.url("/b.xml"))
            await at(web, site, "a.xml", (1, 1), (2, 1))
            await at(web, site, "b.xml", (3, 1), (4, 1))
            await it.round()
            site.documents["/b.xml"] = broken
            await at(web, site, "a.xml", (1, 2))
            found, error = await until_down(it)
            assert changes(found) == [("changed", "1")]
            assert "1 of 3 sitemaps" in error
            if broken == 429:
                return  # the host is requested again only after Retry-After
            await at(web, site, "b.xml", (3, 1), (2, 1))
            assert changes(await it.round()) == [
                ("removed", "4")
            ]  # 2 has only moved to another sitemap

    run(work())


async def until_down(it: PolledSource) -> tuple[list[Finding], str]:
    found: list[Finding] = []
    try:
        async for batch in it.source.read(it.cursor):
            found += batch.findings
            it.cursor = batch.cursor or it.cursor
    except SourceDown as e:
        return found, e.message
    raise AssertionError("the source raised no error")


def test_a_removal_during_a_failure_is_found_when_all_sitemaps_are_read_again(
    tmp_path: Path,
) -> None:
    async def work() -> None:
        site = Site()
        async with (
            Web(site) as web,
            polled_source(web, "sitemap+http://{}/sitemap.xml", tmp_path) as it,
        ):
            site.documents["/sitemap.xml"] = index(web.url("/a.xml"), web.url("/b.xml"))
            await at(web, site, "a.xml", (1, 1), (2, 1))
            await at(web, site, "b.xml", (3, 1))
            await it.round()
            site.documents["/b.xml"] = 500
            await at(web, site, "a.xml", (1, 1))
            assert (await until_down(it))[0] == []
            await at(web, site, "b.xml", (3, 1))
            assert changes(await it.round()) == [("removed", "2")]

    run(work())


def test_an_interrupted_poll_is_repeated_with_the_same_ids(tmp_path: Path) -> None:
    async def work() -> None:
        site = Site()
        async with (
            Web(site) as web,
            polled_source(web, "sitemap+http://{}/sitemap.xml", tmp_path) as it,
        ):
            await at(web, site, "sitemap.xml", *((n, 1) for n in range(3500)))
            cut = await it.round(killed_after=1)
            complete = await it.round()
            assert [f.id for f in cut] == [f.id for f in complete][: len(cut)]
            assert len({f.id for f in complete}) == 3500
            assert await it.round() == []

    run(work())


def test_sitemaps_are_found_by_robots_txt_or_at_the_default_path(
    tmp_path: Path,
) -> None:
    async def work() -> None:
        site = Site()
        async with Web(site) as web:
            await at(web, site, "sitemap.xml", (1, 1))
            async with polled_source(web, "sitemap+http://{}/", tmp_path) as it:
                assert changes(await it.round()) == [("new", "1")]
        async with Web(site) as web:
            site.documents["/robots.txt"] = (
                b"User-agent: *\nDisallow: /private\nSitemap: /one.xml\nsitemap: "
                + web.url("/two.xml").encode()
                + b"\n"
            )
            await at(web, site, "one.xml", (1, 1))
            await at(web, site, "two.xml", (2, 1))
            async with polled_source(web, "sitemap+http://{}/robots.txt", tmp_path) as it:
                assert changes(await it.round()) == [("new", "1"), ("new", "2")]

    run(work())


def test_options_select_the_kinds_and_the_number_of_findings(tmp_path: Path) -> None:
    async def work() -> None:
        site = Site()
        async with Web(site) as web:
            await at(web, site, "sitemap.xml", (1, 1), (2, 1))
            site.documents["/sitemap.xml"] = urlset(
                url(web.url("/p/1"), 1), url(web.url("/p/2"), 1), url("http://elsewhere.test/")
            )
            async with (
                polled_source(
                    web, "sitemap+http://{}/sitemap.xml", tmp_path, emit=["removed"]
                ) as it,
                polled_source(
                    web, "sitemap+http://{}/sitemap.xml", tmp_path, first="none"
                ) as quiet,
                polled_source(
                    web, "sitemap+http://{}/sitemap.xml", tmp_path, same_site=False
                ) as every,
                polled_source(web, "sitemap+http://{}/sitemap.xml", tmp_path, max_urls=1) as few,
            ):
                assert await it.round() == await quiet.round() == []
                assert len(await every.round()) == 3
                assert changes(await few.round()) == [("new", "1")]
                await at(web, site, "sitemap.xml", (2, 1), (3, 1))
                assert changes(await it.round()) == [("removed", "1")]
                assert changes(await quiet.round()) == [("new", "3"), ("removed", "1")]
                assert changes(await few.round()) == [
                    ("new", "2")
                ]  # with max_urls it cannot detect removals

    run(work())


def test_an_endless_index_is_stopped_by_max_sitemaps(tmp_path: Path) -> None:
    async def work() -> None:
        asked = []

        def endless(request: Request) -> Reply:
            asked.append(request.path)
            n = len(asked)
            return (
                reply(index(f"/deeper/{n}.xml", f"/deeper/{n}-b.xml"), XML)
                if request.path != "/robots.txt"
                else reply("", "text/plain")
            )

        async with (
            Web(endless) as web,
            polled_source(web, "sitemap+http://{}/sitemap.xml", tmp_path, max_sitemaps=20) as it,
        ):
            assert await it.round() == []
            assert 20 <= len(asked) < 25

    run(work())


@pytest.mark.parametrize(
    "body",
    [
        b"<html>busy</html>",
        BOMB.format("utf-16").encode("utf-16"),
        500,
        b"<urlset>" + b" " * (51 << 20),
    ],
)
def test_a_broken_root_sitemap_is_an_error_and_the_source_continues_at_its_cursor(
    body: Any, tmp_path: Path
) -> None:
    async def work() -> None:
        site = Site()
        async with (
            Web(site) as web,
            polled_source(web, "sitemap+http://{}/sitemap.xml", tmp_path) as it,
        ):
            await at(web, site, "sitemap.xml", (1, 1))
            await it.round()
            site.documents["/sitemap.xml"] = body
            with pytest.raises((SourceDown, Failure)):
                await it.round()
            await at(web, site, "sitemap.xml", (1, 1), (2, 1))
            assert changes(await it.round()) == [("new", "2")]

    run(work())


def test_the_cursor_of_100000_urls_is_smaller_than_2_mb(tmp_path: Path) -> None:
    async def work() -> None:
        site = Site()
        async with (
            Web(site) as web,
            polled_source(web, "sitemap+http://{}/sitemap.xml", tmp_path) as it,
        ):
            site.documents["/sitemap.xml"] = index(web.url("/a.xml"), web.url("/b.xml"))
            for at_, name in enumerate(("a", "b")):
                entries = (
                    url(
                        web.url(f"/product/{n * 7919 % 99991:05d}-of-{at_}-some-words-{n}.html"),
                        1 + n % 28,
                    )
                    for n in range(50_000)
                )
                site.documents[f"/{name}.xml"] = urlset(*entries)
            assert len(await it.round()) == 100_000
            assert it.cursor is not None
            assert len(it.cursor) < 2_000_000

    run(work())


@pytest.mark.parametrize(
    ("source", "more"),
    [
        ("sitemap+ftp://x/", {}),
        ("sitemap+http://x/", {"emit": ["gone"]}),
        ("sitemap+http://x/", {"max_urls": 0}),
        ("sitemap+http://x/", {"depth": 3}),
    ],
)
def test_an_invalid_declaration_is_an_error_with_a_hint(
    source: str, more: dict[str, Any], tmp_path: Path
) -> None:
    async def work() -> None:
        async with polled_source(Web(), source, tmp_path, **more):
            pass

    with pytest.raises(ConfigError) as caught:
        run(work())
    assert caught.value.hint
