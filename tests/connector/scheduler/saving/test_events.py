"""Events about blocks in the store: said when it is true for every shard, and not otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from connector_parts import BLOCK, ENGINE_BLOCK, FakeRequest, Side

from connector.layout.topology import TpKVTopology
from connector.limits import EVENTS_ANNOUNCED_MAX, EVENTS_MAX
from connector.messages import BlockEvent, StepPlan, WorkerReport
from kvstore import MissReason
from kvstore.testing.blockstore import MemoryBlockStore


def saving(side: Any) -> Any:
    """Return what is remembered of saves that go on."""
    return side.core._events._saving


@pytest.fixture
def side(store: MemoryBlockStore) -> Iterator[Side]:
    side = Side(store, events=True)
    yield side
    side.core.close()


def prompt(side: Side, blocks: int, name: str = "r", seed: int = 0) -> FakeRequest:
    request = FakeRequest(name, [seed * 1000 + i for i in range(blocks * BLOCK)])
    side.tables[name] = list(range(101, 101 + blocks * BLOCK // ENGINE_BLOCK))
    return request


def planned(side: Side, request: FakeRequest) -> StepPlan:
    plan = side.step((request, request.num_tokens))
    assert plan.saves
    return plan


def end(side: Side, plan: StepPlan, stored: set[int], workers: int = 1) -> None:
    report = WorkerReport()
    for job in plan.saves:
        report.ended_saves[job.job_id] = workers
        report.stored_blocks[job.job_id] = frozenset(stored)
    side.core.report(report)


def said(side: Side) -> list[tuple[bool, int]]:
    return [(event.stored, event.block) for event in side.core.take_events()]


def test_what_was_stored_is_said_once_in_prefix_order(side: Side) -> None:
    request = prompt(side, 3)
    plan = planned(side, request)
    assert said(side) == []
    end(side, plan, {0, 2})
    events = side.core.take_events()
    hashes = request.block_hashes
    per_key = BLOCK // ENGINE_BLOCK
    assert events == [
        BlockEvent(True, request, block, 0, hashes[(block + 1) * per_key - 1]) for block in (0, 2)
    ]
    assert said(side) == []
    end(side, plan, {0, 2})
    assert said(side) == [], "the job had ended"


def test_trap_a_block_counts_as_stored_only_when_the_last_worker_has_stored_it(
    store: MemoryBlockStore,
) -> None:
    side = Side(store, topology=TpKVTopology.of(2), events=True)
    plan = planned(side, prompt(side, 3))
    end(side, plan, {0, 1})
    assert said(side) == []
    end(side, plan, {1, 2})
    assert said(side) == [(True, 1)]
    side.core.close()


def test_trap_workers_that_do_not_say_what_they_stored_have_stored_nothing(side: Side) -> None:
    plan = planned(side, prompt(side, 2))
    side.core.report(WorkerReport(ended_saves={job.job_id: 1 for job in plan.saves}))
    assert said(side) == []


def test_nothing_is_remembered_when_nobody_wants_events(store: MemoryBlockStore) -> None:
    side = Side(store)
    plan = planned(side, prompt(side, 2))
    assert not saving(side)
    end(side, plan, {0, 1})
    assert said(side) == []
    side.core.close()


def announce(side: Side, request: FakeRequest) -> None:
    end(side, planned(side, request), set(range(request.num_tokens // BLOCK)))
    side.core.take_events()
    side.core.finished(request.request_id)


def test_a_block_that_was_said_to_be_there_and_is_not_found_is_said_to_be_gone_once(
    side: Side,
) -> None:
    announce(side, prompt(side, 3))
    again = FakeRequest("again", prompt(side, 3).tokens)
    side.put(again, 1)
    assert side.match(again) == BLOCK
    assert said(side) == [(False, 1)]
    assert side.match(again) == BLOCK
    assert said(side) == []


def test_trap_an_index_that_did_not_answer_says_nothing_about_blocks(
    side: Side, store: MemoryBlockStore
) -> None:
    announce(side, prompt(side, 2))
    for i, trouble in enumerate((MissReason.INDEX_ERROR, MissReason.BREAKER_OPEN)):
        store.index_down, store.index_trouble = True, trouble
        assert side.match(FakeRequest(f"r{i}", prompt(side, 2).tokens)) == 0
        assert said(side) == []
    store.index_down = False
    assert side.match(FakeRequest("last", prompt(side, 2).tokens)) == 0
    assert said(side) == [(False, 0)]


def test_a_block_that_nothing_was_said_of_is_not_said_to_be_gone(side: Side) -> None:
    announce(side, prompt(side, 2))
    assert side.match(prompt(side, 2, "other", seed=5)) == 0
    assert said(side) == []


def test_after_a_reset_there_is_nothing_to_say(side: Side) -> None:
    request = prompt(side, 2)
    end(side, planned(side, request), {0, 1})
    assert side.core.reset()
    assert said(side) == []
    assert side.match(FakeRequest("again", request.tokens)) == 0
    assert said(side) == [], "the engine has said that all is gone"


def test_events_that_nobody_takes_are_bounded(side: Side) -> None:
    events = side.core._events
    request = prompt(side, 1)
    for i in range(EVENTS_ANNOUNCED_MAX + 5):
        events._saving[i] = [BlockEvent(True, request, 0, 0, i.to_bytes(4, "big"))]
        events.saved(i, [0])
    assert len(events._announced) == EVENTS_ANNOUNCED_MAX
    taken = side.core.take_events()
    assert len(taken) == EVENTS_MAX
    assert taken[-1].block_hash == (EVENTS_ANNOUNCED_MAX + 4).to_bytes(4, "big")


def test_trap_what_was_computed_on_a_failed_load_is_not_said_to_be_stored_until_it_is(
    store: MemoryBlockStore,
) -> None:
    side = Side(store, events=True, layerwise=True)
    request = prompt(side, 3)
    side.put(request, 1)
    assert side.match(request) == BLOCK
    side.core.allocated(request, lambda: (side.tables["r"],), BLOCK)
    request.num_computed_tokens = BLOCK
    assert not side.step((request, 2 * BLOCK)).saves, "they wait for the load"
    side.core.report(WorkerReport(failed_blocks={0: 0}, ended_loads={0: 1}))
    assert said(side) == []
    assert not saving(side), "of saves that were dropped nothing is remembered"
    request.num_computed_tokens = 0
    end(side, planned(side, request), {0, 1, 2})
    assert said(side) == [(True, 0), (True, 1), (True, 2)]
    side.core.close()


def test_of_saves_that_an_emptied_cache_drops_nothing_is_remembered(
    store: MemoryBlockStore,
) -> None:
    side = Side(store, events=True, layerwise=True)
    request = prompt(side, 3)
    request.kv_transfer_params = {"retain_s": 60}
    side.put(request, 1)
    assert side.match(request) == BLOCK
    side.core.allocated(request, lambda: (side.tables["r"],), BLOCK)
    request.num_computed_tokens = BLOCK
    assert not side.step((request, 2 * BLOCK)).saves, "they wait for the load"
    assert saving(side)
    assert side.core._retainer._saving
    side.core.own_cache_emptied()
    assert not saving(side)
    assert not side.core._retainer._saving
    side.core.close()
