"""Parser of response heads: lines to status and headers. No sockets, no limits."""

from __future__ import annotations

import re
from functools import lru_cache

from penstock.model import Reason
from penstock.rules.verdict import breach

_END = [b"\r\n"]
# Servers repeat most header lines in every response, so parsed lines are cached.
# Largest cached line in bytes, and largest number of cached lines.
_MAX_CACHED_LINE, _MAX_CACHED_LINES = 200, 4096
_cached: dict[bytes, tuple[str, str]] = {}
_fold = re.compile(r"\n[ \t]+").sub


def parse_head(lines: list[bytes]) -> tuple[int, str, dict[str, str]]:
    """Return status, version and headers of the last head in `lines`.

    Header names are in lower case. Repeated headers are joined by a comma, cookies by a line feed.
    Raise Failure if the head is incomplete: libcurl treats a connection that ends there as the end
    of the head.
    """
    # Fast path for one complete head, which is the usual case.
    if lines[-1:] == _END and lines.index(b"\r\n") == len(lines) - 1:
        known = _cached.get
        pairs = [known(line) or _parse_line(line) for line in lines[1:-1]]
        plain = dict(filter(None, pairs))
        if len(plain) == len(pairs):  # every line was parsed alone, no name is repeated
            return *_status(lines[0].decode("latin-1")), plain
    head, end, rest = b"".join(lines).decode("latin-1").replace("\r\n", "\n").partition("\n\n")
    complete = bool(end)
    if rest.startswith("HTTP/"):
        head, complete = _last_head(rest)
    if not complete:
        raise breach(Reason.CUT)
    if "\n " in head or "\n\t" in head:
        head = _fold(" ", head)
    first, *fields = head.split("\n")
    values: dict[str, list[str]] = {}
    for field in fields:
        name, colon, value = field.partition(":")
        if not colon:
            continue
        values.setdefault(name.rstrip().lower(), []).append(value.strip())
    return *_status(first), {
        name: ("\n" if name == "set-cookie" else ", ").join(found).strip()
        for name, found in values.items()
    }


def _last_head(rest: str) -> tuple[str, bool]:
    """Return the last of several heads, and whether it is complete."""
    heads = rest.split("\n\n")
    last = next((n for n, head in enumerate(heads) if not head.startswith("HTTP/")), len(heads)) - 1
    return heads[last], last < len(heads) - 1


@lru_cache(maxsize=64)
def _status(line: str) -> tuple[int, str]:
    version, _, reason = line.partition(" ")
    code = reason[:3]
    return int(code) if code.isdecimal() else 0, version[5:]


def _parse_line(line: bytes) -> tuple[str, str] | None:
    """Return name and value of a header line, or None if it must be parsed with other lines."""
    name, colon, value = line.decode("latin-1").partition(":")
    text = value[:-2]
    if not colon or line[0] in b" \t" or value[-2:] != "\r\n" or "\n" in text:
        return None
    pair = name.rstrip().lower(), text.strip()
    if len(line) <= _MAX_CACHED_LINE:
        if len(_cached) >= _MAX_CACHED_LINES:
            _cached.clear()  # cheaper than tracking the least recently used line
        _cached[line] = pair
    return pair
