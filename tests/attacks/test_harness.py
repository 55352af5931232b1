"""Tests of the attack harness and of the doubling check: both must find what they look for."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from tests.attacks.watched import watch
from tests.unit.doubling import grows_linearly


def _burn(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


async def test_a_callback_that_keeps_the_cpu_is_recorded(tmp_path: Path):
    path = tmp_path / "turns.txt"
    path.touch()
    watch(asyncio.get_running_loop(), path)
    await asyncio.sleep(0.05)
    _burn(0.3)
    await asyncio.sleep(0.05)
    assert max(float(line.split()[1]) for line in path.read_text().splitlines()) >= 0.3


async def test_a_callback_that_only_waits_is_not_recorded(tmp_path: Path):
    path = tmp_path / "turns.txt"
    path.touch()
    watch(asyncio.get_running_loop(), path)
    await asyncio.sleep(0.05)
    time.sleep(0.5)  # noqa: ASYNC251 - the loop must be blocked without CPU time
    await asyncio.sleep(0.05)
    assert not [line for line in path.read_text().splitlines() if float(line.split()[1]) >= 0.3]


def test_quadratic_work_fails_the_doubling_check():
    with pytest.raises(AssertionError, match="CPU seconds"):
        grows_linearly(lambda size: size >> 8, lambda n: sum(range(n * n >> 4)))


def test_quadratic_memory_fails_the_doubling_check():
    with pytest.raises(AssertionError, match="peak bytes"):
        grows_linearly(lambda size: size >> 11, lambda n: bytearray(n * n))


def test_linear_work_passes_the_doubling_check():
    grows_linearly(lambda size: bytes(size), lambda data: data.replace(b"\0", b"12"))
