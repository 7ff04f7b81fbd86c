"""Makes, opens, locks and maps the files of shared memory that segments lie in.

What is mapped for writing is so for this process alone: a child that it forks may only read it.
The child does not keep its parent's sign of life (filelock.py), so once the parent is dead the
slots go to others, and nobody may write to them any more (rule 5): a child that tries is
ended by the kernel (SIGSEGV). Reading stays, for views and headers that it has.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import stat
import time
from pathlib import Path
from typing import NamedTuple

from kvstore.errors import NoSpaceError
from kvstore.system.filelock import FileLock, try_lock
from kvstore.system.fork import in_each_child, no_forks
from kvstore.system.on_failure import on_failure

LOCK_WAIT_S = 1.0
"""Time to wait for the lock of a file that is taken over: whoever tests whether it is free holds it
for a moment."""
LOCK_POLL_S = 0.01

_libc = ctypes.CDLL(None, use_errno=True)
_mprotect = _libc.mprotect
_mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_madvise = _libc.madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class PyBuffer(ctypes.Structure):
    """`Py_buffer` of the stable C API: the only way to a read-only buffer's address."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


get_buffer = ctypes.pythonapi.PyObject_GetBuffer
get_buffer.argtypes = (ctypes.py_object, ctypes.POINTER(PyBuffer), ctypes.c_int)
release_buffer = ctypes.pythonapi.PyBuffer_Release
release_buffer.argtypes = (ctypes.POINTER(PyBuffer),)
release_buffer.restype = None
PYBUF_SIMPLE = 0


def address_of(view: memoryview) -> int:
    """Return the address at which a contiguous view begins; good for as long as the view is."""
    buffer = PyBuffer()
    get_buffer(view, ctypes.byref(buffer), PYBUF_SIMPLE)
    try:
        return int(buffer.buf or 0)
    finally:
        release_buffer(ctypes.byref(buffer))


class Room(NamedTuple):
    """The room of a file system, in bytes."""

    free_bytes: int
    total_bytes: int


class SharedMap(mmap.mmap):
    """A file mapped for reading."""

    def madvise(self, option: int, start: int = 0, length: int | None = None) -> None:
        """Do as `mmap.madvise` does, but without the GIL: to have pages mapped that nobody has
        touched yet takes the kernel 0.3 ms a MiB and now and then 0.1 s, in which other threads
        must run. Raises `OSError`.
        """
        with memoryview(self) as pages:  # it is not unmapped meanwhile
            size_bytes = len(pages) - start if length is None else length
            if _madvise(address_of(pages) + start, size_bytes, option) != 0:
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number))


class WritableMap(SharedMap):
    """A file mapped for reading and writing, shared with all who have it mapped."""

    def __new__(cls, fd: int, size_bytes: int) -> WritableMap:
        with no_forks:  # a child would have it and not know of it
            self = super().__new__(cls, fd, size_bytes)
            in_each_child(self)
        return self

    def after_fork_in_child(self) -> None:
        """Make the mapping read-only: the child can write no slot of its parent's any more."""
        if self.closed:
            return
        start = ctypes.addressof(ctypes.c_char.from_buffer(self))
        if _mprotect(start, len(self), mmap.PROT_READ) != 0:
            os.abort()  # less would leave a writer whom nobody knows of


def create(path: Path, size_bytes: int) -> mmap.mmap:
    """Make a file of `size_bytes` with all its pages and map it for writing.

    Raises `NoSpaceError` when the pages cannot be had, `FileExistsError` when there is such a file.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, size_bytes)
        return WritableMap(fd, size_bytes)
    except BaseException as e:  # Ctrl-C too: pages are taken for seconds
        path.unlink(missing_ok=True)
        if isinstance(e, OSError) and e.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise NoSpaceError(f"{path.parent}: no room for {size_bytes} bytes ({e})") from e
        raise
    finally:
        os.close(fd)


def reopen(path: Path, size_bytes: int) -> mmap.mmap:
    """Map a file of this user's own for writing.

    Raises `OSError` when it is not there, and `ValueError` when it does not have `size_bytes`.
    """
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        found_bytes = os.fstat(fd).st_size
        if found_bytes != size_bytes:
            raise ValueError(f"{path} has {found_bytes} bytes, not {size_bytes}")
        return WritableMap(fd, size_bytes)
    finally:
        os.close(fd)


def attach(path: Path, *, writable: bool, owner: int | None) -> mmap.mmap:
    """Map the file of somebody else's segment, for reading only unless `writable`.

    Raises `OSError` when it cannot be opened, and `ValueError` when it is empty or, with `owner`,
    is not a plain file of that user's.
    """
    fd, size_bytes = _opened(path, writable, owner)
    try:
        if writable:
            return WritableMap(fd, size_bytes)
        return SharedMap(fd, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
    finally:
        os.close(fd)


def _opened(path: Path, writable: bool, owner: int | None) -> tuple[int, int]:
    """Return the file, opened, and its size in bytes. Raises as `attach`."""
    # Not waiting for the other end: what is named may be a pipe.
    flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | flags)
    with on_failure(os.close, fd):
        status = os.fstat(fd)
        if owner is not None and (status.st_uid != owner or not stat.S_ISREG(status.st_mode)):
            raise ValueError(f"{path} is no plain file of user {owner}")
        if status.st_size == 0:
            raise ValueError(f"{path} is empty")
    return fd, status.st_size


def own(path: Path) -> FileLock:
    """Return the lock that says that this process is the segment's owner (segment/abandoned.py).

    Raises `FileNotFoundError` when it was freed, and `ValueError` when another has the lock.
    """
    give_up_at = time.monotonic() + LOCK_WAIT_S
    while (lock := try_lock(path, create=False)) is None:
        if time.monotonic() > give_up_at:
            raise ValueError(f"another process has the lock of {path}")
        time.sleep(LOCK_POLL_S)
    if os.fstat(lock.fd).st_nlink == 0:
        lock.release()
        raise FileNotFoundError(f"{path} was freed")
    return lock


def room(where: Path) -> Room:
    """Return the room of the file system that `where` is in. Raises `OSError`."""
    fs = os.statvfs(where)
    return Room(fs.f_bavail * fs.f_frsize, fs.f_blocks * fs.f_frsize)
