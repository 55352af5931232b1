"""The zygote process: imports the pipeline once, forks and reaps children, kills their orphans.

See `child_main` for the work of a child.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import mmap
import os
import resource
import select
import signal
import socket
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import NoReturn

import msgspec

from penstock.authoring.load import load as load_pipeline
from penstock.authoring.page import Page
from penstock.authoring.pipeline import Pipeline
from penstock.errors import PenstockError
from penstock.extraction import protocol as wire
from penstock.extraction.child_main import Child, ZygoteSettings, flush_output, move_descriptor
from penstock.extraction.in_process import failed, printable
from penstock.model import ErrorClass

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3


# -- the operating system --------------------------------------------------------------------------


def _libc(name: str, *args: int) -> bool:
    """Call a libc function. Return False if it fails or this system does not have it."""
    try:
        function = getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError, TypeError):
        return False
    return bool(function(*args) >= 0)


def die_with(parent: int, signal_number: int = signal.SIGKILL) -> None:
    """End this process when the parent ends for any reason.

    On other systems than Linux it only ends if the parent has already ended.
    """
    if sys.platform == "linux":
        _libc("prctl", _PR_SET_PDEATHSIG, signal_number, 0, 0, 0)
    if signal_number and os.getppid() != parent:  # the parent ended before the call above
        os._exit(0)


def keep_freed_memory(trim_threshold: int = 1 << 30) -> None:
    """Set glibc to keep up to `trim_threshold` bytes of freed memory.

    Otherwise each parsed page, and each large body, returns its memory to the system, and the next
    one faults it in again. In a worker, keeping it saves a fifth of the time of a page.
    """
    for option, value in (
        (_M_MMAP_THRESHOLD, 1 << 30),
        (_M_TRIM_THRESHOLD, trim_threshold),
        (_M_TOP_PAD, 16 << 20),
    ):
        _libc("mallopt", option, value)


def _children() -> set[int]:
    """Return the pids of this process's children and adopted orphans, if the system lists them."""
    pids: set[int] = set()
    with contextlib.suppress(OSError):
        for task in os.listdir("/proc/self/task"):
            pids.update(map(int, Path(f"/proc/self/task/{task}/children").read_text().split()))
    return pids


def _ignore_signal(*_: object) -> None:
    """Do nothing. Unlike SIG_IGN, a handler is not inherited by programs that user code starts."""


# -- the zygote ------------------------------------------------------------------------------------


class Zygote:
    """Process that has imported the pipeline, but runs none of its functions.

    It forks children on command, reaps them, and kills processes that they leave behind.
    """

    def __init__(
        self,
        settings: ZygoteSettings,
        control: socket.socket,
        progress: mmap.mmap,
        pipeline: Pipeline,
    ) -> None:
        self._settings, self._control, self._progress, self._pipeline = (
            settings,
            control,
            progress,
            pipeline,
        )
        self._pids: dict[int, int] = {}  # child number -> pid
        # Processes that the pipeline file started. They are kept until the end.
        self._started_by_pipeline = _children()
        self._wake, wake = os.pipe()
        for fd in (self._wake, wake):
            os.set_blocking(fd, False)
        signal.signal(signal.SIGCHLD, _ignore_signal)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self._close_in_child = [control.fileno(), self._wake, wake]
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        self._poll.register(self._wake, select.POLLIN)
        self._watch_parent()

    def _watch_parent(self) -> None:
        """Watch the parent with a pidfd, if possible, and clean up after its end.

        Being killed together with the parent would leave processes behind that children started.
        """
        try:
            parent = os.pidfd_open(self._settings.parent)
        except (AttributeError, OSError):
            return
        self._close_in_child.append(parent)
        self._poll.register(parent, select.POLLIN)
        die_with(self._settings.parent, 0)
        if os.getppid() != self._settings.parent:
            self.end()

    def run(self) -> NoReturn:
        self._send_notice(wire.Ready(os.getpid()))
        while True:
            for fd, _ in self._poll.poll():
                if fd == self._wake:
                    with contextlib.suppress(BlockingIOError):
                        os.read(fd, 4096)
                    self._reap()
                elif fd == self._control.fileno():
                    self._handle_command()
                else:
                    self.end()

    def _send_notice(self, notice: wire.Notice) -> None:
        raw = wire.encode_notice(notice)
        try:
            self._control.sendall(wire.LENGTH.pack(len(raw)) + raw)
        except OSError:
            self.end()

    def _handle_command(self) -> None:
        try:
            raw, fds, _, _ = socket.recv_fds(self._control, wire.COMMAND.size, 4)
            while raw and len(raw) < wire.COMMAND.size:
                raw += self._control.recv(wire.COMMAND.size - len(raw)) or self.end()
        except OSError:
            self.end()
        if not raw:
            self.end()
        command, argument, child = wire.COMMAND.unpack(raw)
        if command == wire.Command.FORK:
            self._fork(child, argument, fds)
        elif child in self._pids:
            self._signal(self._pids[child], argument)

    def _fork(self, child: int, progress_index: int, fds: list[int]) -> None:
        try:
            pid = os.fork()
        except OSError as e:
            self._send_notice(wire.Started(child, 0, e.strerror or str(e)))
        else:
            if not pid:
                self._become_child(progress_index, fds)
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)  # also done in the child: the order of the two is not known
            self._pids[child] = pid
            self._send_notice(wire.Started(child, pid))
        for fd in fds:
            os.close(fd)

    def _become_child(self, progress_index: int, fds: list[int]) -> NoReturn:
        status = wire.BROKEN
        try:
            zygote = os.getppid()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for fd in self._close_in_child:
                os.close(fd)
            with contextlib.suppress(OSError):
                os.setpgid(0, 0)
            die_with(zygote)
            requests, answers, crash = map(move_descriptor, fds[:3])
            bodies = mmap.mmap(fds[3], wire.SHARED_BYTES)
            os.close(fds[3])
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            faulthandler.enable(file=crash, all_threads=True)
            Child(
                self._settings,
                self._pipeline,
                requests,
                answers,
                crash,
                bodies,
                self._progress,
                progress_index,
            ).serve()
            status = 0
        # User code closed the descriptors of the sandbox, or the worker has ended.
        except (OSError, EOFError):
            status = wire.LOST_PIPES
        except BaseException:
            traceback.print_exc()
        finally:
            flush_output()
            os._exit(status)

    def _signal(self, pid: int, number: int) -> None:
        with contextlib.suppress(OSError):
            os.kill(pid, number)
        if number == signal.SIGKILL:
            with contextlib.suppress(OSError):
                os.killpg(pid, number)

    def _reap(self) -> None:
        """Reap ended children and report their exit codes. Kill processes that they started."""
        for child, pid in list(self._pids.items()):
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            # The child has ended and is not reaped yet. Until then no other process can get the
            # pid, so its process group is killed first.
            with contextlib.suppress(OSError):
                os.killpg(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            del self._pids[child]
            self._send_notice(wire.Ended(child, os.waitstatus_to_exitcode(status)))
        # Orphans of the children, which this process has adopted.
        for pid in _children() - self._started_by_pipeline - set(self._pids.values()):
            self._signal(pid, signal.SIGKILL)
            with contextlib.suppress(OSError):
                os.waitpid(pid, os.WNOHANG)

    def end(self) -> NoReturn:
        """Kill all children and all processes that they or the pipeline file started, and exit."""
        for pid in self._pids.values():
            self._signal(pid, signal.SIGKILL)
        for _ in range(500):
            for pid in _children() | set(self._pids.values()):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                break
            time.sleep(0.01)
        os._exit(0)


def main() -> NoReturn:
    settings = msgspec.json.decode(sys.argv[1], type=ZygoteSettings)
    die_with(settings.parent)
    # The worker handles these signals: it finishes its pages in the children first.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _ignore_signal)
    if sys.platform == "linux":
        _libc("prctl", _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    keep_freed_memory()
    control = socket.socket(fileno=move_descriptor(settings.control))
    progress_fd = move_descriptor(settings.progress)
    progress = mmap.mmap(progress_fd, settings.slots * wire.PROGRESS_BYTES)
    os.close(progress_fd)
    with contextlib.suppress(AttributeError):
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    try:
        pipeline = load_pipeline(Path(sys.argv[2]))
        # Import the parser here once, so that the children do not have to.
        Page("http://localhost/", b"<p>").css("p::text").get()
    except BaseException as e:
        known = isinstance(e, PenstockError)
        if not known:
            traceback.print_exc()
        load_failed = wire.LoadFailed(
            printable(str(e))
            if known
            else f"{printable(sys.argv[2])}: {failed(e, ErrorClass.PERMANENT).error}",
            getattr(e, "hint", ""),
        )
        raw = wire.encode_notice(load_failed)
        control.sendall(wire.LENGTH.pack(len(raw)) + raw)
        os._exit(0)
    # Again, because the pipeline file may have set other handlers.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _ignore_signal)
    warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*fork.*")
    gc.collect()
    gc.freeze()  # the children's garbage collector must not write to pages shared with the zygote
    Zygote(settings, control, progress, pipeline).run()


if __name__ == "__main__":
    main()
