"""Crawler traps: which links the rule counts, and which sites lose nothing."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import date, timedelta
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.doubling import grows_linearly

from penstock.rules.identity import BadUrl, canonical_url
from penstock.rules.traps import MAX_SESSIONS, Trap, digest_of, find_trap, session_tokens, shown

SITE = "https://shop.example"
DATES = 500  # the default of limits.traps


def check(path: str, page: str = "/", others: Sequence[str] = ()) -> Trap | None:
    urls = [canonical_url(SITE + p) for p in (path, *others)]
    return find_trap(urls[0], session_tokens(SITE + page, urls), DATES)


def lost(pages: Iterable[tuple[str, Sequence[str]]]) -> list[str]:
    """Return the links that the rule does not accept. `pages` has each page with its links."""
    used: Counter[tuple[str, str]] = Counter()
    seen: set[str] = set()
    refused = []
    for page, paths in pages:
        urls = [canonical_url(SITE + path) for path in paths]
        tokens = session_tokens(canonical_url(SITE + page), urls)
        for url in urls:
            if url in seen:
                continue
            trap = find_trap(url, tokens, DATES)
            if trap is not None:
                key = (trap.kind, digest_of(trap.template))
                if used[key] >= trap.limit:
                    refused.append(url)
                    continue
                used[key] += 1
            seen.add(url)
    return refused


@pytest.mark.parametrize(
    ("path", "template"),
    [
        ("/a/a/a/a", "/a/a/…"),
        ("/x/next/next/next/next/", "/x/next/next/…"),
        ("/a/b/a/b/a/b", "/a/b/a/…"),
        ("/1/1/1/1", "/1/1/…"),
        ("/a/b/c/a/b/c/d/a", "/a/b/c/a/…"),
        ("/a/////b", "/a///…"),
        ("/" + "/".join(map(str, range(65))), "/0/1/…"),
    ],
)
def test_a_path_that_repeats_its_segments_often_is_a_trap(path: str, template: str) -> None:
    assert check(path) == Trap("path", SITE + template, 0)


@pytest.mark.parametrize(
    "path",
    [
        "/" + "/".join(map(str, range(64))),
        "/", "/a", "/a/", "/a/b/c/d/e/f/g/h", "/a/a/a", "/en/shoes/en/", "/a/b/a/b/a/c",
        "/tiles/1/1/1", "/media/0/0/0/12/5", "/2026/11/18/2026/", "/p/1?a=1&a=1&a=1&a=1&a=1",
    ],
)  # fmt: skip
def test_a_path_with_few_repetitions_is_not_a_trap(path: str) -> None:
    found = check(path)
    assert found is None or found.kind == "date"


@pytest.mark.parametrize(
    ("path", "template"),
    [
        ("/calendar/2026/11", "/calendar/{date}"),
        ("/calendar/2026/11/", "/calendar/{date}/"),
        ("/calendar/2026/5/3", "/calendar/{date}"),
        ("/calendar/2026/11/18/week", "/calendar/{date}/week"),
        ("/2026-11-18", "/{date}"),
        ("/events/20261118/list", "/events/{date}/list"),
        ("/events?date=2026-11-18", "/events?date={date}"),
        ("/events?view=day&from=2026-11-18T10:00&to=2026-11-19", None),
        ("/events?month=11&year=2026&view=list", None),
        ("/events?week=2026-W47", "/events?week={date}"),
        ("/news/2026/11/18/a-headline", "/news/{date}/a-headline"),
    ],
)
def test_a_date_in_path_or_query_gives_a_template(path: str, template: str | None) -> None:
    found = check(path)
    assert found is not None
    assert found.kind == "date"
    assert found.limit == DATES
    if template is None:
        assert not any(year in found.template for year in ("2026", "=11"))
    else:
        assert found.template == SITE + template


@pytest.mark.parametrize(
    "path",
    [
        "/p/2026", "/p/12345678", "/p/20261399", "/list?page=11", "/list?year=2026",
        "/list?m=5&page=3", "/p/1850/11", "/p/2026/13", "/version/2026.11", "/p/19-11",
    ],
)  # fmt: skip
def test_other_numbers_give_no_template(path: str) -> None:
    assert check(path) is None


@pytest.mark.parametrize(
    ("path", "template"),
    [
        ("/a;jsessionid=0AB12", "/a;jsessionid={session}"),
        ("/a;JSESSIONID=0AB12/b", "/a;JSESSIONID={session}/b"),
        ("/(S(lit3py55t21z5v55vlm25s55))/x.aspx", "/{session}/x.aspx"),
        ("/a?PHPSESSID=abc&page=2", "/a?PHPSESSID={session}&page=2"),
    ],
)
def test_a_session_id_with_a_name_gives_a_template(path: str, template: str) -> None:
    assert check(path) == Trap("session", SITE + template, MAX_SESSIONS)


def test_a_new_token_in_all_links_of_a_page_is_a_session_id() -> None:
    first, other = "/s/0123456789abcdef0123", "/s/fedcba98765432109876"
    for page in (f"{other}/x", other, f"{other}/"):
        assert check(f"{first}/a", page, [f"{first}/b", "/imprint"]) == Trap(
            "session", f"{SITE}/s/{{session}}/a", MAX_SESSIONS
        )
    assert check(f"{first}/a", "/", [f"{first}/b"]) is None, "parts of an item"
    assert check(f"{first}/a", f"/t{other}/x", [f"{first}/b"]) is None, "a token elsewhere"
    assert check(f"{first}/a", f"{first}/b", [f"{first}/c"]) is None, "the session was kept"
    assert check(f"{first}/a", "/s/abcdefabcdef000000/l", [f"{other}/a"]) is None, "a list of items"
    assert check(f"{first}/a", f"{other}/a") is None, "one link shows nothing"
    assert check(f"{first}/a", f"/item/{first[3:]}", [f"{first}/b"]) is None, "parts of an item"


def test_a_shown_template_is_short_and_has_no_secret() -> None:
    assert shown("https://u:secret@a.example/{date}?token=abc&x=1") == (
        "https://u:***@a.example/{date}?token=***&x=1"
    )
    assert len(shown("https://a.example/" + "x" * 8000)) == 300


# -- sites without a trap lose nothing -------------------------------------------------------------


def shop(ids: Sequence[object]) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield a shop: lists with 20 products on each page, products with parts, and related items."""
    pages = range(0, len(ids), 20)
    for page, at in enumerate(pages):
        items = [f"/product/{id_}" for id_ in ids[at : at + 20]]
        around = [f"/list?page={n}" for n in (page - 1, page + 1) if 0 <= n < len(pages)]
        yield f"/list?page={page}", [*items, *around]
    for n, id_ in enumerate(ids):
        other = ids[n - 1]
        yield (
            f"/product/{id_}",
            [
                f"/product/{id_}/reviews",
                f"/product/{id_}/images",
                f"/product/{other}",
                f"/product/{other}/reviews",
            ],
        )
        yield f"/product/{id_}/reviews", [f"/product/{id_}/reviews?page=2", f"/product/{id_}"]


@settings(max_examples=10)
@given(st.integers(0, 10**9))
def test_a_shop_with_1000_numbered_products_loses_nothing(first: int) -> None:
    assert lost(shop(range(first, first + 1000))) == []


@given(st.lists(st.uuids(), min_size=60, max_size=60, unique=True))
def test_a_shop_with_uuids_loses_nothing(ids: list[UUID]) -> None:
    assert lost(shop(ids)) == []
    assert lost(shop([id_.hex for id_ in ids])) == []


@given(st.lists(st.uuids(), min_size=60, max_size=60, unique=True))
def test_pages_that_link_to_parts_of_an_item_with_a_uuid_lose_nothing(ids: list[UUID]) -> None:
    assert (
        lost(
            (f"/product/name-{n}", [f"/reviews/{id_}/newest", f"/reviews/{id_}/best"])
            for n, id_ in enumerate(ids)
        )
        == []
    )


def test_a_site_of_100_000_pages_with_one_session_id_loses_nothing() -> None:
    assert (
        lost(
            (f"/list?page={n}", [f"/p/{n}-{i};jsessionid=0AB12CD" for i in range(100)])
            for n in range(1000)
        )
        == []
    )


@given(st.sampled_from(["/list?page={}", "/list/{}", "/list/page/{}/", "/q/x/o/{}?sort=a"]))
def test_a_list_of_500_pages_loses_nothing(form: str) -> None:
    assert lost((form.format(n), [form.format(n + 1)]) for n in range(1, 501)) == []


@settings(max_examples=10)
@given(st.dates(date(1950, 1, 1), date(2090, 1, 1)), st.sampled_from(["%Y/%m/%d", "%Y-%m-%d"]))
def test_a_news_archive_of_three_years_loses_nothing(first: date, form: str) -> None:
    days = [first + timedelta(days=n) for n in range(3 * 365)]
    months = sorted({day.strftime("%Y/%m") for day in days})

    def pages() -> Iterator[tuple[str, Sequence[str]]]:
        yield "/", [f"/{month}" for month in months]
        for day in days:
            paths = [f"/{day.strftime(form)}/headline-{day.toordinal()}-{n}" for n in range(3)]
            yield f"/{day.strftime('%Y/%m')}", paths

    assert lost(pages()) == []


def hostile_urls(size: int) -> list[str]:
    forms = ("/a{}", "/{}?a={}", "/x?date=2026-11-18&x={}", "/(A(a{}", "/a;sid={}", "/x?{}=1")
    return [
        *(SITE + form.replace("{}", "1a" * (size // 2)) for form in forms),
        SITE + "/" + "/".join(map(str, range(size // 7))),
        SITE + "/x?" + "&".join(f"d{n}=2026-11" for n in range(size // 14)),
        SITE + "/0123456789abcdef0123" * (size // 21),
    ]


def test_the_work_for_a_link_is_linear_in_its_characters() -> None:
    grows_linearly(
        hostile_urls, lambda urls: [find_trap(u, session_tokens(u, urls), DATES) for u in urls]
    )


@given(st.text(max_size=200), st.lists(st.text(max_size=200), max_size=5))
def test_the_rule_accepts_any_text(page: str, links: list[str]) -> None:
    urls = []
    for link in (page, *links):
        with contextlib.suppress(BadUrl):
            urls.append(canonical_url(link, "https://a.example/x"))
    for url in urls:
        find_trap(url, session_tokens(url, urls), DATES)
