"""Error of this tool, with a message and a hint. `__main__` prints it."""

from __future__ import annotations

import sys


class ServiceError(Exception):
    def __init__(self, message: str, hint: str, *, status: int = 3) -> None:
        super().__init__(message)
        self.message, self.hint = message, hint
        self.status = status  # exit status of the command: 2 for a wrong command line


def say(text: str) -> None:
    """Print progress to stderr. stdout is for the result."""
    print(f"services: {text}", file=sys.stderr, flush=True)
