"""Workers of a store: which of them are alive, as far as lock files and heartbeats show."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from penstock import locks
from penstock.ports import Transaction

# Seconds after its last heartbeat in which a worker of another machine counts as alive.
SILENCE_LIMIT = 60.0
PRUNE_AFTER = 3600.0  # seconds after which a worker without a heartbeat is deleted


def is_alive(
    worker: str, until: float | None, now: float, directory: Path, *, on_server: bool
) -> bool:
    """Return True if the worker is alive. `until` is the end of its recorded heartbeat, if any.

    The lock file of a worker of this machine is certain. If the store is on a server, the workers
    of other machines have only a heartbeat.
    """
    if not on_server or (directory / f"{worker}.alive").exists():
        return locks.worker_alive(directory, worker)
    return until is not None and until > now


def workers_in(
    tx: Transaction, now: float, directory: Path, *, on_server: bool, others: Iterable[str] = ()
) -> dict[str, bool]:
    """Return all known workers and `others`, by id, and whether each is alive.

    `directory` has the lock files of this machine.
    """
    recorded = tx.owner.workers() if on_server else {}
    signs = {sign.name.removesuffix(".alive") for sign in directory.glob("*.alive")}
    return {
        worker: is_alive(worker, recorded.get(worker), now, directory, on_server=on_server)
        for worker in sorted(signs.union(recorded, others))
    }
