"""Common parts of polling sources: the versions they have seen, their cursor, and their options."""

from __future__ import annotations

import re
from collections.abc import Iterable
from hashlib import blake2b
from typing import Any, TypeVar

import msgspec
import zstandard

from penstock.authoring.pipeline import SourceSpec
from penstock.config.options import resolve_env
from penstock.errors import ConfigError, UsageError
from penstock.ports import Response
from penstock.rules.identity import BadUrl, canonical_url
from penstock.sources.base import BaseSource, SourceContext

MAX_PAST_VERSIONS = 50_000  # replaced versions in the cursor, twelve bytes each
MAX_STATE = 256 << 20  # bytes of a decompressed state
MAX_VALIDATOR = 1000  # characters of an ETag or Last-Modified header
S = TypeVar("S")


class Polling(BaseSource):
    """Source whose `read` returns at the end of each round.

    `due_at` is set if the server has requested a later time for the next round.
    """

    due_at: float | None = None

    def __init__(self, spec: SourceSpec, context: SourceContext, *, every: float) -> None:
        super().__init__(spec, context)
        self.interval = self.every = spec.every if spec.every is not None else every

    def due(self, now: float) -> float | None:
        return self.due_at if self.due_at is not None and self.due_at > now else None

    async def place(self, to: str) -> bytes | None:
        """Return the cursor for `now`, as if every current item had been reported already."""
        if to != "now":
            raise UsageError(
                f"source {self.name} has no position {to!r}", hint="use `--to start` or `--to now`"
            )
        cursor = None
        async for batch in self.read(None):
            cursor = batch.cursor if batch.cursor is not None else cursor
        return cursor


# -- versions --------------------------------------------------------------------------------------


def short_hash(*parts: str | bytes) -> bytes:
    """Return a hash of eight bytes.

    Among a million keys, the chance that two have the same hash is 1 in 30 million.
    """
    digest = blake2b(digest_size=8)
    for part in parts:
        raw = part if isinstance(part, bytes) else part.encode("utf-8", "surrogatepass")
        digest.update(len(raw).to_bytes(4, "big") + raw)
    return digest.digest()


class StoredVersions(msgspec.Struct, array_like=True, frozen=True):
    """Seen versions in the format of a cursor."""

    known: bytes = b""  # 8 bytes key, 8 bytes version. The key that was seen longest ago is first.
    left: bytes = b""  # replaced versions


class PastVersions:
    """Counts how often each version of each key was replaced, for the last 50,000 versions.

    If a version returns (a price that rises and falls again), the count makes its id differ from
    its first id. A round that is repeated after a crash gives the same ids, because the counts come
    from the cursor at the start of the round.
    """

    def __init__(self, stored: bytes) -> None:
        self._counts = {
            stored[n : n + 8]: int.from_bytes(stored[n + 8 : n + 12], "big")
            for n in range(0, len(stored), 12)
        }

    def add(self, key: str, version: bytes) -> None:
        hashed = short_hash(key, version)
        self._counts[hashed] = min(self._counts.pop(hashed, 0) + 1, 0xFFFFFFFF)

    def count(self, key: str, version: bytes) -> int:
        return self._counts.get(short_hash(key, version), 0)

    def stored(self) -> bytes:
        return b"".join(
            hashed + n.to_bytes(4, "big")
            for hashed, n in list(self._counts.items())[-MAX_PAST_VERSIONS:]
        )


class SeenVersions:
    """The last seen version of each key.

    Keys that are no longer seen stay until there are more than `limit` keys.
    """

    def __init__(self, stored: StoredVersions, limit: int) -> None:
        self._limit, self._past = limit, PastVersions(stored.left)
        self._known = {
            stored.known[n : n + 8]: stored.known[n + 8 : n + 16]
            for n in range(0, len(stored.known), 16)
        }
        self._seen: set[bytes] = set()
        self.repeated = 0  # items of this round whose key another item had already

    def observe(self, key: str, version: bytes) -> list[str] | None:
        """Record the version of a key.

        Return None if the version is known, or if the key was already seen in this round.
        Otherwise return the last parts of the finding's id. They are empty if this version was
        never replaced before.
        """
        key8 = short_hash(key)
        if key8 in self._seen:
            self.repeated += 1
            return None
        self._seen.add(key8)
        before = self._known.pop(key8, None)
        self._known[key8] = version  # the last key in the order is the most recently seen
        if before == version:
            return None
        if before is not None:
            self._past.add(key, before)
        count = self._past.count(key, version)
        return [str(count)] if count else []

    def stored(self) -> StoredVersions:
        return StoredVersions(
            b"".join(k + v for k, v in list(self._known.items())[-self._limit :]),
            self._past.stored(),
        )


def pack(state: msgspec.Struct) -> bytes:
    return zstandard.ZstdCompressor(level=6).compress(msgspec.msgpack.encode(state))


def unpack(cursor: bytes | None, kind: type[S]) -> S | None:
    """Decode a cursor. Return None if there is none, or if it is invalid or has another format.

    Then the source is read from the start, with the same ids.
    """
    try:
        if cursor is None:
            return None
        return msgspec.msgpack.decode(
            zstandard.ZstdDecompressor().decompress(cursor, max_output_size=MAX_STATE), type=kind
        )
    except (zstandard.ZstdError, msgspec.MsgspecError, ValueError):
        return None


def validators(response: Response) -> tuple[str | None, str | None]:
    """Return ETag and Last-Modified, or None for one that is missing or too long for a cursor."""
    etag, modified = map(response.headers.get, ("etag", "last-modified"))
    return (
        etag if etag and len(etag) <= MAX_VALIDATOR else None,
        modified if modified and len(modified) <= MAX_VALIDATOR else None,
    )


# -- options ---------------------------------------------------------------------------------------


def target(spec: SourceSpec, kind: str) -> str:
    """Return the canonical http(s) URL that follows `kind+`. Raises ConfigError."""
    url = spec.url.partition("+")[2] if spec.url.startswith(kind + "+") else ""
    file = "sitemap.xml" if kind == "sitemap" else "feed.xml" if kind == "feed" else "products.json"
    example = f"{kind}+https://example.com/{file}"
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


def one_of(spec: SourceSpec, name: str, value: Any, allowed: Iterable[str]) -> Any:
    """Return the value if it is one of `allowed`. Raises ConfigError if not."""
    allowed = list(allowed)
    if value not in allowed:
        raise ConfigError(f"source {spec.name}: {name} is {value!r}", hint=" or ".join(allowed))
    return value


def integer(spec: SourceSpec, name: str, value: Any, low: int, high: int) -> int:
    """Return the value if it is an integer from `low` to `high`. Raises ConfigError if not."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(
            f"source {spec.name}: {name} is {value!r}",
            hint=f"use a whole number from {low} to {high}",
        )
    return value


def headers_of(spec: SourceSpec, given: Any) -> dict[str, str]:
    """Return the headers with lower-case names. "env:NAME" is read from the environment.

    Raises ConfigError, which never contains a value.
    """
    found = {}
    for name, value in (given or {}).items():
        if not isinstance(value, str) or not re.fullmatch(
            r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", str(name)
        ):
            raise ConfigError(
                f"source {spec.name}: headers.{name} is not a valid header",
                hint='for example headers = {Authorization = "env:API_TOKEN"}',
            )
        secret = secret_of(spec, f"headers.{name}", value)
        if not re.fullmatch(r"[\t -~\x80-\xff]*", secret):
            raise ConfigError(
                f"source {spec.name}: headers.{name} has characters that a header cannot have",
                hint="use one line of plain text",
            )
        found[str(name).lower()] = secret
    return found


def secret_of(spec: SourceSpec, name: str, value: str) -> str:
    """Replace `env:NAME` at the end of the value, as in `Bearer env:API_TOKEN`.

    Raises ConfigError if the environment variable is not set.
    """
    m = re.fullmatch(r"(.*?)\b(env:[A-Za-z_][A-Za-z0-9_]*)", value, re.S)
    if m is None:
        return value
    return m[1] + resolve_env(f"source {spec.name}: {name}", m[2]).strip()
