"""Limits and retry policies of the workers of one process, from its configuration."""

from __future__ import annotations

import msgspec

from penstock.config.schema import Config
from penstock.engine.settings import Options, Stage
from penstock.model import ErrorClass
from penstock.rules import retry


def worker_options(config: Config, first: Stage, message_max: int | None) -> Options:
    """Return the limits of a worker whose first stage is `first`.

    `message_max` is the size of the largest message on `pages` in bytes, None for no limit.
    """
    c = config
    limited = c.pace.rate != float("inf")
    options = Options(
        concurrency=c.fetch.concurrency,
        window=c.fetch.prefetch,
        byte_budget=c.fetch.bytes,
        deadline=c.fetch.deadline,
        extract_group=c.extract.group,
        lease=c.lease,
        grace=c.grace,
        per_key=max(1, int(c.pace.rate * 2)) if limited else None,
        max_age=c.retry.max_age,
        inline_max=c.pages.inline_max,
        message_max=message_max,
    )
    if first != "extract":
        return options
    # Messages that contain pages use memory from the moment they are received. So fewer of them fit
    # into the prefetch window.
    window = min(options.window, c.fetch.bytes // max(1, c.pages.inline_max))
    return msgspec.structs.replace(options, window=window)


def retry_policies(config: Config) -> dict[tuple[str, ErrorClass], retry.Policy]:
    r = config.retry
    return retry.table(base=r.base, cap=r.max, budget=r.budget, next_pool=r.next_pool)
