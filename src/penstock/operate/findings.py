"""Findings of `penstock doctor`, and checks that open something within a time limit."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from penstock.errors import PenstockError

Result = Literal["ok", "warn", "fail"]
OPEN_SECONDS = 10.0  # time limit of all openings together. They run in parallel.


class Finding(NamedTuple):
    check: str
    result: Result
    found: str
    fix: str = ""
    code: str = ""  # stable name of the finding for programs, "" for the name of the check

    @property
    def document(self) -> dict[str, str]:
        """The finding as JSON. Its keys are stable."""
        return {
            "code": self.code or self.check.replace(" ", "_"),
            "severity": {"ok": "ok", "warn": "warning", "fail": "error"}[self.result],
            "message": self.found,
            "next_step": self.fix,
        }


class Opening(NamedTuple):
    """A sink, source, proxy or store that `doctor` opens."""

    check: str
    name: str
    # Blocking. Returns a text for the report, or a finding. Raises PenstockError or OSError.
    work: Callable[[], str | Finding]
    fix: str  # next step if the error has no hint


def open_all(openings: Sequence[Opening], seconds: float = OPEN_SECONDS) -> list[Finding]:
    """Run all openings in parallel. An opening that takes longer than `seconds` is a failure.

    Daemon threads run them. So the command ends, even if a call never returns.
    """
    results: queue.SimpleQueue[tuple[int, Finding]] = queue.SimpleQueue()

    def perform(n: int, opening: Opening) -> None:
        results.put((n, _opened(opening)))

    for n, opening in enumerate(openings):
        threading.Thread(
            target=perform, args=(n, opening), name=f"open {opening.name}", daemon=True
        ).start()
    found: dict[int, Finding] = {}
    until = time.monotonic() + seconds
    while len(found) < len(openings):
        try:
            n, finding = results.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            break
        found[n] = finding
    return [
        found.get(n) or _failed(opening, f"no answer within {seconds:g} s", opening.fix)
        for n, opening in enumerate(openings)
    ]


def _opened(opening: Opening) -> Finding:
    try:
        text = opening.work()
    except PenstockError as e:
        return _failed(opening, e.message, e.hint or opening.fix)
    except OSError as e:
        return _failed(opening, str(e), opening.fix)
    except Exception as e:
        return _failed(opening, f"bug: {e!r}", "run with PENSTOCK_DEBUG=1, and report it")
    if isinstance(text, Finding):
        return text
    return Finding(opening.check, "ok", f"{opening.name}: {text}", code=f"{opening.check}.opened")


def _failed(opening: Opening, reason: str, fix: str) -> Finding:
    message = reason if opening.name in reason else f"{opening.name}: {reason}"
    return Finding(opening.check, "fail", message, fix, f"{opening.check}.unreachable")
