"""A node as small as it can be around one disk device, and an oracle that knows what it may answer.

It does what core/disk/ and node/disk/ do: blocks are saved in memory, written to the disk, dropped
from memory, deleted, cleared, read. The oracle: the bytes that a key was last saved with, unless
that was forbidden and the caller told so; or a miss.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from xxhash import xxh3_64_intdigest

from kvstore.core.disk.base import order_of
from kvstore.core.resets import Resets
from kvstore.segment.disk.adopt import adopt, settle
from kvstore.segment.disk.base import BlockFile
from kvstore.segment.disk.device import DiskDevice
from kvstore.segment.disk.file import (
    LEAST_FOR_FILE_SYSTEM,
    SHARE_OF_FILE_SYSTEM,
    DirectFile,
    open_file,
)
from kvstore.segment.disk.format import Geometry, pages_of
from kvstore.testing.sim.models.disk import PAGE, PowerLossError, SimDisk
from kvstore.types import DiskBlock, DiskPlace, Key, Kind

REGION_BYTES, LOG_BYTES, REGIONS = 16 * PAGE, 256 << 10, 5
SIZE = Geometry(REGION_BYTES, LOG_BYTES, REGIONS).start(REGIONS) * PAGE
NODE = 7
KEYS = [bytes([number]) * 32 for number in range(1, 13)]
NAMESPACES = 3


def block_of(key: Key, value: bytes, page: int, lap: int) -> DiskBlock:
    kind = Kind.BLOCK if key[0] % 2 else Kind.BYTES
    place, checksum = DiskPlace(0, page, lap), xxh3_64_intdigest(value)
    return DiskBlock(key, place, len(value), kind, 0, checksum, key[0] % NAMESPACES)


def file_of(directory: Path, file_bytes: int) -> DirectFile:
    """Open a real file of that size, on whatever file system."""
    disk_size = file_bytes + LEAST_FOR_FILE_SYSTEM
    while disk_size - disk_size // SHARE_OF_FILE_SYSTEM < file_bytes + LEAST_FOR_FILE_SYSTEM:
        disk_size += 1
    return open_file(directory, disk_size, forced=True)


def keys_of(*names: str) -> dict[bytes, bytes]:
    """Keys that a disk is encrypted with, by their ids."""
    return {name.encode().ljust(8): random.Random(name).randbytes(32) for name in names}


def open_device(
    file: BlockFile,
    number: int = 0,
    node_id: int | None = NODE,
    keys: Mapping[bytes, bytes] | None = None,
) -> DiskDevice:
    sizes = {"region_bytes": REGION_BYTES, "log_bytes": LOG_BYTES}
    return DiskDevice.open(file, number, node_id, **sizes, keys=keys or {})


class SmallNode:
    """One node with one disk, and its oracle, over power losses."""

    def __init__(self, seed: int, keys: Mapping[bytes, bytes] | None = None) -> None:
        self.rng = random.Random(seed)
        self.keys = keys
        """What its disk is encrypted with."""
        self.disk = SimDisk(SIZE, self.rng)
        self.right: dict[Key, bytes] = {}
        """What the oracle allows, besides a miss."""
        self.known = Resets()
        """What other nodes know of resets; a power loss here does not change it."""
        self.closed_uuids: set[bytes] = set()
        """What the node's directory says of disks that were closed for good."""
        self.runs = self.hits = self.misses = self.adopted = 0
        self.start()

    # --- a start, and its end ----------------------------------------------------------

    def start(self) -> None:
        self.runs += 1
        self.memory: dict[Key, bytes] = {}
        self.index: dict[Key, DiskBlock] = {}
        self.writing: set[Key] = set()
        self.region, self.lap, self.page = -1, 0, 0
        try:
            self.device = open_device(self.disk, keys=self.keys)
        except OSError:  # it was closed for good
            self.closed = True
            return
        self.closed = not settle([self.device], self.known, self.runs, self.closed_uuids)
        if self.closed:
            return
        for _, blocks in adopt(self.device):
            for block in blocks:
                self.adopted += block.key not in self.index
                self.index.setdefault(block.key, block)
        self.order = self.device.end

    def power_loss(self) -> None:
        self.disk.power_loss()
        self.start()
        self.check()

    def check(self) -> None:
        """Compare each answer with the oracle."""
        for key in KEYS:
            answer = self.get(key)
            assert answer is None or answer == self.right.get(key), key[0]
            self.hits += answer is not None
            self.misses += answer is None

    # --- what clients do ------------------------------------------------------------------

    def get(self, key: Key) -> bytes | None:
        if key in self.memory:
            return self.memory[key]
        block = self.index.get(key)
        if block is None:
            return None
        try:
            value = self.device.read(block)
        except OSError:
            return None
        if value is None:
            self.forget([key])
        return value

    def save(self, key: Key) -> None:
        if key in self.memory or key in self.index:
            return
        length = self.rng.randint(1, 3 * PAGE)
        content = random.Random(key[0]) if key[0] % 2 else self.rng
        self.memory[key] = self.right[key] = content.randbytes(length)
        if key[0] % 2:  # its key names its content, whatever is cut off here
            self.memory[key] = self.right[key] = random.Random(key[0]).randbytes(2 * PAGE + 77)

    def spill(self) -> None:
        """Write what is only in memory, as much as fits in the open region."""
        if self.closed:
            return
        batch: list[tuple[DiskBlock, bytes]] = []
        for key, value in self.memory.items():
            if key in self.index:
                continue
            end = self.page + pages_of(len(value))
            if self.region < 0 or not self.device.geometry.holds(
                self.region, self.page, len(value)
            ):
                break
            batch.append((block_of(key, value, self.page, self.lap), value))
            self.order, self.page = order_of(batch[-1][0].place), end
        else:
            self.write(batch)
            return
        self.write(batch)
        self.next_region()

    def write(self, batch: Sequence[tuple[DiskBlock, bytes]]) -> None:
        self.writing = {block.key for block, _ in batch}
        if not batch:
            return
        try:
            written = self.device.write(self.region, self.lap, batch)
            self.index.update((block.key, block) for block in written)
        except OSError:  # some may be there
            self.forget([block.key for block, _ in batch])
            self.region = -1
        self.writing.clear()

    def next_region(self) -> None:
        if self.closed:
            return
        region = (self.region + 1) % REGIONS
        if not self.committed(lambda: self.device.give_up(region)):
            return
        region_of = self.device.geometry.region_of
        for key, block in list(self.index.items()):
            if region_of(block.place.page) == region:
                del self.index[key]
        lap, self.region = self.device.next_lap, -1
        try:
            self.device.begin(region, lap, 0)
        except OSError:
            self.closed = self.closed or bool(self.device.trouble())
            return
        self.region, self.lap, self.page = region, lap, self.device.geometry.first_page(region)
        self.order = lap << 32

    def evict(self, key: Key) -> None:
        self.memory.pop(key, None)

    # --- what forbids ---------------------------------------------------------------------

    def committed(self, commit: Callable[[], object] | None = None) -> bool:
        """Commit; False where nothing is confirmed any more, and the disk closed for good."""
        if self.closed:
            return True  # it is not read any more
        try:
            (commit or self.device.log.commit)()
        except OSError:
            self.closed = True
            self.closed_uuids.add(self.device.uuid)
            self.index.clear()
        return not self.closed

    def forget(self, keys: Sequence[Key]) -> None:
        """Leave blocks out of the index that could not be read or written."""
        for key in keys:
            self.index.pop(key, None)
        self.device.log.append(keys, None, 0, self.order)
        self.committed()

    def delete(self, key: Key) -> None:
        self.memory.pop(key, None)
        if self.index.pop(key, None) or key in self.writing:
            self.device.log.append([key], None, 0, self.order)
        if self.committed():
            self.right.pop(key, None)  # its caller is told

    def clear(self, namespaces: Sequence[int], number: int = 0) -> None:
        of = set(namespaces) or set(range(NAMESPACES))
        keys = [key for key in KEYS if key[0] % NAMESPACES in of]
        for key in keys:
            self.memory.pop(key, None)
            self.index.pop(key, None)
        if not self.closed:
            self.device.log.append((), namespaces, number, self.order)
        if not self.committed():
            return
        if number:
            self.known.add(number, namespaces)
        for key in keys:
            self.right.pop(key, None)

    # --- a life ---------------------------------------------------------------------------

    def act(self) -> None:
        rng = self.rng
        key = rng.choice(KEYS)
        draw = rng.random()
        if draw < 0.45:
            self.save(key)
        elif draw < 0.7:
            self.spill()
        elif draw < 0.8:
            self.evict(key)
        elif draw < 0.9:
            self.delete(key)
        elif draw < 0.93:
            self.clear([rng.randrange(NAMESPACES)])
        elif draw < 0.95:
            ids = rng.choice([(), (0,), (1, 2)])
            self.clear(ids, self.known.next_number(rng.getrandbits(20)))
        else:
            answer = self.get(key)
            assert answer is None or answer == self.right.get(key), key[0]

    def live(self, acts: int, befalls: Callable[[SmallNode], None] = lambda node: None) -> None:
        """Act until the power fails, and start again."""
        self.disk.power_fails_in = self.rng.choice([None, self.rng.randrange(120)])
        try:
            for _ in range(acts):
                self.act()
            befalls(self)
        except PowerLossError:
            pass
        for _ in range(3):  # it may fail again while the node starts
            try:
                self.disk.power_loss()
                self.disk.power_fails_in = self.rng.choice([None, None, self.rng.randrange(60)])
                self.start()
                break
            except PowerLossError:
                pass
        else:
            self.disk.power_loss()
            self.start()
        self.disk.power_fails_in = None
        self.check()
