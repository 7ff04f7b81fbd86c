"""The table of what lies on disks: as every index of it, with its windows, and as others see it."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from contract.disk_index import DiskIndexContract, block

from kvstore.core.disk.base import DiskIndex
from kvstore.errors import NoSpaceError
from kvstore.segment.disk import table as module
from kvstore.segment.disk.images import IMAGE_BYTES, Images, pack
from kvstore.segment.disk.table import (
    WINDOW_BYTES,
    WINDOW_ENTRIES,
    AttachedTable,
    DiskTable,
    table_bytes,
)
from kvstore.types import DiskBlock, DiskPlace, Key

NODE, EPOCH = 0x1234_5678_9ABC_DEF0, 3


def made(folder: Path, blocks: int = 1000) -> DiskTable:
    folder.mkdir(exist_ok=True)
    return DiskTable(folder / "t.table", NODE, EPOCH, blocks)


def attached(table: DiskTable) -> AttachedTable:
    return AttachedTable(table.path, NODE, EPOCH)


@pytest.fixture
def table(tmp_path: Path) -> Iterator[DiskTable]:
    found = made(tmp_path)
    yield found
    found.close()


class TestDiskTable(DiskIndexContract):
    @pytest.fixture
    def index(self, way: str, table: DiskTable) -> DiskIndex:
        return table


@pytest.mark.parametrize("blocks", [1, 40, 400])
def test_compiled_and_in_python_adoption_leave_the_same_table(
    tmp_path: Path, built: Any, monkeypatch: pytest.MonkeyPatch, blocks: int
) -> None:
    """Of keys that come again, of several devices and laps, until there is no room for all."""
    tables = {way: made(tmp_path / way, blocks) for way in ("Python", "compiled")}
    rng = random.Random(blocks)
    keys = [rng.randbytes(32) for _ in range(blocks * 3)]
    for _ in range(20):
        told = Images(b"".join(pack(_anywhere(rng.choice(keys), rng)) for _ in range(blocks)))
        said = []
        for way, table in tables.items():
            monkeypatch.setattr(module, "COMPILED", built if way == "compiled" else None)
            gone, left_out = table.adopt(told, keys[:3], {5})
            said.append((list(gone), list(left_out), table.blocks, table.block_bytes))
        assert said[0] == said[1]
        images = [table.path.read_bytes()[mmap.PAGESIZE :] for table in tables.values()]
        assert images[0] == images[1]
        for table in tables.values():
            table.remove(told[0].key)
            table.put(told[-1])
    for table in tables.values():
        table.close()


def _anywhere(key: Key, rng: random.Random) -> DiskBlock:
    place = DiskPlace(rng.randrange(3), rng.randrange(9), rng.randrange(20))
    return block(key, place, rng.randrange(6), rng.randrange(1, 99))


def test_what_is_no_table_and_no_images_is_not_touched(built: Any) -> None:
    with pytest.raises(ValueError, match="no windows of one table"):
        built.adopt(bytearray(WINDOW_BYTES), bytearray(2), b"")
    with pytest.raises(ValueError, match="no windows of one table"):
        built.adopt(bytearray(0), bytearray(0), b"")
    with pytest.raises(TypeError):
        built.adopt(bytes(WINDOW_BYTES), bytearray(1), b"")


def test_a_reader_finds_what_the_node_put(table: DiskTable) -> None:
    reader, blocks = attached(table), [block() for _ in range(50)]
    for one in blocks:
        table.put(one)
    assert [reader.find(one.key) for one in blocks] == blocks
    table.remove(blocks[7].key)
    table.mark_used(blocks[3].key)
    assert reader.find(blocks[7].key) is None
    assert reader.find(bytes(32)) is None, "what is free is no block"


def test_a_table_takes_as_many_blocks_as_it_was_made_for(tmp_path: Path) -> None:
    count = 20_000
    assert table_bytes(count) <= 74 * count
    table = made(tmp_path, count)
    for i in range(count):
        table.put(block(place=DiskPlace(0, i, i)))
    assert table.blocks > count * 0.999
    table.close()


def test_a_table_smaller_than_the_disk_keeps_the_newest_laps(tmp_path: Path) -> None:
    table, blocks = made(tmp_path, 400), [block(place=DiskPlace(0, i, i >> 5)) for i in range(4000)]
    reader = attached(table)
    there: dict[Key, DiskBlock] = {}
    for one in blocks:
        gone = table.put(one)
        there[one.key] = one
        if gone is not None:
            assert there.pop(gone.key) == gone
    assert [reader.find(one.key) for one in blocks] == [there.get(one.key) for one in blocks]
    assert (table.blocks, table.block_bytes) == (len(there), len(there))
    assert len(there) > 350
    assert sum(one.key in there for one in blocks[-300:]) > 290
    assert not any(one.key in there for one in blocks[:2000])
    table.close()


def test_a_table_of_one_window_works(tmp_path: Path) -> None:
    table = made(tmp_path, 1)
    for i in range(100):
        table.put(block(place=DiskPlace(0, i, i)))
    assert table.blocks == WINDOW_ENTRIES
    table.close()


def test_a_torn_entry_is_a_miss_or_the_block_wherever_it_is_torn(tmp_path: Path) -> None:
    """A writer that dies within a write leaves any first part of it; a reader beside it may see any
    words of it."""
    table, before = made(tmp_path, 1), block()
    reader = attached(table)

    def write(image: bytes) -> None:
        with table.path.open("r+b") as file:
            file.seek(mmap.PAGESIZE)
            file.write(image)

    def image_of(one: DiskBlock) -> bytes:
        """As it is written, where a free entry was."""
        table.put(one)
        raw = table.path.read_bytes()[mmap.PAGESIZE :][:IMAGE_BYTES]
        table.remove(one.key)
        return raw

    old = image_of(before)
    for after in (block(before.key), block(length=99), None):
        image = bytes(IMAGE_BYTES) if after is None else image_of(after)
        torn = [image[:cut] + old[cut:] for cut in range(IMAGE_BYTES + 1)]
        torn += [old[:i] + image[i : i + 8] + old[i + 8 :] for i in range(0, IMAGE_BYTES, 8)]
        keys = [before.key] if after is None else [before.key, after.key]
        answers: set[DiskBlock | None] = set()
        for each in torn:
            write(each)
            answers |= {reader.find(key) for key in keys}
        write(bytes(IMAGE_BYTES))
        assert answers == {before, after, None}
    table.close()


def _rewrite(folder: Path, keys: list[Key], began: object) -> None:
    table = made(folder, 8)
    for turn in range(1, 1 << 30):
        for i, key in enumerate(keys):
            table.put(_of_turn(key, i, turn))
        table.remove(keys[turn % len(keys)])
        if turn == 2:
            began.set()  # type: ignore[attr-defined]


def _of_turn(key: Key, i: int, turn: int) -> DiskBlock:
    """A block all of whose parts say which turn it is of."""
    place = DiskPlace(turn & 15, turn, turn + i)
    return DiskBlock(key, place, turn, turn & 3, turn & 0xFFFF, turn << 32 | turn, turn)


def test_a_reader_sees_whole_entries_while_their_writer_is_killed(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    keys = [os.urandom(32) for _ in range(12)]
    found = 0
    for _ in range(8):
        began = context.Event()
        writer = context.Process(target=_rewrite, args=(tmp_path, keys, began), daemon=True)
        writer.start()
        try:
            assert began.wait(20)
            reader = AttachedTable(tmp_path / "t.table", NODE, EPOCH)
            kill_at = time.monotonic() + 0.05
            while time.monotonic() < kill_at:
                found += _whole(reader, keys)
        finally:
            assert writer.pid is not None
            os.kill(writer.pid, signal.SIGKILL)
            writer.join(20)
        found += _whole(reader, keys)
    assert found > 100


def _whole(reader: AttachedTable, keys: list[Key]) -> int:
    """How many of the keys are found; each as one turn wrote it."""
    seen = [reader.find(key) for key in keys]
    for i, one in enumerate(seen):
        assert one is None or one == _of_turn(keys[i], i, one.length)
    return sum(one is not None for one in seen)


def test_bytes_of_an_entry_that_look_like_a_key_are_not_one(table: DiskTable) -> None:
    one = block()
    table.put(one)
    raw = table.path.read_bytes()
    at = raw.index(one.key)
    window = (at - mmap.PAGESIZE) // WINDOW_BYTES
    count = (len(raw) - mmap.PAGESIZE) // WINDOW_BYTES
    shifted = bytearray(raw[at + 8 : at + 40])
    # Both windows of the shifted key are this one.
    for i in (8, 16):
        value = int.from_bytes(shifted[i : i + 8], "little")
        value += (window - value) % count
        shifted[i : i + 8] = value.to_bytes(8, "little")
    with table.path.open("r+b") as file:
        file.seek(at + 8)
        file.write(shifted)
    assert attached(table).find(bytes(shifted)) is None


def test_a_former_table_makes_room_for_the_next_and_its_readers_keep_it(tmp_path: Path) -> None:
    one, other = block(), block()
    former = made(tmp_path)
    former.put(one)
    reader = attached(former)
    table = DiskTable(former.path, NODE, EPOCH + 1, 10)
    table.put(other)
    assert reader.find(one.key) == one
    assert reader.find(other.key) is None
    with pytest.raises(ValueError, match="another start's"):
        attached(table)
    assert AttachedTable(table.path, NODE, EPOCH + 1).find(other.key) == other
    table.close()
    assert not table.path.exists()
    with pytest.raises(FileNotFoundError):
        attached(table)


@pytest.mark.parametrize("damage", ["short", "longer", "version", "empty", "other file"])
def test_what_is_no_table_is_refused(table: DiskTable, damage: str) -> None:
    raw = table.path.read_bytes()
    path = table.path.with_name("damaged")
    path.write_bytes(
        {
            "short": raw[:-1],
            "longer": raw + b"\0",
            "version": raw[:8] + b"\2" + raw[9:],
            "empty": b"",
            "other file": b"12345",
        }[damage]
    )
    with pytest.raises(ValueError, match=r"table of disks|is empty"):
        AttachedTable(path, NODE, EPOCH)


def test_a_table_that_does_not_fit_says_so(tmp_path: Path) -> None:
    with pytest.raises(NoSpaceError):
        DiskTable(tmp_path / "t.table", NODE, EPOCH, 1 << 45)
    assert not (tmp_path / "t.table").exists()
