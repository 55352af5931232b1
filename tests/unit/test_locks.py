"""File locks that show which processes of one machine are running."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.errors import Unreachable
from penstock.locks import (
    FileLock,
    WorkerLock,
    dead_workers,
    forget_worker,
    holder_alive,
    note_of,
    worker_alive,
)
from penstock.private_files import open_own

HOLD = (
    "import sys, time; from penstock.locks import FileLock; "
    "assert FileLock(sys.argv[1]).try_acquire(); print('held', flush=True); time.sleep(60)"
)


def fork(work: Callable[[], None]) -> int:
    with warnings.catch_warnings():
        # Newer Pythons warn if a process with threads forks.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return pid


def test_a_lock_has_one_holder_and_is_free_after_release(tmp_path: Path) -> None:
    first, second = FileLock(tmp_path / "deep" / "a.lock"), FileLock(tmp_path / "deep" / "a.lock")
    assert first.try_acquire()
    assert first.try_acquire()
    assert not second.try_acquire()
    assert holder_alive(first.path)
    first.release()
    assert not holder_alive(first.path)
    assert second.try_acquire()
    assert first.held is False
    second.release()


def test_the_lock_of_a_killed_holder_is_free(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        assert not FileLock(path).try_acquire()
        assert holder_alive(path)
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    assert not holder_alive(path)
    lock = FileLock(path)
    assert lock.try_acquire()
    lock.release()


def test_a_forked_child_does_not_keep_the_lock_of_its_killed_parent(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    end_read, end_write = os.pipe()
    up_read, up_write = os.pipe()

    def parent() -> None:
        lock = FileLock(path)
        assert lock.try_acquire()

        def child() -> None:
            os.close(end_write)
            # A release in the child must not free the lock or close another file descriptor.
            lock.release()
            os.write(up_write, b"r" if holder_alive(path) else b"f")
            os.read(end_read, 1)  # waits until the test closes its end

        fork(child)
        assert os.read(up_read, 1) == b"r"
        os.write(up_write, b"k")
        os.kill(os.getpid(), signal.SIGKILL)

    _, status = os.waitpid(fork(parent), 0)
    try:
        assert os.WIFSIGNALED(status)
        assert os.read(up_read, 1) == b"k"
        assert not holder_alive(path)
    finally:
        for fd in (end_write, end_read, up_read, up_write):
            os.close(fd)


def test_a_child_that_ends_does_not_free_its_parents_lock(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "a.lock")
    assert lock.try_acquire()
    os.waitpid(fork(lambda: None), 0)
    assert holder_alive(lock.path)
    lock.release()


def test_a_shared_lock_is_not_reported_as_a_live_holder(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    path.touch()
    with open(path) as reader:
        fcntl.flock(reader, fcntl.LOCK_SH)
        assert not holder_alive(path)


def test_a_deleted_lock_file_is_replaced_by_a_new_lock(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "a.lock")
    assert lock.try_acquire()
    lock.path.unlink()
    assert not holder_alive(lock.path)
    other = FileLock(lock.path)
    assert other.try_acquire()
    assert holder_alive(lock.path)
    lock.release()
    assert holder_alive(lock.path)
    other.release()


def test_the_status_text_of_a_lock_is_cleared_by_the_next_holder(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "a.lock")
    assert lock.try_acquire()
    lock.note("no space left on device\nreally" + "x" * 1000)
    assert note_of(lock.path).startswith("no space left on device really")
    assert lock.path.stat().st_size == 512
    lock.note("short")
    assert note_of(lock.path) == "short"
    lock.release()
    assert lock.try_acquire()
    assert note_of(lock.path) == ""
    lock.release()
    assert note_of(tmp_path / "none") == ""


def test_a_killed_worker_is_listed_as_dead_until_it_is_forgotten(tmp_path: Path) -> None:
    alive = WorkerLock(tmp_path, "w-alive")
    assert alive.acquire()

    def hold_and_crash() -> None:
        assert WorkerLock(tmp_path, "w-dead").acquire()
        os.kill(os.getpid(), signal.SIGKILL)

    os.waitpid(fork(hold_and_crash), 0)
    assert worker_alive(tmp_path, "w-alive")
    assert not worker_alive(tmp_path, "w-dead")
    assert not worker_alive(tmp_path, "w-never")
    assert dead_workers(tmp_path) == ["w-dead"]
    assert forget_worker(tmp_path, "w-dead")
    assert not forget_worker(tmp_path, "w-alive")
    assert dead_workers(tmp_path) == []
    assert worker_alive(tmp_path, "w-alive")
    alive.release()
    assert list(tmp_path.iterdir()) == []


def test_two_workers_with_one_id_cannot_run_together(tmp_path: Path) -> None:
    first = WorkerLock(tmp_path, "w1")
    assert first.acquire()
    assert not WorkerLock(tmp_path, "w1").acquire(patience=0.02)
    first.release()


@pytest.mark.parametrize("worker_id", ["", "../w", "a/b", ".hidden", "a\0b"])
def test_a_worker_id_that_is_not_a_file_name_is_refused(tmp_path: Path, worker_id: str) -> None:
    with pytest.raises(ValueError, match="worker id"):
        WorkerLock(tmp_path, worker_id)


# -- files of other users --------------------------------------------------------------------------


def test_a_lock_file_is_never_a_link_and_its_target_is_not_changed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("keep me")
    lock = tmp_path / "a.lock"
    for target in (victim, tmp_path / "absent"):
        lock.symlink_to(target)
        with pytest.raises(Unreachable, match=r"a\.lock is a link") as caught:
            FileLock(lock).try_acquire()
        assert f"ls -l {lock}" in caught.value.hint
        with pytest.raises(Unreachable):
            holder_alive(lock)
        assert note_of(lock) == ""
        lock.unlink()
    assert victim.read_text() == "keep me"
    assert not (tmp_path / "absent").exists()


def test_a_lock_file_is_a_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.lock")
    with pytest.raises(Unreachable, match="is not a regular file"):
        FileLock(tmp_path / "a.lock").try_acquire()
    assert note_of(tmp_path / "a.lock") == "", "reading it does not wait"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_lock_file_of_another_user_is_refused(tmp_path: Path) -> None:
    lock = tmp_path / "a.lock"
    lock.write_text("")
    os.chown(lock, 4711, 4711)
    with pytest.raises(Unreachable, match=r"belongs to another user \(uid 4711\)"):
        FileLock(lock).try_acquire()
    # Root may look at the state of a user.
    os.chown(tmp_path, 4711, 4711)
    assert FileLock(lock).try_acquire()


def test_a_second_name_of_a_file_is_no_lock_in_a_shared_directory(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("keep me")
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    os.link(victim, shared / "a.lock")
    with pytest.raises(Unreachable, match="has a second name"):
        FileLock(shared / "a.lock").try_acquire()
    with pytest.raises(Unreachable, match="has a second name"):
        open_own(shared / "a.lock", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    assert victim.read_text() == "keep me"
    assert FileLock(shared / "b.lock").try_acquire()
