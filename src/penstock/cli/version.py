"""`penstock version`: versions of Penstock and of the libraries it uses."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed

from penstock import __version__
from penstock.cli.options import Json
from penstock.cli.output import (
    print_json,
    say,
    styled,
)

PARTS = (
    "apsw",
    "pycurl",
    "turbohtml",
    "ada-url",
    "msgspec",
    "uvloop",
    "zstandard",
    "cyclopts",
    "rich",
)


def version(*, json: Json = False) -> None:
    """Show the versions of Penstock and of the libraries it uses, for bug reports."""
    from penstock.runtime.stores import sqlite_version

    parts = {"python": platform.python_version(), "sqlite": ".".join(map(str, sqlite_version()))}
    for name in PARTS:
        try:
            parts[name] = installed(name)
        except PackageNotFoundError:
            parts[name] = ""
    if json:
        print_json({"penstock": __version__, **parts, "platform": platform.platform()})
        return
    say(f"penstock {__version__}")
    for name, number in parts.items():
        say(styled(f"  {name:<10}", "dim"), number or "not installed")
