"""Cookie jar (RFC 6265): stores cookies of responses and selects those to send.

Each account has a separate jar. Jars of accounts are not persistent.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

import msgspec

from penstock.net.guard import parse_address
from penstock.rules.identity import authority, registrable_domain
from penstock.rules.pace import parse_date

MAX_COOKIES = 300  # per jar
MAX_PER_DOMAIN = 50
MAX_SIZE = 4096  # characters of name and value together
MAX_LINES = 100  # `set-cookie` lines of one response. The rest is ignored.
MAX_ATTRIBUTES = 32  # of one cookie. The rest is ignored.
MAX_ATTRIBUTE = 1024  # characters. A longer attribute is ignored, as in browsers.
MAX_AGE = 400 * 86400.0  # seconds, the same limit as in browsers
_bad = re.compile(r"[\x00-\x08\x0a-\x1f\x7f;]").search


class Cookie(msgspec.Struct, frozen=True):
    name: str
    value: str
    domain: str
    path: str
    host_only: bool
    secure: bool
    expires: float  # inf for a session cookie
    n: int  # order of creation


class Jar:
    """Cookies of one account, or of one chain of redirects. Not thread-safe."""

    def __init__(self, cookies: Iterable[Cookie] = ()) -> None:
        self._cookies = {(c.domain, c.path, c.name): c for c in cookies}
        self._n = 1 + max((c.n for c in self._cookies.values()), default=-1)

    @property
    def cookies(self) -> list[Cookie]:
        return list(self._cookies.values())

    def __len__(self) -> int:
        return len(self._cookies)

    def header(self, url: str, now: float) -> str:
        """Return the `Cookie` header for this URL, longest path first, or "" if no cookie fits."""
        if not self._cookies:
            return ""
        scheme, host, _ = authority(url)
        path = _path(url)
        self._cookies = {key: c for key, c in self._cookies.items() if c.expires > now}
        fit = [
            c
            for c in self._cookies.values()
            if (host == c.domain if c.host_only else _within(host, c.domain))
            and _covers(c.path, path)
            and (not c.secure or scheme == "https")
        ]
        fit.sort(key=lambda c: (-len(c.path), c.n))
        return "; ".join(f"{c.name}={c.value}" if c.name else c.value for c in fit)

    def store(self, url: str, headers: Mapping[str, str], now: float) -> None:
        """Store the cookies of a response's `set-cookie` header, separated by line feeds.

        Cookies that the URL's site may not set are ignored.
        """
        for line in headers.get("set-cookie", "").split("\n", MAX_LINES)[:MAX_LINES]:
            if line and (cookie := _parse(line, url, now, self._n)) is not None:
                key = cookie.domain, cookie.path, cookie.name
                old = self._cookies.pop(key, None)
                if cookie.expires > now:
                    self._cookies[key] = (
                        cookie if old is None else msgspec.structs.replace(cookie, n=old.n)
                    )
                    self._n += 1
                    self._trim(cookie.domain)

    def _trim(self, domain: str) -> None:
        """Delete the cookies that were set longest ago, down to the limits."""
        in_domain = [key for key in self._cookies if key[0] == domain]
        for key in in_domain[: max(0, len(in_domain) - MAX_PER_DOMAIN)]:
            del self._cookies[key]
        while len(self._cookies) > MAX_COOKIES:
            del self._cookies[next(iter(self._cookies))]


def _parse(line: str, url: str, now: float, n: int) -> Cookie | None:
    pair, *attributes = line.split(";", MAX_ATTRIBUTES + 1)[: MAX_ATTRIBUTES + 1]
    name, equals, value = pair.partition("=")
    name, value = (name.strip(), value.strip()) if equals else ("", name.strip())
    if not (name or value) or len(name) + len(value) > MAX_SIZE or _bad(name) or _bad(value):
        return None
    scheme, host, _ = authority(url)
    domain, path, host_only, secure = host, "", True, False
    expires, max_age = math.inf, None
    for attribute in attributes:
        if len(attribute) > MAX_ATTRIBUTE:
            continue
        key, _, text = attribute.partition("=")
        key, text = key.strip().lower(), text.strip()
        if key == "domain" and text:
            given = text.lower().removeprefix(".").removesuffix(".")
            if not _within(host, given) or (given != host and not _may_have_shared_cookies(given)):
                return None
            # A public suffix may set a cookie for its own host only.
            domain, host_only = given, given == host and not _may_have_shared_cookies(given)
        elif key == "path":
            path = text
        elif key == "secure":
            secure = True
        elif key == "max-age" and re.fullmatch(r"-?[0-9]{1,12}", text):
            max_age = int(text)
        elif key == "expires" and (at := parse_date(text.replace("-", " "))) is not None:
            expires = at
    if max_age is not None:
        expires = now + max_age if max_age > 0 else 0.0
    if secure and scheme != "https":
        return None
    if not path.startswith("/"):
        path = _path(url).rpartition("/")[0] or "/"
    low = name.lower()
    if low.startswith("__secure-") and not secure:
        return None
    if low.startswith("__host-") and not (secure and host_only and path == "/"):
        return None
    return Cookie(
        name,
        value,
        domain,
        path,
        host_only,
        secure,
        expires if expires == math.inf else min(expires, now + MAX_AGE),
        n,
    )


def _path(url: str) -> str:
    return url[url.index("/", 8) :].partition("?")[0]


def _within(host: str, domain: str) -> bool:
    return host == domain or (host.endswith("." + domain) and parse_address(host) is None)


def _may_have_shared_cookies(domain: str) -> bool:
    """Return False for a public suffix, whose subdomains belong to different owners."""
    return registrable_domain("x." + domain) != "x." + domain


def _covers(cookie: str, path: str) -> bool:
    return path == cookie or (
        path.startswith(cookie) and (cookie.endswith("/") or path[len(cookie)] == "/")
    )
