"""Which proxy an event goes through: pools, routes, health and cool-downs as pure decisions.
Nothing here dials, stores or draws a number.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias
from urllib.parse import unquote, urlsplit

import msgspec

from penstock.model import ErrorClass, Failure, Route, mint
from penstock.rules.identity import canonical_url, origin

SCHEMES = ("http", "https", "socks5")
ANY_HOST = (
    "*"  # health of the proxy itself: it cannot be reached or does not let us in, whatever the host
)
ANY_ACCOUNT = "*"
FORGET = 86400.0  # seconds after which an old failure says nothing any more
EMPTY_WAIT = 30.0  # until a pool without members is looked at again
MAX_MEMBERS = 10_000
_host_port = re.compile(
    r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})(?::([^:\s]+):(\S*))?"
).fullmatch


# -- members ---------------------------------------------------------------------------------------


class Member(msgspec.Struct, frozen=True):
    """One proxy. Only `dsn` holds its secrets, and only the client gets to see it."""

    id: str  # the same in every process, and without the password
    dsn: str
    label: str
    weight: float = 1.0

    def __repr__(self) -> str:
        return f"<proxy {self.label}>"

    __str__ = __repr__

    def __rich_repr__(self) -> list[tuple[str, Any]]:  # msgspec's own would show every field
        return [("label", self.label)]


def parse_member(line: str) -> Member:
    """`scheme://[user:password@]host:port [WEIGHT]`, or as providers list them:
    `host:port[:user:password]`. Raises ValueError, without the text.
    """
    text, *rest = line.split()
    weight = float(rest[0]) if len(rest) == 1 else 1.0
    if len(rest) > 1 or not 0 < weight <= 1e6:
        raise ValueError("its weight is not a positive number")
    if "://" not in text:
        m = _host_port(text)
        if m is None:
            raise ValueError("it is neither a URL nor host:port")
        text = f"http://{m[3]}:{m[4]}@{m[1]}:{m[2]}" if m[3] else f"http://{text}"
    parts = urlsplit(text)
    scheme = parts.scheme.lower()
    if scheme not in SCHEMES:
        raise ValueError(f"its scheme is not {', '.join(SCHEMES)}")
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port or parts.path not in ("", "/") or parts.query or parts.fragment:
        raise ValueError("it has no host or no port, or more than that")
    place = f"[{host}]" if ":" in host else host
    label = f"{scheme}://{'***@' if '@' in parts.netloc else ''}{place}:{port}"
    # The user name counts: providers tell sessions apart by it. It may be the secret itself, so it
    # is only ever hashed.
    identity = mint("proxy", scheme, parts.username or "", host, str(port))[:16]
    return Member(identity, text.rstrip("/"), label, weight)


def parse_members(lines: Iterable[str]) -> tuple[Member, ...]:
    """One each, comments and empty lines left out; the second mention of a proxy is none. Raises
    ValueError that says which line.
    """
    found: dict[str, Member] = {}
    for n, raw in enumerate(lines, 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        try:
            member = parse_member(line)
        except ValueError as e:
            why = str(e) if str(e).startswith("it") else "it cannot be read"
            raise ValueError(f"proxy {n}: {why}") from None
        found.setdefault(member.id, member)
        if len(found) > MAX_MEMBERS:
            raise ValueError(f"there are more than {MAX_MEMBERS} proxies")
    return tuple(found.values())


def scrub(text: str, dsn: str) -> str:
    """`text` without this proxy's credentials, in whatever spelling: libraries put into a message
    what they like.
    """
    parts = urlsplit(dsn)
    secrets = {dsn} | {
        form for s in (parts.username, parts.password) if s for form in (s, unquote(s))
    }
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) > 2:
            text = text.replace(secret, "***")
    return text


def canonical_list(url: object) -> str:
    """The URL of a provider's list; a ValueError for what we would never fetch."""
    if not isinstance(url, str):
        raise ValueError("not a URL")
    return canonical_url(url)


def masked_list(url: str) -> str:
    """For people: providers put the key anywhere in it."""
    return f"{origin(url)}/***"


# -- pools and routes ------------------------------------------------------------------------------


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    members: tuple[Member, ...] = ()
    geo: tuple[str, ...] = ()  # what its exits are in; none: it promises nothing
    account: tuple[str, ...] = ()  # whom it is reserved for; none: for all, "*": for any account
    weight: float = 1.0
    # after the first failure, then doubled; 0: never (a gateway that changes its exits by itself)
    cooldown: float = 30.0
    longest: float = 3600.0
    sticky: bool = True
    next: str = ""  # the pool an event of this one goes to when it was blocked
    trouble: str = ""  # why there are no members


def needs_proxy(route: Route) -> bool:
    return bool(route.pool or route.geo or route.account)


def plan(pools: Mapping[str, Pool], route: Route, *, key: str, turn: int = 0) -> tuple[Pool, ...]:
    """The pools this route may use now, in the order they are tried. Raises Failure(PERMANENT) for
    a route no configuration serves.

    `turn` counts how often the event was blocked: each moves it on by one pool. It is counted from
    the ledger, so the event itself is never rewritten. `key` (the account, or the event's id)
    decides the order among pools that serve the same geo or account, by weight.
    """
    if route.pool:
        first = pools.get(route.pool)
        if first is None:
            raise Failure(ErrorClass.PERMANENT, f"there is no proxy pool {route.pool!r}")
        if not _serves(first, route, named=True):
            raise Failure(
                ErrorClass.PERMANENT, f"proxy pool {route.pool!r} does not serve {_wish(route)}"
            )
        chain = [first]
        while (
            (then := pools.get(chain[-1].next)) is not None
            and then not in chain
            and _serves(then, route, named=True)
        ):
            chain.append(then)
        return (
            chain[turn % len(chain)],
        )  # alone: being exhausted is no reason to use a pool that was not asked for
    fit = [p for p in pools.values() if _serves(p, route, named=False)]
    if not fit:
        raise Failure(ErrorClass.PERMANENT, f"no proxy pool serves {_wish(route)}")
    fit.sort(key=lambda p: (-_score(key, p.name, p.weight), p.name))
    at = turn % len(fit)
    return (*fit[at:], *fit[:at])


def _serves(pool: Pool, route: Route, *, named: bool) -> bool:
    if route.geo and route.geo.lower() not in pool.geo:
        return False
    if pool.account:
        return bool(route.account) and (
            route.account in pool.account or ANY_ACCOUNT in pool.account
        )
    return named or bool(route.geo)


def _wish(route: Route) -> str:
    wishes = [
        f"{what} {value!r}"
        for what, value in (("geo", route.geo), ("account", route.account))
        if value
    ]
    return " and ".join(wishes) or "a route without an account"


# -- picking ---------------------------------------------------------------------------------------


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """What is remembered of a proxy at one host (or at any), while there is anything to remember."""

    failures: int = 0
    until: float = 0.0  # cools down
    at: float = 0.0  # of the last change
    reason: str = ""


class Choice(msgspec.Struct, frozen=True):
    pool: Pool
    member: Member


class Exhausted(msgspec.Struct, frozen=True):
    until: float
    reason: str


View: TypeAlias = Mapping[tuple[str, str], Health]


def cooling(view: View, member: str, host: str, now: float) -> float:
    """When it may be used again for the host; 0 where it may now."""
    until = 0.0
    for key in ((member, host), (member, ANY_HOST)):
        health = view.get(key)
        if health is not None and health.until > now:
            until = max(until, health.until)
    return until


def pick(
    pools: Sequence[Pool],
    host: str,
    view: View,
    now: float,
    random: float,
    *,
    session: str | None = None,
) -> Choice | Exhausted:
    """From the first of these pools that has a proxy to give. `random` in [0, 1) decides by weight;
    a session decides by itself, always alike.

    The same session gets the same proxy as long as that one is well, in every process and after a
    restart, and without a table: each proxy scores by hash and weight, and the best that is well
    wins. One that falls out moves only its own sessions.
    """
    soonest, last = math.inf, Health()
    for pool in pools:
        free = []
        for member in pool.members:
            until = cooling(view, member.id, host, now)
            if until:
                soonest = min(soonest, until)
                last = max(
                    last,
                    view.get((member.id, host), last),
                    view.get((member.id, ANY_HOST), last),
                    key=lambda h: h.at,
                )
            else:
                free.append(member)
        if free:
            if session and pool.sticky:
                return Choice(
                    pool, max(free, key=lambda m: (_score(session, m.id, m.weight), m.id))
                )
            return Choice(pool, _weighted(free, random))
    names = " and ".join(repr(p.name) for p in pools)
    word = "pool" if len(pools) == 1 else "pools"
    if soonest < math.inf:
        return Exhausted(
            soonest,
            f"proxy {word} {names} exhausted: every proxy cools down for {host}{f' (last: {last.reason})' if last.reason else ''}",
        )
    why = "; ".join(dict.fromkeys(p.trouble for p in pools if p.trouble))
    return Exhausted(
        now + EMPTY_WAIT, f"proxy {word} {names} exhausted: no proxies{f' ({why})' if why else ''}"
    )


def _weighted(members: Sequence[Member], random: float) -> Member:
    mark = random * sum(m.weight for m in members)
    for member in members:
        mark -= member.weight
        if mark < 0:
            return member
    return members[-1]


def _score(key: str, name: str, weight: float) -> float:
    """Weighted rendezvous: the share of keys a name wins is its share of the weight."""
    digest = hashlib.blake2b(
        name.encode("utf-8", "surrogatepass"),
        key=hashlib.blake2b(key.encode("utf-8", "surrogatepass")).digest(),
        digest_size=8,
    ).digest()
    return -weight / math.log((int.from_bytes(digest, "big") + 1) / (2**64 + 1))


# -- health ----------------------------------------------------------------------------------------


class ProxyFailed(Failure):
    """The proxy, not the target. `own`: it would have happened with any target, and none was
    contacted.
    """

    def __init__(
        self,
        kind: ErrorClass,
        reason: str,
        *,
        own: bool,
        detail: str = "",
        status: int | None = None,
    ) -> None:
        super().__init__(kind, reason, detail=detail, status=status)
        self.own = own


class PoolExhausted(Failure):
    """No proxy to be had now: the event is put off, at nobody's cost, until it is too old."""

    def __init__(self, reason: str, *, after: float) -> None:
        super().__init__(ErrorClass.THROTTLED, reason, after=after)


def blames(failure: Failure) -> str | None:
    """The host whose health of the proxy suffers: "" for the event's own, `*` for all; None where
    the proxy did its part.
    """
    if isinstance(failure, ProxyFailed) and failure.own:
        return ANY_HOST
    if failure.status == 407:  # it answered in the target's place
        return ANY_HOST
    if failure.kind is ErrorClass.THROTTLED:
        return "" if failure.status == 429 else None
    if failure.kind is ErrorClass.TRANSIENT:
        return (
            "" if failure.status is None else None
        )  # an answer came through: a 5xx is the target's
    return "" if failure.kind is ErrorClass.BLOCKED else None


def failed(
    health: Health | None,
    now: float,
    *,
    cooldown: float,
    longest: float,
    reason: str,
    least: float = 0.0,
) -> Health:
    """After one more failure. Those that were under way together are one incident; `least` is what
    the host asked for.
    """
    known = health if health is not None and now - health.at < FORGET else Health()
    if known.until > now:
        return msgspec.structs.replace(known, until=max(known.until, now + min(least, longest)))
    failures = known.failures + 1
    wait = min(longest, max(least, cooldown * 2.0 ** min(failures - 1, 30)))
    return Health(failures=failures, until=now + wait, at=now, reason=reason)


def worked(health: Health, now: float) -> Health:
    """After a success: half is forgiven. One that was under way when the trouble began proves
    nothing.
    """
    if health.until > now:
        return health
    left = 0 if now - health.at >= FORGET else health.failures // 2
    return Health(failures=left, at=now, reason=health.reason if left else "")
