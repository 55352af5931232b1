"""Messages and envelopes of a newer release: they wait for its workers, and lose nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.embedded.test_books import URL, Rig
from tests.embedded.test_relay import ApartRig

from penstock import model
from penstock.engine.messages import PageMessage
from penstock.engine.unreadable import NEWER_DELAY, NEWER_MAX_DELAY
from penstock.errors import NewerMessage
from penstock.model import encode_event
from penstock.ports import Out, PageMeta
from penstock.rules.events import event_of
from penstock.rules.routes import ServedPool


@contextmanager
def newer_release() -> Iterator[None]:
    """Be a release whose envelope version is one higher."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "CODEC_VERSION", 2)
        patch.setattr(model, "EVENT_TYPE", "penstock.request.v2")
        yield


POOLS = (ServedPool(name="eu", geo=("de",)),)  # the events below have the geo "de"


@pytest.fixture(params=[Rig, ApartRig], ids=["embedded", "external"])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return request.param(tmp_path, pools=POOLS)


async def pass_time(rig: Rig, seconds: float) -> None:
    if isinstance(rig, ApartRig):
        await rig.later(seconds)
    else:
        rig.clock.advance(seconds)
    await rig.maintenance.release_due()


async def publish(rig: Rig, body: bytes) -> None:
    """Publish the message of the event x1 without intake."""
    broker = rig.line if isinstance(rig, ApartRig) else rig.broker
    await broker.publish([Out(topic="requests", id="x1", key="shop.test", body=body)])


async def test_a_newer_message_waits_for_a_newer_worker_and_is_never_a_dead_letter(
    rig: Rig,
) -> None:
    with newer_release():
        await rig.accept("e1")
    offers = 0
    for _ in range(200):  # seconds
        offers += len(got := await rig.receive())
        assert await rig.admit(got) == []
        await pass_time(rig, 1.0)
    assert 5 <= offers <= 200 / NEWER_DELAY, "it is offered again after each delay"
    row = rig.row("e1")
    assert (row["attempts"], row["starts"], row["crashes"]) == (0, 0, 0)
    assert row["reason"] == "waiting for a newer worker: envelope version 2 is newer than version 1"
    assert rig.sql("SELECT 1 FROM dead") == []
    assert rig.count("unreadable") == 0
    with newer_release():
        for _ in range(int(1.5 * NEWER_MAX_DELAY)):
            if begun := await rig.begin(await rig.admit()):
                break
            await pass_time(rig, 1.0)
        assert await rig.succeed(begun[0])
    assert rig.status("e1") == "success"


async def test_an_event_that_waits_for_days_is_offered_every_few_minutes(rig: Rig) -> None:
    with newer_release():
        await rig.accept("e1")
    for _ in range(60):
        await rig.admit()
        await pass_time(rig, 1.5 * NEWER_MAX_DELAY)
    ((before,),) = rig.sql("SELECT count(*) FROM history")
    for _ in range(100):
        assert await rig.admit() == []
        await pass_time(rig, NEWER_MAX_DELAY / 10)
    ((after,),) = rig.sql("SELECT count(*) FROM history")
    assert after - before <= 2 * 11
    assert rig.status("e1") in ("delayed", "pending")


async def test_a_newer_message_without_an_event_in_the_ledger_is_offered_again(rig: Rig) -> None:
    with newer_release():
        body = encode_event(event_of(URL, id_="x1"))
    await publish(rig, body)
    assert await rig.admit() == []
    await pass_time(rig, 1.5 * NEWER_DELAY)
    (delivery,) = await rig.receive()
    assert (delivery.id, delivery.body) == ("x1", body)
    if isinstance(rig, ApartRig):
        assert delivery.key != "shop.test", "Kafka must choose another partition"
    assert rig.sql("SELECT 1 FROM dead") == []


async def test_an_older_worker_promotes_a_newer_duplicate_without_reading_it(rig: Rig) -> None:
    await rig.accept("e1")
    (begun,) = await rig.start("e1")
    with newer_release():
        await rig.accept("e2")
        await rig.start()
    assert rig.status("e2") == "duplicate"
    ((before,),) = rig.sql(
        "SELECT v.body FROM envelope v JOIN event e ON e.n=v.event AND e.id='e2'"
    )
    await rig.die(begun)
    assert rig.status("e1", "e2") == "dead pending"
    (delivery,) = await rig.receive()
    assert (delivery.id, delivery.body) == ("e2", before)


async def test_an_older_release_refuses_to_redrive_a_newer_dead_letter(rig: Rig) -> None:
    with newer_release():
        await rig.accept("e1")
        (begun,) = await rig.start("e1")
        await rig.die(begun)
    with pytest.raises(NewerMessage, match="newer"):
        await rig.dead_letters.redrive(["e1"])
    assert rig.status("e1") == "dead"
    with newer_release():
        assert await rig.dead_letters.redrive(["e1"]) == 1


def of_newer_minor(id_: str) -> bytes:
    raw = json.loads(encode_event(event_of(URL, id_=id_)))
    raw |= {"penstockminor": 3, "tenant": "acme"}
    raw["data"]["budget"] = 5
    raw["data"]["route"] = {"geo": "de", "moon": True}
    return json.dumps(raw).encode()


def unknown_in(envelope: bytes) -> tuple[Any, ...]:
    raw = json.loads(envelope)
    data = raw["data"]
    return raw["penstockminor"], raw["tenant"], data["budget"], data["route"]


UNKNOWN = (3, "acme", 5, {"geo": "de", "moon": True})


async def test_unknown_fields_are_kept_by_delays_dead_letters_and_redrives(rig: Rig) -> None:
    body = of_newer_minor("x1")
    await publish(rig, body)
    (begun,) = await rig.start("x1")
    until = rig.clock.now() + 60.0
    await rig.conclude(begun, "retry", reason="HTTP 503", until=until, stage="fetch")
    await pass_time(rig, 61.0)
    (begun,) = await rig.start("x1")
    assert unknown_in(begun[0].body) == UNKNOWN
    await rig.die(begun)
    ((letter,),) = rig.sql("SELECT envelope FROM dead")
    assert unknown_in(letter) == UNKNOWN
    assert await rig.dead_letters.redrive(["x1"]) == 1
    (begun,) = await rig.start("x1")
    assert unknown_in(begun[0].body) == UNKNOWN
    ((stored,),) = rig.sql("SELECT body FROM envelope")
    assert unknown_in(stored) == UNKNOWN


async def test_a_dead_letter_of_a_page_has_the_original_envelope(tmp_path: Path) -> None:
    rig = Rig(tmp_path, pools=POOLS)
    envelope = of_newer_minor("x1")
    await publish(rig, envelope)
    (begun,) = await rig.start("x1")
    meta = PageMeta(page="0" * 64, url=URL, status=200, headers={}, fetched_at=1.0, size=1)
    message = PageMessage(event=envelope, page=meta).write()
    delivery = msgspec.structs.replace(begun[0], topic="pages", body=message)
    await rig.die((delivery, *begun[1:]))
    ((letter,),) = rig.sql("SELECT envelope FROM dead")
    assert letter == envelope
