"""A region as an object: what is in it, and when there is none."""

from __future__ import annotations

import pytest
from disk_parts import open_device
from exported_parts import (
    BLOCKS,
    SECRET,
    VALUE,
    begun_regions,
    bytes_of,
    disk_with,
    fill,
    new_disk,
    objects_of,
)

from kvstore.errors import UsageError
from kvstore.segment.disk.exported import (
    PIECE_BYTES,
    RegionObject,
    RegionObjectError,
    opened,
)


def test_each_region_is_an_object_named_for_its_device_region_and_lap() -> None:
    disk = disk_with(BLOCKS[:2], BLOCKS[2:4])
    uuid = open_device(disk).uuid.hex()
    assert [*objects_of(disk)] == [f"{uuid}-0-0000000001.region", f"{uuid}-1-0000000002.region"]


def test_values_that_clients_named_stay_at_home() -> None:
    (raw,) = objects_of(disk_with([BLOCKS[0], VALUE])).values()
    assert bytes_of(BLOCKS[0]) in raw
    assert bytes_of(VALUE) not in raw
    assert VALUE not in raw
    assert objects_of(disk_with([VALUE])) == {}


@pytest.mark.parametrize("how", ["delete", "clear", "reset"])
def test_what_was_forbidden_leaves_no_bytes_in_an_object(how: str) -> None:
    disk = disk_with(BLOCKS[:2])
    device, key = open_device(disk), BLOCKS[0]
    named = ([key], None, 0) if how == "delete" else ((), [key[0]], 7 if how == "reset" else 0)
    device.log.append(*named, device.end)
    device.log.commit()
    (raw,) = objects_of(disk).values()
    assert bytes_of(key) not in raw
    assert key not in raw
    assert bytes_of(BLOCKS[1]) in raw


def test_a_region_that_is_written_over_meanwhile_is_no_object() -> None:
    disk = disk_with(BLOCKS[:3])
    device = open_device(disk)
    (state,) = begun_regions(opened(disk))
    for after in range(4):  # so many pieces: the head, and three payloads
        pieces = RegionObject(disk, state).pieces(SECRET)
        for _ in range(after + 1):
            next(pieces)
        fill(device, 0, BLOCKS[:3])  # the same bytes, at the same places
        with pytest.raises(RegionObjectError, match=r"region 0 of .* was written over meanwhile"):
            list(pieces)
        state = state._replace(lap=device.next_lap - 1)


def test_a_region_that_cannot_be_read_is_no_object_and_others_are() -> None:
    disk = disk_with(BLOCKS[:2], BLOCKS[2:4])
    states = begun_regions(opened(disk))
    disk.unreadable = {opened(disk).geometry.first_page(0)}
    with pytest.raises(RegionObjectError, match=r"region 0 of .* cannot be read"):
        list(RegionObject(disk, states[0]).pieces(SECRET))
    assert list(RegionObject(disk, states[1]).pieces(SECRET))


def test_pieces_are_small_however_large_a_block_is(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = disk_with(BLOCKS[-1:])
    monkeypatch.setattr("kvstore.segment.disk.exported.PIECE_BYTES", 4096)
    (state,) = begun_regions(opened(disk))
    _head, *pieces, _tag = RegionObject(disk, state).pieces(SECRET)
    assert {len(piece) for piece in pieces} == {4096}
    assert b"".join(pieces).startswith(bytes_of(BLOCKS[-1]))
    assert PIECE_BYTES == 8 << 20


def test_a_log_that_is_damaged_or_a_file_without_a_disk_is_said_so() -> None:
    disk = disk_with(BLOCKS[:1])
    disk.sync()
    for half in range(2):
        disk.pages[2 + half * 32] = b"\1" * 4096
    with pytest.raises(RegionObjectError, match="its log is damaged, or was being written"):
        opened(disk)
    with pytest.raises(UsageError, match="must be the disk of a node that has used it"):
        opened(new_disk())
