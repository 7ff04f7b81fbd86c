"""What every `BlockStore` promises. Subclasses give a `store` and a `fresh_key`."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest

from kvstore import MissReason, Namespace, PutStatus, Retained, UsageError
from kvstore.spi import BlockRef, BlockStore, Key, Missing, MissQuery, Reservation, Tier

SIZE = 40_000
"""Bytes of a block here: larger than what travels inline."""
NAMESPACE, OTHER_NAMESPACE = 7, 8


def keys(count: int) -> list[Key]:
    """Keys that nobody else uses, in one run."""
    tag = os.urandom(8)
    return [tag + os.urandom(24) for _ in range(count)]


def save(store: BlockStore, key: Key, fill: int, namespace_id: int = NAMESPACE) -> None:
    (reservation,) = store.reserve([key], SIZE, namespace_id)
    assert isinstance(reservation, Reservation)
    reservation.buffer[:] = bytes([fill]) * SIZE
    (result,) = store.commit([reservation])
    assert result.status is PutStatus.STORED


def address(buffer: memoryview) -> int:
    return int(np.frombuffer(buffer, np.uint8).ctypes.data)


def why(store: BlockStore, key: Key, block: int = 0) -> Missing:
    return store.why_missing(MissQuery(block, key, Namespace.named("contract"), lambda _: None))


class BlockStoreContract:
    @pytest.fixture
    def store(self) -> BlockStore:
        raise NotImplementedError

    def test_a_block_comes_back_as_it_was_saved(self, store: BlockStore) -> None:
        (key,) = keys(1)
        save(store, key, 5)
        (found,) = store.match([key])
        view = store.view(found)
        assert view is not None
        assert bytes(view.buffer) == bytes([5]) * SIZE
        assert view.buffer.readonly
        assert view.valid()

    def test_blocks_lie_in_mappings_of_their_node_and_cross_no_part(
        self, store: BlockStore
    ) -> None:
        (key,) = keys(1)
        (reservation,) = store.reserve([key], SIZE, NAMESPACE)
        assert isinstance(reservation, Reservation)
        reservation.buffer[:] = bytes([7]) * SIZE
        store.commit([reservation])
        (found,) = store.match([key])
        view = store.view(found)
        assert view is not None
        mappings = store.mappings()
        for buffer, writable in ((reservation.buffer, True), (view.buffer, False)):
            at = address(buffer)
            for mapping in mappings:  # none where blocks are not in shared memory
                offset = at - address(mapping.memory)
                if 0 <= offset < len(mapping.memory):
                    break
            else:
                assert not mappings
                continue
            assert mapping.writable == writable
            assert mapping.memory.readonly != writable
            assert (mapping.node_id, mapping.epoch) == (reservation.node_id, reservation.epoch)
            assert mapping.memory[offset : offset + SIZE] == view.buffer
            assert offset // mapping.part_bytes == (offset + SIZE - 1) // mapping.part_bytes

    def test_nothing_may_be_reserved_committed_and_aborted(self, store: BlockStore) -> None:
        assert list(store.reserve([], SIZE, NAMESPACE)) == []
        assert store.commit([]) == []
        store.abort([])

    def test_what_is_retained_says_so_for_each_key(self, store: BlockStore) -> None:
        a, b, c = keys(3)
        for key in (a, c):
            save(store, key, 1)
        there, absent = Retained.YES, Retained.ABSENT
        assert store.retain([a, b, c], 60, "a tenant") == [there, absent, there]
        assert store.retain([a, b], 0, "a tenant") == [there, absent]
        assert store.retain([], 60) == []

    def test_who_clears_what_is_retained_means_it(self, store: BlockStore) -> None:
        (key,) = keys(1)
        save(store, key, 1)
        assert store.retain([key], 60) == [Retained.YES]
        assert store.clear(NAMESPACE) >= 1
        assert store.match([key]) == []
        assert store.retain([key], 60) == [Retained.ABSENT]

    def test_what_is_dropped_is_a_miss_and_says_whether_it_was_there(
        self, store: BlockStore
    ) -> None:
        a, b, c, d = keys(4)
        for key in (a, c, d):
            save(store, key, 1)
        store.pin([c])
        assert store.drop([a, b, c]) == [True, False, True]
        assert store.lookup([a, b, c]) == [None, None, None]
        assert len(store.match([d])) == 1
        assert store.drop([a]) == [False]
        assert store.drop([]) == []

    @pytest.mark.parametrize(
        ("for_s", "tenant", "field"),
        [(-1, "", "for_s"), (1 << 40, "", "for_s"), (1.5, "", "for_s"), (1, "x" * 300, "tenant")],
    )
    def test_a_wish_that_cannot_be_one_names_its_field(
        self, store: BlockStore, for_s: int, tenant: str, field: str
    ) -> None:
        with pytest.raises(UsageError, match=field):
            store.retain(keys(1), for_s, tenant)

    def test_match_is_the_longest_leading_run(self, store: BlockStore) -> None:
        a, b, c, d = keys(4)
        for i, key in enumerate((a, b, d)):
            save(store, key, i)
        assert [found.key for found in store.match([a, b, c, d])] == [a, b]
        assert store.match([c, d]) == []
        assert store.match([]) == []

    def test_lookup_answers_for_each_key_by_itself(self, store: BlockStore) -> None:
        a, b, c, d = keys(4)
        for i, key in enumerate((a, d)):
            save(store, key, i)
        found = store.lookup([a, b, c, d])
        assert [one and one.key for one in found] == [a, None, None, d]
        assert found[3] is not None
        view = store.view(found[3])
        assert view is not None
        assert bytes(view.buffer) == bytes([1]) * SIZE
        assert store.lookup([]) == []

    def test_what_was_saved_here_lies_in_this_hosts_memory(self, store: BlockStore) -> None:
        run = keys(2)
        for key in run:
            save(store, key, 1)
        assert store.tiers(store.match(run)) == [Tier.HOST, Tier.HOST]
        assert store.tiers([]) == []
        assert store.sources(store.match(run)) == [Tier.HOST, Tier.HOST]
        assert store.sources([]) == []

    def test_nothing_is_found_before_the_commit(self, store: BlockStore) -> None:
        (key,) = keys(1)
        (reservation,) = store.reserve([key], SIZE, NAMESPACE)
        assert isinstance(reservation, Reservation)
        assert len(reservation.buffer) == SIZE
        assert not reservation.buffer.readonly
        assert store.match([key]) == []
        store.abort([reservation])
        assert store.match([key]) == []

    def test_what_is_saved_or_being_saved_needs_no_writing(self, store: BlockStore) -> None:
        saved, open_, fresh = keys(3)
        save(store, saved, 1)
        (reservation,) = store.reserve([open_], SIZE, NAMESPACE)
        assert isinstance(reservation, Reservation)
        answers = store.reserve([saved, open_, fresh], SIZE, NAMESPACE)
        assert [getattr(a, "status", None) for a in answers] == [
            PutStatus.EXISTS,
            PutStatus.IN_PROGRESS,
            None,
        ]
        store.abort([reservation, *(a for a in answers if isinstance(a, Reservation))])

    def test_an_aborted_key_can_be_reserved_again(self, store: BlockStore) -> None:
        (key,) = keys(1)
        (first,) = store.reserve([key], SIZE, NAMESPACE)
        assert isinstance(first, Reservation)
        store.abort([first])
        (second,) = store.reserve([key], SIZE, NAMESPACE)
        assert isinstance(second, Reservation)
        store.abort([second])

    def test_a_view_of_a_cleared_block_is_not_valid(self, store: BlockStore) -> None:
        (key,) = keys(1)
        save(store, key, 9)
        (found,) = store.match([key])
        view = store.view(found)
        assert view is not None
        assert store.clear(NAMESPACE) >= 1
        assert not view.valid()
        assert store.view(found) is None

    def test_clear_drops_one_namespace(self, store: BlockStore) -> None:
        mine, other = keys(1) + keys(1)
        save(store, mine, 1, NAMESPACE)
        save(store, other, 2, OTHER_NAMESPACE)
        store.clear(NAMESPACE)
        (found,) = store.match([other])
        assert store.view(found) is not None
        stale = store.match([mine])
        assert all(store.view(found) is None for found in stale)
        store.clear(OTHER_NAMESPACE)

    def test_a_record_under_another_key_is_a_miss(self, store: BlockStore) -> None:
        a, b = keys(2)
        save(store, a, 1)
        (found,) = store.match([a])
        assert store.view(BlockRef(b, found.record)) is None
        assert store.view(BlockRef(a, b"\0" * 44)) is None

    def test_a_match_says_why_it_is_short(self, store: BlockStore) -> None:
        here, missing = keys(2)
        save(store, here, 1)
        assert store.match([here]).short is None
        assert store.match([]).short is None
        assert store.match([here, missing]).short is MissReason.ABSENT
        late = store.match([missing], timeout_s=0.0)
        assert (late, late.short) == ([], MissReason.DEADLINE)

    def test_a_missing_block_has_a_reason(self, store: BlockStore) -> None:
        never, cleared, open_ = keys(3)
        assert why(store, never).reason is MissReason.NEVER_STORED
        save(store, cleared, 1)
        store.clear(NAMESPACE)
        assert why(store, cleared).reason is MissReason.CLEARED
        (reservation,) = store.reserve([open_], SIZE, NAMESPACE)
        assert isinstance(reservation, Reservation)
        missing = why(store, open_, block=5)
        assert (missing.block, missing.reason) == (5, MissReason.BEING_WRITTEN)
        store.abort([reservation])

    def test_touch_takes_any_keys(self, store: BlockStore) -> None:
        store.touch(keys(3))

    def test_a_block_was_read_when_somebody_says_so_and_not_when_it_was_saved_again(
        self, store: BlockStore
    ) -> None:
        read, saved, never = keys(3)
        save(store, read, 1)
        save(store, saved, 2)
        store.touch([read])
        store.touch([read, saved], saved=True)
        for _ in range(100):  # it is one way, and coalesced
            if True in store.were_read([read]):
                break
            time.sleep(0.05)
            store.touch([])
        assert store.were_read([saved, read, never]) == [None, True, None]
        assert store.were_read([]) == []

    def test_a_report_reaches_a_node_of_this_host(self, store: BlockStore) -> None:
        store.touch([])  # so that it is connected: a report never waits
        assert store.report({"asked_tokens": 5, "missed_tokens:never-stored": 5})

    def test_pin_answers_for_each_key(self, store: BlockStore) -> None:
        a, b, c = keys(3)
        for i, key in enumerate((a, c)):
            save(store, key, i + 1)
        pinned = store.pin([a, b, c])
        assert [found is not None for found in pinned] == [True, False, True]
        held = [found for found in pinned if found is not None]
        assert [found.key for found in held] == [a, c]
        for i, found in enumerate(held):
            view = store.view(found)
            assert view is not None
            assert bytes(view.buffer) == bytes([i + 1]) * SIZE
            assert view.valid()
        store.unpin(held)
        assert store.pin([]) == []

    def test_what_is_only_reserved_cannot_be_pinned(self, store: BlockStore) -> None:
        (key,) = keys(1)
        (reservation,) = store.reserve([key], SIZE, NAMESPACE)
        assert isinstance(reservation, Reservation)
        assert store.pin([key]) == [None]
        store.abort([reservation])

    def test_unpin_takes_what_is_pinned_no_more(self, store: BlockStore) -> None:
        (key,) = keys(1)
        save(store, key, 1)
        (found,) = store.pin([key])
        assert found is not None
        for _ in range(3):
            store.unpin([found])
        (again,) = store.pin([key])
        assert again is not None
        store.unpin([again, BlockRef(key, b"\0" * 44)])

    def test_a_pinned_block_that_is_cleared_is_a_miss(self, store: BlockStore) -> None:
        (key,) = keys(1)
        save(store, key, 3, OTHER_NAMESPACE)
        (found,) = store.pin([key])
        assert found is not None
        store.clear(OTHER_NAMESPACE)
        assert store.view(found) is None
        assert store.pin([key]) == [None]
        store.unpin([found])
