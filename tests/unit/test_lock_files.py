"""The lock files of `./dev`: they match pyproject.toml, agree with each other, and have hashes."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from tools.locks import ROOT, asked, pins, read_project, stale

LOCKS = sorted((ROOT / "locks").rglob("*.txt"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT / "locks"))


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "locks", tmp_path / "locks")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def change(root: Path, old: str, new: str) -> None:
    path = root / "pyproject.toml"
    text = path.read_text("utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), "utf-8")


def test_the_lock_files_match_pyproject() -> None:
    assert stale() == [], "run ./dev lock"


def test_a_new_dependency_makes_the_runtime_lock_stale(copy: Path) -> None:
    change(copy, "dependencies = [", 'dependencies = [\n  "left-pad>=1",')
    assert stale(copy) == ["runtime.txt"]


def test_a_changed_range_makes_the_locks_that_include_it_stale(copy: Path) -> None:
    change(copy, "aiormq>=7.2", "aiormq>=7.3")
    assert stale(copy) == ["extras/dev.txt", "extras/rabbitmq.txt"]


def test_an_extra_without_a_lock_and_a_lock_without_an_extra_are_stale(copy: Path) -> None:
    change(copy, "browser = [", "chrome = [")
    assert stale(copy) == ["extras/browser.txt", "extras/chrome.txt"]


@pytest.mark.parametrize("path", LOCKS, ids=name_of)
def test_every_requirement_has_a_version_in_its_range(path: Path) -> None:
    text = path.read_text("utf-8")
    versions: dict[str, set[str]] = {}
    for name, version, _ in pins(text):
        versions.setdefault(name, set()).add(version)
    for requirement in map(Requirement, asked(read_project())[name_of(path)]):
        found = versions[requirement.name]
        assert all(requirement.specifier.contains(version) for version in found), requirement


@pytest.mark.parametrize("path", LOCKS, ids=name_of)
def test_every_package_has_hashes_and_no_line_names_an_index(path: Path) -> None:
    text = path.read_text("utf-8")
    entries = re.split(r"^(?=[\w])", text.partition("\n\n")[2], flags=re.MULTILINE)[1:]
    assert len(entries) == len(pins(text)) > 0
    for entry in entries:
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", entry), entry
    assert "://" not in text
    assert not re.search(r"^\s*-(?!-hash)", text, re.MULTILINE)


def test_all_lock_files_have_the_same_version_of_a_package() -> None:
    seen: dict[tuple[str, str], str] = {}
    forks = {
        name
        for path in LOCKS
        for name, version, _ in pins(path.read_text("utf-8"))
        if seen.setdefault((name, name_of(path)), version) != version
    }
    everywhere: dict[str, str] = {}
    for path in LOCKS:
        for name, version, _ in pins(path.read_text("utf-8")):
            if name not in forks:  # two versions in one file, for two Pythons
                assert everywhere.setdefault(name, version) == version, f"{name} in {path}"


def test_the_lock_of_an_extra_lists_the_extras_that_it_includes() -> None:
    lines = (ROOT / "locks/extras/dev.txt").read_text("utf-8").splitlines()
    assert lines[1] == "# includes: kafka postgres rabbitmq redis s3 sqs"  # ./dev reads this line
    assert "# asked: confluent-kafka>=2.10" in lines
