"""Exit codes and messages of errors, and the format of figures, without processes and stores."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli import main as cli
from penstock.cli import output
from penstock.cli.push import MAX_LINE, Inputs, _lines
from penstock.errors import ConfigError, StoreUnavailable, UsageError
from penstock.operate import figures


@pytest.mark.parametrize(
    ("raised", "code", "expected"),
    [
        (UsageError("no", hint="yes"), 2, "Error: no\nTry:   yes\n"),
        (ConfigError("pace.rate: no"), 3, "Error: pace.rate: no\n"),
        (
            StoreUnavailable("disk full", hint="free some"),
            4,
            "Error: disk full\nTry:   free some\n",
        ),
        (
            FileNotFoundError(2, "No such file or directory", "x.txt"),
            4,
            "Error: x.txt: No such file or directory\n",
        ),
        (KeyboardInterrupt(), 130, ""),
        (BrokenPipeError(), 141, ""),
    ],
)
def test_every_error_has_its_exit_code_and_message(
    raised: BaseException,
    code: int,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def fail(tokens: list[str]) -> int:
        raise raised

    monkeypatch.setattr(cli, "_dispatch", fail)
    monkeypatch.setattr(os, "dup2", lambda *_: None)  # pytest owns stdout
    assert cli.main(["status"]) == code
    assert capfd.readouterr().err == expected


def test_a_bug_is_one_line_and_has_a_traceback_only_in_debug_mode(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def bug(tokens: list[str]) -> int:
        raise KeyError("gone")

    monkeypatch.setattr(cli, "_dispatch", bug)
    assert cli.main(["status"]) == 1
    expected = capsys.readouterr().err
    assert expected.startswith("Error: unexpected error: KeyError: 'gone' (unit/test_cli_main.py:")
    assert "Traceback" not in expected
    assert "PENSTOCK_DEBUG=1" in expected
    monkeypatch.setenv("PENSTOCK_DEBUG", "1")
    assert cli.main(["status"]) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given_", "becomes"),
    [
        (["--state", "x", "status"], ["status", "--state", "x"]),
        (
            ["--state=x", "-o", "a=1", "dlq", "ls", "--json"],
            ["dlq", "ls", "--json", "--state=x", "-o", "a=1"],
        ),
        (["--debug", "push", "--", "-x"], ["push", "--debug", "--", "-x"]),
        (["status", "--state", "x"], ["status", "--state", "x"]),
        (["--state", "x"], ["--state", "x"]),
        ([], []),
    ],
)
def test_common_options_may_be_written_before_the_command(
    given_: list[str], becomes: list[str]
) -> None:
    assert cli._common_last(given_) == becomes


def test_every_command_of_the_table_exists() -> None:
    import importlib

    for _, where, _, text in cli.COMMANDS:
        module, _, name = where.partition(":")
        assert hasattr(importlib.import_module(module), name)
        assert text[0].islower()
        assert not text.endswith(".")


@given(st.text())
def test_printed_text_has_no_control_characters_and_can_be_encoded(text: str) -> None:
    shown = output.plain(text)
    assert not any(
        (ord(c) < 32 and c not in "\t\n") or 127 <= ord(c) < 160 or 0x202A <= ord(c) <= 0x202E
        for c in shown
    )
    shown.encode()


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.0, "0 ms"),
        (0.0421, "42 ms"),
        (1.26, "1.3 s"),
        (42.4, "42 s"),
        (60, "1 min"),
        (95, "1 min 35 s"),
        (3599, "59 min"),
        (3600, "1 h"),
        (5400, "1 h 30 min"),
        (86400 * 2.5, "2.5 d"),
        (-2, "-2.0 s"),
    ],
)
def test_durations_are_written_with_readable_units(seconds: float, expected: str) -> None:
    assert figures.lasting(seconds) == expected


@pytest.mark.parametrize(
    ("n", "expected"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (200 << 10, "200 KiB"),
        (5 << 30, "5.0 GiB"),
        (3 << 40, "3072 GiB"),
    ],
)
def test_sizes_are_written_in_binary_units(n: int, expected: str) -> None:
    assert figures.size(n) == expected


def test_an_oversized_line_is_cut_and_counts_as_one() -> None:
    stream = io.BytesIO(b"http://a.example/1\n" + b"h" * (5 * MAX_LINE) + b"\nhttp://a.example/2")
    found = list(_lines("f", stream))
    assert [where for where, _ in found] == ["f:1", "f:2", "f:3"]
    assert max(len(text) for _, text in found) <= MAX_LINE


def test_at_most_1000_refused_inputs_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "urls"
    file.write_text("no url\n" * 3000 + "http://a.example/\n")
    inputs = Inputs((), [str(file)], lambda payload: pytest.fail("there is no object"))
    assert list(inputs) == ["http://a.example/"]
    assert (inputs.refused_count, len(inputs.refused), inputs.read) == (3000, 1000, 3001)
    assert sys.getsizeof(inputs.refused[0].input) < 1000
