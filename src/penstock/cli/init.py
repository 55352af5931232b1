"""`penstock init`: writes a working pipeline and a penstock.toml with all options commented out."""

from __future__ import annotations

import keyword
import re
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from penstock.cli.output import (
    say,
    styled,
)
from penstock.errors import UsageError

PYTHON = '''\
"""Reads products from pages and writes them to a file. Run it: penstock run {name}.py"""

from penstock import Page, Pipeline

{variable} = Pipeline("{name}")


# `match` is a glob on the URL. Without it, every page matches.
# `key` names the field that identifies a record. Without it, the page's URL does.
@{variable}.extract(match="*/product/*", version=1, key="sku")
def product(page: Page):
    yield {{
        "sku": page.css("[data-sku]::attr(data-sku)").get(),
        "title": page.css("h1::text").get(),
        "price": page.css(".price::text").get(),
    }}
    yield from page.follow("a.related")


{variable}.sink("jsonl:products.jsonl")
'''
TOML = """\
# Reads products from pages and writes them to a file. Run it: penstock run {name}.toml

[pipeline]
name = "{name}"

[[extract]]
match = "*/product/*"  # glob on the URL. Without it, every page matches.
version = 1
key = "sku"  # the field that identifies a record. Without it, the page's URL does.
follow = ["a.related"]

[extract.fields]
sku = "[data-sku]::attr(data-sku)"
title = "h1::text"
price = {{ css = [".price::text", "[data-price]::attr(data-price)"], as = "decimal" }}

[[sink]]
url = "jsonl:products.jsonl"
"""


def init(
    name: Annotated[str, Parameter(help="name of the pipeline")] = "shop",
    /,
    *,
    toml: Annotated[
        bool, Parameter(help="write a declarative pipeline instead of a Python file")
    ] = False,
    directory: Annotated[
        Path,
        Parameter(name=["--directory", "-C"], help="directory to write to (else the current one)"),
    ] = Path(),
) -> None:
    """Write NAME.py (or NAME.toml) and a commented penstock.toml. Existing files are kept."""
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]{0,40}", name) or name == "penstock":
        raise UsageError(
            f"{name!r} is not a valid pipeline name",
            hint="letters, digits, _ and -: penstock init shop",
        )
    file = directory / f"{name}.{'toml' if toml else 'py'}"
    variable = name.replace("-", "_").lower()
    if keyword.iskeyword(variable) or variable in ("page", "product"):
        variable += "_pipeline"
    directory.mkdir(parents=True, exist_ok=True)
    try:
        with open(file, "x", encoding="utf-8") as f:
            f.write((TOML if toml else PYTHON).format(name=name, variable=variable))
    except FileExistsError:
        raise UsageError(
            f"{file} exists already", hint="penstock init ANOTHER-NAME, or move the file"
        ) from None
    say(styled("wrote ", "dim"), str(file))
    settings = directory / "penstock.toml"
    try:
        with open(settings, "x", encoding="utf-8") as f:
            f.write(settings_text(file.name))
        say(styled("wrote ", "dim"), str(settings))
    except FileExistsError:
        say(styled("kept  ", "dim"), str(settings), styled("  (exists already)", "dim"))
    say("")
    say(
        "next: ",
        styled("penstock push https://example.com/product/1", "cyan"),
        styled("   accept a URL", "dim"),
    )
    say(
        "      ",
        styled(f"penstock run {file.name} --until-idle", "cyan"),
        styled("   scrape it", "dim"),
    )
    say("      ", styled("penstock status", "cyan"), styled("   see the result", "dim"))


def settings_text(pipeline: str) -> str:
    """Return a penstock.toml with every option at its default. Only the pipeline is set."""
    import msgspec

    from penstock.config.schema import OPTIONS, Option

    def line(option: Option) -> str:
        # A derived default is a sentence, not a value.
        value = (
            option.example
            if option.default is msgspec.NODEFAULT or not option.default_text
            else option.default_text
        )
        key = option.path.rpartition(".")[2]
        return f"# {key} = " + (f'"{value}"' if option.kind.quoted else value)

    lines = [
        "# Penstock's settings. Every option is here with its default. Remove the # to set it.",
        "# The command line (-o pace.rate=5) and the environment (PENSTOCK_PACE_RATE=5) override",
        "# this file. `penstock config show --origin` shows the current values.",
        "",
        f'pipeline = "{pipeline}"  # used by `penstock run` without an argument',
    ]
    section = ""
    for option in OPTIONS:
        if option.path == "pipeline":
            continue
        of = option.path.rpartition(".")[0]
        if of != section:
            lines += ["", f"[{of}]"]
            section = of
        lines.append(f"{line(option)}  # {option.help}")
    return "\n".join(lines) + "\n"
