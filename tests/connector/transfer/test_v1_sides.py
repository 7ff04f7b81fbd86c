"""The sides of a connector of vLLM's kind: what it is told of an engine of ours, step by step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from connector_parts import FakeRequest

from connector.transfer.base import (
    KVConnectorOutput,
    KVConnectorRole,
    KVConnectorScheduler,
    KVConnectorWorker,
    SchedulerStep,
    TransferResults,
)
from connector.transfer.base_v1 import (
    KVConnectorBase_V1,
    KVConnectorTransferResults,
    SupportsHMA,
    supports_hma,
)
from connector.transfer.config import KVTransferConfig
from connector.transfer.factory import KVConnectorFactory
from connector.transfer.v1_sides import V1EngineInfo, V1Scheduler, V1Worker
from kvstore import UsageError


class Recorder(KVConnectorBase_V1):
    """Keeps what it was called with."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, groups: Any = None) -> None:
        super().__init__(vllm_config, role, groups)
        self.calls: list[tuple[Any, ...]] = []

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        layers = {n: layer.kv_cache for n, layer in forward_context.no_compile_layers.items()}
        self.calls.append(("load", layers, forward_context.attn_metadata))

    def wait_for_layer_load(self, layer_name: str) -> None:
        self.calls.append(("wait", layer_name))

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None:
        self.calls.append(("save", layer_name, kv_layer, attn_metadata))

    def wait_for_save(self) -> None:
        self.calls.append(("saved",))

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return KVConnectorTransferResults({"s"}, {"r", "f", *finished_req_ids}, {"f"})

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        return num_computed_tokens + 1, True

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        shown = [(block.block_id, block.is_null) for block in blocks.blocks[0]]
        self.calls.append((request.request_id, blocks.get_block_ids(), shown, num_external_tokens))

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return scheduler_output

    def update_connector_output(self, connector_output: Any) -> None:
        self.calls.append(("output", connector_output))

    def request_finished(self, request: Any, block_ids: list[int]) -> Any:
        return True, {"blocks": block_ids}

    def has_pending_push_work(self) -> bool:
        return True

    def get_finished_count(self) -> int:
        return 3

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str:
        return vllm_config.layout  # type: ignore[no-any-return]


class OfGroups(Recorder, SupportsHMA):
    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        return False, {"groups": block_ids}


CONFIG = KVTransferConfig(
    kv_connector="Recorder", kv_role="kv_both", kv_connector_module_path=__name__
)


def engine_info() -> V1EngineInfo:
    return V1EngineInfo(vllm_config=SimpleNamespace(layout="HND"), kv_cache_config="groups")


def sides(kind: type[KVConnectorBase_V1] = Recorder) -> tuple[V1Scheduler, V1Worker]:
    return kind.make_scheduler(CONFIG, engine_info()), kind.make_worker(CONFIG, engine_info())


def test_factory_makes_both_sides_each_told_its_role_and_config() -> None:
    info = engine_info()
    for role, protocol in (
        (KVConnectorRole.SCHEDULER, KVConnectorScheduler),
        (KVConnectorRole.WORKER, KVConnectorWorker),
    ):
        side: Any = KVConnectorFactory.create_connector(CONFIG, role, info)
        assert isinstance(side, protocol)
        assert side.connector.role is role
        assert side.connector._kv_transfer_config is CONFIG
        assert side.connector._kv_cache_config == "groups"
    assert not hasattr(info.vllm_config, "kv_transfer_config"), "it is the engine's"


def test_constructor_of_the_first_releases_is_enough() -> None:
    config = SimpleNamespace(kv_transfer_config=CONFIG)
    assert Recorder(config, KVConnectorRole.WORKER)._kv_cache_config is None
    with pytest.raises(UsageError, match="kv_transfer_config"):
        Recorder(SimpleNamespace(), KVConnectorRole.WORKER)


def plan(scheduler: V1Scheduler, *scheduled: Any, preempted: Any = (), **tables: Any) -> Any:
    return scheduler.build_connector_meta(SchedulerStep(scheduled, tables.get, preempted))


def test_request_is_new_once_then_only_what_was_added_to_it_is_told() -> None:
    scheduler, _ = sides()
    request = FakeRequest("a", list(range(10)))
    request.prompt_token_ids = request.all_token_ids = request.tokens  # type: ignore[attr-defined]
    first = plan(scheduler, (request, 6), a=[4, 5])
    (new,) = first.scheduled_new_reqs
    assert (new.req_id, new.block_ids, new.num_computed_tokens) == ("a", ([4, 5],), 0)
    assert new.prompt_token_ids == request.tokens
    assert first.num_scheduled_tokens == {"a": 6}
    assert first.total_num_scheduled_tokens == 6
    assert first.scheduled_cached_reqs.num_reqs == 0
    request.num_computed_tokens = 6
    second = plan(scheduler, (request, 4), a=[4, 5, 9])
    cached = second.scheduled_cached_reqs
    assert second.scheduled_new_reqs == []
    assert (cached.req_ids, cached.new_block_ids) == (["a"], [([9],)])
    assert (cached.num_computed_tokens, cached.new_token_ids) == ([6], [[6, 7, 8, 9]])
    assert cached.resumed_req_ids == set()
    request.num_computed_tokens = 10
    assert plan(scheduler, (request, 1), a=[4, 5, 9]).scheduled_cached_reqs.new_block_ids == [None]


def test_resumed_request_is_told_with_all_its_blocks_and_tokens() -> None:
    scheduler, _ = sides()
    request = FakeRequest("a", list(range(10)))
    request.all_token_ids = request.tokens  # type: ignore[attr-defined]
    plan(scheduler, (request, 10), a=[4, 5])
    # Preempted in a step in which it does not run, and one that was never scheduled is nobody's.
    assert plan(scheduler, preempted=("a", "b")).preempted_req_ids == {"a", "b"}
    cached = plan(scheduler, (request, 10), a=[7, 8, 9]).scheduled_cached_reqs
    assert cached.resumed_req_ids == {"a"}
    assert cached.new_block_ids == [([7, 8, 9],)]
    assert cached.all_token_ids == {"a": request.tokens}
    cached = plan(scheduler, (request, 1), a=[7, 8, 9]).scheduled_cached_reqs
    assert cached.resumed_req_ids == set()


def test_finished_request_is_told_once_and_its_id_may_come_again() -> None:
    scheduler, _ = sides()
    request = FakeRequest("a", [1])
    plan(scheduler, (request, 1), a=[4])
    assert scheduler.request_finished(request, [4]) == (True, {"blocks": [4]})
    step = plan(scheduler, (request, 1), a=[6])
    assert step.finished_req_ids == {"a"}
    assert [new.block_ids for new in step.scheduled_new_reqs] == [([6],)]
    assert plan(scheduler).finished_req_ids == set()


def test_connector_of_several_groups_is_told_of_the_end_by_its_own_call() -> None:
    scheduler, _ = sides(OfGroups)
    assert scheduler.request_finished(FakeRequest("a", [1]), [4]) == (False, {"groups": ([4],)})
    assert [supports_hma(kind) for kind in (OfGroups, Recorder, scheduler.connector)] == [
        *(True, False, True)
    ]


def test_answers_and_blocks_go_through() -> None:
    scheduler, _ = sides()
    request = FakeRequest("a", [1])
    assert scheduler.get_num_new_matched_tokens(request, 4) == (5, True)
    scheduler.update_state_after_alloc(request, [8, 2], 16)
    output = KVConnectorOutput(finished_recving={"a"})
    scheduler.update_connector_output(output)
    blocks = ("a", ([8, 2],), [(8, False), (2, False)], 16)
    assert scheduler.connector.calls == [blocks, ("output", output)]
    assert scheduler.has_pending_work()
    assert (scheduler.take_events(), scheduler.reset_cache()) == ((), None)
    scheduler.on_new_request(request)
    scheduler.shutdown()


def test_worker_makes_the_calls_of_a_step_with_the_layers_it_registered() -> None:
    _, worker = sides()
    worker.register_kv_caches({"one": 11, "two": 22})
    with pytest.raises(UsageError, match="bind_connector_metadata"):
        worker.start_load_kv()
    worker.bind_connector_metadata("meta")
    assert worker.has_connector_metadata()
    worker.handle_preemptions("meta")
    worker.start_load_kv()
    worker.wait_for_layer_load("one")
    worker.save_kv_layer("one", 11)
    worker.wait_for_save()
    assert worker.connector.calls == [
        ("load", {"one": 11, "two": 22}, {"one": None, "two": None}),
        ("wait", "one"),
        ("save", "one", 11, None),
        ("saved",),
    ]
    assert worker.get_finished({"x"}) == TransferResults({"s"}, {"r", "f", "x"}, {"f"})
    assert (worker.get_required_kvcache_layout(), worker.get_finished_count()) == ("HND", 3)
    assert worker.get_block_ids_with_load_errors() == set()
    worker.clear_connector_metadata()
    assert not worker.has_connector_metadata()
    worker.shutdown()
