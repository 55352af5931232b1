"""A sandboxed child at work: reads groups of pages or changes, runs the user's code on each,
answers. Who forks it and buries it is not here.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import mmap
import os
import resource
import sys
import time
import traceback
from collections.abc import Iterator
from typing import NoReturn

import msgspec

from penstock.authoring.pipeline import Pipeline
from penstock.extraction import protocol as wire
from penstock.extraction.in_process import failed, printable, run_hooks, run_page
from penstock.extraction.protocol import Mark
from penstock.model import ErrorClass
from penstock.ports import Extracted

_HIGH = 500  # our descriptors live up here: what user code closes and opens by accident is low


class Settings(msgspec.Struct, frozen=True):
    """From the worker, as JSON on the command line."""

    control: int  # descriptors
    progress: int
    parent: int  # its pid
    slots: int
    memory: int
    output: int
    retire_pages: int
    retire_bytes: int


def high(fd: int) -> int:
    moved = int(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _HIGH))
    os.close(fd)
    return moved


def _memory() -> tuple[int, int] | None:
    """Address space and resident bytes of this process; None where the system does not tell."""
    try:
        with open("/proc/self/statm", "rb") as f:
            size, resident = f.read().split()[:2]
    except OSError:
        return None
    return int(size) * mmap.PAGESIZE, int(resident) * mmap.PAGESIZE


class Child:
    """One disposable process: reads groups of pages or changes, runs the user's code on each,
    answers.
    """

    def __init__(
        self, settings: Settings, pipeline: Pipeline, requests: int, answers: int, crash: int, bodies: mmap.mmap, progress: mmap.mmap, slot: int
    ) -> None:  # fmt: skip
        self._settings, self._pipeline = settings, pipeline
        self._in, self._out, self._crash, self._bodies = requests, answers, crash, bodies
        self._progress, self._at = progress, slot * wire.SLOT_BYTES
        self._pid, self._handled = os.getpid(), 0
        self._runner: asyncio.Runner | None = None
        self._born = _memory()
        if self._born is not None:
            _, self._hard = resource.getrlimit(resource.RLIMIT_AS)
            limit = self._born[0] + settings.memory
            resource.setrlimit(
                resource.RLIMIT_AS,
                (
                    limit if self._hard == resource.RLIM_INFINITY else min(limit, self._hard),
                    self._hard,
                ),
            )

    def serve(self) -> None:
        """Until the worker closes the pipe."""
        while head := self._read(wire.REQUEST.size, may_end=True):
            size, _, token, shared, kind = wire.REQUEST.unpack(head)
            try:
                meta = self._read(size)
                if kind == wire.Kind.PAGES:
                    self._answer(self._pages(wire.decode_heads(meta), shared), token, at_once=False)
                else:
                    self._answer(self._changes(wire.decode_changes(meta)), token, at_once=True)
            except MemoryError:  # before the first page
                self._lift_limit()
                self._finish([], token, 0, Mark.MEMORY)

    def _answer(self, results: Iterator[bytes], token: int, *, at_once: bool) -> None:
        """As few messages as may be: fast pages are answered together, but what was finished 20 ms
        ago is with the worker.
        """
        parts: list[bytes] = []
        first, size, flushed = 0, 0, time.monotonic()
        try:
            for part in results:
                if len(part) > self._settings.output + wire.ENVELOPE:
                    self._finish(parts, token, first, Mark.OUTPUT)
                parts.append(part)
                size += len(part)
                if (
                    at_once
                    or size >= wire.FLUSH_BYTES
                    or time.monotonic() - flushed >= wire.FLUSH_SECONDS
                ):
                    self._write(wire.answer(parts, token, first, Mark.MORE))
                    first, size, flushed = first + len(parts), 0, time.monotonic()
                    parts.clear()
        except MemoryError as e:
            self._lift_limit()
            self._confess(e)
            self._finish(parts, token, first, Mark.MEMORY)
        except SystemExit as e:
            self._confess(e)
            self._write(wire.answer(parts, token, first, Mark.MORE))
            self._end(e.code if isinstance(e.code, int) else 0 if e.code is None else 1)
        self._handled += first + len(parts)
        if self._is_old():
            self._finish(parts, token, first, Mark.RETIRE)
        flush_output()
        self._write(wire.answer(parts, token, first, Mark.DONE))

    def _pages(self, heads: list[wire.PageHead], shared: int) -> Iterator[bytes]:
        output = self._settings.output
        at = 0
        for i, head in enumerate(heads):
            # Only now: a group of large pages needs the memory of one.
            body = self._bodies[at : at + head.size] if at < shared else self._read(head.size)
            at += head.size
            self._note(i)
            result = run_page(self._pipeline, wire.page_of(head, body), output)
            if os.getpid() != self._pid:  # the user's code forked, and this is the copy
                os._exit(0)
            if result.kind == ErrorClass.POISON and result.error.startswith("MemoryError"):
                raise MemoryError(result.detail)
            yield _encoded(result)
            self._note(wire.BETWEEN)

    def _changes(self, changes: list[bytes]) -> Iterator[bytes]:
        runner = self._runner = (
            self._runner or asyncio.Runner()
        )  # one loop for all: what a hook has open stays open
        for i, change in enumerate(changes):
            self._note(i)
            line = runner.run(run_hooks(self._pipeline, change))
            if os.getpid() != self._pid:
                os._exit(0)
            yield wire.encode_result(printable(line)[:2000])
            self._note(wire.BETWEEN)

    def _note(self, index: int) -> None:
        wire.PROGRESS.pack_into(self._progress, self._at, index, time.monotonic())

    def _is_old(self) -> bool:
        """Time for a fresh one: many pages, grown, or leaking descriptors."""
        if self._handled >= self._settings.retire_pages:
            return True
        try:
            os.close(lowest := os.dup(0))
        except OSError:
            return True
        if lowest > _HIGH // 2 or self._born is None:
            return lowest > _HIGH // 2
        now = _memory()
        return now is None or now[0] - self._born[0] > self._settings.retire_bytes

    def _lift_limit(self) -> None:
        """There must be memory left to say that there was none."""
        with contextlib.suppress(OSError, ValueError, AttributeError):
            resource.setrlimit(resource.RLIMIT_AS, (self._hard, self._hard))

    def _confess(self, e: BaseException) -> None:
        """Where it happened, for the dead letter."""
        with contextlib.suppress(OSError, MemoryError):
            known = str(e) if isinstance(e, MemoryError) else ""
            os.write(
                self._crash,
                (known or "".join(traceback.format_exception(e))).encode("utf-8", "replace"),
            )

    def _finish(self, parts: list[bytes], token: int, first: int, mark: Mark) -> NoReturn:
        self._write(wire.answer(parts, token, first, mark))
        self._end(0)

    def _end(self, status: int) -> NoReturn:
        flush_output()
        os._exit(status & 0xFF)  # at once: threads of the user's code may never end

    def _read(self, size: int, *, may_end: bool = False) -> bytes:
        data = os.read(self._in, size) if size else b""
        if len(data) == size or (may_end and not data):
            return data
        parts, left = [data], size - len(data)
        while left:
            data = os.read(self._in, left)
            if not data:
                raise EOFError
            parts.append(data)
            left -= len(data)
        return b"".join(parts)

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._out, rest) :]


def _encoded(result: Extracted) -> bytes:
    try:
        return wire.encode_result(result)
    except MemoryError:
        raise
    except Exception as e:  # a lone surrogate, an integer beyond 64 bits
        if result.error:
            return wire.encode_result(
                Extracted(
                    error=printable(result.error), kind=result.kind, detail=printable(result.detail)
                )
            )
        return wire.encode_result(failed(e, ErrorClass.PERMANENT))


def flush_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):  # the user's code may have replaced or closed them
            stream.flush()
