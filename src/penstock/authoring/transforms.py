"""Transforms that a TOML field may name with `as`. The list is closed and has no user code.

A transform uses only the value and its page.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any, TypeAlias

from penstock.authoring.page import Page
from penstock.rules.identity import BadUrl

Transform: TypeAlias = Callable[[Any, Page], Any]

# Digits with or without groups: "1,299.00", "1.299,00", "1 299,00", "1'299", ".5". A minus may be
# the typographic one.
_NUMBER = re.compile(r"[-+\u2212]?\s?(?:\d[\d.,'\u2019\u00a0\u202f\u2009 ]*\d|\d|[.,]\d+)")
_SPACES = re.compile(r"['\u2019\u00a0\u202f\u2009\s]")
_GROUPS = re.compile(r"\d{1,3}(?: \d{3})+(?![\d])")
_TRUE, _FALSE = (
    frozenset({"true", "yes", "y", "on", "1"}),
    frozenset({"false", "no", "n", "off", "0"}),
)


class Unreadable(ValueError):
    """A value was found, but does not fit `as`. The message quotes the value."""


def _unreadable(value: Any, kind: str) -> Unreadable:
    return Unreadable(f"{str(value)[:80]!r} is no {kind}")


def _text(value: Any, page: Page) -> Any:
    return str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value


def _strip(value: Any, page: Page) -> Any:
    return value.strip() if isinstance(value, str) else value  # numbers of JSON stay numbers


def _decimal(value: Any, page: Page) -> Decimal | None:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return Decimal(str(value))
    if not isinstance(value, str):
        raise _unreadable(value, "decimal")
    if not value.strip():
        return None
    numbers: list[str] = _NUMBER.findall(value[:1000])
    if len(numbers) != 1:  # for "2 for 10.00", a regex must choose
        raise _unreadable(
            value, "decimal (`regex` picks one of several numbers)" if numbers else "decimal"
        )
    number = numbers[0].replace("\u2212", "-")
    sign, digits = ("-" if number.startswith("-") else ""), number.lstrip("+-").strip()
    if " " in digits and not _GROUPS.match(digits):
        raise _unreadable(value, "decimal (`regex` picks one of several numbers)")
    digits = _SPACES.sub("", digits)
    dot, comma = digits.rfind("."), digits.rfind(",")
    if dot >= 0 and comma >= 0:  # the last of the two is the decimal point
        digits = (
            digits.replace(",", "") if dot > comma else digits.replace(".", "").replace(",", ".")
        )
    elif comma >= 0:  # a single comma before exactly three digits is a group separator: 1,299
        grouped = digits.count(",") > 1 or (len(digits) - comma == 4 and comma > 0)
        digits = digits.replace(",", "" if grouped else ".")
    elif digits.count(".") > 1:
        digits = digits.replace(".", "")
    try:
        return Decimal(sign + digits)
    except InvalidOperation:
        raise _unreadable(value, "decimal") from None


def _int(value: Any, page: Page) -> int | None:
    number = _decimal(value, page)
    if number is None:
        return None
    if number != number.to_integral_value():
        raise _unreadable(value, "whole number")
    return int(number)


def _float(value: Any, page: Page) -> float | None:
    number = _decimal(value, page)
    return None if number is None else float(number)


def _bool(value: Any, page: Page) -> bool | None:
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if not text:
        return None
    if text not in _TRUE and text not in _FALSE:
        raise _unreadable(value, "true or false")
    return text in _TRUE


def _url(value: Any, page: Page) -> str | None:
    text = str(value).strip()
    try:
        return page.urljoin(text) if text else None
    except BadUrl:
        raise _unreadable(value, "URL") from None


def _datetime(value: Any, page: Page) -> datetime.datetime | None:
    text = str(value).strip()
    try:
        return datetime.datetime.fromisoformat(text) if text else None
    except ValueError:
        raise _unreadable(value, "ISO date and time") from None


def _date(value: Any, page: Page) -> datetime.date | None:
    moment = _datetime(value, page)
    return None if moment is None else moment.date()


TRANSFORMS: Mapping[str, Transform] = {
    "strip": _strip,
    "text": _text,
    "decimal": _decimal,
    "int": _int,
    "float": _float,
    "bool": _bool,
    "url": _url,
    "date": _date,
    "datetime": _datetime,
    "html": _text,
}
