"""The worker's end of the zygote: starts it, orders children from it, hears of their ends, closes
it. What a child is asked is not here.
"""

from __future__ import annotations

import asyncio
import itertools
import mmap
import os
import secrets
import signal
import site
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

import penstock
from penstock.errors import ConfigError
from penstock.extraction import protocol as wire
from penstock.extraction.child import (
    ZYGOTE_PATIENCE,
    ChildProcess,
    Limits,
    memory_file,
    signal_name,
)
from penstock.extraction.protocol import Order

_SLOTS = 1024  # children at once, the dying included
_MARK = "_PENSTOCK_SANDBOX"  # in the environment of everything that comes of a zygote


class ZygoteProcess:
    """A clean process that has the pipeline imported, and forks children on order."""

    def __init__(self, pipeline_file: Path, limits: Limits) -> None:
        self.limits = limits
        self.alive = True
        self._loop = asyncio.get_running_loop()
        self._children: dict[int, ChildProcess] = {}
        self._numbers = itertools.count(1)
        self._free = list(range(_SLOTS))
        self._buffer = bytearray()
        self._ready: asyncio.Future[wire.Ready | wire.Refused | None] = self._loop.create_future()
        self._reaping: asyncio.Future[int] | None = None
        self._mark = secrets.token_hex(16)
        memory = memory_file()
        os.ftruncate(memory, _SLOTS * wire.SLOT_BYTES)
        self.progress = mmap.mmap(memory, _SLOTS * wire.SLOT_BYTES)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        settings = {
            "control": theirs.fileno(), "progress": memory, "parent": os.getpid(), "slots": _SLOTS,
            "memory": limits.memory, "output": limits.output, "retire_pages": limits.pages, "retire_bytes": limits.memory // 2,
        }  # fmt: skip
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "penstock.extraction.zygote_main", msgspec.json.encode(settings).decode(), str(pipeline_file)],
                stdin=subprocess.DEVNULL, stdout=_stderr(), stderr=_stderr(), pass_fds=(theirs.fileno(), memory), env={**_environment(), _MARK: self._mark},
                start_new_session=True,  # Ctrl-C is for the worker, which finishes its pages first
            )  # fmt: skip
        except BaseException:
            self._control.close()
            raise
        finally:
            theirs.close()
            os.close(memory)
        self._control.setblocking(False)
        self._loop.add_reader(self._control, self._readable)

    @classmethod
    async def start(
        cls, pipeline_file: Path, limits: Limits, *, again: bool = True
    ) -> ZygoteProcess:
        """Raises ConfigError where the file does not load, OSError where there is no process to be
        had.
        """
        self = cls(pipeline_file, limits)
        try:
            async with asyncio.timeout(limits.load_seconds):
                said = await self._ready
        except BaseException as e:
            self._gone("it was not waited for")
            await self._reaped()
            if isinstance(e, TimeoutError):
                sentence = (
                    f"{pipeline_file}: importing it takes longer than {limits.load_seconds:g} s"
                )
                raise ConfigError(
                    sentence, hint="a pipeline file declares; it does no work at its top level"
                ) from None
            raise
        if isinstance(said, wire.Ready):
            return self
        self._gone("it did not load")
        status = await self._reaped()
        if isinstance(said, wire.Refused):
            raise ConfigError(said.error, hint=said.hint)
        if (
            status == -signal.SIGKILL and again
        ):  # from outside, as when memory has run out: that says nothing about the file
            return await cls.start(pipeline_file, limits, again=False)
        raise ConfigError(
            f"{pipeline_file}: importing it {_ended(status)} the process",
            hint=f"try `{Path(sys.executable).name} {pipeline_file}`",
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def fork(self) -> ChildProcess:
        """Raises OSError where descriptors have run out."""
        if not self._free:
            raise OSError("too many children at once")
        slot = self._free.pop()
        wire.PROGRESS.pack_into(self.progress, slot * wire.SLOT_BYTES, wire.BETWEEN, 0.0)
        try:
            child = ChildProcess(self, next(self._numbers), slot)
        except BaseException:
            self._free.append(slot)
            raise
        self._children[child.number] = child
        return child

    def order(self, order: Order, argument: int, child: int, fds: Sequence[int] = ()) -> None:
        socket.send_fds(self._control, [wire.ORDER.pack(order, argument, child)], list(fds))

    def signal(self, child: int, number: int) -> None:
        if self.alive and child in self._children:
            try:
                self.order(Order.SIGNAL, number, child)
            except OSError:  # full: it reads nothing any more
                self._gone("the process that starts children does not answer")

    def must_have_buried(self, child: int) -> None:
        if self.alive and child in self._children:
            self._gone("the process that starts children does not answer")

    def _readable(self) -> None:
        try:
            data = self._control.recv(64 << 10)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._gone("the process that starts children died")
            return
        self._buffer += data
        while len(self._buffer) >= wire.LENGTH.size:
            (size,) = wire.LENGTH.unpack_from(self._buffer)
            if len(self._buffer) < wire.LENGTH.size + size:
                break
            raw = bytes(self._buffer[wire.LENGTH.size : wire.LENGTH.size + size])
            del self._buffer[: wire.LENGTH.size + size]
            try:
                notice = wire.decode_notice(raw)
            except msgspec.MsgspecError:
                self._gone("the process that starts children speaks nonsense")
                return
            self._heard(notice)

    def _heard(self, notice: wire.Notice) -> None:
        if isinstance(notice, wire.Ready | wire.Refused):
            if not self._ready.done():
                self._ready.set_result(notice)
        elif isinstance(notice, wire.Started) and notice.pid:
            if child := self._children.get(notice.child):
                child.pid = notice.pid
        elif child := self._children.pop(notice.child, None):
            if isinstance(notice, wire.Ended):
                child.ended(notice.exit_code)
            else:
                child.lost(f"no child process could be started: {notice.error}", ours=True)
            self._free.append(child.slot)

    def _gone(self, why: str, *, ours: bool = False) -> None:
        if not self.alive:
            return
        self.alive = False
        self._loop.remove_reader(self._control)
        self._control.close()
        children, self._children = list(self._children.values()), {}
        if not ours:  # its children die with it
            self._process.kill()
        self._reaping = self._loop.run_in_executor(None, self._bury, ours)
        for child in children:
            child.lost(why, ours=ours)
        if not self._ready.done():
            self._ready.set_result(None)

    def _bury(self, ours: bool) -> int:
        status = self._process.wait()
        if not ours and status < 0:  # killed, so it did not clean up
            _sweep(f"{_MARK}={self._mark}".encode())
        return status

    async def _reaped(self) -> int:
        return await self._reaping if self._reaping is not None else self._process.wait()

    async def close(self) -> None:
        """It sees the socket close, and ends everything that came of it."""
        self._gone("the sandbox was closed", ours=True)
        if self._reaping is not None:
            done, _ = await asyncio.wait([self._reaping], timeout=ZYGOTE_PATIENCE)
            if not done:
                self._process.kill()
                await self._reaping
        self.progress.close()


def _stderr() -> int:
    """User code prints to the worker's standard error, whatever the worker did to sys.stderr."""
    try:
        os.fstat(2)
    except OSError:
        return subprocess.DEVNULL
    return 2


def _sweep(mark: bytes) -> None:
    """Ends what user code had started in sessions of its own, when the zygote that would have done
    it was killed (Linux).
    """
    if not hasattr(signal, "pidfd_send_signal"):
        return
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            held = os.pidfd_open(
                int(pid)
            )  # so that it is this process that is killed, not the next with its number
        except OSError:
            continue
        try:
            if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                signal.pidfd_send_signal(held, signal.SIGKILL)
        except OSError:
            pass
        finally:
            os.close(held)


def _environment() -> dict[str, str]:
    """The child must find the very package the worker runs; one that is installed it finds by
    itself.
    """
    environment, root = dict(os.environ), str(Path(penstock.__file__).parent.parent)
    if root not in {*site.getsitepackages(), site.getusersitepackages()}:
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, (environment.get("PYTHONPATH"), root))
        )
    return environment


def _ended(status: int) -> str:
    return f"ended (status {status})" if status >= 0 else f"killed ({signal_name(-status)})"
