"""`penstock demo`: the options; the demo itself is in penstock.demo."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from penstock.errors import UsageError


def demo(
    *,
    seconds: Annotated[
        float | None, Parameter(help="end by itself after so long (else Ctrl-C)")
    ] = None,
    break_: Annotated[
        bool,
        Parameter(
            name="--break",
            help="redesign the shop on the way, to see what selectors that find nothing look like",
        ),
    ] = False,
    out: Annotated[
        Path | None, Parameter(help="where state and results go (else ./penstock-demo)")
    ] = None,
    plain: Annotated[
        bool, Parameter(help="lines of text instead of a live display, as without a terminal")
    ] = False,
) -> int:
    """A shop on this machine, scraped live: prices move, one page turns us away, one is broken."""
    if seconds is not None and not 0 < seconds <= 86400:
        raise UsageError(f"--seconds {seconds:g} is no length for a demo", hint="--seconds 20")
    from penstock.demo.command import run

    return run(seconds, break_, out, plain)
