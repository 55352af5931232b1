"""Seed lists: appended lines are read, a replaced list is read from its start.

Unreadable lines are refused, and a restart repeats ids and adds no event.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import obstore
import pytest
from tests.servers import Handle
from tests.sources.seeds_rig import Skipping, context, ids, read, spec_of, urls

from penstock.errors import ConfigError, SourceDown, UsageError
from penstock.intake.mapping import Mapping
from penstock.ports import Finding
from penstock.sources.base import BATCH
from penstock.sources.seeds.files import SeedObject
from penstock.sources.seeds.lines import Lines, SizeLimits, Stream
from penstock.sources.seeds.positions import MAX_VANISHED, ObjectPosition, ObjectPositions
from penstock.sources.seeds.source import Seeds, open_source
from penstock.stores.s3 import bucket_at


def source(base: Path, url: str, **options: Any) -> Seeds:
    return open_source(spec_of(url, **options), context(base, Skipping(time.time())))


def lines(start: int, stop: int) -> str:
    return "".join(f"https://shop.test/p/{n}\n" for n in range(start, stop))


def expected(start: int, stop: int) -> list[str | None]:
    return [f"https://shop.test/p/{n}" for n in range(start, stop)]


def wrong(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(f.cause, f.refused) for f in findings if f.refused]


# -- formats ---------------------------------------------------------------------------------------


async def test_a_text_list_is_a_url_a_line_without_comments_and_blank_lines(tmp_path: Path) -> None:
    (tmp_path / "urls.txt").write_bytes(
        b"\xef\xbb\xbfhttps://shop.test/a\r\n\n  # no\n\t https://shop.test/b \nhttps://shop.test/\xc3\xa4"
    )
    found, cursor = await read(source(tmp_path, "seeds:urls.txt"))
    assert urls(found) == ["https://shop.test/a", "https://shop.test/b", "https://shop.test/ä"]
    assert [f.cause for f in found] == ["urls.txt:1", "urls.txt:4", "urls.txt:5"]
    assert found[0].payload == {
        "url": "https://shop.test/a",
        "_seeds": {"object": "urls.txt", "line": 1},
    }
    assert len(set(ids(found))) == 3
    again, _ = await read(source(tmp_path, "seeds:urls.txt"), cursor)
    assert again == []


async def test_csv_columns_come_from_the_header_and_a_record_may_span_lines(
    tmp_path: Path,
) -> None:
    (tmp_path / "list.csv").write_bytes(
        b'\xef\xbb\xbfsku;link;note\r\n1;https://shop.test/1;"two\r\nlines; and ""quotes"""\r\n\r\n2;https://shop.test/2\r\n'
    )
    found, _ = await read(source(tmp_path, "seeds:list.csv", column="link", delimiter=";"))
    assert urls(found) == ["https://shop.test/1", "https://shop.test/2"]
    assert found[0].payload["note"] == 'two\r\nlines; and "quotes"'
    assert found[1].payload == {
        "sku": "2",
        "link": "https://shop.test/2",
        "_seeds": {"object": "list.csv", "line": 5},
    }


async def test_csv_without_a_header_has_the_configured_columns(tmp_path: Path) -> None:
    (tmp_path / "list").write_text("1,https://shop.test/1\n2,https://shop.test/2\n")
    found, _ = await read(source(tmp_path, "seeds:list", format="csv", columns=["sku", "url"]))
    assert [(f.url, f.payload["sku"]) for f in found] == [
        ("https://shop.test/1", "1"),
        ("https://shop.test/2", "2"),
    ]


async def test_a_json_line_becomes_the_payload_of_a_finding(tmp_path: Path) -> None:
    (tmp_path / "list.ndjson").write_text(
        '{"link": "https://shop.test/1", "rank": "high"}\n"https://shop.test/2"\n'
    )
    seeds = source(tmp_path, "seeds:list.ndjson", map={"url": "link || url", "priority": "rank"})
    found, _ = await read(seeds)
    mapping = Mapping(seeds.spec)
    events = [mapping.event(f) for f in found]
    assert [(e.url, e.priority) for e in events if e] == [
        ("https://shop.test/1", 0),
        ("https://shop.test/2", 1),
    ]


@pytest.mark.parametrize(("name", "said"), [("urls.txt.gz", {}), ("urls", {"format": "txt.gz"})])
async def test_a_gzip_list_is_decompressed_and_continued_at_its_offset(
    tmp_path: Path, name: str, said: dict[str, Any]
) -> None:
    members = (
        gzip.compress(lines(0, 2000).encode())
        + gzip.compress(lines(2000, 3000).encode())
        + b"\0" * 512
    )
    (tmp_path / name).write_bytes(members)
    first, cursor = await read(source(tmp_path, f"seeds:{name}", **said), max_batches=1)
    assert len(first) == BATCH
    second, _ = await read(source(tmp_path, f"seeds:{name}", **said), cursor)
    assert urls(first + second) == expected(0, 3000)


# -- lines that cannot be read ---------------------------------------------------------------------


async def test_an_unreadable_line_is_refused_with_its_reason_and_the_rest_is_read(
    tmp_path: Path,
) -> None:
    long = b"x" * 5000
    (tmp_path / "a.txt").write_bytes(
        b"https://shop.test/1\n\xff\xfe\n" + long + b"\nhttps://shop.test/2\n" + long
    )
    (tmp_path / "b.jsonl").write_bytes(
        b'{"url": \n[1]\n{"url": "https://shop.test/3"}\n' + b"[" * 4000 + b"\n"
    )
    (tmp_path / "c.csv").write_bytes(
        b'url,sku\nhttps://shop.test/4,1,2\n"https://shop.test/5,1\nhttps://shop.test/6,1\n'
    )
    seeds = source(tmp_path, "seeds:*.*", max_line=4096)
    found, cursor = await read(seeds)
    reasons = dict(wrong(found))
    assert reasons["a.txt:2"] == "the line is not UTF-8"
    assert (
        reasons["a.txt:3"] == reasons["a.txt:5"] == "the line has more than 4096 bytes (max_line)"
    )
    assert "no JSON" in reasons["b.jsonl:1"]
    assert "no object but list" in reasons["b.jsonl:2"]
    assert "no JSON" in reasons["b.jsonl:4"]
    assert reasons["c.csv:2"] == "the line has 3 fields, the header 2"
    assert "never closed" in reasons["c.csv:3"]
    mapping = Mapping(seeds.spec)
    events = [mapping.event(f) for f in found if not f.refused]
    assert [e.url for e in events if e] == [f"https://shop.test/{n}" for n in (1, 2, 3, 6)]
    assert all(json.dumps(f.payload) for f in found)
    assert (await read(seeds, cursor))[0] == []


@pytest.mark.parametrize("seed", range(5))
async def test_any_bytes_give_the_same_findings_for_any_chunk_size(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    pieces = [
        b"\n",
        b'"',
        b",",
        b"\r",
        b"\xff",
        b"https://shop.test/a",
        b"#",
        b"{",
        b"}",
        b"\0",
        b"x" * 3000,
        b"\xe2\x80\xa8",
    ]
    body = b"url,b\n" + b"".join(rng.choices(pieces, k=4000))
    for name in ("a.txt", "a.csv", "a.jsonl"):
        (tmp_path / name).write_bytes(body)
        monkeypatch.setattr("penstock.sources.seeds.lines.CHUNK", 1 << 20)
        complete, _ = await read(source(tmp_path, f"seeds:{name}", max_line=2000))
        monkeypatch.setattr("penstock.sources.seeds.lines.CHUNK", rng.randrange(500, 5000))
        parts: list[Finding] = []
        cursor: bytes | None = None
        while True:
            some, cursor = await read(
                source(tmp_path, f"seeds:{name}", max_line=2000), cursor, max_batches=1
            )
            if not some:
                break
            parts += some
        assert parts == complete
        assert len(set(ids(complete))) == len(complete) > 100


async def test_a_truncated_damaged_or_hostile_gzip_is_one_refusal_and_others_are_read(
    tmp_path: Path,
) -> None:
    good = gzip.compress(lines(0, 500).encode())
    (tmp_path / "a.txt.gz").write_bytes(good[: len(good) // 2])
    (tmp_path / "b.txt.gz").write_bytes(good[:40] + b"\0\0\0\0" + good[44:])
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(b"#" + b"\n" * (70 << 20)))
    (tmp_path / "d.txt.gz").write_bytes(gzip.compress(b"\n" * (2 << 20)))
    (tmp_path / "e.txt").write_text("https://shop.test/good\n")
    found, cursor = await read(source(tmp_path, "seeds:*", max_size="3MiB"))
    reasons = " ".join(f.refused for f in found)
    assert "ends in the middle" in reasons
    assert "damaged" in reasons
    assert "more than 3145728 bytes" in reasons
    assert "d.txt.gz" not in reasons
    assert found[-1].url == "https://shop.test/good"
    found, _ = await read(source(tmp_path, "seeds:c.txt.gz"))
    assert "more than 250 times as large" in found[-1].refused
    (tmp_path / "a.txt.gz").write_bytes(good)
    again, _ = await read(source(tmp_path, "seeds:*", max_size="3MiB"), cursor)
    seen = [f for f in found if f.cause.startswith("a.txt.gz")]
    assert set(urls(again)) | set(urls(seen)) <= set(expected(0, 500))
    assert again[-1].url == "https://shop.test/p/499"


# -- growth, replacement, restart ------------------------------------------------------------------


async def test_appended_lines_are_read_and_the_old_lines_keep_their_ids(tmp_path: Path) -> None:
    path = tmp_path / "urls.txt"
    path.write_text(lines(0, 10))
    old, cursor = await read(source(tmp_path, "seeds:urls.txt"))
    with path.open("a") as file:
        file.write(lines(10, 15))
    new, cursor = await read(source(tmp_path, "seeds:urls.txt"), cursor)
    assert urls(new) == expected(10, 15)
    complete, _ = await read(source(tmp_path, "seeds:urls.txt"))
    assert ids(complete) == ids(old + new)
    assert (await read(source(tmp_path, "seeds:urls.txt"), cursor))[0] == []


async def test_a_list_replaced_by_a_copy_of_its_content_is_not_read_again(tmp_path: Path) -> None:
    path = tmp_path / "urls.txt"
    path.write_text(lines(0, 10))
    _, cursor = await read(source(tmp_path, "seeds:urls.txt"))
    (tmp_path / "new").write_text(lines(0, 12))
    os.replace(tmp_path / "new", path)
    new, cursor = await read(source(tmp_path, "seeds:urls.txt"), cursor)
    assert urls(new) == expected(10, 12)
    path.unlink()
    with pytest.raises(SourceDown, match="there is no"):
        await read(source(tmp_path, "seeds:urls.txt"), cursor)
    path.write_text(lines(0, 12))
    assert (await read(source(tmp_path, "seeds:urls.txt"), cursor))[0] == []


@pytest.mark.parametrize(
    "body",
    [lines(0, 9), lines(20, 30), lines(0, 5) + lines(20, 21) + lines(6, 12), lines(1, 3)],
    ids=["shorter", "same size", "longer", "tiny"],
)
async def test_a_replaced_list_is_read_from_its_start_with_new_ids(
    tmp_path: Path, body: str
) -> None:
    path = tmp_path / "urls.txt"
    path.write_text(lines(0, 10))
    old, cursor = await read(source(tmp_path, "seeds:urls.txt"))
    path.write_text(body)
    os.utime(path, ns=(1, 1))
    new, cursor = await read(source(tmp_path, "seeds:urls.txt"), cursor)
    assert urls(new) == body.split()
    assert not set(ids(new)) & set(ids(old))
    path.write_text(lines(30, 40))
    third, _ = await read(source(tmp_path, "seeds:urls.txt"), cursor)
    assert urls(third) == expected(30, 40)
    assert not set(ids(third)) & set(ids(new + old))


async def test_a_long_list_that_grows_is_continued_and_a_changed_one_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.sources.seeds.object_reader.MAX_VERIFIED", 1000)
    path = tmp_path / "urls.txt"
    path.write_text(lines(0, 1000))
    _, cursor = await read(source(tmp_path, "seeds:urls.txt"))
    with path.open("a") as file:
        file.write(lines(1000, 1001))
    new, cursor = await read(source(tmp_path, "seeds:urls.txt"), cursor)
    assert urls(new) == expected(1000, 1001)
    path.write_text(lines(1, 1100))
    new, cursor = await read(source(tmp_path, "seeds:urls.txt"), cursor)
    assert urls(new) == expected(1, 1100)


async def test_a_reader_that_ends_at_any_batch_continues_at_its_cursor(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.csv").write_text(
        "sku,url\n" + "".join(f'{n},"https://shop.test/p/{n}"\n' for n in range(2500))
    )
    (tmp_path / "b.txt").write_text(lines(2500, 4000))
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(lines(4000, 6500).encode()))
    complete, _ = await read(source(tmp_path, "seeds:*"))
    assert urls(complete) == expected(0, 6500)
    accepted: dict[str, str | None] = {}
    cursor: bytes | None = None
    for _ in range(20):
        batches = source(tmp_path, "seeds:*").read(cursor)
        batch = await anext(batches)
        accepted |= {f.id: f.url for f in batch.findings}
        cursor = batch.cursor or cursor
        lost = await anext(batches, None)  # yielded and never accepted: the process ends here
        assert lost is None or all(f.id not in accepted for f in lost.findings)
        await batches.aclose()
    assert list(accepted.values()) == expected(0, 6500)
    assert list(accepted) == ids(complete)


# -- a last line without an end --------------------------------------------------------------------


async def test_an_incomplete_last_line_of_a_growing_file_is_read_when_it_is_complete(
    tmp_path: Path,
) -> None:
    path = tmp_path / "in" / "urls.txt"
    path.parent.mkdir()
    path.write_text("https://shop.test/1\nhttps://shop.te")
    clock = Skipping(path.stat().st_mtime)  # the clock starts at the time of the last write
    seeds = open_source(spec_of("seeds:in"), context(tmp_path, clock))
    assert seeds.every == 5.0
    batches = seeds.read(None)
    found: list[Finding] = []
    cursor: bytes | None = None
    async for batch in batches:
        if not batch.idle and clock.now() > path.stat().st_mtime + 3 and path.stat().st_size < 40:
            with path.open("a") as file:
                file.write("st/2\nhttps://shop.test/3")
            os.utime(path, (clock.now() + 3, clock.now() + 3))
        found += batch.findings
        cursor = batch.cursor or cursor
    assert urls(found) == ["https://shop.test/1", "https://shop.test/2"]
    rest, cursor = await read(seeds, cursor)  # the file did not change since then
    assert urls(rest) == ["https://shop.test/3"]
    assert (await read(seeds, cursor))[0] == []


async def test_a_last_line_keeps_its_id_when_its_newline_is_written_later(
    tmp_path: Path,
) -> None:
    path = tmp_path / "urls.txt"
    path.write_text("https://shop.test/1")
    first, cursor = await read(source(tmp_path, "seeds:urls.txt"))
    path.write_text("https://shop.test/1\nhttps://shop.test/2\n")
    second, _ = await read(source(tmp_path, "seeds:urls.txt"), cursor)
    assert urls(second) == ["https://shop.test/1", "https://shop.test/2"]
    assert ids(second)[0] == ids(first)[0], "the same cause has the same id, which the ledger knows"


# -- directories -----------------------------------------------------------------------------------


async def test_a_directory_source_reads_new_files_and_skips_unfinished_ones(
    tmp_path: Path,
) -> None:
    inbox = tmp_path / "inbox"
    (inbox / "done").mkdir(parents=True)
    seeds = source(tmp_path, "seeds:inbox/")
    _, cursor = await read(seeds)
    for name in (
        "a.txt",
        ".hidden.txt",
        "b.txt.part",
        "c.txt.tmp",
        "d.txt~",
        "e.log",
        "done/f.txt",
        "g.txt.1",
    ):
        (inbox / name).write_text(f"https://shop.test/{name}\n")
    found, cursor = await read(seeds, cursor)
    assert urls(found) == ["https://shop.test/a.txt"]
    (inbox / "b.txt.part").rename(inbox / "b.txt")
    found, cursor = await read(seeds, cursor)
    assert urls(found) == ["https://shop.test/b.txt.part"]
    assert seeds.describe(cursor) == "at the end of b.txt, 2 lists in all"


async def test_a_file_name_may_contain_any_bytes(tmp_path: Path) -> None:
    with open(os.fsencode(tmp_path) + b"/\xff a\n.txt", "w") as file:
        file.write(lines(0, 1) + "\xff\n")
    os.symlink("/etc/passwd", os.fsencode(tmp_path) + b"/\xfe.txt")
    found: list[Finding] = []
    trouble = await down(source(tmp_path, "seeds:./"), found)
    assert "\\xfe.txt is a link" in trouble.message
    assert found[0].url == "https://shop.test/p/0"
    assert found[0].cause == "\\xff a\n.txt:1"
    assert all(msgspec.json.encode(f) for f in found)


async def test_a_batch_of_lines_with_many_values_stays_small(tmp_path: Path) -> None:
    line = json.dumps({"url": "https://shop.test/1", "values": [{}] * 60_000})
    (tmp_path / "list.jsonl").write_text(f"{line}\n" * 6)
    batches = [b async for b in source(tmp_path, "seeds:list.jsonl").read(None)]
    assert [len(b.findings) for b in batches if b.findings] == [1] * 6


async def test_many_small_files_share_a_batch(tmp_path: Path) -> None:
    for n in range(300):
        (tmp_path / f"{n:03}.txt").write_text(lines(n, n + 1))
    batches = [b async for b in source(tmp_path, "seeds:./").read(None)]
    assert [len(b.findings) for b in batches] == [300]
    assert urls(batches[0].findings) == expected(0, 300)


async def test_a_link_out_of_the_directory_is_refused_and_a_link_inside_is_followed(
    tmp_path: Path,
) -> None:
    inbox = tmp_path / "inbox"
    (inbox / "..data").mkdir(parents=True)
    (inbox / "..data" / "real.txt").write_text(lines(1, 2))
    (inbox / "inside.txt").symlink_to("..data/real.txt")
    (tmp_path / "secret.txt").write_text("root:x:0:0\n")
    (inbox / "outside.txt").symlink_to(tmp_path / "secret.txt")
    (inbox / "z.txt").write_text(lines(2, 3))
    found: list[Finding] = []
    trouble = await down(source(tmp_path, "seeds:inbox"), found)
    assert "outside.txt is a link to a path outside" in trouble.message
    assert urls(found) == expected(1, 3)


async def test_a_glob_does_not_follow_a_directory_link_out_of_its_root(
    tmp_path: Path,
) -> None:
    (tmp_path / "lists" / "de").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "secret.txt").write_text("root:x:0:0\n")
    (tmp_path / "lists" / "de" / "a.txt").write_text(lines(1, 2))
    (tmp_path / "lists" / "at").symlink_to(tmp_path / "other")
    found: list[Finding] = []
    trouble = await down(source(tmp_path, "seeds:lists/*/*.txt"), found)
    assert "at is a link to a path outside" in trouble.message
    assert urls(found) == expected(1, 2)


async def test_an_unreadable_file_is_named_in_the_error_and_the_others_are_read(
    tmp_path: Path,
) -> None:
    for n in range(3):
        (tmp_path / f"{n}.txt").write_text(lines(n, n + 1))
    (tmp_path / "1.txt").unlink()
    os.mkfifo(tmp_path / "1.txt")
    found: list[Finding] = []
    trouble = await down(source(tmp_path, "seeds:./"), found)
    assert "1.txt is not a file" in trouble.message
    assert trouble.hint
    assert trouble.after == 5.0
    assert urls(found) == [*expected(0, 1), *expected(2, 3)]


async def down(seeds: Seeds, found: list[Finding]) -> SourceDown:
    try:
        async for batch in seeds.read(None):
            found += batch.findings
    except SourceDown as e:
        return e
    pytest.fail("the source raised no error")


async def test_a_list_without_the_column_is_an_error_and_is_read_after_the_fix(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.csv").write_text("sku,link\n1,https://shop.test/1\n")
    with pytest.raises(SourceDown, match=r"a\.csv has no column 'url', it has sku, link"):
        await read(source(tmp_path, "seeds:a.csv"))
    found, _ = await read(source(tmp_path, "seeds:a.csv", column="link"))
    assert urls(found) == ["https://shop.test/1"]


async def test_a_missing_directory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SourceDown, match="inbox/ cannot be read: no such file"):
        await read(source(tmp_path, "seeds:inbox/"))


def test_the_cursor_stays_small_and_drops_objects_that_vanished_long_ago() -> None:
    marks = ObjectPositions()
    for n in range(50_000):
        marks.put(
            f"{n}.txt", ObjectPosition(b"12345678", 10**9, 10**6, 10**9, 1, 2**31, 2**31, True)
        )
    assert len(marks.encode()) < 3_000_000
    marks.keep([f"{n}.txt" for n in range(49_990, 50_000)])
    assert len(marks) == MAX_VANISHED + 10
    assert marks.get("49989.txt") is not None
    assert marks.get("0.txt") is None


async def test_a_cursor_of_another_version_is_an_error() -> None:
    with pytest.raises(SourceDown, match="has a format that this version does not know"):
        ObjectPositions(b"rubbish")


# -- commands --------------------------------------------------------------------------------------


async def test_a_preview_shows_the_next_lines_with_their_later_ids(tmp_path: Path) -> None:
    (tmp_path / "urls.txt").write_text(lines(0, 5))
    seeds = source(tmp_path, "seeds:urls.txt")
    shown = await seeds.preview(None, 3)
    assert urls(list(shown)) == expected(0, 3)
    assert ids((await read(seeds))[0])[:3] == ids(list(shown))


@pytest.mark.parametrize(
    ("to", "reads"),
    [
        ("end", []),
        ("b.csv", ["b1", "b2", "c1"]),
        ("b.csv:3", ["b2", "c1"]),
        ("a.txt:4", ["a2", "b1", "b2", "c1"]),
        ("c.txt:9", []),
    ],
)
async def test_a_position_can_be_the_end_a_list_or_a_line(
    tmp_path: Path, to: str, reads: list[str]
) -> None:
    (tmp_path / "a.txt").write_text("a1\n# x\n\na2\n")
    (tmp_path / "b.csv").write_text("url\nb1\nb2\n")
    (tmp_path / "c.txt").write_text("c1")
    seeds = source(tmp_path, "seeds:./")
    cursor = await seeds.place(to)
    found, _ = await read(seeds, cursor)
    assert urls(found) == reads
    complete, _ = await read(seeds)
    assert set(ids(found)) <= set(ids(complete))
    with pytest.raises(UsageError, match=r"has no list 'b\.cvs'"):
        await seeds.place("b.cvs:2")


async def test_a_line_number_is_a_position_if_there_is_one_list(tmp_path: Path) -> None:
    (tmp_path / "urls.txt").write_text(lines(0, 5))
    seeds = source(tmp_path, "seeds:urls.txt")
    cursor = await seeds.place("4")
    assert seeds.describe(cursor) == "before line 4 of urls.txt"
    assert urls((await read(seeds, cursor))[0]) == expected(3, 5)


@pytest.mark.parametrize(
    ("url", "said", "reason"),
    [
        ("seeds:", {}, "is not the URL of a seed list"),
        ("seeds+ftp://host/list", {}, "is not the URL of a seed list"),
        ("seeds:a", {"format": "xml"}, "no format 'xml'"),
        ("seeds:a", {"delimiter": "||"}, "delimiter is"),
        ("seeds:a", {"max_line": "10GiB"}, "max_line is"),
        ("seeds:a", {"max_size": "many"}, "max_size is"),
        ("seeds:a", {"colunm": "url"}, "no option 'colunm'"),
        ("seeds:a", {"columns": [1]}, "columns is not a list"),
        ("seeds+s3:///x", {}, "names no bucket"),
        ("seeds+s3://b/x?key=hunter2", {}, "half of its credentials"),
    ],
)
def test_an_invalid_declaration_is_an_error_with_a_hint(
    tmp_path: Path, url: str, said: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        source(tmp_path, url, **said)
    assert reason in caught.value.message
    assert caught.value.hint
    assert "hunter2" not in caught.value.message


# -- size ------------------------------------------------------------------------------------------

MILLION = """
    import asyncio, resource, sys, time
    from pathlib import Path
    from tests.sources.seeds_rig import context, spec_of
    from penstock.clock import SystemClock
    from penstock.sources.seeds.source import open_source

    async def main():
        source = open_source(spec_of("seeds:" + sys.argv[1]), context(Path("."), SystemClock()))
        before, count, last = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0, ""
        async for batch in source.read(None):
            assert len(batch.findings) <= 1000
            count += len(batch.findings)
        print(count, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)

    asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["urls.txt", "urls.txt.gz"])
def test_a_list_of_a_million_lines_is_read_with_bounded_memory(tmp_path: Path, name: str) -> None:
    body = "".join(
        f"https://shop.test/category/{n % 97}/product/{n}?ref=seed-list\n" for n in range(1_000_000)
    ).encode()
    path = tmp_path / name
    path.write_bytes(gzip.compress(body, 1) if name.endswith(".gz") else body)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MILLION), str(path)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    count, megabytes = map(int, done.stdout.split())
    assert count == 1_000_000
    assert megabytes < 40, f"{megabytes} MiB more than before, for a list of {len(body) >> 20} MiB"


class Endless:
    """An object with one endless line."""

    found = SeedObject(name="x", path="x", stamp=b"", size=1 << 40, at=0.0)

    def read_at(self, offset: int, length: int) -> bytes:
        return b"x" * length

    def close(self) -> None:
        return None


def test_an_endless_line_is_read_with_bounded_memory() -> None:
    caps = SizeLimits(1000, 1 << 40, 100.0)
    read_ = Lines(Stream(Endless(), caps, gzip=False), caps, delimiter=None)
    for _ in range(50):
        read_.budget = 4
        assert read_.record() is None
        assert len(read_._data) <= 2 << 20
    assert read_.position == (0, 1, 0), "the position stays before the line"


# -- S3 --------------------------------------------------------------------------------------------


@pytest.fixture
def place(server: Callable[[str], Handle]) -> str:
    return server("s3").url.replace("/pages?", f"/{uuid.uuid4().hex}/in/?")


def put(url: str, name: str, body: bytes) -> None:
    obstore.put(bucket_at(url)[0], name, body)


@pytest.mark.server("s3")
async def test_objects_under_an_s3_prefix_are_lists_and_each_version_is_read_once(
    tmp_path: Path, place: str
) -> None:
    put(place, "a.txt", lines(0, 1500).encode())
    put(place, "deep/b.csv.gz", gzip.compress(b"url\nhttps://shop.test/b\n"))
    put(place, "c.txt.tmp", b"https://shop.test/c\n")
    put(place, "empty.txt", b"")
    put(place, "e.bin", b"https://shop.test/e\n")
    seeds = source(tmp_path, "seeds+" + place)
    assert seeds.every == 60.0
    first, cursor = await read(seeds, max_batches=1)
    assert urls(first) == expected(0, 1000)
    second, cursor = await read(source(tmp_path, "seeds+" + place), cursor)
    assert urls(second) == [*expected(1000, 1500), "https://shop.test/b"]
    assert (await read(seeds, cursor))[0] == []
    assert ids((await read(seeds))[0]) == ids(first + second)
    put(place, "a.txt", lines(0, 2).encode())
    third, cursor = await read(seeds, cursor)
    assert urls(third) == expected(0, 2)
    assert not set(ids(third)) & set(ids(first))
    put(place, "a.txt", lines(0, 1500).encode())
    assert set(ids((await read(seeds, cursor))[0])) == set(ids(first + second)[:1500]), (
        "the same version again, the same ids"
    )


@pytest.mark.server("s3")
async def test_an_s3_url_may_name_one_object_or_the_start_of_a_name(
    tmp_path: Path, place: str
) -> None:
    for name in ("list-1.txt", "list-2.txt", "list.txt", "zoo.txt", "list-1.txt.bak"):
        put(place, name, f"https://shop.test/{name}\n".encode())
    one = source(tmp_path, "seeds+" + place.replace("/in/?", "/in/list.txt?"))
    assert one.every is None
    assert urls((await read(one))[0]) == ["https://shop.test/list.txt"]
    some = source(tmp_path, "seeds+" + place.replace("/in/?", "/in/list-?"))
    assert urls((await read(some))[0]) == [
        "https://shop.test/list-1.txt",
        "https://shop.test/list-2.txt",
    ]
    assert urls((await read(some, await some.place("list-2.txt")))[0]) == [
        "https://shop.test/list-2.txt"
    ]
    assert urls((await read(some, await some.place("end")))[0]) == []


@pytest.mark.server("s3")
async def test_an_object_replaced_during_reading_is_read_again_in_the_next_round(
    tmp_path: Path, place: str
) -> None:
    put(place, "a.txt", lines(0, 100_000).encode())
    seeds = source(tmp_path, "seeds+" + place)
    found: list[Finding] = []
    cursor: bytes | None = None
    async for batch in seeds.read(None):
        if not found:
            put(place, "a.txt", lines(5, 6).encode())
        found += batch.findings
        cursor = batch.cursor or cursor
    assert len(found) < 100_000
    assert urls((await read(seeds, cursor))[0]) == expected(5, 6)
    put(place, "a.txt", lines(0, 100_000).encode())
    once = source(tmp_path, "seeds+" + place.replace("/in/?", "/in/a.txt?"))
    batches = once.read(None)
    await anext(batches)
    put(place, "a.txt", lines(5, 6).encode())
    # Without the error, a source without an interval would not be read again.
    with pytest.raises(SourceDown, match="was replaced while it was read"):
        [batch async for batch in batches]


@pytest.mark.server("s3")
async def test_a_missing_bucket_and_an_unreachable_server_have_different_errors(
    tmp_path: Path, place: str, server: Callable[[str], Handle]
) -> None:
    missing = place.replace("s3://penstock/", "s3://nosuch/")
    with pytest.raises(SourceDown, match="there is no bucket nosuch") as caught:
        await read(source(tmp_path, "seeds+" + missing))
    assert "the URL of the source" in caught.value.hint
    away = place.replace(str(server("s3").port), "9")
    with pytest.raises(SourceDown, match="cannot be reached"):
        await read(source(tmp_path, "seeds+" + away))


@pytest.mark.server("s3")
async def test_an_outage_inside_an_object_is_an_error_and_the_object_is_continued(
    tmp_path: Path, place: str, server: Callable[[str], Handle], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.sources.seeds.lines.CHUNK", 20_000)
    put(place, "a.txt", lines(0, 10_000).encode())
    put(place, "b.txt", lines(10_000, 10_001).encode())
    seeds = source(tmp_path, "seeds+" + place)
    batches = seeds.read(None)
    first = await anext(batches)
    with monkeypatch.context() as broken:
        broken.setattr(
            seeds._place,
            "_bucket",
            bucket_at(place.replace(str(server("s3").port), "9"), whole=True)[0],
        )
        with pytest.raises(SourceDown, match="cannot be reached"):
            [batch async for batch in batches]
    rest, _ = await read(seeds, first.cursor)
    assert urls([*first.findings, *rest]) == expected(0, 10_001)
