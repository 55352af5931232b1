"""`penstock migrate`: shows and runs the migrations that the stores need."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from penstock.cli.options import DEFAULTS, Common, Json
from penstock.cli.output import console, plain, print_json, say, styled
from penstock.cli.progress import bar
from penstock.errors import CONFIGURATION, OK
from penstock.operate.figures import joined, lasting, plural, size

if TYPE_CHECKING:
    from penstock.runtime.migrating import MigratingStore, OtherWorker, Plan, Progress


def migrate(
    *,
    check: Annotated[
        bool, Parameter(help="change nothing: exit 3 if a migration is needed, else 0")
    ] = False,
    wait: Annotated[
        bool, Parameter(help="wait until workers of other releases have stopped")
    ] = False,
    json: Json = False,
    common: Common = DEFAULTS,
) -> int:
    """Migrate the stores to the version that this release needs.

    Stop all workers first. An SQLite file is copied to `FILE.before-vN` before it is changed, and
    every command that opens it migrates it. Make a backup of a PostgreSQL database before you run
    this. A migration that was interrupted continues when this command runs again.
    """
    from penstock.runtime.migrating import open_all

    found: list[dict[str, Any]] = []
    needed = False
    with open_all(common.load().config) as stores:
        for store in stores:
            plan = store.plan()
            if plan is None:
                continue
            workers = store.other_workers() if plan.missing else []
            document = _document(plan, workers)
            found.append(document)
            needed = needed or bool(plan.missing)
            if not json:
                _show(plan, workers)
            if plan.missing and not check:
                document |= _migrate(store, plan, wait=wait, json=json)
    if json:
        print_json({"stores": found})
    elif not found:
        say("there is no store yet. The first `penstock run` creates it with the newest version")
    return CONFIGURATION if check and needed else OK


def _migrate(store: MigratingStore, plan: Plan, *, wait: bool, json: bool) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        done = store.migrate(_observer(plan, stack), wait=wait)
    if done is None:  # another process has migrated the store
        return {"migrated": False}
    if not json:
        say(done.sentence)
    return {"migrated": True, "took_seconds": round(done.seconds, 3)}


def _observer(plan: Plan, stack: contextlib.ExitStack) -> Any:
    """Return an observer that shows the progress on stderr."""
    from penstock.runtime.migrating import Observer

    class Display(Observer):
        shown: Sequence[OtherWorker] = ()
        set_copied: Callable[[int], None] | None = None
        set_rows: Callable[[int], None] | None = None
        rows = 0

        def waiting(self, workers: Sequence[OtherWorker]) -> None:
            if workers != self.shown:
                self.shown = workers
                console(stderr=True).print(plain(f"waiting for {joined(map(str, workers))}"))

        def copied(self, pages: int, total: int) -> None:
            if self.set_copied is None:
                self.set_copied = stack.enter_context(bar("backup", total))
            self.set_copied(pages)

        def progressed(self, progress: Progress) -> None:
            if self.set_rows is None:
                stack.close()  # the bar of the backup
                self.set_rows = stack.enter_context(bar("rows", plan.backfilled or None))
            self.rows += progress.rows
            self.set_rows(self.rows)

    return Display()


def _show(plan: Plan, workers: Sequence[OtherWorker]) -> None:
    if not plan.missing:
        say(f"{plan.label} has store version {plan.found}, the newest. There is nothing to do")
        return
    say(styled(plan.label, "bold"), f": store version {plan.found} → {plan.to}")
    for migration in plan.missing:
        say(f"  {migration.number:>3}  {migration.title}")
    backup = f", with the backup {plan.backup}" if plan.backup else ""
    say(
        f"estimate: {plural(plan.rows, 'row')}, about {lasting(max(1.0, plan.seconds))}, "
        f"{size(plan.disk)} of disk space{backup}"
    )
    if workers:
        say(f"used by {plural(len(workers), 'worker')}: {joined(map(str, workers))}")


def _document(plan: Plan, workers: Sequence[OtherWorker]) -> dict[str, Any]:
    return {
        "store": plan.label,
        "from": plan.found,
        "to": plan.to,
        "needed": bool(plan.missing),
        "migrations": [{"number": m.number, "title": m.title} for m in plan.missing],
        "estimate": {"rows": plan.rows, "seconds": round(plan.seconds, 1), "bytes": plan.disk},
        "backup": plan.backup,
        "other_workers": [
            {"process": w.process, "host": w.host, "release": w.release or None} for w in workers
        ],
    }
