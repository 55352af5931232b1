"""Kinds of option values: how "30s", "64MiB" or "30/m" is read, described and written.

See `config.schema` for the options.
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import msgspec

from penstock.rules.masking import mask
from penstock.rules.proxies import canonical_list, masked_list, parse_members

_DURATION = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_SIZE = {
    "B": 1,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_DECIMAL = r"[0-9]+(?:\.[0-9]+)?"
_DURATION_PART = re.compile(rf"({_DECIMAL})\s*(ms|s|m|h|d|w)")
_HOST_NAME = re.compile(
    r"(?=.{1,253}$)[a-z0-9_]([a-z0-9_-]{0,62})(\.[a-z0-9_][a-z0-9_-]{0,62})*\.?", re.I
)
_MAX_NUMBER = 10**15


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """How values of one kind are read, described and written.

    `read` converts a TOML value or a text, and raises ValueError. `write` is its inverse.
    `expected` completes the message "expected …".
    """

    name: str  # for the reference: "duration", "size", …
    expected: str
    read: Callable[[object], Any]
    write: Callable[[Any], str] = str
    quoted: bool = True  # a string in TOML
    masked: Callable[[Any], str] | None = None  # writes a secret for output, or None to hide it


# -- numbers, times, sizes -------------------------------------------------------------------------


def _real(value: object) -> float:
    if isinstance(value, str):
        if not re.fullmatch(_DECIMAL, value.strip()):
            raise ValueError(value)
        value = float(value)
    # The last test is also true for nan and inf.
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not abs(value) < _MAX_NUMBER
    ):
        raise ValueError(value)
    return float(value)


def _written(value: float) -> str:
    text = f"{value:g}"
    # Values are read without an exponent, so they are written without one.
    return format(Decimal(repr(value)), "f") if "e" in text else text


def duration(value: object) -> float:
    """Return the seconds of "500ms", "30s", "1h30m" or "2d". A bare number is seconds."""
    text = value.strip() if isinstance(value, str) else ""
    if text and text[-1].isalpha():
        parts = _DURATION_PART.findall(text)
        if _DURATION_PART.sub("", text).strip():
            raise ValueError(value)
        return _real(sum(float(number) * _DURATION[unit] for number, unit in parts))
    return _real(value)


def write_duration(seconds: float) -> str:
    for unit in ("w", "d", "h", "m", "s"):
        if seconds and unit != "w" and seconds % _DURATION[unit] == 0:
            return f"{round(seconds / _DURATION[unit])}{unit}"
    return (
        f"{round(seconds * 1000)}ms"
        if 0 < seconds < 1 and round(seconds * 1000, 6).is_integer()
        else f"{_written(seconds)}s"
    )


def size(value: object) -> int:
    """Return the bytes of "64MiB" or "10 GB". A bare number is bytes."""
    if isinstance(value, str) and (
        match := re.fullmatch(rf"\s*({_DECIMAL})\s*([kKMGT]?i?B)\s*", value)
    ):
        if match[2] not in _SIZE:
            raise ValueError(value)
        return int(_real(float(match[1]) * _SIZE[match[2]]))
    number = _real(value)
    if not number.is_integer():
        raise ValueError(value)
    return int(number)


def write_size(count: int) -> str:
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if count and count % _SIZE[unit] == 0:
            return f"{count // _SIZE[unit]}{unit}"
    return f"{count}B"


def rate(value: object) -> float:
    """Return the requests a second of 2, 0.5, "30/m" or "unlimited" (infinity)."""
    if isinstance(value, str):
        if value.strip() == "unlimited":
            return math.inf
        number, slash, unit = value.partition("/")
        if slash and (unit := unit.strip()) not in ("s", "m", "h", "d"):
            raise ValueError(value)
        found = _real(number) / (_DURATION[unit] if slash else 1)
    else:
        found = _real(value)
    if not found > 0:
        raise ValueError(value)
    return found


def write_rate(value: float) -> str:
    if math.isinf(value):
        return "unlimited"
    for unit in ("s", "m", "h", "d"):
        count = value * _DURATION[unit]
        if math.isclose(count, round(count)) and count >= 1:
            return f"{round(count)}" if unit == "s" else f"{round(count)}/{unit}"
    return _written(value)


def _checked(
    read: Callable[[object], Any], test: Callable[[Any], object]
) -> Callable[[object], Any]:
    """Return a function that reads a value, and raises ValueError if the value fails the test."""

    def checked(value: object) -> Any:
        found = read(value)
        if not test(found):
            raise ValueError(value)
        return found

    return checked


def _bounded(read: Callable[[object], Any], low: float, high: float) -> Callable[[object], Any]:
    return _checked(read, lambda found: low <= found <= high)


def durations(low: float = 0, high: float = 10 * 365 * 86400.0) -> Kind:
    at_least = f" of at least {write_duration(low)}" if low else ""
    at_most = f" and at most {write_duration(high)}" if high < 365 * 86400 else ""
    return Kind(
        name="duration",
        expected=f"a duration{at_least}{at_most} (500ms, 30s, 5m, 1h, 2d)",
        read=_bounded(duration, low, high),
        write=write_duration,
    )


def _keep(value: object) -> float | None:
    return None if value == "forever" else float(_bounded(duration, 1, 100 * 365 * 86400.0)(value))


KEEP = Kind(
    name="duration or forever",
    expected='a duration (12h, 30d) or "forever"',
    read=_keep,
    write=lambda value: "forever" if value is None else write_duration(value),
)
RATE = Kind(
    name="rate",
    expected='a number a second, a number a minute such as "30/m", or "unlimited"',
    read=rate,
    write=write_rate,
)


def sizes(low: int = 1, high: int = 2**60) -> Kind:
    limits, examples = f"of at least {write_size(low)}", "512KiB, 64MiB, 10GiB"
    if high < 2**60:
        limits, examples = (
            f"{limits} and at most {write_size(high)}" if low else f"of at most {write_size(high)}",
            write_size(high) if low else f"0, {write_size(high)}",
        )
    return Kind(
        name="size",
        expected=f"a size {limits} ({examples})",
        read=_bounded(size, low, high),
        write=write_size,
    )


def _integer(value: object) -> int:
    if isinstance(value, str) and re.fullmatch(r"[0-9]+(_[0-9]+)*", value.strip()):
        value = int(value.strip()[:20].replace("_", ""))
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(value)
    return value


def counts(low: int = 1, high: int = 2**53) -> Kind:
    at_most = f" and at most {high}" if high < 2**53 else ""
    expected = (
        f"a whole number above {low - 1}{at_most}" if low else f"a whole number, 0 or more{at_most}"
    )
    return Kind(
        name="whole number", expected=expected, read=_bounded(_integer, low, high), quoted=False
    )


SHARE = Kind(
    name="share",
    expected="a share between 0 and 1",
    read=_bounded(_real, 0, 1),
    write=_written,
    quoted=False,
)


# -- names and texts -------------------------------------------------------------------------------


def _flag(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and (word := value.strip().lower()) in (
        "true",
        "yes",
        "on",
        "1",
        "false",
        "no",
        "off",
        "0",
    ):
        return word in ("true", "yes", "on", "1")
    raise ValueError(value)


FLAG = Kind(
    name="true or false",
    expected="true or false",
    read=_flag,
    write=lambda value: str(value).lower(),
    quoted=False,
)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(value)
    return value


def choices(*words: str) -> Kind:
    return Kind(
        name=" or ".join(words),
        expected=" or ".join(f'"{word}"' for word in words),
        read=_checked(lambda value: _text(value).strip(), words.__contains__),
    )


def texts(pattern: str, expected: str) -> Kind:
    read = _checked(_text, re.compile(pattern).fullmatch)
    return Kind(name="text", expected=expected, read=read)


def _items(value: object) -> list[object]:
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    if isinstance(value, list):
        return value
    raise ValueError(value)


_word = texts(r"\*|[^\s,*]{1,200}", "").read
_parameter = texts(r"(?=-?[!-~]{1,100}\Z)-?[^*&=#,\s-][^*&=#,\s]*\*?", "").read


def words(value: object) -> tuple[str, ...]:
    return tuple(_word(item) for item in _items(value))


def _target(value: object) -> str:
    """Check ADDRESS:PORT, NETWORK/BITS:PORT, [IPV6]:PORT or NAME:PORT. `*` is any port.

    The guard parses these texts into rules.
    """
    match = (
        re.fullmatch(r"(?:\[([^\]%]+)\]|([^:\[\]]+)):([0-9]{1,5}|\*)", value.strip())
        if isinstance(value, str)
        else None
    )
    if not match or (match[3] != "*" and not 1 <= int(match[3]) <= 65535):
        raise ValueError(value)
    try:
        ipaddress.IPv6Network(match[1]) if match[1] else ipaddress.IPv4Network(match[2])
    except ValueError:
        # A name whose last label is a number is another form of an address, and is refused.
        if (
            match[1]
            or not _HOST_NAME.fullmatch(match[2])
            or re.fullmatch(r"[0-9]+|0x[0-9a-f]*", match[2].rstrip(".").rpartition(".")[2], re.I)
        ):
            raise ValueError(value) from None
    return match[0]


TARGETS = Kind(
    name="list of targets",
    expected="addresses with their ports, separated by commas "
    '("127.0.0.1:8000,[::1]:8000,10.1.0.0/16:443,shop.test:*")',
    read=lambda value: tuple(_target(item) for item in _items(value)),
    write=",".join,
)
PARAMETERS = Kind(
    name="list of parameters",
    expected="names of query parameters, separated by commas, with * at the end for a prefix "
    'and - at the start for a parameter to keep ("ref,aff_*,-gclid")',
    read=lambda value: tuple(_parameter(item) for item in _items(value)),
    write=",".join,
)
PORTS = Kind(
    name="list of ports",
    expected='port numbers, separated by commas ("80,443")',
    read=lambda value: tuple(
        _bounded(_integer, 1, 65535)(item)
        for item in ([value] if isinstance(value, int) else _items(value))
    ),
    write=lambda value: ",".join(map(str, value)),
)


# -- addresses, paths and proxies ------------------------------------------------------------------


DSN = Kind(
    name="URL",
    expected='a URL such as "sqlite:./penstock.db" or "amqp://user@host/"',
    read=texts(r"[a-z][a-z0-9+.-]*:[^\x00-\x1f\x7f]+", "").read,
    masked=mask,
)
PATH = texts(r"[^\x00]+", 'a path such as "./data"')
NAME = texts(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", "a name of letters, digits, . _ -")
LINE = texts(r"[\x20-\x7e]+", "printable ASCII")


def _proxies(value: object) -> tuple[str, ...]:
    """Read a text with commas or line breaks (a file has one proxy per line), or a list."""
    lines = (
        [part.strip() for part in re.split(r"[,\n]", value)] if isinstance(value, str) else value
    )
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        raise ValueError(value)
    parse_members(lines)
    return tuple(line for line in lines if line and not line.startswith("#"))


PROXIES = Kind(
    name="list of proxies",
    expected="URLs of proxies with their ports, separated by commas "
    '("http://user:password@proxy.example:8080,socks5://10.0.0.1:1080 3")',
    read=_proxies,
    write=",".join,
    masked=lambda value: ",".join(member.label for member in parse_members(value)),
)
PROXY_LIST = Kind(
    name="URL",
    expected="an http or https URL without user and password",
    read=canonical_list,
    masked=masked_list,
)
REST_URL = Kind(
    name="URL",
    expected='an http or https URL such as "http://127.0.0.1:8083"',
    read=texts(r"https?://[^\x00-\x20\x7f]+", "").read,
    masked=mask,
)
NAMES = Kind(
    name="list of names",
    expected='names, separated by commas ("de,at")',
    read=words,
    write=",".join,
)
WEIGHT = Kind(
    name="number",
    expected="a number above 0",
    read=_checked(_real, lambda found: 0 < found <= 1e6),
    write=lambda value: f"{value:g}",
    quoted=False,
)


def _address(value: object) -> str:
    text = value.strip() if isinstance(value, str) else ""
    return text if text == "localhost" else str(ipaddress.ip_address(text.strip("[]")))


ADDRESS = Kind(
    name="address",
    expected='an IP address of this machine ("127.0.0.1", "0.0.0.0", "::1") or "localhost"',
    read=_address,
)
NETWORKS = Kind(
    name="list of networks",
    expected='IP addresses or networks, separated by commas ("10.1.0.5,10.2.0.0/16,fd00::/8")',
    read=lambda value: tuple(str(ipaddress.ip_network(str(item))) for item in _items(value)),
    write=",".join,
)
