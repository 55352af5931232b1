"""The head of an answer, from lines to status and headers. No sockets, no limits."""

from __future__ import annotations

import re
from functools import lru_cache

from penstock.rules.verdict import Breach, breach

_END = [b"\r\n"]
_USUAL, _KEPT = 200, 4096  # bytes of a line that is worth remembering, and how many are
_seen: dict[
    bytes, tuple[str, str]
] = {}  # servers repeat most of their lines in answer after answer
_fold = re.compile(r"\n[ \t]+").sub


def parse_head(lines: list[bytes]) -> tuple[int, str, dict[str, str]]:
    """Status, version and headers (lower case; repeated ones joined by a comma, cookies by a line
    feed) of the last head in `lines`. Raises Failure where that is not all there: libcurl takes a
    connection that ends in the middle for the end of the head.
    """
    if (
        lines[-1:] == _END and lines.index(b"\r\n") == len(lines) - 1
    ):  # one head and nothing else, as nearly always
        plain: dict[str, str] = {}
        known = _seen.get
        for line in lines[1:-1]:
            pair = known(line) or _read(line)
            if pair is None or pair[0] in plain:
                break
            plain[pair[0]] = pair[1]
        else:
            return *_status(lines[0].decode("latin-1")), plain
    head, end, rest = b"".join(lines).decode("latin-1").replace("\r\n", "\n").partition("\n\n")
    while rest.startswith("HTTP/"):
        head, end, rest = rest.partition("\n\n")
    if not end:
        raise breach(Breach.CUT)
    if "\n " in head or "\n\t" in head:
        head = _fold(" ", head)
    first, *fields = head.split("\n")
    headers: dict[str, str] = {}
    for field in fields:
        name, colon, value = field.partition(":")
        if not colon:
            continue
        name = name.rstrip().lower()
        if name in headers:
            value = headers[name] + ("\n" if name == "set-cookie" else ", ") + value.strip()
        headers[name] = value.strip()
    return *_status(first), headers


@lru_cache(maxsize=64)
def _status(line: str) -> tuple[int, str]:
    version, _, reason = line.partition(" ")
    code = reason[:3]
    return int(code) if code.isdecimal() else 0, version[5:]


def _read(line: bytes) -> tuple[str, str] | None:
    """Name and value of a line that stands for itself; None for what has to be looked at together
    with others.
    """
    name, colon, value = line.decode("latin-1").partition(":")
    text = value[:-2]
    if not colon or line[0] in b" \t" or value[-2:] != "\r\n" or "\n" in text:
        return None
    pair = name.rstrip().lower(), text.strip()
    if len(line) <= _USUAL:
        if len(_seen) >= _KEPT:
            _seen.clear()  # cheaper than to know which was used last
        _seen[line] = pair
    return pair
