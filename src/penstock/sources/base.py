"""Context that `open_source` functions receive, and the base class of sources."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from penstock.authoring.pipeline import SourceSpec
from penstock.config.options import check_names
from penstock.config.schema import Config
from penstock.errors import ConfigError, UsageError
from penstock.ports import Batch, Clock, Finding, Response

BATCH = 1000  # most findings that are accepted in one transaction


class Web(Protocol):
    """Web access for sources.

    Every request obeys the guard, robots.txt, the host's slot and size limits. Redirects are
    followed one by one.
    """

    async def get(
        self,
        url: str,
        *,
        etag: str | None = None,
        last_modified: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        """Request a URL. Return a successful response, or a 304 if a validator was given.

        Raises model.Failure in all other cases.
        """


@dataclass(frozen=True)
class SourceContext:
    config: Config
    clock: Clock
    rng: random.Random
    web: Web
    base: Path  # directory for relative paths


class BaseSource(ABC):
    """Base class of sources with defaults for optional methods. A subclass must define `read`."""

    every: float | None = None
    served = False

    def __init__(self, spec: SourceSpec, context: SourceContext) -> None:
        self.spec, self.context, self.name, self.every = spec, context, spec.name, spec.every

    @abstractmethod
    def read(self, cursor: bytes | None) -> AsyncGenerator[Batch, None]: ...

    def due(self, now: float) -> float | None:
        return None

    async def preview(self, cursor: bytes | None, limit: int) -> Sequence[Finding]:
        """Return the first findings of a round.

        Override it if reading has an effect outside before the generator is resumed.
        """
        async with aclosing(self.read(cursor)) as batches:
            async for batch in batches:
                if batch.findings or batch.idle:
                    return list(batch.findings)[:limit]
        return []

    async def place(self, to: str) -> bytes | None:
        raise UsageError(f"source {self.name} has no position {to!r}", hint="use `--to start`")

    def describe(self, cursor: bytes | None) -> str:
        return "at the start" if cursor is None else cursor.decode("utf-8", "replace")[:100]

    async def close(self) -> None:
        return None


def options(spec: SourceSpec, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the adapter's options, with defaults for those that are not set. Raises ConfigError.

    A value must have the type of its default. If the default is None, any type is allowed.
    """
    check_names(f"source {spec.name}", spec.options, known)
    for name, value in spec.options.items():
        default = known[name]
        if default is not None and not isinstance(
            value, int | float if isinstance(default, float) else type(default)
        ):
            raise ConfigError(
                f"source {spec.name}: {name} is {value!r}",
                hint=f"for example {name} = {msgspec.json.encode(default).decode()}",
            )
    return {**known, **spec.options}
