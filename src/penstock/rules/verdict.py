"""Outcome table: the error class of responses, transport errors and exceeded limits.

See `retry` for retries.
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock.model import ErrorClass, Failure, Reason
from penstock.rules.pace import parse_retry_after
from penstock.rules.reasons import LIBCURL, sentence

_T, _X, _B, _P, _O = (
    ErrorClass.THROTTLED,
    ErrorClass.TRANSIENT,
    ErrorClass.BLOCKED,
    ErrorClass.PERMANENT,
    ErrorClass.OURS,
)


# -- responses -------------------------------------------------------------------------------------

# Exceptions to the general rule: 2xx and 304 are good, other 4xx permanent, other 5xx transient.
STATUS: dict[int, ErrorClass] = {
    404: ErrorClass.NOT_FOUND,
    410: ErrorClass.NOT_FOUND,
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
    marks, searched = (TITLES, body[:_TOP]) if len(body) > _SHORT else (CHALLENGES, body)
    for mark, who in marks:
        if mark in searched:
            return who
    if len(body) <= SMALL:
        low = body.lower()
        for mark in SMALL_MARKS:
            if mark in low:
                return f"the page says “{mark.decode()}”"
    return ""


def judge(
    status: int,
    headers: Mapping[str, str],
    body: bytes,
    *,
    now: float,
    method: str = "GET",
    conditional: bool = True,
    soft_404: bool = False,
) -> Failure | None:
    """Return the failure of a response, or None if the response is good.

    `headers` are in lower case. `now` is for a Retry-After with a date. `conditional` is True if
    the request allowed a 304.
    """
    if 200 <= status < 300:
        if "html" not in headers.get("content-type", "").lower() or method == "HEAD":
            return None
        if len(body) < SMALL and not body.strip():
            return _response(_B, Reason.EMPTY_BODY, status) if status == 200 else None
        if who := challenge(headers, body):
            return _response(_B, Reason.CHALLENGE, status, who)
        if soft_404 and len(body) <= SMALL:
            low = body.lower()
            if any(mark in low for mark in SOFT_404):
                return _response(_B, Reason.SOFT_404, status)
        return None
    if status == 304:
        return None if conditional else _response(_X, Reason.UNASKED_304, status)
    if status < 200:
        return _response(_X, Reason.NOT_FINAL, status)
    if status < 400:
        return _response(_P, Reason.NO_LOCATION, status)
    kind = STATUS.get(status) or (_P if status < 500 else _X)
    value = headers.get("retry-after") if kind is _T else None
    after = parse_retry_after(value, now) if value else None
    if after is not None:
        return _response(_T, Reason.RETRY_AFTER, status, after, after=after)
    # Old challenge pages have status 503. With a Retry-After, the server is really throttling.
    if kind in (_T, _B) and (who := challenge(headers, body)):
        return _response(_B, Reason.CHALLENGE_ERROR, status, who)
    return _response(kind, Reason.HTTP, status)


def _response(
    kind: ErrorClass, code: Reason, status: int, *facts: object, after: float | None = None
) -> Failure:
    return Failure(kind, sentence(code, status, *facts), code=code, after=after, status=status)


# -- libcurl errors --------------------------------------------------------------------------------

# CURLcode → class. Any other code is transient, because it has no meaning for the page.
CURL: dict[int, ErrorClass] = {
    **dict.fromkeys((1, 3, 47, 51, 59, 60, 63, 83, 90, 91, 100), _P),
    **dict.fromkeys((5, 6, 7, 8, 16, 18, 28, 35, 52, 55, 56, 61, 92, 96, 97), _X),
    **dict.fromkeys((4, 27, 43, 53, 58, 77), _O),
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


def transport(code: int, message: str = "") -> Failure:
    """Return the failure of a transfer with this CURLcode and libcurl's message."""
    kind = CURL.get(code, _X)
    if code == 35 and any(mark in message.lower() for mark in _DISAGREES):
        kind = _P
    reason, text = LIBCURL.get(code) or (Reason.TRANSFER, sentence(Reason.TRANSFER, code))
    return Failure(kind, text, code=reason, detail=message)


# -- exceeded limits -------------------------------------------------------------------------------

# Limits and rules of Penstock that end an exchange, with the class of the failure.
LIMITS: dict[Reason, ErrorClass] = {
    Reason.HEADERS: _P,
    Reason.CUT: _X,
    Reason.BODY: _P,
    Reason.DECODED: _P,
    Reason.CODINGS: _P,
    Reason.CODING: _X,
    Reason.CONNECT: _X,
    Reason.FIRST_BYTE: _X,
    Reason.TOTAL: _X,
    Reason.RATE: _X,
    Reason.SLOW: _X,
    Reason.BAD_URL: _P,
    Reason.BAD_REQUEST: _P,
    Reason.FORBIDDEN: _P,
    Reason.ROBOTS: _P,
    Reason.ROBOTS_LATER: _X,
    Reason.REDIRECTS: _P,
    Reason.LOOP: _P,
    Reason.DOWNGRADE: _P,
    Reason.NOWHERE: _P,
    Reason.HELD: _T,
    Reason.PROXY: _X,
    Reason.BAD_PROXY: _O,
    Reason.SOCKET: _O,
    Reason.CLOSED: _O,
}
_TOO_LARGE = (Reason.HEADERS, Reason.BODY, Reason.DECODED, Reason.CODINGS)


def oversized(failure: Failure) -> bool:
    """Return True if there was a response, but it was too large.

    That has no meaning for other pages of the server.
    """
    return failure.code in _TOO_LARGE


def breach(
    limit: Reason, detail: str = "", *, after: float | None = None, status: int | None = None
) -> Failure:
    """Return the failure of an exchange that a limit ended. The limit is one of LIMITS."""
    return Failure(
        LIMITS[limit], sentence(limit, detail=detail), code=limit, after=after, status=status
    )
