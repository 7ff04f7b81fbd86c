"""Disk devices in memory with blocks of engines on them, and their objects."""

from __future__ import annotations

import io
import random
from collections.abc import Iterable

from disk_parts import KEYS, SIZE, open_device
from xxhash import xxh3_64_intdigest

from kvstore.core.disk.base import RegionState
from kvstore.segment.disk.adopt import adopt
from kvstore.segment.disk.device import DiskDevice
from kvstore.segment.disk.exported import RegionObject, opened
from kvstore.segment.disk.format import pages_of
from kvstore.segment.disk.imported import Importer
from kvstore.testing.sim.models.disk import PAGE, SimDisk
from kvstore.types import DiskBlock, DiskPlace, Key, Kind

SECRET = b"a secret of some length"
BLOCKS = [key for key in KEYS if key[0] % 2]
VALUE = next(key for key in KEYS if not key[0] % 2)


def bytes_of(key: Key) -> bytes:
    return random.Random(key).randbytes(PAGE + 77 * key[0])


def block_of(key: Key, page: int, lap: int) -> DiskBlock:
    """A block whose namespace is its key's first byte; blocks of engines have odd ones."""
    raw, kind = bytes_of(key), Kind.BLOCK if key[0] % 2 else Kind.BYTES
    place = DiskPlace(0, page, lap)
    return DiskBlock(key, place, len(raw), kind, 0, xxh3_64_intdigest(raw), key[0])


def new_disk() -> SimDisk:
    return SimDisk(SIZE, random.Random(1))


def fill(device: DiskDevice, region: int, keys: Iterable[Key]) -> None:
    """Begin a region, and write these blocks there."""
    lap, page, blocks = device.next_lap, device.geometry.first_page(region), []
    device.begin(region, lap, device.log.said.resets.newest)
    for key in keys:
        blocks.append((block_of(key, page, lap), bytes_of(key)))
        page += pages_of(len(bytes_of(key)))
    device.write(region, lap, blocks)


def disk_with(*regions: Iterable[Key]) -> SimDisk:
    """A disk whose first regions have these blocks."""
    disk = new_disk()
    device = open_device(disk)
    for region, keys in enumerate(regions):
        fill(device, region, keys)
    return disk


def begun_regions(device: DiskDevice) -> list[RegionState]:
    return sorted((one for one in device.states() if one.lap), key=lambda one: one.lap)


def objects_of(disk: SimDisk, secret: bytes = SECRET) -> dict[str, bytes]:
    """What is exported of a disk, by name."""
    found = [RegionObject(disk, one) for one in begun_regions(opened(disk))]
    return {one.name: b"".join(one.pieces(secret)) for one in found if one.blocks}


def taken(disk: SimDisk, objects: dict[str, bytes], *secrets: bytes) -> int:
    """Import objects; how many blocks those were."""
    importer = Importer(open_device(disk, node_id=None), secrets or (SECRET,))
    return sum(importer.take(name, io.BytesIO(raw).read) for name, raw in objects.items())


def adopted(disk: SimDisk, *, misses: bool = False) -> set[Key]:
    """The keys that a start finds on a disk, all with the right bytes; with `misses` some may have
    lost them."""
    device = open_device(disk, node_id=None)
    found = [block for _, blocks in adopt(device) for block in blocks]
    for block in found:
        raw = device.read(block)
        assert raw == bytes_of(block.key) or (misses and raw is None), block.key[0]
    return {block.key for block in found}
