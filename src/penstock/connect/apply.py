"""Carrying a plan out: what differs is sent, nothing else, and waited for until it runs or says why
not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.connect.plan import Plan, Step
from penstock.connect.rest import Refused, State, Status, Worker
from penstock.errors import ConfigError

EVERY = 0.5  # seconds between looks
SETTLED, LOOKS = (
    2.0,
    4,
)  # seconds and looks: a task may report that it runs, and fail at its first step
STALE = 15.0  # seconds after which a failure that was there before is the new configuration's too


@dataclass(frozen=True, slots=True)
class Applied:
    name: str
    action: str
    status: Status
    ok: bool

    def document(self) -> dict[str, Any]:
        return {"name": self.name, "action": self.action, "ok": self.ok, **state_of(self.status)}


def apply(
    plan: Plan,
    worker: Worker,
    *,
    prune: bool,
    patience: float,
    told: Callable[[str], None] = lambda text: None,
) -> list[Applied]:
    """Raises ConfigError before anything is sent if a check failed."""
    if wrong := plan.problems:
        first = wrong[0].problems[0]
        more = sum(len(s.problems) for s in wrong) - 1
        raise ConfigError(
            f"connector {wrong[0].name}: {first.option}: {first.says}"
            + (f" (and {more} more)" if more else ""),
            hint="penstock connect plan shows all of them; nothing was sent",
        )
    if absent := next(
        (s for s in plan.changes if s.connector is not None and not s.installed), None
    ):
        assert absent.connector is not None
        plugin = absent.connector.plugin
        raise ConfigError(
            f"connector {absent.name}: the worker has no {plugin.title} ({plugin.cls})",
            hint="put it on the worker's plugin.path and restart it; nothing was sent",
        )
    sent: list[tuple[Step, float, Status]] = []
    done: list[Applied] = []
    for step in plan.steps:
        if step.action in ("create", "change") and step.connector is not None:
            before = _status(worker, step.name) if step.action == "change" else Status()
            worker.put(step.name, step.connector.config)
            told(f"{step.name}: {'created' if step.action == 'create' else 'changed'}")
            sent.append((step, time.monotonic(), before))
        elif step.action == "delete" and prune:
            worker.delete(step.name)
            told(f"{step.name}: deleted")
            done.append(Applied(step.name, "delete", Status(), True))
    for step in plan.steps:
        if step.action == "keep":
            status = worker.status(step.name)
            done.append(Applied(step.name, "keep", status, not status.failed()))
    return done + [_waited(worker, step, began, before, patience) for step, began, before in sent]


def _waited(worker: Worker, step: Step, began: float, before: Status, patience: float) -> Applied:
    verdict, since, looks = "", began, 0
    old = [(s.id, s.trace) for s in before.failed()]
    while True:
        status = _status(worker, step.name)
        now, last = time.monotonic(), verdict
        verdict = "failed" if status.failed() else "runs" if status.runs() else ""
        if verdict != last:
            since, looks = now, 0
        looks += 1
        stale = verdict == "failed" and all(
            (s.id, s.trace) in old for s in status.failed()
        )  # a busy worker has not come to what we sent
        if (
            verdict and looks > LOOKS and now - since >= (STALE if stale else SETTLED)
        ) or now - began > patience:
            return Applied(step.name, step.action, status, verdict == "runs")
        time.sleep(EVERY)


def _status(worker: Worker, name: str) -> Status:
    try:
        return worker.status(name)
    except Refused as e:
        if e.status == 404:  # accepted, and not yet known to the worker that was asked
            return Status()
        raise


def state_of(status: Status) -> dict[str, Any]:
    return {
        "state": status.connector.state,
        "worker": status.connector.worker_id,
        "type": status.type,
        "tasks": [
            {"id": t.id, "state": t.state, "worker": t.worker_id, "trace": first_lines(t)}
            for t in status.tasks
        ],
        "trace": first_lines(status.connector),
    }


def first_lines(state: State, most: int = 6) -> list[str]:
    """Of a Java trace, what a person reads: the messages, not the frames."""
    lines = [line.strip() for line in state.trace.splitlines() if line.strip()]
    told: Sequence[str] = [
        line for line in lines if not line.startswith(("at ", "...", "Suppressed:"))
    ]
    return [line[:400] for line in told[:most]]
