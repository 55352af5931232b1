"""Errors that the user sees, and all exit codes. Each error has a message and a hint."""

from __future__ import annotations

OK, RAN_WITH_FAILURES, USAGE, CONFIGURATION, UNREACHABLE, DIFFERENCES = 0, 1, 2, 3, 4, 5


class PenstockError(Exception):
    """Printed as `Error: …` / `Try: …`, without a traceback."""

    exit_code = RAN_WITH_FAILURES

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message, self.hint = message, hint


class UsageError(PenstockError):
    """The command line is not valid."""

    exit_code = USAGE


class ConfigError(PenstockError):
    """The configuration or a pipeline file is not valid, or an optional package is missing.

    The message names the path.
    """

    exit_code = CONFIGURATION


class Unreachable(PenstockError):
    """A server or store cannot be reached, read or written, or rejects this client."""

    exit_code = UNREACHABLE


class StoreRefused(PenstockError):
    """The store belongs to another release or pipeline. This process has not changed it."""

    exit_code = CONFIGURATION


class BadEnvelope(PenstockError):
    """Bytes on a topic are not an event of a known version."""


class NewerMessage(BadEnvelope):
    """A message was written by a newer release, and this release cannot read it.

    It is never a dead letter: a worker of the newer release will read it.
    """

    def __init__(self, what: str, version: int, known: int) -> None:
        super().__init__(
            f"{what} version {version} is newer than version {known}, which this release reads",
            hint="upgrade this installation of Penstock: its newer workers read the message",
        )
        self.what, self.version, self.known = what, version, known


class StoreUnavailable(PenstockError):
    """The store does not accept writes now (disk full, locked, read-only).

    The write is retried, and no attempt is charged.
    """

    exit_code = UNREACHABLE


class SourceDown(PenstockError):
    """The server of a source does not answer now, or its answer is not readable.

    The source is read again, after `after` seconds if the server has given that time.
    """

    exit_code = UNREACHABLE

    def __init__(self, message: str, *, hint: str = "", after: float | None = None) -> None:
        super().__init__(message, hint=hint)
        self.after = after


class RequestRefused(PenstockError):
    """A request to an endpoint of Penstock is answered with this status.

    The message is sent to the client, so it contains no secret.
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
        self.why = why  # for the log of Penstock, with more detail than the message
        # One entry per rejected item, if only some items of the request are wrong.
        self.reasons: list[dict[str, object]] = []
