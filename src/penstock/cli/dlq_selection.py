"""Selection of dead letters for `penstock dlq`, by ids or filters, and the work on each of them."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from penstock.cli import find
from penstock.cli.options import ask
from penstock.errors import UsageError
from penstock.ports.reports import Filter, Letter

if TYPE_CHECKING:
    from penstock.ports import Transaction
    from penstock.runtime.stores import Stores

BATCH = 500


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Filters:
    """Options of all commands that select dead letters."""

    reason: Annotated[str | None, Parameter(help="only where the reason contains this text")] = None
    host: Annotated[str | None, Parameter(help="only of this host")] = None
    class_: Annotated[
        str | None,
        Parameter(
            name="--class",
            help="only of this class: throttled, transient, blocked, permanent, not_found, poison, "
            "ours",
        ),
    ] = None
    stage: Annotated[
        str | None, Parameter(help="only from this stage: intake, fetch, extract, sink")
    ] = None
    fingerprint: Annotated[
        str | None, Parameter(help="only of this cause in `dlq ls` (or a prefix of it)")
    ] = None

    def filter(self) -> Filter:
        return Filter(
            reason=self.reason,
            host=self.host,
            error_class=self.class_,
            stage=self.stage,
            fingerprint=self.fingerprint,
        )


NO_FILTERS = Filters()


def checked_filter(ids: tuple[str, ...], all: bool, filters: Filters, verb: str) -> Filter:
    """Return the filter. Raise UsageError if ids, filters and --all are missing or combined."""
    ways = bool(ids) + all + (filters != NO_FILTERS)
    if ways == 0:
        raise UsageError(
            f"no dead letters selected to {verb}",
            hint=f"penstock dlq {verb} ID, or --fingerprint, --reason, --host, --class, --stage, "
            "or --all",
        )
    if ids and ways > 1:
        raise UsageError("ids and filters cannot be combined", hint="use ids or filters")
    return filters.filter()


def letter_for(stores: Stores, tx: Transaction, text: str) -> Letter:
    """Return the dead letter named by a URL, an event id or a unique prefix of it."""
    if find.is_url(text):
        for row in tx.reports.of_url(find.key_of(stores, text), 100):
            if row.status == "dead" and (found := tx.letter_reports.letter(row.id)):
                return found
        raise find.NotFound(
            f"no dead letter for {text}",
            hint="`penstock trace URL`, or `penstock dlq ls` for all dead letters",
        )
    known = tx.letter_reports.letters_like(text, find.MAX_LISTED)
    letter = tx.letter_reports.letter(
        find.one(known, text, "dead letter", "penstock dlq ls lists them")
    )
    assert letter is not None
    return letter


def choose(stores: Stores, ids: tuple[str, ...], which: Filter) -> tuple[Iterator[list[str]], int]:
    """Return batches of event ids, and their number.

    Dead letters that are inserted later are not included.
    """
    if ids:
        named = ask(stores, lambda tx: [letter_for(stores, tx, text).event for text in ids])
        unique = list(dict.fromkeys(named))
        return iter([unique]), len(unique)
    last, total = ask(
        stores, lambda tx: (tx.letter_reports.last_letter(), tx.letter_reports.letter_count(which))
    )

    def batches() -> Iterator[list[str]]:
        after = 0
        while found := ask(stores, partial(_letters_after, which, after, last)):
            after = found[-1].n
            yield [letter.event for letter in found]

    return batches(), total


def _letters_after(which: Filter, after: int, last: int, tx: Transaction) -> list[Letter]:
    return tx.letter_reports.letters(which, after=after, upto=last, limit=BATCH)


async def process(
    chosen: Iterator[list[str]],
    total: int,
    work: Callable[[list[str]], Awaitable[int]],
    verb: str,
    *,
    rate: float = math.inf,
) -> int:
    """Process at most `rate` events a second, in small steps. Show progress on a terminal."""
    from penstock.cli.progress import bar

    done, started, sent = 0, time.monotonic(), 0
    with bar(verb, total) as show_progress:
        for batch in chosen:
            step = len(batch) if math.isinf(rate) else max(1, int(rate / 4))
            for i in range(0, len(batch), step):
                part = batch[i : i + step]
                await asyncio.sleep(max(0.0, started + sent / rate - time.monotonic()))
                done += await work(part)
                sent += len(part)
                show_progress(sent)
    return done
