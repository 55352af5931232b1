"""Handle of one sandboxed child process: sends requests, reads results, enforces the time limit.

`sandbox` decides which pages run again, and which page caused a crash.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import mmap
import os
import secrets
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.extraction import protocol as wire
from penstock.extraction.protocol import ResultFlag
from penstock.model import Reason
from penstock.rules.reasons import sentence

if TYPE_CHECKING:
    from penstock.extraction.zygote import ZygoteProcess

_PIPE_BYTES = 1 << 20  # holds a typical group of pages, so that it is sent in one system call
_READ_BYTES = 256 << 10
# Seconds. If the event loop is later than that, the machine may have been suspended, and the
# children with it.
_LOOP_LAG_LIMIT = 0.1
# Seconds from end-of-file on a child's pipe to the report of its exit. A child that still runs
# after that has closed the pipe itself, and is killed.
_REAP_TIMEOUT = 0.5
_TRACEBACK_TIMEOUT = 1.0  # seconds from SIGABRT (faulthandler writes a traceback) to SIGKILL
# Seconds. The zygote only forks and reaps, so a slower answer means that it hangs.
ZYGOTE_TIMEOUT = 5.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Resource limits of user code."""

    seconds: float = 30.0  # per page
    memory: int = 512 << 20  # bytes of address space, in addition to the loaded pipeline
    output: int = 16 << 20  # bytes of one page's encoded result
    pages: int = 20_000  # per child. Then the child is replaced.
    load_seconds: float = 60.0  # to import the pipeline file


@dataclass(frozen=True, slots=True)
class ChildExit:
    """Why a child ended before it had returned the results of all pages."""

    code: Reason
    reason: str  # for example "killed by SIGSEGV"
    detail: str = ""  # traceback
    page_index: int | None = None  # the page of the request that was in progress, if known
    zygote_lost: bool = False  # the zygote failed, and this child was lost with it
    # No child could be started, or the sandbox was closed. The pages are not the cause.
    internal: bool = False


@dataclass(frozen=True, slots=True)
class Reply:
    """Results of one request."""

    results: Sequence[Any]  # of the first pages, in order. Of all pages if the child did not exit.
    exit: ChildExit | None = None


class ChildProcess:
    """One child process. It handles one request at a time.

    Requests and results are sent through two pipes. Page bodies are in shared memory.
    """

    def __init__(self, zygote: ZygoteProcess, number: int, progress_index: int) -> None:
        self.number, self.progress_index, self.pid = number, progress_index, 0
        self.usable = True
        self.zygote, self._limits, self._loop = zygote, zygote.limits, asyncio.get_running_loop()
        self._future: asyncio.Future[Reply] | None = None
        self._results: list[Any] = []
        self._count = self._token = 0
        # Tokens start at a random number, so output of user code on the pipe is not valid.
        self._tokens = itertools.count(secrets.randbits(62))
        self._decode: Callable[[memoryview], list[Any]] = wire.decode_results
        self._out: list[bytes | memoryview] = []
        self._buffer = bytearray()
        self._last_write_at = 0.0
        self._killed_for: tuple[Reason, str] | None = None  # with its sentence
        self._timer: asyncio.TimerHandle | None = None
        self._extended_page_start = -1.0  # start of the page that has already got extra time
        self._reading = False
        self._fds: list[int] = []
        self._memory: mmap.mmap | None = None
        try:
            requests, self._w = self._open_pipe()
            self._r, answers = self._open_pipe()
            self._crash = memory_file()
            self._fds.append(self._crash)
            bodies = memory_file()
            self._fds.append(bodies)
            os.ftruncate(bodies, wire.SHARED_BYTES)
            self._memory = mmap.mmap(bodies, wire.SHARED_BYTES)
            zygote.send_command(
                wire.Command.FORK, progress_index, number, [requests, answers, self._crash, bodies]
            )
        except BaseException:
            self._close()
            raise
        for fd in (requests, answers, bodies):
            self._fds.remove(fd)
            os.close(fd)
        os.set_blocking(self._w, False)
        os.set_blocking(self._r, False)
        self._loop.add_reader(self._r, self._readable)
        self._reading = True

    def _open_pipe(self) -> tuple[int, int]:
        r, w = os.pipe()
        self._fds += (r, w)
        # A per-user limit may forbid the larger size, and macOS has only one size. Pipes of the
        # default size work too.
        with contextlib.suppress(OSError, AttributeError):
            fcntl.fcntl(w, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        return r, w

    async def request(
        self,
        encode: Callable[[int, mmap.mmap], list[bytes]],
        count: int,
        decode: Callable[[memoryview], list[Any]],
    ) -> Reply:
        """Send one request and wait for `count` results, or for the exit of the child.

        Kills the child if the caller is cancelled.
        """
        self._token, self._count, self._decode, self._results = (
            next(self._tokens) & (2**64 - 1),
            count,
            decode,
            [],
        )
        assert self._memory is not None
        self._out += encode(self._token, self._memory)
        future: asyncio.Future[Reply] = self._loop.create_future()
        self._future = future
        self._last_write_at = time.monotonic()
        self._write()
        if self._timer is None:  # the timer stays active from one request to the next
            self._timer = self._loop.call_later(self._limits.seconds, self._check_time_limit)
        try:
            return await future
        finally:
            if not future.done() or future.cancelled():
                self.kill(Reason.CANCELLED)

    # -- the pipes

    def _write(self) -> None:
        try:
            while self._out:
                sent = os.writev(self._w, self._out[:512])
                self._last_write_at = time.monotonic()
                while self._out and sent >= len(self._out[0]):
                    sent -= len(self._out.pop(0))
                if sent:
                    self._out[0] = memoryview(self._out[0])[sent:]
        except BlockingIOError:
            self._loop.add_writer(self._w, self._write)
            return
        except OSError:  # the child has exited or closed the pipe. The zygote reports its exit.
            self._out.clear()
        self._stop_writing()

    def _readable(self) -> bool:
        """Read and parse data. Return False at end-of-file, or if no data is available."""
        try:
            data = os.read(self._r, _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._stop_reading()
            # The child has usually exited, and the zygote reports that within milliseconds. After
            # that, `kill` has no effect.
            self._loop.call_later(_REAP_TIMEOUT, self.kill, Reason.DESCRIPTORS)
            return False
        if self._buffer:
            self._buffer += data
            self._buffer = bytearray(self._parse(self._buffer))
        elif rest := self._parse(data):
            self._buffer += rest
        return True

    def _parse(self, data: bytes | bytearray) -> bytes:
        """Handle all complete messages. Return the bytes of an incomplete one."""
        at, view = 0, memoryview(data)
        while self._killed_for is None and len(data) - at >= wire.ANSWER.size:
            size, token, first, count, flag = wire.ANSWER.unpack_from(data, at)
            if (
                self._future is None
                or self._future.done()
                or token != self._token
                or first != len(self._results)
                or first + count > self._count
                or size > self._limits.output + wire.ENVELOPE + wire.FLUSH_BYTES + 4096
                or flag > max(ResultFlag)
            ):
                self.kill(Reason.PIPE)
                return b""
            end = at + wire.ANSWER.size + size
            if end > len(data):
                break
            try:
                results = self._decode(view[at + wire.ANSWER.size : end])
            except (msgspec.MsgspecError, ValueError):
                results = []
            if len(results) != count:
                self.kill(Reason.PIPE)
                return b""
            self._results += results
            self._handle_flag(ResultFlag(flag))
            at = end
        # If the child is being killed, its further output is ignored.
        return bytes(view[at:]) if self._killed_for is None else b""

    def _handle_flag(self, flag: ResultFlag) -> None:
        if flag is ResultFlag.DONE or flag is ResultFlag.RETIRE:
            if flag is ResultFlag.RETIRE:
                self.usable = False
                self._loop.call_later(1.0, self.zygote.signal, self.number, signal.SIGKILL)
            if len(self._results) != self._count:
                self.kill(Reason.PIPE)
            elif self._future is not None and not self._future.done():
                self._future.set_result(Reply(self._results))
        elif flag is ResultFlag.MEMORY:
            self._await_exit(Reason.MEMORY, _mib(self._limits.memory))
        elif flag is ResultFlag.OUTPUT:
            self._await_exit(Reason.OUTPUT, _mib(self._limits.output))

    def _await_exit(self, reason: Reason, *facts: object) -> None:
        """Kill the child if it has not exited one second after it announced its exit."""
        self._note_end(reason, *facts)
        self._loop.call_later(1.0, self.kill, reason, *facts)

    def _note_end(self, reason: Reason, *facts: object) -> None:
        """Stop using the child. The first reason counts."""
        self.usable = False
        self._killed_for = self._killed_for or (reason, sentence(reason, *facts))

    # -- exit of the child

    def _check_time_limit(self) -> None:
        behind = self._loop.time() - self._timer.when() if self._timer is not None else 0.0
        self._timer = None
        if self._future is None or self._future.done() or not self.usable:
            return
        # A busy event loop may run this timer before it reads results that have already arrived.
        while self._reading and self._killed_for is None and self._readable():
            pass
        if self._future.done() or not self.usable:
            return
        now = time.monotonic()
        page_index, since = self._progress()
        start = since if page_index >= 0 else max(since, self._last_write_at)
        left = min(start, now) + self._limits.seconds - now
        # The event loop itself was late, for example because the machine was suspended. Give the
        # page extra time, but only once: a busy loop is late every time, and the page may hang.
        if left <= 0 and behind > _LOOP_LAG_LIMIT and self._extended_page_start != start:
            self._extended_page_start, left = start, min(behind, self._limits.seconds)
        if left > 0:
            self._timer = self._loop.call_later(left + 0.001, self._check_time_limit)
        else:
            self.kill(Reason.TIME_LIMIT, self._limits.seconds, want_traceback=True)

    def _progress(self) -> tuple[int, float]:
        return wire.PROGRESS.unpack_from(
            self.zygote.progress, self.progress_index * wire.PROGRESS_BYTES
        )

    def kill(self, reason: Reason, *facts: object, want_traceback: bool = False) -> None:
        self._note_end(reason, *facts)
        if want_traceback:  # on SIGABRT, faulthandler writes a traceback to the crash file
            self.zygote.signal(self.number, signal.SIGABRT)
            self._kill_after_traceback()
        else:
            self.zygote.signal(self.number, signal.SIGKILL)
        self._loop.call_later(ZYGOTE_TIMEOUT, self.zygote.check_reaped, self.number)

    def _kill_after_traceback(self, *, again: bool = True) -> None:
        due = self._loop.time() + _TRACEBACK_TIMEOUT

        def end() -> None:
            if again and self._loop.time() > due + _LOOP_LAG_LIMIT:
                # This process was suspended, and the child may not have written its traceback.
                self._kill_after_traceback(again=False)
            else:
                self.zygote.signal(self.number, signal.SIGKILL)

        self._loop.call_at(due, end)

    def discard(self) -> None:
        """Kill the child, which is no longer needed."""
        self.usable = False
        self.zygote.signal(self.number, signal.SIGKILL)

    def on_exit(self, exit_code: int) -> None:
        """Read the results that are still in the pipe, and finish the request."""
        budget = 2 * (self._limits.output + _PIPE_BYTES)
        while self._reading and budget > 0 and self._readable():
            budget -= _READ_BYTES
        page_index, _ = self._progress()
        killed_for = self._killed_for
        if killed_for and killed_for[0] is Reason.DESCRIPTORS and exit_code != -signal.SIGKILL:
            # The child exited without the kill, and the zygote reported it late.
            killed_for = None
        self._finish(
            ChildExit(
                *(killed_for or _describe_exit_code(exit_code)),
                self._read_traceback(),
                page_index if 0 <= page_index < self._count else None,
            )
        )

    def on_zygote_lost(self, code: Reason, reason: str, *, internal: bool) -> None:
        """Finish the request after the zygote ended or could not start this child."""
        self._finish(ChildExit(code, reason, zygote_lost=not internal, internal=internal))

    def _read_traceback(self) -> str:
        with contextlib.suppress(OSError):
            return os.pread(self._crash, 64 << 10, 0).decode("utf-8", "replace")
        return ""

    def _finish(self, exit: ChildExit) -> None:
        self.usable = False
        if self._timer is not None:
            self._timer.cancel()
        self._out.clear()
        self._stop_writing()
        self._stop_reading()
        self._close()
        if self._future is not None and not self._future.done():
            self._future.set_result(Reply(self._results, exit))

    def _stop_writing(self) -> None:
        if self._fds:  # after `_close` the number may belong to another file
            self._loop.remove_writer(self._w)

    def _stop_reading(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._r)

    def _close(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
        if self._memory is not None:
            self._memory.close()


def memory_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("penstock")
    with tempfile.TemporaryFile() as f:
        return os.dup(f.fileno())


def _describe_exit_code(exit_code: int) -> tuple[Reason, str]:
    if exit_code == wire.LOST_PIPES:
        return Reason.DESCRIPTORS, sentence(Reason.DESCRIPTORS)
    if exit_code >= 0:
        return Reason.EXITED, sentence(Reason.EXITED, exit_code)
    return Reason.KILLED, sentence(Reason.KILLED, signal_name(-exit_code))


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _mib(size: int) -> str:
    return f"{size / (1 << 20):g} MiB"
