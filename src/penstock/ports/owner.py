"""Owner of a store: the pipeline whose events it holds."""

from __future__ import annotations

from typing import Protocol


class StoreOwner(Protocol):
    """The pipeline that owns the store, and the workers that run it."""

    def pipeline(self) -> str | None:
        """Return the name of the owner, or None if no pipeline has run on this store."""

    def former(self) -> frozenset[str]:
        """Return the pipelines that were owners before. Old messages may still name them."""

    def take(self, pipeline: str, now: float) -> str:
        """Make this pipeline the owner if the store has none. Return the owner."""

    def change(self, pipeline: str, now: float) -> None:
        """Make this pipeline the owner."""

    def heartbeat(self, worker: str, until: float) -> None:
        """Record that a worker is alive until a time."""

    def leave(self, worker: str) -> None:
        """Delete a worker that stops or has crashed."""

    def prune(self, before: float) -> None:
        """Delete the workers whose heartbeat ended before a time."""

    def workers(self) -> dict[str, float]:
        """Return the id of each worker that has not left, and the time of `heartbeat`."""
