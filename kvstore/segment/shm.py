"""Segments in POSIX shared memory: one file of payload, one of headers, both in /dev/shm.

All pages are allocated at creation, so that a full /dev/shm is a clear error
at the start and never a SIGBUS in the middle of a write.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from collections.abc import Callable
from pathlib import Path

from kvstore.core.events import Fill, Mark, Seal, Write
from kvstore.errors import NoSpaceError
from kvstore.limits import SLOT_BYTES_MIN
from kvstore.segment.header import (
    HEADER_BYTES,
    SUPERBLOCK_BYTES,
    Header,
    Superblock,
    pack,
    pack_superblock,
    unpack_superblock,
    word,
)

SHM_DIR = Path("/dev/shm")
RESERVE_BYTES = 16 << 20
"""What a new segment leaves free in /dev/shm for everyone else."""
MADV_POPULATE_READ = 22
MADV_POPULATE_WRITE = 23


def header_file_bytes(arenas: int, arena_bytes: int) -> int:
    return SUPERBLOCK_BYTES + arenas * (arena_bytes // SLOT_BYTES_MIN) * HEADER_BYTES


def _create(path: Path, size_bytes: int) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, size_bytes)
        return mmap.mmap(fd, size_bytes)
    except OSError as e:
        path.unlink(missing_ok=True)
        if e.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise NoSpaceError(f"{path.parent}: no room for {size_bytes} bytes ({e})") from e
        raise
    finally:
        os.close(fd)


def check_room(where: Path, arenas: int, arena_bytes: int) -> None:
    """Raises `NoSpaceError` when a segment of this shape does not fit."""
    # fallocate on tmpfs takes page after page until memory is gone; asking
    # first keeps a mistyped size from starving the whole machine.
    need_bytes = arenas * arena_bytes + header_file_bytes(arenas, arena_bytes)
    fs = os.statvfs(where)
    free = fs.f_bavail * fs.f_frsize
    if need_bytes + RESERVE_BYTES > free:
        raise NoSpaceError(
            f"{where}: {need_bytes} bytes asked for, {free} free, "
            f"{RESERVE_BYTES} kept for others; use a smaller --size or enlarge it"
        )


class OwnedShm:
    """A node's own segment. Only the node's event loop uses it."""

    def __init__(self, base_path: Path, superblock: Superblock) -> None:
        self.superblock = superblock
        self.data_path = base_path.with_suffix(".data")
        self.head_path = base_path.with_suffix(".head")
        data_bytes = superblock.arenas * superblock.arena_bytes
        head_bytes = header_file_bytes(superblock.arenas, superblock.arena_bytes)
        check_room(base_path.parent, superblock.arenas, superblock.arena_bytes)
        self._data = _create(self.data_path, data_bytes)
        try:
            self._head = _create(self.head_path, head_bytes)
        except BaseException:
            self._data.close()
            self.data_path.unlink(missing_ok=True)
            raise
        self._words = memoryview(self._head).cast("Q")
        self._apply: dict[type, Callable[..., None]] = {
            Mark: self._mark,
            Seal: self._seal,
            Fill: self._fill,
        }
        raw = pack_superblock(superblock)
        self._head[: len(raw)] = raw
        self._closed = False

    def apply(self, write: Write) -> None:
        self._apply[type(write)](write)

    def _mark(self, write: Mark) -> None:
        self._words[(SUPERBLOCK_BYTES + write.slot_id * HEADER_BYTES) >> 3] = word(
            write.state, write.generation
        )

    def _seal(self, write: Seal) -> None:
        start = SUPERBLOCK_BYTES + write.slot_id * HEADER_BYTES
        raw = pack(Header(*write[1:]))
        self._head[start + 8 : start + HEADER_BYTES] = raw[8:]
        self._words[start >> 3] = int.from_bytes(raw[:8], "little")

    def _fill(self, write: Fill) -> None:
        self._data[write.offset : write.offset + len(write.value)] = write.value

    def header(self, slot_id: int) -> bytes:
        start = SUPERBLOCK_BYTES + slot_id * HEADER_BYTES
        return self._head[start : start + HEADER_BYTES]

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.data_path.unlink(missing_ok=True)
        self.head_path.unlink(missing_ok=True)
        self._words.release()
        self._head.close()
        self._data.close()


class AttachedShm:
    """Somebody else's segment, mapped read-only; `writable` is for a same-host writer.

    Raises `FileNotFoundError` when it is not on this host (any more) and
    `ValueError` when the files are not a segment of this layout.
    """

    def __init__(self, data_path: Path, head_path: Path, *, writable: bool = False) -> None:
        self._head = _map(head_path, writable=False)
        superblock = unpack_superblock(self._head[:SUPERBLOCK_BYTES])
        if superblock is None or len(self._head) != header_file_bytes(
            superblock.arenas, superblock.arena_bytes
        ):
            self._head.close()
            raise ValueError(f"{head_path} is no segment header file of this version")
        self.superblock = superblock
        try:
            self._data = _map(data_path, writable=writable)
        except BaseException:
            self._head.close()
            raise
        if len(self._data) != superblock.arenas * superblock.arena_bytes:
            self._head.close()
            self._data.close()
            raise ValueError(f"{data_path} does not have the size its header file says")
        self.payload = memoryview(self._data)
        self.slots_per_arena = superblock.arena_bytes // SLOT_BYTES_MIN
        self._populate = MADV_POPULATE_WRITE if writable else MADV_POPULATE_READ
        self._populated: set[int] = set()

    def header(self, slot_id: int) -> bytes:
        start = SUPERBLOCK_BYTES + slot_id * HEADER_BYTES
        return self._head[start : start + HEADER_BYTES]

    def populate(self, offset: int) -> None:
        """Map the pages of the arena at `offset` in one go, once; saves a fault every 4 KiB."""
        arena = offset // self.superblock.arena_bytes
        if arena in self._populated:
            return
        self._populated.add(arena)
        try:
            self._data.madvise(
                self._populate, arena * self.superblock.arena_bytes, self.superblock.arena_bytes
            )
        except OSError as e:
            # Linux before 5.14 has no such advice; pages then come one fault at a time.
            if e.errno != errno.EINVAL:
                raise

    def close(self) -> None:
        """Unmap; views handed out keep the memory until they are gone."""
        self.payload.release()
        self._head.close()
        # A caller may still hold a view: the mapping then goes with the last one.
        with contextlib.suppress(BufferError):
            self._data.close()


def _map(path: Path, *, writable: bool) -> mmap.mmap:
    fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
    try:
        size_bytes = os.fstat(fd).st_size
        if size_bytes == 0:
            raise ValueError(f"{path} is empty")
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        return mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, access)
    finally:
        os.close(fd)
