"""MultiConnector over this package's own connector and one of vLLM's kind."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from connector_parts import GEOMETRY, FakePins, FakeRequest

from connector.build import EngineShape
from connector.layout.topology import TpKVTopology
from connector.transfer.base import KVConnectorRole
from connector.transfer.base_v1 import KVConnectorBase_V1, KVConnectorMetadata
from connector.transfer.config import KVTransferConfig
from connector.transfer.engine import EngineBlocks, EngineInfo, SchedulerSteps
from connector.transfer.factory import KVConnectorFactory


class OfVllmsKind(KVConnectorBase_V1):
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...
    def wait_for_layer_load(self, layer_name: str) -> None: ...
    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None:
        pass

    def wait_for_save(self) -> None: ...
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        return self._vllm_config.cache_config.block_size, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return KVConnectorMetadata()


CHILDREN: dict[str, dict[str, Any]] = {
    "store": {"kv_connector": "KVStoreConnector", "kv_role": "kv_both"},
    "vLLM's kind": {
        "kv_connector": "OfVllmsKind",
        "kv_connector_module_path": __name__,
        "kv_role": "kv_both",
    },
}


def scheduler_over(*names: str, **more: Any) -> Any:
    shape = EngineShape.of_one_group(GEOMETRY, TpKVTopology.of(), {"model": "m"})
    config = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"connectors": [CHILDREN[name] for name in names]},
    )
    engine = EngineInfo(shape=shape, pins=FakePins(), num_blocks=8, **more)
    return KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, engine)


@pytest.mark.parametrize(
    "names", [["store"], ["vLLM's kind"], ["store", "vLLM's kind"], ["vLLM's kind", "store"]]
)
def test_both_kinds_are_made_and_told_of_a_step_alone_and_together(names: list[str]) -> None:
    made = scheduler_over(*names)
    request = FakeRequest("r", list(range(10)))
    made.on_new_request(request)
    offered = made.get_num_new_matched_tokens(request, 0)
    if names[0] != "store":
        assert offered == (GEOMETRY.engine_block_tokens, False), "of the shape"
    made.update_state_after_alloc(request, EngineBlocks([1, 2, 3]), 0)
    step = SchedulerSteps().next([(request, 10)], {"r": [1, 2, 3]}.get)
    kinds = [type(part).__name__ for part in made.build_connector_meta(step).children]
    of_kind = {"store": "StepPlan", "vLLM's kind": "KVConnectorMetadata"}
    assert kinds == [of_kind[name] for name in names]
    assert made.request_finished(request, [1, 2, 3]) == (False, None)
    made.shutdown()


def test_what_the_engine_says_of_vllms_configuration_goes_before_its_shape() -> None:
    settings = SimpleNamespace(cache_config=SimpleNamespace(block_size=7))
    made = scheduler_over("vLLM's kind", "store", vllm_config=settings)
    assert made.get_num_new_matched_tokens(FakeRequest("r", [1]), 0) == (7, False)
    made.shutdown()
