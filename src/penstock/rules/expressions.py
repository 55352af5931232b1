"""JMESPath as sources use it: compiled when the configuration is read, applied to payloads from
anywhere, with one error each.
"""

from __future__ import annotations

from typing import Any

import jmespath
from jmespath.exceptions import JMESPathError

from penstock.errors import ConfigError

_WRONG = (
    JMESPathError,
    TypeError,
    ValueError,
    ArithmeticError,
    RecursionError,
)  # ArithmeticError: floor() of infinity


class Unfit(Exception):
    """The expression cannot be applied to this payload; the reason, for people."""


class Expression:
    def __init__(self, text: Any, where: str, example: str) -> None:
        """`where` and `example` are for the person who wrote it. Raises ConfigError."""
        if not isinstance(text, str):
            raise ConfigError(
                f"{where}: {text!r} is no JMESPath expression", hint=f'a string such as "{example}"'
            )
        try:
            self._search = jmespath.compile(text).search
        except (JMESPathError, RecursionError) as e:
            raise ConfigError(
                f"{where}: {text!r} is no JMESPath: {' '.join(str(e).split())}",
                hint=f'for example "{example}"',
            ) from None

    def search(self, payload: Any) -> Any:
        """None: it finds nothing. Raises Unfit."""
        try:
            return self._search(payload)
        except _WRONG as e:
            raise Unfit(" ".join(str(e).split())[:200]) from None
