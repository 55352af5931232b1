"""Passwords of the configuration, which errors, tracebacks and logs do not show.

Messages of Penstock mask each URL that they show. This is the second net: a library may quote any
part of a URL that it cannot parse.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from penstock.rules.masking import SHORTEST, hide, mask_text, passwords_in

_MAX_FILE = 1 << 20  # bytes of a configuration file that are searched
_passwords: set[str] = set()
_string = re.compile(r"\"([^\"\n]{1,4096})\"|'([^'\n]{1,4096})'")
_NAMED = re.compile(
    r"(?i)(?:pass|pwd|secret|token|credential|authorization|cookie|(?:api|access|private)[_-]?key)"
    r"[\w.-]{0,40}[\"']?\s{0,9}[=:]\s{0,9}[\"']?([^\"'\n]{1,4096})"
)
_PROXY = re.compile(r"[^\s:,/]+:[0-9]+:[^\s:,]+:([^\s,]+)")  # host:port:user:password


def hidden(text: str) -> str:
    """Return the text without the known passwords, and without those of URLs in it."""
    return mask_text(hide(text, _passwords))


def learn(values: Iterable[str]) -> None:
    """Remember the passwords of URLs, lists of proxies and `env:NAME`. Other values are ignored."""
    for value in values:
        for variable in re.findall(r"env:(\w+)", value):
            _add(os.environ.get(variable, ""))
        if ":" in value or "=" in value:
            for part in {value, *re.split(r"[,\n]", value)}:
                _passwords.update(passwords_in(part.strip()))
            _passwords.update(p for p in _PROXY.findall(value) if len(p) >= SHORTEST)


def learn_environment(environment: Mapping[str, str]) -> None:
    """Remember the passwords of Penstock's variables, and of the files that `…_FILE` names."""
    for name, value in environment.items():
        if name.startswith("PENSTOCK_"):
            learn([value])
            if re.search(r"PASSWORD|SECRET|TOKEN", name):
                _add(value)
            if name.endswith("_FILE"):
                learn(_lines_of(Path(value)))


def learn_file(file: Path | str) -> None:
    """Remember the passwords in a configuration or pipeline file, also if it has mistakes."""
    for line in _lines_of(Path(file)):
        learn(a or b for a, b in _string.findall(line))
        for value in _NAMED.findall(line):
            learn([value])
            _add(value)


def _add(value: str) -> None:
    """Remember a value that is a password itself, such as `Bearer TOKEN`."""
    _passwords.update(p for p in (value, *value.split()) if len(p) >= 2 * SHORTEST)


def _lines_of(file: Path) -> list[str]:
    try:
        with open(file, "rb") as f:
            return f.read(_MAX_FILE).decode("utf-8", "replace").splitlines()
    except (OSError, ValueError):
        return []
