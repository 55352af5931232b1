"""Masks passwords and tokens in URLs before they are printed, logged or stored."""

from __future__ import annotations

import re

_SECRET_PARAMETER = re.compile(
    r"(?i)((?:^|[?&;\s])[^=&;?\s]*(?:pass|pwd|secret|token|key|credential|auth)[^=&;?\s]*=)"
    r"[^&;#\s]*"
)


def mask(url: str) -> str:
    """Return the URL without its passwords, for output, logs and storage.

    In doubt a part is masked.
    """
    scheme, colon, rest = url.partition(":")
    slashes = rest[: len(rest) - len(rest.lstrip("/"))]
    rest = rest[len(slashes) :]
    at = rest.rfind("@")  # the last "@", because passwords may contain an unescaped one
    if at >= 0 and scheme not in ("sqlite", "file"):
        user, separator, _ = rest[:at].partition(":")
        rest = f"{user}{separator}{'***' if separator else ''}{rest[at:]}"
    return scheme + colon + slashes + _SECRET_PARAMETER.sub(r"\1***", rest)
