"""Outcome table: the error class of responses, transport errors and exceeded limits.

See `retry` for retries.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

import msgspec

from penstock.model import ErrorClass, Failure
from penstock.rules.pace import parse_retry_after

_T, _X, _B, _P, _O = (
    ErrorClass.THROTTLED,
    ErrorClass.TRANSIENT,
    ErrorClass.BLOCKED,
    ErrorClass.PERMANENT,
    ErrorClass.OURS,
)


class Verdict(msgspec.Struct, frozen=True):
    kind: ErrorClass
    reason: str
    after: float | None = None  # seconds to wait, by the server's Retry-After
    status: int | None = None

    def failure(self, detail: str = "") -> Failure:
        return Failure(self.kind, self.reason, after=self.after, status=self.status, detail=detail)


# -- responses -------------------------------------------------------------------------------------

# Exceptions to the general rule: 2xx and 304 are good, other 4xx permanent, other 5xx transient.
STATUS: dict[int, ErrorClass] = {
    401: _B,
    403: _B,
    407: _B,
    451: _B,
    999: _B,
    429: _T,
    503: _T,
    408: _X,
    425: _X,
}

# Texts that only a challenge page has. The word captcha alone is not enough, because a page may
# load one for its contact form.
TITLES: tuple[tuple[bytes, str], ...] = (
    (b"<title>Just a moment...</title>", "Cloudflare"),
    (b"Access to this page has been denied", "PerimeterX"),
    (b"Pardon Our Interruption", "Imperva"),
    (b"captcha-delivery.com", "DataDome"),
)
CHALLENGES: tuple[tuple[bytes, str], ...] = (
    *TITLES,
    (b"_cf_chl_opt", "Cloudflare"),
    (b"cf-chl-", "Cloudflare"),
    (b"px-captcha", "PerimeterX"),
    (b"Request unsuccessful. Incapsula incident ID", "Imperva"),
    (b"sucuri_cloudproxy_js", "Sucuri"),
    (b"/errors/validateCaptcha", "Amazon"),
)
# Weaker marks, which mean a challenge only on a page of at most this many bytes.
SMALL = 4096
SMALL_MARKS: tuple[bytes, ...] = (
    b"access denied",
    b"captcha",
    b"are you a robot",
    b"unusual traffic",
    b"request blocked",
    b"enable javascript and cookies",
)
SOFT_404: tuple[bytes, ...] = (b"page not found", b"404 not found", b"error 404", b"<title>404")
# Bytes. Challenge pages are short or have their mark at the top. On longer pages only the top is
# searched, because every page is searched.
_SHORT, _TOP = 8192, 1024


def challenge(headers: Mapping[str, str], body: bytes) -> str:
    """Return which service sent a challenge page, or which mark it has, "" for a normal page."""
    if headers.get("cf-mitigated") == "challenge":
        return "Cloudflare"
    if headers.get("x-amzn-waf-action") in ("challenge", "captcha"):
        return "AWS WAF"
    if len(body) > _SHORT:
        for mark, who in TITLES:
            if body.find(mark, 0, _TOP) >= 0:
                return who
        return ""
    for mark, who in CHALLENGES:
        if mark in body:
            return who
    if len(body) <= SMALL:
        low = body.lower()
        for mark in SMALL_MARKS:
            if mark in low:
                return f"the page says “{mark.decode()}”"
    return ""


def _is_html(headers: Mapping[str, str]) -> bool:
    kind = headers.get("content-type", "")
    return kind.startswith("text/html") or "html" in kind.lower()


def judge(
    status: int,
    headers: Mapping[str, str],
    body: bytes,
    *,
    now: float,
    method: str = "GET",
    conditional: bool = True,
    soft_404: bool = False,
) -> Verdict | None:
    """Return the verdict on a failed response, or None if the response is good.

    `headers` are in lower case. `now` is for a Retry-After with a date. `conditional` is True if
    the request allowed a 304.
    """
    if 200 <= status < 300:
        if not _is_html(headers) or method == "HEAD":
            return None
        if len(body) < SMALL and not body.strip():
            return (
                Verdict(_B, f"HTTP {status} with an empty body", status=status)
                if status == 200
                else None
            )
        if who := challenge(headers, body):
            return Verdict(_B, f"HTTP {status}, but a challenge page ({who})", status=status)
        if soft_404 and len(body) <= SMALL:
            low = body.lower()
            if any(mark in low for mark in SOFT_404):
                return Verdict(
                    _B, f"HTTP {status}, but the page says that there is none", status=status
                )
        return None
    if status == 304:
        return (
            None
            if conditional
            else Verdict(_X, "HTTP 304, though nothing was asked conditionally", status=status)
        )
    if status < 200:
        return Verdict(_X, f"HTTP {status} is no final answer", status=status)
    if status < 400:
        return Verdict(_P, f"HTTP {status} leads nowhere", status=status)
    kind = STATUS.get(status) or (_P if status < 500 else _X)
    if kind is _T:
        value = headers.get("retry-after")
        after = parse_retry_after(value, now) if value else None
        # Old challenge pages have status 503. With a Retry-After, the server is really throttling.
        if after is None and (who := challenge(headers, body)):
            return Verdict(_B, f"HTTP {status} with a challenge page ({who})", status=status)
        return Verdict(
            _T,
            f"HTTP {status}" + (f", retry after {after:.0f} s" if after is not None else ""),
            after,
            status,
        )
    if kind is _B and (who := challenge(headers, body)):
        return Verdict(_B, f"HTTP {status} with a challenge page ({who})", status=status)
    return Verdict(kind, f"HTTP {status}", status=status)


# -- libcurl errors --------------------------------------------------------------------------------

# CURLcode → class and reason. Any other code is transient, because it has no meaning for the page.
CURL: dict[int, tuple[ErrorClass, str]] = {
    1: (_P, "the answer is not HTTP"),
    3: (_P, "not a URL libcurl takes"),
    4: (_O, "libcurl was built without something we need"),
    5: (_X, "the proxy's name did not resolve"),
    6: (_X, "the name did not resolve"),
    7: (_X, "no connection"),
    8: (_X, "the answer is not valid HTTP"),
    16: (_X, "HTTP/2 framing error"),
    18: (_X, "the body ended early"),
    27: (_O, "out of memory"),
    28: (_X, "timed out"),
    35: (_X, "the TLS handshake failed"),
    43: (_O, "libcurl was called wrongly"),
    47: (_P, "too many redirects"),
    51: (_P, "bad TLS certificate"),
    52: (_X, "the server closed without an answer"),
    53: (_O, "no TLS engine"),
    55: (_X, "the connection broke while sending"),
    56: (_X, "the connection broke, or the answer did, while receiving"),
    58: (_O, "our own TLS certificate"),
    59: (_P, "no common TLS cipher"),
    60: (_P, "bad TLS certificate"),
    61: (_X, "broken content encoding"),
    63: (_P, "the body is too large"),
    77: (_O, "our list of certificate authorities cannot be read"),
    83: (_P, "bad TLS certificate issuer"),
    90: (_P, "the TLS key is not the pinned one"),
    91: (_P, "bad TLS certificate status"),
    92: (_X, "HTTP/2 stream error"),
    96: (_X, "QUIC connection error"),
    97: (_X, "the proxy did not connect"),
    100: (_P, "the answer's headers are too large"),
}
# An interrupted handshake may work next time. A handshake in which both sides disagree will not.
_DISAGREES = (
    "wrong version",
    "unsupported",
    "no protocols available",
    "handshake failure",
    "alert",
    "unrecognized name",
    "key too small",
    "packet length",
)


def transport(code: int, message: str = "") -> Verdict:
    """Return the verdict on a CURLcode and libcurl's message."""
    kind, reason = CURL.get(code, (_X, f"libcurl error {code}"))
    if code == 35 and any(mark in message.lower() for mark in _DISAGREES):
        kind = _P
    return Verdict(kind, reason)


# -- exceeded limits -------------------------------------------------------------------------------


class Breach(enum.Enum):
    """A limit of Penstock that ended the exchange. The caller of `breach` adds details."""

    HEADERS = (_P, "the answer's headers are larger than the limit")
    CUT = (_X, "the answer ended inside its headers")
    BODY = (_P, "the body is larger than the limit")
    DECODED = (_P, "the decoded body is larger than the limit")
    CODINGS = (_P, "too many nested content codings")
    CODING = (_X, "the body is not what its content-encoding says")
    CONNECT = (_X, "no connection in time")
    FIRST_BYTE = (_X, "no first byte in time")
    TOTAL = (_X, "not finished in time")
    RATE = (_X, "slower than the minimum rate")
    BAD_URL = (_P, "not a URL we fetch")
    BAD_REQUEST = (_P, "not a request we send")
    FORBIDDEN = (_P, "forbidden address")
    ROBOTS = (_P, "robots.txt disallows it")
    ROBOTS_LATER = (_X, "robots.txt cannot be read now, so nothing may be fetched")
    REDIRECTS = (_P, "too many redirects")
    LOOP = (_P, "a redirect leads back to itself")
    DOWNGRADE = (_P, "a redirect leads from https to http")
    NOWHERE = (_P, "a redirect leads to nothing we fetch")
    HELD = (_T, "the host is to be left alone for now")
    PROXY = (_X, "the proxy did not let us through")
    BAD_PROXY = (_O, "not a proxy we can use")
    SOCKET = (_O, "this machine gave us no socket")
    CLOSED = (_O, "the fetcher is closed")

    @property
    def kind(self) -> ErrorClass:
        return self.value[0]

    @property
    def sentence(self) -> str:
        return self.value[1]


_OVERSIZED = (
    *(b.sentence for b in (Breach.HEADERS, Breach.BODY, Breach.DECODED, Breach.CODINGS)),
    CURL[63][1],
    CURL[100][1],
)


def oversized(failure: Failure) -> bool:
    """Return True if there was a response, but it was too large.

    That has no meaning for other pages of the server.
    """
    return failure.reason.startswith(_OVERSIZED)


def breach(
    limit: Breach, detail: str = "", *, after: float | None = None, status: int | None = None
) -> Failure:
    return Failure(
        limit.kind,
        f"{limit.sentence}: {detail}" if detail else limit.sentence,
        after=after,
        status=status,
    )
