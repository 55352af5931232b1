"""`penstock demo`: the options. See `penstock.demo` for the demo itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from penstock.errors import UsageError


def demo(
    *,
    seconds: Annotated[
        float | None, Parameter(help="stop after this many seconds (else Ctrl-C)")
    ] = None,
    break_: Annotated[
        bool,
        Parameter(
            name="--break",
            help="redesign the shop during the run, to show selectors that match nothing",
        ),
    ] = False,
    out: Annotated[
        Path | None, Parameter(help="directory for state and results (else ./penstock-demo)")
    ] = None,
    plain: Annotated[
        bool,
        Parameter(help="print lines of text instead of a live display (as without a terminal)"),
    ] = False,
) -> int:
    """Scrape a shop on this machine: prices change, one page refuses requests, one is broken."""
    if seconds is not None and not 0 < seconds <= 86400:
        raise UsageError(
            f"--seconds {seconds:g} is not above 0 and at most 86400", hint="--seconds 20"
        )
    from penstock.demo.command import run

    return run(seconds, break_, out, plain)
