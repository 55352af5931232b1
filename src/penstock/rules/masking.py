"""Which parts of an address are secret: everything that is printed, logged or stored comes by."""

from __future__ import annotations

import re

_SECRET_PARAMETER = re.compile(
    r"(?i)((?:^|[?&;\s])[^=&;?\s]*(?:pass|pwd|secret|token|key|credential|auth)[^=&;?\s]*=)[^&;#\s]*"
)


def mask(url: str) -> str:
    """The URL without its passwords: for everything that is printed, logged or stored. Rather too
    much is masked than too little.
    """
    scheme, colon, rest = url.partition(":")
    slashes = rest[: len(rest) - len(rest.lstrip("/"))]
    rest = rest[len(slashes) :]
    at = rest.rfind("@")  # the last one: passwords are often put in unescaped
    if at >= 0 and scheme not in ("sqlite", "file"):
        user, separator, _ = rest[:at].partition(":")
        rest = f"{user}{separator}{'***' if separator else ''}{rest[at:]}"
    return scheme + colon + slashes + _SECRET_PARAMETER.sub(r"\1***", rest)
