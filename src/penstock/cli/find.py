"""Finds the event, page or dead letter that an operator named by URL, id or unique id prefix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from penstock.errors import PenstockError, UsageError
from penstock.operate.figures import joined, short

if TYPE_CHECKING:
    from penstock.ports import Transaction
    from penstock.ports.reports import EventRow
    from penstock.runtime.stores import Stores

# Ids that are read for a prefix. An error lists one fewer, so "…" can show that more exist.
MAX_LISTED = 6


class NotFound(PenstockError):
    """Nothing with the given name exists."""


def key_of(stores: Stores, text: str) -> bytes:
    """Return the dedup key of a URL that an operator typed. Raise UsageError if it is not valid."""
    from penstock.rules.identity import BadUrl, canonical_url

    try:
        return stores.ledger.url_key(canonical_url(text))
    except BadUrl as e:
        raise UsageError(
            f"{text!r} is not a valid URL: {e.reason}",
            hint="an http or https URL, or the beginning of an id",
        ) from None


def is_url(text: str) -> bool:
    return "://" in text


def one(found: Sequence[str], text: str, what: str, hint: str) -> str:
    """Return the exact match, or else the only match. Raise if there are zero or several."""
    if text in found:
        return text
    if not found:
        raise NotFound(f"there is no {what} {text!r}", hint=hint)
    if len(found) > 1:
        ambiguous(text, what, found)
    return found[0]


def ambiguous(text: str, what: str, found: Sequence[str]) -> NoReturn:
    listed = joined([short(f, 16) for f in found[: MAX_LISTED - 1]]) + (
        ", …" if len(found) >= MAX_LISTED else ""
    )
    raise UsageError(
        f"{text!r} is the beginning of more than one {what}: {listed}",
        hint="type more of the id",
    )


def event_for(stores: Stores, tx: Transaction, text: str) -> EventRow:
    """Return the event named by `last`, a URL (its newest event), an id or a unique id prefix."""
    if text == "last":
        found = tx.reports.newest()
        if found is None:
            raise NotFound("no event was accepted yet", hint="penstock push URL")
        return found
    if is_url(text):
        rows = tx.reports.of_url(key_of(stores, text), 1)
        if not rows:
            raise NotFound(
                f"no event for {text}",
                hint="`penstock push` the URL, or list all events: `penstock events ls`",
            )
        return rows[0]
    row = tx.reports.event(
        one(
            tx.reports.ids_like(text, MAX_LISTED),
            text,
            "event",
            "penstock events ls lists them",
        ),
    )
    assert row is not None
    return row
