"""Fingerprint of dead letters. Those with the same cause share one: numbers, ids and URLs in the
reason are ignored.
"""

from __future__ import annotations

import hashlib
import re

_VARYING = re.compile(
    r"https?://\S+|\b[0-9a-f]{8,}\b|'[^']{0,200}'|\"[^\"]{0,200}\"|\d+(?:\.\d+)?", re.I
)


def fingerprint(stage: str, kind: str, reason: str) -> str:
    shape = _VARYING.sub("#", reason)[:300]
    return hashlib.blake2b(
        f"{stage}\0{kind}\0{shape}".encode("utf-8", "replace"), digest_size=6
    ).hexdigest()
