"""Maps segments that other processes of this user own: headers for reading, payload for writing
where that is wanted.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from kvstore.compiled.fence import FENCE
from kvstore.limits import LOCK_PART_BYTES, SLOT_BYTES_MIN
from kvstore.machine import REAL, Machine
from kvstore.segment import batch_read
from kvstore.segment.header import (
    HEADER_BYTES,
    KEY_PART,
    LAYOUT_VERSION,
    SUPERBLOCK_BYTES,
    header_file_bytes,
    hints_in,
    layout_of,
    newest_superblock,
)
from kvstore.system.on_failure import on_failure
from kvstore.types import Key, Value

_PLACE = struct.Struct("<8xI20x")
"""The bits of a key that `hint_of` uses."""
_SLOTS_BEFORE = SUPERBLOCK_BYTES // HEADER_BYTES
MADV_POPULATE_READ = 22
MADV_POPULATE_WRITE = 23
_EHWPOISON = 133
"""An error number of Linux that the module errno of Python 3.10 to 3.13 lacks."""
_GONE = (errno.EFAULT, _EHWPOISON)
"""Errors of the kernel where a touch would be SIGBUS: a file was cut, or memory is broken."""
POPULATE_BYTES_MIN = 64 << 10
"""A page fault maps up to this much by itself."""
POPULATE_AHEAD_BYTES = 16 << 30
"""Bytes of one mapping that are mapped ahead; their page tables take 32 MiB. The rest is mapped
when used."""
POPULATE_STEP_BYTES = 1 << 20
POPULATE_PAUSE_S = 1e-4
"""Pause between two steps of the thread, which takes 0.2 ms of CPU for each."""


class AttachedHeads:
    """The header file of somebody else's segment, mapped read-only.

    Raises `FileNotFoundError` when it is not on this host (any more) and
    `ValueError` when it is not of this layout.
    """

    def __init__(
        self, head_path: Path, *, owner: int | None = None, machine: Machine = REAL
    ) -> None:
        """Map the file. With `owner`, it must be a plain file of that user."""
        self._head = machine.map_memory(head_path, writable=False, owner=owner)
        superblock = newest_superblock(self._head[:SUPERBLOCK_BYTES])
        if superblock is None or len(self._head) != header_file_bytes(superblock.size_bytes):
            layout = layout_of(self._head[:SUPERBLOCK_BYTES])
            self._head.close()
            if layout not in (None, LAYOUT_VERSION):
                raise ValueError(
                    f"{head_path} has segment layout version {layout}, this side {LAYOUT_VERSION}"
                )
            raise ValueError(f"{head_path} is no whole segment header file")
        self.superblock = superblock
        self.slots = superblock.size_bytes // SLOT_BYTES_MIN
        self._hints = hints_in(self._head, superblock)
        self._hint_mask = len(self._hints) - 1

    def header(self, slot_id: int) -> bytes:
        """Look at a header: after all that was read before, and before all that is read next."""
        start = SUPERBLOCK_BYTES + slot_id * HEADER_BYTES
        if FENCE is None:
            return self._head[start : start + HEADER_BYTES]
        FENCE()
        image = self._head[start : start + HEADER_BYTES]
        FENCE()
        return image

    def hinted(self, key: Key) -> tuple[int, bytes]:
        """Return the slot that may hold `key` and its header, which says whether it does."""
        place = int.from_bytes(key[8:12], "little") & self._hint_mask  # hint_of, at its fastest
        slot_id = self._hints[place]
        start = SUPERBLOCK_BYTES + slot_id * HEADER_BYTES
        image = self._head[start : start + HEADER_BYTES]
        if image[KEY_PART] != key:
            slot_id = self._hints[place ^ 1]
            start = SUPERBLOCK_BYTES + slot_id * HEADER_BYTES
            image = self._head[start : start + HEADER_BYTES]
        if FENCE is not None:
            FENCE()
        return slot_id, image

    def hinted_each(self, keys: Iterable[Key]) -> Iterator[tuple[int, bytes]]:
        """Do `hinted` for many keys, each in half the time."""
        hints, head, mask, place_of = self._hints, self._head, self._hint_mask, _PLACE.unpack
        for key in keys:
            (place,) = place_of(key)
            slot_id = hints[place & mask]
            start = (slot_id + _SLOTS_BEFORE) * HEADER_BYTES
            image = head[start : start + HEADER_BYTES]
            if image[KEY_PART] != key:
                slot_id = hints[place & mask ^ 1]
                start = (slot_id + _SLOTS_BEFORE) * HEADER_BYTES
                image = head[start : start + HEADER_BYTES]
            if FENCE is not None:
                FENCE()
            yield slot_id, image

    def close(self) -> None:
        """Unmap the headers, unless they are just being read: then they go with the reader."""
        self._hints.release()
        with contextlib.suppress(BufferError):
            self._head.close()


class AttachedShm(AttachedHeads):
    """Somebody else's segment, mapped read-only; `writable` is for a same-host writer.

    Raises like `AttachedHeads`.
    """

    def __init__(
        self,
        data_path: Path,
        head_path: Path,
        *,
        writable: bool = False,
        owner: int | None = None,
        machine: Machine = REAL,
    ) -> None:
        super().__init__(head_path, owner=owner, machine=machine)
        self._machine = machine
        superblock = self.superblock
        with on_failure(super().close):
            self._data = machine.map_memory(data_path, writable=writable, owner=owner)
        if len(self._data) != superblock.size_bytes:
            super().close()
            self._data.close()
            raise ValueError(f"{data_path} does not have the size its header file says")
        self.payload = memoryview(self._data)
        self._mapped = batch_read.MappedSegment(self._head, self._data, self._hints, self.payload)
        self._populate = MADV_POPULATE_WRITE if writable else MADV_POPULATE_READ
        self._populated: set[int] = set()
        """Parts of `LOCK_PART_BYTES` whose pages are all mapped, or are being mapped."""
        self._mapped_parts: set[int] = set()
        """The parts among them whose pages are all mapped."""
        self._populating = False
        """True while a thread maps what lies ahead."""
        self.is_populated = False
        """All pages are mapped, and `populate` has nothing left to do."""

    def payloads(self, places: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Return the bytes at each (offset, length), in place."""
        return [self.payload[offset : offset + length] for offset, length in places]

    def read_batch(self, keys: list[Key], outs: list[Value], kinds: int) -> batch_read.Values:
        """Return what is here of `keys`; see `BatchReader.read`."""
        found = None if self.is_populated else self.populate
        return batch_read.READER.read(self._mapped, keys, outs, kinds, found)

    def records(self, keys: list[Key], start: bytes) -> list[bytes | None] | None:
        """See `BatchReader.records`."""
        return batch_read.READER.records(self._mapped, keys, start)

    def populate(self, offset: int, size_bytes: int) -> bool:
        """Map the pages of the block at `offset` in one go; saves a fault every 4 KiB. False when
        they were found to be gone: whoever touches them ends by SIGBUS."""
        if size_bytes < POPULATE_BYTES_MIN:
            return True
        first, last = offset // LOCK_PART_BYTES, (offset + size_bytes - 1) // LOCK_PART_BYTES
        if first in self._populated and last in self._populated:
            return True
        # A whole part takes milliseconds, and where a thread is `populating` it is about to do it.
        if not self._populating and all(self._populate_part(p) for p in range(first, last + 1)):
            return True
        start = offset & -mmap.PAGESIZE
        return self._advise(start, offset + size_bytes - start)

    def _populate_part(self, part: int) -> bool:
        """Map a part of `LOCK_PART_BYTES` once; False when some of its pages are lost."""
        if part not in self._populated:
            self._populated.add(part)  # at once: other threads need not do the same
            if not self._advise(*self._part(part)):
                self._populated.discard(part)
                return False
            self._is_mapped(part)
        return True

    def _is_mapped(self, part: int) -> None:
        self._populated.add(part)
        self._mapped_parts.add(part)
        mapped_bytes = len(self._mapped_parts) * LOCK_PART_BYTES
        self.is_populated = mapped_bytes >= self.superblock.size_bytes

    def _part(self, part: int) -> tuple[int, int]:
        """Return (start, bytes) of a part of `LOCK_PART_BYTES`; the segment's last one may be
        smaller."""
        start = part * LOCK_PART_BYTES
        return start, min(LOCK_PART_BYTES, self.superblock.size_bytes - start)

    def populate_ahead(self) -> None:
        """Map the first `POPULATE_AHEAD_BYTES` in a thread, so that no copy has to wait for it."""
        self._populating = True
        try:
            self._machine.start_thread(self._populate_ahead, "kvstore-populate")
        except RuntimeError:  # no more threads: pages come when they are used
            self._populating = False

    def _populate_ahead(self) -> None:
        size_bytes = min(self.superblock.size_bytes, POPULATE_AHEAD_BYTES)
        try:
            for part in range(-(-size_bytes // LOCK_PART_BYTES)):
                first, part_bytes = self._part(part)
                for start in range(first, first + part_bytes, POPULATE_STEP_BYTES):
                    step_bytes = min(POPULATE_STEP_BYTES, first + part_bytes - start)
                    if not self._advise(start, step_bytes):
                        return
                    self._machine.sleep(POPULATE_PAUSE_S)
                self._is_mapped(part)
        except ValueError:
            pass  # closed meanwhile
        finally:
            self._populating = False

    def _advise(self, start: int, size_bytes: int) -> bool:
        try:
            self._data.madvise(self._populate, start, size_bytes)
        except OSError as e:
            # With any other pages come one fault at a time: Linux before 5.14 has no such advice.
            return e.errno not in _GONE
        return True

    def close(self) -> None:
        """Unmap; views handed out keep the memory until they are released."""
        self.payload.release()
        super().close()
        # A caller may still hold a view: the mapping then goes with the last one.
        with contextlib.suppress(BufferError):
            self._data.close()


def private_pages(path: str, offset: int, size_bytes: int) -> ctypes.Array[ctypes.c_ubyte]:
    """Return a part of a segment as a ctypes array of this caller alone: nobody sees what it writes
    there.

    Pages that it has not written to are the segment's, as they are now. Raises `OSError` and
    `ValueError` when there is no such part.
    """
    start = offset & -mmap.PAGESIZE
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        length = offset - start + size_bytes
        pages = mmap.mmap(fd, length, mmap.MAP_PRIVATE, offset=start)
    finally:
        os.close(fd)
    if size_bytes >= POPULATE_BYTES_MIN:
        with contextlib.suppress(OSError):
            pages.madvise(MADV_POPULATE_READ)
    return (ctypes.c_ubyte * size_bytes).from_buffer(pages, offset - start)
