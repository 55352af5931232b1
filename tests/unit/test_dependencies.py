"""Dependencies of an extraction: event data, headers, the address, and the pipeline's own files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.authoring.load import load
from penstock.authoring.own_files import hash_files
from penstock.authoring.page import Page
from penstock.extraction.run import run
from penstock.model import Event
from penstock.rules.dependencies import (
    are_unchanged,
    dependencies,
    labels_of,
    read_other_data,
    reads_data,
)

URL, OTHER = "https://shop.test/p/1", "https://shop.test/p/2"
PIPELINE = """
from penstock import Page, Pipeline

shop = Pipeline("shop")

@shop.extract(key="sku")
def product(page: Page):
    yield {"sku": "A-1", "value": %s}

shop.sink("jsonl:products.jsonl")
"""


def text(data: dict[str, Any] | None = None, *, url: str = URL, headers: bool = False) -> str:
    return dependencies("product@1#abc", url=url, requested_url=URL, data=data, headers=headers)


@pytest.mark.parametrize(
    ("stored", "data", "url", "unchanged"),
    [
        (text(), {}, URL, True),
        (text(), {"price": 10}, URL, True),
        (text({"price": 10}), {"price": 10}, URL, True),
        (text({"price": 10}), {"price": 12}, URL, False),
        (text({}), {}, URL, True),
        (text({}), {"price": 12}, URL, False),
        (text(url=OTHER), {}, OTHER, True),
        (text(url=OTHER), {}, URL, False),
        (text(), {}, OTHER, False),
        (text(headers=True), {}, URL, False),
        ("product@1", {}, URL, False),  # of release 0.1.0
        ("", {}, URL, False),
        ("product@2#abc", {}, URL, False),
        ("product@1#def", {}, URL, False),
    ],
)
def test_an_extraction_is_repeated_unless_all_it_has_read_is_unchanged(
    stored: str, data: dict[str, Any], url: str, unchanged: bool
) -> None:
    found = are_unchanged(stored, "product@1#abc", url=url, requested_url=URL, data=data)
    assert found is unchanged


def test_the_order_of_keys_in_the_data_does_not_matter() -> None:
    assert text({"a": 1, "b": {"c": 2, "d": 3}}) == text({"b": {"d": 3, "c": 2}, "a": 1})


def test_labels_and_read_data_are_parsed_from_the_stored_text() -> None:
    stored = text({"price": 10}, headers=True)
    assert labels_of(stored) == labels_of("product@1") == "product@1"
    assert reads_data(stored)
    assert not reads_data(text())
    assert read_other_data(stored, {"price": 12})
    assert not read_other_data(stored, {"price": 10})
    assert not read_other_data(text(), {"price": 12})


@pytest.mark.parametrize(
    ("value", "event", "headers"),
    [
        ("1", False, False),
        ("page.text", False, False),
        ('page.css("p").get()', False, False),
        ("page.event.data", True, False),
        ('page.headers["content-type"]', False, True),
    ],
)
def test_an_extraction_reports_whether_it_read_the_event_or_headers(
    tmp_path: Path, value: str, event: bool, headers: bool
) -> None:
    file = tmp_path / "shop.py"
    file.write_text(PIPELINE % value)
    page = Page(
        URL,
        b"<p>1",
        headers={"Content-Type": "text/html"},
        event=Event(id="e", url=URL, key="shop.test", data={"price": 1}),
    )
    result = run(load(file), page)
    assert (result.error, result.read_event, result.read_headers) == ("", event, headers)


# -- the pipeline's own files ----------------------------------------------------------------------


def project(folder: Path, **more: str) -> Path:
    """Write a pipeline whose modules import each other in all ways. Return its file."""
    files = {
        "shop.py": "import prices\nfrom tools import text\n\ndef f():\n    import late\n",
        "prices.py": "import json\n",
        "late.py": "x = 1\n",
        "tools/__init__.py": "",
        "tools/text.py": "from . import deep\nfrom .deeper.most import value\n",
        "tools/deep.py": "",
        "tools/deeper/most.py": "from ...tools import deep\nvalue = 1\n",
        "unused.py": "x = 1\n",
    } | {name.replace("__", "/") + ".py": body for name, body in more.items()}
    for name, body in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(body)
    return folder / "shop.py"


def hash_of(file: Path) -> str:
    return hash_files(file, file.read_bytes())


@pytest.mark.parametrize(
    "changed", ["shop", "prices", "late", "tools__text", "tools__deep", "tools__deeper__most"]
)
def test_a_change_of_the_file_or_of_a_module_it_imports_changes_the_hash(
    tmp_path: Path, changed: str
) -> None:
    before = hash_of(project(tmp_path))
    path = tmp_path / (changed.replace("__", "/") + ".py")
    path.write_text(path.read_text() + "# changed\n")
    assert hash_of(tmp_path / "shop.py") != before


def test_other_files_and_the_folders_place_do_not_change_the_hash(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    before = hash_of(project(here))
    assert hash_of(project(there, unused="x = 2\n")) == before


@pytest.mark.parametrize(
    "source",
    [b"def", b"\0", b"from .... import x", b"import " + b"a." * 3000 + b"b", b"(" * 5000],
)
def test_a_file_that_is_not_python_still_has_a_hash(tmp_path: Path, source: bytes) -> None:
    assert hash_files(tmp_path / "shop.py", source)


def test_a_toml_pipeline_has_the_hash_of_its_bytes(tmp_path: Path) -> None:
    file = tmp_path / "shop.toml"
    assert hash_files(file, b"a = 1") != hash_files(file, b"a = 2")
