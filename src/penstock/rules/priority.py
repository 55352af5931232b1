"""How the places of a batch are shared between the priority classes: weighted, so that low is slow
and never starved. Nothing is queued here.
"""

from __future__ import annotations

WEIGHTS = (16, 4, 1)  # high, normal, low: of 21 places in a row
LOWEST = len(WEIGHTS) - 1


def _turns() -> tuple[int, ...]:
    """Which class each of the 21 places belongs to, evenly mixed: batches of one take turns as well
    as batches of a hundred do.
    """
    turns, credit = [], [0] * len(WEIGHTS)
    for _ in range(sum(WEIGHTS)):
        credit = [have + weight for have, weight in zip(credit, WEIGHTS, strict=True)]
        turn = credit.index(max(credit))
        credit[turn] -= sum(WEIGHTS)
        turns.append(turn)
    return tuple(turns)


TURNS = _turns()


def class_of(priority: int) -> int:
    """A number that is no class would never be asked for: it belongs to the nearest one."""
    return min(max(priority, 0), LOWEST)


def shares(first: int, places: int) -> list[int]:
    """How many of `places` belong to each class, when `first` places were given out before."""
    rounds, rest = divmod(places, len(TURNS))
    quotas = [rounds * weight for weight in WEIGHTS]
    for place in range(first, first + rest):
        quotas[TURNS[place % len(TURNS)]] += 1
    return quotas
