"""Health of proxies per host on Redis, shared by the fleet.

URLs of proxies are not stored. See `rules.proxies` for the decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from penstock.claims.redis import scripts as lua
from penstock.ports import Clock
from penstock.rules import proxies as rules
from penstock.stores.redis import Argument, Blocking, Server

_OVERLAP = 5.0  # seconds that are read again, because a writer's clock may be behind


class _Row(msgspec.Struct, frozen=True, array_like=True):
    label: str
    health: rules.Health


class _List(msgspec.Struct, frozen=True, array_like=True):
    at: float
    members: int
    error: str


_encode = msgspec.msgpack.Encoder().encode
_row = msgspec.msgpack.Decoder(_Row).decode
_list = msgspec.msgpack.Decoder(_List).decode


class RedisProxies:
    """Implements ports.ProxyHealth."""

    def __init__(self, server: Server, base: str, clock: Clock) -> None:
        self.server, self.base, self.clock = server, base, clock
        self._blocking = Blocking(server)
        self._view: dict[tuple[str, str], rules.Health] = {}
        # (proxy, host) -> encoded row that was last read or written, for compare-and-set.
        self._raw: dict[tuple[str, str], bytes] = {}
        self._seen = 0.0

    @property
    def view(self) -> Mapping[tuple[str, str], rules.Health]:
        return self._view

    async def failed(
        self,
        proxy: str,
        host: str,
        label: str,
        *,
        cooldown: float,
        longest: float,
        reason: str,
        least: float = 0.0,
    ) -> None:
        def decide(before: rules.Health | None) -> rules.Health:
            return rules.failed(
                before,
                self.clock.now(),
                cooldown=cooldown,
                longest=longest,
                reason=reason[:200],
                least=least,
            )

        await self._change(proxy, host, label, decide)

    async def worked(self, proxy: str, host: str, label: str) -> None:
        """Reduce the recorded failures of the proxy.

        Writes only if the proxy has failures and its cool-down has ended.
        """
        for where in (host, rules.ANY_HOST):
            known = self._view.get((proxy, where))
            if known is not None and known.until <= self.clock.now():
                await self._change(
                    proxy,
                    where,
                    label,
                    lambda before: (
                        None if before is None else rules.worked(before, self.clock.now())
                    ),
                )

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
        flat = await self.server.run(lua.CHANGED, [self.base], self._seen - _OVERLAP)
        for name, raw in zip(flat[::2], flat[1::2], strict=True):
            proxy, _, host = name.decode().partition("\n")
            self._take((proxy, host), raw)
        self._seen = now

    def _take(self, key: tuple[str, str], raw: bytes) -> None:
        self._raw[key] = raw
        health = _row(raw).health if raw else None
        if health is None or not health.failures:
            self._view.pop(key, None)
        else:
            self._view[key] = health

    async def listed(self, pool: str, members: int, error: str) -> None:
        await self.server.command(
            "HSET", self.base + ":pools", pool, _encode(_List(self.clock.now(), members, error))
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
        self._view = {
            key: h for key, h in self._view.items() if h.at >= before or h.until >= before
        }
        self._raw = {key: raw for key, raw in self._raw.items() if key in self._view}

    # -- for `penstock proxies ls`

    def troubled_in(self, tx: Any) -> list[tuple[str, str, str, int, float, float, str]]:
        """Return (proxy, host, label, failures, until, at, reason) of each failing proxy."""
        found = []
        for name, raw in self._blocking.command("HGETALL", self.base + ":proxy").items():
            proxy, _, host = name.decode().partition("\n")
            row = _row(raw)
            if row.health.failures:
                found.append(
                    (
                        proxy,
                        host,
                        row.label,
                        row.health.failures,
                        row.health.until,
                        row.health.at,
                        row.health.reason,
                    )
                )
        return sorted(found, key=lambda r: (-r[4], r[0], r[1]))

    def lists_in(self, tx: Any) -> dict[str, tuple[float, int, str]]:
        rows = {
            pool.decode(): _list(raw)
            for pool, raw in self._blocking.command("HGETALL", self.base + ":pools").items()
        }
        return {pool: (row.at, row.members, row.error) for pool, row in rows.items()}

    def close(self) -> None:
        self._blocking.close()
