"""Format of counts, sizes, times and ids in messages and tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime


def count(n: int) -> str:
    return f"{n:,}"


def plural(n: int, one: str, many: str = "") -> str:
    return f"{n:,} {one if n == 1 else many or one + 's'}"


def size(n: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024 or unit == "GiB":
            return f"{n:.0f} {unit}" if unit == "B" or n >= 100 else f"{n:.1f} {unit}"
        n /= 1024
    return ""


def lasting(seconds: float) -> str:
    """Return a duration as text, such as "3 min 20 s"."""
    if seconds < 0:
        return "-" + lasting(-seconds)
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    for length, unit, below, small in ((3600, "min", 60, "s"), (86400, "h", 3600, "min")):
        if seconds < length:
            amount, rest = divmod(seconds, below)
            part = rest / (below / 60) if unit == "h" else rest
            return f"{amount:.0f} {unit}" + (
                f" {part:.0f} {small}" if round(part) and round(part) < 60 and amount < 10 else ""
            )
    return f"{seconds / 86400:.1f} d"


def iso(at: float | None) -> str | None:
    """Return the time in RFC 3339 format and UTC, for JSON."""
    return (
        None
        if at is None
        else datetime.fromtimestamp(at, UTC)
        .isoformat(timespec="milliseconds")
        .replace("+00:00", "Z")
    )


def moment(at: float | None, now: float | None = None) -> str:
    """Return the local time as text. The date is included if it is not today."""
    if not at:
        return "–"
    local = datetime.fromtimestamp(at).astimezone()
    today = datetime.fromtimestamp(now).astimezone() if now else datetime.now().astimezone()
    return local.strftime(
        "%H:%M:%S.%f" if local.date() == today.date() else "%Y-%m-%d %H:%M:%S.%f"
    )[:-3]


def short(id_: str, length: int = 12) -> str:
    """Return the start of an id. Every command accepts a unique prefix."""
    return id_[:length]


def joined(items: Iterable[str], limit: int = 5) -> str:
    listed: Sequence[str] = list(items)
    return ", ".join(listed[:limit]) + (
        f" and {len(listed) - limit} more" if len(listed) > limit else ""
    )
