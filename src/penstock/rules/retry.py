"""Retry policy: a table of stage and error class with budget, back-off and route change.

Pure. Random numbers are arguments.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from penstock.model import ErrorClass


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    budget: int  # failures that may be retried. After the next one the event is dead.
    base: float  # seconds of the first back-off, then doubled
    cap: float  # seconds of the longest back-off
    next_route: bool = False  # the next attempt uses the next pool of the route, see `turns`
    free: bool = False  # no attempt is charged: the failure is Penstock's own


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    dead: bool
    delay: float = 0.0
    charged: bool = True


def table(
    *, base: float, cap: float, budget: int, next_pool: bool = True
) -> dict[tuple[str, ErrorClass], Policy]:
    """Return the default table. A `("*", class)` row is for stages without their own row."""
    default = Policy(budget=budget, base=base, cap=cap)
    return {
        ("*", ErrorClass.TRANSIENT): default,
        # The host asked to wait, so the event gets more attempts.
        ("*", ErrorClass.THROTTLED): Policy(budget=max(budget, 2 * budget), base=base, cap=cap),
        ("*", ErrorClass.BLOCKED): Policy(
            budget=budget, base=3 * base, cap=cap, next_route=next_pool
        ),
        ("*", ErrorClass.PERMANENT): Policy(budget=0, base=base, cap=cap),
        ("*", ErrorClass.NOT_FOUND): Policy(budget=0, base=base, cap=cap),
        # The child exited while the page ran alone, so a retry would not help.
        ("*", ErrorClass.POISON): Policy(budget=0, base=base, cap=cap),
        ("*", ErrorClass.OURS): Policy(budget=0, base=1.0, cap=30.0, free=True),
        ("extract", ErrorClass.TRANSIENT): default,
    }


def decide(
    policies: Mapping[tuple[str, ErrorClass], Policy],
    stage: str,
    kind: ErrorClass,
    *,
    failures: int,
    after: float | None,
    jitter: float,
    age: float = 0.0,
    max_age: float = 0.0,
) -> Decision:
    """Decide if and when the event is retried.

    `failures` is the number recorded so far, without this one. `after` is the wait that the host
    requested (Retry-After). It replaces the back-off, and jitter adds up to 5 % to it. `jitter` is
    in [0, 1). An event is dead if its `age` exceeds `max_age`, both in seconds. 0 is no limit.
    """
    policy = policies.get((stage, kind)) or policies["*", kind]
    if policy.free:
        return Decision(dead=False, delay=_backoff(policy, failures, jitter), charged=False)
    if failures >= policy.budget or (max_age and age > max_age):
        return Decision(dead=True)
    wait = _backoff(policy, failures, jitter) if after is None else after * (1 + 0.05 * jitter)
    return Decision(dead=False, delay=wait)


def turns(
    policies: Mapping[tuple[str, ErrorClass], Policy], stage: str, failures: Mapping[str, int]
) -> int:
    """Return by how many pools an event has moved on.

    That is the number of recorded failures whose policy in this stage has `next_route`. It is read
    from the ledger at each attempt, so the published event is not changed. A redrive has new counts
    and starts with the first pool.
    """
    return sum(
        n
        for name, n in failures.items()
        if (policies.get((stage, ErrorClass(name))) or policies["*", ErrorClass(name)]).next_route
    )


def _backoff(policy: Policy, failures: int, jitter: float) -> float:
    """Return an exponential back-off. Jitter removes up to half of it.

    So workers that failed together do not retry together.
    """
    full = min(policy.cap, policy.base * 2.0 ** min(failures, 30))
    return full * (1 - 0.5 * jitter)
