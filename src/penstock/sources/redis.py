"""Source for a Redis list, set or sorted set of start URLs, as scrapy-redis uses them.

Elements are moved atomically into a hash, and deleted from it when the ledger has accepted them.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import AsyncGenerator, Awaitable, Iterator, Mapping, Sequence
from typing import Any, Final
from urllib.parse import parse_qsl, quote, urlencode, urlsplit, urlunsplit

import msgspec

from penstock.authoring.pipeline import SourceSpec
from penstock.config.options import resolve_env
from penstock.errors import ConfigError, PenstockError, SourceDown, UsageError
from penstock.model import mint
from penstock.ports import Batch, Finding
from penstock.rules.json_limits import check_values, memory_of
from penstock.rules.masking import mask
from penstock.sources.base import BATCH, BaseSource, SourceContext, options
from penstock.stores.redis import Script, Server

MIN_VERSION: Final = (5, 0)  # the first with replication of script effects and with ZPOPMAX
POLL_INTERVAL: Final = 0.2  # seconds between two polls of an empty list
IDLE_REPORT_INTERVAL: Final = 2.0  # seconds between two empty batches
MAX_ELEMENT: Final = 1 << 20  # bytes of an element that is read
BATCH_BYTES: Final = 4 << 20  # of elements that are taken together, and of memory of a batch
SHOWN: Final = 500  # characters of a refused element in the payload
EXAMPLE: Final = "redis://HOST:6379/0?list=spider:start_urls (or set=…, zset=…)"

# Elements that were moved and are not accepted come first, with the numbers they got when they were
# moved. Numbers start again if the keys are lost, so each number belongs to an epoch. The element
# itself is also part of the event's id, because a server may be restored to an older state.
_SHOW = """
local function show(found, number, element)
  found[#found + 1] = number
  found[#found + 1] = #element
  found[#found + 1] = #element > tonumber(ARGV[2]) and string.sub(element, 1, 1000) or element
  return math.min(#element, tonumber(ARGV[2]))
end
local function aside(found, weight)
  local numbers = redis.call('HKEYS', KEYS[2])
  table.sort(numbers, function(a, b) return tonumber(a) < tonumber(b) end)
  for _, number in ipairs(numbers) do
    if #found / 3 >= tonumber(ARGV[1]) or weight >= tonumber(ARGV[3]) then break end
    weight = weight + show(found, number, redis.call('HGET', KEYS[2], number))
  end
  return weight
end
local sizes = {list = 'LLEN', set = 'SCARD', zset = 'ZCARD'}
local function size() return redis.call(sizes[ARGV[4]], KEYS[1]) end
"""
TAKE: Final = Script(
    _SHOW + """
local pops = {list = 'LPOP', set = 'SPOP', zset = 'ZPOPMAX'}
local found = {}
local weight = aside(found, 0)
if #found == 0 then
  while size() > 0 and #found / 3 < tonumber(ARGV[1]) and weight < tonumber(ARGV[3]) do
"""
    "    local number = redis.call('HINCRBY', KEYS[3], 'last', 1)"
    " -- whatever may fail, fails before something is popped\n"
    """    redis.call('HSETNX', KEYS[3], 'epoch', ARGV[5])
    local element = redis.call(pops[ARGV[4]], KEYS[1])
    if type(element) == 'table' then element = element[1] end
    redis.call('HSET', KEYS[2], number, element)
    weight = weight + show(found, tostring(number), element)
  end
end
return {redis.call('HGET', KEYS[3], 'epoch') or '', size(), found}
"""
)
PEEK: Final = Script(
    _SHOW
    + """
local found = {}
aside(found, 0)
local epoch, last = unpack(redis.call('HMGET', KEYS[3], 'epoch', 'last'))
local left, elements = tonumber(ARGV[1]) - #found / 3, {}
if left > 0 then
  if ARGV[4] == 'list' then elements = redis.call('LRANGE', KEYS[1], 0, left - 1)
  elseif ARGV[4] == 'set' then elements = redis.call('SRANDMEMBER', KEYS[1], left)
  else elements = redis.call('ZREVRANGE', KEYS[1], 0, left - 1) end
end
for i, element in ipairs(elements) do show(found, tostring(tonumber(last or 0) + i), element) end
return {epoch or '', size(), found}
"""
)
_decode = msgspec.json.Decoder().decode
_undecoded = re.compile("[\ud800-\udfff]").search  # bytes that are not UTF-8, by surrogateescape


class UserServer(Server):
    """Redis server of the user. Its persistence and eviction settings are not checked."""

    def problems(self, facts: Mapping[str, str]) -> Sequence[tuple[bool, str, str]]:
        version = facts.get("redis_version", "0")
        numbers = tuple(int(n) for n in version.split(".")[:2] if n.isdigit())
        return (
            (
                facts.get("loading") == "1",
                "is loading its data",
                "it is retried automatically",
            ),
            (
                numbers < MIN_VERSION,
                f"is version {version}, and a source needs 5.0 or newer",
                "upgrade the server, or push its URLs with `penstock push`",
            ),
            (
                facts.get("role") == "slave",
                "is a replica, which is read-only",
                "name the primary in the source's URL",
            ),
            (
                facts.get("cluster_enabled") == "1",
                "is a cluster node, and a source needs a single primary",
                "name a server without cluster mode",
            ),
        )


class RedisList(BaseSource):
    """Source whose position is in Redis.

    Elements that are taken and not accepted are in the hash `LIST:penstock:SOURCE`.
    """

    def __init__(
        self, spec: SourceSpec, context: SourceContext, server: Server, kind: str, key: str
    ) -> None:
        super().__init__(spec, context)
        self._server, self._kind, self._key = server, kind, key
        self._keys = (key, f"{key}:penstock:{spec.name}", f"{key}:penstock:{spec.name}:count")
        self._epoch = secrets.token_hex(8)  # used if the server has no epoch yet

    async def read(self, cursor: bytes | None) -> AsyncGenerator[Batch, None]:
        clock = self.context.clock
        reported_at = clock.now() - IDLE_REPORT_INTERVAL
        while True:
            epoch, left, taken = await self._run(TAKE, BATCH)
            if taken:
                for batch in _batches(taken):
                    # A batch may have several megabytes of JSON.
                    findings = await asyncio.to_thread(self._findings, epoch, batch)
                    yield Batch(findings=findings, cursor=batch[-1][0], backlog=left)
                    # If that fails, the elements are read again, with the same ids.
                    numbers = [number for number, _, _ in batch]
                    await self._answer(self._server.command("HDEL", self._keys[1], *numbers))
                reported_at = clock.now()
                continue
            if self.every is not None or clock.now() - reported_at >= IDLE_REPORT_INTERVAL:
                yield Batch(idle=True, backlog=left)
                reported_at = clock.now()
            if self.every is not None:
                return
            await clock.sleep(POLL_INTERVAL)

    async def _run(
        self, script: Script, limit: int
    ) -> tuple[str, int, list[tuple[bytes, int, bytes]]]:
        """Run a script. Return the epoch, the number of elements left, and the elements.

        Each element has its number, length and text. Raises SourceDown.
        """
        epoch, left, flat = await self._answer(
            self._server.run(
                script, self._keys, limit, MAX_ELEMENT, BATCH_BYTES, self._kind, self._epoch
            )
        )
        return (
            epoch.decode(),
            left,
            [(flat[i], flat[i + 1], flat[i + 2]) for i in range(0, len(flat), 3)],
        )

    async def _answer(self, answer: Awaitable[Any]) -> Any:
        """Wait for the server's answer. Raises SourceDown."""
        try:
            return await answer
        except PenstockError as e:
            if "WRONGTYPE" not in e.message:
                raise SourceDown(e.message, hint=e.hint) from None
            raise SourceDown(
                f"{self._key} in Redis at {self._server.name} is not a {self._kind}",
                hint="use list=KEY, set=KEY or zset=KEY in the source's URL",
            ) from None

    def _findings(self, epoch: str, taken: Sequence[tuple[bytes, int, bytes]]) -> list[Finding]:
        return [self._finding(epoch, *element) for element in taken]

    def _finding(self, epoch: str, number: bytes, length: int, raw: bytes) -> Finding:
        text = raw.decode("utf-8", "surrogateescape")
        url, payload, wrong = _read(text, length)
        return Finding(
            id=mint("redis", epoch, number.decode(), str(length), text),
            url=url,
            cause=f"{self._key} {int(number)}",
            payload={**payload, "_redis": {"key": self._key, "number": int(number)}},
            refused=wrong,
        )

    # -- for operators -----------------------------------------------------------------------------

    async def preview(self, cursor: bytes | None, limit: int) -> Sequence[Finding]:
        epoch, _, shown = await self._run(PEEK, limit)
        return await asyncio.to_thread(self._findings, epoch or self._epoch, shown)

    async def place(self, to: str) -> bytes | None:
        raise UsageError(
            f"source {self.name} has no positions: "
            f"elements that were taken from {self._key} are deleted",
            hint=f"add the URLs to {self._key} again",
        )

    def describe(self, cursor: bytes | None) -> str:
        return "at the start" if cursor is None else f"{cursor.decode()} taken from {self._key}"

    async def close(self) -> None:
        await self._server.close()


def _batches(taken: Sequence[tuple[bytes, int, bytes]]) -> Iterator[list[tuple[bytes, int, bytes]]]:
    """Divide elements into batches. A batch ends with the element that exceeds the memory."""
    batch: list[tuple[bytes, int, bytes]] = []
    memory = 0
    for element in taken:
        batch.append(element)
        memory += memory_of(element[2])
        if memory >= BATCH_BYTES:
            yield batch
            batch, memory = [], 0
    if batch:
        yield batch


def _read(text: str, length: int) -> tuple[str | None, dict[str, Any], str]:
    """Parse an element: a URL, or a JSON object with one.

    Return the URL, the payload, and the reason if it cannot be parsed.
    """
    wrong = ""
    if length > MAX_ELEMENT:
        wrong = f"the element has {length} bytes, of at most {MAX_ELEMENT}"
    elif _undecoded(text):
        wrong = "the element is not UTF-8"
    elif text.lstrip()[:1] == "{":
        try:
            check_values(text.encode())
            found = _decode(text)
        except (msgspec.DecodeError, ValueError, RecursionError) as e:
            wrong = f"the element is no JSON: {str(e)[:200]}"
        else:
            method = found.get("method")
            if method is None:
                return None, found, ""
            if isinstance(method, str) and method.upper() == "GET":
                return None, found, ""
            wrong = f"the element asks for {str(method)[:20]}, and pages are fetched with GET"
    else:
        url = text.strip()
        return url, {"url": url}, ""
    return (
        None,
        {"element": text[:SHOWN].encode("utf-8", "replace").decode(), "error": wrong},
        wrong,
    )


# -- opening ---------------------------------------------------------------------------------------


def open_source(spec: SourceSpec, context: SourceContext) -> RedisList:
    """Open `redis://HOST/DB?list=KEY` or `rediss://…`. Raises ConfigError.

    The options `username` and `password` take precedence over those in the URL.
    """
    login = {
        name: resolve_env(f"source {spec.name}: {name}", value)
        for name, value in options(spec, {"username": "", "password": ""}).items()
    }
    parts = urlsplit(spec.url)
    given = parse_qsl(parts.query, keep_blank_values=True)
    named = [(kind, key) for kind, key in given if kind in ("list", "set", "zset")]
    if len(named) != 1 or not named[0][1]:
        wrong = "has no list" if not named or not named[0][1] else "has more than one list"
        raise ConfigError(f"source {mask(spec.url)!r} {wrong}", hint=EXAMPLE)
    rest = urlencode(
        [(name, value) for name, value in given if name not in ("list", "set", "zset")]
    )
    address = parts.netloc
    if any(login.values()):
        address = (
            f"{quote(login['username'], safe='')}:{quote(login['password'], safe='')}"
            f"@{address.rpartition('@')[2]}"
        )
    server = UserServer(urlunsplit((parts.scheme, address, parts.path, rest, "")), evictable=False)
    return RedisList(spec, context, server, *named[0])
