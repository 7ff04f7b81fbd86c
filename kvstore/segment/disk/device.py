"""Writes blocks to one disk device, and reads them back.

One thread begins regions and writes; another commits the log; any may read. Who decides what goes
where is core/disk/. What a device promises, and why, is in format.py.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from xxhash import xxh3_64_intdigest

from kvstore.core.disk.base import DISK_PAGE, RegionState
from kvstore.errors import InternalError, UsageError
from kvstore.segment.disk.base import BlockFile, aligned
from kvstore.segment.disk.forbidden import Record, record
from kvstore.segment.disk.format import (
    ENTRIES_PER_PAGE,
    ENTRY_BYTES,
    LAP_MAX,
    LOG_BYTES,
    REGION_BYTES,
    SALT_BYTES,
    SUPERBLOCK_COPIES,
    UUID_BYTES,
    VERSION,
    DiskSuperblock,
    Geometry,
    Sealing,
    lap_in,
    pack_entry,
    pack_region,
    pack_superblock,
    pages_of,
    sealing_in,
    seed_of,
    unpack_entries,
    unpack_superblock,
    version_of,
)
from kvstore.segment.disk.images import joined
from kvstore.segment.disk.log import HALF_BYTES_MIN, Log
from kvstore.segment.disk.seal import RegionSeal, RegionSeals
from kvstore.system.memory_files import address_of
from kvstore.types import DiskBlock, DiskKeys

if TYPE_CHECKING:
    from typing_extensions import Buffer

REGIONS_MIN = 4
"""One is being written and one given up for the next: of fewer, half would be empty."""
ANEW = "`kvstore node --clean --disk` makes it anew"
_BLANK_PAGE = bytes(DISK_PAGE)
_NO_KEYS: DiskKeys = {}
ENTRY_PAGES_MIN = 16
"""Entry pages that are read at first, and then twice as many: those of large blocks are few."""
LAPS_RESERVED = 256
"""Laps that are put on record at a time, since none may be begun twice."""


class DiskDevice:
    """One disk device, opened."""

    def __init__(
        self, file: BlockFile, number: int, superblock: DiskSuperblock, keys: DiskKeys
    ) -> None:
        """Use `DiskDevice.open`."""
        self.file = file
        self.number = number
        """0 to 15: `DiskPlace.device`."""
        self.uuid = superblock.uuid
        self.seed = seed_of(superblock.uuid)
        _, _, region_bytes, log_bytes, *_ = self._superblock = superblock
        self.geometry = Geometry.of(file.size_bytes, region_bytes, log_bytes)
        if self.geometry.regions < REGIONS_MIN:
            least = self.geometry.start(REGIONS_MIN) * DISK_PAGE
            must = f"must be at least {least} bytes and what the file system takes; {ANEW}"
            raise UsageError("disk_size", file.size_bytes, must)
        self.log = Log(file, self.geometry, self.seed, self._durable_laps, self.close_for_good)
        self.next_lap = 1
        """The first lap that `begin` may use in this run."""
        self._laps = dict.fromkeys(range(self.geometry.regions), 0)
        """By region: the lap of its header on the disk, not of one that may still be lost; 0 also
        where none can be read, since one may be there."""
        self._begun: dict[int, int] = {}
        """Laps of regions whose new headers were not read back yet."""
        self._key_ids: dict[int, bytes] = {}
        """By region: the id of the key that its header names; empty where it is plain."""
        self.keys = keys
        """What it is encrypted with; empty: it is not."""
        self._seals = RegionSeals(keys, self.uuid, self.header)
        self._seal: RegionSeal | None = None
        """Of the open region; None: it is plain."""
        self._open: tuple[int, int] | None = None
        """Region and lap that blocks are written to."""
        self._entries = aligned(self.geometry.entry_pages * DISK_PAGE)
        self._written, self._next_page = 0, 0
        """Entries of the open region, and the page behind its last payload."""
        self._closed = ""

    # --- opening ----------------------------------------------------------------------

    @classmethod
    def open(
        cls,
        file: BlockFile,
        number: int,
        node_id: int | None,
        *,
        region_bytes: int = REGION_BYTES,
        log_bytes: int = LOG_BYTES,
        keys: DiskKeys = _NO_KEYS,
    ) -> DiskDevice:
        """Open a device, or make it where the file is empty. The sizes hold where it is made; later
        it keeps its own. Without a node's id it stays the device of the node that it is of. With
        `keys` (`disk_keys`) all blocks are encrypted, by the first of them, and what is not cannot
        be read.

        A device whose log is damaged is made anew: none of its blocks could be believed. Raises
        `OSError`, also for one that was closed for good, and `UsageError` for a file that is
        another program's, of another version or too small, or encrypted where there are no keys.
        """
        former = superblock_of(file)
        if former is None:
            if log_bytes < 2 * HALF_BYTES_MIN:
                raise UsageError("log_bytes", log_bytes, f"must be at least {2 * HALF_BYTES_MIN}")
            block = DiskSuperblock(b"", 0, region_bytes, log_bytes, node_id or 0, 0, 0)
            return cls._make(file, number, block, keys)
        node_id = former.node_id if node_id is None else node_id
        self = cls(file, number, former._replace(node_id=node_id), keys)
        whole = self.log.read()
        self.next_lap = self.log.said.numbers[Record.LAPS] + 1
        self._laps = dict(self.states())
        if not whole or max(self._laps.values()) >= self.next_lap:
            return cls._make(file, number, self._superblock, keys)
        if not keys and self.locked():
            must = f"must name the file with the keys of {file.name}, which is encrypted; or {ANEW}"
            raise UsageError("disk_keys_file", "", must)
        if self.geometry.start(self.geometry.regions) * DISK_PAGE < file.size_bytes:
            # A smaller size cut that region: what is deleted now must not be back at a larger one.
            # `settle` makes that durable.
            self.log.forbid_region(self.geometry.regions, self.next_lap)
        if former.node_id != node_id:
            # What another node has under a name may have been replaced on this one since.
            self.log.add([record(Record.VALUES_UP_TO, self.end)])
            self.log.commit()
        self._write_superblock()
        return self

    @classmethod
    def _make(
        cls, file: BlockFile, number: int, like: DiskSuperblock, keys: DiskKeys
    ) -> DiskDevice:
        """Make an empty device: with a new UUID, all that is on it is noise."""
        uuid, now_s = os.urandom(UUID_BYTES), int(time.time())
        self = cls(file, number, like._replace(uuid=uuid, made_s=now_s), keys)
        self._write_superblock()
        blank = aligned(DISK_PAGE)
        for region in range(self.geometry.regions if like.uuid else 0):
            self.file.write(self.geometry.start(region) * DISK_PAGE, [blank])
        self.log.make()
        return self

    def _write_superblock(self) -> None:
        """Write both copies, with a sync between: one of them is whole at any time."""
        self._superblock = self._superblock._replace(writes=self._superblock.writes + 1)
        page = aligned(DISK_PAGE)
        page[:] = pack_superblock(self._superblock)
        for copy in range(SUPERBLOCK_COPIES):
            self.file.write(copy * DISK_PAGE, [page])
            self.file.sync()

    @property
    def end(self) -> int:
        """Return an order that no block of an earlier run is above."""
        return self.next_lap << 32

    # --- what is there ----------------------------------------------------------------

    def header(self, region: int) -> memoryview:
        """Return the page of a region's header, as it is. Raises `OSError`."""
        page = aligned(DISK_PAGE)
        self.file.read(self.geometry.start(region) * DISK_PAGE, page)
        return page

    def states(self) -> list[RegionState]:
        """Return the lap of each region, read anew; 0 of one that was never begun. Where that
        cannot be told the region is forbidden (`Log.forbid_region`), and it is 0 too."""
        page = aligned(DISK_PAGE)
        regions = range(self.geometry.regions)
        return [RegionState(region, self._lap_of(region, page)) for region in regions]

    def _lap_of(self, region: int, page: memoryview) -> int:
        with contextlib.suppress(OSError):
            self.file.read(self.geometry.start(region) * DISK_PAGE, page)
            lap = 0 if page == _BLANK_PAGE else lap_in(page, self.uuid, region)
            if lap is not None:
                sealing = sealing_in(page)
                self._key_ids[region] = b"" if sealing is None else sealing.key_id
                return lap
        self.log.forbid_region(region, self.next_lap)
        return 0

    def locked(self) -> dict[bytes, int]:
        """Return how many regions have blocks that cannot be read, by the ids of the keys that are
        missing; with an empty id those that are plain, where they should not be."""
        names = Counter(self._key_ids[region] for region, lap in self._laps.items() if lap)
        return {name: n for name, n in names.items() if name not in (self.keys or (b"",))}

    def blocks(self, state: RegionState, *, tags: bool = False) -> Sequence[DiskBlock]:
        """Return the blocks of a region, the newest first, also forbidden ones; with `tags` those
        of an encrypted region as its entries have them, where there are no keys. Where one is
        damaged or they cannot be read, or decrypted, the region is forbidden, and has none."""
        shape, sealed = self.geometry, bool(self.keys) or tags
        end = shape.first_page(state.region) + shape.payload_pages
        parts: list[Sequence[DiskBlock]] = []
        page, pages, room = 0, ENTRY_PAGES_MIN, shape.entries
        with contextlib.suppress(OSError):
            seal = self._seals.of(*state) if self.keys else None
            while page < shape.entry_pages and page * ENTRIES_PER_PAGE < room:
                area = mmap.mmap(-1, min(pages, shape.entry_pages - page) * DISK_PAGE)
                where = (shape.start(state.region) + 1 + page) * DISK_PAGE
                self.file.read(where, memoryview(area))
                start = page * ENTRIES_PER_PAGE
                part = unpack_entries(
                    area, self.number, state, shape, self.seed, start, sealed=sealed
                )
                if part is None or (self.keys and seal is None):
                    break
                page, pages = page + len(area) // DISK_PAGE, 2 * pages
                if part:
                    # Places ascend: behind the last one are no more blocks than pages.
                    last = start + area.rfind(part[0].key) // ENTRY_BYTES
                    left = end - part[0].place.page - pages_of(part[0].length)
                    room = last + 1 + left
                parts.insert(0, [seal.masked(block) for block in part] if seal else part)
            else:
                return joined(parts)
        self.log.forbid_region(state.region, self.next_lap)
        return []

    def read(self, block: DiskBlock) -> bytes | None:
        """Return the payload of a block; None unless it has the block's checksum, or tag. Raises
        `OSError`."""
        pages = aligned(pages_of(block.length) * DISK_PAGE)
        return bytes(pages[: block.length]) if self.read_into(block, pages) else None

    def read_into(self, block: DiskBlock, pages: memoryview) -> bool:
        """Read a block into its number of pages of aligned memory; return whether it has its
        checksum, or its tag, and is decrypted. Raises `OSError`."""
        self._check_open()
        place, region = block.place, self.geometry.region_of(block.place.page)
        if not self.geometry.holds(region, place.page, block.length):
            return False
        self.file.read(place.page * DISK_PAGE, pages)
        payload = pages[: block.length]
        if not self.keys:
            return xxh3_64_intdigest(payload) == block.checksum
        seal = self._seals.of(region, place.lap)
        return seal is not None and seal.opening(block).update(payload).is_right()

    # --- writing ------------------------------------------------------------------------

    def give_up(self, region: int) -> None:
        """Forbid all that is in a region, durably: before its blocks leave the index. Raises
        `OSError`."""
        self.log.forbid_region(region, self.next_lap)
        self.log.commit()

    def begin(self, region: int, lap: int, reset_number: int) -> None:
        """Begin a region. Laps grow, from `next_lap` on. Raises `OSError`; then the region takes no
        blocks."""
        self._check_open()
        if not (0 <= region < self.geometry.regions and self.next_lap <= lap <= LAP_MAX):
            raise InternalError(f"region {region} cannot be begun as lap {lap}")
        self._open = None
        if lap > self.log.said.numbers[Record.LAPS]:
            self.log.add([record(Record.LAPS, lap + LAPS_RESERVED)])
        self.give_up(region)
        self.next_lap = lap + 1
        page = aligned(DISK_PAGE)
        sealing = Sealing(next(iter(self.keys)), os.urandom(SALT_BYTES)) if self.keys else None
        self._seal = None if sealing is None else self._seals.make(region, lap, sealing)
        page[:] = pack_region(self.uuid, region, lap, reset_number, sealing)
        self.file.write(self.geometry.start(region) * DISK_PAGE, [page])
        self._begun[region] = lap
        self._entries = aligned(len(self._entries))
        self._written, self._next_page = 0, self.geometry.first_page(region)
        self._open = region, lap

    def write(
        self, region: int, lap: int, blocks: Iterable[tuple[DiskBlock, Buffer]]
    ) -> list[DiskBlock]:
        """Write payloads to the places of their blocks, and then their entries; the rest of a
        payload's last page is zeros. The region is the one begun last, and places ascend. Return
        the blocks, with their tags where they are encrypted.

        Whole pages are written from where they lie, if they lie in pages. Raises `OSError`: then
        the region takes no more, and the keys are to be forbidden, since some may be there. Where
        `blocks` raises, no entry is written.
        """
        self._check_open()
        if self._open != (region, lap):
            raise OSError(errno.EIO, f"region {region} takes no blocks as lap {lap}")
        self._open = None  # until all is written
        first = self._written
        written = [self._write_payload(region, lap, *one) for one in blocks]
        if written:
            start = first * ENTRY_BYTES // DISK_PAGE
            pages = self._entries[
                start * DISK_PAGE : pages_of(self._written * ENTRY_BYTES) * DISK_PAGE
            ]
            self.file.write((self.geometry.start(region) + 1 + start) * DISK_PAGE, [pages])
        self._open = region, lap
        return written

    def _write_payload(self, region: int, lap: int, block: DiskBlock, raw: Buffer) -> DiskBlock:
        """Write one payload, and take down its entry."""
        page, payload = block.place.page, memoryview(raw).cast("B")
        fits = self.geometry.holds(region, page, block.length) and page >= self._next_page
        is_right = len(payload) == block.length and block.checksum and block.place.lap == lap
        if not fits or not is_right or self._written >= self.geometry.entries:
            raise InternalError(f"{block.place} is no place for {len(payload)} bytes")
        entry = block
        if self._seal is not None:
            pages = aligned(pages_of(block.length) * DISK_PAGE)
            block, payload = self._seal.seal(block, payload, pages), pages
            entry = self._seal.masked(block)
        self.file.write(page * DISK_PAGE, list(_in_pages(payload)))
        at = self._written * ENTRY_BYTES
        self._entries[at : at + ENTRY_BYTES] = pack_entry(entry, self._written, self.seed)
        self._written, self._next_page = self._written + 1, page + pages_of(block.length)
        return block

    # --- the end ------------------------------------------------------------------------

    def _durable_laps(self) -> dict[int, int]:
        """Return the lap of each region, as the header on the disk says: a new one that was not
        synced may be lost, and so may one that was."""
        begun, page = dict(self._begun), aligned(DISK_PAGE)
        self.file.sync()
        for region, lap in begun.items():
            if self._lap_of(region, page) == lap:
                self._laps[region] = lap
                if self._begun.get(region) == lap:
                    del self._begun[region]
        return self._laps

    def close_for_good(self, reason: str) -> None:
        """Write and read nothing more, in this run or a later one: a sync failed. That is written
        on the device itself, where it can still be done; the other devices' logs must say it too
        (`Log.note_closed`). Never raises."""
        self._closed = self._closed or reason
        self._superblock = self._superblock._replace(closed_s=int(time.time()))
        with contextlib.suppress(OSError):
            self._write_superblock()

    def trouble(self) -> str | None:
        """Return why the device should not be used any more, for a message; None: it may."""
        return self._closed or self.file.trouble()

    def _check_open(self) -> None:
        if self._closed:
            raise OSError(errno.EIO, f"{self.file.name} is closed for good: {self._closed}")

    def close(self) -> None:
        """Close the file. Safe to call twice."""
        self.file.close()


def superblock_of(file: BlockFile) -> DiskSuperblock | None:
    """Return the superblock of a file, None where it has none yet. Raises as `DiskDevice.open`."""
    copies, errors = [], []
    for copy in range(SUPERBLOCK_COPIES):
        copies.append(page := aligned(DISK_PAGE))
        try:
            file.read(copy * DISK_PAGE, page)
        except OSError as error:
            errors.append(error)
    found = [block for block in map(unpack_superblock, copies) if block is not None]
    if not found:
        if errors:
            raise errors[0]
        versions = {version_of(copy) for copy in copies}
        if versions == {None} and any(page != _BLANK_PAGE for page in copies):
            raise UsageError("disk", file.name, "is no disk of kvstore's: move it away")
        if versions - {None, VERSION}:
            must = f"has a format of another version than {VERSION}: {ANEW}"
            raise UsageError("disk", file.name, must)
        return None
    newest = max(found, key=lambda block: block.writes)
    if newest.closed_s:
        why = f"it was closed for good, since a sync failed: look at the drive; {ANEW}"
        raise OSError(errno.EIO, why, file.name)
    return newest


def _in_pages(payload: memoryview) -> Iterator[Buffer]:
    """Yield a payload in whole pages of aligned memory: as it lies, as far as that goes."""
    whole = len(payload) // DISK_PAGE * DISK_PAGE if address_of(payload) % DISK_PAGE == 0 else 0
    if whole:
        yield payload[:whole]
    if whole < len(payload):
        rest = aligned(pages_of(len(payload) - whole) * DISK_PAGE)
        rest[: len(payload) - whole] = payload[whole:]
        yield rest
