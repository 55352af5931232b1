"""Free disk space: samples that workers write, and a forecast from them."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import msgspec

from penstock.errors import Unreachable
from penstock.operate.figures import lasting, size
from penstock.operate.findings import Finding
from penstock.private_files import open_own

LOW, VERY_LOW = 1 << 30, 64 << 20  # bytes of free disk space: below them warn, and fail
SAMPLES = "disk.json"  # file in the state directory
RETENTION = 3600.0  # seconds for which samples are stored
EVERY = 60.0  # seconds between two samples
# Seconds that samples must cover. A shorter time is not enough to forecast a day.
SPAN = 600.0
DAY = 86400.0


class Sample(msgspec.Struct, frozen=True):
    at: float
    device: int
    free: int  # bytes


def record_sample(state: Path, now: float) -> None:
    """Add a sample of the disk of the state directory. Does nothing if the last one is recent.

    Several workers may write the file. A lost sample is harmless.
    """
    samples = read_samples(state)
    if any(now - EVERY / 2 < s.at <= now for s in samples):
        return
    recent = [s for s in samples if now - RETENTION <= s.at <= now]
    draft = state / f".{SAMPLES}.{os.getpid()}"
    with contextlib.suppress(OSError, Unreachable):  # a full disk needs no forecast
        new = Sample(now, os.stat(state).st_dev, shutil.disk_usage(state).free)
        with open(open_own(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
            file.write(msgspec.json.encode([*recent, new]))
        draft.replace(state / SAMPLES)


def read_samples(state: Path) -> list[Sample]:
    try:
        return msgspec.json.decode((state / SAMPLES).read_bytes(), type=list[Sample])
    except (OSError, msgspec.MsgspecError):
        return []


def seconds_until_full(
    samples: Iterable[Sample], device: int, free: int, now: float
) -> float | None:
    """Return when the disk is full if it fills as fast as in the last hour.

    Return None if it does not fill, or if the samples cover less than `SPAN`.
    """
    recent = [s for s in samples if s.device == device and now - RETENTION <= s.at <= now - SPAN]
    if not recent:
        return None
    first = min(recent, key=lambda s: s.at)
    used = first.free - free
    return free * (now - first.at) / used if used > 0 else None


def check_disk(state: Path, there: Path, now: float) -> Finding:
    """Check the disk of the state directory. `there` is its nearest existing directory."""
    free = shutil.disk_usage(there).free
    if free < VERY_LOW:
        return Finding(
            "disk",
            "fail",
            f"{size(free)} free under {there}",
            "free some space: without it, no event can be accepted or end (no event is lost)",
            "disk.full",
        )
    left = seconds_until_full(read_samples(state), os.stat(there).st_dev, free, now)
    if left is not None and left < DAY:
        return Finding(
            "disk",
            "fail",
            f"{size(free)} free under {there}: full in about {lasting(left)} if it fills as fast "
            "as in the last hour",
            "free some space, lower pages.max_bytes and pages.keep, or move output files",
            "disk.full_soon",
        )
    if free < LOW:
        return Finding(
            "disk",
            "warn",
            f"{size(free)} free under {there}",
            "free some space, or lower pages.max_bytes and pages.keep",
            "disk.low",
        )
    return Finding("disk", "ok", f"{size(free)} free")
