"""User mistakes and unreadable stores: each is an error with a next step and an exit code.

There is never a traceback, and no accepted event is lost.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.e2e.harness import SHOP, Done, Project, Site, Target, product, wait_for

USAGE, CONFIGURATION, UNREACHABLE = 2, 3, 4


def refused(done: Done, code: int, *parts: str) -> None:
    assert done.code == code, done.output
    assert [line[:6] for line in done.err.splitlines()].count("Error:") == 1, done.output
    assert "Try:" in done.err, done.output
    assert len(done.err.strip().splitlines()) <= 6, done.output
    for part in parts:
        assert part in done.err, (part, done.output)


CONFIGURATIONS = {
    "not TOML": ("pace = [", ("penstock.toml", "TOML")),
    "unknown key": ("[pace]\nrat = 5\n", ("pace.rat", "did you mean pace.rate?")),
    "unknown section": ("[pase]\nrate = 5\n", ("pase",)),
    "a text for a number": ('[fetch]\nconcurrency = "many"\n', ("fetch.concurrency", "many")),
    "a number for a duration": ("lease = -1\n", ("lease",)),
    "a list for a text": ("pipeline = [1]\n", ("pipeline",)),
    "beyond its bounds": ("[extract]\nprocesses = 0\n", ("extract.processes",)),
    "values that do not agree": ("[breaker]\nalert = 0.5\ndead_share = 0.1\n", ("breaker.alert",)),
    "an adapter that is not installed": (
        '[broker]\nurl = "carrier-pigeon://home"\n',
        ("carrier-pigeon",),
    ),
}


@pytest.mark.parametrize("what", CONFIGURATIONS)
def test_an_invalid_configuration_is_an_error_that_names_the_option(
    project: Project, what: str
) -> None:
    text, parts = CONFIGURATIONS[what]
    project.write("penstock.toml", text)
    refused(project.penstock("run", "shop.py", "--until-idle"), CONFIGURATION, *parts)
    refused(project.penstock("push", "https://example.com/"), CONFIGURATION, *parts)
    assert (
        not (project.dir / ".penstock" / "penstock.db").exists()
        or what == "an adapter that is not installed"
    )


def test_an_error_names_the_invalid_variable_and_hides_a_password(project: Project) -> None:
    project.set(pace_rate="fast")
    refused(project.penstock("status"), CONFIGURATION, "PENSTOCK_PACE_RATE", "fast")
    del project.env["PENSTOCK_PACE_RATE"]
    project.set(pase_rate="1")
    refused(project.penstock("status"), CONFIGURATION, "PENSTOCK_PASE_RATE", "PENSTOCK_PACE_RATE")
    del project.env["PENSTOCK_PASE_RATE"]
    project.set(broker_url="nothing-we-know://user:hunter2@host")
    done = project.penstock("push", "https://example.com/")
    refused(done, CONFIGURATION)
    assert "hunter2" not in done.err + done.out


PIPELINES = {
    "a syntax error": ("def product(page:\n", ("shop.py:1", "SyntaxError")),
    "an exception": ("import penstock\nx = 1 / 0\n", ("shop.py:2", "ZeroDivisionError")),
    "a missing module": ("import nowhere_to_be_found\n", ("shop.py:1", "nowhere_to_be_found")),
    "it leaves": ("import sys\nsys.exit(0)\n", ("shop.py:2",)),
    "no Pipeline": ("x = 1\n", ("one Pipeline", "none")),
    "two Pipelines": (
        'from penstock import Pipeline\na = Pipeline("a")\nb = Pipeline("b")\n',
        ("one Pipeline", "a = ", "b = "),
    ),
    "a bad name": (
        'from penstock import Pipeline\na = Pipeline("no spaces please")\n',
        ("shop.py:2", "no spaces please"),
    ),
    "a wrong type": (SHOP.replace("version=1", 'version="one"'), ("shop.py", "version")),
    "a sink without a kind": (
        SHOP.replace("jsonl:products.jsonl", "products.jsonl"),
        ("sink", "products.jsonl"),
    ),
    "a sink nobody knows": (SHOP.replace("jsonl:products.jsonl", "parquet:products"), ("parquet",)),
    "two sinks on one file": (SHOP + 'shop.sink("jsonl:products.jsonl")\n', ("two sinks",)),
    "an async extractor": (
        SHOP.replace("def product", "async def product").replace("yield from page", "return; page"),
        ("shop.py", "async"),
    ),
    "a sink for nothing": (
        SHOP.replace('.jsonl")', '.jsonl", only="prodct")'),
        ("shop.py:15", "prodct", "did you mean product?"),
    ),
    "no sink": (SHOP.partition("shop.sink")[0], ("shop.py", "no sink", "pipeline.sink(")),
    "no extractor": (
        'from penstock import Pipeline\nshop = Pipeline("shop")\nshop.sink("jsonl:a")\n',
        ("shop.py", "no extractor"),
    ),
    "a hook for nothing": (
        SHOP + '@shop.on_change(extractor="produkt")\ndef tell(change): ...\n',
        ("produkt", "product"),
    ),
}


@pytest.mark.parametrize("what", PIPELINES)
def test_an_invalid_pipeline_file_is_refused_with_its_line_and_nothing_is_written(
    project: Project, what: str
) -> None:
    text, parts = PIPELINES[what]
    project.write("shop.py", text)
    refused(project.penstock("run", "shop.py", "--until-idle"), CONFIGURATION, *parts)
    refused(
        project.penstock("run", "shop.py", "--until-idle", "--workers", "2"), CONFIGURATION, *parts
    )
    assert not (project.dir / "products.jsonl").exists()


@pytest.mark.parametrize("what", ["a sink for nothing", "no sink", "no extractor"])
def test_a_pipeline_that_would_drop_records_fails_every_check(project: Project, what: str) -> None:
    text, parts = PIPELINES[what]
    project.write("shop.py", text)
    refused(project.penstock("config", "check", "shop.py"), CONFIGURATION, *parts)
    refused(project.penstock("serve", "shop.py"), CONFIGURATION, *parts)
    found = json.loads(project.penstock("doctor", "shop.py", "--json").out)
    (check,) = [each for each in found["checks"] if each["check"] == "pipeline"]
    assert check["result"] == "fail"
    assert all(part in check["found"] + check["fix"] for part in parts)


def test_a_record_that_no_sink_takes_makes_its_event_dead(project: Project, site: Site) -> None:
    more = """
@shop.extract(match="*/list/*")
def listing(page):
    yield from page.follow("a")
    if "bad" in page.url:
        yield {"title": "lost"}
"""
    project.write("shop.py", SHOP.replace('.jsonl")', '.jsonl", only="product")') + more)
    site.serve("/p/1", product(1))
    project.push(site.serve("/list/good", '<a href="/p/1">one</a>'))
    project.run()
    assert [row["sku"] for row in project.rows()] == ["S-1"]
    project.push(site.serve("/list/bad", '<a href="/p/1">one</a>'))
    project.run(expect=1)
    reason = project.dead_letters()["bad"]["reason"]
    assert "no sink or hook takes records of extractor 'listing'" in reason


def test_an_invalid_declarative_pipeline_is_refused(project: Project) -> None:
    project.write(
        "shop.toml",
        (
            '[pipeline]\nname = "shop"\n[[extract]]\nmatch = "*"\n[extract.fields]\nprice = "p["\n'
            '[[sink]]\nurl = "jsonl:x.jsonl"\n'
        ),
    )
    refused(project.penstock("run", "shop.toml", "--until-idle"), CONFIGURATION, "shop.toml", "p[")
    project.write(
        "shop.toml",
        (
            '[pipeline]\nname = "shop"\n[[extract]]\nversion = "one"\n[extract.fields]\n'
            'title = "h1::text"\n'
        ),
    )
    refused(
        project.penstock("run", "shop.toml", "--until-idle"), CONFIGURATION, "shop.toml", "version"
    )


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("run",), USAGE, ("no pipeline given",)),
        (("run", "nowhere.py"), CONFIGURATION, ("nowhere.py",)),
        (("run", "shop.py", "--role", "cook"), USAGE, ("cook", "fetch")),
        (("run", "shop.py", "--workers", "0"), USAGE, ("--workers",)),
        (("run", "shop.py", "--workers", "some"), USAGE, ("workers",)),
        (("push",), USAGE, ("no URL given",)),
        (("push", "--priority", "urgent", "https://example.com/"), USAGE, ("urgent",)),
        # An empty variable in a script. Without the check, the URL would be fetched directly.
        (("push", "--pool", "", "https://example.com/"), USAGE, ("pool ''", "not a text")),
        (("puhs",), USAGE, ("did you mean penstock push?",)),
        (("status", "--no-such-option"), USAGE, ("no-such-option",)),
        (("status",), UNREACHABLE, ("penstock push",)),
        (("trace", "last"), UNREACHABLE, ("penstock push",)),
        (("dlq", "retry"), USAGE, ("--all",)),
    ],
)
def test_an_invalid_command_line_is_an_error_that_names_the_mistake(
    project: Project, args: tuple[str, ...], code: int, words: tuple[str, ...]
) -> None:
    refused(project.penstock(*args), code, *words)
    assert not (project.dir / ".penstock" / "penstock.db").exists()


def test_invalid_urls_are_refused_by_line_and_the_valid_url_is_accepted(
    project: Project, site: Site
) -> None:
    url = site.serve("/p/1", product(1))
    done = project.penstock(
        "push",
        "-",
        input=f"{url}\n# a comment\n\nnot a url\nftp://example.com/x\njavascript:alert(1)\n",
    )
    assert done.code == 1, done.output
    for line in ("stdin:4", "stdin:5", "stdin:6"):
        assert line in done.err, done.output
    assert project.total()["accepted"] == 1
    project.run()
    assert len(project.rows()) == 1


# -- the store -------------------------------------------------------------------------------------


def database(project: Project) -> Path:
    return project.dir / ".penstock" / "penstock.db"


def all_refuse(project: Project, *parts: str, code: int = UNREACHABLE) -> None:
    for args in (("run", "shop.py", "--until-idle"), ("push", "https://example.com/"), ("status",)):
        refused(project.penstock(*args), code, *parts)


def test_a_store_of_a_newer_release_is_refused_and_not_changed(
    project: Project, site: Site
) -> None:
    project.push(site.serve("/p/1", product(1)))
    with sqlite3.connect(database(project)) as c:
        c.execute("UPDATE part SET version=version+1 WHERE name='store'")
    c.close()
    before = sorted((p.name, p.read_bytes()) for p in database(project).parent.glob("penstock.db"))
    all_refuse(project, "newer", code=CONFIGURATION)
    assert (
        sorted((p.name, p.read_bytes()) for p in database(project).parent.glob("penstock.db"))
        == before
    )
    with sqlite3.connect(database(project)) as c:
        c.execute("UPDATE part SET version=version-1 WHERE name='store'")
    c.close()
    project.run()
    assert len(project.rows()) == 1, "the accepted event is still there"


@pytest.mark.parametrize("what", ["no database", "another's database", "a directory", "damaged"])
def test_a_store_that_cannot_be_read_is_an_error_with_a_next_step(
    project: Project, target: Callable[..., Target], what: str
) -> None:
    path = database(project)
    path.parent.mkdir()
    if what == "no database":
        path.write_bytes(b"these are not the bytes of a database\n" * 500)
    elif what == "another's database":
        with sqlite3.connect(path) as c:
            c.execute("CREATE TABLE theirs(x)")
        c.close()
    elif what == "a directory":
        path.mkdir()
    else:
        web = target(pages=500)
        project.push(*web.urls)
        for rest in path.parent.glob("penstock.db-*"):
            rest.unlink()
        content = bytearray(path.read_bytes())
        content[100:8192] = b"\xa5" * 8092
        path.write_bytes(content)
    before = path.read_bytes() if path.is_file() else b""
    all_refuse(project, str(path) if what != "damaged" else "")
    assert (path.read_bytes() if path.is_file() else b"") == before, (
        "an unreadable file was changed"
    )


def test_a_damaged_store_is_reported_at_the_start_after_a_kill_and_by_doctor(
    project: Project, target: Callable[..., Target]
) -> None:
    web = target(pages=2000, delay=0.05)
    project.push(*web.urls)
    running = project.start("run", "shop.py")
    wait_for(lambda: web.lines() > 200, f"200 requests: {running.output}")
    running.kill()
    project.nothing_runs()
    project.status()  # closing the last connection checkpoints the WAL
    path = database(project)
    with sqlite3.connect(path) as c:
        c.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    c.close()
    copy = project.dir / "copy.db"
    shutil.copy(path, copy)
    content = bytearray(path.read_bytes())
    page = 4096
    for number in range(20, len(content) // page, 7):  # overwrite the start of every seventh page
        content[number * page : number * page + 200] = b"\x5a" * 200
    path.write_bytes(content)
    refused(project.penstock("run", "shop.py", "--until-idle"), UNREACHABLE, "damaged")
    checked = project.penstock("doctor")
    assert checked.code in (4, 5), checked.output
    for rest in path.parent.glob("penstock.db-*"):
        rest.unlink()
    shutil.copy(copy, path)
    project.run()
    assert project.total()["success"] == 2000
    assert len({row["sku"] for row in project.rows()}) == len(project.rows()) == 2000
