"""What the scheduler side offers and loads."""

from __future__ import annotations

import time

import pytest
from connector_parts import (
    BLOCK,
    ENGINE_BLOCK,
    GEOMETRY,
    Clock,
    FakeRequest,
    Hold,
    Side,
    prompt,
    wait_for,
)

from connector.layout.topology import TpKVTopology
from connector.limits import LOAD_ATTEMPTS_MAX, LOOKUP_TTL_S, LOOKUP_WAIT_PER_STEP_S
from connector.messages import BlockRead, WorkerReport
from kvstore import MissReason
from kvstore.spi import Tier
from kvstore.testing.blockstore import MemoryBlockStore


def stored(side: Side, blocks: int) -> FakeRequest:
    """Return a request of so many blocks and a bit, which the store has."""
    request = prompt(blocks)
    side.put(request, blocks)
    return request


def load(side: Side, request: FakeRequest, computed: int = 0, tokens: int | None = None):
    """Match, allocate blocks 101, 102, ... and give the planned load."""
    offered = side.match(request, computed)
    table = list(range(101, 101 + len(request.tokens) // ENGINE_BLOCK + 1))
    side.core.allocated(request, lambda: [table], offered if tokens is None else tokens)
    return side.step().loads


def test_a_hit_is_the_run_of_present_blocks(side: Side) -> None:
    request = prompt(4)
    side.put(request, 3)
    assert side.match(request) == 3 * BLOCK


def test_nothing_is_offered_for_an_unknown_prefix(side: Side) -> None:
    assert side.match(prompt(4)) == 0


def test_trap_asking_again_without_allocation_changes_nothing(side: Side) -> None:
    request = stored(side, 3)
    answers = {side.match(request) for _ in range(5)}
    assert answers == {3 * BLOCK}
    assert side.step().loads == []


def test_trap_a_whole_prompt_may_be_offered_because_loads_are_asynchronous(side: Side) -> None:
    request = prompt(3, extra=0)
    side.put(request, 3)
    assert side.match(request) == len(request.tokens)


def test_trap_a_preempted_request_is_looked_up_with_its_output(side: Side) -> None:
    request = prompt(2, extra=0)
    assert side.match(request) == 0
    request.tokens += list(range(7000, 7000 + BLOCK))
    side.put(request, 3)
    side.step(preempted=[request.request_id])
    assert side.match(request) == 3 * BLOCK


def test_the_match_is_the_shortest_shards_run(store: MemoryBlockStore) -> None:
    side = Side(store, topology=TpKVTopology.of(2))
    request = prompt(4)
    side.put(request, 4, shards=[0])
    side.put(request, 2, shards=[1])
    assert side.match(request) == 2 * BLOCK
    (job,) = load(side, request)
    assert [found.key for found in job.blocks[1].found] == [
        side.keys(request, shard)[1] for shard in (0, 1)
    ]
    side.core.close()


def test_a_local_hit_within_a_store_block_loads_only_the_rest_of_it(side: Side) -> None:
    request = stored(side, 2)
    (job,) = load(side, request, computed=ENGINE_BLOCK)
    assert [(block.skip, block.block_ids) for block in job.blocks] == [
        (1, (102,)),
        (0, (103, 104)),
    ]


def test_a_local_hit_within_an_engine_block_loads_nothing(side: Side) -> None:
    request = stored(side, 2)
    assert side.match(request, ENGINE_BLOCK + 1) == 0


def test_a_local_hit_as_long_as_the_stores_offers_nothing(side: Side) -> None:
    request = stored(side, 2)
    assert side.match(request, 2 * BLOCK) == 0


def test_trap_allocation_for_fewer_tokens_loads_fewer(side: Side) -> None:
    request = stored(side, 3)
    (job,) = load(side, request, tokens=BLOCK + ENGINE_BLOCK)
    assert [(block.skip, block.block_ids) for block in job.blocks] == [
        (0, (101, 102)),
        (0, (103,)),
    ]


def test_trap_second_allocation_call_with_zero_tokens_loads_nothing(side: Side) -> None:
    request = stored(side, 2)
    (job,) = load(side, request)
    side.core.loads_ended([job.request_id])
    side.core.allocated(request, lambda: [list(range(101, 110))], 0)
    assert side.step().loads == []


def test_trap_real_blocks_with_zero_tokens_load_nothing_when_another_connector_won(
    side: Side,
) -> None:
    request = stored(side, 2)
    assert load(side, request, tokens=0) == []
    assert load(side, request) != [], "the same offer is still good later"


def test_a_request_is_looked_up_when_it_arrives(side: Side, store: MemoryBlockStore) -> None:
    request = stored(side, 2)
    side.core.on_new_request(request)
    wait_for(lambda: store.match_calls == 1, "a lookup")
    assert side.match(request) == 2 * BLOCK
    assert store.match_calls == 1


def test_an_old_answer_is_asked_again(store: MemoryBlockStore) -> None:
    clock = Clock()
    side = Side(store, clock=clock)
    request = prompt(2)
    assert side.match(request) == 0
    side.put(request, 2)
    assert side.match(request) == 0, "within its time to live the answer stands"
    clock.now += LOOKUP_TTL_S + 0.1
    assert side.match(request) == 2 * BLOCK
    side.core.close()


class TestDeadlines:
    def test_trap_a_slow_lookup_is_asked_again_then_a_miss(self, store: MemoryBlockStore) -> None:
        side = Side(store, lookup_timeout_s=0.2)
        hold = store.on_match = Hold()
        request = stored(side, 2)
        assert side.core.match(request, 0) is None
        hold.await_reached()
        time.sleep(0.25)
        assert side.core.match(request, 0) == 0
        hold.release()
        side.core.close()

    def test_a_step_waits_for_all_lookups_together_only_once(self, store: MemoryBlockStore) -> None:
        side = Side(store)
        hold = store.on_match = Hold()
        requests = [prompt(2, seed=i) for i in range(50)]
        started = time.monotonic()
        assert [side.core.match(request, 0) for request in requests] == [None] * 50
        spent_s = time.monotonic() - started
        assert spent_s < 50 * LOOKUP_WAIT_PER_STEP_S / 2, "50 requests waited one after the other"
        hold.release()
        side.core.close()

    def test_a_dead_index_is_a_miss(self, side: Side, store: MemoryBlockStore) -> None:
        request = stored(side, 2)
        store.index_down = True
        assert side.match(request) == 0

    def test_a_lookup_that_raises_is_a_miss_and_the_next_one_works(
        self, side: Side, store: MemoryBlockStore
    ) -> None:
        def broken() -> None:
            raise RuntimeError("a bug in the store")

        store.on_match = broken
        assert side.match(prompt(2, seed=1)) == 0
        store.on_match = lambda: None
        request = prompt(2, seed=2)
        side.put(request, 2)
        assert side.match(request) == 2 * BLOCK


class TestFailedLoads:
    def fail(self, side: Side, position: int, request: FakeRequest) -> None:
        (job,) = load(side, request)
        side.core.report(WorkerReport(failed_blocks={job.job_id: position}))
        side.core.loads_ended([job.request_id])

    def test_trap_a_record_that_failed_is_not_offered_again(self, side: Side) -> None:
        request = stored(side, 3)
        self.fail(side, 0, request)
        assert [side.match(request) for _ in range(20)] == [0] * 20

    def test_what_lies_before_the_failed_block_is_offered_again(self, side: Side) -> None:
        request = stored(side, 3)
        self.fail(side, 2, request)
        assert side.match(request) == 2 * BLOCK

    def test_a_new_record_under_the_failed_key_is_offered(
        self, side: Side, store: MemoryBlockStore
    ) -> None:
        request = stored(side, 2)
        self.fail(side, 0, request)
        store.evict(side.keys(request)[0])
        side.put(request, 1)
        assert side.match(request) == 2 * BLOCK

    def test_another_request_is_not_held_back_by_it(self, side: Side) -> None:
        request = stored(side, 2)
        self.fail(side, 0, request)
        other = FakeRequest("other", request.tokens)
        assert side.match(other) == 2 * BLOCK

    def test_after_too_many_failures_nothing_is_offered(
        self, side: Side, store: MemoryBlockStore
    ) -> None:
        request = prompt(1)
        for _ in range(LOAD_ATTEMPTS_MAX):
            side.put(request, 1)
            self.fail(side, 0, request)
            store.evict(side.keys(request)[0])
        side.put(request, 1)
        assert side.match(request) == 0


class TestRoles:
    def test_a_producer_loads_nothing(self, store: MemoryBlockStore) -> None:
        side = Side(store, loads=False)
        request = stored(side, 2)
        side.core.on_new_request(request)
        assert side.match(request) == 0
        assert store.match_calls == 0
        side.core.close()


class TestReset:
    def test_trap_a_reset_clears_the_store_and_says_true(
        self, side: Side, store: MemoryBlockStore
    ) -> None:
        request = stored(side, 2)
        assert side.match(request) == 2 * BLOCK
        assert side.core.reset() is True
        assert store.sealed() == []
        assert side.match(request) == 0, "an answer of before must not be offered"

    def test_a_load_under_way_is_ended_by_a_reset(
        self, side: Side, store: MemoryBlockStore
    ) -> None:
        request = stored(side, 2)
        load(side, request)
        assert side.core.reset() is True
        assert store.sealed() == []
        plan = side.step()
        assert plan.dropped_loads == [request.request_id]
        assert side.step().dropped_loads == []

    def test_a_load_that_was_planned_before_a_reset_comes_from_nowhere(self, side: Side) -> None:
        request = stored(side, 2)
        assert side.match(request) == 2 * BLOCK
        side.core.allocated(request, lambda: [[1, 2, 3, 4, 5]], 2 * BLOCK)
        assert side.core.reset() is True
        (job,) = side.step().loads
        assert [block.found for block in job.blocks] == [(), ()]

    def test_trap_while_the_store_is_down_a_reset_says_true_and_nothing_older_is_loaded(
        self, side: Side, store: MemoryBlockStore
    ) -> None:
        request = stored(side, 2)
        store.node_down = True
        assert side.core.reset() is True
        assert len(store.sealed()) == 2
        assert side.match(request) == 0, "it is there, and from before"
        store.node_down = False
        wait_for(lambda: not store.sealed(), "it is done as soon as it can be")
        wait_for(lambda: not side.core._resetter.pending, "and said to be")
        side.put(request, 2)
        assert side.match(prompt(2)) == 2 * BLOCK

    def test_when_the_engine_forgets_its_own_cache_the_store_keeps_what_it_has(
        self, side: Side, store: MemoryBlockStore
    ) -> None:
        request = stored(side, 2)
        assert side.match(request) == 2 * BLOCK
        side.core.forget()
        assert len(store.sealed()) == 2
        assert side.match(request) == 2 * BLOCK

    def test_a_lookup_asked_before_a_reset_is_not_used_after_it(
        self, side: Side, store: MemoryBlockStore
    ) -> None:
        request = stored(side, 2)
        answered = Hold()
        store.on_match = answered
        assert side.core.match(request, 0) is None
        answered.await_reached()
        store.on_match = lambda: None
        assert side.core.reset() is True
        answered.release()
        assert side.match(request) == 0


class TestSlowSources:
    """An engine of 8 blocks a second; another host gives a block a second."""

    @pytest.fixture
    def clock(self) -> Clock:
        return Clock()

    @pytest.fixture
    def side(self, store: MemoryBlockStore, clock: Clock):
        side = Side(store, clock=clock)
        side.step((prompt(8, extra=0, seed=9), 8 * BLOCK))
        clock.now += 1.0
        side.step()
        size_bytes = GEOMETRY.token_bytes * BLOCK
        side.core.report(WorkerReport(reads=[BlockRead("other_host:1", size_bytes, 1.0)]))
        yield side
        side.core.close()

    def far(self, side: Side, request: FakeRequest, here: int, blocks: int) -> None:
        """Have the store hold `blocks` of a prompt, and but the first of them on another host."""
        side.put(request, blocks)
        far = side.keys(request)[here:blocks]
        side.store.elsewhere.update(dict.fromkeys(far, Tier.OTHER_HOST))

    def tries(self, side: Side, clock: Clock) -> None:
        """Have a request try whether the other host is still slow."""
        request = prompt(4, seed=8)
        self.far(side, request, 0, 4)
        (job,) = load(side, request)
        assert job.timeout_s is not None
        assert job.timeout_s < 0.1
        side.core.report(WorkerReport(failed_blocks={job.job_id: 0}))
        side.core.loads_ended([request.request_id])

    def test_only_what_is_here_is_offered_and_the_rest_has_a_reason(
        self, side: Side, clock: Clock
    ) -> None:
        self.tries(side, clock)
        request = prompt(5, seed=1)
        self.far(side, request, 2, 5)
        assert [side.match(request) for _ in range(3)] == [2 * BLOCK] * 3
        (job,) = load(side, request)
        assert len(job.blocks) == 2
        assert job.compute_s == pytest.approx(0.25)
        side.core.loads_ended([request.request_id])
        explanation = side.core.explain(request.request_id)
        assert explanation is not None
        assert explanation.reason is MissReason.SLOWER
        stats = side.core.take_stats()
        assert stats is not None
        assert stats.counts["kvstore_slower_tokens:other_host"] == (4 - 1 + 3) * BLOCK

    def test_a_person_is_told_what_would_be_loaded(self, side: Side, clock: Clock) -> None:
        self.tries(side, clock)
        request = prompt(5, seed=1)
        self.far(side, request, 2, 5)
        explanation = side.core.explain_prompt(request, 0)
        assert (explanation.hit_tokens, explanation.reason) == (2 * BLOCK, MissReason.SLOWER)

    def test_what_was_computed_all_the_same_is_not_saved_again(
        self, side: Side, clock: Clock
    ) -> None:
        self.tries(side, clock)
        request = prompt(5, seed=1)
        self.far(side, request, 0, 5)
        assert side.match(request) == 0
        side.tables[request.request_id] = list(range(101, 120))
        plan = side.step((request, request.num_tokens))
        assert plan.saves == []

    def test_how_long_a_load_may_take_is_said_to_the_worker(self, side: Side, clock: Clock) -> None:
        request = prompt(8, seed=1)
        side.put(request, 8)
        (job,) = load(side, request)
        assert (job.timeout_s, job.compute_s) == (pytest.approx(1.0), pytest.approx(1.0))
