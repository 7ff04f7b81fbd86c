"""State-space layers (Mamba and its kin) under vLLM's own scheduler and cache manager."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_model_checks import check_under_pressure, evict_some
from vllm_model_config import ENGINE_BLOCK, kv_cache_config, vllm_config
from vllm_model_engine import (
    STATE_BYTES,
    MakeEngine,
    ModelEngine,
    digests,
    expected_output,
    prompt,
)

from connector.layout.block_hashes import extend
from connector.messages import LoadBlock, SaveBlock, StateBlock
from kvstore import UsageError
from kvstore.testing.blockstore import MemoryBlockStore

pytestmark = pytest.mark.vllm
BLOCK = ENGINE_BLOCK


@pytest.fixture
def make(make: MakeEngine) -> MakeEngine:
    return partial(make, recurrent=True, block_tokens=BLOCK)


def layout_of(engine: ModelEngine) -> Any:
    return engine.scheduler.connector._s._layout


def state_slots(engine: ModelEngine, store: MemoryBlockStore) -> list[Any]:
    namespace = layout_of(engine).groups[1].namespaces[0]
    return [slot for slot in store.slots() if slot.namespace_id == namespace.id]


def loads(engine: ModelEngine, group: int) -> list[LoadBlock]:
    jobs = [job for metadata in engine.metadata for job in metadata.plan.loads]
    return [block for job in jobs for block in job.blocks if block.group == group]


def saves(engine: ModelEngine, group: int) -> list[SaveBlock]:
    jobs = [job for metadata in engine.metadata for job in metadata.plan.saves]
    return [block for job in jobs for block in job.blocks if block.group == group]


def ids(blocks: Iterable[LoadBlock | SaveBlock]) -> list[int]:
    return [block_id for block in blocks for block_id in block.block_ids]


def run(engine: ModelEngine, tokens: list[int], name: str = "a", count: int = 4) -> None:
    engine.serve(name, tokens, max_tokens=count)
    assert engine.outputs[name] == expected_output(tokens, count, recurrent=True)


class TestSharing:
    @pytest.mark.covers("state-space layers, mode align", "model")
    def test_what_one_engine_computed_another_loads(self, make: MakeEngine) -> None:
        producer, consumer = make(), make()
        tokens = prompt(6 * BLOCK + 5)
        for engine in (producer, consumer):
            run(engine, tokens)
        assert producer.loaded_tokens == 0
        assert consumer.loaded_tokens == 6 * BLOCK
        assert consumer.computed_tokens == 5 + 3
        assert len(ids(loads(consumer, 1))) == 1, "the state at the end of the prefix only"

    def test_negative_control_a_wrong_byte_in_a_state_changes_the_output(
        self, make: MakeEngine, store: MemoryBlockStore
    ) -> None:
        producer, consumer = make(), make()
        tokens = prompt(2 * BLOCK + 5)
        run(producer, tokens)
        slots = state_slots(producer, store)
        assert {len(slot.payload) for slot in slots} == {2 * STATE_BYTES}
        for slot in slots:
            slot.payload[-1] ^= 1
        consumer.serve("a", tokens)
        assert consumer.loaded_tokens == 2 * BLOCK
        assert consumer.outputs["a"] != expected_output(tokens, 4, recurrent=True)

    def test_trap_a_whole_prompt_hit_needs_the_state_before_its_last_token(
        self, make: MakeEngine
    ) -> None:
        """vLLM computes the last token again: from the state after it, it would count twice."""
        producer, consumer = make(), make()
        tokens = prompt(4 * BLOCK)
        for engine in (producer, consumer):
            run(engine, tokens)
        assert consumer.loaded_tokens == 3 * BLOCK

    def test_a_longer_prompt_goes_on_from_the_state_of_a_shorter_one(
        self, make: MakeEngine
    ) -> None:
        producer, consumer = make(), make()
        tokens = prompt(7 * BLOCK + 5)
        run(producer, tokens[: 3 * BLOCK + 9])
        run(consumer, tokens)
        assert consumer.loaded_tokens == 3 * BLOCK

    def test_generated_tokens_are_shared_too(self, make: MakeEngine) -> None:
        producer, consumer = make(), make()
        tokens = prompt(BLOCK + 3)
        run(producer, tokens, count=2 * BLOCK)
        run(consumer, tokens + producer.outputs["a"], "b")
        assert consumer.loaded_tokens == 3 * BLOCK

    def test_of_a_store_block_of_several_engine_blocks_the_last_state_is_kept(
        self, make: MakeEngine
    ) -> None:
        tokens = prompt(5 * 32 + 5)
        producer = make(block_tokens=32, block_size=8, max_batched_tokens=50)
        consumer = make(block_tokens=32, block_size=8)
        for engine in (producer, consumer):
            run(engine, tokens)
        assert consumer.loaded_tokens == 5 * 32

    def test_trap_by_default_no_state_falls_within_a_block(self, make: MakeEngine) -> None:
        """vLLM keeps states at ends of its own blocks, and of a prompt's blocks the last one's."""
        producer, consumer = make(block_tokens=None), make(block_tokens=None)
        tokens = prompt(5 * ENGINE_BLOCK + 3)
        for engine in (producer, consumer):
            run(engine, tokens)
        assert consumer.loaded_tokens == 5 * ENGINE_BLOCK


class TestWhatIsSaved:
    def test_trap_only_states_at_ends_of_steps_exist(self, make: MakeEngine) -> None:
        """Steps of 80 tokens, and one that ends with the prompt's last full block."""
        engine = make(max_batched_tokens=80)
        tokens = prompt(12 * BLOCK + 5)
        run(engine, tokens)
        assert len(saves(engine, 1)) == 3, "after 80, 160 and 192 tokens"
        assert len(saves(engine, 0)) == 12

    @pytest.mark.parametrize("most", [0, 3 * BLOCK])
    def test_no_state_is_saved_beyond_what_its_request_allows(
        self, make: MakeEngine, most: int
    ) -> None:
        engine = make(max_batched_tokens=BLOCK)
        engine.serve("a", prompt(6 * BLOCK + 5), params={"max_save_tokens": most})
        assert [len(saves(engine, group)) for group in (0, 1)] == [most // BLOCK] * 2

    def test_trap_no_state_is_saved_while_it_still_changes(
        self, make: MakeEngine, store: MemoryBlockStore
    ) -> None:
        """Every state in the store is that of its key, whatever steps came after it."""
        engine = make(max_batched_tokens=48, blocks=512)
        names = {}
        for i in range(6):
            tokens = prompt(random.Random(i).randrange(20, 6 * BLOCK), seed=i)
            engine.add(f"r{i}", tokens, max_tokens=BLOCK + 5)
            names[f"r{i}"] = tokens
        engine.run()
        layout = layout_of(engine)
        checked = [check_states(store, layout, t + engine.outputs[n]) for n, t in names.items()]
        assert min(checked) > 0
        assert sum(checked) > 2 * len(names)

    def test_trap_blocks_are_held_while_their_states_are_read(
        self, make: MakeEngine, store: MemoryBlockStore
    ) -> None:
        import threading

        gate = threading.Event()
        store.on_reserve = lambda: gate.wait(10) and None
        engine = make()
        engine.add("a", prompt(2 * BLOCK + 5), max_tokens=1)
        for _ in range(10_000):  # until its lookup has an answer it is in no step
            engine.step()
            if engine.outputs["a"] and saves(engine, 1):
                break
        pool = engine.scheduler.kv_cache_manager.block_pool
        held = ids(saves(engine, 1))
        assert held
        assert [pool.blocks[i].ref_cnt for i in held] == [1] * len(held), "the request is done"
        gate.set()
        engine.run()
        assert engine.free_blocks == 127

    def test_trap_no_null_block_is_ever_loaded_or_saved(self, make: MakeEngine) -> None:
        producer, consumer = (make(max_batched_tokens=48) for _ in range(2))
        tokens = prompt(6 * BLOCK + 5)
        for engine in (producer, consumer):
            run(engine, tokens)
            blocks = [b for group in (0, 1) for b in (*loads(engine, group), *saves(engine, group))]
            assert blocks
            assert 0 not in ids(blocks)

    def test_trap_states_after_drafts_are_not_final_in_their_step(self) -> None:
        from connector.adapters.vllm.groups.states import completed_states

        offered = {"a": [(1, 7, 2 * BLOCK), (1, 8, 3 * BLOCK)], "b": [(1, 9, BLOCK)]}
        block_state = SimpleNamespace(boundary_state_offloads=offered)
        request = SimpleNamespace(request_id="a", num_prompt_tokens=2 * BLOCK + 3)
        everything = [StateBlock(1, 7, 2 * BLOCK), StateBlock(1, 8, 3 * BLOCK)]
        assert completed_states(block_state, request, (0, 1, 2), speculative=False) == everything
        assert completed_states(block_state, request, (0, 1, 2), speculative=True) == everything[:1]
        assert completed_states(None, request, (0, 1, 2), speculative=False) == ()

    def test_trap_a_group_is_counted_among_those_that_are_stored(self) -> None:
        from connector.adapters.vllm.groups.states import completed_states

        offered = SimpleNamespace(boundary_state_offloads={"a": [(3, 7, BLOCK), (1, 8, BLOCK)]})
        request = SimpleNamespace(request_id="a", num_prompt_tokens=2 * BLOCK)
        assert completed_states(offered, request, (0, 3), speculative=False) == [
            StateBlock(1, 7, BLOCK)
        ]


def check_states(store: MemoryBlockStore, layout: Any, tokens: list[int]) -> int:
    """Compare all stored states of a request's prefixes with what they must be; how many."""
    hashes = extend([], tokens, BLOCK, lambda *_: None)
    keys = layout.groups[1].namespaces[0].engine_keys(hashes)
    there = {slot.key: slot for slot in store.slots()}
    truth = digests(tokens, 1)
    for i, key in enumerate(keys):
        if key in there:
            assert bytes(there[key].payload) == truth[(i + 1) * BLOCK - 1]
    return sum(key in there for key in keys)


class TestFailures:
    def test_trap_a_lost_state_is_told_by_request_and_computed(
        self, make: MakeEngine, store: MemoryBlockStore
    ) -> None:
        producer, consumer = make(), make()
        tokens = prompt(4 * BLOCK + 5)
        run(producer, tokens)
        for slot in state_slots(producer, store):
            store.evict(slot.key, forget=False)
        consumer.add("a", tokens)
        consumer.run(steps_max=200)
        assert consumer.outputs["a"] == expected_output(tokens, 4, recurrent=True)
        assert consumer.free_blocks == 127

    def test_without_states_nothing_is_offered(
        self, make: MakeEngine, store: MemoryBlockStore
    ) -> None:
        producer, consumer = make(), make()
        tokens = prompt(4 * BLOCK + 5)
        run(producer, tokens)
        for slot in state_slots(producer, store):
            store.evict(slot.key)
        run(consumer, tokens)
        assert consumer.loaded_tokens == 0

    @pytest.mark.parametrize("seed", range(4))
    def test_many_engines_under_pressure_never_give_a_wrong_token(
        self, make: MakeEngine, store: MemoryBlockStore, seed: int
    ) -> None:
        """Shared prefixes, preemption, eviction and aborts."""
        rng = random.Random(seed)
        store.capacity_blocks = 24
        engines = [make(blocks=36, max_batched_tokens=50) for _ in range(2)]
        check_under_pressure(engines, rng, between=lambda: evict_some(store, rng), recurrent=True)


class TestLayerByLayer:
    @pytest.mark.parametrize("role", ["kv_both", "kv_producer"])
    def test_trap_states_are_refused_by_the_name_of_the_setting(
        self, make: MakeEngine, role: str
    ) -> None:
        """vLLM tells connectors when an attention layer has run, and of no other one."""
        with pytest.raises(UsageError, match="layerwise") as refused:
            make(role=role, layerwise=True)
        assert "state-space" in str(refused.value)


class TestShape:
    def found(self, model: Path, mode: str = "align", tp_size: int = 1, **changes: Any) -> Any:
        from connector.adapters.vllm.shape import engine_shape
        from connector.settings import ConnectorSettings

        groups = kv_cache_config(8, mamba_cache_mode="align")
        group = groups.kv_cache_groups[1]
        spec = dataclasses.replace(group.kv_cache_spec, mamba_cache_mode=mode, **changes)
        object.__setattr__(group, "kv_cache_spec", spec)
        config = vllm_config(model, blocks=8, mamba_cache_mode="align")
        config.parallel_config.tensor_parallel_size = tp_size
        return engine_shape(config, groups, ConnectorSettings(block_tokens=BLOCK))

    def layout(self, model: Path, **changes: Any) -> Any:
        from connector.settings import ConnectorSettings

        return self.found(model, **changes).layout(ConnectorSettings(block_tokens=BLOCK))

    @pytest.mark.covers("state-space layers, any other mode", "refused")
    def test_trap_states_that_are_not_kept_are_refused_by_the_name_of_the_setting(
        self, model: Path
    ) -> None:
        with pytest.raises(UsageError, match="--mamba-cache-mode align") as refused:
            self.found(model, "none")
        assert "mamba_cache_mode='none'" in str(refused.value)

    def test_a_state_is_all_of_a_layers_bytes_without_padding(self, model: Path) -> None:
        _, group = self.found(model).groups
        assert dataclasses.asdict(group.geometry) == {
            "layers": 2,
            "heads": 1,
            "channel_bytes": STATE_BYTES,
            "engine_block_tokens": ENGINE_BLOCK,
            "recurrent": True,
            "runs": (),
            "tokens_per_slot": 1,
            "folded_heads": 1,
        }

    def test_trap_what_shapes_a_state_is_in_the_namespace(
        self, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import torch
        from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

        from connector.adapters.vllm.groups import states

        def name(**changes: Any) -> object:
            return self.layout(model, **changes).groups[1].namespaces[0]

        base = name()
        assert name() == base
        assert name(shapes=((4, 2), (2, 2))) != base, "as many bytes"
        assert name(dtypes=(torch.float16, torch.float32)) != base
        assert name(mamba_type=MambaAttentionBackendEnum.GDN_ATTN) != base
        monkeypatch.setattr(states, "is_conv_state_dim_first", lambda: True)
        assert name() != base

    def test_trap_engines_of_other_tensor_parallel_sizes_share_no_states(self, model: Path) -> None:
        from connector.settings import ConnectorSettings

        layouts = {
            tp_size: self.found(model, tp_size=tp_size).layout(
                ConnectorSettings(block_tokens=BLOCK, tp_sizes=[1, 2])
            )
            for tp_size in (1, 2)
        }
        groups = {tp_size: layout.groups[1] for tp_size, layout in layouts.items()}
        assert [len(group.splits) for group in groups.values()] == [1, 1]
        assert len(groups[2].namespaces) == 2
        assert not set(groups[1].namespaces) & set(groups[2].namespaces)

    def test_replicated_states_have_one_shard(self, model: Path) -> None:
        layout = self.layout(model, tp_size=2, tp_replicated=True)
        assert len(layout.groups[1].namespaces) == 1
