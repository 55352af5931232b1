"""What sources that look again and again have in common: a bounded memory of what they saw, its
bytes, and options that hold secrets. No source is here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from hashlib import blake2b
from typing import Any, TypeVar

import msgspec
import zstandard

from penstock.authoring.pipeline import SourceSpec
from penstock.errors import ConfigError, UsageError
from penstock.rules.identity import BadUrl, canonical_url
from penstock.sources.base import BaseSource, SourceContext

LEFT = 50_000  # versions that are remembered after they were left; twelve bytes each
MAX_STATE = 256 << 20  # bytes of an unpacked state
S = TypeVar("S")


class Polling(BaseSource):
    """Ends every round by returning. `looks_at` is set where the outside said when to look again."""

    looks_at: float | None = None

    def __init__(self, spec: SourceSpec, context: SourceContext, *, every: float) -> None:
        super().__init__(spec, context)
        self.interval = spec.every if spec.every is not None else every
        self.every = self.interval

    def due(self, now: float) -> float | None:
        return self.looks_at if self.looks_at is not None and self.looks_at > now else None

    async def place(self, to: str) -> bytes | None:
        """`now`: as if everything that is there had been told already."""
        if to != "now":
            raise UsageError(
                f"source {self.name} has no position {to!r}", hint="--to start, or --to now"
            )
        cursor = None
        async for batch in self.read(None):
            cursor = batch.cursor if batch.cursor is not None else cursor
        return cursor


# -- the memory ------------------------------------------------------------------------------------


def short(*parts: str | bytes) -> bytes:
    """Eight bytes: among a million keys, two of them are alike once in thirty million times."""
    digest = blake2b(digest_size=8)
    for part in parts:
        raw = part if isinstance(part, bytes) else part.encode("utf-8", "surrogatepass")
        digest.update(len(raw).to_bytes(4, "big") + raw)
    return digest.digest()


class Kept(msgspec.Struct, array_like=True, frozen=True):
    """A memory at rest."""

    known: bytes = b""  # 8 bytes key, 8 bytes version; the longest unseen first
    left: bytes = b""


class Left:
    """Which versions of which keys were left behind, and how often; the last so many.

    It makes the ids of what returns (a price that goes up and down again) differ from those of its
    first time, while a round that is read twice because of a crash gives the same ids: they follow
    from the memory at the beginning of the round.
    """

    def __init__(self, kept: bytes) -> None:
        self._times = {
            kept[n : n + 8]: int.from_bytes(kept[n + 8 : n + 12], "big")
            for n in range(0, len(kept), 12)
        }

    def note(self, key: str, version: bytes) -> None:
        mark = short(key, version)
        self._times[mark] = min(self._times.pop(mark, 0) + 1, 0xFFFFFFFF)

    def times(self, key: str, version: bytes) -> int:
        return self._times.get(short(key, version), 0)

    def kept(self) -> bytes:
        return b"".join(
            mark + n.to_bytes(4, "big") for mark, n in list(self._times.items())[-LEFT:]
        )


class Memory:
    """Which version of which key was seen last. What is not seen any more is kept while there is
    room.
    """

    def __init__(self, kept: Kept, room: int) -> None:
        self._room, self._left = room, Left(kept.left)
        self._known = {
            kept.known[n : n + 8]: kept.known[n + 8 : n + 16] for n in range(0, len(kept.known), 16)
        }
        self._seen: set[bytes] = set()
        self.again = 0  # keys that came twice in this round

    def __len__(self) -> int:
        return len(self._known)

    def sees(self, key: str, version: bytes) -> int | None:
        """None: nothing new (or seen in this round already). Else how often this very version was
        left before: 0, as a rule.
        """
        key8 = short(key)
        if key8 in self._seen:
            self.again += 1
            return None
        self._seen.add(key8)
        before = self._known.pop(key8, None)
        self._known[key8] = version  # last in line now
        if before == version:
            return None
        if before is not None:
            self._left.note(key, before)
        return self._left.times(key, version)

    def kept(self) -> Kept:
        return Kept(
            b"".join(k + v for k, v in list(self._known.items())[-self._room :]), self._left.kept()
        )


def pack(state: msgspec.Struct) -> bytes:
    return zstandard.ZstdCompressor(level=6).compress(msgspec.msgpack.encode(state))


def unpack(cursor: bytes, kind: type[S]) -> S | None:
    """None: not ours, or of another version; then reading begins anew, with the same ids."""
    try:
        return msgspec.msgpack.decode(
            zstandard.ZstdDecompressor().decompress(cursor, max_output_size=MAX_STATE), type=kind
        )
    except (zstandard.ZstdError, msgspec.MsgspecError, ValueError):
        return None


# -- options ---------------------------------------------------------------------------------------


def target(spec: SourceSpec, kind: str) -> str:
    """The canonical http(s) URL behind `kind+`. Raises ConfigError."""
    url = spec.url.partition("+")[2] if spec.url.startswith(kind + "+") else ""
    example = f"{kind}+https://example.com/{'sitemap.xml' if kind == 'sitemap' else 'feed.xml' if kind == 'feed' else 'products.json'}"
    if not re.match(r"https?://", url, re.I):
        raise ConfigError(
            f"source {spec.name}: its URL does not begin with {kind}+https:// or {kind}+http://",
            hint=f"for example {example}",
        )
    try:
        return canonical_url(url)
    except BadUrl as e:
        raise ConfigError(
            f"source {spec.name}: its URL: {e.reason}", hint=f"for example {example}"
        ) from None


def one_of(spec: SourceSpec, name: str, value: Any, words: Iterable[str]) -> Any:
    words = list(words)
    if value not in words:
        raise ConfigError(f"source {spec.name}: {name} is {value!r}", hint=" or ".join(words))
    return value


def whole(spec: SourceSpec, name: str, value: Any, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(
            f"source {spec.name}: {name} is {value!r}", hint=f"a whole number from {low} to {high}"
        )
    return value


def headers_of(spec: SourceSpec, given: Any) -> dict[str, str]:
    """Names in lower case; "env:NAME" is read from the environment. Raises ConfigError, without the
    value.
    """
    found = {}
    for name, value in (given or {}).items():
        if not isinstance(value, str) or not re.fullmatch(
            r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", str(name)
        ):
            raise ConfigError(
                f"source {spec.name}: headers.{name} is no header",
                hint='headers = {Authorization = "env:API_TOKEN"}',
            )
        secret = secret_of(spec, f"headers.{name}", value)
        if not re.fullmatch(r"[\t -~\x80-\xff]*", secret):
            raise ConfigError(
                f"source {spec.name}: headers.{name} has characters that no header can have",
                hint="a line of plain text",
            )
        found[str(name).lower()] = secret
    return found


def secret_of(spec: SourceSpec, name: str, value: str) -> str:
    """`env:NAME`, or words with it at the end: `Bearer env:API_TOKEN`."""
    m = re.fullmatch(r"(.*?)\benv:([A-Za-z_][A-Za-z0-9_]*)", value, re.S)
    if m is None:
        return value
    if not (secret := os.environ.get(m[2])):
        raise ConfigError(
            f"source {spec.name}: {name} needs the environment variable {m[2]}, and it is not set",
            hint=f"export {m[2]}=…",
        )
    return m[1] + secret.strip()
