"""What is encoded is decoded again, and nothing else is."""

from __future__ import annotations

import random
from typing import Any

import pytest
from disk_parts import PAGE, block_of

from kvstore.core.disk.base import RegionState
from kvstore.segment.disk import format as disk_format
from kvstore.segment.disk.format import (
    ENTRY_BYTES,
    LOG_BYTES,
    REGION_BYTES,
    DiskSuperblock,
    Geometry,
    lap_in,
    pack_entry,
    pack_region,
    pack_superblock,
    seed_of,
    unpack_entries,
    unpack_superblock,
    version_of,
)
from kvstore.types import DiskBlock, DiskPlace

UUID, OTHER = bytes(range(16)), bytes(range(1, 17))
BLOCK = DiskSuperblock(UUID, 3, REGION_BYTES, LOG_BYTES, 1 << 63, 1_800_000_000, 0)
GEOMETRY = Geometry(16 * PAGE, 64 * PAGE, 5)
FIRST = GEOMETRY.first_page(2)
ENTRY = block_of(bytes(range(32)), b"x" * 5000, FIRST + 3, 9)
STATE = RegionState(2, 9)


def flipped(raw: bytes, rng: random.Random, upto: int) -> bytes:
    changed = bytearray(raw)
    changed[rng.randrange(upto)] ^= 1 << rng.randrange(8)
    return bytes(changed)


def test_a_superblock_comes_back_and_damaged_it_is_none() -> None:
    page = pack_superblock(BLOCK)
    assert len(page) == PAGE
    assert unpack_superblock(page) == BLOCK
    rng = random.Random(1)
    assert all(unpack_superblock(flipped(page, rng, 80)) is None for _ in range(200))
    assert (version_of(page), version_of(bytes(PAGE))) == (1, None)


def test_a_region_header_is_of_its_device_and_place() -> None:
    page = pack_region(UUID, 4, 77, 1 << 62)
    assert lap_in(page, UUID, 4) == 77
    assert lap_in(page, UUID, 5) is None
    assert lap_in(page, OTHER, 4) is None
    rng = random.Random(1)
    assert all(lap_in(flipped(page, rng, 48), UUID, 4) is None for _ in range(200))


def entries(raw: bytes, state: RegionState = STATE, uuid: bytes = UUID) -> object:
    found = unpack_entries(raw.ljust(PAGE, b"\0"), 3, state, GEOMETRY, seed_of(uuid))
    return None if found is None else list(found)


@pytest.mark.usefixtures("way")
def test_an_entry_is_of_its_device_lap_and_place() -> None:
    raw = pack_entry(ENTRY, 0, seed_of(UUID))
    assert len(raw) == ENTRY_BYTES
    assert entries(raw) == [ENTRY._replace(place=ENTRY.place._replace(device=3))]
    assert entries(raw, RegionState(2, 8)) == []
    assert entries(raw, RegionState(1, 9)) == []
    assert entries(bytes(ENTRY_BYTES) + raw) == []
    assert entries(raw, uuid=OTHER) is None
    rng = random.Random(1)
    assert all(entries(flipped(raw, rng, ENTRY_BYTES)) is None for _ in range(200))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    ("page", "length"),
    [(FIRST - 1, 5000), (FIRST + 13, 5000), (FIRST + 14, 1), (FIRST, 0), (FIRST, 15 * PAGE)],
)
def test_an_entry_outside_its_regions_payloads_is_none(page: int, length: int) -> None:
    block = ENTRY._replace(place=ENTRY.place._replace(page=page), length=length)
    assert entries(pack_entry(block, 0, seed_of(UUID))) == []


def test_compiled_and_in_python_entries_say_the_same(
    built: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random ones, half of which have a field that is not as it should be."""
    rng = random.Random(5)
    for _ in range(300):
        uuid, raw = rng.randbytes(16), b""
        for number in range(rng.randrange(33)):
            lap, page = 9 - (rng.random() < 0.1), FIRST + rng.randrange(-1, 14)
            place, length = DiskPlace(0, page, lap), rng.choice([0, 1, PAGE, PAGE + 1, 5 * PAGE])
            kind, meta, its = rng.randrange(16), rng.randrange(1 << 16), rng.randrange(1 << 32)
            checksum = rng.randrange(1, 1 << 64)
            block = DiskBlock(rng.randbytes(32), place, length, kind, meta, checksum, its)
            packed = pack_entry(block, number + (rng.random() < 0.1), seed_of(uuid))
            raw += bytes(ENTRY_BYTES) if rng.random() < 0.1 else packed
        if raw and rng.random() < 0.1:
            raw = flipped(raw, rng, len(raw))
        said = []
        for compiled in (built, None):
            monkeypatch.setattr(disk_format, "COMPILED", compiled)
            said.append(entries(raw, uuid=uuid))
        assert said[0] == said[1]


def test_a_device_is_divided_without_gaps_and_overlaps() -> None:
    for region_bytes in (64 << 10, 1 << 20, REGION_BYTES):
        for size in (10 * REGION_BYTES, 10 * REGION_BYTES + 12345 * PAGE):
            geometry = Geometry.of(size, region_bytes, LOG_BYTES)
            end = geometry.start(geometry.regions) * PAGE
            assert 0 <= size - end < region_bytes
            assert geometry.start(0) * PAGE == 2 * PAGE + LOG_BYTES
            for region in (0, 1, geometry.regions - 1):
                first = geometry.first_page(region)
                assert first + geometry.payload_pages == geometry.start(region + 1)
                assert geometry.region_of(first) == region
                assert geometry.region_of(geometry.start(region + 1) - 1) == region
            assert geometry.region_of(geometry.start(0) - 1) == -1
    assert Geometry(REGION_BYTES, LOG_BYTES, 4).entries == 16_384
