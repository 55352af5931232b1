"""Who sent this webhook: the signature schemes, decided on raw bytes in constant time. No clock, no
secrets' origin, no HTTP answers.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Headers = Mapping[
    str, Sequence[str]
]  # lower-case name → values as they came (latin-1: a byte is a character)
LONGEST = 4096  # characters of a header that is looked at
MOST = 16  # signatures in one header; rotation needs two
SHORTEST_SECRET = 24  # bytes
DIGESTS: dict[str, Callable[..., hashlib._Hash]] = {
    "sha256": hashlib.sha256,
    "sha384": hashlib.sha384,
    "sha512": hashlib.sha512,
}
_PLACE = re.compile(r"\{([A-Za-z0-9-]+)\}")
_TIME = re.compile(r"[0-9]{1,11}")
_STANDARD = re.compile(r"(v[0-9a-z]+),([\x21-\x7e]+)")
_ID = re.compile(r"[\x21-\x7e]{1,256}")


class Forged(Exception):
    """Not signed, not by one of these secrets, or not now. The reason is for our log, never for the
    sender.
    """


@dataclass(frozen=True, slots=True)
class Shape:
    """A house scheme: which header, over what text, how written."""

    header: str
    algorithm: str = "sha256"
    encoding: str = "hex"  # | "base64"
    prefix: str = ""
    signed: str = "{body}"  # header names in braces, and {body}
    timestamp: str = ""  # header, in epoch seconds; part of `signed`

    def places(self) -> list[str]:
        return [name.lower() for name in _PLACE.findall(self.signed)]


def only(headers: Headers, name: str) -> str:
    """A header that decides must be there once: of two, the sender may have signed the other."""
    values = headers.get(name, ())
    if len(values) != 1 or not 0 < len(values[0]) <= LONGEST:
        raise Forged(
            f"{name} is there {len(values)} times"
            if len(values) != 1
            else f"{name} is empty or too long"
        )
    return values[0]


def standard(
    keys: Sequence[bytes], headers: Headers, body: bytes, now: float, tolerance: float
) -> str:
    """Standard Webhooks 1.0, symmetric (`v1`); its forerunner Svix calls the headers svix-….
    Returns the signed id.
    """
    family = (
        "svix" if "svix-signature" in headers and "webhook-signature" not in headers else "webhook"
    )
    id_, at = only(headers, f"{family}-id"), only(headers, f"{family}-timestamp")
    if not _ID.fullmatch(id_):
        raise Forged("its id is no id")
    _timely(at, now, tolerance)
    given = []
    for part in only(headers, f"{family}-signature").split(" "):
        match = _STANDARD.fullmatch(part)
        if match is None:
            raise Forged("its signature is no list of version,signature")
        if match[1] == "v1":
            given.append(canonical_base64(match[2]))
    _judge(keys, id_.encode() + b"." + at.encode() + b"." + body, hashlib.sha256, given)
    return id_


def github(keys: Sequence[bytes], headers: Headers, body: bytes) -> str:
    """X-Hub-Signature-256. The body is all it covers, so the body is what names the event."""
    _judge(
        keys, body, hashlib.sha256, [_hex(_behind(only(headers, "x-hub-signature-256"), "sha256="))]
    )
    return _named(body)


def stripe(
    keys: Sequence[bytes], headers: Headers, body: bytes, now: float, tolerance: float
) -> str:
    """Stripe-Signature: t=…,v1=…. A repeated delivery is signed anew with another time, so the body
    names the event.
    """
    pairs = [part.partition("=") for part in only(headers, "stripe-signature").split(",")]
    times = [value for name, _, value in pairs if name.strip() == "t"]
    if len(times) != 1:
        raise Forged("its signature has no time, or several")
    _timely(times[0], now, tolerance)
    _judge(
        keys,
        times[0].encode() + b"." + body,
        hashlib.sha256,
        [_hex(value) for name, _, value in pairs if name.strip() == "v1"],
    )
    return _named(body)


def house(
    keys: Sequence[bytes], headers: Headers, body: bytes, now: float, tolerance: float, shape: Shape
) -> str:
    """Any other HMAC over the body, and over headers where `shape.signed` names them. What is
    signed names the event.
    """
    text = _behind(only(headers, shape.header), shape.prefix)
    given = _hex(text) if shape.encoding == "hex" else canonical_base64(text)
    if shape.timestamp:
        _timely(only(headers, shape.timestamp), now, tolerance)
    signed = b""
    for i, part in enumerate(_PLACE.split(shape.signed)):  # odd ones are names
        signed += (
            part.encode()
            if i % 2 == 0
            else body
            if part.lower() == "body"
            else only(headers, part.lower()).encode("latin-1")
        )
    _judge(keys, signed, DIGESTS[shape.algorithm], [given])
    return _named(signed)


def bearer(keys: Sequence[bytes], headers: Headers) -> None:
    """Authorization: Bearer …. Whoever has the token may say anything, so nothing of the request is
    vouched for.
    """
    scheme, _, token = only(headers, "authorization").partition(" ")
    raw = token.strip().encode("latin-1")
    if scheme.lower() != "bearer" or not sum(hmac.compare_digest(key, raw) for key in keys):
        raise Forged("its bearer token is none of ours")


def _judge(
    keys: Sequence[bytes],
    signed: bytes,
    digest: Callable[..., hashlib._Hash],
    given: Sequence[bytes],
) -> None:
    """Every pair is compared, whichever fits, so that the time it takes says nothing."""
    if not 0 < len(given) <= MOST:
        raise Forged(f"it has {len(given)} signatures of a kind we know")
    wanted = [hmac.new(key, signed, digest).digest() for key in keys]
    if not sum(hmac.compare_digest(w, g) for w in wanted for g in given):
        raise Forged("no signature fits")


def _timely(text: str, now: float, tolerance: float) -> None:
    if not _TIME.fullmatch(text):
        raise Forged("its time is no number of seconds")
    if abs(now - int(text)) > tolerance:
        raise Forged(f"its time is {now - int(text):+.0f} s from ours")


def _behind(text: str, prefix: str) -> str:
    if not text.startswith(prefix):
        raise Forged(f"its signature does not begin with {prefix}")
    return text[len(prefix) :]


def _hex(text: str) -> bytes:
    if not re.fullmatch(r"(?:[0-9a-fA-F]{2})+", text):
        raise Forged("its signature is not hexadecimal")
    return bytes.fromhex(text)


def canonical_base64(text: str) -> bytes:
    """Strict and in its one canonical form: Python's decoder passes over junk behind the padding,
    and over bits that do not count.
    """
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise Forged("its signature is no base64") from None
    if base64.b64encode(raw).decode() != text:
        raise Forged("its signature is no base64 as it is written")
    return raw


def _named(signed: bytes) -> str:
    return hashlib.sha256(signed).hexdigest()
