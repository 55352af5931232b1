"""What a failure leads to: the policy table stage × error class → budget, back-off, route change.
Pure; randomness is passed in.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from penstock.model import ErrorClass


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    budget: int  # recorded failures that may be retried; the next one is the end
    base: float  # first back-off, seconds; then doubled
    cap: float
    next_route: bool = False  # the next attempt goes by the next pool of the route; see `turns`
    free: bool = False  # spends nobody's budget: our own fault


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    dead: bool
    delay: float = 0.0
    charged: bool = True


def table(
    *, base: float, cap: float, budget: int, next_pool: bool = True
) -> dict[tuple[str, ErrorClass], Policy]:
    """The default table; a `("*", class)` row serves every stage that has none of its own."""
    usual = Policy(budget=budget, base=base, cap=cap)
    return {
        ("*", ErrorClass.TRANSIENT): usual,
        ("*", ErrorClass.THROTTLED): Policy(
            budget=max(budget, 2 * budget), base=base, cap=cap
        ),  # the host said wait: patience, not guilt
        ("*", ErrorClass.BLOCKED): Policy(
            budget=budget, base=3 * base, cap=cap, next_route=next_pool
        ),
        ("*", ErrorClass.PERMANENT): Policy(budget=0, base=base, cap=cap),
        ("*", ErrorClass.POISON): Policy(budget=0, base=base, cap=cap),  # it already died alone
        ("*", ErrorClass.OURS): Policy(budget=0, base=1.0, cap=30.0, free=True),
        ("extract", ErrorClass.TRANSIENT): usual,
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
    """`failures` recorded so far, without this one; `after` is the other side's own wish
    (Retry-After) and wins. `jitter` in [0, 1). `max_age` 0: no limit on how long an event may be
    put off.
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
    """How many pools an event has moved on by: the recorded failures of those classes whose policy
    says so. Read from the books at each attempt, so the event is published again as it was, and a
    redrive (whose count is new) starts from its first pool.
    """
    return sum(
        n
        for name, n in failures.items()
        if (policies.get((stage, ErrorClass(name))) or policies["*", ErrorClass(name)]).next_route
    )


def _backoff(policy: Policy, failures: int, jitter: float) -> float:
    """Exponential; jitter takes up to half away, so a fleet that failed together does not come back
    together.
    """
    full = min(policy.cap, policy.base * 2.0 ** min(failures, 30))
    return full * (1 - 0.5 * jitter)
