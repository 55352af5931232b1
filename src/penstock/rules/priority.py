"""Weighted shares of a batch for the priority classes. Low priority is slow but never starved."""

from __future__ import annotations

CLASSES = ("high", "normal", "low")  # part of the names of queues and streams on servers
NORMAL = 1
WEIGHTS = (16, 4, 1)  # high, normal, low: messages of each class in 21 consecutive ones
LOWEST = len(WEIGHTS) - 1


def _class_sequence() -> tuple[int, ...]:
    """Return the class of each of 21 consecutive messages, evenly mixed.

    So small batches are shared as fairly as large ones.
    """
    sequence, credit = [], [0] * len(WEIGHTS)
    for _ in range(sum(WEIGHTS)):
        credit = [have + weight for have, weight in zip(credit, WEIGHTS, strict=True)]
        chosen = credit.index(max(credit))
        credit[chosen] -= sum(WEIGHTS)
        sequence.append(chosen)
    return tuple(sequence)


TURNS = _class_sequence()


def class_of(priority: int) -> int:
    """Clamp `priority` to a known class. A message with an unknown class is never received."""
    return min(max(priority, 0), LOWEST)


def shares(first: int, places: int) -> list[int]:
    """Return how many of the next `places` messages each class gets, after `first` messages."""
    rounds, rest = divmod(places, len(TURNS))
    quotas = [rounds * weight for weight in WEIGHTS]
    for place in range(first, first + rest):
        quotas[TURNS[place % len(TURNS)]] += 1
    return quotas
