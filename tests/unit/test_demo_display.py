"""The demo's display: all figures, a fixed size, and no control characters from scraped text."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.cells import cell_len
from rich.console import Console

from penstock.demo.display import (
    Counts,
    DeadPage,
    FieldChange,
    Host,
    Snapshot,
    Source,
    Waiting,
    plain,
    render,
)

SHOP = "http://127.0.0.1:41234"
QUIET = Snapshot(
    elapsed=0.3,
    total=20,
    address=SHOP,
    sources=(
        Source("seed list", 0, None),
        Source("change list", 0, None),
        Source("links followed", 0, None),
    ),
    hosts=(Host("127.0.0.1:41234", 0, 5), Host("127.0.0.1:41235", 0, 5)),
)
BUSY = replace(
    QUIET,
    elapsed=14.2,
    counts=Counts(pending=9, in_flight=2, delayed=2, success=41, duplicate=1, dead=1),
    sources=(
        Source("seed list", 18, 13.2),
        Source("change list", 7, 0.3),
        Source("links followed", 31, 4.0),
    ),
    hosts=(Host("127.0.0.1:41234", 4.8, 5), Host("127.0.0.1:41235", 0.1, 5, blocked=2.13)),
    waiting=(
        Waiting(SHOP + "/product/santoku-knife-17-cm", "window of 5 s", 3.8),
        Waiting("http://127.0.0.1:41235/product/founders-kettle", "429, Retry-After 3 s", 2.1),
    ),
    records=40,
    changes=5,
    unchanged=3,
    moved=(
        FieldChange("b", "Santoku Knife 17 cm", "price", "81.49", "71.99"),
        FieldChange("a", "Dimmable Bulb 2700 K", "price", "8.99", "8.39"),
    ),
    dead=(DeadPage(SHOP + "/product/mystery-box", "empty key: field 'sku' is empty"),),
    p50=0.212,
    p95=1.43,
)
FLOODED = replace(
    BUSY,
    counts=Counts(pending=10**6, success=10**7, delayed=500, dead=300),
    waiting=BUSY.waiting * 250,
    moved=BUSY.moved * 50,
    dead=BUSY.dead * 300,
    empty=12,
    notice="the shop was redesigned",
    total=None,
)


def drawn(snapshot: Snapshot, width: int) -> list[str]:
    console = Console(
        file=io.StringIO(), width=width, force_terminal=True, color_system="truecolor", record=True
    )
    console.print(render(snapshot, width))
    return console.export_text().splitlines()


@pytest.mark.parametrize("width", [50, 80, 100, 120, 200])
@pytest.mark.parametrize("snapshot", [QUIET, BUSY, FLOODED], ids=["quiet", "busy", "flooded"])
def test_no_line_is_wider_than_the_terminal_and_the_height_never_changes(
    snapshot: Snapshot, width: int
) -> None:
    lines = drawn(snapshot, width)
    assert max(cell_len(line) for line in lines) <= width
    assert len(lines) == len(drawn(QUIET, width))


def test_the_display_fits_a_terminal_of_80_by_24() -> None:
    assert len(drawn(FLOODED, 80)) < 24


@pytest.mark.parametrize("width", [80, 120])
def test_all_figures_of_the_demo_are_displayed(width: int) -> None:
    text = "\n".join(drawn(BUSY, width))
    for shown in (
        "0:14 of 0:20",
        SHOP,
        "56 accepted",
        "seed list",
        "13 s ago",
        "change list",
        "just now",
        "4.8 of 5",
        "asked to wait 2.1 s",
        "40 rows · 5 changes · 3 unchanged · 0 empty · 0 unmatched",
        "Santoku Knife 17 cm",
        "81.49 → 71.99",
        "p50 212 ms",
        "p95 1.4 s",
        "/product/founders-kettle",
        "429, Retry-After 3 s",
        "/product/mystery-box",
        "empty key: field 'sku' is empty",
    ):
        assert shown in text


def test_every_count_is_printed_above_its_name() -> None:
    lines = drawn(BUSY, 80)
    names = next(n for n, line in enumerate(lines) if "in flight" in line)
    for name, count in (
        ("success", "41"),
        ("in flight", "2"),
        ("pending", "9"),
        ("delayed", "2"),
        ("duplicate", "1"),
        ("dead", "1"),
    ):
        at = lines[names].index(name)
        assert lines[names - 1][at:].split()[0] == count


def test_the_next_due_event_is_listed_first_even_with_many_dead_events() -> None:
    text = "\n".join(drawn(BUSY, 120))
    assert text.index("founders-kettle") < text.index("/product/santoku-knife")
    assert "429, Retry-After 3 s" in "\n".join(drawn(FLOODED, 120))


def test_pages_without_a_row_and_an_open_breaker_are_displayed() -> None:
    assert "12 gave nothing" in drawn(FLOODED, 120)[-1]
    assert "the shop was redesigned" in drawn(FLOODED, 120)[-1]
    stopped = replace(FLOODED, breaker="52 of 61 events ended dead")
    assert "stopped  52 of 61 events ended dead" in drawn(stopped, 120)[-1]
    assert "3 fit no extractor" in drawn(replace(BUSY, unmatched=3), 120)[-1]
    assert drawn(BUSY, 120)[-1].strip() == ""


def test_the_bar_shows_even_one_dead_event_in_ten_million() -> None:
    console = Console(
        file=io.StringIO(), width=80, force_terminal=True, color_system="standard", no_color=False
    )
    console.print(render(replace(QUIET, counts=Counts(success=10**7, dead=1)), 80))
    assert isinstance(console.file, io.StringIO)
    bar = next(line for line in console.file.getvalue().splitlines() if line.count("━") == 78)
    assert "\x1b[31m━\x1b[0m" in bar


def test_only_the_status_of_a_row_is_coloured() -> None:
    console = Console(
        file=io.StringIO(), width=80, force_terminal=True, color_system="standard", no_color=False
    )
    console.print(render(BUSY, 80))
    assert isinstance(console.file, io.StringIO)
    row = next(line for line in console.file.getvalue().splitlines() if "mystery-box" in line)
    assert row.count("\x1b[31m") == 1
    assert row.index("\x1b[0m", row.index("dead")) < row.index("mystery-box")


@pytest.mark.parametrize(
    "hostile",
    [
        "\x1b[2J\x1b]0;owned\x07",
        "a\nb\rc\td",
        "[bold red]markup[/] [/nope]",
        "\u202eabc\u2066",
        "漢字" * 60,
        "x" * 5000,
    ],
)
def test_scraped_text_cannot_move_the_cursor_or_break_the_layout(hostile: str) -> None:
    nasty = replace(
        BUSY,
        waiting=(Waiting(hostile, hostile, 1.0),),
        moved=(FieldChange("1", hostile, hostile, hostile, hostile),),
        dead=(DeadPage(hostile, hostile),),
        sources=(Source(hostile, 1, 1), Source("b", 1, 1), Source("c", 1, 1)),
        hosts=(Host(hostile, 1, 1), Host("b", 1, None)),
        breaker=hostile,
        notice=hostile,
    )
    lines = drawn(nasty, 80)
    assert len(lines) == len(drawn(BUSY, 80))
    assert max(cell_len(line) for line in lines) <= 80
    assert all(c.isprintable() for line in lines for c in line)
    assert all(c.isprintable() or c == "\n" for c in plain(nasty))


def test_text_output_lists_only_new_changes_delays_and_dead_events() -> None:
    first = plain(BUSY, QUIET).splitlines()
    assert first[0].startswith(
        "  14.2 s  56 accepted (41 success, 2 in flight, 9 pending, 2 delayed, 1 duplicate, 1 dead)"
    )
    assert [line.split()[0] for line in first[1:]] == [
        "changed",
        "changed",
        "delayed",
        "delayed",
        "dead",
    ]
    assert "Dimmable Bulb 2700 K: price 8.99 → 8.39" in first[1]  # in order of time
    assert plain(BUSY, BUSY).splitlines() == first[:1]
    more = replace(
        BUSY,
        moved=(FieldChange("c", "Sling Bag 4 l", "price", "46.50", "41.99"), *BUSY.moved),
        notice="redesigned",
    )
    assert [line.split()[0] for line in plain(more, BUSY).splitlines()[1:]] == ["changed", "note"]


def test_text_output_of_an_idle_demo_shows_zero_counts() -> None:
    assert plain(QUIET) == "   0.3 s  0 accepted  0 rows, 0 changes"
