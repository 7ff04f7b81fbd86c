"""`KVConnectorBase_V1` beside vLLM's class of that name, and two of vLLM's own connectors on it:
their source as it is, but for where the base comes from, in an engine of ours."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from connector_parts import FakeRequest
from vllm_model_config import ENGINE_BLOCK, HEAD_SIZE, HEADS, LAYERS, kv_cache_config

from connector.transfer import base_v1
from connector.transfer.base_v1 import KVConnectorBase_V1, KVConnectorRole
from connector.transfer.config import KVTransferConfig
from connector.transfer.engine import (
    EngineBlocks,
    EngineInfo,
    SchedulerSteps,
    forward_context,
    request_finished,
)
from connector.transfer.factory import KVConnectorFactory

pytestmark = pytest.mark.vllm

PLACE = "vllm.distributed.kv_transfer.kv_connector.v1"
IN_033 = {"supports_sleep_mode", "unregister_kv_caches", "restore_kv_caches"}
BLOCKS = 16
TOKENS = 4 * ENGINE_BLOCK + 6
TABLE = [3, 9, 4, 12, 7]


def base_of_vllm() -> Any:
    from vllm.distributed.kv_transfer.kv_connector.v1 import base

    return base


def members(kind: type) -> dict[str, Any]:
    return {n: m for n, m in vars(kind).items() if not n.startswith("__") and n != "_abc_impl"}


def test_the_base_has_every_call_of_vllms_with_its_parameters() -> None:
    theirs, ours = members(base_of_vllm().KVConnectorBase_V1), members(KVConnectorBase_V1)
    assert set(theirs) - set(ours) == set()
    assert set(ours) - set(theirs) <= IN_033
    for name, member in theirs.items():
        assert type(member) is type(ours[name]) or name == "_cache_hit_source", name
        if callable(getattr(member, "__func__", member)):
            of = [
                inspect.signature(getattr(m, "__func__", m)).parameters
                for m in (member, ours[name])
            ]
            assert list(of[0]) == list(of[1]), name
    their_init = inspect.signature(base_of_vllm().KVConnectorBase_V1).parameters
    assert list(their_init) == list(inspect.signature(KVConnectorBase_V1).parameters)


def test_what_a_connector_must_have_is_what_vllms_must() -> None:
    theirs = base_of_vllm().KVConnectorBase_V1.__abstractmethods__
    assert KVConnectorBase_V1.__abstractmethods__ == theirs


def test_the_names_that_connectors_import_beside_it_are_there() -> None:
    theirs = {
        name
        for name, member in vars(base_of_vllm()).items()
        if getattr(member, "__module__", "") == base_of_vllm().__name__ or name == "CopyBlocksOp"
    }
    assert theirs - set(vars(base_v1)) == set()


def bare(base: Any, transfer: Any) -> Any:
    calls = dict.fromkeys(base.__abstractmethods__, lambda self, *args, **more: None)
    groups = SimpleNamespace(prefix_cacheable_group_ids=(0, 2))
    kind = type("Bare", (base,), calls)
    return kind(SimpleNamespace(kv_transfer_config=transfer), KVConnectorRole.WORKER, groups)


ASKED: list[tuple[str, tuple[Any, ...]]] = [
    *[("get_finished", ({"a"},)), ("get_block_ids_with_load_errors", ())],
    *[("shutdown", ()), ("get_kv_connector_stats", ()), ("get_kv_connector_kv_cache_events", ())],
    *[("get_handshake_metadata", ()), ("build_connector_worker_meta", ())],
    *[("get_mem_pool_context", ()), ("register_kv_caches", ({},)), ("finish_forward", ())],
    *[("set_host_xfer_buffer_ops", (None,)), ("reset_capture_state", ())],
    *[("handle_preemptions", (None,)), ("on_new_request", (None,))],
    *[("bind_gpu_block_pool", (None,)), ("get_loaded_kv_cache_group_ids", (None,))],
    *[("bind_kv_cache_manager", (SimpleNamespace(block_pool=None),))],
    *[("get_external_cache_hit_sources", (None, n)) for n in (0, 5)],
    *[("update_connector_output", (None,)), ("request_finished", (None, [1]))],
    *[("register_finished_partial_tail", (None, ([1],), [])), ("take_events", ())],
    *[("has_pending_block_frees", ()), ("has_pending_push_work", ())],
    *[("get_required_kvcache_layout", (None,)), ("requires_piecewise_for_cudagraph", ({},))],
    *[("get_finished_count", ()), ("build_kv_connector_stats", ())],
    *[("set_xfer_handshake_metadata", ({},)), ("build_prom_metrics", (None, {}, [], {}))],
    *[("set_xfer_handshake_metadata_pp_aware", ({(0, 1): None},)), ("reset_cache", ())],
    *[("has_connector_metadata", ()), ("bind_connector_metadata", ("m",))],
    *[("has_connector_metadata", ()), ("_get_connector_metadata", ())],
    *[("clear_connector_metadata", ()), ("has_connector_metadata", ())],
]


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_a_connector_with_nothing_of_its_own_answers_as_on_vllms_base(role: Any) -> None:
    theirs_base = base_of_vllm().KVConnectorBase_V1
    transfer = KVTransferConfig(kv_connector="c", kv_role=role)
    ours, theirs = (bare(base, transfer) for base in (KVConnectorBase_V1, theirs_base))
    for name, arguments in ASKED:
        answers = [getattr(connector, name)(*arguments) for connector in (ours, theirs)]
        assert answers[0] == answers[1], name
    results = [dataclasses.asdict(c.get_transfer_results({"a"})) for c in (ours, theirs)]
    assert results[0] == results[1]
    for name in ("role", "requires_kv_delivery", "supports_divergent_local_hybrid_hits"):
        assert getattr(ours, name) == getattr(theirs, name), name
    asked = {name for name, _ in ASKED} | {"get_transfer_results"}
    callable_names = {n for n, m in members(theirs_base).items() if not isinstance(m, property)}
    left = callable_names - asked - set(theirs_base.__abstractmethods__) - IN_033
    assert left == {"_cache_hit_source"}


def test_what_the_base_refuses_vllms_refuses() -> None:
    for base in (KVConnectorBase_V1, base_of_vllm().KVConnectorBase_V1):
        with pytest.raises(ValueError, match="must be set"):
            bare(base, None)
        connector = bare(base, KVTransferConfig(kv_connector="c", kv_role="kv_both"))
        with pytest.raises(ValueError, match=r"pp_rank|PP"):
            connector.set_xfer_handshake_metadata_pp_aware({(1, 0): None})
        with pytest.raises((ValueError, AssertionError)):
            connector._get_connector_metadata()
        with pytest.raises(TypeError):
            base.get_required_kvcache_layout(None)
        with pytest.raises(TypeError, match="abstract"):
            base(SimpleNamespace(kv_transfer_config=1), KVConnectorRole.WORKER, None)


# Two of vLLM's connectors


@pytest.fixture
def exchanged(tmp_path: Path) -> Iterator[Callable[[str], ModuleType]]:
    """A module of vLLM's connectors whose base is ours; the rest of it is not touched."""
    made: dict[str, ModuleType] = {}

    def load(name: str) -> ModuleType:
        found = importlib.util.find_spec(f"{PLACE}.{name}")
        assert found is not None
        assert found.origin is not None
        source = Path(found.origin).read_text()
        for line in (f"from {PLACE}.base import", f"from {PLACE} import"):
            source = source.replace(line, "from connector.transfer.base_v1 import")
        assert f"from {PLACE}" not in source
        path = tmp_path / f"exchanged_{name}.py"
        if path.stem in made:
            return made[path.stem]
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = made[path.stem] = module
        spec.loader.exec_module(module)
        return module

    yield load
    for name in made:
        del sys.modules[name]


class Request(FakeRequest):
    """What these connectors read of a request beside what ours does."""

    mm_features: tuple[Any, ...] = ()

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.tokens

    all_token_ids = prompt_token_ids


class Engine:
    """An engine of ours with both sides of a connector, one KV cache group, [B, H, N, C]."""

    def __init__(self, scheduler: Any, worker: Any, seed: int) -> None:
        import torch

        self.scheduler, self.worker, self.steps = scheduler, worker, SchedulerSteps()
        self.ended: list[str] = []
        (group,) = kv_cache_config(BLOCKS).kv_cache_groups
        assert len(group.layer_names) == LAYERS
        generator = torch.Generator().manual_seed(seed)
        shape = (BLOCKS, HEADS, ENGINE_BLOCK, 2 * HEAD_SIZE)
        self.kv = {
            name: torch.randn(shape, generator=generator).bfloat16() for name in group.layer_names
        }
        self.worker.register_kv_caches(self.kv)

    def step(self, request: Request, tokens: int) -> None:
        tables = {request.request_id: TABLE}
        step = self.steps.next([(request, tokens)], tables.get, finished=self.ended)
        self.ended = []
        meta = self.scheduler.build_connector_meta(step)
        self.worker.bind_connector_metadata(meta)
        self.worker.handle_preemptions(meta)
        self.worker.start_load_kv(forward_context(self.kv))
        for name, layer in self.kv.items():
            self.worker.wait_for_layer_load(name)
            self.worker.save_kv_layer(name, layer, None)
        self.worker.wait_for_save()
        assert self.worker.get_transfer_results(set()).finished_recving == set()
        self.worker.clear_connector_metadata()

    def run(self, request: Request) -> tuple[int | None, bool]:
        """One prompt from the look-up to the end; what the connector offered for it."""
        self.scheduler.on_new_request(request)
        offered, between = self.scheduler.get_num_new_matched_tokens(request, 0)
        self.scheduler.update_state_after_alloc(request, EngineBlocks(TABLE), offered or 0)
        request.num_computed_tokens = offered or 0
        self.step(request, request.num_tokens - request.num_computed_tokens)
        assert request_finished(self.scheduler, request, (TABLE,)) == (False, None)
        self.ended.append(request.request_id)
        return offered, between

    def slots(self) -> Any:
        """The KV of the prompt in token order: layer, head, token, content."""
        import torch

        return torch.stack([kv[TABLE].transpose(0, 1).flatten(1, 2) for kv in self.kv.values()])


def engines(
    kind: Any, name: str, module: ModuleType | None, **extra: Any
) -> Callable[[int], Engine]:
    """Makes engines with vLLM's class, or by our factory with the exchanged one."""
    vllm_config = SimpleNamespace(
        cache_config=SimpleNamespace(block_size=ENGINE_BLOCK, cache_dtype="auto"),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
    )
    config = KVTransferConfig(
        kv_connector=name,
        kv_role="kv_both",
        kv_connector_module_path=module and module.__name__,
        kv_connector_extra_config=extra,
    )
    info = EngineInfo(vllm_config=vllm_config, kv_cache_config=kv_cache_config(BLOCKS))

    def make(seed: int) -> Engine:
        if module is not None:
            assert issubclass(getattr(module, name), KVConnectorBase_V1)
            create = KVConnectorFactory.create_connector
            sides = [create(config, role, info) for role in KVConnectorRole]
            return Engine(*sides, seed)
        theirs = base_of_vllm().KVConnectorRole
        of_vllm = [
            kind(config_of_it, role, groups)
            for role in theirs
            for config_of_it, groups in [(info.config_with(config), info.kv_cache_config)]
        ]
        return Engine(*of_vllm, seed)

    return make


def both(kind: Any, exchanged: Callable[[str], ModuleType], **extra: Any) -> list[Any]:
    module = exchanged(kind.__module__.rpartition(".")[2])
    return [engines(kind, kind.__name__, of, **extra) for of in (None, module)]


def test_vllms_example_connector_saves_and_loads_on_our_base(
    exchanged: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    import safetensors.torch  # noqa: F401  # the connector's module expects somebody to have
    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector

    prompt = list(range(TOKENS))
    seen = []
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        make = both(ExampleConnector, exchanged, shared_storage_path=str(folder))[number]
        saver, loader, stranger = make(1), make(2), make(3)
        answers = [saver.run(Request("s", prompt)), loader.run(Request("l", prompt))]
        answers.append(stranger.run(Request("x", [7, *prompt[1:]])))
        loaded = answers[1][0]
        assert answers == [(0, False), (4 * ENGINE_BLOCK, False), (0, False)]
        assert torch.equal(loader.slots()[:, :, :loaded], saver.slots()[:, :, :loaded])
        assert not torch.equal(loader.slots()[:, :, loaded:], saver.slots()[:, :, loaded:])
        files = sorted(path.relative_to(folder) for path in folder.rglob("*.safetensors"))
        assert len(files) == 2 * LAYERS
        seen.append((answers, files, loader.slots()))
    assert seen[0][:2] == seen[1][:2]
    assert torch.equal(seen[0][2], seen[1][2])


def test_vllms_decode_bench_connector_fills_the_same_blocks_on_our_base(
    exchanged: Callable[[str], ModuleType],
) -> None:
    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1.decode_bench_connector import (
        DecodeBenchConnector,
    )

    seen = []
    for make in both(DecodeBenchConnector, exchanged, fill_mean=0.5):
        engine = make(1)
        before = engine.slots()
        answer = engine.run(Request("r", list(range(TOKENS))))
        assert answer == (TOKENS - 1, False)
        assert bool((engine.slots() == 0.5).all())
        assert not bool((before == 0.5).all())
        untouched = [block for block in range(BLOCKS) if block not in TABLE]
        seen.append([kv[untouched] for kv in engine.kv.values()])
        # It fills once a request: what has finished may come again.
        assert engine.run(Request("r", list(range(TOKENS)))) == answer
    assert all(torch.equal(*of) for of in zip(*seen, strict=True))


def test_the_stand_ins_have_names_of_vllms_objects() -> None:
    """A name that vLLM does not have would be read by nobody."""
    from vllm.v1.core.sched import output

    steps, request = SchedulerSteps(), Request("r", list(range(TOKENS)))
    said = [steps.next([(request, 3)], {"r": TABLE}.get) for _ in range(2)]
    new, cached = said[0].scheduled_new_reqs[0], said[1].scheduled_cached_reqs
    state = said[0].kv_connector_block_state
    for ours, theirs in (
        (vars(said[0]).keys() - {"scheduled"}, output.SchedulerOutput),
        (vars(new), output.NewRequestData),
        (vars(cached), output.CachedRequestData),
        (vars(state), output.KVConnectorBlockState),
    ):
        assert set(ours) <= {*vars(theirs), *(f.name for f in dataclasses.fields(theirs))}, theirs
