"""Deletes pages, history and ended events by age and size."""

from __future__ import annotations

from functools import partial

from penstock.ports import Clock, Transaction
from penstock.runtime.stores import Stores


async def retain(
    stores: Stores,
    *,
    pages_keep: float | None,
    pages_bytes: int | None,
    history_keep: float | None,
    seconds: float = 5.0,
) -> tuple[int, int]:
    """Apply retention to pages, history and ended events. Return (pages removed, bytes freed).

    Runs small transactions until all is deleted or `seconds` have passed.
    """
    until = stores.clock.now() + seconds
    removed = freed = 0
    while True:
        pages, size = await stores.uow.write(
            partial(_retain_pages, stores.clock, pages_keep, pages_bytes)
        )
        done = [pages, size, await stores.uow.write(lambda tx: tx.queue.prune())]
        if history_keep is not None:
            before = stores.clock.now() - history_keep
            if stores.external_claims is None:
                done.append(await stores.uow.write(partial(_retain_events, before, True)))
            else:
                await stores.external_claims.prune(before)
                # An event that a claim still names is deleted too. Its URL is then fetched without
                # a baseline.
                done.append(await stores.uow.write(partial(_retain_events, before, False)))
        removed, freed = removed + pages, freed + size
        if not any(done) or stores.clock.now() > until:
            return removed, freed
        await stores.clock.sleep(0.01)  # let other transactions write


def _retain_pages(
    clock: Clock, keep: float | None, max_bytes: int | None, tx: Transaction
) -> tuple[int, int]:
    tx.pages.sweep()
    return tx.pages.prune(
        older_than=None if keep is None else clock.now() - keep,
        max_bytes=max_bytes,
        keep=tx.maintenance.pages_needed,
    )


def _retain_events(before: float, has_claims: bool, tx: Transaction) -> int:
    if not has_claims:
        return tx.maintenance.prune(before, lambda key, id_: False)
    tx.claims.prune(before)
    return tx.maintenance.prune(before, tx.claims.references)
