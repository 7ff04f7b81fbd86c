"""Opens the file that a disk device lies in, and reads and writes it past the page cache.

`DIR/kvstore.disk` has its whole size from the start on (fallocate), so no write can find the file
system full, and no byte more is ever taken: what the file system needs for itself, its own map of
the file and the directory, is left out of the size (`SHARE_OF_FILE_SYSTEM`). Its lock (flock) is
the sign that a node uses it; there is no other file in DIR.

Where that would not hold, the directory is refused: file systems that are not named here do not
allocate for good, keep the file in memory, or lie on other hosts, where a lock may hold or not.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.core.disk.base import DISK_PAGE
from kvstore.errors import NoSpaceError, UsageError
from kvstore.segment.disk.base import aligned
from kvstore.segment.disk.device import superblock_of
from kvstore.segment.disk.format import SUPERBLOCK_COPIES, version_of
from kvstore.system.filelock import FileLock
from kvstore.system.memory_files import room
from kvstore.system.on_failure import on_failure

if TYPE_CHECKING:
    from typing_extensions import Buffer

FILE_NAME = "kvstore.disk"
LEFT_PERCENT = 5
"""Share of the file system that stays free for others."""
SHARE_OF_FILE_SYSTEM, LEAST_FOR_FILE_SYSTEM = 1024, 64 << 10
"""One part in so many of a device, and at least that many bytes, are for what `du` counts besides
the file's own pages. An extent of ext4 or XFS takes 16 bytes, and regions are written in order."""
GOOD = {0xEF53: "ext4", 0x58465342: "xfs"}
_OTHERS = """794c7630 overlayfs 01021994 tmpfs 858458f6 ramfs 6969 nfs ff534d42 cifs fe534d42 smb
    65735546 fuse 01021997 9p 00c36400 ceph 0bd00bd0 lustre 47504653 gpfs 19830326 beegfs
    5346414f afs 9123683e btrfs 2fc12fc1 zfs ca451a4e bcachefs f2f52010 f2fs"""
"""`f_type` of statfs(2), and the name that it has."""
_WORDS = _OTHERS.split()
NAMES = GOOD | {int(m, 16): name for m, name in zip(_WORDS[::2], _WORDS[1::2], strict=True)}
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_THERE = "must be a directory that is there: make it, for the user of the node"
_NOT_OURS = "is no disk of kvstore's: move it away"
_libc = ctypes.CDLL(None, use_errno=True)


def file_system_of(where: Path) -> str:
    """Return the name of the file system that a directory is in. Raises `OSError`."""
    answer = ctypes.create_string_buffer(256)
    if _libc.statfs(os.fsencode(where), answer) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(where))
    magic = int.from_bytes(answer.raw[:8], "little") & 0xFFFFFFFF
    return NAMES.get(magic, f"a file system of type {magic:#x}")


class DirectFile:
    """A `BlockFile` that is opened with O_DIRECT and locked. Not shared with forked children."""

    def __init__(self, path: Path, lock: FileLock, size_bytes: int) -> None:
        """Use `open_file`."""
        self._path, self._lock = path, lock
        self.name, self.size_bytes = str(path), size_bytes

    def read(self, offset: int, into: memoryview) -> None:
        while into:
            count = os.preadv(self._lock.fd, [into], offset)
            if count <= 0 or count % DISK_PAGE:
                raise OSError(errno.EIO, f"the file ends at {offset + count}", self.name)
            offset, into = offset + count, into[count:]

    def write(self, offset: int, parts: Sequence[Buffer]) -> None:
        views = [memoryview(part).cast("B") for part in parts]
        if offset + sum(map(len, views)) > self.size_bytes:
            raise OSError(errno.EFBIG, f"it has {self.size_bytes} bytes", self.name)
        while views:
            count = os.pwritev(self._lock.fd, views, offset)
            if count <= 0 or count % DISK_PAGE:
                raise OSError(errno.EIO, f"{count} bytes were written at {offset}", self.name)
            offset += count
            while views and count >= len(views[0]):
                count -= len(views.pop(0))
            if views:
                views[0] = views[0][count:]

    def sync(self) -> None:
        if self._lock.fd < 0:
            raise OSError(errno.EBADF, "it is closed", self.name)
        os.fdatasync(self._lock.fd)

    def trouble(self) -> str | None:
        try:
            if not self._lock.is_at(self._path):
                return f"{self.name} was removed or replaced"
            found_bytes = os.fstat(self._lock.fd).st_size
        except OSError as error:
            return f"{self.name}: {error}"
        if found_bytes < self.size_bytes:
            return f"{self.name} was cut to {found_bytes} bytes"
        return None

    def close(self) -> None:
        # A file system that is gone fails this too, and there is more to close than this file.
        with contextlib.suppress(OSError):
            self._lock.release()


def check_directory(directory: Path, *, forced: bool = False) -> None:
    """Raise `UsageError` for a directory that no device may lie in."""
    if not directory.is_dir():
        raise UsageError("disk", str(directory), _THERE)
    name = file_system_of(directory)
    if name not in GOOD.values() and not forced:
        must = (
            f"is on {name}; must be on {' or '.join(GOOD.values())}, unless forced (--disk-force)"
        )
        raise UsageError("disk", str(directory), must)


def open_file(directory: Path, disk_size_bytes: int, *, forced: bool = False) -> DirectFile:
    """Open or make the file of a device that takes at most `disk_size_bytes` of its file system,
    all in all. It is made larger or smaller where it has another size.

    Raises `UsageError` for a directory that is no place for a device, and while another process
    uses it, `NoSpaceError` where the file system would be left with too little, and `OSError`.
    `forced` allows any file system.
    """
    check_directory(directory, forced=forced)
    size_bytes = disk_size_bytes - disk_size_bytes // SHARE_OF_FILE_SYSTEM
    size_bytes = (size_bytes - LEAST_FOR_FILE_SYSTEM) // DISK_PAGE * DISK_PAGE
    if size_bytes <= 0:
        must = f"must be more than {LEAST_FOR_FILE_SYSTEM}"
        raise UsageError("disk_size", disk_size_bytes, must)
    path = directory / FILE_NAME
    lock = _locked(path)
    with on_failure(lock.release):
        _resize(path, lock, size_bytes)
    return DirectFile(path, lock, size_bytes)


def open_read_only(directory: Path) -> DirectFile:
    """Open the file of a device to read it alone; a node may use it. Raises `UsageError` and
    `OSError`."""
    path = directory / FILE_NAME
    if not path.exists():
        raise UsageError("disk", str(directory), f"must be the directory of a node's {FILE_NAME}")
    lock = FileLock(path, os.O_RDONLY | os.O_DIRECT)
    with on_failure(lock.release):
        return DirectFile(path, lock, os.fstat(lock.fd).st_size)


def remove_file(directory: Path) -> int:
    """Remove the file of a device that no node uses, whatever its state; return the bytes that it
    had, 0 where there is none. Raises `UsageError` for another program's file, and while a process
    uses it, and `OSError`."""
    path = directory / FILE_NAME
    if not directory.is_dir():
        raise UsageError("disk", str(directory), _THERE)
    if not path.exists():
        return 0
    lock = _locked(path)
    try:
        size_bytes = os.fstat(lock.fd).st_size
        pages = [aligned(DISK_PAGE) for _ in range(SUPERBLOCK_COPIES)]
        os.preadv(lock.fd, pages, 0)
        if any(map(any, pages)) and {version_of(page) for page in pages} == {None}:
            raise UsageError("disk", str(path), _NOT_OURS)
        path.unlink()
    finally:
        lock.release()
    return size_bytes


def _locked(path: Path) -> FileLock:
    is_new = not path.exists()
    try:
        lock = FileLock(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    except OSError as error:
        if error.errno in _NO_ROOM:
            do = "inodes or a quota are used up, so use another directory"
            raise NoSpaceError(f"{path}: no file can be made ({error.strerror}); {do}") from error
        if error.errno != errno.EINVAL:
            raise
        if is_new:
            path.unlink(missing_ok=True)  # made, and not opened
        must = "is on a file system without O_DIRECT: use a directory on ext4 or xfs"
        raise UsageError("disk", str(path.parent), must) from error
    with on_failure(lock.release):
        status = os.fstat(lock.fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise UsageError("disk", str(path), "must be a plain file of this user's")
        if not lock.take() or not lock.is_at(path):
            must = "is in use by another process: one node a disk, so name another directory"
            raise UsageError("disk", str(path), must)
    return lock


def _resize(path: Path, lock: FileLock, size_bytes: int) -> None:
    """Give a file its size, and all of its pages. Raises `NoSpaceError`; then it is as before."""
    fd = lock.fd
    former_bytes = os.fstat(fd).st_size
    if former_bytes % DISK_PAGE:
        raise UsageError("disk", str(path), _NOT_OURS)
    if former_bytes:  # another program's is left as it is
        superblock_of(DirectFile(path, lock, former_bytes))
    if former_bytes > size_bytes:
        os.ftruncate(fd, size_bytes)
        former_bytes = size_bytes
    free_bytes, total_bytes = room(path.parent)
    more_bytes = size_bytes - os.fstat(fd).st_blocks * 512
    if more_bytes > 0 and free_bytes - more_bytes < total_bytes * LEFT_PERCENT // 100:
        why = f"{more_bytes} bytes more would leave under {LEFT_PERCENT}% of its file system"
        _undo(path, fd, former_bytes)
        most_bytes = size_bytes - more_bytes + free_bytes - total_bytes * LEFT_PERCENT // 100
        do = f"use a disk size of at most {max(most_bytes, 0)}, or another directory"
        raise NoSpaceError(f"{path}: {why} (free: {free_bytes}); {do}")
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError as error:
        _undo(path, fd, former_bytes)
        if error.errno in _NO_ROOM:
            raise NoSpaceError(f"{path}: no room for {size_bytes} bytes ({error})") from error
        raise


def _undo(path: Path, fd: int, former_bytes: int) -> None:
    if former_bytes:
        os.ftruncate(fd, former_bytes)
    else:
        path.unlink()
