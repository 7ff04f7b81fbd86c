"""Encodes and decodes what is on a disk device, and says why it is right.

    page 0, 1      superblock, two copies
    log            two halves, one the copy of the other (log.py)
    regions        each: header page, entry pages, payloads

A region is appended to in order and written over as a whole. Each time that one is begun it gets
the next **lap** of the device, and no lap is used twice, not after a power loss either (the log
reserves them). So lap and page together (`order_of`) are the order in which blocks were given
their places, and entries of earlier laps are told from those of this one.

Why the order of writes proves nothing, and need not
----------------------------------------------------
Between two syncs any subset of the pages written may reach the disk, in any order and torn at 512
bytes; drives also lose writes, put them elsewhere and flip bits. What is read is therefore taken
for what it says of itself, never for when it was written:

    header     is whole, of this device and region, or the region has no blocks
    entry      is whole, of this device and lap, at its own place, or there is none. Four are in a
               sector, so a torn page has old and new ones
    payload    has the checksum of its entry, in each read, or is a miss; where it is encrypted, the
               tag (seal.py)

An entry whose payload never arrived is a miss, and so is one whose payload another lap has written
over. An old header with its old entries and payloads is right: a key names its content. So data
needs no sync: what of it is lost or comes late is a hit less.

What must be durable
--------------------
Only what forbids: a deleted key may come again with other bytes, and what was reset or cleared was
to be gone. A key, a namespace, a region or everything is forbidden *up to an order*: that of the
last place given when it was decided, so also what is still being written. Blocks placed later are
free. Nobody is answered before the log has it, synced. Whether the log is whole can be told; where
it is not, all that is on the device may have been named, and is dropped.

A delete is logged if the index has the key, or has it no more for a reason that is not on record.
So **what leaves the index is forbidden**. A region is, durably, before its blocks leave the index
because it is to be written over (its new header may be lost, and the old one count again) or fails
(it may be readable at the next start). Any other block is by its key; nobody waits for that, but a
delete that finds nothing in the index is answered when what was appended before is durable.

A reset has a number that other nodes, Redis and the other devices know too. One that this log does
not have was not carried out here, and forbids all that it names on this device; so a device that
was away takes part in what it missed. Numbers are not compared with one another for that: two nodes
may draw them in one order and tell of them in the other. `reset_number` of a region's header is for
those who read a region without its log.

Must never happen
-----------------
- bytes are returned whose checksum was not compared with their key's after they were read;
- a forbidden block is returned, in this run or after any later start, once that was confirmed;
- a block leaves the index and is not forbidden;
- a lap is used twice; the place of an entry that counts is given to another block of the lap;
- a failed sync is tried again: the pages count as clean then, and were not written.

Numbers are little-endian. Checksums over a header, an entry or a frame of the log are xxh3-64
seeded with the device's UUID: what belongs to another device is no more than noise.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from xxhash import xxh3_64_intdigest

from kvstore.core.disk.base import DISK_PAGE, RegionState
from kvstore.segment.disk.images import COMPILED, Images
from kvstore.types import DiskBlock, DiskPlace

if TYPE_CHECKING:
    from typing_extensions import Buffer

VERSION = 1
REGION_BYTES = 256 << 20
LOG_BYTES = 8 << 20
ENTRY_BYTES = 128
ENTRIES_PER_PAGE = DISK_PAGE // ENTRY_BYTES
ENTRY_AREA_SHARE = 128
"""A region's part for entries is a 128th of it: 16 KiB a block, and smaller ones stay in memory."""
SUPERBLOCK_COPIES = 2
UUID_BYTES = SALT_BYTES = TAG_BYTES = 16
KEY_ID_BYTES = 8
LAP_MAX = (1 << 32) - 1


def seed_of(uuid: bytes) -> int:
    """Return the seed of all checksums over what a device says of itself."""
    return xxh3_64_intdigest(uuid)


def with_checksum(raw: bytes, seed: int) -> bytes:
    """Return `raw` followed by its checksum."""
    return raw + xxh3_64_intdigest(raw, seed).to_bytes(8, "little")


def is_whole(raw: bytes, seed: int) -> bool:
    """Return whether `raw` ends with the checksum of what is before it."""
    return with_checksum(raw[:-8], seed) == raw


def pages_of(length: int) -> int:
    """Return the pages that a payload of `length` bytes takes."""
    return -(-length // DISK_PAGE)


class Geometry(NamedTuple):
    """How a device is divided, in pages from the start of the file."""

    region_bytes: int
    log_bytes: int
    regions: int

    @classmethod
    def of(cls, size_bytes: int, region_bytes: int, log_bytes: int) -> Geometry:
        """Return how a file of `size_bytes` is divided; a rest at its end is not used."""
        rest = size_bytes - SUPERBLOCK_COPIES * DISK_PAGE - log_bytes
        return cls(region_bytes, log_bytes, max(rest // region_bytes, 0))

    @property
    def entry_pages(self) -> int:
        """Pages of a region for entries."""
        return max(self.region_bytes // ENTRY_AREA_SHARE // DISK_PAGE, 1)

    @property
    def entries(self) -> int:
        """Blocks that a region has entries for."""
        return self.entry_pages * ENTRIES_PER_PAGE

    @property
    def payload_pages(self) -> int:
        """Pages of a region for payloads."""
        return self.region_bytes // DISK_PAGE - 1 - self.entry_pages

    def start(self, region: int) -> int:
        """Return the page of a region's header; its entries follow."""
        first = SUPERBLOCK_COPIES + self.log_bytes // DISK_PAGE
        return first + region * (self.region_bytes // DISK_PAGE)

    def first_page(self, region: int) -> int:
        """Return the first page for payloads of a region."""
        return self.start(region) + 1 + self.entry_pages

    def region_of(self, page: int) -> int:
        """Return the region that a page is in; below 0 for those before all of them."""
        return (page - self.start(0)) // (self.region_bytes // DISK_PAGE)

    def holds(self, region: int, page: int, length: int) -> bool:
        """Return whether that many bytes from that page on are payload of the region."""
        at = page - self.first_page(region)
        is_inside = at >= 0 and at + pages_of(length) <= self.payload_pages
        return 0 <= region < self.regions and length > 0 and is_inside


_MAGIC = b"kvstdisk"
_SUPERBLOCK = struct.Struct("<8sII16sQQQQQ")


class DiskSuperblock(NamedTuple):
    """Whose device this is, and how it is divided. The copy with more `writes` counts."""

    uuid: bytes
    """Made at random when the device was made empty: what was written before is noise since."""
    writes: int
    region_bytes: int
    log_bytes: int
    node_id: int
    """The node that opened it last."""
    made_s: int
    """Wall clock."""
    closed_s: int
    """When it was closed for good, since a sync failed; 0: it is not."""


def pack_superblock(block: DiskSuperblock) -> bytes:
    """Return the page of one copy."""
    uuid, writes, *rest = block
    raw = _SUPERBLOCK.pack(_MAGIC, VERSION, writes, uuid, *rest)
    return with_checksum(raw, 0).ljust(DISK_PAGE, b"\0")


def unpack_superblock(page: Buffer) -> DiskSuperblock | None:
    """Return the superblock of one copy; None unless it is whole and of this version."""
    raw = bytes(memoryview(page)[: _SUPERBLOCK.size + 8])
    _, _, writes, uuid, *rest = _SUPERBLOCK.unpack(raw[:-8])
    is_own = version_of(page) == VERSION and is_whole(raw, 0)
    return DiskSuperblock(uuid, writes, *rest) if is_own else None


def version_of(page: Buffer) -> int | None:
    """Return the version that a copy names, ours or another; None when it is no superblock."""
    magic, version = struct.unpack("<8sI", memoryview(page)[:12])
    return int(version) if magic == _MAGIC else None


_REGION_MAGIC, _SEALED_MAGIC = b"kvregion", b"kvsealed"
_REGION = struct.Struct("<8s16sIIQ")
_SEALED = struct.Struct(_REGION.format + "8s16s")


class Sealing(NamedTuple):
    """What a region's blocks are encrypted with: a key, and 16 random bytes (seal.py)."""

    key_id: bytes
    salt: bytes


def pack_region(
    uuid: bytes, region: int, lap: int, reset_number: int, sealing: Sealing | None = None
) -> bytes:
    """Return the page of a region's header. `reset_number` is the newest that the node knew; with
    `sealing` its blocks are encrypted."""
    magic = _REGION_MAGIC if sealing is None else _SEALED_MAGIC
    raw = _REGION.pack(magic, uuid, region, lap, reset_number) + b"".join(sealing or ())
    return with_checksum(raw, seed_of(uuid)).ljust(DISK_PAGE, b"\0")


def lap_in(page: Buffer, uuid: bytes, region: int) -> int | None:
    """Return the lap in a header page; None unless it is whole, and that device's and region's."""
    shape = _REGION if sealing_in(page) is None else _SEALED
    raw = bytes(memoryview(page)[: shape.size + 8])
    magic, *own, lap, _ = _REGION.unpack(raw[: _REGION.size])
    is_ours = magic in (_REGION_MAGIC, _SEALED_MAGIC) and own == [uuid, region]
    return int(lap) if is_ours and is_whole(raw, seed_of(uuid)) else None


def sealing_in(page: Buffer) -> Sealing | None:
    """Return what a header page that has a lap says of its blocks; None: they are plain."""
    magic, *_, key_id, salt = _SEALED.unpack(memoryview(page)[: _SEALED.size])
    return Sealing(key_id, salt) if magic == _SEALED_MAGIC else None


# key, checksum, first page, length, stored length, lap, number within the region, namespace, meta
# length, codec, kind, tag (all 0 where it is not encrypted). In the gaps, all 0 in this version, is
# room for the ends of a life and of a retention (u64 each), and the tenant (u32). Stored length and
# codec are for engines that encode: their pages are carried, and never made here.
_ENTRY = struct.Struct("<32sQ16xIIIIII4xHBB16s16x")
_CHECKED = struct.Struct(_ENTRY.format + "Q")
assert _CHECKED.size == ENTRY_BYTES
_NOTHING = bytes(ENTRY_BYTES)


def pack_entry(block: DiskBlock, number: int, seed: int) -> bytes:
    """Return the 128 bytes of a block that has that number within its region."""
    key, (_, page, lap), length, kind, meta_length, checksum, namespace_id, tag = block
    sizes = page, length, length, lap, number, namespace_id, meta_length
    return with_checksum(_ENTRY.pack(key, checksum, *sizes, 0, kind, tag), seed)


def unpack_entries(
    area: Buffer,
    device: int,
    state: RegionState,
    geometry: Geometry,
    seed: int,
    start: int = 0,
    *,
    sealed: bool = False,
) -> Sequence[DiskBlock] | None:
    """Return the blocks whose entries are in entry pages of a region, from number `start` on, the
    last first; None where an entry is damaged: nobody would log a delete of its block, and it may
    be whole again at the next start. Entries of other laps are left out, and what is at another's
    place, or names a place outside its region's payloads. With `sealed` blocks have their tags."""
    first = geometry.first_page(state.region)
    end = first + geometry.payload_pages
    if COMPILED is not None and not sealed:
        raw = COMPILED.images(area, start, device, state.lap, first, end, seed)
        return None if raw is None else Images(raw)
    blocks, area = [], bytes(area)
    for number, fields in enumerate(_CHECKED.iter_unpack(area), start):
        key, checksum, page, length, stored, lap, own, space, meta, codec, kind, tag, whole = fields
        at = (number - start) * ENTRY_BYTES
        raw = area[at : at + ENTRY_BYTES - 8]
        if xxh3_64_intdigest(raw, seed) != whole:
            if raw == _NOTHING[:-8] and not whole:
                continue
            return None
        is_own = (lap, own, codec, stored) == (state.lap, number, 0, length)
        if is_own and length and first <= page <= end - pages_of(length):
            place = DiskPlace(device, page, lap)
            seal = tag if any(tag) else b""
            blocks.append(DiskBlock(key, place, length, kind, meta, checksum, space, seal))
    return blocks[::-1]
