"""`penstock init`: a pipeline that runs as it stands, and a penstock.toml in which every option is written down, commented out."""

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
"""What to read from which pages, and where it goes. Run it: penstock run {name}.py"""

from penstock import Page, Pipeline

{variable} = Pipeline("{name}")


@{variable}.extract(match="*/product/*", version=1, key="sku")  # glob on the URL; no match: every page; no key: the page's URL
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
# What to read from which pages, and where it goes. Run it: penstock run {name}.toml

[pipeline]
name = "{name}"

[[extract]]
match = "*/product/*"  # glob on the URL; no match: every page
version = 1
key = "sku"  # no key: the page's URL
follow = ["a.related"]

[extract.fields]
sku = "[data-sku]::attr(data-sku)"
title = "h1::text"
price = {{ css = [".price::text", "[data-price]::attr(data-price)"], as = "decimal" }}

[[sink]]
url = "jsonl:products.jsonl"
"""


def init(
    name: Annotated[str, Parameter(help="what the pipeline is called")] = "shop",
    /,
    *,
    toml: Annotated[
        bool, Parameter(help="a declarative pipeline instead of a Python file")
    ] = False,
    directory: Annotated[
        Path, Parameter(name=["--directory", "-C"], help="where to (else here)")
    ] = Path(),
) -> int:
    """Write NAME.py (or NAME.toml) and a commented penstock.toml. Nothing that exists is touched."""
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]{0,40}", name) or name == "penstock":
        raise UsageError(
            f"{name!r} is no name for a pipeline",
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
            f"{file} is there already", hint="penstock init ANOTHER-NAME, or move it away"
        ) from None
    say(styled("wrote ", "dim"), str(file))
    settings = directory / "penstock.toml"
    try:
        with open(settings, "x", encoding="utf-8") as f:
            f.write(settings_text(file.name))
        say(styled("wrote ", "dim"), str(settings))
    except FileExistsError:
        say(styled("kept  ", "dim"), str(settings), styled("  as it was", "dim"))
    say("")
    say(
        "next: ",
        styled("penstock push https://example.com/product/1", "cyan"),
        styled("   have a URL scraped", "dim"),
    )
    say(
        "      ",
        styled(f"penstock run {file.name} --until-idle", "cyan"),
        styled("   do it", "dim"),
    )
    say("      ", styled("penstock status", "cyan"), styled("   see what became of it", "dim"))
    return 0


def settings_text(pipeline: str) -> str:
    """Every option once, with its default; only the pipeline is set."""
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
        "# Penstock's settings. Every option is here with its default; take the # away to set it.",
        "# The command line (-o pace.rate=5) and the environment (PENSTOCK_PACE_RATE=5) go before this file.",
        "# penstock config show --origin tells what holds now.",
        "",
        f'pipeline = "{pipeline}"  # what `penstock run` takes without an argument',
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
