"""Checks that CPU time and memory of a parser grow at most linearly with its input."""

from __future__ import annotations

import gc
import math
import statistics
import time
import tracemalloc
from collections.abc import Callable
from typing import TypeVar

DOUBLINGS = (512 << 10, 1 << 20, 2 << 20, 4 << 20)  # bytes of input
# Some parsers refuse longer documents of some shapes. So they are also measured below that.
SHORT_DOUBLINGS = (64 << 10, 128 << 10, 256 << 10, 512 << 10)
REPETITIONS = 5
# Growth for each doubling. Linear work gives 2.0, quadratic work gives 4.0.
MAX_GROWTH = 2.3
# Seconds and bytes below which a measurement is noise. Growth from less than this is not judged.
MIN_SECONDS = 0.008
MIN_BYTES = 64 << 10
# A busy machine delays single measurements, so a failed comparison is measured again.
TRIES = 3

T = TypeVar("T")


def grows_linearly(
    make: Callable[[int], T],
    run: Callable[[T], object],
    sizes: tuple[int, ...] = DOUBLINGS,
) -> None:
    """Fail if CPU time or peak memory of `run(make(size))` grows faster than `MAX_GROWTH`.

    `make` is not measured. An exception of `run` fails the test, so `run` catches the errors that
    the parser declares. The growth over all doublings counts, as the mean growth of one doubling.
    """
    # Without `freeze`, each collection looks at all objects of pytest, which takes up to a second.
    gc.collect()
    gc.freeze()
    try:
        for tries_left in reversed(range(TRIES)):
            seconds = [_cpu(make(size), run) for size in sizes]
            if _growth(seconds, MIN_SECONDS, sizes) <= MAX_GROWTH:
                break
            assert tries_left, f"CPU seconds for {sizes} bytes: {seconds}"
        sizes = (sizes[0], sizes[-1])  # tracing is slow
        memory = [_memory(make(size), run) for size in sizes]
        assert _growth(memory, MIN_BYTES, sizes) <= MAX_GROWTH, (
            f"peak bytes for {sizes} bytes: {memory}"
        )
    finally:
        gc.unfreeze()


def _cpu(given: T, run: Callable[[T], object]) -> float:
    """Return the median CPU time of this thread, in seconds."""
    taken = []
    for _ in range(REPETITIONS):
        gc.collect()
        start = time.thread_time()
        run(given)
        taken.append(time.thread_time() - start)
    return statistics.median(taken)


def _memory(given: T, run: Callable[[T], object]) -> float:
    """Return the peak of the bytes that Python allocated during `run`."""
    gc.collect()
    tracemalloc.start()
    try:
        run(given)
        return float(tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()


def _growth(measured: list[float], noise: float, sizes: tuple[int, ...]) -> float:
    """Return the mean growth of one doubling."""
    first, last = max(measured[0], noise), max(measured[-1], noise)
    return float((last / first) ** (1 / math.log2(sizes[-1] / sizes[0])))
