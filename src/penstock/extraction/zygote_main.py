"""The zygote: imports the pipeline once, forks children on order, buries them, and kills what they
leave behind. What a child does is not here.
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
from penstock.extraction.child_main import Child, Settings, flush_output, high
from penstock.extraction.in_process import failed, printable
from penstock.extraction.protocol import Order
from penstock.model import ErrorClass

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3


# -- the operating system --------------------------------------------------------------------------


def _libc(name: str, *args: int) -> bool:
    """False where this system has no such call."""
    try:
        function = getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError, TypeError):
        return False
    return bool(function(*args) >= 0)


def die_with(parent: int, signal_number: int = signal.SIGKILL) -> None:
    """When the parent goes, however it goes, this process goes too (Linux)."""
    if sys.platform == "linux":
        _libc("prctl", _PR_SET_PDEATHSIG, signal_number, 0, 0, 0)
    if signal_number and os.getppid() != parent:  # it went before the line above
        os._exit(0)


def keep_freed_memory() -> None:
    """glibc: do not return a parsed page's memory to the system after each page, only to fault it
    in again for the next.
    """
    for option, value in (
        (_M_MMAP_THRESHOLD, 1 << 30),
        (_M_TRIM_THRESHOLD, 1 << 30),
        (_M_TOP_PAD, 16 << 20),
    ):
        _libc("mallopt", option, value)


def _children() -> set[int]:
    """This process's children, adopted ones included, as far as the system tells."""
    pids: set[int] = set()
    with contextlib.suppress(OSError):
        for task in os.listdir("/proc/self/task"):
            pids.update(map(int, Path(f"/proc/self/task/{task}/children").read_text().split()))
    return pids


def _has_ended(pid: int) -> bool:
    """Looks without burying."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _nothing(*_: object) -> None:
    """A handler rather than SIG_IGN: programs that user code starts would inherit the latter."""


# -- the zygote ------------------------------------------------------------------------------------


class Zygote:
    """Has the pipeline imported, runs none of it; forks children on order, buries them, kills what
    they leave behind.
    """

    def __init__(
        self, settings: Settings, control: socket.socket, progress: mmap.mmap, pipeline: Pipeline
    ) -> None:
        self._settings, self._control, self._progress, self._pipeline = (
            settings,
            control,
            progress,
            pipeline,
        )
        self._pids: dict[int, int] = {}  # child number -> pid
        self._own = _children()  # what the pipeline file started: stays until the end
        self._wake, wake = os.pipe()
        for fd in (self._wake, wake):
            os.set_blocking(fd, False)
        signal.signal(signal.SIGCHLD, _nothing)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self._close_in_child = [control.fileno(), self._wake, wake]
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        self._poll.register(self._wake, select.POLLIN)
        self._watch_parent()

    def _watch_parent(self) -> None:
        """Where the parent's death can be seen, we clean up after it rather than die with it:
        children's children go too.
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
        self._tell(wire.Ready(os.getpid()))
        while True:
            for fd, _ in self._poll.poll():
                if fd == self._wake:
                    with contextlib.suppress(BlockingIOError):
                        os.read(fd, 4096)
                    self._bury()
                elif fd == self._control.fileno():
                    self._obey()
                else:
                    self.end()

    def _tell(self, notice: wire.Notice) -> None:
        raw = wire.encode_notice(notice)
        try:
            self._control.sendall(wire.LENGTH.pack(len(raw)) + raw)
        except OSError:
            self.end()

    def _obey(self) -> None:
        try:
            raw, fds, _, _ = socket.recv_fds(self._control, wire.ORDER.size, 4)
            while raw and len(raw) < wire.ORDER.size:
                raw += self._control.recv(wire.ORDER.size - len(raw)) or self.end()
        except OSError:
            self.end()
        if not raw:
            self.end()
        order, argument, child = wire.ORDER.unpack(raw)
        if order == Order.FORK:
            self._fork(child, argument, fds)
        elif child in self._pids:
            self._signal(self._pids[child], argument)

    def _fork(self, child: int, slot: int, fds: list[int]) -> None:
        try:
            pid = os.fork()
        except OSError as e:
            self._tell(wire.Started(child, 0, e.strerror or str(e)))
        else:
            if not pid:
                self._become_child(slot, fds)
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)  # here and in the child: whoever is first
            self._pids[child] = pid
            self._tell(wire.Started(child, pid))
        for fd in fds:
            os.close(fd)

    def _become_child(self, slot: int, fds: list[int]) -> NoReturn:
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
            requests, answers, crash = map(high, fds[:3])
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
                slot,
            ).serve()
            status = 0
        except (OSError, EOFError):  # user code closed our descriptors, or the worker is gone
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

    def _bury(self) -> None:
        for child, pid in list(self._pids.items()):
            if not _has_ended(pid):
                continue
            # Its group first, while the pid is still taken and can be nobody else's.
            with contextlib.suppress(OSError):
                os.killpg(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            del self._pids[child]
            self._tell(wire.Ended(child, os.waitstatus_to_exitcode(status)))
        for pid in (
            _children() - self._own - set(self._pids.values())
        ):  # orphans of our children, adopted by us
            self._signal(pid, signal.SIGKILL)
            with contextlib.suppress(OSError):
                os.waitpid(pid, os.WNOHANG)

    def end(self) -> NoReturn:
        """Nothing stays: children, what they started, what the pipeline file started."""
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
    settings = msgspec.json.decode(sys.argv[1], type=Settings)
    die_with(settings.parent)
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
    ):  # meant for the worker, which finishes its pages with us first
        signal.signal(number, _nothing)
    if sys.platform == "linux":
        _libc("prctl", _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    keep_freed_memory()
    control = socket.socket(fileno=high(settings.control))
    progress_fd = high(settings.progress)
    progress = mmap.mmap(progress_fd, settings.slots * wire.SLOT_BYTES)
    os.close(progress_fd)
    with contextlib.suppress(AttributeError):
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    try:
        pipeline = load_pipeline(Path(sys.argv[2]))
        Page("http://localhost/", b"<p>").css(
            "p::text"
        ).get()  # the parser is imported here, once, not in each child
    except BaseException as e:
        known = isinstance(e, PenstockError)
        if not known:
            traceback.print_exc()
        refused = wire.Refused(
            printable(str(e))
            if known
            else f"{printable(sys.argv[2])}: {failed(e, ErrorClass.PERMANENT).error}",
            getattr(e, "hint", ""),
        )
        raw = wire.encode_notice(refused)
        control.sendall(wire.LENGTH.pack(len(raw)) + raw)
        os._exit(0)
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
    ):  # again: the file may have set its own
        signal.signal(number, _nothing)
    warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*fork.*")
    gc.collect()
    gc.freeze()  # what is loaded stays shared with the children: their collector does not touch it
    Zygote(settings, control, progress, pipeline).run()


if __name__ == "__main__":
    main()
