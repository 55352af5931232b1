"""Signature schemes of webhooks, checked on raw bytes in constant time.

The headers are read and checked before the body is received. No clock, no HTTP, no secrets loaded.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

H = TypeVar("H", hmac.HMAC, "hashlib._Hash")
# Lower-case name → received values, decoded as Latin-1, so that a character is a byte.
Headers = Mapping[str, Sequence[str]]
LONGEST = 4096  # characters of a header that is read
MAX_SIGNATURES = 16  # signatures in one header. Rotation of secrets needs two.
SHORTEST_SECRET = 24  # bytes
DIGESTS: dict[str, Callable[..., hashlib._Hash]] = {
    "sha256": hashlib.sha256,
    "sha384": hashlib.sha384,
    "sha512": hashlib.sha512,
}
_PLACEHOLDER = re.compile(r"\{([A-Za-z0-9-]+)\}")
_TIME = re.compile(r"[0-9]{1,11}")
_STANDARD = re.compile(r"(v[0-9a-z]+),([\x21-\x7e]+)")
_ID = re.compile(r"[\x21-\x7e]{1,256}")


class Forged(Exception):
    """The request is not signed, not by one of the secrets, or not within the time tolerance.

    The reason is for the log and is never sent to the sender.
    """


@dataclass(frozen=True, slots=True)
class Shape:
    """A configured HMAC scheme: the header, the signed text and the encoding."""

    header: str
    algorithm: str = "sha256"
    encoding: str = "hex"  # | "base64"
    prefix: str = ""
    signed: str = "{body}"  # text with header names in braces, and {body}
    timestamp: str = ""  # name of a header in epoch seconds, which is part of `signed`

    def places(self) -> list[str]:
        return [name.lower() for name in _PLACEHOLDER.findall(self.signed)]


def only(headers: Headers, name: str) -> str:
    """Return a header that must occur once. With two, the sender may have signed the other one."""
    values = headers.get(name, ())
    if len(values) != 1 or not 0 < len(values[0]) <= LONGEST:
        raise Forged(
            f"{name} is there {len(values)} times"
            if len(values) != 1
            else f"{name} is empty or too long"
        )
    return values[0]


@dataclass(frozen=True, slots=True)
class Claim:
    """Signatures from the headers of a request. They are compared when the body is complete."""

    given: Sequence[bytes]
    text: Sequence[bytes | None]  # parts of the signed text. None is the body.
    algorithm: str = "sha256"
    id: str | None = None  # signed id of the message. Without one, a hash identifies it.
    hash_text: bool = False  # True if the hash is of the signed text, False if of the body

    def verify(self, keys: Sequence[bytes], body: bytes) -> str:
        """Return the id of the event that the signature covers. Raises Forged.

        Every pair is compared, even after a match, so that the time does not reveal the result.
        """
        digest = DIGESTS[self.algorithm]
        wanted = [self._feed(hmac.new(key, digestmod=digest), body).digest() for key in keys]
        if not sum(hmac.compare_digest(w, g) for w in wanted for g in self.given):
            raise Forged("no signature fits")
        if self.id is not None:
            return self.id
        if self.hash_text:
            return self._feed(hashlib.sha256(), body).hexdigest()
        return hashlib.sha256(body).hexdigest()

    def _feed(self, hashing: H, body: bytes) -> H:
        for part in self.text:
            hashing.update(body if part is None else part)
        return hashing


def read_standard(headers: Headers, now: float, tolerance: float) -> Claim:
    """Read the headers of Standard Webhooks 1.0, symmetric (`v1`). The id is signed.

    The earlier Svix scheme is the same with headers named svix-….
    """
    family = (
        "svix" if "svix-signature" in headers and "webhook-signature" not in headers else "webhook"
    )
    id_, at = only(headers, f"{family}-id"), only(headers, f"{family}-timestamp")
    if not _ID.fullmatch(id_):
        raise Forged("its id is not valid")
    _check_time(at, now, tolerance)
    given = []
    for part in only(headers, f"{family}-signature").split(" "):
        match = _STANDARD.fullmatch(part)
        if match is None:
            raise Forged("its signature is not a list of version,signature")
        if match[1] == "v1":
            given.append(canonical_base64(match[2]))
    return Claim(_limited(given), (f"{id_}.{at}.".encode(), None), id=id_)


def read_github(headers: Headers) -> Claim:
    """Read X-Hub-Signature-256, which covers only the body."""
    return Claim([_hex(_without_prefix(only(headers, "x-hub-signature-256"), "sha256="))], (None,))


def read_stripe(headers: Headers, now: float, tolerance: float) -> Claim:
    """Read Stripe-Signature: t=…,v1=….

    A repeated delivery has another time and signature, so the body's hash identifies the event.
    """
    pairs = [part.partition("=") for part in only(headers, "stripe-signature").split(",")]
    times = [value for name, _, value in pairs if name.strip() == "t"]
    if len(times) != 1:
        raise Forged("its signature has no time, or several")
    _check_time(times[0], now, tolerance)
    given = [_hex(value) for name, _, value in pairs if name.strip() == "v1"]
    return Claim(_limited(given), (times[0].encode() + b".", None))


def read_house(headers: Headers, now: float, tolerance: float, shape: Shape) -> Claim:
    """Read another HMAC over the body, and over the headers that `shape.signed` names.

    The event is identified by the hash of the signed text.
    """
    text = _without_prefix(only(headers, shape.header), shape.prefix)
    given = _hex(text) if shape.encoding == "hex" else canonical_base64(text)
    if shape.timestamp:
        _check_time(only(headers, shape.timestamp), now, tolerance)
    signed: list[bytes | None] = []
    for i, part in enumerate(_PLACEHOLDER.split(shape.signed)):  # parts with odd index are names
        if i % 2 == 0:
            signed.append(part.encode())
        elif part.lower() == "body":
            signed.append(None)
        else:
            signed.append(only(headers, part.lower()).encode("latin-1"))
    return Claim([given], signed, shape.algorithm, hash_text=True)


def check_bearer(keys: Sequence[bytes], headers: Headers) -> None:
    """Verify Authorization: Bearer ….

    The token does not depend on the request, so it does not confirm its contents.
    """
    scheme, _, token = only(headers, "authorization").partition(" ")
    raw = token.strip().encode("latin-1")
    if scheme.lower() != "bearer" or not sum(hmac.compare_digest(key, raw) for key in keys):
        raise Forged("its bearer token is not valid")


def _limited(given: Sequence[bytes]) -> Sequence[bytes]:
    if not 0 < len(given) <= MAX_SIGNATURES:
        raise Forged(f"it has {len(given)} signatures of a known kind")
    return given


def _check_time(text: str, now: float, tolerance: float) -> None:
    if not _TIME.fullmatch(text):
        raise Forged("its time is not a number of seconds")
    if abs(now - int(text)) > tolerance:
        raise Forged(f"its time is {now - int(text):+.0f} s from the current time")


def _without_prefix(text: str, prefix: str) -> str:
    if not text.startswith(prefix):
        raise Forged(f"its signature does not begin with {prefix}")
    return text[len(prefix) :]


def _hex(text: str) -> bytes:
    if not re.fullmatch(r"(?:[0-9a-fA-F]{2})+", text):
        raise Forged("its signature is not hexadecimal")
    return bytes.fromhex(text)


def canonical_base64(text: str) -> bytes:
    """Decode strict base64 in its canonical form.

    Python's decoder ignores text after the padding, and unused bits.
    """
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise Forged("its signature is not base64") from None
    if base64.b64encode(raw).decode() != text:
        raise Forged("its signature is not canonical base64")
    return raw
