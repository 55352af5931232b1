"""Choice of a proxy for an event: pools, routes, health and cool-downs as pure decisions."""

from __future__ import annotations

import hashlib
import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, TypeAlias
from urllib.parse import unquote, urlsplit

import msgspec

from penstock.model import ErrorClass, Failure, Reason, Route, mint
from penstock.rules.identity import canonical_url, origin
from penstock.rules.reasons import sentence
from penstock.rules.routes import ServedPool, pool_serves

SCHEMES = ("http", "https", "socks5")
# Host of the health entry of the proxy itself: it cannot be reached, or rejects every request.
ANY_HOST = "*"
FORGET = 86400.0  # seconds after which a failure is ignored
EMPTY_WAIT = 30.0  # seconds until a pool without members is checked again
MAX_MEMBERS = 10_000
_host_port = re.compile(
    r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})(?::([^:\s]+):(\S*))?"
).fullmatch


# -- members ---------------------------------------------------------------------------------------


class Member(msgspec.Struct, frozen=True):
    """One proxy. Only `dsn` contains its credentials, and only the client uses it."""

    id: str  # the same in every process, made without the password
    dsn: str
    label: str
    weight: float = 1.0

    def __repr__(self) -> str:
        return f"<proxy {self.label}>"

    def __rich_repr__(self) -> list[tuple[str, Any]]:  # the default would show every field
        return [("label", self.label)]


class _Unusable(ValueError):
    """The text of a proxy is not valid. The message does not contain the text."""


def parse_member(line: str) -> Member:
    """Parse `scheme://[user:password@]host:port [WEIGHT]`, or `host:port[:user:password]`.

    Providers use the second form. Raise ValueError without the text.
    """
    text, *rest = line.split()
    weight = float(rest[0]) if len(rest) == 1 else 1.0
    if len(rest) > 1 or not 0 < weight <= 1e6:
        raise _Unusable("its weight is not a positive number")
    if "://" not in text:
        m = _host_port(text)
        if m is None:
            raise _Unusable("it is neither a URL nor host:port")
        text = f"http://{m[3]}:{m[4]}@{m[1]}:{m[2]}" if m[3] else f"http://{text}"
    parts = urlsplit(text)
    scheme = parts.scheme.lower()
    if scheme not in SCHEMES:
        raise _Unusable(f"its scheme is not {', '.join(SCHEMES)}")
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port or parts.path not in ("", "/") or parts.query or parts.fragment:
        raise _Unusable("it has no host or no port, or more than that")
    host_text = f"[{host}]" if ":" in host else host
    label = f"{scheme}://{'***@' if '@' in parts.netloc else ''}{host_text}:{port}"
    # The id includes the user name, because providers select sessions by it. The user name may be a
    # secret, so only its hash is used.
    identity = mint("proxy", scheme, parts.username or "", host, str(port))[:16]
    return Member(identity, text.rstrip("/"), label, weight)


def parse_members(lines: Iterable[str]) -> tuple[Member, ...]:
    """Parse one proxy per line. Comments, empty lines and repeated proxies are ignored.

    Raise ValueError with the number of the line.
    """
    found: dict[str, Member] = {}
    for n, raw in enumerate(lines, 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        try:
            member = parse_member(line)
        except ValueError as e:
            reason = e if isinstance(e, _Unusable) else "it cannot be read"
            raise ValueError(f"proxy {n}: {reason}") from None
        found.setdefault(member.id, member)
        if len(found) > MAX_MEMBERS:
            raise ValueError(f"there are more than {MAX_MEMBERS} proxies")
    return tuple(found.values())


def scrub(text: str, dsn: str) -> str:
    """Replace this proxy's credentials in `text`, as written in the DSN and percent-decoded.

    Libraries may put them into any message. Credentials of one or two characters are kept.
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
    """Return the canonical URL of a provider's list. Raise ValueError if it cannot be fetched."""
    if not isinstance(url, str):
        raise ValueError("not a URL")
    return canonical_url(url)


def masked_list(url: str) -> str:
    """Return the URL for display. Only the origin is shown: the rest may contain an API key."""
    return f"{origin(url)}/***"


# -- pools and routes ------------------------------------------------------------------------------


class Pool(ServedPool, frozen=True, kw_only=True):
    members: tuple[Member, ...] = ()
    weight: float = 1.0
    # Seconds after the first failure, then doubled up to `longest`. 0 for a gateway that changes
    # its exits itself.
    cooldown: float = 30.0
    longest: float = 3600.0
    sticky: bool = True
    next: str = ""  # the pool for an event that was blocked in this pool
    trouble: str = ""  # why there are no members


def plan(pools: Mapping[str, Pool], route: Route, *, key: str, turn: int = 0) -> tuple[Pool, ...]:
    """Return the pools that this route may use now, in the order of trying.

    `turn` is how often the event was blocked. Each time it moves on by one pool. The number comes
    from the ledger, so the event is not changed. `key` (the account or the event's id) decides the
    order of pools that serve the same geo or account, by weight.

    Raise Failure(PERMANENT) if no configured pool serves the route.
    """
    if route.pool:
        first = pools.get(route.pool)
        if first is None:
            raise _no_pool(f"there is no proxy pool {route.pool!r}")
        if not pool_serves(first, route, named=True):
            raise _no_pool(f"proxy pool {route.pool!r} does not serve {_describe_route(route)}")
        chain = [first]
        while (
            (then := pools.get(chain[-1].next)) is not None
            and then not in chain
            and pool_serves(then, route, named=True)
        ):
            chain.append(then)
        # Only this pool: if it is exhausted, a pool that the route did not name must not be used.
        return (chain[turn % len(chain)],)
    fit = [p for p in pools.values() if pool_serves(p, route, named=False)]
    if not fit:
        raise _no_pool(sentence(Reason.NO_POOL, _describe_route(route)))
    fit.sort(key=lambda p: (-_score(key, p.name, p.weight), p.name))
    at = turn % len(fit)
    return (*fit[at:], *fit[:at])


def _no_pool(reason: str) -> Failure:
    return Failure(ErrorClass.PERMANENT, reason, code=Reason.NO_POOL)


def _describe_route(route: Route) -> str:
    parts = [
        f"{name} {value!r}"
        for name, value in (("geo", route.geo), ("account", route.account))
        if value
    ]
    return " and ".join(parts) or "a route without an account"


# -- picking ---------------------------------------------------------------------------------------


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """Failures of a proxy at one host, or at all hosts. Only kept while there are failures."""

    failures: int = 0
    until: float = 0.0  # end of the cool-down
    at: float = 0.0  # time of the last change
    reason: str = ""


class Choice(msgspec.Struct, frozen=True):
    pool: Pool
    member: Member


class Exhausted(msgspec.Struct, frozen=True):
    until: float
    reason: str
    code: Reason


View: TypeAlias = Mapping[tuple[str, str], Health]


def cooling(view: View, member: str, host: str, now: float) -> float:
    """Return when the proxy may be used for the host again, or 0 if it may be used now."""
    known = [view.get((member, place)) for place in (host, ANY_HOST)]
    return max((health.until for health in known if health and health.until > now), default=0.0)


def pick(
    pools: Sequence[Pool],
    host: str,
    view: View,
    now: float,
    random: float,
    *,
    session: str | None = None,
) -> Choice | Exhausted:
    """Choose a proxy of the first pool that has a usable one.

    `random` in [0, 1) decides by weight. With `session`, the choice only depends on the session:
    it gets the same proxy while that proxy is usable, in every process and after a restart.

    No table is needed. Each proxy has a score by hash and weight, and the best usable one is
    chosen. If a proxy fails, only its own sessions move.
    """
    for pool in pools:
        free = [m for m in pool.members if not cooling(view, m.id, host, now)]
        if free:
            if session and pool.sticky:
                return Choice(
                    pool, max(free, key=lambda m: (_score(session, m.id, m.weight), m.id))
                )
            return Choice(pool, _weighted(free, random))
    names = " and ".join(repr(p.name) for p in pools)
    word = "pool" if len(pools) == 1 else "pools"
    if members := [m.id for pool in pools for m in pool.members]:
        soonest = min(cooling(view, member, host, now) for member in members)
        known = [view.get((member, place)) for member in members for place in (host, ANY_HOST)]
        last = max((health for health in known if health), key=lambda health: health.at)
        because = f" (last: {last.reason})" if last.reason else ""
        reason = sentence(Reason.POOL_COOLING, word, names, host, because)
        return Exhausted(soonest, reason, Reason.POOL_COOLING)
    trouble = "; ".join(dict.fromkeys(p.trouble for p in pools if p.trouble))
    because = f" ({trouble})" if trouble else ""
    reason = sentence(Reason.POOL_EMPTY, word, names, because)
    return Exhausted(now + EMPTY_WAIT, reason, Reason.POOL_EMPTY)


def _weighted(members: Sequence[Member], random: float) -> Member:
    ends = list(accumulate(m.weight for m in members))
    return members[min(bisect_right(ends, random * ends[-1]), len(members) - 1)]


def _score(key: str, name: str, weight: float) -> float:
    """Return a weighted rendezvous hash: a name wins a share of keys equal to its weight share."""
    digest = hashlib.blake2b(
        name.encode("utf-8", "surrogatepass"),
        key=hashlib.blake2b(key.encode("utf-8", "surrogatepass")).digest(),
        digest_size=8,
    ).digest()
    return -weight / math.log((int.from_bytes(digest, "big") + 1) / (2**64 + 1))


# -- health ----------------------------------------------------------------------------------------


class ProxyFailed(Failure):
    """The proxy failed, not the target.

    `own` is True if it would have failed with any target, and no target was contacted.
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
        super().__init__(kind, reason, code=Reason.PROXY, detail=detail, status=status)
        self.own = own


class PoolExhausted(Failure):
    """No proxy is available now. The event is delayed without a charge, until `retry.max_age`."""

    def __init__(self, reason: str, *, code: Reason, after: float) -> None:
        super().__init__(ErrorClass.THROTTLED, reason, code=code, after=after)


def failure_scope(failure: Failure) -> str | None:
    """Return the host for which the proxy is marked as failing.

    Return `*` for all hosts, "" for the event's host, None if the proxy worked.
    """
    # 407 is a response of the proxy, not of the target.
    if (isinstance(failure, ProxyFailed) and failure.own) or failure.status == 407:
        return ANY_HOST
    at_host = (
        failure.kind is ErrorClass.BLOCKED
        or (failure.kind is ErrorClass.THROTTLED and failure.status == 429)
        # With a status there was a response through the proxy: a 5xx is the target's failure.
        or (failure.kind is ErrorClass.TRANSIENT and failure.status is None)
    )
    return "" if at_host else None


def failed(
    health: Health | None,
    now: float,
    *,
    cooldown: float,
    longest: float,
    reason: str,
    least: float = 0.0,
) -> Health:
    """Return the health after one more failure.

    Failures during a cool-down belong to the same incident. `least` is the wait that the host
    requested.
    """
    known = health if health is not None and now - health.at < FORGET else Health()
    if known.until > now:
        return msgspec.structs.replace(known, until=max(known.until, now + min(least, longest)))
    failures = known.failures + 1
    wait = min(longest, max(least, cooldown * 2.0 ** min(failures - 1, 30)))
    return Health(failures=failures, until=now + wait, at=now, reason=reason)


def worked(health: Health, now: float) -> Health:
    """Return the health after a success: half of the failures are removed.

    A success during a cool-down changes nothing, because its request was sent before the failure.
    """
    if health.until > now:
        return health
    left = 0 if now - health.at >= FORGET else health.failures // 2
    return Health(failures=left, at=now, reason=health.reason if left else "")
