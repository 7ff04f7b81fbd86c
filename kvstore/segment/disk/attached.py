"""Opens the disks of a node of this host for reading: their table, and their files."""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import stat
import threading
import time
import weakref
from collections.abc import Mapping
from pathlib import Path

from kvstore.core.disk.base import DISK_PAGE
from kvstore.errors import UsageError
from kvstore.machine import REAL, Machine
from kvstore.nodedir import TABLE, Announcement
from kvstore.secret import DISK_KEYS, disk_keys
from kvstore.segment.disk.base import aligned
from kvstore.segment.disk.format import SUPERBLOCK_COPIES, Geometry, unpack_superblock
from kvstore.segment.disk.seal import Opening, RegionSeals
from kvstore.segment.disk.table import AttachedTable
from kvstore.types import DiskBlock, DiskKeys, Key

log = logging.getLogger("kvstore.client")

_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_DIRECT
NO_FILE = "it is no plain file of user {}"
ANOTHER = "its superblock is damaged, or another disk's: the node announced {}"


def announced(disks: Mapping[int, tuple[bytes, str]]) -> dict[str, str]:
    """Return what a node announces of its disks: of each its number, UUID and path."""
    return {str(number): f"{uuid.hex()} {path}" for number, (uuid, path) in disks.items()}


class DiskFile:
    """One device, opened when it is first read, and closed when nobody has this any more: a read
    that hangs keeps it. Thread-safe."""

    def __init__(self, path: str, uuid: str, owner: int, keys: DiskKeys | None = None) -> None:
        self.path = path
        self._uuid = uuid
        self._seals = RegionSeals(keys or {}, bytes.fromhex(uuid), self._header)
        self._owner = owner
        self.left_alone_until = float("-inf")
        """In seconds of `time.monotonic`: it could not be read, and is not tried before."""
        self.why_not = ""
        """Why it could not be opened when that was last tried."""
        self._opening = threading.Lock()
        self._fd = -1
        self._geometry = Geometry(0, 0, 0)

    def region_of(self, page: int) -> int:
        """Return the region that a page is in; -1 before it was opened."""
        return self._geometry.region_of(page) if self._geometry.region_bytes else -1

    def opening(self, block: DiskBlock) -> Opening | None:
        """Return what decrypts a block that was read; None where its key is missing, or its region
        was begun anew. Raises `OSError` as `read`."""
        seal = self._seals.of(self.region_of(block.place.page), block.place.lap)
        return None if seal is None else seal.opening(block)

    def _header(self, region: int) -> memoryview:
        page = aligned(DISK_PAGE)
        self.read(self._geometry.start(region) * DISK_PAGE, page)
        return page

    def read(self, offset: int, into: memoryview) -> None:
        """Fill `into`, whole pages at the start of a page of memory, from there on. Opens the
        device the first time.

        Raises `OSError`, also where the file ends before and where it is not the one that the node
        announced. May take as long as the disk likes.
        """
        if self._fd < 0:
            self._open()
        done = 0
        while done < into.nbytes:
            count = os.preadv(self._fd, [into[done:]], offset + done)
            if not count:
                raise OSError(errno.EIO, "it is shorter than it was", self.path)
            done += count

    def _open(self) -> None:
        with self._opening:
            if self._fd >= 0:
                return
            try:
                fd = self._opened()
            except OSError as e:
                self.why_not = str(e)
                raise
            self.why_not = ""
            self._fd = fd
            weakref.finalize(self, _close, fd).atexit = False

    def _opened(self) -> int:
        fd = os.open(self.path, _FLAGS)
        try:
            status = os.fstat(fd)
            if status.st_uid != self._owner or not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EPERM, NO_FILE.format(self._owner), self.path)
            pages = mmap.mmap(-1, DISK_PAGE)
            for copy in range(SUPERBLOCK_COPIES):
                os.preadv(fd, [pages], copy * DISK_PAGE)
                found = unpack_superblock(pages)
                if found is not None and found.uuid.hex() == self._uuid:
                    break
            else:
                raise OSError(errno.ESTALE, ANOTHER.format(self._uuid), self.path)
        except BaseException:
            os.close(fd)
            raise
        self._geometry = Geometry(found.region_bytes, found.log_bytes, 0)
        return fd


def _close(fd: int) -> None:
    """Close a file, perhaps of a file system that is gone: then there is nobody to tell."""
    with contextlib.suppress(OSError):
        os.close(fd)


class AttachedDisks:
    """What a node of this host has on disk."""

    def __init__(
        self, word: Announcement, owner: int, machine: Machine = REAL, keys: DiskKeys | None = None
    ) -> None:
        """Map the table of the node of user `owner` that announces `word`. Encrypted blocks are
        read with `keys`, of which those of this process are the default. Raises `OSError` and
        `ValueError`."""
        path = Path(word.data_path).with_suffix(TABLE)
        self._table = AttachedTable(path, word.node_id, word.epoch, owner=owner, machine=machine)
        said = {int(number): text.partition(" ") for number, text in word.disks.items()}
        keys, self.locked = self._keys(keys) if self._table.key_ids else ({}, "")
        self.files = {n: DiskFile(path, uuid, owner, keys) for n, (uuid, _, path) in said.items()}
        """By the number of the device. `locked` says why none of them can be decrypted."""
        self._reachable = {n for n, file in self.files.items() if os.access(file.path, os.R_OK)}
        if unseen := [file for n, file in self.files.items() if n not in self._reachable]:
            # In containers often: the table is in /dev/shm, the disk in a volume of its own.
            for file in unseen:
                file.why_not = f"no file there, or no right to it: {file.path}"
            text = "disks of node %s cannot be read by this process; its stream, if any, does: %s"
            log.warning(text, word.name, ", ".join(file.path for file in unseen))
        if self.locked:
            self._reachable.clear()
            log.warning("blocks on disks of node %s are misses: %s", word.name, self.locked)

    def _keys(self, keys: DiskKeys | None) -> tuple[DiskKeys, str]:
        """Return the keys, and why the node's blocks cannot be decrypted with them."""
        try:
            keys = disk_keys() if keys is None else keys
        except UsageError as e:
            return {}, f"they are encrypted, and {e}"
        missing = ", ".join(one.hex() for one in self._table.key_ids if one not in keys)
        why = f"they are encrypted, and this process lacks keys {missing} ({DISK_KEYS}_FILE)"
        return keys, why if missing else ""

    def find(self, key: Key) -> DiskBlock | None:
        """Return where a block lies; None when it is on no disk of the node."""
        return self._table.find(key)

    def find_readable(self, key: Key) -> DiskBlock | None:
        """Return where a block lies, if its device can be read."""
        block = self._table.find(key)
        return block if block is not None and self.reads(block.place.device) else None

    def reads(self, device: int) -> bool:
        """Return whether blocks of that device can be read by this process now, as far as is
        known: the node has not closed it, and it is not left alone."""
        if device not in self._reachable or self._table.is_closed(device):
            return False
        until = self.files[device].left_alone_until
        return until <= 0 or until <= time.monotonic()

    def unopened(self, device: int) -> str:
        """Return why this process cannot open that device, of which its node can read the blocks;
        empty where that is not what keeps it from them."""
        if self.locked or device not in self.files or self._table.is_closed(device):
            return ""
        return self.files[device].why_not
