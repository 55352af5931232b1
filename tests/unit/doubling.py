"""Checks that CPU time and memory of a parser grow at most linearly with its input.

Also checks that the parser leaves no cycles of references. The garbage collector of a worker runs
rarely, so each document in such a cycle would stay in memory for hours.
"""

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
# Bytes that a garbage collection may free after a run. It also frees the memory that Python keeps
# for new tuples, which has about 100 KB for tuples of one size.
MAX_GARBAGE = 256 << 10
# A busy machine delays single measurements, so a failed comparison is measured again.
TRIES = 3

T = TypeVar("T")


def grows_linearly(
    make: Callable[[int], T],
    run: Callable[[T], object],
    sizes: tuple[int, ...] = DOUBLINGS,
    min_seconds: float = MIN_SECONDS,
) -> None:
    """Fail if CPU time or peak memory of `run(make(size))` grows faster than `MAX_GROWTH`.

    Also fail if the run leaves cycles of references.

    `make` is not measured. An exception of `run` fails the test, so `run` catches the errors that
    the parser declares. The growth over all doublings counts, as the mean growth of one doubling.
    """
    # Without `freeze`, each collection looks at all objects of pytest, which takes up to a second.
    gc.collect()
    gc.freeze()
    try:
        for tries_left in reversed(range(TRIES)):
            seconds = [_cpu(make(size), run) for size in sizes]
            if _growth(seconds, min_seconds, sizes) <= MAX_GROWTH:
                break
            assert tries_left, f"CPU seconds for {sizes} bytes: {seconds}"
        garbage = _garbage(make(sizes[0]), run)
        assert garbage <= MAX_GARBAGE, f"cycles of references keep {garbage} bytes in memory"
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


def _garbage(given: T, run: Callable[[T], object]) -> int:
    """Return the bytes after `run` that only the garbage collector frees."""
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        run(given)
        kept, _ = tracemalloc.get_traced_memory()
        gc.collect()
        return kept - tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
        gc.enable()


def _growth(measured: list[float], noise: float, sizes: tuple[int, ...]) -> float:
    """Return the mean growth of one doubling."""
    first, last = max(measured[0], noise), max(measured[-1], noise)
    return float((last / first) ** (1 / math.log2(sizes[-1] / sizes[0])))
