"""The one error of this tool: a sentence, and what to do about it. Who prints it is in __main__."""

from __future__ import annotations

import sys


class ServiceError(Exception):
    def __init__(self, message: str, hint: str, *, status: int = 3) -> None:
        super().__init__(message)
        self.message, self.hint, self.status = (
            message,
            hint,
            status,
        )  # the command's exit status: 2 for a mistake in typing it


def say(text: str) -> None:
    """Progress goes to stderr: stdout belongs to whoever reads the answer."""
    print(f"services: {text}", file=sys.stderr, flush=True)
