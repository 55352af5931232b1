"""The worker's end of one sandboxed child: feeds it, reads it, watches its time, ends it. What is
run again, and who is to blame, is not decided here.
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
from penstock.extraction.protocol import Mark, Order

if TYPE_CHECKING:
    from penstock.extraction.zygote import ZygoteProcess

_PIPE_BYTES = 1 << 20  # a group of ordinary pages in one system call
_READ_BYTES = 256 << 10
# seconds that a busy loop may be behind; beyond that it stood still, and so did its children,
# perhaps
_LATE = 0.1
# between the end of a child's pipe and the news of its own; after that it is alive, and closed it
_BURIAL = 0.5
_LAST_WORDS = 1.0  # between asking a child for its traceback and killing it
ZYGOTE_PATIENCE = 5.0  # it only forks and buries: one that does not answer is wedged


@dataclass(frozen=True, slots=True)
class Limits:
    """What user code may use: per page, and how long a child is kept."""

    seconds: float = 30.0
    memory: int = 512 << 20  # address space, beyond what the loaded pipeline has
    output: int = 16 << 20  # one page's encoded result
    pages: int = 20_000  # then a fresh child
    load_seconds: float = 60.0  # to import the pipeline file


@dataclass(frozen=True, slots=True)
class Death:
    reason: str  # "killed by SIGSEGV"
    detail: str = ""
    index: int | None = None  # the page (of those asked) that was under way
    collateral: bool = False  # the zygote went, and took this child with it
    ours: bool = False  # no child could be had: says nothing about any page


@dataclass(frozen=True, slots=True)
class Reply:
    results: Sequence[Any]  # of the first pages; all, unless it died
    death: Death | None = None


class ChildProcess:
    """One child: one request at a time, through a pair of wide pipes, with the bodies in memory
    that both see.
    """

    def __init__(self, zygote: ZygoteProcess, number: int, slot: int) -> None:
        self.number, self.slot, self.pid = number, slot, 0
        self.usable = True
        self._zygote, self._limits, self._loop = zygote, zygote.limits, asyncio.get_running_loop()
        self._future: asyncio.Future[Reply] | None = None
        self._results: list[Any] = []
        self._count = self._token = 0
        self._tokens = itertools.count(
            secrets.randbits(62)
        )  # what user code writes to our pipe by accident never carries the right one
        self._decode: Callable[[memoryview], list[Any]] = wire.decode_results
        self._out: list[bytes | memoryview] = []
        self._buffer = bytearray()
        self._fed = 0.0
        self._why = ""
        self._timer: asyncio.TimerHandle | None = None
        self._excused = -1.0  # the start of the page that was last given more time
        self._writing = self._reading = False
        self._fds: list[int] = []
        self._memory: mmap.mmap | None = None
        try:
            requests, self._w = self._pipe()
            self._r, answers = self._pipe()
            self._crash = memory_file()
            self._fds.append(self._crash)
            bodies = memory_file()
            self._fds.append(bodies)
            os.ftruncate(bodies, wire.SHARED_BYTES)
            self._memory = mmap.mmap(bodies, wire.SHARED_BYTES)
            zygote.order(Order.FORK, slot, number, [requests, answers, self._crash, bodies])
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

    def belongs_to(self, zygote: ZygoteProcess) -> bool:
        return self._zygote is zygote

    def _pipe(self) -> tuple[int, int]:
        r, w = os.pipe()
        self._fds += (r, w)
        if hasattr(fcntl, "F_SETPIPE_SZ"):
            with contextlib.suppress(OSError):  # beyond the user's share: narrower pipes work too
                fcntl.fcntl(w, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        return r, w

    async def ask(
        self,
        encode: Callable[[int, mmap.mmap], list[bytes]],
        count: int,
        decode: Callable[[memoryview], list[Any]],
    ) -> Reply:
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
        self._fed = time.monotonic()
        self._write()
        if self._timer is None:  # left running from request to request
            self._timer = self._loop.call_later(self._limits.seconds, self._check_time)
        try:
            return await future
        finally:
            if not future.done() or future.cancelled():
                self.kill("cancelled")

    # -- the pipes

    def _write(self) -> None:
        try:
            while self._out:
                sent = os.writev(self._w, self._out[:512])
                self._fed = time.monotonic()
                done = 0
                for done, buffer in enumerate(self._out[:512]):
                    if sent < len(buffer):
                        self._out[done] = memoryview(buffer)[sent:]
                        break
                    sent -= len(buffer)
                else:
                    done += 1
                del self._out[:done]
        except BlockingIOError:
            if not self._writing:
                self._writing = True
                self._loop.add_writer(self._w, self._write)
            return
        except OSError:  # it is gone, or closed its end; its end will be told
            self._out.clear()
        self._stop_writing()

    def _stop_writing(self) -> None:
        if self._writing:
            self._writing = False
            self._loop.remove_writer(self._w)

    def _readable(self) -> bool:
        """True: there was something."""
        try:
            data = os.read(self._r, _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._stop_reading()
            self._loop.call_later(
                _BURIAL, self._outlived_its_pipe
            )  # mostly it is dead, and that is told in a moment
            return False
        if self._buffer:
            self._buffer += data
            self._buffer = bytearray(self._parse(self._buffer))
        elif rest := self._parse(data):
            self._buffer += rest
        return True

    def _outlived_its_pipe(self) -> None:
        if self._fds:
            self.kill(_CLOSED)

    def _parse(self, data: bytes | bytearray) -> bytes:
        """Takes whole messages; returns what is left."""
        at, view = 0, memoryview(data)
        while not self._why and len(data) - at >= wire.ANSWER.size:
            size, token, first, count, mark = wire.ANSWER.unpack_from(data, at)
            expected = (
                self._future is not None
                and not self._future.done()
                and token == self._token
                and first == len(self._results)
            )
            if (
                not expected
                or first + count > self._count
                or size > self._limits.output + wire.ENVELOPE + wire.FLUSH_BYTES + 4096
                or mark > max(Mark)
            ):
                self._garbage()
                return b""
            end = at + wire.ANSWER.size + size
            if end > len(data):
                break
            try:
                results = self._decode(view[at + wire.ANSWER.size : end])
            except (msgspec.MsgspecError, ValueError):
                results = []
            if len(results) != count:
                self._garbage()
                return b""
            self._results += results
            self._marked(Mark(mark))
            at = end
        return (
            b"" if self._why else bytes(view[at:])
        )  # it is being killed, and for a reason: what comes now does not count

    def _garbage(self) -> None:
        self.kill("wrote to the sandbox's own pipe")

    def _marked(self, mark: Mark) -> None:
        if mark is Mark.DONE or mark is Mark.RETIRE:
            if mark is Mark.RETIRE:
                self.usable = False
                self._loop.call_later(1.0, self._zygote.signal, self.number, signal.SIGKILL)
            if len(self._results) != self._count:
                self._garbage()
            elif self._future is not None and not self._future.done():
                self._future.set_result(Reply(self._results))
        elif mark is Mark.MEMORY:
            self._mourn(f"ran out of memory (limit {_mib(self._limits.memory)})")
        elif mark is Mark.OUTPUT:
            self._mourn(f"made more output than {_mib(self._limits.output)}")

    def _mourn(self, why: str) -> None:
        """It says that it is about to end; a second later it has."""
        self.usable, self._why = False, self._why or why
        self._loop.call_later(1.0, self.kill, why)

    # -- its end

    def _check_time(self) -> None:
        behind = self._loop.time() - self._timer.when() if self._timer is not None else 0.0
        self._timer = None
        if self._future is None or self._future.done() or not self.usable:
            return
        while (
            self._reading and not self._why and self._readable()
        ):  # a busy loop may come here before it reads an answer that is long there
            pass
        if self._future.done() or not self.usable:
            return
        now = time.monotonic()
        index, since = self._progress()
        start = since if index >= 0 else max(since, self._fed)
        left = min(start, now) + self._limits.seconds - now
        if (
            left <= 0 and behind > _LATE and self._excused != start
        ):  # a machine that was suspended, say: nobody moved
            self._excused, left = (
                start,
                min(behind, self._limits.seconds),
            )  # once: a loop may be late every time, and the page still hangs
        if left > 0:
            self._timer = self._loop.call_later(left + 0.001, self._check_time)
        else:
            self.kill(f"ran longer than {self._limits.seconds:g} s", last_words=True)

    def _progress(self) -> tuple[int, float]:
        index, since = wire.PROGRESS.unpack_from(self._zygote.progress, self.slot * wire.SLOT_BYTES)
        return index, since

    def kill(self, why: str, *, last_words: bool = False) -> None:
        self.usable, self._why = False, self._why or why
        if last_words:  # SIGABRT: faulthandler writes down where it is
            self._zygote.signal(self.number, signal.SIGABRT)
            self._end_soon()
        else:
            self._zygote.signal(self.number, signal.SIGKILL)
        self._loop.call_later(ZYGOTE_PATIENCE, self._zygote.must_have_buried, self.number)

    def _end_soon(self, *, again: bool = True) -> None:
        due = self._loop.time() + _LAST_WORDS

        def end() -> None:
            if again and self._loop.time() > due + _LATE:
                self._end_soon(again=False)  # we stood still, and it may not have said a word
            else:
                self._zygote.signal(self.number, signal.SIGKILL)

        self._loop.call_at(due, end)

    def discard(self) -> None:
        """Not needed any more."""
        self.usable = False
        self._zygote.signal(self.number, signal.SIGKILL)

    def ended(self, exit_code: int) -> None:
        """What it wrote before is still in the pipe."""
        self.usable = False
        budget = 2 * (self._limits.output + _PIPE_BYTES)
        while self._reading and budget > 0 and self._readable():
            budget -= _READ_BYTES
        index, _ = self._progress()
        if self._why == _CLOSED and exit_code != -signal.SIGKILL:
            self._why = ""  # it had died by itself, and the news was slow
        self._die(
            Death(
                self._why or _described(exit_code),
                self._last_words(),
                index if 0 <= index < self._count else None,
            )
        )

    def lost(self, why: str, *, ours: bool) -> None:
        self._die(Death(why, collateral=not ours, ours=ours))

    def _last_words(self) -> str:
        with contextlib.suppress(OSError):
            return os.pread(self._crash, 64 << 10, 0).decode("utf-8", "replace")
        return ""

    def _die(self, death: Death) -> None:
        self.usable = False
        if self._timer is not None:
            self._timer.cancel()
        self._out.clear()
        self._stop_writing()
        self._stop_reading()
        self._close()
        if self._future is not None and not self._future.done():
            self._future.set_result(Reply(self._results, death))

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


_CLOSED = "closed file descriptors that are not its own"


def _described(exit_code: int) -> str:
    if exit_code == wire.LOST_PIPES:
        return _CLOSED
    if exit_code >= 0:
        return f"exited with status {exit_code}"
    return f"killed by {signal_name(-exit_code)}"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _mib(size: int) -> str:
    return f"{size / (1 << 20):g} MiB"
