"""Causes of delays that time alone does not end, with a sentence and the next command."""

from __future__ import annotations

import msgspec

from penstock.rules import budgets

HOST = "host:"
EXTRACTOR = "extractor:"
TOPIC = "topic:"
# Seconds after which an event that waits for an operator, a route or a budget is tried again. It
# becomes due earlier when the operator or a worker ends the wait.
RECHECK = 24 * 3600.0
# The same for a host without an open breaker. An operator may have paused it, or may have resumed
# it since the request was refused.
HOST_RECHECK = 600.0
APPROVAL = "approval:"

# Kind of cause → a sentence, and the next step. {} is the name after the colon of the cause.
_STEPS: dict[str, tuple[str, str]] = {
    "host": ("host {} is paused", "penstock domains resume {}"),
    "extractor": ("extractor {} is paused", "penstock extractors resume {}"),
    "topic": ("topic {} is paused", "penstock topics resume {}"),
    "approval": ("removals at host {} wait for an approval", "penstock domains approve {}"),
    "route": ("no live worker serves the route {}", "start a worker that serves this route"),
    "render": (
        "render=true asks for a browser, and this release has no renderer",
        "push these URLs again without render. The waiting events end dead after retry.max_age",
    ),
}


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """Something that is paused or missing, and the events that wait for it."""

    cause: str  # for example "host:shop.example"
    events: int  # delayed events that wait for it
    what: str  # in words
    reason: str  # why it is paused, "" if that is not known
    since: float | None  # when the breaker paused it
    next_step: str  # a command, or what an operator should do


def waiting(
    cause: str, events: int = 0, *, reason: str = "", since: float | None = None
) -> Waiting:
    """Return the words and the next step of a cause."""
    kind, _, name = cause.partition(":")
    if cause.startswith(budgets.BUDGET):
        what, step = budgets.describe(name)
    else:
        what, step = _STEPS.get(kind, (cause, "penstock events ls --status delayed"))
        what, step = what.format(name), step.format(name)
    return Waiting(
        cause=cause,
        events=events,
        what=what,
        reason=reason,
        since=since,
        next_step=step,
    )
