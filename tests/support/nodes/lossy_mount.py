"""A file system that loses power: whatever was not synced may land or not, whole, in part, and in
any order (`SimDisk`). Real processes use it by the kernel's FUSE, past the page cache.

It has room for one file, which is all that a disk of a node is. What is written is read back at
once; size and name of the file are durable at once, as a journal has them. It answers the kernel's
requests itself (`linux/fuse.h`, protocol 7.31), so that it needs neither libfuse nor a Python
package: only /dev/fuse and a process that may mount.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import random
import select
import stat
import struct
import threading
from collections.abc import Callable, Iterator
from enum import IntEnum
from pathlib import Path

import pytest

from kvstore.testing.sim.models.disk import PAGE, PowerLossError, SimDisk

FUSE = "/dev/fuse"
WRITE_BYTES_MAX = 1 << 20
ROOT_INODE = 1
BIG_WRITES, MAX_PAGES = 1 << 5, 1 << 22
FOPEN_DIRECT_IO, SET_SIZE = 1, 1 << 3
MS_NOSUID, MS_NODEV, MNT_DETACH = 2, 4, 2
_IN, _OUT = struct.Struct("<IIQQ16x"), struct.Struct("<IiQ")
_libc = ctypes.CDLL(None, use_errno=True)


class Op(IntEnum):
    """The kernel's requests that are known here."""

    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    SETATTR = 4
    UNLINK = 10
    OPEN = 14
    READ = 15
    WRITE = 16
    STATFS = 17
    RELEASE = 18
    FSYNC = 20
    FLUSH = 25
    INIT = 26
    ACCESS = 34
    CREATE = 35
    INTERRUPT = 36
    BATCH_FORGET = 42
    FALLOCATE = 43


UNANSWERED = {Op.FORGET, Op.BATCH_FORGET, Op.INTERRUPT}


class LossyMount:
    """The file system, mounted until `close`. Its disk's failures are those of `disk`."""

    def __init__(self, where: Path, size_bytes: int, rng: random.Random) -> None:
        """Mount it. Raises `OSError` where that cannot be done."""
        self.where, self._rng = where, rng
        self.disk = SimDisk(size_bytes, rng)
        self.stalled: set[Op] = set()
        """Requests of these kinds wait until `go_on`."""
        self.refused: dict[Op, int] = {}
        """The error of requests of these kinds."""
        self.power_failed: Callable[[], None] = lambda: None
        """Called in the moment when the power fails, before anybody is told of an error."""
        self.counts = dict.fromkeys(Op, 0)
        self._waiting: list[tuple[int, int, bytes]] = []
        self._inode, self._size_bytes = ROOT_INODE, -1
        """Those of the file; a size below 0: there is none."""
        self._is_off = False
        self._lock = threading.Lock()
        self._fd = os.open(FUSE, os.O_RDWR | os.O_CLOEXEC)
        how = f"fd={self._fd},rootmode=40000,user_id={os.geteuid()},group_id={os.getegid()}"
        kind = b"fuse.kvstore-lossy"
        words = (b"lossy", os.fsencode(where), kind, MS_NOSUID | MS_NODEV, how.encode())
        if _libc.mount(*words):
            os.close(self._fd)
            raise OSError(ctypes.get_errno(), "FUSE cannot be mounted here")
        self._ended, self._end = os.pipe()
        self._thread = threading.Thread(target=self._serve, name="lossy-mount", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Unmount it. Whoever still has the file open finds it gone. Safe to call twice."""
        if not self._thread.is_alive():
            return
        _libc.umount2(os.fsencode(self.where), MNT_DETACH)
        os.close(self._end)
        self._thread.join(10)
        os.close(self._fd)
        os.close(self._ended)

    # --- what befalls it ----------------------------------------------------------------

    def power_loss(self) -> None:
        """Lose what is lost, and have power again. The processes that used it are dead."""
        self.go_on()
        with self._lock:
            self.disk.power_loss()
            self._is_off = False

    def go_on(self) -> None:
        """Carry out what waits."""
        with self._lock:
            self.stalled.clear()
            waiting, self._waiting = self._waiting, []
            for op, unique, body in waiting:
                self._answer(op, unique, body)

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return len(self._waiting)

    # --- the kernel's requests --------------------------------------------------------------

    def _serve(self) -> None:
        while self._ended not in select.select([self._fd, self._ended], [], [])[0]:
            try:
                raw = os.read(self._fd, WRITE_BYTES_MAX + PAGE)
            except OSError as error:
                if error.errno == errno.ENODEV:  # unmounted
                    return
                if error.errno in (errno.ENOENT, errno.EINTR):  # taken back
                    continue
                raise
            _, op, unique, inode = _IN.unpack_from(raw)
            body = raw[_IN.size :]
            with self._lock:
                if op in self.stalled:
                    self._waiting.append((op, unique, body))
                else:
                    self._answer(op, unique, body, inode)

    def _answer(self, op: int, unique: int, body: bytes, inode: int = 0) -> None:
        if op in UNANSWERED:
            return
        try:
            if self._is_off and op not in (Op.FLUSH, Op.RELEASE):
                raise OSError(errno.EIO, "the power failed")
            error, answer = 0, self._carry_out(op, body, inode)
        except PowerLossError:
            self._is_off = True
            self.power_failed()
            error, answer = errno.EIO, b""
        except OSError as failure:
            error, answer = failure.errno or errno.EIO, b""
        # The process that asked may be gone, and then the answer is wanted no more.
        with contextlib.suppress(OSError):
            os.write(self._fd, _OUT.pack(_OUT.size + len(answer), -error, unique) + answer)

    def _carry_out(self, op: int, body: bytes, inode: int) -> bytes:
        if op not in Op.__members__.values():
            raise OSError(errno.ENOSYS, f"request {op}")
        if op in self.refused:
            raise OSError(self.refused[Op(op)], "it is refused")
        self.counts[Op(op)] += 1
        call = getattr(self, f"_{Op(op).name.lower()}")
        answer: bytes = call(body, inode)
        return answer

    def _init(self, body: bytes, _: int) -> bytes:
        flags = BIG_WRITES | MAX_PAGES
        how = (7, 31, 0, flags, 0, 0, WRITE_BYTES_MAX, 1, WRITE_BYTES_MAX // PAGE, 0)
        return struct.pack("<IIIIHHIIHH32x", *how)

    def _attributes(self, inode: int) -> bytes:
        is_root = inode == ROOT_INODE
        mode = stat.S_IFDIR | 0o755 if is_root else stat.S_IFREG | 0o600
        size_bytes = 0 if is_root else max(self._size_bytes, 0)
        numbers = (inode, size_bytes, -(-size_bytes // 512), *[0] * 6)
        return struct.pack("<QQQ3Q3I7I", *numbers, mode, 1, os.geteuid(), os.getegid(), 0, PAGE, 0)

    def _getattr(self, body: bytes, inode: int) -> bytes:
        return bytes(16) + self._attributes(inode)

    def _entry(self) -> bytes:
        return struct.pack("<QQ24x", self._inode, 0) + self._attributes(self._inode)

    def _lookup(self, body: bytes, inode: int) -> bytes:
        if self._size_bytes < 0:
            raise OSError(errno.ENOENT, "there is none")
        return self._entry()

    def _create(self, body: bytes, inode: int) -> bytes:
        self._inode, self._size_bytes = self._inode + 1, 0
        return self._entry() + self._open(body, inode)

    def _open(self, body: bytes, inode: int) -> bytes:
        return struct.pack("<QII", 0, FOPEN_DIRECT_IO, 0)

    def _unlink(self, body: bytes, inode: int) -> bytes:
        self._size_bytes = -1
        return b""

    def _setattr(self, body: bytes, inode: int) -> bytes:
        valid, _, _, size_bytes = struct.unpack_from("<IIQQ", body)
        if valid & SET_SIZE:
            self._size_bytes = size_bytes
        return self._getattr(body, inode)

    def _fallocate(self, body: bytes, inode: int) -> bytes:
        _, offset, length = struct.unpack_from("<QQQ", body)
        if offset + length > self.disk.size_bytes:
            raise OSError(errno.ENOSPC, "it is full")
        self._size_bytes = max(self._size_bytes, offset + length)
        return b""

    def _statfs(self, body: bytes, inode: int) -> bytes:
        pages, used = self.disk.size_bytes // PAGE, max(self._size_bytes, 0) // PAGE
        # A node leaves a share to others: that is there besides.
        free = pages - used + pages // 2
        return struct.pack("<5QIII28x", pages * 2, free, free, 9, 9, PAGE, 255, PAGE)

    def _read(self, body: bytes, inode: int) -> bytes:
        _, offset, length = struct.unpack_from("<QQI", body)
        into = bytearray(max(min(length, self._size_bytes - offset), 0))
        self.disk.read(offset, memoryview(into))
        return bytes(into)

    def _write(self, body: bytes, inode: int) -> bytes:
        _, offset, length = struct.unpack_from("<QQI", body)
        self.disk.write(offset, [body[-length:]])
        return struct.pack("<II", length, 0)

    def _fsync(self, body: bytes, inode: int) -> bytes:
        self.disk.sync()
        return b""

    def _nothing(self, body: bytes, inode: int) -> bytes:
        return b""

    _release = _flush = _access = _nothing


@contextlib.contextmanager
def lossy_mount(where: Path, size_bytes: int, seed: int) -> Iterator[LossyMount]:
    """Mount one; the test is skipped, with the reason, where that cannot be done."""
    where.mkdir()
    try:
        mount = LossyMount(where, size_bytes, random.Random(seed))
    except OSError as error:
        pytest.skip(f"{FUSE}: {error}: no power is lost under a real process")
    with contextlib.closing(mount):
        yield mount
