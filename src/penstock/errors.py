"""Errors that reach the user: each says what is wrong and what to try next; exit codes live here
and nowhere else.
"""

from __future__ import annotations

OK, RAN_WITH_FAILURES, USAGE, CONFIGURATION, UNREACHABLE, DIFFERENCES = 0, 1, 2, 3, 4, 5


class PenstockError(Exception):
    """Printed as `Error: …` / `Try: …`, without a traceback."""

    exit_code = RAN_WITH_FAILURES

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message, self.hint = message, hint


class UsageError(PenstockError):
    """The command line does not make sense."""

    exit_code = USAGE


class ConfigError(PenstockError):
    """Configuration, a pipeline file or a missing extra; names its path."""

    exit_code = CONFIGURATION


class Unreachable(PenstockError):
    """A server or a store that cannot be reached, read or written, or that refuses us."""

    exit_code = UNREACHABLE


class BadEnvelope(PenstockError):
    """Bytes on a topic that are not an event of a version we know."""


class StoreUnavailable(PenstockError):
    """Our own store does not take the write now (disk full, locked, read-only). Nobody's budget is
    spent on it.
    """

    exit_code = UNREACHABLE


class SourceDown(PenstockError):
    """A source's outside does not answer now, or not in a way that can be read. It is tried again,
    after `after` seconds where that is known.
    """

    exit_code = UNREACHABLE

    def __init__(self, message: str, *, hint: str = "", after: float | None = None) -> None:
        super().__init__(message, hint=hint)
        self.after = after


class RequestRefused(PenstockError):
    """A request to one of our own endpoints that is answered with this status. The message goes to
    whoever sent it, so it holds no secret.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        hint: str = "",
        after: float | None = None,
        why: str = "",
    ) -> None:
        super().__init__(message, hint=hint)
        self.status, self.after = status, after
        self.why = why  # for our own log, where the sender is told less
        self.reasons: list[dict[str, object]] = []  # of each item, where only some are wrong
