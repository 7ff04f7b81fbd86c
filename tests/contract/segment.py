"""What every segment promises. Subclasses give `pair`: an owner and a reader of it."""

from __future__ import annotations

import random

import pytest

from kvstore.core.events import Copy, Fill, Mark, Seal
from kvstore.segment.attached import AttachedShm
from kvstore.segment.header import FREE, RESERVED, Superblock, unpack
from kvstore.segment.shm import OwnedShm

BLOCK = Superblock(7, 3, 0, 128 << 10)
KEY = bytes(range(32))
Pair = tuple[OwnedShm, AttachedShm]


class SegmentContract:
    @pytest.fixture
    def pair(self) -> Pair:
        raise NotImplementedError

    def test_the_superblock_says_whose_segment_it_is(self, pair: Pair) -> None:
        assert pair[1].superblock == BLOCK
        assert pair[1].payload.nbytes == BLOCK.size_bytes

    def test_a_fresh_segment_has_no_sealed_slot(self, pair: Pair) -> None:
        assert all(unpack(pair[1].header(slot)) is None for slot in range(32))

    def test_a_reader_sees_what_the_owner_filled_and_sealed(self, pair: Pair) -> None:
        owner, reader = pair
        owner.apply(Fill(4096, b"payload"))
        owner.apply(Seal(1, 9, KEY, 7, 0, 1, 2, 3, 5))
        assert bytes(reader.payload[4096:4103]) == b"payload"
        header = unpack(reader.header(1))
        assert header is not None
        assert tuple(header) == (9, KEY, 7, 0, 1, 2, 3, 5)
        assert owner.header(1) == reader.header(1)

    def test_a_reader_sees_at_the_new_place_what_was_copied_there(self, pair: Pair) -> None:
        owner, reader = pair
        owner.apply(Fill(4096, bytes(range(200))))
        owner.apply(Copy(4096, 12288, 200))
        assert bytes(reader.payload[12288:12488]) == bytes(range(200))
        assert bytes(reader.payload[4096:4296]) == bytes(range(200))

    @pytest.mark.parametrize("state", [FREE, RESERVED])
    def test_a_mark_takes_the_seal_away_and_keeps_the_rest(self, pair: Pair, state: int) -> None:
        owner, reader = pair
        owner.apply(Seal(1, 9, KEY, 7, 0, 1, 2, 3, 5))
        before = reader.header(1)
        owner.apply(Mark(1, state, 10))
        assert unpack(reader.header(1)) is None
        assert reader.header(1)[8:] == before[8:]

    def test_a_write_to_one_slot_leaves_its_neighbours_alone(self, pair: Pair) -> None:
        owner, reader = pair
        before = [reader.header(slot) for slot in (0, 2)]
        owner.apply(Seal(1, 9, KEY, 7, 0, 1, 2, 3, 5))
        assert [reader.header(slot) for slot in (0, 2)] == before

    @pytest.mark.parametrize("seed", range(10))
    def test_the_last_write_to_a_slot_is_what_its_header_says(self, pair: Pair, seed: int) -> None:
        owner, reader = pair
        rng = random.Random(seed)
        for generation in range(rng.randint(1, 8)):
            sealed = rng.random() < 0.5
            seal = Seal(3, generation, KEY, 9, 0, 0, 0, 0, 0)
            owner.apply(seal if sealed else Mark(3, RESERVED, generation))
        header = unpack(reader.header(3))
        assert (header is not None) == sealed, f"seed {seed}"
        if header is not None:
            assert header.generation == generation

    def test_close_may_be_called_twice(self, pair: Pair) -> None:
        for _ in range(2):
            pair[1].close()
        for _ in range(2):
            pair[0].close()
