"""Start URLs in Redis: every element is moved atomically and accepted as one event.

Also if the reader or the server is killed at any point.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from tests.servers import Handle
from tests.sources.seeds_rig import Skipping, context, ids, read, spec_of, urls

from penstock.clock import SystemClock
from penstock.errors import ConfigError, SourceDown, UsageError
from penstock.intake.mapping import Mapping
from penstock.ports import Batch, Clock, Finding
from penstock.sources.redis import MAX_ELEMENT, RedisList, UserServer, open_source

pytestmark = pytest.mark.server("redis")


class Ground:
    """A unique key on the server, and sources that read it."""

    def __init__(self, url: str, base: Path) -> None:
        self.url, self.base, self.key = url, base, f"t{uuid.uuid4().hex[:8]}:start_urls"
        self.client: Any = Redis.from_url(url)

    def source(
        self,
        kind: str = "list",
        *,
        every: float | None = 1.0,
        clock: Clock | None = None,
        url: str = "",
        **options: Any,
    ) -> RedisList:
        spec = spec_of(f"{url or self.url}?{kind}={self.key}", name="start", every=every, **options)
        return open_source(spec, context(self.base, clock or Skipping(0.0)))

    def reserved(self) -> int:
        return int(self.client.hlen(f"{self.key}:penstock:start"))


@pytest.fixture
def ground(server: Callable[[str], Handle], tmp_path: Path) -> Iterator[Ground]:
    made = Ground(server("redis").url, tmp_path)
    with made.client:
        yield made
        for key in made.client.scan_iter(made.key + "*"):
            made.client.delete(key)


def pages(start: int, stop: int) -> list[str]:
    return [f"https://shop.test/p/{n}" for n in range(start, stop)]


async def finished(source: RedisList) -> list[Finding]:
    try:
        return (await read(source))[0]
    finally:
        await source.close()


async def test_a_list_is_read_from_its_head_like_scrapy_redis_and_is_empty_afterwards(
    ground: Ground,
) -> None:
    ground.client.rpush(ground.key, *pages(0, 2500))
    source = ground.source()
    batches = [batch async for batch in source.read(None)]
    assert [len(b.findings) for b in batches] == [1000, 1000, 500, 0]
    assert [b.backlog for b in batches] == [1500, 500, 0, 0]
    assert batches[-1].idle
    found = [f for b in batches for f in b.findings]
    assert urls(found) == pages(0, 2500)
    assert len(set(ids(found))) == 2500
    assert ground.reserved() == 0
    assert not ground.client.exists(ground.key)
    assert found[0].payload == {"url": pages(0, 1)[0], "_redis": {"key": ground.key, "number": 1}}
    assert source.describe(batches[2].cursor) == f"2500 taken from {ground.key}"
    await source.close()


async def test_the_same_element_twice_is_two_events(ground: Ground) -> None:
    ground.client.rpush(ground.key, "https://shop.test/1", "https://shop.test/1")
    found = await finished(ground.source())
    assert urls(found) == ["https://shop.test/1"] * 2
    assert len(set(ids(found))) == 2


async def test_moved_unaccepted_elements_are_read_first_with_the_same_ids(
    ground: Ground,
) -> None:
    ground.client.rpush(ground.key, *pages(0, 5))
    source = ground.source()
    batches = source.read(None)
    first = await anext(batches)
    assert ground.reserved() == 5
    await batches.aclose()  # the process ends before the batch is accepted
    await source.close()
    ground.client.rpush(ground.key, *pages(5, 7))
    found = await finished(ground.source())
    assert urls(found) == pages(0, 7)
    assert ids(found)[:5] == ids(first.findings)
    assert ground.reserved() == 0


@pytest.mark.parametrize("kind", ["list", "set", "zset"])
async def test_every_element_is_accepted_once_although_readers_end_at_random(
    ground: Ground, kind: str
) -> None:
    """End readers between move and acceptance, and between acceptance and removal.

    Accepted elements are recognized by their ids.
    """
    rng = random.Random(7)
    if kind == "list":
        ground.client.rpush(ground.key, *pages(0, 6000))
    elif kind == "set":
        ground.client.sadd(ground.key, *pages(0, 6000))
    else:
        ground.client.zadd(ground.key, {url: n for n, url in enumerate(reversed(pages(0, 6000)))})
    ledger: dict[str, str | None] = {}
    for _ in range(40):
        source = ground.source(kind)
        batches = source.read(None)
        for _ in range(rng.randrange(1, 3)):
            batch = await anext(batches, Batch())
            if rng.random() < 0.5:
                break  # not accepted
            ledger |= {f.id: f.url for f in batch.findings}  # accepted, and perhaps never resumed
        await batches.aclose()
        await source.close()
    ledger |= {f.id: f.url for f in await finished(ground.source(kind))}
    assert len(ledger) == 6000
    assert set(ledger.values()) == set(pages(0, 6000))
    if kind == "zset":
        assert list(ledger.values()) == pages(0, 6000), "the highest score first"


async def test_new_elements_get_new_ids_after_the_server_lost_its_counter(ground: Ground) -> None:
    ground.client.rpush(ground.key, "https://shop.test/1")
    first = await finished(ground.source())
    ground.client.delete(f"{ground.key}:penstock:start:count")
    ground.client.rpush(ground.key, "https://shop.test/1")
    second = await finished(ground.source())
    assert first[0].id != second[0].id


async def test_a_server_restored_to_an_older_state_repeats_ids_and_adds_no_event(
    ground: Ground,
) -> None:
    ground.client.rpush(ground.key, *pages(0, 3))
    first = await finished(ground.source())
    # The state of a backup from before the last two elements were moved.
    ground.client.hset(f"{ground.key}:penstock:start:count", "last", 1)
    ground.client.rpush(ground.key, *pages(1, 3))
    second = await finished(ground.source())
    assert ids(second) == ids(first)[1:]


async def test_every_element_is_accepted_once_although_the_server_is_killed(
    ground: Ground, server: Callable[[str], Handle]
) -> None:
    handle = server("redis")
    ground.client.rpush(ground.key, *pages(0, 3000))
    source, ledger = ground.source(), dict[str, str | None]()
    batches = source.read(None)
    first = await anext(batches)
    await asyncio.to_thread(handle.kill)
    ledger |= {f.id: f.url for f in first.findings}  # accepted, and not yet removed from Redis
    with pytest.raises(SourceDown, match="Redis"):
        await anext(batches)
    with pytest.raises(SourceDown, match="Redis"):
        await anext(source.read(None))
    await asyncio.to_thread(handle.start)
    again, _ = await read(source)
    assert ids(again)[:1000] == ids(first.findings), "redelivered elements are known"
    ledger |= {f.id: f.url for f in again}
    assert list(ledger.values()) == pages(0, 3000)
    await source.close()


async def test_elements_may_be_json_objects_and_unreadable_elements_are_refused(
    ground: Ground,
) -> None:
    elements: list[bytes] = [
        b'{"url": "https://shop.test/1", "meta": {"rank": "high"}, "method": "get"}',
        b'{"url": ',
        b"\xff\xfe",
        b"x" * (MAX_ELEMENT + 1),
        b'{"url": "https://shop.test/2", "method": "POST"}',
        b" https://shop.test/3\n",
        b"",
    ]
    ground.client.rpush(ground.key, *elements)
    source = ground.source(map={"priority": "meta.rank"})
    found, _ = await read(source)
    mapping = Mapping(source.spec)
    events = [mapping.event(found[n]) for n in (0, 5)]
    assert [(e.url, e.priority) for e in events if e] == [
        ("https://shop.test/1", 0),
        ("https://shop.test/3", 1),
    ]
    reasons = [f.refused for f in found]
    assert "no JSON" in reasons[1]
    assert reasons[2] == "the element is not UTF-8"
    assert "of at most" in reasons[3]
    assert "asks for POST" in reasons[4]
    assert not found[6].url
    assert all(len(json.dumps(f.payload)) < 2000 for f in found)
    assert ground.reserved() == 0
    await source.close()


async def test_a_batch_of_large_elements_stays_small(ground: Ground) -> None:
    ground.client.rpush(ground.key, *[b"https://shop.test/" + b"x" * 900_000 for _ in range(20)])
    source = ground.source()
    batches = [batch async for batch in source.read(None)]
    assert max(len(b.findings) for b in batches) <= 5
    assert sum(len(b.findings) for b in batches) == 20
    await source.close()


async def test_a_batch_of_elements_with_many_values_stays_small(ground: Ground) -> None:
    element = json.dumps({"url": "https://shop.test/1", "values": [{}] * 60_000})
    ground.client.rpush(ground.key, *[element] * 12)
    source = ground.source()
    batches = [batch async for batch in source.read(None)]
    assert max(len(b.findings) for b in batches) == 1
    assert len({f.id for b in batches for f in b.findings}) == 12
    assert ground.reserved() == 0
    await source.close()


async def test_a_preview_moves_no_element_and_shows_the_later_ids(ground: Ground) -> None:
    ground.client.rpush(ground.key, *pages(0, 5))
    source = ground.source()
    assert urls(list(await source.preview(None, 3))) == pages(0, 3)
    assert (ground.client.llen(ground.key), ground.reserved()) == (5, 0)
    batches = source.read(None)
    moved = await anext(batches)
    await batches.aclose()
    ground.client.rpush(ground.key, *pages(5, 6))
    shown = await source.preview(None, 10)
    assert urls(list(shown)) == pages(0, 6)
    assert ids(list(shown))[:5] == ids(moved.findings)
    assert ids((await read(source))[0]) == ids(list(shown)), (
        "the preview shows the ids of the later findings"
    )
    await source.close()
    for kind in ("set", "zset"):
        ground.client.delete(ground.key)
        ground.client.sadd(ground.key, *pages(0, 2)) if kind == "set" else ground.client.zadd(
            ground.key, dict.fromkeys(pages(0, 2), 1)
        )
        other = ground.source(kind)
        assert set(urls(list(await other.preview(None, 5)))) == set(pages(0, 2))
        await other.close()


async def test_without_an_interval_the_source_waits_for_elements_and_sends_heartbeats(
    ground: Ground,
) -> None:
    source = ground.source(every=None, clock=SystemClock())
    batches = source.read(None)
    assert (await anext(batches)).idle
    ground.client.rpush(ground.key, "https://shop.test/1")

    async def next_finding() -> Batch:
        return await anext(b async for b in batches if b.findings)

    async with asyncio.timeout(60):
        assert urls(list((await next_finding()).findings)) == ["https://shop.test/1"]
        assert (await anext(batches)).idle
    await batches.aclose()
    await source.close()


# -- errors ----------------------------------------------------------------------------------------


async def error_of(source: RedisList) -> SourceDown:
    with pytest.raises(SourceDown) as caught:
        await read(source)
    await source.close()
    assert caught.value.hint
    assert "hunter2" not in caught.value.message + caught.value.hint
    return caught.value


async def test_wrong_type_unreachable_server_and_refused_login_have_different_errors(
    ground: Ground,
) -> None:
    ground.client.sadd(ground.key, "https://shop.test/1")
    assert "is not a list" in (await error_of(ground.source())).message
    assert (
        "no Redis server answers"
        in (await error_of(ground.source(url="redis://127.0.0.1:9/0"))).message
    )
    assert (
        "refuses the user or password"
        in (await error_of(ground.source("set", username="nobody", password="hunter2"))).message
    )
    secret = ground.url.replace("redis://", "redis://nobody:hunter2@")
    assert (
        "refuses the user or password" in (await error_of(ground.source("set", url=secret))).message
    )


async def test_a_server_without_memory_loses_no_element(ground: Ground) -> None:
    ground.client.rpush(ground.key, *pages(0, 5))
    before = {
        name: ground.client.config_get(name)[name] for name in ("maxmemory", "maxmemory-policy")
    }
    ground.client.config_set("maxmemory-policy", "noeviction")
    ground.client.config_set("maxmemory", 1)
    try:
        assert "maxmemory" in (await error_of(ground.source())).message
    finally:
        for name, value in before.items():
            ground.client.config_set(name, value)
    assert urls(await finished(ground.source())) == pages(0, 5)


async def test_a_foreign_value_in_a_key_of_penstock_loses_no_element(ground: Ground) -> None:
    ground.client.rpush(ground.key, *pages(0, 2))
    ground.client.set(f"{ground.key}:penstock:start:count", "mine")
    await error_of(ground.source())
    assert ground.client.llen(ground.key) == 2


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({"redis_version": "4.0.9"}, "needs 5.0 or newer"),
        ({"redis_version": "7.0.1", "role": "slave"}, "is a replica"),
        ({"redis_version": "7.0.1", "cluster_enabled": "1"}, "cluster node"),
        ({"loading": "1"}, "is loading"),
    ],
)
def test_an_unsuitable_server_is_refused_with_its_reason(facts: dict[str, str], says: str) -> None:
    with pytest.raises(Exception, match=says):
        UserServer("redis://localhost", evictable=False).judge(facts)


def test_a_server_without_durability_is_accepted_as_a_source() -> None:
    UserServer("redis://localhost", evictable=False).judge(
        {"redis_version": "7.0.1", "aof_enabled": "0", "maxmemory_policy": "allkeys-lru"}
    )


async def test_setting_a_position_of_a_redis_list_is_refused(ground: Ground) -> None:
    source = ground.source()
    with pytest.raises(UsageError, match="has no positions"):
        await source.place("end")


async def test_a_password_can_come_from_the_environment_and_documented_rights_suffice(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="SHOP_REDIS, which is not set"):
        ground.source(password="env:SHOP_REDIS")
    user = f"u{uuid.uuid4().hex[:8]}"
    monkeypatch.setenv("SHOP_REDIS", "h@nter:2/%")
    ground.client.rpush(ground.key, *pages(0, 2))
    text = (Path(__file__).parents[2] / "docs/sources/redis.md").read_text("utf-8")
    needed = re.findall(r"\+[a-z]+", text.rpartition("`~KEY*` and")[2])
    assert len(needed) > 15
    ground.client.acl_setuser(
        user, enabled=True, passwords=["+h@nter:2/%"], keys=[ground.key + "*"], commands=needed
    )
    try:
        source = ground.source(username=user, password="env:SHOP_REDIS")
        assert urls(list(await source.preview(None, 5))) == pages(0, 2)
        assert urls(await finished(source)) == pages(0, 2)
    finally:
        ground.client.acl_deluser(user)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("redis://:hunter2@localhost/0", "has no list"),
        ("redis://:hunter2@localhost/0?list=", "has no list"),
        ("redis://:hunter2@localhost/0?list=a&set=b", "has more than one list"),
        ("redis://:hunter2@localhost/x?list=a", "names a database that is not a number"),
        (
            "rediss://:hunter2@localhost/0?list=a&ssl_ca_certs=/nowhere",
            "ssl_ca_certs is '/nowhere'",
        ),
        ("redis://:hunter2@localhost/0?list=a&lits=b", "no option 'lits'"),
    ],
)
def test_an_invalid_url_is_an_error_that_does_not_show_the_password(
    tmp_path: Path, url: str, says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        open_source(spec_of(url), context(tmp_path, SystemClock()))
    assert says in caught.value.message
    assert caught.value.hint
    assert "hunter2" not in caught.value.message + caught.value.hint
