"""What the scheduler side saves, and which engine blocks it holds meanwhile."""

from __future__ import annotations

from connector_parts import BLOCK, ENGINE_BLOCK, FakeRequest, Side, taken, wait_for

from connector.layout.topology import TpKVTopology
from connector.limits import SAVE_JOB_BLOCKS_MAX, SAVE_JOBS_MAX
from connector.messages import StepPlan, WorkerReport
from kvstore.testing.blockstore import MemoryBlockStore


def prompt(side: Side, blocks: int, extra: int = 2, first_block_id: int = 101) -> FakeRequest:
    request = FakeRequest("r", list(range(blocks * BLOCK + extra)))
    table(side, request, first_block_id)
    return request


def table(side: Side, request: FakeRequest, first: int, tokens: int = 100) -> None:
    count = (len(request.tokens) + tokens) // ENGINE_BLOCK
    side.tables[request.request_id] = list(range(first, first + count))


def saved(plan: StepPlan) -> list[tuple[bytes, tuple[int, ...]]]:
    return [(block.keys[0], block.block_ids) for job in plan.saves for block in job.blocks]


def end_all(side: Side, plan: StepPlan, workers: int = 1) -> None:
    side.core.report(WorkerReport(ended_saves={job.job_id: workers for job in plan.saves}))


def test_a_prefill_saves_its_full_blocks_in_order(side: Side) -> None:
    request = prompt(side, 2)
    keys = side.keys(request)
    assert saved(side.step((request, len(request.tokens)))) == [
        (keys[0], (101, 102)),
        (keys[1], (103, 104)),
    ]


def test_each_block_is_saved_once(side: Side) -> None:
    request = prompt(side, 3, extra=0)
    plans = [side.step((request, tokens)) for tokens in (BLOCK + 3, 3, BLOCK + 2)]
    assert [len(saved(plan)) for plan in plans] == [1, 0, 2]
    assert [key for plan in plans for key, _ in saved(plan)] == side.keys(request)


def test_trap_a_step_that_fills_a_block_without_allocating_saves_it(side: Side) -> None:
    request = prompt(side, 1, extra=-1)
    assert saved(side.step((request, BLOCK - 1))) == []
    request.tokens.append(4)
    assert len(saved(side.step((request, 1)))) == 1


def test_trap_block_ids_come_from_the_table_of_this_step(side: Side) -> None:
    request = prompt(side, 2, extra=0)
    side.step((request, BLOCK))
    table(side, request, 501)
    (entry,) = saved(side.step((request, BLOCK)))
    assert entry[1] == (503, 504)


def test_trap_rejected_drafts_are_not_saved(side: Side) -> None:
    request = prompt(side, 1, extra=-2)
    # Three drafts are scheduled behind the known tokens: they may all be rejected.
    assert saved(side.step((request, len(request.tokens) + 3))) == []


def test_trap_volatile_tokens_of_a_draft_model_are_saved_a_step_later(
    store: MemoryBlockStore,
) -> None:
    side = Side(store, volatile_tokens=ENGINE_BLOCK)
    request = prompt(side, 2, extra=0)
    assert len(saved(side.step((request, 2 * BLOCK)))) == 1
    request.tokens += [1] * ENGINE_BLOCK
    assert len(saved(side.step((request, ENGINE_BLOCK)))) == 1
    side.core.close()


def test_trap_a_preempted_request_is_saved_again_from_its_new_blocks(side: Side) -> None:
    request = prompt(side, 2, extra=0)
    first = side.step((request, 2 * BLOCK))
    side.step(preempted=[request.request_id])
    end_all(side, first)
    request.num_computed_tokens = 0
    table(side, request, 301)
    assert [ids for _, ids in saved(side.step((request, 2 * BLOCK)))] == [(301, 302), (303, 304)]


def test_what_a_lookup_found_is_not_saved_again(side: Side) -> None:
    request = prompt(side, 3, extra=0)
    side.put(request, 2)
    offered = side.match(request)
    side.core.allocated(request, lambda: [side.tables["r"]], offered)
    side.step()
    side.core.loads_ended(["r"])
    request.num_computed_tokens = offered
    assert [key for key, _ in saved(side.step((request, BLOCK)))] == side.keys(request)[2:]


def test_after_a_failed_load_the_recomputed_blocks_are_saved(side: Side) -> None:
    request = prompt(side, 3, extra=0)
    side.put(request, 3)
    side.core.allocated(request, lambda: [side.tables["r"]], side.match(request))
    (job,) = side.step().loads
    side.core.report(WorkerReport(failed_blocks={job.job_id: 1}))
    side.core.loads_ended(["r"])
    request.num_computed_tokens = BLOCK
    assert [key for key, _ in saved(side.step((request, 2 * BLOCK)))] == side.keys(request)[1:]


def test_generated_tokens_are_saved_unless_that_is_switched_off(store: MemoryBlockStore) -> None:
    for save_decode, expected in ((True, 2), (False, 1), ("auto", 2)):
        side = Side(store, save_decode=save_decode)
        request = prompt(side, 1, extra=0)
        plans = [side.step((request, BLOCK))]
        for i in range(BLOCK):
            request.tokens.append(i)
            plans.append(side.step((request, 1)))
        assert sum(len(saved(plan)) for plan in plans) == expected
        side.core.close()


def test_a_consumer_saves_nothing(store: MemoryBlockStore) -> None:
    side = Side(store, saves=False)
    request = prompt(side, 2)
    assert side.step((request, len(request.tokens))).saves == []
    side.core.close()


def test_blocks_that_the_engine_dropped_are_not_saved(side: Side) -> None:
    request = prompt(side, 2, extra=0)
    side.tables["r"][0] = 0  # the null block: out of a sliding window
    assert [key for key, _ in saved(side.step((request, 2 * BLOCK)))] == side.keys(request)[1:]


def test_trap_what_was_computed_before_a_reset_is_not_saved_after_it(side: Side) -> None:
    request = prompt(side, 3, extra=0)
    side.core.on_new_request(request)
    end_all(side, side.step((request, BLOCK)))
    assert side.core.reset() is True
    assert saved(side.step((request, BLOCK))) == []
    side.step(preempted=["r"])
    request.num_computed_tokens = 0
    assert len(saved(side.step((request, 3 * BLOCK)))) == 3, "computed anew it is saved again"


class TestPins:
    def test_trap_blocks_of_a_save_are_held_through_preemption_and_the_requests_end(
        self, side: Side
    ) -> None:
        request = prompt(side, 2, extra=0)
        plan = side.step((request, 2 * BLOCK))
        side.step(preempted=["r"])
        side.core.finished("r")
        assert side.pins.references == {101: 1, 102: 1, 103: 1, 104: 1}
        end_all(side, plan)
        assert side.pins.references == {}

    def test_trap_the_engine_must_keep_stepping_until_all_saves_have_ended(
        self, side: Side
    ) -> None:
        request = prompt(side, 2, extra=0)
        assert side.core.has_pending_work() is False
        plan = side.step((request, 2 * BLOCK))
        side.core.finished("r")
        assert side.core.has_pending_work() is True
        end_all(side, plan)
        assert side.core.has_pending_work() is False

    def test_blocks_are_held_until_every_worker_has_ended_the_save(
        self, store: MemoryBlockStore
    ) -> None:
        side = Side(store, topology=TpKVTopology.of(2, 2))
        request = prompt(side, 1, extra=0)
        plan = side.step((request, BLOCK))
        end_all(side, plan, workers=3)
        assert side.pins.references == {101: 1, 102: 1}
        end_all(side, plan, workers=1)
        assert side.pins.references == {}
        side.core.close()

    def test_beyond_the_limit_of_pinned_blocks_saves_wait(self, store: MemoryBlockStore) -> None:
        side = Side(store, pinned_blocks_max=2 * BLOCK // ENGINE_BLOCK)
        request = prompt(side, 5, extra=0)
        first = side.step((request, 5 * BLOCK))
        assert len(saved(first)) == 2
        request.tokens.append(1)
        assert saved(side.step((request, 1))) == []
        end_all(side, first)
        request.tokens.append(1)
        assert [key for key, _ in saved(side.step((request, 1)))] == side.keys(request)[2:4]
        side.core.close()

    def test_what_a_request_could_not_save_before_its_end_is_counted_and_said(
        self, store: MemoryBlockStore
    ) -> None:
        side = Side(store, pinned_blocks_max=3 * BLOCK // ENGINE_BLOCK)
        in_time, late = prompt(side, 4), prompt(side, 3, extra=1, first_block_id=201)
        late.request_id = "late"
        side.tables["late"] = list(range(201, 220))
        side.core.on_new_request(late)
        side.match(late)
        plan = side.step((in_time, len(in_time.tokens)))
        assert len(saved(plan)) == 3
        side.step((in_time, 1), (late, len(late.tokens)))
        end_all(side, plan)
        side.step((in_time, 1))
        side.core.finished(in_time.request_id)
        side.core.finished("late")
        assert taken(side.core.take_stats)["unsaved_blocks:pinned_fraction"] == 3
        wait_for(lambda: (said := side.core.explain("late")) is not None and bool(said.events), "")
        explained = side.core.explain("late")
        assert explained is not None
        assert "3 blocks not saved" in explained.events[-1]
        side.core.close()

    def test_the_number_of_jobs_is_limited(self, side: Side) -> None:
        jobs = 0
        for i in range(SAVE_JOBS_MAX + 10):
            request = FakeRequest(f"q{i}", list(range(i, i + BLOCK)))
            side.tables[request.request_id] = [1, 2]
            jobs += len(side.step((request, BLOCK)).saves)
        # Two engine blocks a job stay below the limit of pinned blocks here.
        assert jobs == SAVE_JOBS_MAX

    def test_a_long_prompt_is_saved_in_several_jobs(self, side: Side) -> None:
        request = prompt(side, SAVE_JOB_BLOCKS_MAX + 1, extra=0)
        plan = side.step((request, len(request.tokens)))
        assert [len(job.blocks) for job in plan.saves] == [SAVE_JOB_BLOCKS_MAX, 1]

    def test_what_a_save_in_flight_stores_after_a_reset_is_dropped_too(
        self, side: Side, store: MemoryBlockStore
    ) -> None:
        request = prompt(side, 1)
        plan = side.step((request, BLOCK))
        assert side.core.reset() is True
        side.put(request, 1)  # what the worker does before it hears of anything
        other = FakeRequest("other", list(request.tokens))
        assert side.match(other) == 0, "it may have been saved before"
        end_all(side, plan)
        wait_for(lambda: not store.sealed(), "it is dropped")
        wait_for(lambda: not side.core._resetter.pending, "the reset is complete")
        side.put(request, 1)
        assert side.match(FakeRequest("after", list(request.tokens))) == BLOCK

    def test_an_end_reported_twice_frees_nothing_twice(self, side: Side) -> None:
        request = prompt(side, 1, extra=0)
        plan = side.step((request, BLOCK))
        end_all(side, plan)
        end_all(side, plan)
        assert side.pins.references == {}


def test_trap_a_session_that_replaces_tokens_saves_under_the_keys_of_what_it_has(
    store: MemoryBlockStore,
) -> None:
    """The last token of a finished turn may be dropped and its place filled anew."""
    side = Side(store)
    request = FakeRequest("r", list(range(2 * BLOCK)))
    side.tables["r"] = list(range(1, 2 * BLOCK // ENGINE_BLOCK + 1))
    side.match(request)
    side.step((request, BLOCK))
    request.tokens[-1] = 999
    plan = side.step((request, BLOCK))
    keys = [block.keys[0] for job in plan.saves for block in job.blocks]
    assert keys == side.keys(request)[1:]
    side.core.close()


def matched_for_this_step(side: Side, request: FakeRequest, computed: int) -> None:
    """As the engine does right before it schedules the request."""
    side.match(request, computed)
    assert side.core.match(request, computed) is not None


def test_trap_what_another_connector_loads_within_the_step_is_not_saved(side: Side) -> None:
    """Whether that load was good is told after the step."""
    request = prompt(side, 4)
    matched_for_this_step(side, request, BLOCK)
    side.core.allocated(request, lambda: [side.tables["r"]], 0)
    request.num_computed_tokens = 3 * BLOCK  # one the engine had, two of the other connector
    assert saved(side.step((request, BLOCK + 2))) == []
    request.tokens += range(2 * BLOCK)
    assert saved(side.step((request, 2 * BLOCK))) == [], "it was computed on them"


def test_what_another_connector_loaded_between_steps_is_saved(side: Side) -> None:
    request = prompt(side, 4)
    matched_for_this_step(side, request, 0)
    side.core.allocated(request, lambda: [side.tables["r"]], 0)
    side.step()
    request.num_computed_tokens = 3 * BLOCK
    assert len(saved(side.step((request, BLOCK + 2)))) == 4


def test_what_the_engine_had_and_what_is_loaded_here_does_not_keep_the_rest_from_being_saved(
    store: MemoryBlockStore,
) -> None:
    side = Side(store, layerwise=True)
    request = prompt(side, 4)
    side.put(request, 3)
    matched_for_this_step(side, request, BLOCK)
    side.core.allocated(request, lambda: [side.tables["r"]], 2 * BLOCK)
    request.num_computed_tokens = 3 * BLOCK
    plan = side.step((request, BLOCK + 2))
    assert len(plan.loads) == 1
    (load,) = plan.loads
    side.core.report(WorkerReport(ended_loads={load.job_id: 1}))
    assert len(saved(side.step())) == 1
    side.core.close()


def test_a_save_names_the_prefix_that_it_continues(side: Side) -> None:
    request = prompt(side, 3)
    (first,) = side.step((request, 2 * BLOCK)).saves
    (second,) = side.step((request, BLOCK)).saves
    assert first.before == (((),),)
    assert second.before == ((tuple(side.keys(request)[:2]),),)
