"""Refuses messages of another pipeline, which shares the namespace of an external broker."""

from __future__ import annotations

from penstock.engine.settings import LifecycleSettings
from penstock.errors import StoreRefused
from penstock.model import Event


def refuse_foreign(event: Event, settings: LifecycleSettings, topic: str) -> None:
    """Raise StoreRefused if a message names another pipeline. This ledger does not have the event.

    The worker then ends and does not settle the message, so the broker delivers it again. A message
    without a name was published by another program, and is accepted.
    """
    pipeline = settings.pipeline
    if pipeline and event.pipeline not in ("", pipeline, *settings.former):
        raise StoreRefused(
            f"topic {topic}: a message belongs to the pipeline {event.pipeline!r}, "
            f"and not to {pipeline!r}. Both use the same namespace on the broker",
            hint="use another namespace (PENSTOCK_NAMESPACE=…) for one of the pipelines",
        )
