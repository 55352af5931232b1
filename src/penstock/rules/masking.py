"""Masks passwords, tokens and cookies in URLs, texts and headers, before output and storage."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from urllib.parse import unquote

MASK = "***"
SHORTEST = 4  # characters. A shorter part of a password is not searched for in other texts.

_FILES = ("sqlite", "file", "jsonl", "csv", "memory")  # schemes of URLs without a user
_SECRET_PARAMETER = re.compile(r"(?i)pass|pwd|secret|token|key|credential|auth|signature|^sig$|jwt")
_parameters = re.compile(r"([?&])([^=&?]*)=([^&]*)").sub
# `name=value` and `name="a value"`. Each match starts where a name starts, so that the search is
# linear.
_assignments = re.compile(
    r"(?<![^\s&;?,(])([^\s=&;?,(]+)(\s*=\s*)('[^']*'|\"[^\"]*\"|[^\s&;,)]*)"
).sub
_URL = re.compile(r"[^\s\"'<>`]+")
_HOST = re.compile(r"(?:\[[^\]]*\]|[^:\[\]]*)(?::[0-9]*)?")


# -- URLs ------------------------------------------------------------------------------------------


def mask(url: str) -> str:
    """Return the URL without its passwords, for output, logs and storage. The URL may be malformed.

    In doubt a part is masked.
    """
    scheme, colon, rest = url.partition(":")
    slashes = rest[: len(rest) - len(rest.lstrip("/"))]
    rest = rest[len(slashes) :]
    if scheme not in _FILES:
        rest = _mask_user(scheme, slashes, rest)
    rest = _parameters(_mask_parameter, rest)
    if "://" not in url:
        rest = _assignments(_mask_assignment, rest)
    return scheme + colon + slashes + rest


def _mask_user(scheme: str, slashes: str, rest: str) -> str:
    at = rest.rfind("@")  # the last "@", because passwords may contain an unescaped one
    if at >= 0:
        user, separator, _ = rest[:at].partition(":")
        if separator:
            return f"{user}:{MASK}{rest[at:]}"
        # `https://TOKEN@host`, and `user:password@host` without a scheme.
        if (scheme in ("http", "https") and not re.search(r"[/?#]", user)) or not (
            slashes or "=" in user
        ):
            return MASK + rest[at:]
        return rest
    if len(slashes) >= 2:
        # `redis://:password` and `kafka://user:password` have no host.
        place = re.split(r"[/?#]", rest, maxsplit=1)[0]
        if not are_hosts(place):
            user, separator, _ = rest.partition(":")
            return f"{user}{separator}{MASK}"
    return rest


def are_hosts(text: str) -> bool:
    """Return True if the text is a list of hosts, each with or without a port."""
    return all(_HOST.fullmatch(host) for host in text.split(","))


def _mask_parameter(m: re.Match[str]) -> str:
    value = m[3].lower()
    # The value may be a URL with a password: `endpoint=http%3A%2F%2Fuser%3Apassword%40host`.
    is_secret = _SECRET_PARAMETER.search(unquote(m[2])) or (
        "%40" in value and (":" in value or "%3a" in value)
    )
    return f"{m[1]}{m[2]}={MASK}" if is_secret else m[0]


def _mask_assignment(m: re.Match[str]) -> str:
    return f"{m[1]}{m[2]}{MASK}" if _SECRET_PARAMETER.search(m[1]) else m[0]


# -- texts -----------------------------------------------------------------------------------------


def mask_text(text: str) -> str:
    """Return the text with the passwords of its URLs masked. In doubt a part is masked.

    For the messages of libraries, which may quote a URL.
    """
    if "://" not in text:
        return text
    return _URL.sub(_mask_url_in_text, text)


def _mask_url_in_text(m: re.Match[str]) -> str:
    before, mark, after = m[0].partition("://")
    if not mark:
        return m[0]
    start = len(before)
    while start and (before[start - 1].isalnum() or before[start - 1] in "+.-"):
        start -= 1
    return before[:start] + mask(before[start:] + mark + after)


def hide(text: str, passwords: set[str]) -> str:
    """Return the text without these passwords. Parts of longer words stay."""
    for password in sorted((p for p in passwords if p in text), key=len, reverse=True):
        text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(password)}(?![A-Za-z0-9])", MASK, text)
    return text


def passwords_in(url: str) -> set[str]:
    """Return the passwords of a URL, and their parts. The URL may be malformed.

    A library may quote a part of a password, for example as a port that is not a number. Texts
    that are also the user, the host or the path are not returned, because they are shown anyway.
    """
    rest = re.sub(r"^[A-Za-z][A-Za-z0-9+.-]*:/+", "", url)
    shown, found = rest, set[str]()
    at = rest.rfind("@")
    if at >= 0:
        # The user and the password may belong to a URL in the query.
        before, mark, login = rest[:at].rpartition("://")
        user, colon, password = login.partition(":")
        if colon:
            found.add(password)
            shown = before + mark + user + rest[at:]
        elif not re.search(r"[/?#=\s]", user):
            found.add(user)
            shown = rest[at:]
    elif "://" in url and ":" in rest and _mask_user("", "//", rest) != rest:
        shown, _, password = rest.partition(":")
        found.add(password)
    for m in re.finditer(r"([^=&?;\s]+)\s*=\s*('[^']*'|\"[^\"]*\"|[^&\s]*)", shown):
        if _SECRET_PARAMETER.search(unquote(m[1])):
            found.add(m[2].strip("'\""))
            shown = shown.replace(m[2], "")
        elif "%40" in m[2]:
            found |= passwords_in(unquote(m[2]))
    found |= {unquote(password) for password in found}
    found |= {part for password in found for part in re.split(r"[/?#@:;&=\s]", password)}
    words = {word.lower() for word in re.split(r"[^A-Za-z0-9_.-]+", shown)} | {"penstock"}
    return {p for p in found if len(p) >= SHORTEST and p.lower() not in words}


# -- headers ---------------------------------------------------------------------------------------

# "author" and "authority" are not secrets.
_SECRET_HEADER = re.compile(
    r"(?i)cookie|auth(?!or(?!i[sz]))|token|secret|session|csrf|xsrf|(?:api|access)[-_]?key|jwt"
    r"|signature|password|credential"
)
# A challenge of a server names the wanted login. It contains no credentials.
_CHALLENGES = ("www-authenticate", "proxy-authenticate")
_WITH_URLS = ("location", "content-location", "refresh", "link")
# Attributes of a cookie that have no secret.
_OPEN = ("path", "domain", "expires", "max-age", "secure", "httponly", "samesite", "partitioned")
_authorities = re.compile(r"//[^/?#\s\"'<>]*@").sub
_MAX_CACHED_NAME = 64  # characters


def mask_headers(headers: dict[str, str]) -> dict[str, str]:
    """Return the headers of a request or response with their secrets masked, for storage.

    Values of cookies, credentials and tokens, and users in URLs. The names stay. URLs keep their
    query, because a link may need it.
    """
    found = {}
    for name, value in headers.items():
        masker = _masker(name) if len(name) <= _MAX_CACHED_NAME else _find_masker(name)
        if masker is not None:
            found[name] = masker(value)
    return {**headers, **found} if found else headers


def mask_headers_to_show(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers for output. Tokens in the query of a URL are masked too."""
    return {
        name: mask_text(value) if name.lower() in _WITH_URLS else value
        for name, value in mask_headers(dict(headers)).items()
    }


def is_secret_header(name: str) -> bool:
    return _SECRET_HEADER.search(name) is not None and name.lower() not in _CHALLENGES


def _find_masker(name: str) -> Callable[[str], str] | None:
    name = name.lower()
    if name == "set-cookie":
        return _mask_cookies
    if name in _WITH_URLS:
        return _mask_authorities
    return _mask_all if is_secret_header(name) else None


_masker = lru_cache(maxsize=1024)(_find_masker)


def _mask_all(value: str) -> str:
    return MASK


def _mask_authorities(value: str) -> str:
    return _authorities(f"//{MASK}@", value) if "@" in value else value


def _mask_cookies(value: str) -> str:
    """Mask the values of cookies, one on each line. Names and known attributes stay."""
    return "\n".join(map(_mask_cookie, value.split("\n")))


def _mask_cookie(line: str) -> str:
    pair, *attributes = line.split(";")
    name, equals, _ = pair.partition("=")
    kept = (a for a in attributes if a.partition("=")[0].strip().lower() in _OPEN)
    return ";".join((f"{name}={MASK}" if equals else MASK, *kept))
