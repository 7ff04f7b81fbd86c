"""The table of what lies on a node's disks: 64 bytes a block in shared memory, written by the node
alone, read by every client of its host. images.py says what an entry is.

Before the entries is a page: whose table it is, and how large; from byte `_CLOSED` on a byte for
each device, 1 when the node has closed it; and from `_KEY_IDS` on what the blocks are encrypted
with: of such a table the version is `SEALED_VERSION`, and behind all entries is a tag of 16 bytes
for each. It is made anew at each start of the node, and never moves under its readers.

An entry lies in one of two windows of 16 that its key names, or nowhere: nothing is ever moved, so
a reader that looks into both misses no block. Of the two the emptier one takes a new block: filled
to 0.9, a table has no room for one block in 10,000 (with one window a key: for 6 in 100). Where
both are full the oldest lap goes.

Nothing is ordered or locked: an entry that is torn, or that its writer's death left so, fails its
CRC and is a miss; with another one's tag nothing is decrypted. What it says of the bytes on disk
holds only as far as they have its checksum, or tag.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Collection, Sequence
from pathlib import Path
from zlib import crc32

from kvstore.core.disk.base import adopt_each
from kvstore.limits import DISK_KEYS_MAX
from kvstore.machine import REAL, Machine
from kvstore.segment.disk.format import KEY_ID_BYTES, TAG_BYTES
from kvstore.segment.disk.images import (
    COMPILED,
    IMAGE_BYTES,
    IMAGE_WORDS,
    LAP,
    LENGTH,
    NAMESPACE,
    USED,
    Images,
    pack,
    unpack,
)
from kvstore.types import DiskBlock, Key

MAGIC, VERSION, SEALED_VERSION = b"kvsdisk\0", 1, 2
_HEAD = struct.Struct("<8sIIQQ")
_WINDOWS = struct.Struct("<8xQQ8x")
"""The bits of a key that name its windows."""
WINDOW_ENTRIES = 16
WINDOW_BYTES = WINDOW_ENTRIES * IMAGE_BYTES
_FILLED = 14
"""Blocks that a table is made for, a window."""
_CLOSED, _KEY_IDS = 1024, 2048
_FREE = bytes(IMAGE_BYTES)


def windows_for(blocks: int) -> int:
    """Return of how many windows a table for so many blocks is."""
    return max(-(-blocks // _FILLED), 1)


def table_bytes(blocks: int, *, sealed: bool = False) -> int:
    """Return the size of a table for so many blocks: 73 bytes each, 92 with tags."""
    window_bytes = WINDOW_BYTES + sealed * WINDOW_ENTRIES * TAG_BYTES
    return mmap.PAGESIZE + windows_for(blocks) * window_bytes


class _Windows:
    """Finds entries in a mapped table."""

    def __init__(self, mapped: mmap.mmap, windows: int, key_ids: Sequence[bytes]) -> None:
        self._map, self._windows = mapped, windows
        self.key_ids = key_ids
        """Of the keys that the blocks are encrypted with; empty: they are plain."""
        self._tags = mmap.PAGESIZE + windows * WINDOW_BYTES

    def _starts(self, key: Key) -> tuple[int, int]:
        """Return where the two windows of a key begin; they may be the same."""
        one, other = _WINDOWS.unpack(key)
        count = self._windows
        return (
            mmap.PAGESIZE + one % count * WINDOW_BYTES,
            mmap.PAGESIZE + other % count * WINDOW_BYTES,
        )

    def _at(self, key: Key) -> int:
        """Return where the entry of a key is; -1 when there is none."""
        find = self._map.find
        for start in self._starts(key):
            at = find(key, start, start + WINDOW_BYTES)
            # Where bytes of an entry look like a key they are not one.
            while at >= 0 and (at - start) % IMAGE_BYTES:
                at = find(key, at + 1, start + WINDOW_BYTES)
            if at >= 0:
                return at
        return -1

    def find(self, key: Key) -> DiskBlock | None:
        """Return the block of that key."""
        at = self._at(key)
        if at < 0:
            return None
        block = self._block(at)
        # Another one may have come there meanwhile; and all zeros is a key, too.
        return block if block is not None and block.key == key else None

    def _block(self, at: int) -> DiskBlock | None:
        """Return what the entry there says."""
        block = unpack(self._map[at : at + IMAGE_BYTES])
        if block is None or not self.key_ids:
            return block
        tag = self._tag(at)
        return block._replace(tag=self._map[tag : tag + TAG_BYTES])

    def _tag(self, at: int) -> int:
        return self._tags + (at - mmap.PAGESIZE) // IMAGE_BYTES * TAG_BYTES


class DiskTable(_Windows):
    """Implements `kvstore.core.disk.base.DiskIndex`: the table as its node writes it. Only the
    node's event loop uses it."""

    def __init__(
        self,
        path: Path,
        node_id: int,
        epoch: int,
        blocks: int,
        key_ids: Sequence[bytes] = (),
        machine: Machine = REAL,
    ) -> None:
        """Make it, with room for so many `blocks`, in place of that of a former start; `key_ids`
        say what they are encrypted with. Raises `NoSpaceError`, or another `OSError`, when it
        cannot be had."""
        windows = windows_for(blocks)
        machine.remove_memory(path)
        size_bytes = table_bytes(blocks, sealed=bool(key_ids))
        super().__init__(machine.create_memory(path, size_bytes), windows, key_ids)
        self.path = path
        self._machine = machine
        ids = b"".join(key_ids)
        self._map[_KEY_IDS : _KEY_IDS + len(ids)] = ids
        head = _HEAD.pack(MAGIC, SEALED_VERSION if ids else VERSION, epoch, node_id, windows)
        self._map[: _HEAD.size + 4] = head + crc32(head).to_bytes(4, "little")
        self._words = memoryview(self._map)[mmap.PAGESIZE :].cast("I")
        self._filled = bytearray(windows)
        """How many entries of each window are not free."""
        self.blocks = self.block_bytes = 0

    def put(self, block: DiskBlock) -> DiskBlock | None:
        """See `DiskIndex`."""
        at, former = self._at_block(block.key)
        if former is None:
            at = self._room(block.key)
            former = self._taken_out(at)
        else:
            self._count(at, former, -1)
        if self.key_ids:
            self._map[self._tag(at) : self._tag(at) + TAG_BYTES] = block.tag
        self._map[at : at + IMAGE_BYTES] = pack(block)
        self._count(at, block, 1)
        return former

    def adopt(
        self, blocks: Sequence[DiskBlock], keys: Collection[Key], namespace_ids: Collection[int]
    ) -> tuple[Sequence[DiskBlock], Sequence[DiskBlock]]:
        """See `DiskIndex`."""
        if COMPILED is None or not isinstance(blocks, Images):
            return adopt_each(self, blocks, keys, namespace_ids)
        raw = blocks.without(blocks.named(keys, namespace_ids)).raw
        gone, left_out, more, more_bytes = COMPILED.adopt(self._words, self._filled, raw)
        self.blocks += more
        self.block_bytes += more_bytes
        return Images(gone), Images(left_out)

    def get(self, key: Key) -> DiskBlock | None:
        """See `DiskIndex`."""
        return self.find(key)

    def remove(self, key: Key) -> bool:
        """See `DiskIndex`."""
        at, block = self._at_block(key)
        return block is not None and self._taken_out(at) is not None

    def mark_used(self, key: Key) -> bool:
        """See `DiskIndex`."""
        at, block = self._at_block(key)
        if block is None:
            return False
        was = self._map[at + USED]
        self._map[at + USED] = 1
        return bool(was)

    def is_used(self, key: Key) -> bool:
        """See `DiskIndex`."""
        at, block = self._at_block(key)
        return block is not None and bool(self._map[at + USED])

    def device_closed(self, device: int) -> None:
        """See `DiskIndex`."""
        self._map[_CLOSED + device] = 1

    def clear(
        self, namespace_ids: Sequence[int], start: int, at_most: int
    ) -> tuple[list[DiskBlock], int]:
        """See `DiskIndex`."""
        there, goes_on = self._filled_from(start, at_most)
        of: Collection[int] = frozenset(namespace_ids)
        gone = [self._taken_out(at) for at, its in there if not of or its in of]
        return [block for block in gone if block is not None], goes_on

    def walk(self, start: int, at_most: int) -> tuple[list[DiskBlock], int]:
        """See `DiskIndex`."""
        there, goes_on = self._filled_from(start, at_most)
        blocks = (self._block(at) for at, _ in there)
        return [block for block in blocks if block is not None], goes_on

    def _filled_from(self, start: int, at_most: int) -> tuple[list[tuple[int, int]], int]:
        """Return where the entries that are not free begin, and their namespaces, among `at_most`
        from number `start` on; and with which number to go on (0: that was all)."""
        end = min(start + at_most, self._windows * WINDOW_ENTRIES)
        words = self._words[start * IMAGE_WORDS : end * IMAGE_WORDS]
        lengths = words[LENGTH::IMAGE_WORDS].tolist()
        each = zip(range(start, end), lengths, words[NAMESPACE::IMAGE_WORDS].tolist(), strict=True)
        there = [(mmap.PAGESIZE + i * IMAGE_BYTES, its) for i, length, its in each if length]
        return there, 0 if end == self._windows * WINDOW_ENTRIES else end

    def _at_block(self, key: Key) -> tuple[int, DiskBlock | None]:
        at = self._at(key)
        return at, None if at < 0 else self._block(at)

    def _room(self, key: Key) -> int:
        """Return a free entry of the emptier one of the key's windows, else that of the oldest
        lap."""
        starts = sorted(self._starts(key), key=self._filled_at)
        first = self._in_window(starts[0], LENGTH)
        if 0 in first:
            return starts[0] + first.index(0) * IMAGE_BYTES
        laps = [self._in_window(start, LAP) for start in starts]
        oldest = min(map(min, laps))
        start, found = next((s, w) for s, w in zip(starts, laps, strict=True) if oldest in w)
        return start + found.index(oldest) * IMAGE_BYTES

    def _filled_at(self, start: int) -> int:
        return self._filled[(start - mmap.PAGESIZE) // WINDOW_BYTES]

    def _in_window(self, start: int, word: int) -> list[int]:
        """Return that word of each entry of the window."""
        first = (start - mmap.PAGESIZE) >> 2
        return self._words[first + word : first + WINDOW_BYTES // 4 : IMAGE_WORDS].tolist()

    def _taken_out(self, at: int) -> DiskBlock | None:
        """Free the entry; return what it was."""
        block = self._block(at)
        if block is not None:
            self._map[at : at + IMAGE_BYTES] = _FREE
            self._count(at, block, -1)
        return block

    def _count(self, at: int, block: DiskBlock, sign: int) -> None:
        self._filled[(at - mmap.PAGESIZE) // WINDOW_BYTES] += sign
        self.blocks += sign
        self.block_bytes += sign * block.length

    def close(self) -> None:
        """Remove its file. Whoever has it mapped, also here, keeps what it says."""
        self._machine.remove_memory(self.path)


class AttachedTable(_Windows):
    """The table of a node of this host, mapped for reading."""

    def __init__(
        self,
        path: Path,
        node_id: int,
        epoch: int,
        *,
        owner: int | None = None,
        machine: Machine = REAL,
    ) -> None:
        """Map it; with `owner`, it must be a plain file of that user. Raises `OSError` when it is
        not there, and `ValueError` when it is not whole or of another start of a node."""
        mapped = machine.map_memory(path, writable=False, owner=owner)
        head = mapped[: _HEAD.size + 4]
        if len(head) < _HEAD.size + 4 or head[_HEAD.size :] != crc32(head[: _HEAD.size]).to_bytes(
            4, "little"
        ):
            raise ValueError(f"{path} is no table of disks")
        magic, version, *start, windows = _HEAD.unpack_from(head)
        sealed = version == SEALED_VERSION
        is_ours = magic == MAGIC and (sealed or version == VERSION)
        if not is_ours or len(mapped) != table_bytes(windows * _FILLED, sealed=sealed):
            raise ValueError(f"{path} is no table of disks of version {VERSION}")
        if start != [epoch, node_id]:
            raise ValueError(f"{path} is another node's, or another start's")
        ids = mapped[_KEY_IDS : _KEY_IDS + DISK_KEYS_MAX * KEY_ID_BYTES] if sealed else b""
        each = [ids[at : at + KEY_ID_BYTES] for at in range(0, len(ids), KEY_ID_BYTES)]
        super().__init__(mapped, windows, [one for one in each if any(one)])

    def is_closed(self, device: int) -> bool:
        """Return whether the node has closed that device."""
        return bool(self._map[_CLOSED + device])
