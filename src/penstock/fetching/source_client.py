"""Web access for sources: requests follow the guard, robots.txt and the host's slots."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping

import msgspec

from penstock.fetching.sending import host_paused
from penstock.fetching.stage import FetchStage
from penstock.model import Ask, ErrorClass, Failure
from penstock.ports import Baseline, Clock, Pace, Response
from penstock.rules.events import event_of
from penstock.rules.identity import BadUrl
from penstock.rules.masking import mask


class SourceWeb:
    """Web access for sources.

    It is created when the pipeline is checked. `bind` must be called before the first `get`.
    """

    def __init__(self) -> None:
        self._bound: tuple[FetchStage, Pace, Clock] | None = None

    def bind(self, stage: FetchStage, pace: Pace, clock: Clock) -> None:
        self._bound = stage, pace, clock

    async def get(
        self,
        url: str,
        *,
        etag: str | None = None,
        last_modified: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        """See sources.base.Web."""
        assert self._bound is not None
        stage, pace, clock = self._bound
        try:
            event = event_of(url, id_=secrets.token_hex(16), source="source", host_by=stage.key_by)
        except BadUrl as e:
            raise Failure(
                ErrorClass.PERMANENT, f"{mask(url)[:200]!r} is not a URL: {e.reason}"
            ) from None
        (slot,) = (await pace.reserve({event.key: 1}))[event.key]
        if pace.blocked_until(event.key) == math.inf:
            # The reader records the error and tries again. A wait would look like a slow source.
            raise host_paused(event.key, after=None)
        if (wait := slot - clock.now()) > 0:
            await clock.sleep(wait)
        event = msgspec.structs.replace(event, ask=Ask(headers=dict(headers or {})))
        return await stage.fetch(event, Baseline(etag=etag, last_modified=last_modified))
