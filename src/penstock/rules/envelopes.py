"""Envelopes that are written again, with the fields that only a newer release knows."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.model import CODEC_MINOR, ENVELOPE_LEVELS, Event, encode_event


def encode_again(event: Event, before: bytes) -> bytes:
    """Encode a changed event. Keep the fields of its envelope `before` that are not known here.

    A newer minor version of the envelope has added them.
    """
    after = encode_event(event)
    old = msgspec.json.decode(before, type=dict[str, Any])
    new = msgspec.json.decode(after, type=dict[str, Any])
    minor = max(old.get("penstockminor", 0), CODEC_MINOR)
    changed = minor > CODEC_MINOR
    if changed:
        new["penstockminor"] = minor
    for path, known in ENVELOPE_LEVELS:
        source: Any = old
        for name in path:
            source = source.get(name, {})
        unknown = {name: value for name, value in source.items() if name not in known}
        if unknown:
            target = new
            for name in path:
                target = target.setdefault(name, {})
            target.update(unknown)
            changed = True
    return msgspec.json.encode(new) if changed else after
