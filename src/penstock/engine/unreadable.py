"""Messages that this worker cannot read: those of a newer release, and invalid ones."""

from __future__ import annotations

from zlib import crc32

import msgspec

from penstock.engine.publishing import state_of
from penstock.errors import BadEnvelope, NewerMessage
from penstock.model import Dead, Outcome, Reason, Retry, mint
from penstock.ports import DeadLetter, Delivery, Transaction
from penstock.rules.fingerprint import fingerprint
from penstock.rules.reasons import sentence

# Seconds until a message of a newer release is offered again, at first and later. Up to a half is
# added.
NEWER_DELAY, NEWER_MAX_DELAY = 12.0, 300.0


def leave_to_newer(tx: Transaction, d: Delivery, error: NewerMessage, now: float) -> Outcome:
    """Delay a message that only a newer release can read. It is neither charged nor dead.

    The delay is longer than PARK_AFTER. So the messages of an external broker wait in the
    outgoing table, and no broker counts their deliveries. The delay grows with the event's age,
    so that the history of an event that waits for days stays short.
    """
    state = state_of(tx, d.id)
    age = 0.0 if state is None else now - state.accepted_at
    # Spread the messages: this worker pauses after the first one, so others get the next ones.
    delay = min(max(NEWER_DELAY, age / 4), NEWER_MAX_DELAY) * (1 + crc32(d.id.encode()) / 2**33)
    reason = sentence(Reason.NEWER, error.what, error.version, error.known)
    if state is not None and state.status in ("pending", "delayed"):
        tx.events.delay_unread(state, now + delay, reason, now)
    return Retry(delay, reason, elsewhere=True)


def dead_letter_for_bad_envelope(
    tx: Transaction, d: Delivery, error: BadEnvelope, now: float
) -> Outcome:
    """Store a message that is not a valid event as a dead letter."""
    tx.dead_letters.put(
        DeadLetter(
            event_id=mint("envelope", d.topic, str(d.position)),
            topic=d.topic,
            host=d.key,
            stage="intake",
            reason=error.message,
            fingerprint=fingerprint("intake", "permanent", error.message),
            envelope=d.body,
            headers=msgspec.json.encode(d.headers).decode(),
        ),
        now,
    )
    tx.counters.add(d.topic, {"unreadable": 1})
    return Dead(error.message)
