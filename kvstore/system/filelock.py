"""Locks (flock) by which a process shows that it lives: the kernel gives them back at its end.

flock belongs to the open file, and a forked child has its parent's open files: by itself a
child that lives would hold what its parent, killed meanwhile, held. So a child forked by
Python closes them before anything else of it runs. The alternative, a lock of the process
(fcntl.lockf), is no child's at all; but it ends as soon as *any* descriptor of the file is
closed in the process, and a process that is node and client at once opens and closes the
same files all the time. Nor could such a process ask whether it holds the lock itself.

A child that C code forks without Python, and that runs no other program, keeps the lock.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from kvstore.system.fork import in_each_child, no_forks
from kvstore.system.on_failure import on_failure

_AS_IT_IS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""Flags for opening a file as it is: another user may have put a link or a pipe in its place."""


class FileLock:
    """An open file that may be locked. Not to be used by two threads at once."""

    def __init__(self, path: Path, flags: int) -> None:
        """Open it; raises as `os.open` does."""
        with no_forks:  # a child would have the descriptor and not know of it
            self._fd = os.open(path, flags | _AS_IT_IS, 0o600)
            _open.add(self)

    @property
    def fd(self) -> int:
        """Return the descriptor of the file; -1 after `release` or `close`, and in a forked
        child."""
        return self._fd

    def take(self, *, shared: bool = False) -> bool:
        """Take the lock, `shared` or alone, if it can be had without waiting. Return whether it
        was. It is this process's until `release`."""
        try:
            fcntl.flock(self._fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def is_at(self, path: Path) -> bool:
        """Return whether the open file is the one at `path`; otherwise others may lock another one
        there.

        Raises `OSError` when that cannot be told, for example because the directory may not be
        entered.
        """
        try:
            there = path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        return os.path.samestat(os.fstat(self._fd), there)

    def release(self) -> None:
        """Give the lock back and close the file. Safe to call twice, and in a forked child, which
        holds nothing."""
        with no_forks:
            if self._fd >= 0:
                try:
                    # At once, also where a child has just been forked and has yet to close it.
                    fcntl.flock(self._fd, fcntl.LOCK_UN)
                finally:
                    self.close()

    def close(self) -> None:
        """Close the file in this process; another process with the same open file keeps the
        lock."""
        _open.discard(self)
        fd, self._fd = self._fd, -1
        os.close(fd)


_open: set[FileLock] = set()
"""Open locks, also those whose owner forgot them: they are locked until the process ends."""


class _Children:
    def after_fork_in_child(self) -> None:
        for lock in list(_open):
            lock.close()


_children = _Children()
in_each_child(_children)


def try_lock(path: Path, *, create: bool = True) -> FileLock | None:
    """Return the exclusive lock on the file `path`; None when another holds it.

    Raises `FileNotFoundError` when the file is not there and may not be created, and `OSError` when
    it cannot be opened for writing.
    """
    lock = FileLock(path, os.O_RDWR | (os.O_CREAT if create else 0))
    with on_failure(lock.release):
        if lock.take():
            return lock
    lock.release()
    return None


def is_locked(path: Path) -> bool:
    """Return whether somebody holds the lock on `path`, this process included."""
    try:
        fd = os.open(path, os.O_RDONLY | _AS_IT_IS)
    except FileNotFoundError:
        return False
    try:
        return fd_is_locked(fd)
    finally:
        os.close(fd)


def fd_is_locked(fd: int) -> bool:
    """Return whether somebody holds the lock on the open file `fd`; a lock taken through this very
    descriptor does not count, and is given back."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False
