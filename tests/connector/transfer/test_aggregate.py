"""KVOutputAggregator: one output out of all workers', step after step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.stats import CountStats
from connector.transfer import aggregate as aggregate_module
from connector.transfer.aggregate import KVOutputAggregator, WorkerEvents, worker_output
from connector.transfer.base import KVConnectorOutput
from connector.transfer.base_v1 import KVConnectorTransferResults
from kvstore import UsageError


class Meta:
    def __init__(self, *said: str) -> None:
        self.said = list(said)

    def aggregate(self, other: Meta) -> Meta:
        self.said += other.said
        return self


def sent(*names: str, **more: object) -> KVConnectorOutput:
    return KVConnectorOutput(finished_sending=set(names), **more)  # type: ignore[arg-type]


def received(*names: str, **more: object) -> KVConnectorOutput:
    return KVConnectorOutput(finished_recving=set(names), **more)  # type: ignore[arg-type]


def test_request_is_finished_when_all_workers_have_said_so_in_whichever_step() -> None:
    aggregator = KVOutputAggregator(3)
    first = aggregator.aggregate([sent("a", "b"), None, sent("a")])
    assert first.finished_sending is None
    second = aggregator.aggregate([None, sent("a"), sent("b")])
    assert second.finished_sending == {"a"}
    third = aggregator.aggregate([None, sent("b"), None])
    assert third.finished_sending == {"b"}
    # Counted anew: a request may be sent again.
    assert aggregator.aggregate([sent("a"), None, None]).finished_sending is None


def test_sending_and_receiving_are_counted_apart() -> None:
    aggregator = KVOutputAggregator(2)
    merged = aggregator.aggregate([sent("a"), received("a")])
    assert (merged.finished_sending, merged.finished_recving) == (None, None)
    merged = aggregator.aggregate([received("a"), None])
    assert (merged.finished_sending, merged.finished_recving) == (None, {"a"})


def test_expected_count_may_change_and_counts_begun_keep_theirs() -> None:
    aggregator = KVOutputAggregator(3)
    aggregator.aggregate([sent("old"), None, None])
    merged = aggregator.aggregate([sent("new", expected_finished_count=1), sent("old"), None])
    assert merged.finished_sending == {"new"}
    assert merged.expected_finished_count == aggregator.expected_finished_count == 1
    assert aggregator.aggregate([sent("old"), None, None]).finished_sending == {"old"}


def test_failed_receive_is_passed_on_when_the_request_has_ended_everywhere() -> None:
    aggregator = KVOutputAggregator(2)
    assert not aggregator.aggregate([received("a", failed_recving={"a"}), None]).failed_recving
    assert aggregator.aggregate([None, received("a", "b")]).failed_recving == {"a"}
    # Once: the next load of the same request may go well.
    assert not aggregator.aggregate([received("a"), received("a")]).failed_recving


def test_invalid_blocks_are_united_and_passed_on_at_once() -> None:
    aggregator = KVOutputAggregator(2)
    outputs = [KVConnectorOutput(invalid_block_ids=ids) for ids in ({1, 2}, {2, 7})]
    assert aggregator.aggregate(outputs).invalid_block_ids == {1, 2, 7}
    assert not aggregator.aggregate([None, None]).invalid_block_ids


def test_stats_and_metadata_are_aggregated_in_worker_order() -> None:
    outputs = [
        None,
        KVConnectorOutput(kv_connector_stats=CountStats({"loads": 1})),
        KVConnectorOutput(
            kv_connector_stats=CountStats({"loads": 2, "saves": 5}),
            kv_connector_worker_meta=Meta("one"),
        ),
        KVConnectorOutput(kv_connector_worker_meta=Meta("two")),
    ]
    merged = KVOutputAggregator(4).aggregate(outputs)
    assert merged.kv_connector_stats == CountStats({"loads": 3, "saves": 5})
    assert isinstance(merged.kv_connector_worker_meta, Meta)
    assert merged.kv_connector_worker_meta.said == ["one", "two"]


def test_events_that_all_workers_have_seen_are_told_from_the_others() -> None:
    outputs = [
        KVConnectorOutput(kv_cache_events=WorkerEvents(["stored 1", "stored 2"])),
        KVConnectorOutput(kv_cache_events=WorkerEvents(["stored 2"])),
    ]
    events = KVOutputAggregator(2).aggregate(outputs).kv_cache_events
    assert isinstance(events, WorkerEvents)
    assert events.common_events() == ["stored 2"]
    assert sorted(events.get_all_events()) == ["stored 1", "stored 2", "stored 2"]
    with pytest.raises(UsageError):
        events.increment_workers(0)


def test_workers_with_different_kinds_of_stats_are_refused() -> None:
    class Other(CountStats):
        pass

    outputs = [KVConnectorOutput(kv_connector_stats=s) for s in (CountStats(), Other())]
    with pytest.raises(UsageError, match="kv_connector_stats='Other'"):
        KVOutputAggregator(2).aggregate(outputs)


def test_step_about_which_no_worker_says_anything_is_empty() -> None:
    merged = KVOutputAggregator(2).aggregate([None, KVConnectorOutput()])
    assert merged.is_empty()
    assert not KVConnectorOutput(invalid_block_ids={1}).is_empty()


@dataclass
class OldReport:
    """What an engine's workers said when it began: two fields of today's."""

    finished_sending: set[str] | None = None
    finished_recving: set[str] | None = None


@dataclass
class RunnerOutput:
    """An engine's own output of one worker."""

    tokens: list[int]
    kv_connector_output: Any = None


def test_engines_own_outputs_give_that_of_the_rank_asked_for_with_all_reports_in_it() -> None:
    aggregator = KVOutputAggregator(2)
    outputs = [RunnerOutput([rank], OldReport({"a"})) for rank in range(2)]
    assert aggregator.aggregate(outputs, output_rank=1) is outputs[1]
    assert outputs[1] == RunnerOutput([1], OldReport({"a"}))
    # Nobody says anything: the class is known from before.
    outputs = [RunnerOutput([rank]) for rank in range(2)]
    assert aggregator.aggregate(outputs) == RunnerOutput([0], OldReport())


def test_reports_of_ours_may_be_in_an_engines_outputs() -> None:
    outputs = [RunnerOutput([0], received("a", invalid_block_ids={3})), RunnerOutput([1])]
    answer = KVOutputAggregator(1).aggregate(outputs)
    assert answer is not None
    assert answer.kv_connector_output == received(
        "a", invalid_block_ids={3}, expected_finished_count=1
    )


def test_step_that_is_not_over_is_none_and_counts_nothing() -> None:
    aggregator = KVOutputAggregator(2)
    assert aggregator.aggregate([None, None], output_rank=0) is None
    late = RunnerOutput([1], received("a"))
    assert aggregator.aggregate([None, late]) is None
    outputs = [RunnerOutput([0], received("a")), late]
    assert aggregator.aggregate(outputs) is outputs[0]
    assert outputs[0].kv_connector_output.finished_recving == {"a"}


@pytest.mark.parametrize("rank", [-1, 1])
def test_output_rank_without_a_worker_is_refused(rank: int) -> None:
    with pytest.raises(UsageError, match=f"output_rank={rank}"):
        KVOutputAggregator(1).aggregate([RunnerOutput([0])], rank)


def test_output_that_carries_nothing_for_connectors_is_refused() -> None:
    with pytest.raises(UsageError, match="outputs='int'"):
        KVOutputAggregator(1).aggregate([7])


def test_expected_count_must_be_positive() -> None:
    with pytest.raises(UsageError, match="expected_finished_count=0"):
        KVOutputAggregator(0)


def test_requests_that_one_worker_never_reports_do_not_pile_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(aggregate_module, "FINISHED_PENDING_MAX", 2)
    aggregator = KVOutputAggregator(2)
    for name in ("a", "b", "c"):
        aggregator.aggregate([received(name, failed_recving={name}), None])
    merged = aggregator.aggregate([None, received("b", "c")])
    assert merged.finished_recving == {"b", "c"}
    # "a" was given up: a late word about it begins a new count.
    assert aggregator.aggregate([None, received("a")]).finished_recving is None


class Worker:
    def __init__(self, finished_count: int | None) -> None:
        self.finished_count = finished_count

    def get_finished_count(self) -> int | None:
        return self.finished_count

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return KVConnectorTransferResults({"s"}, {"r", *finished_req_ids}, {"r"})

    def get_block_ids_with_load_errors(self) -> set[int]:
        return {4}

    def build_connector_worker_meta(self) -> Meta:
        return Meta("m")

    def get_kv_connector_stats(self) -> CountStats:
        return CountStats({"n": 1})

    def get_kv_connector_kv_cache_events(self) -> WorkerEvents:
        return WorkerEvents(["e"])


@pytest.mark.parametrize(("says", "expected"), [(None, 8), (2, 2)])
def test_connector_may_say_how_many_workers_report(says: int | None, expected: int) -> None:
    aggregator = KVOutputAggregator.from_connector(Worker(says), 8)  # type: ignore[arg-type]
    assert aggregator.expected_finished_count == expected


def test_output_of_a_worker_holds_everything_its_connector_has_to_say() -> None:
    output = worker_output(Worker(None), {"done"})  # type: ignore[arg-type]
    assert output.finished_sending == {"s"}
    assert output.finished_recving == {"r", "done"}
    assert output.failed_recving == {"r"}
    assert output.invalid_block_ids == {4}
    assert isinstance(output.kv_connector_worker_meta, Meta)
    assert output.kv_connector_stats == CountStats({"n": 1})
    assert output.kv_cache_events is not None
    assert output.kv_cache_events.get_all_events() == ["e"]


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from("abc")), max_size=30))
def test_each_request_finishes_once_per_round_of_all_workers(
    reports: list[tuple[int, str]],
) -> None:
    aggregator = KVOutputAggregator(3)
    finished = 0
    for worker, name in reports:
        outputs: list[KVConnectorOutput | None] = [None] * 3
        outputs[worker] = sent(name)
        finished += len(aggregator.aggregate(outputs).finished_sending or ())
    expected = sum([n for _, n in reports].count(name) // 3 for name in "abc")
    assert finished == expected


def test_stats_without_a_count_are_empty() -> None:
    assert CountStats({"a": 0}).is_empty()
    assert not CountStats({"a": 1}).is_empty()
    assert CountStats({"a": 1}).to_dict() == {"a": 1}
