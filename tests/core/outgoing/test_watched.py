"""What a node counts for whoever watches it: ages at eviction, gaps, bytes and engines' tokens."""

from __future__ import annotations

import pytest

from kvstore.core.events import ELSEWHERE, Commit, Drop, EngineCounts, Reserve, Touch
from kvstore.core.node import NodeCore
from kvstore.core.outgoing.watched import AGE_BOUNDS_S, REPORTED_NAMES_MAX, Ages
from kvstore.core.report import stats
from kvstore.keys import Namespace
from kvstore.types import Key

SIZE = 64 << 10
BLOCK = 8192
FULL = SIZE // BLOCK
KEYS = Namespace.named("test").block_keys(range(40), 1)


class Driven:
    def __init__(self) -> None:
        self.core = NodeCore(node_id=5, epoch=9, size_bytes=SIZE)

    def put(self, *keys: Key, now: float) -> None:
        n = len(keys)
        zeros = [0] * n
        event = Reserve(1, 1, keys, [BLOCK] * n, 3, zeros, zeros, [None] * n, zeros)
        grants = self.core.handle(event, now).replies[0].body
        self.core.handle(Commit(1, 2, [(slot, gen, 0) for slot, gen, _ in grants]), now)

    def numbers(self) -> dict[str, int | float]:
        return stats(self.core, 1e6)


@pytest.fixture
def driven() -> Driven:
    driven = Driven()
    driven.put(*KEYS[:FULL], now=100.0)
    return driven


def test_an_evicted_block_leaves_its_age_and_how_long_nobody_used_it(driven: Driven) -> None:
    driven.core.handle(Touch(1, KEYS[:FULL]), 140.0)
    driven.put(KEYS[20], now=145.0)
    found = driven.numbers()
    assert (found["evicted"], found["evicted_age"], found["evicted_idle"]) == (1, 1, 1)
    assert (found["evicted_age_s"], found["evicted_idle_s"]) == (45.0, 5.0)
    assert (found["evicted_age_le_10"], found["evicted_age_le_60"]) == (0, 1)
    assert (found["evicted_idle_le_1"], found["evicted_idle_le_10"]) == (0, 1)


def test_what_is_dropped_by_request_was_not_evicted(driven: Driven) -> None:
    driven.core.handle(Drop(1, 3, KEYS[:2]), 150.0)
    assert driven.numbers()["evicted_age"] == 0


def test_a_block_that_is_stored_again_tells_how_long_it_was_away(driven: Driven) -> None:
    driven.put(KEYS[20], now=200.0)
    (gone,) = (key for key in KEYS[:FULL] if key not in driven.core.blocks.by_key)
    driven.put(gone, now=212.0)
    driven.put(KEYS[21], now=213.0)
    found = driven.numbers()
    assert (found["returned"], found["returned_s"], found["returned_le_10"]) == (1, 12.0, 0)


def test_a_block_that_was_deleted_and_comes_again_was_not_too_much(driven: Driven) -> None:
    driven.core.handle(Drop(1, 3, KEYS[:1]), 150.0)
    driven.put(KEYS[0], now=160.0)
    assert driven.numbers()["returned"] == 0


def test_bytes_are_counted_that_come_in_and_that_other_hosts_read(driven: Driven) -> None:
    driven.core.handle(Touch(1, KEYS[:3]), 150.0)
    driven.core.handle(Touch(ELSEWHERE, [*KEYS[:2], KEYS[30]]), 150.0)
    found = driven.numbers()
    assert (found["stored_bytes"], found["served_bytes"]) == (SIZE, 2 * BLOCK)


def test_bytes_count_as_read_once_and_not_by_a_save_that_keeps_the_order(driven: Driven) -> None:
    driven.core.handle(Touch(1, KEYS[:FULL], saved=True), 150.0)
    driven.core.handle(Touch(1, KEYS[:FULL], left=True), 150.0)
    assert driven.numbers()["ever_read_bytes"] == 0
    for who in (1, ELSEWHERE, 1):
        driven.core.handle(Touch(who, [KEYS[0], KEYS[2], KEYS[30]]), 150.0)
    found = driven.numbers()
    assert (found["ever_read_bytes"], found["stored_bytes"]) == (2 * BLOCK, SIZE)


def test_a_block_that_comes_in_the_place_of_a_read_one_is_unread(driven: Driven) -> None:
    driven.core.handle(Touch(1, KEYS[:FULL]), 150.0)
    driven.put(*KEYS[20:22], now=160.0)
    driven.core.handle(Touch(1, KEYS[20:21]), 170.0)
    assert driven.numbers()["ever_read_bytes"] == SIZE + BLOCK


def test_a_read_tells_how_long_nobody_had_used_the_block(driven: Driven) -> None:
    driven.core.handle(Touch(1, KEYS[:1]), 105.0)
    driven.core.handle(Touch(1, KEYS[:1], saved=True), 110.0)
    driven.core.handle(Touch(1, KEYS[:1]), 140.0)
    found = driven.numbers()
    assert (found["read_gap"], found["read_gap_s"]) == (2, 5.0 + 30.0)
    assert (found["read_gap_le_1"], found["read_gap_le_10"], found["read_gap_le_60"]) == (0, 1, 2)


def test_reports_of_engines_add_up_and_their_names_are_bounded(driven: Driven) -> None:
    for _ in range(2):
        driven.core.handle(EngineCounts(1, {"asked_tokens": 5, "missed_tokens:evicted": 2}), 150.0)
    found = driven.numbers()
    assert (found["asked_tokens"], found["missed_tokens:evicted"]) == (10, 4)
    for i in range(2 * REPORTED_NAMES_MAX):
        driven.core.handle(EngineCounts(1, {f"missed_tokens:{i}": 1}), 150.0)
    assert len(driven.core.blocks.watched.reported) == REPORTED_NAMES_MAX
    driven.core.handle(EngineCounts(1, {"asked_tokens": 5}), 150.0)
    assert driven.numbers()["asked_tokens"] == 15


def test_an_age_counts_under_each_bound_that_it_does_not_exceed() -> None:
    for age_s in (0.0, *AGE_BOUNDS_S, 1e9):
        ages = Ages()
        ages.note(age_s)
        found = ages.numbers("age")
        assert found.pop("age") == 1
        assert found.pop("age_s") == age_s
        assert found == {f"age_le_{bound}": int(age_s <= bound) for bound in AGE_BOUNDS_S}
