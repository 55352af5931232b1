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
# Delayed chains whose cookies one worker keeps. Each has at most MAX_PROGRESS bytes of cookies.
MAX_KEPT = 256


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
    """A delayed chain as the ledger stores it. It has no cookies.

    An older release stored them in `cookies`. Such progress is not continued.
    """

    url: str  # of the next request
    method: str
    has_body: bool = False
    headers: dict[str, str]
    conditional: bool = False
    hops: list[Hop] = []
    seen: list[str] = []
    cookies: list[Cookie] = []
    has_cookies: bool = False  # the worker that made this progress keeps them
    until: float  # when it expires


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Progress).decode


def mark(method: str, url: str, cookies: str) -> str:
    """Return the hash of a request. A chain that sends the same request twice is a loop."""
    return mint(method, url, cookies)


class KeptCookies:
    """Cookies of delayed chains, by event id, in the memory of one worker.

    They are secrets of a session, so they are not written to the ledger. If another worker
    continues the chain, it starts from the event's URL.
    """

    def __init__(self) -> None:
        self._jars: dict[str, tuple[float, Jar]] = {}

    def keep(self, event_id: str, jar: Jar, until: float) -> bool:
        """Return False if the cookies are too large."""
        if sum(len(c.name) + len(c.value) + len(c.path) for c in jar.cookies) > MAX_PROGRESS:
            return False
        self._jars.pop(event_id, None)
        self._jars[event_id] = until, jar
        while len(self._jars) > MAX_KEPT:
            del self._jars[next(iter(self._jars))]
        return True

    def find(self, event_id: str, now: float) -> Jar | None:
        until, jar = self._jars.get(event_id, (0.0, None))
        if until < now:
            self._jars.pop(event_id, None)
            return None
        return jar


def save(
    chain: RedirectChain, account_jar: Jar | None, due: float, event: Event, kept: KeptCookies
) -> bytes:
    """Return the progress of a chain that is delayed until `due`, or b"" if it is too large."""
    own = chain.jar if chain.jar is not account_jar and chain.jar else None
    until = due + RETENTION
    if own is not None and not kept.keep(event.id, own, until):
        return b""
    raw = _encode(
        _Progress(
            url=chain.url,
            method=chain.method,
            has_body=chain.body is not None,
            headers=chain.headers,
            conditional=chain.conditional,
            hops=chain.hops,
            seen=sorted(chain.seen),
            has_cookies=own is not None,
            until=until,
        )
    )
    return raw if len(raw) <= MAX_PROGRESS else b""


def resume(
    progress: bytes,
    event: Event,
    account_jar: Jar | None,
    kept: KeptCookies,
    *,
    key_by: Literal["host", "domain"],
    now: float,
) -> RedirectChain | None:
    """Return the saved chain of this event, or None if it does not exist or has expired.

    Return None also if another worker keeps its cookies.
    """
    if not progress:
        return None
    try:
        saved = _decode(progress)
    except (msgspec.MsgspecError, UnicodeError):  # written by another release
        return None
    own = kept.find(event.id, now) if saved.has_cookies else None
    if saved.until < now or saved.cookies or (saved.has_cookies and own is None):
        return None
    return RedirectChain(
        saved.url,
        host_key(saved.url, key_by),
        saved.method,
        event.ask.body if saved.has_body else None,
        saved.headers,
        saved.conditional,
        account_jar if account_jar is not None else own,
        saved.hops,
        set(saved.seen),
    )
