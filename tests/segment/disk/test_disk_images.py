"""Blocks as images, as they are told to a table: which of them are named, and which forbidden."""

from __future__ import annotations

import random

import pytest

from kvstore.segment.disk.forbidden import Forbidden, Record, record
from kvstore.segment.disk.images import Images, pack, unpack
from kvstore.types import DiskBlock, DiskPlace, Kind

REGION, LAP = 3, 9


def blocks_of(rng: random.Random, count: int = 60) -> list[DiskBlock]:
    kinds = (Kind.BLOCK, Kind.BYTES)
    return [
        DiskBlock(
            rng.randbytes(32), DiskPlace(2, 100 + i, LAP), 5, rng.choice(kinds), 0, i + 1, i % 5
        )
        for i in range(count)
    ]


def images_of(blocks: list[DiskBlock]) -> Images:
    return Images(b"".join(map(pack, blocks)))


def test_images_are_a_sequence_of_their_blocks() -> None:
    blocks = blocks_of(random.Random(1))
    images = images_of(blocks)
    assert list(images) == blocks
    assert len(images) == len(blocks)
    assert list(images[7:20]) == blocks[7:20]
    assert list(images[50:90]) == blocks[50:]
    assert images[-1] == blocks[-1]
    assert not images[:0]
    with pytest.raises(IndexError):
        images[60]


def test_which_are_named_is_told_and_they_can_be_left_out() -> None:
    blocks = blocks_of(random.Random(2))
    images = images_of(blocks)
    assert images.named((), ()) == set()
    named = images.named({blocks[4].key, bytes(32)}, {3, 99})
    assert named == {4, *range(3, 60, 5)}
    values = {i for i, block in enumerate(blocks) if block.kind != Kind.BLOCK}
    assert images.named((), (), values=True) == values
    left = [block for i, block in enumerate(blocks) if i not in named]
    assert list(images.without(named)) == left
    assert list(images.without({0, 59})) == blocks[1:59]
    assert list(images.without(set())) == blocks


def test_a_torn_image_is_no_block() -> None:
    raw = pack(blocks_of(random.Random(3))[0])
    for bit in range(59 * 8):
        torn = bytearray(raw)
        torn[bit // 8] ^= 1 << bit % 8
        assert unpack(bytes(torn)) is None


@pytest.mark.parametrize("lap", [LAP - 1, LAP, LAP + 1])
@pytest.mark.parametrize("seed", range(20))
def test_of_images_the_same_are_forbidden_as_of_blocks(seed: int, lap: int) -> None:
    rng = random.Random(seed)
    blocks, said = blocks_of(rng), Forbidden()
    order = (lap << 32) + rng.choice([0, 130, (1 << 32) - 1])
    names: dict[Record, list[bytes | int]] = {
        Record.ALL_UP_TO: [b""],
        Record.VALUES_UP_TO: [b""],
        Record.KEY: [block.key for block in rng.sample(blocks, 9)],
        Record.NAMESPACE: [1, 4],
        Record.REGION: [REGION],
    }
    for kind in rng.sample(sorted(names), 2):
        said.add([record(kind, order, name) for name in names[Record(kind)]])
    allowed = [block for block in blocks if not said.forbids(block, REGION)]
    assert list(said.allowed(images_of(blocks), REGION)) == allowed
    assert list(said.allowed(blocks, REGION)) == allowed
    assert not said.allowed(Images(b""), REGION)
