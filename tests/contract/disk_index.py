"""What every `DiskIndex` must do. Subclasses give an `index`, empty, with room for what is put."""

from __future__ import annotations

import os
import random
from collections.abc import Collection

import pytest
from disk_index import DictIndex

from kvstore.core.disk.base import EVERYTHING, DiskIndex
from kvstore.segment.disk.images import Images, pack
from kvstore.types import DiskBlock, DiskPlace, Key

LAST = DiskPlace(device=15, page=(1 << 32) - 1, lap=(1 << 32) - 1)


def block(
    key: Key | None = None, place: DiskPlace | None = None, namespace_id: int = 7, length: int = 1
) -> DiskBlock:
    """A block with random content, anywhere unless there is a `place`."""
    place = place or DiskPlace(random.randrange(16), random.randrange(1 << 32), 1)
    checksum = int.from_bytes(os.urandom(8), "little") or 1
    return DiskBlock(key or os.urandom(32), place, length, 2, 17, checksum, namespace_id)


def cleared(index: DiskIndex, namespace_ids: tuple[int, ...], at_most: int) -> int:
    """Blocks that went, in as many calls as that takes."""
    removed = start = 0
    for _ in range(100_000):
        gone, start = index.clear(namespace_ids, start, at_most)
        removed += len(gone)
        if not start:
            return removed
    raise AssertionError("no call said that it was the last")


def adopted(
    index: DiskIndex,
    blocks: list[DiskBlock],
    keys: Collection[Key] = (),
    namespace_ids: Collection[int] = (),
) -> tuple[list[DiskBlock], list[DiskBlock]]:
    """What had to go and what was left out, told to it as a start does: images."""
    told = Images(b"".join(map(pack, blocks)))
    gone, left_out = index.adopt(told, keys, namespace_ids)
    return list(gone), list(left_out)


class DiskIndexContract:
    @pytest.fixture
    def index(self) -> DiskIndex:
        raise NotImplementedError

    def test_a_block_is_got_as_it_was_put(self, index: DiskIndex) -> None:
        most = DiskBlock(b"\xff" * 32, LAST, 1 << 30, 15, 65_535, (1 << 64) - 1, (1 << 32) - 1)
        least = DiskBlock(bytes(32), DiskPlace(0, 0, 0), 1, 0, 0, 1, 0)
        blocks = [most, least, *(block(length=1 << i) for i in range(20))]
        assert [index.put(one) for one in blocks] == [None] * len(blocks)
        assert [index.get(one.key) for one in blocks] == blocks
        assert index.get(os.urandom(32)) is None
        assert index.blocks == len(blocks)
        assert index.block_bytes == sum(one.length for one in blocks)

    def test_the_block_that_was_put_last_counts(self, index: DiskIndex) -> None:
        former = block(length=100)
        index.put(former)
        index.mark_used(former.key)
        latter = block(former.key, length=50)
        assert index.put(latter) == former
        assert index.get(former.key) == latter
        assert not index.is_used(latter.key), "it was used since it was put"
        assert (index.blocks, index.block_bytes) == (1, 50)

    def test_a_block_is_removed_once(self, index: DiskIndex) -> None:
        one, other = block(), block()
        index.put(one)
        index.put(other)
        assert index.remove(one.key)
        assert not index.remove(one.key)
        assert index.get(one.key) is None
        assert index.get(other.key) == other
        assert (index.blocks, index.block_bytes) == (1, 1)

    def test_use_is_noted_until_the_block_goes(self, index: DiskIndex) -> None:
        one, absent = block(), os.urandom(32)
        index.put(one)
        assert not index.is_used(one.key)
        assert not index.mark_used(one.key)
        assert index.mark_used(one.key)
        assert index.is_used(one.key)
        assert index.get(one.key) == one
        index.remove(one.key)
        index.put(one)
        assert not index.is_used(one.key)
        assert not index.mark_used(absent)
        assert not index.is_used(absent)

    @pytest.mark.parametrize("at_most", [1, 7, 1 << 20])
    def test_namespaces_are_cleared_in_slices(self, index: DiskIndex, at_most: int) -> None:
        blocks = [block(namespace_id=i % 4, length=10) for i in range(80)]
        for one in blocks:
            index.put(one)
        assert cleared(index, (1, 3, 77), at_most) == 40
        assert [one for one in blocks if index.get(one.key)] == blocks[::2]
        assert (index.blocks, index.block_bytes) == (40, 400)
        assert cleared(index, EVERYTHING, at_most) == 40
        assert (index.blocks, index.block_bytes) == (0, 0)
        assert cleared(index, EVERYTHING, at_most) == 0

    def test_what_a_former_start_wrote_is_adopted_but_for_what_was_dropped_since(
        self, index: DiskIndex
    ) -> None:
        blocks = [block(place=DiskPlace(1, i, 3), namespace_id=i % 4) for i in range(40)]
        dropped = {one.key for one in blocks[::7]}
        assert adopted(index, blocks, dropped, {2, 77}) == ([], [])
        there = [b for b in blocks if b.key not in dropped and b.namespace_id != 2]
        assert [one for one in blocks if index.get(one.key)] == there
        assert (index.blocks, index.block_bytes) == (len(there), len(there))

    def test_of_a_key_the_latest_of_a_device_is_adopted_and_the_first_of_two_devices(
        self, index: DiskIndex
    ) -> None:
        key, other = os.urandom(32), os.urandom(32)
        early, late = block(key, DiskPlace(1, 50, 3)), block(key, DiskPlace(1, 40, 4), length=9)
        here, there = block(other, DiskPlace(1, 60, 3)), block(other, DiskPlace(2, 60, 9))
        assert adopted(index, [early, here]) == ([], [])
        assert adopted(index, [late, there]) == ([early], [there])
        assert adopted(index, [early, here]) == ([], [])
        assert (index.get(key), index.get(other)) == (late, here)
        assert (index.blocks, index.block_bytes) == (2, 10)

    def test_it_does_what_a_dict_does(self, index: DiskIndex) -> None:
        """Thousands of random calls, all of which must answer the same."""
        model, luck = DictIndex(), random.Random(3)
        keys = [os.urandom(32) for _ in range(60)]
        for _ in range(4000):
            key, place = luck.choice(keys), DiskPlace(luck.randrange(2), luck.randrange(99), 1)
            new = block(key, place, luck.randrange(3), luck.randrange(1, 99))
            name, given = luck.choice(
                [
                    ("put", (new,)),
                    ("put", (new,)),
                    ("get", (key,)),
                    ("remove", (key,)),
                    ("mark_used", (key,)),
                    ("is_used", (key,)),
                ]
            )
            assert getattr(index, name)(*given) == getattr(model, name)(*given), (name, given)
            assert (index.blocks, index.block_bytes) == (model.blocks, model.block_bytes)

    def test_of_a_closed_device_the_node_still_knows_the_blocks(self, index: DiskIndex) -> None:
        one = block()
        index.put(one)
        index.device_closed(one.place.device)
        assert index.get(one.key) == one

    @pytest.mark.parametrize("at_most", [1, 7, 1 << 20])
    def test_a_walk_comes_by_each_block_once(self, index: DiskIndex, at_most: int) -> None:
        blocks = [block() for _ in range(80)]
        for one in blocks:
            index.put(one)
        seen: list[DiskBlock] = []
        start = 0
        for _ in range(100_000):
            found, start = index.walk(start, at_most)
            seen += found
            if not start:
                break
        assert sorted(seen) == sorted(blocks)
