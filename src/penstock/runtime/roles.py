"""Roles of a worker process, and the chains of stages that they form."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from penstock.authoring.pipeline import Pipeline, SourceSpec
from penstock.engine.worker import Stage
from penstock.errors import ConfigError
from penstock.ports import Source

ROLES = ("source", "serve", "fetch", "extract", "sink")
STAGES: tuple[Stage, ...] = ("fetch", "extract", "sink")


def chains(roles: frozenset[str]) -> list[tuple[Stage, Stage]]:
    """Return (first, last) stage for each stage among the roles.

    Work from the topic of the first stage runs through all following stages up to the last one
    without a gap. The topics of later stages are also read, because processes with fewer roles may
    have left work there.
    """
    return [
        (first, [*takewhile(roles.__contains__, STAGES[i:])][-1])
        for i, first in enumerate(STAGES)
        if first in roles
    ]


def check_roles(
    pipeline: Pipeline, sources: Sequence[tuple[Source, SourceSpec]], roles: frozenset[str]
) -> None:
    """Raise ConfigError if the roles have no work in this pipeline.

    Otherwise the user would notice the mistake only when data is missing.
    """
    if roles.intersection(STAGES) or any(
        ("serve" if source.served else "source") in roles for source, _ in sources
    ):
        return
    problem = f"nothing to do for the role {', '.join(sorted(roles))}: the pipeline has no source"
    if not pipeline.sources:
        raise ConfigError(
            problem,
            hint="declare one, give it fetch, extract or sink, or leave --role out for all of them",
        )
    if "serve" in roles:
        raise ConfigError(
            f"{problem} that is served", hint='declare one: shop.source("webhook:shop")'
        )
    raise ConfigError(f"{problem} that is read", hint="the role serve is for webhooks")
