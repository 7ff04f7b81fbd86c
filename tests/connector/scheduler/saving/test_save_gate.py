"""Loads within a step: what is offered, and what waits until they are known to be good."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from connector_parts import BLOCK, ENGINE_BLOCK, FakeRequest, Side

from connector.layout.topology import TpKVTopology
from connector.messages import LoadJob, SaveJob, StepPlan, WorkerReport
from connector.scheduler.saving.save_gate import SaveGate
from kvstore.testing.blockstore import MemoryBlockStore

TABLE = list(range(101, 109))
"""Engine blocks of four store blocks."""
GOOD = WorkerReport(ended_loads={0: 1})
BAD = WorkerReport(ended_loads={0: 1}, failed_blocks={0: 1})
"""The second store block of the load could not be read."""


@pytest.fixture
def side(store: MemoryBlockStore) -> Iterator[Side]:
    side = Side(store, layerwise=True)
    yield side
    side.core.close()


def begin(side: Side, shards: tuple[int, ...] = (0,)) -> tuple[FakeRequest, StepPlan]:
    """A request of four store blocks, two of which are loaded in the step that computes two."""
    request = FakeRequest("r", list(range(4 * BLOCK)))
    side.put(request, 2, shards)
    side.tables["r"] = TABLE
    assert side.match(request) == 2 * BLOCK
    side.core.allocated(request, lambda: [TABLE], 2 * BLOCK)
    request.num_computed_tokens = 2 * BLOCK
    return request, side.step((request, 2 * BLOCK))


def saved_ids(plan: StepPlan) -> list[tuple[int, ...]]:
    return [block.block_ids for job in plan.saves for block in job.blocks]


@pytest.mark.parametrize(
    ("tokens", "offered"),
    [
        (2 * BLOCK + 1, 2 * BLOCK),
        (2 * BLOCK, 2 * BLOCK - ENGINE_BLOCK),
        (2 * BLOCK - 1, BLOCK),
        (BLOCK, BLOCK - ENGINE_BLOCK),
    ],
)
def test_trap_a_token_is_left_to_compute_and_no_block_is_both_loaded_and_computed(
    side: Side, tokens: int, offered: int
) -> None:
    request = FakeRequest("r", list(range(tokens)))
    side.put(request, 2)
    assert side.match(request) == offered


def test_what_was_computed_on_a_load_is_saved_when_the_load_was_good(side: Side) -> None:
    _, plan = begin(side)
    assert len(plan.loads) == 1
    assert plan.saves == []
    assert set(side.pins.references) == set(TABLE[4:]), "nobody may write there meanwhile"
    side.core.report(GOOD)
    assert saved_ids(side.step()) == [(105, 106), (107, 108)]
    assert saved_ids(side.step()) == []


def test_a_request_that_ends_in_the_step_of_its_load_is_saved_too(side: Side) -> None:
    begin(side)
    side.core.finished("r")
    assert side.core.has_pending_work()
    side.core.report(GOOD)
    plan = side.step()
    assert len(saved_ids(plan)) == 2
    side.core.report(WorkerReport(ended_saves={job.job_id: 1 for job in plan.saves}))
    assert side.pins.references == {}
    assert not side.core.has_pending_work()


def test_rule_1_nothing_computed_on_a_failed_load_is_saved(side: Side) -> None:
    begin(side)
    forgotten: list[set[int]] = []
    side.core.bind_pins(side.pins, 1, 1000, forgotten.append)
    side.core.report(BAD)
    assert forgotten == [set(TABLE[2:])], "the failed block and all that came after it"
    assert saved_ids(side.step()) == []


def test_a_failed_load_gives_its_pins_back_and_what_is_computed_again_is_saved(side: Side) -> None:
    request, _ = begin(side)
    side.core.report(BAD)
    assert side.pins.references == {}
    request.num_computed_tokens = BLOCK  # the engine starts again at the first bad block
    assert saved_ids(side.step((request, 3 * BLOCK))) == [(103, 104), (105, 106), (107, 108)]


def test_other_requests_of_the_step_wait_as_well_because_they_may_share_blocks(
    side: Side,
) -> None:
    other = FakeRequest("other", list(range(500, 500 + BLOCK)))
    side.tables["other"] = [201, 202]
    side.tables["r"] = TABLE
    request = FakeRequest("r", list(range(2 * BLOCK + 1)))
    side.put(request, 2)
    assert side.match(request) == 2 * BLOCK
    side.core.allocated(request, lambda: [TABLE], 2 * BLOCK)
    request.num_computed_tokens = 2 * BLOCK
    assert side.step((request, 1), (other, BLOCK)).saves == []
    side.core.report(BAD)
    assert saved_ids(side.step((other, 0))) == [(201, 202)], "planned anew"


def test_steps_that_were_planned_before_the_report_wait_too(side: Side) -> None:
    request, _ = begin(side)
    request.tokens += range(600, 600 + BLOCK)
    side.tables["r"] = [*TABLE, 109, 110]
    assert side.step((request, BLOCK)).saves == []
    side.core.report(GOOD)
    assert saved_ids(side.step()) == [(105, 106), (107, 108), (109, 110)]


def test_an_engine_that_always_plans_one_load_ahead_saves_nevertheless() -> None:
    held = SaveGate(workers=1)
    saves = [SaveJob(i, f"r{i}", ()) for i in range(10)]
    ready: list[SaveJob] = []
    for i, save in enumerate(saves):
        ready += held.step([LoadJob(i, f"r{i}", ())], [save], [f"r{i}"], lambda _: [[1]])
        held.ended({i - 1: 1} if i else {})
    assert ready == saves[: len(ready)]
    assert len(ready) >= len(saves) - 2
    assert len(held) <= 2, "what it remembers does not grow"


def test_what_was_planned_before_a_bad_load_and_waits_is_dropped_with_it() -> None:
    held = SaveGate(workers=1)
    first, second = SaveJob(0, "a", ()), SaveJob(1, "b", ())
    assert held.step([LoadJob(0, "a", ())], [first], ["a"], lambda _: [[1, 2]]) == []
    assert held.step([LoadJob(1, "b", ())], [second], ["b"], lambda _: [[2, 3]]) == []
    assert held.ended({0: 1}) == {0}
    assert held.spoilt({2}) == ([first, second], {2, 3})


def test_trap_every_worker_must_have_reported(store: MemoryBlockStore) -> None:
    side = Side(store, topology=TpKVTopology.of(2), layerwise=True)
    begin(side, (0, 1))
    side.core.report(GOOD)
    assert side.step().saves == [], "the other worker's load may have failed"
    side.core.report(GOOD)
    assert len(saved_ids(side.step())) == 2
    side.core.close()


def test_a_request_preempted_after_its_load_failed_starts_over(side: Side) -> None:
    request, _ = begin(side)
    side.core.report(BAD)
    request.num_computed_tokens = 0
    assert side.step(preempted=["r"]).saves == []
    assert side.pins.references == {}
    assert side.match(request) == BLOCK, "the record that failed is not offered again"
