"""API sources: each new or changed item is one finding, with every kind of pagination.

Secrets are sent only to the endpoint, and an invalid result page is an error.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sources.web_rig import polled_source, run

from penstock.authoring.pipeline import Pipeline
from penstock.errors import ConfigError, SourceDown
from penstock.model import Failure, mint
from penstock.sources.api_parser import ApiError, ItemFormat, next_link
from penstock.testing.web import Reply, Request, Web, json_reply, reply, tagged


def shape(**more: Any) -> ItemFormat:
    pipeline = Pipeline("test")
    pipeline.source("api+https://shop.test/")
    return ItemFormat(
        pipeline.sources[0],
        **{
            "format": None,
            "items": "@",
            "key": None,
            "ignore": [],
            "next": None,
            "delimiter": None,
            **more,
        },
    )


# -- a page ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "kind", "more"),
    [
        ('[{"id": 1, "url": "/p/1"}]', "application/json", {}),
        ('\ufeff{"data": {"items": [{"id": 1, "url": "/p/1"}]}}', None, {"items": "data.items"}),
        (
            '{"data": [{"node": {"id": 1, "url": "/p/1"}}]}',
            "application/vnd.api+json",
            {"items": "data[].node", "key": "id"},
        ),
    ],
)
def test_items_are_found_by_expression(body: str, kind: str | None, more: dict[str, Any]) -> None:
    (item,) = shape(**more).page(body.encode(), kind).items
    assert (item.key, item.payload) == ("1", {"id": 1, "url": "/p/1"})


@pytest.mark.parametrize(
    ("body", "kind", "more"),
    [
        ("id,url\n1,/p/1\n", "text/csv", {}),
        ("id;url\r\n1;/p/1\r\n", "text/plain", {}),
        ("\ufeffid\turl\n1\t/p/1", None, {"format": "csv"}),
        ('id,url\n"1","/p/1"', "application/octet-stream", {}),
        ("id|url\n1|/p/1\n", "text/csv", {"delimiter": "|"}),
    ],
)
def test_a_csv_row_becomes_an_item_with_the_columns_of_the_header(
    body: str, kind: str | None, more: dict[str, Any]
) -> None:
    (item,) = shape(**more).page(body.encode(), kind).items
    assert (item.key, item.payload) == ("1", {"id": "1", "url": "/p/1"})


def test_ignored_fields_and_the_order_of_fields_do_not_change_the_hash() -> None:
    made = shape(ignore=["views", "meta.at", "offers.seen"])
    (one,) = made.page(
        b'[{"id":1,"views":1,"meta":{"at":1,"x":1},"offers":[{"seen":1,"p":2}]}]', None
    ).items
    (two,) = made.page(
        b'[{"offers":[{"p":2,"seen":9}],"meta":{"x":1},"id":1,"views":77}]', None
    ).items
    (other,) = made.page(b'[{"id":1,"meta":{"x":2}}]', None).items
    assert one.hash == two.hash != other.hash


def test_an_item_key_may_have_any_type_but_must_not_be_empty() -> None:
    keys = [i.key for i in shape(key="[a, b]").page(b'[{"a":1,"b":"x"}]', None).items]
    assert keys == ['[1,"x"]']
    (item,) = shape(key="a.b").page(b'[{"a":{}}]', None).items
    assert item.refused == "its key is empty"
    (item,) = shape().page(b'[{"price":1}]', None).items
    assert item.key == item.hash
    (item,) = shape().page(b'["/p/1"]', None).items
    assert item.payload == {"url": "/p/1"}


NO_PAGE = {
    "nothing": (b"", "is empty"),
    "HTML": (b"<!doctype html><p>busy", "HTML page"),
    "half of it": (b'[{"id": 1', "not JSON"),
    "an object": (b'{"products": []}', "no list where the items should be"),
    "deep": (b"[" * 100_000, "not JSON"),
    "50 MB": (b"[" + b" " * 50_000_000 + b"]", "bytes, of at most"),
    "many": (b"[" + b"0," * 3_000_000 + b"0]", "values"),
    "noise": (bytes(range(128, 256)), "not JSON"),
}


@pytest.mark.parametrize(("body", "reason"), NO_PAGE.values(), ids=NO_PAGE)
def test_an_invalid_result_page_is_refused_with_its_reason(body: bytes, reason: str) -> None:
    with pytest.raises(ApiError, match=reason):
        shape(format="json").page(body, None)


def test_the_error_for_a_page_without_a_list_names_the_field_with_a_list() -> None:
    with pytest.raises(ApiError) as caught:
        shape().page(b'{"products": [], "n": 1}', None)
    assert caught.value.hint == 'items = "products", a JMESPath expression'


@given(
    st.binary(max_size=200) | st.text(max_size=200).map(str.encode),
    st.sampled_from([None, "json", "csv"]),
    st.sampled_from([None, "a.b", "length(@)", "join(',', @)"]),
)
@settings(max_examples=400, deadline=None)
def test_any_bytes_are_a_page_or_an_api_error(
    body: bytes, format: str | None, key: str | None
) -> None:
    try:
        assert all(
            item.key
            for item in shape(format=format, key=key, ignore=["a.b"]).page(body, None).items
        )
    except ApiError:
        pass


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (
            '<https://a.test/?page=2>; rel="next", <https://a.test/?page=9>; rel="last"',
            "https://a.test/?page=2",
        ),
        ('</2>; title="a;b"; rel=next', "/2"),
        ('<a>; rel="prev", <b>; rel="x next"', "b"),
        ('<a>; rel="nextish"', None),
        ("", None),
        ("<" * 70_000, None),
        ("<a" + '; x="' * 9000, None),
    ],
)
def test_the_next_link_is_read_from_the_link_header_by_rfc_8288(
    header: str, expected: str | None
) -> None:
    assert next_link({"link": header}) == expected


# -- the source ------------------------------------------------------------------------------------


class Shop:
    """An API with result pages of two products, for every kind of pagination."""

    def __init__(self, count: int) -> None:
        self.items = [{"sku": f"s{n}", "link": f"/p/{n}", "price": n} for n in range(count)]
        self.asked: list[Request] = []

    def __call__(self, request: Request) -> Reply:
        if request.path == "/robots.txt":
            return reply("", "text/plain", 404)
        self.asked.append(request)
        p = request.params
        at = (
            int(p.get("offset", 0))
            or (int(p.get("page", 1)) - 1) * 2
            or int(p.get("after", "c0")[1:])
        )
        more = at + 2 < len(self.items)
        body = {
            "items": self.items[at : at + 2],
            "next": f"/api?offset={at + 2}" if more else None,
            "meta": {"after": f"c{at + 2}" if more else ""},
        }
        headers: dict[str, Any] = {}
        if more:
            headers["link"] = f'</api?offset={at + 2}>; rel="next"'
        return tagged(request, json_reply(body, **headers))


WAYS: dict[str, dict[str, Any]] = {
    "the link header": {},
    "an expression": {"next": "next"},
    "a page number": {"page": "page"},
    "an offset": {"offset": "offset"},
    "a cursor": {"cursor": {"param": "after", "from": "meta.after"}},
}
ITEMS = {"items": "items", "key": "sku", "map": {"url": "link"}}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_every_kind_of_pagination_reads_all_items_once(way: dict[str, Any], tmp_path: Path) -> None:
    async def work() -> None:
        shop = Shop(7)
        async with (
            Web(shop) as web,
            polled_source(web, "api+http://{}/api?lang=en", tmp_path, **ITEMS, **way) as it,
        ):
            first = await it.round()
            assert [f.cause for f in first] == [f"s{n}" for n in range(7)]
            assert it.urls(first) == [web.url(f"/p/{n}") for n in range(7)]
            assert 4 <= len(shop.asked) <= 5
            assert await it.round() == []
            shop.items[3] = {**shop.items[3], "price": 99}
            shop.items.append({"sku": "s7", "link": "/p/7", "price": 7})
            assert [f.cause for f in await it.round()] == ["s3", "s7"]
            shop.items[3] = {**shop.items[3], "price": 3}  # the previous content again
            (back,) = await it.round()
            assert back.id not in {f.id for f in first}
            assert it.source.describe(it.cursor) == "8 items known"

    run(work())


def test_a_page_with_an_etag_is_revalidated_and_ids_come_from_key_and_content(
    tmp_path: Path,
) -> None:
    async def work() -> None:
        shop = Shop(2)
        async with (
            Web(shop) as web,
            polled_source(web, "api+http://{}/api", tmp_path, **ITEMS) as it,
        ):
            first = await it.round()
            made = shape(items="items", key="sku").page(
                json.dumps({"items": shop.items}).encode(), None
            )
            assert [f.id for f in first] == [
                mint("api", web.url("/api"), i.key, i.hash) for i in made.items
            ]
            assert await it.round() == []
            assert "if-none-match" in shop.asked[-1].headers

    run(work())


def test_an_interrupted_poll_is_repeated_with_the_same_ids(tmp_path: Path) -> None:
    async def work() -> None:
        shop = Shop(9)
        async with (
            Web(shop) as web,
            polled_source(web, "api+http://{}/api", tmp_path, **ITEMS) as it,
        ):
            cut = await it.round(killed_after=2)
            complete = await it.round()
            assert [f.id for f in cut] == [f.id for f in complete][:6]
            assert len({f.id for f in complete}) == 9
            assert await it.round() == []

    run(work())


def test_secret_headers_are_not_sent_to_another_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOP_TOKEN", "hush-hush\n")

    async def work() -> None:
        elsewhere: list[Request] = []

        def other(request: Request) -> Reply:
            elsewhere.append(request)
            return json_reply({"items": [{"sku": "b"}], "next": None})

        async with Web() as web:
            port = await web.listen(handler=other)
            seen: list[str | None] = []

            def first(request: Request) -> Reply:
                seen.append(request.headers.get("authorization"))
                return json_reply(
                    {"items": [{"sku": "a"}], "next": f"http://127.0.0.1:{port}/next"}
                )

            web.route("/api", first)
            web.route("/moved", Reply(302, {"location": f"http://127.0.0.1:{port}/redirected"}))
            headers = {"Authorization": "Bearer env:SHOP_TOKEN", "X-Team": "prices"}
            for path in ("/api", "/moved"):
                async with polled_source(
                    web,
                    "api+http://{}" + path,
                    tmp_path,
                    items="items",
                    next="next",
                    headers=headers,
                ) as it:
                    assert "b" in [f.cause for f in await it.round()]
            assert seen == ["Bearer hush-hush"]
            asked = [r for r in elsewhere if r.path != "/robots.txt"]
            assert len(asked) == 2
            assert not [r for r in asked if "hush" in str(r.headers) or "x-team" in r.headers]

    run(work())


def test_a_cyclic_and_an_endless_pagination_are_stopped_by_the_limits(tmp_path: Path) -> None:
    async def work() -> None:
        counted: list[str] = []

        def endless(request: Request) -> Reply:
            counted.append(request.path)
            return json_reply({"items": [{"id": len(counted)}], "next": f"/more?{len(counted)}"})

        async with Web() as web:
            web.route("/loop", json_reply({"items": [{"id": 1}], "next": "/loop"}))
            web.route("/endless", endless)
            web.route("/more*", endless)
            async with polled_source(
                web, "api+http://{}/loop", tmp_path, items="items", next="next"
            ) as it:
                assert len(await it.round()) == 1
            async with polled_source(
                web, "api+http://{}/endless", tmp_path, items="items", next="next", max_pages=5
            ) as it:
                assert len(await it.round()) == 5
            counted.clear()
            async with polled_source(
                web, "api+http://{}/endless", tmp_path, items="items", next="next", max_items=3
            ) as it:
                assert len(await it.round()) == 3

    run(work())


def test_two_items_with_the_same_key_are_one_finding(tmp_path: Path) -> None:
    async def work() -> None:
        async with Web() as web:
            web.route("/api", json_reply([{"id": 1, "v": "a"}, {"id": 1, "v": "b"}]))
            async with polled_source(web, "api+http://{}/api", tmp_path) as it:
                assert len(await it.round()) == 1
                assert await it.round() == []

    run(work())


@pytest.mark.parametrize(
    "broken", [b"<html>busy</html>", b"[" * 100_000, b'{"items": 7}', b"[" + b" " * (51 << 20), 500]
)
def test_a_broken_endpoint_is_an_error_and_the_source_continues_at_its_cursor(
    broken: Any, tmp_path: Path
) -> None:
    async def work() -> None:
        shop = Shop(2)
        async with Web() as web, polled_source(web, "api+http://{}/api", tmp_path, **ITEMS) as it:
            web.route("/api", shop)
            await it.round()
            web.route(
                "/api",
                reply(broken, "application/json")
                if isinstance(broken, bytes)
                else reply("", status=broken),
            )
            with pytest.raises((SourceDown, Failure)):
                await it.round()
            web.route("/api", shop)
            shop.items[1]["price"] = 5
            assert [f.cause for f in await it.round()] == ["s1"]

    run(work())


def test_an_item_without_a_key_is_refused_once_and_first_none_skips_old_items(
    tmp_path: Path,
) -> None:
    async def work() -> None:
        async with Web() as web:
            web.route("/api", json_reply([{"id": "", "v": 1}, {"id": 2}]))
            async with (
                polled_source(web, "api+http://{}/api", tmp_path, key="id") as it,
                polled_source(web, "api+http://{}/api", tmp_path, first="none") as quiet,
            ):
                assert [f.refused for f in await it.round()] == ["its key is empty", ""]
                assert await it.round() == await quiet.round() == []
                web.route("/api", json_reply([{"id": 3}]))
                assert [f.cause for f in await quiet.round()] == ["3"]

    run(work())


@pytest.mark.parametrize(
    "more",
    [
        {"items": "a["},
        {"key": "]"},
        {"format": "xml"},
        {"page": "p", "next": "n"},
        {"cursor": {"param": "x"}},
        {"ignore": [1]},
        {"max_pages": 0},
        {"headers": {"Authorization": "env:NO_SUCH_VARIABLE"}},
        {"headers": {"a b": "c"}},
        {"headers": {"a": "b\nc"}},
        {"delimiter": "ab"},
        {"limit": 5},
    ],
)
def test_an_invalid_declaration_is_an_error_with_a_hint(
    more: dict[str, Any], tmp_path: Path
) -> None:
    async def work() -> None:
        async with polled_source(Web(), "api+https://shop.test/", tmp_path, **more):
            pass

    with pytest.raises(ConfigError) as caught:
        run(work())
    assert caught.value.hint
