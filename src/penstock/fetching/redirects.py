"""State of a request while redirects are followed, and how a later attempt continues it."""

from __future__ import annotations

from typing import Literal

import msgspec

from penstock.model import Event, mint
from penstock.net.cookies import Cookie, Jar
from penstock.ports import Hop
from penstock.rules.identity import host_key

# Maximum bytes of saved progress. Larger progress, for example with many cookies, is not saved. The
# next attempt then starts from the event's URL.
MAX_PROGRESS = 64 << 10
# Seconds after the next attempt is due. After that, it starts from the event's URL.
RETENTION = 600.0


class RedirectChain(msgspec.Struct):
    """State of one request while redirects are followed."""

    url: str
    host: str
    method: str
    body: bytes | None
    headers: dict[str, str]
    conditional: bool
    jar: Jar | None
    hops: list[Hop] = []
    seen: set[str] = set()  # hashes of the requests sent, see `mark`


class _Progress(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A delayed chain as the ledger stores it. It has no cookies of an account."""

    url: str  # of the next request
    method: str
    has_body: bool = False
    headers: dict[str, str]
    conditional: bool = False
    hops: list[Hop] = []
    seen: list[str] = []
    cookies: list[Cookie] = []
    until: float  # when it expires


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Progress).decode


def mark(method: str, url: str, cookies: str) -> str:
    """Return the hash of a request. A chain that sends the same request twice is a loop."""
    return mint(method, url, cookies)


def save(chain: RedirectChain, account_jar: Jar | None, due: float) -> bytes:
    """Return the progress of a chain that is delayed until `due`, or b"" if it is too large."""
    own = chain.jar is not None and chain.jar is not account_jar
    raw = _encode(
        _Progress(
            url=chain.url,
            method=chain.method,
            has_body=chain.body is not None,
            headers=chain.headers,
            conditional=chain.conditional,
            hops=chain.hops,
            seen=sorted(chain.seen),
            cookies=chain.jar.cookies if own and chain.jar is not None else [],
            until=due + RETENTION,
        )
    )
    return raw if len(raw) <= MAX_PROGRESS else b""


def resume(
    progress: bytes,
    event: Event,
    account_jar: Jar | None,
    *,
    key_by: Literal["host", "domain"],
    now: float,
) -> RedirectChain | None:
    """Return the saved chain of this event, or None if it does not exist or has expired."""
    if not progress:
        return None
    try:
        saved = _decode(progress)
    except (msgspec.MsgspecError, UnicodeError):  # written by another release
        return None
    if saved.until < now:
        return None
    return RedirectChain(
        saved.url,
        host_key(saved.url, key_by),
        saved.method,
        event.ask.body if saved.has_body else None,
        saved.headers,
        saved.conditional,
        account_jar if account_jar is not None or not saved.cookies else Jar(saved.cookies),
        saved.hops,
        set(saved.seen),
    )
