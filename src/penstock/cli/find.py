"""What a person typed (a URL, an id, the beginning of one) becomes the one thing it names, or an error that lists what it could be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from penstock.errors import PenstockError, UsageError
from penstock.operate.figures import joined, short

if TYPE_CHECKING:
    from penstock.ports import Transaction
    from penstock.ports.reports import EventRow
    from penstock.runtime.stores import Stores

MOST = 6


class NotFound(PenstockError):
    """Nothing goes by that name."""


def key_of(stores: Stores, text: str) -> bytes:
    """The dedup key of a URL that was typed. Raises UsageError."""
    from penstock.rules.identity import BadUrl, canonical_url

    try:
        return stores.ledger.url_key(canonical_url(text))
    except BadUrl as e:
        raise UsageError(
            f"{text!r} is no URL: {e.reason}",
            hint="an http or https URL, or the beginning of an id",
        ) from None


def is_url(text: str) -> bool:
    return "://" in text


def one(found: Sequence[str], text: str, what: str, hint: str) -> str:
    """The exact one, or the only one."""
    if text in found:
        return text
    if not found:
        raise NotFound(f"there is no {what} {text!r}", hint=hint)
    if len(found) > 1:
        ambiguous(text, what, found)
    return found[0]


def ambiguous(text: str, what: str, found: Sequence[str]) -> NoReturn:
    listed = joined([short(f, 16) for f in found[: MOST - 1]]) + (
        ", …" if len(found) >= MOST else ""
    )
    raise UsageError(
        f"{text!r} is the beginning of more than one {what}: {listed}", hint="type more of it"
    )


def event_for(stores: Stores, tx: Transaction, text: str) -> EventRow:
    """By `last`, URL (the newest event), event id or unique prefix of one."""
    if text == "last":
        found = tx.reports.newest()
        if found is None:
            raise NotFound("nothing was accepted yet", hint="penstock push URL")
        return found
    if is_url(text):
        rows = tx.reports.of_url(key_of(stores, text), 1)
        if not rows:
            raise NotFound(
                f"no event for {text}",
                hint="penstock push it; `penstock events ls` lists what there is",
            )
        return rows[0]
    row = tx.reports.event(
        one(tx.reports.ids_like(text, MOST), text, "event", "penstock events ls lists them"),
    )
    assert row is not None
    return row
