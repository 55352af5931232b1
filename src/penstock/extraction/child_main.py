"""Work of a sandboxed child: reads groups of pages or changes, runs user code, sends the results.

See `zygote_main` for the process that forks and reaps it.
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
from penstock.extraction.protocol import ResultFlag
from penstock.model import ErrorClass, Reason
from penstock.ports import Extracted

# The sandbox's descriptors are moved above this number. User code that closes or opens descriptors
# by accident uses low numbers.
_MIN_DESCRIPTOR = 500


class ZygoteSettings(msgspec.Struct, frozen=True):
    """Settings from the worker, as JSON on the command line."""

    control: int  # file descriptor of the control socket
    progress: int  # file descriptor of the shared progress memory
    parent: int  # pid of the worker
    slots: int
    memory: int
    output: int
    retire_pages: int
    retire_bytes: int


def move_descriptor(fd: int) -> int:
    """Move a descriptor above `_MIN_DESCRIPTOR`, and return its new number."""
    moved = int(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _MIN_DESCRIPTOR))
    os.close(fd)
    return moved


def _address_space() -> int | None:
    """Return the bytes of this process's address space, or None without /proc."""
    try:
        with open("/proc/self/statm", "rb") as f:
            return int(f.read().split()[0]) * mmap.PAGESIZE
    except OSError:
        return None


class Child:
    """One disposable process that runs user code on pages or changes."""

    def __init__(
        self,
        settings: ZygoteSettings,
        pipeline: Pipeline,
        requests: int,
        answers: int,
        crash: int,
        bodies: mmap.mmap,
        progress: mmap.mmap,
        progress_index: int,
    ) -> None:
        self._settings, self._pipeline = settings, pipeline
        self._in = open(requests, "rb")  # noqa: SIM115 (read until this process exits)
        self._out, self._crash, self._bodies = answers, crash, bodies
        self._progress, self._at = progress, progress_index * wire.PROGRESS_BYTES
        self._pid, self._handled = os.getpid(), 0
        self._runner: asyncio.Runner | None = None
        self._initial_memory = _address_space()
        if self._initial_memory is not None:
            _, self._hard_limit = resource.getrlimit(resource.RLIMIT_AS)
            limit = self._initial_memory + settings.memory
            resource.setrlimit(
                resource.RLIMIT_AS,
                (
                    limit
                    if self._hard_limit == resource.RLIM_INFINITY
                    else min(limit, self._hard_limit),
                    self._hard_limit,
                ),
            )

    def serve(self) -> None:
        """Serve requests until the worker closes the pipe."""
        while head := self._read(wire.REQUEST.size, may_end=True):
            size, _, token, shared, kind = wire.REQUEST.unpack(head)
            try:
                meta = self._read(size)
                if kind == wire.Kind.PAGES:
                    self._answer(
                        self._pages(wire.decode_heads(meta), shared), token, immediately=False
                    )
                else:
                    self._answer(self._changes(wire.decode_changes(meta)), token, immediately=True)
            except MemoryError:  # raised before the first page
                self._lift_limit()
                self._finish([], token, 0, ResultFlag.MEMORY)

    def _answer(self, results: Iterator[bytes], token: int, *, immediately: bool) -> None:
        """Send results in few messages.

        After each page, the collected results are sent if they have at least `FLUSH_BYTES`, or if
        20 ms (`FLUSH_SECONDS`) have passed since the last message. With `immediately`, each result
        is sent alone.
        """
        parts: list[bytes] = []
        first, size, flushed = 0, 0, time.monotonic()
        try:
            for part in results:
                if len(part) > self._settings.output + wire.ENVELOPE:
                    self._finish(parts, token, first, ResultFlag.OUTPUT)
                parts.append(part)
                size += len(part)
                if (
                    immediately
                    or size >= wire.FLUSH_BYTES
                    or time.monotonic() - flushed >= wire.FLUSH_SECONDS
                ):
                    self._write(wire.answer(parts, token, first, ResultFlag.MORE))
                    first, size, flushed = first + len(parts), 0, time.monotonic()
                    parts.clear()
        except MemoryError as e:
            self._lift_limit()
            self._write_traceback(e)
            self._finish(parts, token, first, ResultFlag.MEMORY)
        except SystemExit as e:
            self._write_traceback(e)
            self._write(wire.answer(parts, token, first, ResultFlag.MORE))
            self._end(e.code if isinstance(e.code, int) else 0 if e.code is None else 1)
        self._handled += first + len(parts)
        if self._must_retire():
            self._finish(parts, token, first, ResultFlag.RETIRE)
        flush_output()
        self._write(wire.answer(parts, token, first, ResultFlag.DONE))

    def _pages(self, heads: list[wire.PageHead], shared: int) -> Iterator[bytes]:
        output = self._settings.output
        at = 0
        for i, head in enumerate(heads):
            # Read each body when its page starts, so that only one large body is in memory.
            body = self._bodies[at : at + head.size] if at < shared else self._read(head.size)
            at += head.size
            self._record_progress(i)
            result = run_page(self._pipeline, wire.page_of(head, body), output)
            if os.getpid() != self._pid:  # user code forked, and this is the forked copy
                os._exit(0)
            if result.code is Reason.MEMORY:
                raise MemoryError(result.detail)
            yield _encode_result(result)
            self._record_progress(wire.BETWEEN)

    def _changes(self, changes: list[bytes]) -> Iterator[bytes]:
        # One event loop for all changes, so that connections of a hook stay open.
        runner = self._runner = self._runner or asyncio.Runner()
        for i, change in enumerate(changes):
            self._record_progress(i)
            line = runner.run(run_hooks(self._pipeline, change))
            if os.getpid() != self._pid:
                os._exit(0)
            yield wire.encode_result(printable(line)[:2000])
            self._record_progress(wire.BETWEEN)

    def _record_progress(self, index: int) -> None:
        """Write the current page's index and start time to the shared progress memory."""
        wire.PROGRESS.pack_into(self._progress, self._at, index, time.monotonic())

    def _must_retire(self) -> bool:
        """Return True if this child must be replaced: many pages, much memory, many descriptors."""
        if self._handled >= self._settings.retire_pages:
            return True
        try:
            os.close(lowest := os.dup(0))
        except OSError:
            return True
        if lowest > _MIN_DESCRIPTOR // 2 or self._initial_memory is None:
            return lowest > _MIN_DESCRIPTOR // 2
        now = _address_space()
        return now is None or now - self._initial_memory > self._settings.retire_bytes

    def _lift_limit(self) -> None:
        """Lift the memory limit, so that there is memory left to report the error."""
        with contextlib.suppress(OSError, ValueError, AttributeError):
            resource.setrlimit(resource.RLIMIT_AS, (self._hard_limit, self._hard_limit))

    def _write_traceback(self, e: BaseException) -> None:
        """Write the traceback to the crash file. The worker adds it to the dead letter."""
        with contextlib.suppress(OSError, MemoryError):
            known = str(e) if isinstance(e, MemoryError) else ""
            os.write(
                self._crash,
                (known or "".join(traceback.format_exception(e))).encode("utf-8", "replace"),
            )

    def _finish(self, parts: list[bytes], token: int, first: int, flag: ResultFlag) -> NoReturn:
        self._write(wire.answer(parts, token, first, flag))
        self._end(0)

    def _end(self, status: int) -> NoReturn:
        flush_output()
        os._exit(status & 0xFF)  # without waiting for threads of user code, which may never end

    def _read(self, size: int, *, may_end: bool = False) -> bytes:
        data = self._in.read(size)
        if len(data) < size and not (may_end and not data):
            raise EOFError
        return data

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._out, rest) :]


def _encode_result(result: Extracted) -> bytes:
    try:
        return wire.encode_result(result)
    except MemoryError:
        raise
    except Exception as e:  # for example a lone surrogate, or an integer beyond 64 bits
        if result.error:
            return wire.encode_result(
                Extracted(
                    error=printable(result.error),
                    code=result.code,
                    kind=result.kind,
                    detail=printable(result.detail),
                )
            )
        return wire.encode_result(failed(e, ErrorClass.PERMANENT))


def flush_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):  # user code may have replaced or closed them
            stream.flush()
