"""Handle of the zygote process: starts it, sends commands, receives notices, closes it.

See `child` for the requests to a child.
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
from penstock.extraction.child import ZYGOTE_TIMEOUT, ChildProcess, Limits, memory_file, signal_name
from penstock.model import Reason
from penstock.rules.reasons import sentence

_MAX_CHILDREN = 1024  # children that exist at the same time, including those being killed
# Environment variable of a zygote, which all processes inherit that it or its children start.
_ENV_TAG = "_PENSTOCK_SANDBOX"


class ZygoteProcess:
    """A separate process that has imported the pipeline and forks children on command."""

    def __init__(self, pipeline_file: Path, limits: Limits) -> None:
        self.limits = limits
        self.alive = True
        self._loop = asyncio.get_running_loop()
        self._children: dict[int, ChildProcess] = {}
        self._numbers = itertools.count(1)
        self._free_progress = list(range(_MAX_CHILDREN))
        self._buffer = bytearray()
        self._ready: asyncio.Future[wire.Ready | wire.LoadFailed | None] = (
            self._loop.create_future()
        )
        self._reaping: asyncio.Future[int] | None = None
        self._tag = secrets.token_hex(16)
        memory = memory_file()
        os.ftruncate(memory, _MAX_CHILDREN * wire.PROGRESS_BYTES)
        self.progress = mmap.mmap(memory, _MAX_CHILDREN * wire.PROGRESS_BYTES)
        self._control, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        settings = {
            "control": child_end.fileno(),
            "progress": memory,
            "parent": os.getpid(),
            "slots": _MAX_CHILDREN,
            "memory": limits.memory,
            "output": limits.output,
            "retire_pages": limits.pages,
            "retire_bytes": limits.memory // 2,
        }
        try:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "penstock.extraction.zygote_main",
                    msgspec.json.encode(settings).decode(),
                    str(pipeline_file),
                ],
                stdin=subprocess.DEVNULL,
                stdout=_stderr(),
                stderr=_stderr(),
                pass_fds=(child_end.fileno(), memory),
                env={**_environment(), _ENV_TAG: self._tag},
                # Ctrl-C must reach the worker only, which finishes its pages first.
                start_new_session=True,
            )
        except BaseException:
            self._control.close()
            raise
        finally:
            child_end.close()
            os.close(memory)
        self._control.setblocking(False)
        self._loop.add_reader(self._control, self._readable)

    @classmethod
    async def start(
        cls, pipeline_file: Path, limits: Limits, *, again: bool = True
    ) -> ZygoteProcess:
        """Start a zygote. Raise ConfigError if the file does not load, OSError if no process can
        be started.
        """
        self = cls(pipeline_file, limits)
        try:
            async with asyncio.timeout(limits.load_seconds):
                answer = await self._ready
        except BaseException as e:
            self._shut_down(Reason.ZYGOTE, "was not waited for")
            await self._exit_status()
            if isinstance(e, TimeoutError):
                message = (
                    f"{pipeline_file}: importing it takes longer than {limits.load_seconds:g} s"
                )
                raise ConfigError(
                    message, hint="do no work at the top level of a pipeline file"
                ) from None
            raise
        if isinstance(answer, wire.Ready):
            return self
        self._shut_down(Reason.ZYGOTE, "did not load")
        status = await self._exit_status()
        if isinstance(answer, wire.LoadFailed):
            raise ConfigError(answer.error, hint=answer.hint)
        # The kill came from outside, for example because memory ran out. The file is not the cause.
        if status == -signal.SIGKILL and again:
            return await cls.start(pipeline_file, limits, again=False)
        raise ConfigError(
            f"{pipeline_file}: importing it {_describe_status(status)} the process",
            hint=f"try `{Path(sys.executable).name} {pipeline_file}`",
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def fork(self) -> ChildProcess:
        """Fork a child. Raise OSError if there are too many children or open descriptors."""
        if not self._free_progress:
            raise OSError("too many children at once")
        progress_index = self._free_progress.pop()
        wire.PROGRESS.pack_into(
            self.progress, progress_index * wire.PROGRESS_BYTES, wire.BETWEEN, 0.0
        )
        try:
            child = ChildProcess(self, next(self._numbers), progress_index)
        except BaseException:
            self._free_progress.append(progress_index)
            raise
        self._children[child.number] = child
        return child

    def send_command(
        self, command: wire.Command, argument: int, child: int, fds: Sequence[int] = ()
    ) -> None:
        socket.send_fds(self._control, [wire.COMMAND.pack(command, argument, child)], list(fds))

    def signal(self, child: int, number: int) -> None:
        if self.alive and child in self._children:
            try:
                self.send_command(wire.Command.SIGNAL, number, child)
            except OSError:  # the socket is full, because the zygote no longer reads
                self._shut_down(Reason.ZYGOTE, "does not answer")

    def check_reaped(self, child: int) -> None:
        """Give up the zygote if it has not reported the exit of this killed child."""
        if self.alive and child in self._children:
            self._shut_down(Reason.ZYGOTE, "does not answer")

    def _readable(self) -> None:
        try:
            data = self._control.recv(64 << 10)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._shut_down(Reason.ZYGOTE, "died")
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
                self._shut_down(Reason.ZYGOTE, "speaks nonsense")
                return
            self._handle_notice(notice)

    def _handle_notice(self, notice: wire.Notice) -> None:
        if isinstance(notice, wire.Ready | wire.LoadFailed):
            if not self._ready.done():
                self._ready.set_result(notice)
        elif isinstance(notice, wire.Started) and notice.pid:
            if child := self._children.get(notice.child):
                child.pid = notice.pid
        elif child := self._children.pop(notice.child, None):
            if isinstance(notice, wire.Ended):
                child.on_exit(notice.exit_code)
            else:
                reason = sentence(Reason.NO_CHILD, detail=notice.error)
                child.on_zygote_lost(Reason.NO_CHILD, reason, internal=True)
            self._free_progress.append(child.progress_index)

    def _shut_down(self, reason: Reason, *facts: object, closing: bool = False) -> None:
        """Close the connection to the zygote, and finish the requests of its children.

        `closing` is True if the sandbox is being closed: the zygote then kills its children and
        exits. Otherwise the zygote is killed, and its children with it.
        """
        if not self.alive:
            return
        self.alive = False
        self._loop.remove_reader(self._control)
        self._control.close()
        children, self._children = list(self._children.values()), {}
        if not closing:  # the children are killed with the zygote
            self._process.kill()
        self._reaping = self._loop.run_in_executor(None, self._wait_for_exit, closing)
        for child in children:
            child.on_zygote_lost(reason, sentence(reason, *facts), internal=closing)
        if not self._ready.done():
            self._ready.set_result(None)

    def _wait_for_exit(self, closing: bool) -> int:
        status = self._process.wait()
        if not closing and status < 0:  # the zygote was killed before it could clean up
            _kill_tagged(f"{_ENV_TAG}={self._tag}".encode())
        return status

    async def _exit_status(self) -> int:
        return await self._reaping if self._reaping is not None else self._process.wait()

    async def close(self) -> None:
        """Close the socket. The zygote then ends all processes that it or its children started."""
        self._shut_down(Reason.SANDBOX_CLOSED, closing=True)
        if self._reaping is not None:
            done, _ = await asyncio.wait([self._reaping], timeout=ZYGOTE_TIMEOUT)
            if not done:
                self._process.kill()
                await self._reaping
        self.progress.close()


def _stderr() -> int:
    """Return the worker's standard error, for user code. The worker may replace sys.stderr."""
    try:
        os.fstat(2)
    except OSError:
        return subprocess.DEVNULL
    return 2


def _kill_tagged(tag: bytes) -> None:
    """Kill processes that user code started in other sessions, after a zygote was killed.

    Linux only. A zygote that ends normally kills them itself.
    """
    if not hasattr(signal, "pidfd_send_signal"):
        return
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            # The pidfd ensures that this process is killed, and not a later one with the same pid.
            held = os.pidfd_open(int(pid))
        except OSError:
            continue
        try:
            if tag in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                signal.pidfd_send_signal(held, signal.SIGKILL)
        except OSError:
            pass
        finally:
            os.close(held)


def _environment() -> dict[str, str]:
    """Return an environment in which the child imports the same package as the worker.

    An installed package is found without PYTHONPATH.
    """
    environment, root = dict(os.environ), str(Path(penstock.__file__).parent.parent)
    if root not in {*site.getsitepackages(), site.getusersitepackages()}:
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, (environment.get("PYTHONPATH"), root))
        )
    return environment


def _describe_status(status: int) -> str:
    return f"ended (status {status})" if status >= 0 else f"killed ({signal_name(-status)})"
