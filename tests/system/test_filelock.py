"""Locks that prove life: each ends with its process, whoever else lives."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from open_files import open_files
from own_python import holds_in_child
from redis_servers import wait_until
from warm_processes import WarmProcess

from kvstore.system.filelock import FileLock, is_locked, try_lock
from kvstore.system.fork import in_each_child

HOLD = """
import fcntl, sys, time
file = open(sys.argv[1], "a")
fcntl.flock(file, fcntl.LOCK_EX)
print(1, flush=True)
time.sleep(60)
"""


def test_a_lock_is_held_by_one_and_free_after_its_process(tmp_path):
    path = tmp_path / "lock"
    holder = subprocess.Popen([sys.executable, "-c", HOLD, path], stdout=subprocess.PIPE)
    holder.stdout.readline()
    assert is_locked(path)
    assert try_lock(path) is None
    holder.kill()
    holder.wait()
    assert not is_locked(path)
    lock = try_lock(path)
    assert lock is not None
    lock.release()
    assert not is_locked(path)


def test_asking_whether_a_file_is_locked_does_not_lock_it(tmp_path):
    path = tmp_path / "lock"
    path.touch()
    assert not is_locked(path)
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_lock_file_that_is_not_there_is_not_locked(tmp_path):
    assert not is_locked(tmp_path / "absent")


def hold_and_fork(path: str) -> None:
    """Take the lock, say the number of a child that waits, and wait."""
    assert try_lock(Path(path)) is not None
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    print(child, flush=True)
    signal.pause()


def test_a_lock_is_free_when_its_process_was_killed_although_a_child_of_it_lives(tmp_path):
    path = tmp_path / "lock"
    holder = WarmProcess(hold_and_fork, str(path), stdout=subprocess.PIPE)
    child = int(holder.stdout.readline())
    try:
        assert is_locked(path)
        holder.kill()
        holder.wait(10)
        os.kill(child, 0)
        wait_until(lambda: not is_locked(path), "the lock is free")
        os.kill(child, 0)
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("shared", [False, True])
def test_a_child_that_ends_or_releases_takes_no_lock_from_its_parent(tmp_path, shared):
    lock = FileLock(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    assert lock.take(shared=shared)
    assert holds_in_child(lambda: lock.release() is None and lock.fd == -1)
    assert try_lock(tmp_path / "lock") is None
    lock.release()


def test_a_child_of_any_moment_has_no_descriptor_of_a_lock(tmp_path):
    """Of those that another thread takes and gives back all the time."""
    done = threading.Event()

    def work():
        while not done.is_set():
            lock = try_lock(tmp_path / "lock")
            assert lock is not None
            lock.release()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(20):
            child = os.fork()
            if child == 0:
                held = [path for path in Path("/proc/self/fd").iterdir() if path.exists()]
                os._exit(any(path.readlink().name == "lock" for path in held))
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        done.set()
        thread.join()


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOLCK, "no locks available"), KeyboardInterrupt()]
)
def test_a_lock_that_cannot_be_asked_for_leaves_no_file_open(tmp_path, monkeypatch, error):
    def refused(*_):
        raise error

    before = open_files()
    monkeypatch.setattr("fcntl.flock", refused)
    with pytest.raises(type(error)):
        try_lock(tmp_path / "lock")
    monkeypatch.undo()
    assert open_files() == before


class Failing:
    def after_fork_in_child(self):
        raise RuntimeError("one of the others")


def test_one_that_fails_in_a_child_keeps_no_other_from_its_part(tmp_path):
    """Else the child could go on writing to what is its parent's (rule 5)."""
    locks = [FileLock(tmp_path / f"{i}", os.O_RDWR | os.O_CREAT) for i in range(3)]
    failing = [Failing() for _ in range(20)]
    for one in failing:
        in_each_child(one)
    assert holds_in_child(lambda: all(lock.fd == -1 for lock in locks))
    for lock in locks:
        lock.release()
