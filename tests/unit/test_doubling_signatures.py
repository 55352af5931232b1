"""Checks that the signatures of webhooks take linear time and memory for their worst inputs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping

import pytest
from tests.unit.doubling import grows_linearly

from penstock.rules import signatures
from penstock.rules.signatures import Claim, Forged, Headers, Shape

NOW = 1_760_000_000.0
KEYS = [b"k" * 32, b"l" * 32]
HOUSE = Shape("x-sig", signed="{x-time}.{body}", timestamp="x-time")


@pytest.mark.parametrize(
    "claim",
    [
        Claim([bytes(32)] * signatures.MAX_SIGNATURES, (b"m1.1760000000.", None), id="m1"),
        Claim([bytes(32)], (b"1760000000.", None), hash_text=True),
    ],
    ids=["standard", "hmac"],
)
def test_the_work_of_a_signature_grows_with_the_body(claim: Claim) -> None:
    def verify(body: bytes) -> None:
        with contextlib.suppress(Forged):
            claim.verify(KEYS, body)

    grows_linearly(lambda size: bytes(size * 8), verify)


READERS: Mapping[str, Callable[[Headers], object]] = {
    "webhook-signature": lambda headers: signatures.read_standard(
        {"webhook-id": ["m"], "webhook-timestamp": [str(int(NOW))], **headers}, NOW, 300
    ),
    "stripe-signature": lambda headers: signatures.read_stripe(headers, NOW, 300),
    "x-hub-signature-256": signatures.read_github,
    "x-sig": lambda headers: signatures.read_house(
        {"x-time": [str(int(NOW))], **headers}, NOW, 300, HOUSE
    ),
    "authorization": lambda headers: signatures.check_bearer(KEYS, headers),
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("part", ["v1,AAAA ", "v1=00,", "00", " ", "="])
def test_a_header_of_any_size_is_refused_in_linear_time(name: str, part: str) -> None:
    def read(value: str) -> None:
        with pytest.raises(Forged):
            READERS[name]({name: [value]})

    grows_linearly(lambda size: part * (size // len(part)), read)


def test_more_signatures_than_a_rotation_needs_are_refused_before_the_body_is_read() -> None:
    signed = f"t={int(NOW)}" + ",v1=00" * signatures.MAX_SIGNATURES
    assert len(signatures.read_stripe({"stripe-signature": [signed]}, NOW, 300).given) == 16
    with pytest.raises(Forged, match="17 signatures"):
        signatures.read_stripe({"stripe-signature": [signed + ",v1=00"]}, NOW, 300)
