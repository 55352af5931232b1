"""The section `[limits]`: budgets of pages, bytes and links, and the crawler-trap rule."""

from __future__ import annotations

from typing import Annotated

from penstock.config import units
from penstock.config.section import Opt, Section


class LimitsConfig(Section, frozen=True, kw_only=True):
    pages_per_host: Annotated[
        int, Opt(units.counts(0), "pages of one host (0: unlimited)", example="10000")
    ] = 0
    pages_per_trace: Annotated[
        int,
        Opt(
            units.counts(0),
            "pages of one trace: a first page and everything that it leads to (0: unlimited)",
            example="1000",
        ),
    ] = 0
    pages_per_run: Annotated[
        int,
        Opt(units.counts(0), "pages of one `penstock run` command (0: unlimited)", example="50000"),
    ] = 0
    pages_per_day: Annotated[
        int, Opt(units.counts(0), "pages of one UTC day (0: unlimited)", example="100000")
    ] = 0
    bytes_per_day: Annotated[
        int,
        Opt(units.sizes(0), "bytes sent and received in one UTC day (0: unlimited)", "50GiB"),
    ] = 0
    pool_bytes_per_day: Annotated[
        int,
        Opt(units.sizes(0), "the same for each proxy pool (0: unlimited)", example="2GiB"),
    ] = 0
    links_per_page: Annotated[
        int, Opt(units.counts(0), "links that one page may lead to (0: unlimited)", example="500")
    ] = 0
    traps: Annotated[
        int,
        Opt(
            units.counts(0),
            "pages of one URL pattern with a date, in one trace (0 turns off the trap rule)",
        ),
    ] = 500
