"""Blocks of encrypted disks in objects: never plain, and encrypted anew where they are imported."""

from __future__ import annotations

import io
from collections.abc import Mapping

import pytest
from disk_parts import keys_of, open_device
from exported_parts import BLOCKS, SECRET, bytes_of, fill, new_disk, objects_of

from kvstore.segment.disk.adopt import adopt
from kvstore.segment.disk.exported import RegionObjectError
from kvstore.segment.disk.imported import Importer
from kvstore.types import Key

pytest.importorskip("cryptography")
KEYS = keys_of("one")


def exported(keys: Mapping[bytes, bytes]) -> tuple[str, bytes]:
    fill(open_device(disk := new_disk(), keys=keys), 0, BLOCKS[:3])
    ((name, raw),) = objects_of(disk).items()
    return name, raw


def imported(name: str, raw: bytes, keys: Mapping[bytes, bytes]) -> set[Key]:
    """Import an object; the blocks that are found then, each with the right bytes."""
    disk = new_disk()
    device = open_device(disk, node_id=None, keys=keys)
    assert Importer(device, [SECRET]).take(name, io.BytesIO(raw).read) == 3
    device = open_device(disk, node_id=None, keys=keys)
    found = [block for _, blocks in adopt(device) for block in blocks]
    assert all(device.read(block) == bytes_of(block.key) for block in found)
    plain = b"".join(disk.page(number) for number in range(disk.size_bytes // 4096))
    assert not keys or not any(bytes_of(key)[:64] in plain for key in BLOCKS)
    return {block.key for block in found}


def test_they_arrive_encrypted_where_the_key_is_there() -> None:
    name, raw = exported(KEYS)
    assert not any(bytes_of(key)[:64] in raw for key in BLOCKS)
    for keys in (KEYS, keys_of("two", "one")):
        assert imported(name, raw, keys) == set(BLOCKS[:3])


@pytest.mark.parametrize("keys", [keys_of("two"), {}], ids=["another", "none"])
def test_an_object_whose_key_is_not_there_is_refused(keys: Mapping[bytes, bytes]) -> None:
    name, raw = exported(KEYS)
    device = open_device(new_disk(), node_id=None, keys=keys)
    with pytest.raises(RegionObjectError, match=f"{name} is encrypted with another key"):
        Importer(device, [SECRET]).take(name, io.BytesIO(raw).read)


def test_plain_ones_are_encrypted_on_a_disk_that_is() -> None:
    assert imported(*exported({}), KEYS) == set(BLOCKS[:3])
