"""Applies a plan: sends the connectors that differ, and waits until they run or fail."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.connect.plan import Plan, Step
from penstock.connect.rest import RequestRefused, State, Status, Worker
from penstock.errors import ConfigError

POLL_INTERVAL = 0.5  # seconds
# A state counts after this many seconds and polls. A task may report RUNNING and fail at its first
# step.
STABLE_SECONDS, STABLE_POLLS = 2.0, 4
# Seconds before a failure that existed before the change counts as a failure of the new
# configuration.
OLD_FAILURE_GRACE = 15.0


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
    timeout: float,
    report: Callable[[str], None] = lambda text: None,
) -> list[Applied]:
    """Send the changes and wait for them.

    Raise ConfigError before anything is sent if a check failed or a plugin is missing.
    """
    if wrong := plan.problems:
        first = wrong[0].problems[0]
        more = sum(len(s.problems) for s in wrong) - 1
        raise ConfigError(
            f"connector {wrong[0].name}: {first.option}: {first.message}"
            + (f" (and {more} more)" if more else ""),
            hint="`penstock connect plan` shows all problems (no connector was sent)",
        )
    if absent := next(
        (s for s in plan.changes if s.connector is not None and not s.installed), None
    ):
        assert absent.connector is not None
        plugin = absent.connector.plugin
        raise ConfigError(
            f"connector {absent.name}: the Connect worker has no {plugin.title} ({plugin.cls})",
            hint="install the plugin on its plugin.path and restart it (no connector was sent)",
        )
    sent: list[tuple[Step, float, Status]] = []
    done: list[Applied] = []
    for step in plan.steps:
        if step.action in ("create", "change") and step.connector is not None:
            before = _status(worker, step.name) if step.action == "change" else Status()
            worker.put(step.name, step.connector.config)
            report(f"{step.name}: {'created' if step.action == 'create' else 'changed'}")
            sent.append((step, time.monotonic(), before))
        elif step.action == "delete" and prune:
            worker.delete(step.name)
            report(f"{step.name}: deleted")
            done.append(Applied(step.name, "delete", Status(), True))
    for step in plan.steps:
        if step.action == "keep":
            status = worker.status(step.name)
            done.append(Applied(step.name, "keep", status, not status.failed()))
    return done + [_wait_for(worker, step, began, before, timeout) for step, began, before in sent]


def _wait_for(worker: Worker, step: Step, began: float, before: Status, timeout: float) -> Applied:
    verdict, since, polls = "", began, 0
    old = [(s.id, s.trace) for s in before.failed()]
    while True:
        status = _status(worker, step.name)
        now, last = time.monotonic(), verdict
        verdict = "failed" if status.failed() else "runs" if status.runs() else ""
        if verdict != last:
            since, polls = now, 0
        polls += 1
        # A busy Connect worker may not have read the new configuration yet.
        is_old = verdict == "failed" and all((s.id, s.trace) in old for s in status.failed())
        if (
            verdict
            and polls > STABLE_POLLS
            and now - since >= (OLD_FAILURE_GRACE if is_old else STABLE_SECONDS)
        ) or now - began > timeout:
            return Applied(step.name, step.action, status, verdict == "runs")
        time.sleep(POLL_INTERVAL)


def _status(worker: Worker, name: str) -> Status:
    try:
        return worker.status(name)
    except RequestRefused as e:
        if e.status == 404:  # accepted, but not known to this Connect worker yet
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


def first_lines(state: State, limit: int = 6) -> list[str]:
    """Return the first messages of a Java stack trace, without the frames."""
    lines = (line.strip() for line in state.trace.splitlines())
    messages = [x for x in lines if x and not x.startswith(("at ", "...", "Suppressed:"))]
    return [message[:400] for message in messages[:limit]]
