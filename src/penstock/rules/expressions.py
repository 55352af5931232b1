"""JMESPath expressions of sources: compiled when the configuration is read, applied to payloads.

Each of the two steps raises only one exception type.
"""

from __future__ import annotations

from typing import Any

import jmespath
from jmespath.exceptions import JMESPathError

from penstock.errors import ConfigError

_SEARCH_ERRORS = (
    JMESPathError,
    TypeError,
    ValueError,
    ArithmeticError,  # for example floor() of infinity
    RecursionError,
)


class Unfit(Exception):
    """The expression cannot be applied to this payload. The message is the reason."""


class Expression:
    def __init__(self, text: Any, where: str, example: str) -> None:
        """Compile an expression. Raise ConfigError, with `where` and `example` in its text."""
        if not isinstance(text, str):
            raise ConfigError(
                f"{where}: {text!r} is not a JMESPath expression",
                hint=f'write a string such as "{example}"',
            )
        try:
            self._search = jmespath.compile(text).search
        except (JMESPathError, RecursionError) as e:
            raise ConfigError(
                f"{where}: {text!r} is not valid JMESPath: {' '.join(str(e).split())}",
                hint=f'for example "{example}"',
            ) from None

    def search(self, payload: Any) -> Any:
        """Return the result, or None if the expression finds nothing.

        Raise Unfit if it cannot be applied to this payload.
        """
        try:
            return self._search(payload)
        except _SEARCH_ERRORS as e:
            raise Unfit(" ".join(str(e).split())[:200]) from None
