"""What an engine of one's own tells a connector of vLLM's kind, step by step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from connector_parts import GEOMETRY, FakeRequest

from connector.build import EngineShape
from connector.layout.topology import TpKVTopology
from connector.transfer.base_v1 import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
    supports_hma,
)
from connector.transfer.config import KVTransferConfig
from connector.transfer.engine import (
    EngineBlocks,
    EngineInfo,
    SchedulerSteps,
    forward_context,
    request_finished,
)
from connector.transfer.factory import KVConnectorFactory
from kvstore import UsageError


class Quiet(KVConnectorBase_V1):
    """Has the calls that a connector must have, and nothing to say."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...
    def wait_for_layer_load(self, layer_name: str) -> None: ...
    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None:
        pass

    def wait_for_save(self) -> None: ...
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return scheduler_output

    def request_finished(self, request: Any, block_ids: list[int]) -> Any:
        return True, {"blocks": block_ids}


class OfGroups(Quiet, SupportsHMA):
    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        return False, {"groups": block_ids}


CONFIG = KVTransferConfig(
    kv_connector="Quiet", kv_role="kv_both", kv_connector_module_path=__name__
)


def test_factory_makes_both_sides_each_told_its_role_and_config() -> None:
    info = EngineInfo(vllm_config=SimpleNamespace(layout="HND"), kv_cache_config="groups")
    for role in KVConnectorRole:
        side = KVConnectorFactory.create_connector(CONFIG, role, info)
        assert isinstance(side, Quiet)
        assert side.role is role
        config = side._vllm_config
        assert (config.layout, config.engine_info) == ("HND", info)
        assert side._kv_transfer_config is CONFIG
        assert side._kv_cache_config == "groups"
    assert not hasattr(info.vllm_config, "kv_transfer_config"), "it is the engine's"


def test_configuration_that_the_engine_does_not_give_says_what_its_shape_says() -> None:
    shape = EngineShape.of_one_group(GEOMETRY, TpKVTopology.of(), {"model": "m"})
    said = EngineInfo(shape=shape).config_with(CONFIG)
    assert said.cache_config.block_size == GEOMETRY.engine_block_tokens
    assert not hasattr(EngineInfo().config_with(CONFIG), "cache_config")


def test_constructor_of_the_first_releases_is_enough() -> None:
    config = SimpleNamespace(kv_transfer_config=CONFIG)
    assert Quiet(config, KVConnectorRole.WORKER)._kv_cache_config is None
    with pytest.raises(UsageError, match="kv_transfer_config"):
        Quiet(SimpleNamespace(), KVConnectorRole.WORKER)


def plan(steps: SchedulerSteps, *scheduled: Any, **told: Any) -> Any:
    words = {name: told.pop(name, ()) for name in ("preempted", "finished")}
    return steps.next(scheduled, told.get, **words)


def test_request_is_new_once_then_only_what_was_added_to_it_is_told() -> None:
    steps = SchedulerSteps()
    request = FakeRequest("a", list(range(10)))
    request.prompt_token_ids = request.all_token_ids = request.tokens  # type: ignore[attr-defined]
    first = plan(steps, (request, 6), a=[4, 5])
    (new,) = first.scheduled_new_reqs
    assert (new.req_id, new.block_ids, new.num_computed_tokens) == ("a", ([4, 5],), 0)
    assert new.prompt_token_ids == request.tokens
    assert first.num_scheduled_tokens == {"a": 6}
    assert first.total_num_scheduled_tokens == 6
    assert first.scheduled_cached_reqs.num_reqs == 0
    request.num_computed_tokens = 6
    second = plan(steps, (request, 4), a=[4, 5, 9])
    cached = second.scheduled_cached_reqs
    assert second.scheduled_new_reqs == []
    assert (cached.req_ids, cached.new_block_ids) == (["a"], [([9],)])
    assert (cached.num_computed_tokens, cached.new_token_ids) == ([6], [[6, 7, 8, 9]])
    assert cached.resumed_req_ids == set()
    request.num_computed_tokens = 10
    assert plan(steps, (request, 1), a=[4, 5, 9]).scheduled_cached_reqs.new_block_ids == [None]


def test_resumed_request_is_told_with_all_its_blocks_and_tokens() -> None:
    steps = SchedulerSteps()
    request = FakeRequest("a", list(range(10)))
    request.all_token_ids = request.tokens  # type: ignore[attr-defined]
    plan(steps, (request, 10), a=[4, 5])
    # Preempted in a step in which it does not run, and one that was never scheduled is nobody's.
    assert plan(steps, preempted=("a", "b")).preempted_req_ids == {"a", "b"}
    cached = plan(steps, (request, 10), a=[7, 8, 9]).scheduled_cached_reqs
    assert cached.resumed_req_ids == {"a"}
    assert cached.new_block_ids == [([7, 8, 9],)]
    assert cached.all_token_ids == {"a": request.tokens}
    cached = plan(steps, (request, 1), a=[7, 8, 9]).scheduled_cached_reqs
    assert cached.resumed_req_ids == set()


def test_finished_request_is_told_once_and_its_id_may_come_again() -> None:
    steps = SchedulerSteps()
    request = FakeRequest("a", [1])
    plan(steps, (request, 1), a=[4])
    step = plan(steps, (request, 1), a=[6], finished=["a"])
    assert step.finished_req_ids == {"a"}
    assert [new.block_ids for new in step.scheduled_new_reqs] == [([6],)]
    assert plan(steps).finished_req_ids == set()


def test_request_that_finished_while_it_was_preempted_is_new_when_it_comes_again() -> None:
    steps = SchedulerSteps()
    request = FakeRequest("a", [1])
    plan(steps, (request, 1), a=[4])
    plan(steps, preempted=["a"])
    plan(steps, finished=["a"])
    assert len(plan(steps, (request, 1), a=[6]).scheduled_new_reqs) == 1
    assert plan(steps, (request, 1), a=[6]).scheduled_cached_reqs.resumed_req_ids == set()


def test_blocks_of_a_request_can_be_asked_for_as_of_vllms_scheduler() -> None:
    state = plan(SchedulerSteps(), (FakeRequest("a", [1]), 1), a=[4, 5]).kv_connector_block_state
    assert (state.get_block_ids("a"), state.get_block_ids("b")) == (([4, 5],), None)
    blocks = EngineBlocks([8, 2])
    assert [(b.block_id, b.is_null) for b in blocks.blocks[0]] == [(8, False), (2, False)]
    assert (blocks.get_block_ids(), EngineBlocks([]).get_block_ids()) == (([8, 2],), ([],))
    assert EngineBlocks([]).get_block_ids(allow_none=True) is None


def test_connector_of_several_groups_is_told_of_the_end_by_its_own_call() -> None:
    vllm_config = EngineInfo().config_with(CONFIG)
    made = [kind(vllm_config, KVConnectorRole.SCHEDULER) for kind in (OfGroups, Quiet)]
    ends = [request_finished(c, FakeRequest("a", [1]), ([4],)) for c in made]
    assert ends == [(False, {"groups": ([4],)}), (True, {"blocks": [4]})]
    assert [supports_hma(c) for c in (*made, OfGroups, Quiet)] == [True, False, True, False]
    with pytest.raises(UsageError, match=r"2 groups.*Quiet takes blocks of one"):
        request_finished(made[1], FakeRequest("a", [1]), ([4], [5]))


def test_forward_has_the_layers_that_the_engine_has() -> None:
    context = forward_context({"one": 11, "two": 22})  # type: ignore[dict-item]
    layers = {name: layer.kv_cache for name, layer in context.no_compile_layers.items()}
    assert layers == {"one": 11, "two": 22}
    assert context.attn_metadata == {"one": None, "two": None}
