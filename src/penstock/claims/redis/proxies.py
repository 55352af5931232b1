"""Health of proxies per host on Redis, shared by the fleet.

URLs of proxies are not stored. See `rules.proxies` for the decisions.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from penstock.claims.redis import scripts as lua
from penstock.claims.views import ProxyView
from penstock.ports import Clock
from penstock.rules import proxies as rules
from penstock.stores.redis import Argument, Blocking, Server


class _Row(msgspec.Struct, frozen=True, array_like=True):
    label: str
    health: rules.Health


_encode = msgspec.msgpack.Encoder().encode
_row = msgspec.msgpack.Decoder(_Row).decode
_list = msgspec.msgpack.Decoder(tuple[float, int, str]).decode  # time, members, error


class RedisProxies(ProxyView):
    """Implements ports.ProxyHealth."""

    def __init__(self, server: Server, base: str, clock: Clock) -> None:
        super().__init__(clock)
        self.server, self.base = server, base
        self._blocking = Blocking(server)
        # (proxy, host) -> encoded row that was last read or written, for compare-and-set.
        self._raw: dict[tuple[str, str], bytes] = {}

    async def _change(
        self,
        proxy: str,
        host: str,
        label: str,
        decide: Callable[[rules.Health | None], rules.Health | None],
    ) -> None:
        seen = self._raw.get((proxy, host), b"")
        while True:
            before = _row(seen).health if seen else None
            after = decide(before)
            raw = seen if after is None or after == before else _encode(_Row(label, after))
            answer = await self.server.run(
                lua.HEALTH, [self.base], f"{proxy}\n{host}", seen, raw, self.clock.now()
            )
            if answer == 1:
                self._take((proxy, host), raw)
                return
            seen = answer

    async def refresh(self) -> None:
        """Read changes of other workers since the last call into the local view."""
        now = self.clock.now()
        flat = await self.server.run(lua.CHANGED, [self.base], self._seen - self.overlap)
        for name, raw in zip(flat[::2], flat[1::2], strict=True):
            proxy, _, host = name.decode().partition("\n")
            self._take((proxy, host), raw)
        self._seen = now

    def _take(self, key: tuple[str, str], raw: bytes) -> None:
        self._raw[key] = raw
        self._show(key, _row(raw).health if raw else None)

    async def listed(self, pool: str, members: int, error: str) -> None:
        await self.server.command(
            "HSET", self.base + ":pools", pool, _encode((self.clock.now(), members, error))
        )

    async def prune(self) -> None:
        before = self.clock.now() - rules.FORGET
        flat = await self.server.command("HGETALL", self.base + ":proxy")
        old: list[Argument] = []
        for name, raw in zip(flat[::2], flat[1::2], strict=True):
            health = _row(raw).health
            if health.at < before and health.until < before:
                old += (name, raw)
        if old:
            await self.server.run(lua.FORGET, [self.base], *old)
        self._forget(before)
        self._raw = {key: raw for key, raw in self._raw.items() if key in self._view}

    # -- for `penstock proxies ls`

    def troubled(self) -> list[tuple[str, str, str, int, float, float, str]]:
        """Return (proxy, host, label, failures, until, at, reason) of each failing proxy."""
        found = []
        for name, raw in self._blocking.command("HGETALL", self.base + ":proxy").items():
            proxy, _, host = name.decode().partition("\n")
            row = _row(raw)
            h = row.health
            if h.failures:
                found.append((proxy, host, row.label, h.failures, h.until, h.at, h.reason))
        return sorted(found, key=lambda r: (-r[4], r[0], r[1]))

    def lists(self) -> dict[str, tuple[float, int, str]]:
        """Return (time, number of members, error) of the last fetch of each pool's list."""
        rows = self._blocking.command("HGETALL", self.base + ":pools")
        return {pool.decode(): _list(raw) for pool, raw in rows.items()}

    def close(self) -> None:
        self._blocking.close()
