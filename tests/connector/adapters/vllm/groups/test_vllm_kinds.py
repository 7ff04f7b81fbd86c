"""What becomes of each kind of vLLM's KV cache groups: stored, left out, or refused at start.

Longer than other files: the kinds are enumerated first, and each class below is the verdict on
some of them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm_model_checks import (
    check_answers,
    check_under_pressure,
    evict_some,
    evict_unnoticed,
    spoil_last_block,
)
from vllm_model_config import BLOCK, ENGINE_BLOCK, kv_cache_config, vllm_config
from vllm_model_engine import MakeEngine, ModelEngine, expected_output, prompt

from connector.build import EngineShape
from connector.copiers.base import Gather, Scatter
from connector.copiers.registered import kv_memory
from connector.layout.geometry import KVGeometry, LayerRun
from connector.settings import ConnectorSettings
from kvstore import UsageError
from kvstore.testing.blockstore import MemoryBlockStore

pytestmark = pytest.mark.vllm
CHUNK = 3 * BLOCK
WINDOW = 40
HEADS = {"num_kv_heads": 2, "head_size": 4, "dtype": torch.bfloat16}


@pytest.fixture(scope="module")
def config(model: Path) -> Any:
    return vllm_config(model, blocks=8)


def shape_of(config: Any, *specs: Any, **group: Any) -> EngineShape:
    """Of an engine with full attention and these groups; `group` are fields of the last one."""
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec

    from connector.adapters.vllm.shape import engine_shape

    found = kv_cache_config(8)
    for spec in specs:
        found.kv_cache_groups.append(KVCacheGroupSpec(["other"], spec))
    for name, value in group.items():
        setattr(found.kv_cache_groups[-1], name, value)
    return engine_shape(config, found, ConnectorSettings())


def kinds_of_vllm() -> Iterator[type]:
    """Every class of specs that a layer may have, registered by vLLM or only defined there."""
    import inspect

    from vllm.v1 import kv_cache_interface
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
    from vllm.v1.kv_cache_spec_registry import _REGISTRY_KVCACHESPEC_LIST

    register_all_kvcache_specs(None)
    base = kv_cache_interface.KVCacheSpec
    yield from _REGISTRY_KVCACHESPEC_LIST
    for kind in vars(kv_cache_interface).values():
        if inspect.isclass(kind) and issubclass(kind, base):
            yield kind


@pytest.mark.parametrize("of_vllm", [0, None, 64])
def test_how_far_apart_vllm_keeps_windows_is_in_the_shape(
    config: Any, of_vllm: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config.cache_config, "prefix_cache_retention_interval", of_vllm)
    assert shape_of(config).window_interval_tokens == of_vllm


class TestEnumerated:
    def test_every_kind_that_this_vllm_has_is_decided_on(self) -> None:
        from connector.adapters.vllm.groups.kinds import KINDS

        none_of_a_layer = {"KVCacheSpec", "AttentionSpec", "UniformTypeKVCacheSpecs"}
        kinds = {kind.__name__ for kind in kinds_of_vllm()}
        assert none_of_a_layer < kinds
        assert kinds - none_of_a_layer - set(KINDS) == set(), "new ones: decide what they mean"

    def test_trap_a_kind_of_somebody_elses_is_refused_whatever_it_derives_from(
        self, config: Any
    ) -> None:
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        class NewAttentionSpec(FullAttentionSpec):
            pass

        spec = NewAttentionSpec(block_size=ENGINE_BLOCK, **HEADS)
        with pytest.raises(UsageError, match=r"NewAttentionSpec in group 1.*does not know"):
            shape_of(config, spec)


class TestLeftOut:
    """By what vLLM says of a group; hits of its own cache do without it too."""

    @pytest.fixture(autouse=True)
    def _token_by_token(self, token_by_token: None) -> None: ...

    @pytest.mark.covers("ring buffers (GLM-5.3, DeepSeek-V4.1)", "left out")
    def test_a_ring_buffer(self, config: Any) -> None:
        from vllm.v1.kv_cache_interface import CircularBufferSpec

        found = shape_of(config, CircularBufferSpec(block_size=4, **HEADS))
        assert [group.number for group in found.groups] == [0]
        assert found.engine_groups == 2
        (which,) = found.left_out
        assert which.startswith("group 1 (CircularBufferSpec): ")

    @pytest.mark.covers("copies of another group (enable_kv_transfer off)", "left out")
    def test_a_replica_that_vllm_makes_anew(self, config: Any) -> None:
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        spec = FullAttentionSpec(block_size=ENGINE_BLOCK, **HEADS)
        found = shape_of(config, spec, enable_kv_transfer=False)
        assert [group.number for group in found.groups] == [0]
        assert "enable_kv_transfer" in found.left_out[0]

    @pytest.mark.covers("windows that are replayed (DeepSeek-V4.1)", "left out")
    def test_a_window_that_vllm_replays(self, config: Any) -> None:
        from vllm.v1.kv_cache_interface import SlidingWindowMLASpec

        shape = {"block_size": ENGINE_BLOCK, "num_kv_heads": 1, "head_size": 4}
        spec = SlidingWindowMLASpec(
            sliding_window=32, bounded_replay=True, dtype=torch.bfloat16, **shape
        )
        found = shape_of(config, spec)
        assert [group.number for group in found.groups] == [0]
        assert "prefix_cacheable" in found.left_out[0]

    def test_loads_end_where_blocks_of_those_left_out_end_too(self, config: Any) -> None:
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        spec = FullAttentionSpec(block_size=3 * ENGINE_BLOCK, **HEADS)
        found = shape_of(config, spec, enable_kv_transfer=False)
        layout = found.layout(ConnectorSettings())
        assert layout.block_tokens % (3 * ENGINE_BLOCK) == 0
        assert layout.engine_block_tokens == 3 * ENGINE_BLOCK
        with pytest.raises(UsageError, match="multiple of the engine's block size 48"):
            found.layout(ConnectorSettings(block_tokens=32))

    @pytest.mark.parametrize("window", [None, WINDOW])
    def test_what_is_stored_beside_it_is_shared(self, make: MakeEngine, window: int | None) -> None:
        tokens = prompt(6 * BLOCK + 5)
        producer, consumer = (make(window=window, ring=True) for _ in range(2))
        check_answers([producer, consumer], tokens, window=window)
        assert consumer.loaded_tokens == 6 * BLOCK

    def test_trap_a_lost_block_is_told_by_request(
        self, make: MakeEngine, store: MemoryBlockStore
    ) -> None:
        """One group is stored, but block ids of the engine's two are not told apart."""
        tokens = prompt(4 * BLOCK + 5)
        producer = make(ring=True)
        producer.serve("a", tokens)
        evict_unnoticed(store)
        check_answers([make(ring=True)], tokens, steps_max=200)

    def test_events_name_the_engines_own_groups(self, make: MakeEngine) -> None:
        engine = make(window=WINDOW, ring=True, events=True)
        engine.serve("a", prompt(2 * BLOCK + 5))
        ours = [one for one in engine.events if getattr(one, "medium", None) == "CPU"]
        assert {one.group_idx for one in ours} == {0, 2}

    @pytest.mark.parametrize("seed", range(2))
    def test_under_pressure_no_token_is_wrong(
        self, make: MakeEngine, store: MemoryBlockStore, seed: int
    ) -> None:
        rng = random.Random(seed)
        store.capacity_blocks = 24
        shape = {"window": WINDOW, "ring": True, "blocks": 60, "max_batched_tokens": 50}
        engines = [make(**shape), make(**shape)]
        check_under_pressure(
            engines, rng, requests=16, between=lambda: evict_some(store, rng), window=WINDOW
        )


class TestChunks:
    """Attention within chunks of tokens, as in Llama 4: a chunk needs nothing before it."""

    @pytest.fixture(autouse=True)
    def _token_by_token(self, token_by_token: None) -> None: ...

    @pytest.mark.covers("attention in chunks (Llama 4)", "model")
    @pytest.mark.parametrize("blocks", [1, 2, 3, 4, 6])
    def test_what_one_engine_computed_another_loads(self, make: MakeEngine, blocks: int) -> None:
        """Ends within a chunk and on its boundary; before the last chunk nothing is loaded."""
        tokens = prompt(blocks * BLOCK + 5)
        producer, consumer = make(chunk=CHUNK), make(chunk=CHUNK)
        check_answers([producer, consumer], tokens, chunk=CHUNK)
        assert consumer.loaded_tokens == blocks * BLOCK
        of_chunks = [
            block
            for meta in consumer.metadata
            for job in meta.plan.loads
            for block in job.blocks
            if block.group == 1
        ]
        assert len(of_chunks) == blocks % 3

    def test_trap_a_whole_prompt_that_ends_a_chunk_leaves_the_chunk_to_its_last_token(
        self, make: MakeEngine
    ) -> None:
        tokens = prompt(CHUNK)
        producer, consumer = make(chunk=CHUNK), make(chunk=CHUNK)
        check_answers([producer, consumer], tokens, chunk=CHUNK)
        assert consumer.loaded_tokens == CHUNK - BLOCK

    def test_negative_control_a_wrong_byte_in_the_chunk_changes_the_output(
        self, make: MakeEngine, store: MemoryBlockStore
    ) -> None:
        tokens = prompt(2 * BLOCK + 5)
        producer = make(chunk=CHUNK)
        producer.serve("a", tokens)
        spoil_last_block(producer, store, group=1)
        consumer = make(chunk=CHUNK)
        consumer.serve("a", tokens)
        assert consumer.loaded_tokens == 2 * BLOCK
        assert consumer.outputs["a"] != expected_output(tokens, 4, chunk=CHUNK)

    @pytest.mark.parametrize("seed", range(3))
    def test_under_pressure_no_token_is_wrong(
        self, make: MakeEngine, store: MemoryBlockStore, seed: int
    ) -> None:
        rng = random.Random(seed)
        store.capacity_blocks = 24
        shape = {"chunk": CHUNK, "max_batched_tokens": 50}
        engines: list[ModelEngine] = [make(blocks=44, **shape), make(blocks=60, **shape)]
        check_under_pressure(
            engines, rng, requests=16, between=lambda: evict_some(store, rng), chunk=CHUNK
        )


class TestSeveralTokensAState:
    """As DeepSeek-V4's compressed latents, or Whisper's, which has several states a token."""

    @pytest.mark.parametrize("per_state", [4, Fraction(1, 2)])
    def test_it_is_stored_by_states(self, config: Any, per_state: Fraction) -> None:
        from vllm.v1.kv_cache_interface import MLAAttentionSpec

        shape = {"block_size": ENGINE_BLOCK, "num_kv_heads": 1, "head_size": 8}
        spec = MLAAttentionSpec(tokens_per_state=per_state, dtype=torch.uint8, **shape)
        found = shape_of(config, spec)
        geometry = found.groups[1].geometry
        assert geometry.payload_bytes(2 * ENGINE_BLOCK) == 8 * 2 * spec.num_states
        plain = shape_of(config, MLAAttentionSpec(dtype=torch.uint8, **shape))
        namespaces = [
            one.layout(ConnectorSettings()).groups[1].namespaces for one in (found, plain)
        ]
        assert namespaces[0] != namespaces[1]

    @pytest.mark.covers("several tokens a state (DeepSeek-V4)", "model")
    @pytest.mark.parametrize("other", [None, Fraction(1), Fraction(16)])
    def test_every_byte_goes_where_it_came_from(self, other: Fraction | None) -> None:
        """Beside layers with a state for each token, or for other numbers of tokens."""
        rng, per = np.random.default_rng(0), Fraction(4)
        kinds = [(per, 12)] if other is None else [(other, 20), (per, 12)]
        runs = tuple(LayerRun((i,), 1, size, slot) for i, (slot, size) in enumerate(kinds))
        geometry = KVGeometry(
            layers=len(kinds),
            heads=1,
            channel_bytes=kinds[0][1],
            engine_block_tokens=16,
            tokens_per_slot=kinds[0][0],
            runs=runs if len(runs) > 1 else (),
        )
        pages = [(6, 1, int(16 / slot), size) for slot, size in kinds]
        layers = {
            str(i): torch.from_numpy(rng.integers(0, 256, page, np.uint8))
            for i, page in enumerate(pages)
        }
        before = [layer.clone() for layer in layers.values()]
        (copier,) = kv_memory([(layers, geometry)], 32).groups
        payload = memoryview(bytearray(geometry.payload_bytes(32)))
        copier.gather_many([Gather([4, 1], payload)])
        assert len(payload) == sum(2 * int(16 / slot) * size for slot, size in kinds)
        copier.scatter_many([Scatter(payload, 1, [3])])
        for was, layer in zip(before, layers.values(), strict=True):
            assert torch.equal(layer[3], was[1])
            was[3] = was[1]
            assert torch.equal(layer, was), "and nothing else"

    def test_a_block_that_ends_within_a_state_is_refused(self) -> None:
        with pytest.raises(UsageError, match="tokens_per_slot"):
            KVGeometry(
                layers=1,
                heads=1,
                channel_bytes=8,
                engine_block_tokens=16,
                tokens_per_slot=Fraction(3),
            )


class TestPromptsOnly:
    """Reference windows (R-SWA): what was generated sees less than the same tokens of a prompt."""

    @pytest.mark.covers("reference windows (R-SWA)", "model")
    def test_what_was_generated_has_no_hash(self, config: Any) -> None:
        from vllm.v1.kv_cache_interface import RSWASpec

        from connector.adapters.vllm.request import HashedRequest

        found = shape_of(config, RSWASpec(block_size=ENGINE_BLOCK, rswa_window=32, **HEADS))
        assert found.prompts_only
        assert not shape_of(config).prompts_only
        request = SimpleNamespace(
            request_id="r",
            num_tokens=4 * BLOCK,
            num_prompt_tokens=2 * BLOCK + 3,
            all_token_ids=list(range(4 * BLOCK)),
            mm_features=[],
            lora_request=None,
            cache_salt=None,
            prompt_embeds=None,
            block_hashes=[b"%d" % i for i in range(8)],
        )
        plain = HashedRequest(request, BLOCK, ENGINE_BLOCK)
        limited = HashedRequest(request, BLOCK, ENGINE_BLOCK, prompts_only=True)
        assert len(plain.block_hashes) == 4
        assert list(limited.block_hashes) == list(plain.block_hashes[:2])


class TestRefused:
    """A model of which nothing can be shared, in the scheduler's process, by name."""

    @pytest.mark.covers("cross attention (encoder-decoder)", "refused")
    def test_cross_attention(self, config: Any) -> None:
        from vllm.v1.kv_cache_interface import CrossAttentionSpec

        with pytest.raises(UsageError, match=r"CrossAttentionSpec in group 1.*encoder"):
            shape_of(config, CrossAttentionSpec(block_size=ENGINE_BLOCK, **HEADS))

    def test_a_group_in_host_memory_with_a_pool_of_its_own(self, config: Any) -> None:
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        spec = FullAttentionSpec(block_size=ENGINE_BLOCK, **HEADS)
        with pytest.raises(UsageError, match="pool"):
            shape_of(config, spec, host_resident=True)

    def test_a_model_of_which_every_group_is_left_out(self, config: Any) -> None:
        from vllm.v1.kv_cache_interface import CircularBufferSpec, KVCacheConfig, KVCacheGroupSpec

        from connector.adapters.vllm.shape import engine_shape

        spec = CircularBufferSpec(block_size=4, **HEADS)
        groups = KVCacheConfig(8, [], [KVCacheGroupSpec(["ring"], spec)])
        with pytest.raises(UsageError, match=r"CircularBufferSpec.*at least one"):
            engine_shape(config, groups, ConnectorSettings())

    @pytest.mark.covers("pooling over all tokens (MEAN, CLS)", "refused")
    @pytest.mark.parametrize(
        ("model", "named"),
        [
            ({"is_encoder_decoder": True}, "is_encoder_decoder"),
            (
                {
                    "is_encoder_decoder": False,
                    "pooler_config": SimpleNamespace(seq_pooling_type="MEAN"),
                    "attn_type": "decoder",
                    "is_prefix_caching_supported": False,
                },
                "pooler_config.*MEAN",
            ),
        ],
    )
    def test_a_model_that_cannot_begin_behind_a_prefix(
        self, model: dict[str, Any], named: str
    ) -> None:
        from connector.adapters.vllm.groups.kinds import check_model

        with pytest.raises(UsageError, match=named):
            check_model(SimpleNamespace(**model))


class TestDrafts:
    """Tokens that are only guessed change no KV, but a model that guesses has some of its own."""

    @staticmethod
    def shape(model: Path, method: str) -> EngineShape:
        config = vllm_config(model, blocks=8)
        drafts = method in ("eagle", "mtp")
        config.speculative_config = SimpleNamespace(
            method=method,
            draft_model_config=config.model_config,
            use_eagle=lambda: drafts,
            use_multi_module_mtp=lambda: method == "mtp",
            num_speculative_tokens=3,
            max_num_new_slots_for_drafting=0,
        )
        return shape_of(config)

    @pytest.mark.covers("suffix drafts", "model")
    @pytest.mark.covers("n-gram drafts", "model")
    @pytest.mark.parametrize("method", ["ngram", "ngram_gpu", "suffix", "medusa"])
    def test_an_engine_that_guesses_shares_with_one_that_does_not(
        self, model: Path, method: str
    ) -> None:
        alone = shape_of(vllm_config(model, blocks=8))
        guessing = self.shape(model, method)
        assert guessing.model == alone.model
        assert guessing.volatile_tokens == 0

    @pytest.mark.covers("draft models (EAGLE, MTP)", "model")
    @pytest.mark.parametrize(("method", "volatile"), [("eagle", 1), ("mtp", 3)])
    def test_a_draft_model_counts_and_costs_the_tokens_that_it_reads_ahead(
        self, model: Path, method: str, volatile: int
    ) -> None:
        found = self.shape(model, method)
        assert found.model["draft"] == method
        assert found.volatile_tokens == volatile

    def test_every_method_that_this_vllm_has_is_decided_on(self) -> None:
        from typing import get_args

        from vllm.config import speculative

        from connector.adapters.vllm.identity import DRAFTS_WITHOUT_KV

        def names(kind: Any) -> set[str]:
            found = get_args(kind)
            return {kind} if not found else set().union(*(names(one) for one in found))

        with_kv = {"eagle", "eagle3", "extract_hidden_states", "mtp", "dflash", "dspark"}
        with_kv |= {"draft_model", "custom_class"} | names(speculative.MTPModelTypes)
        assert names(speculative.SpeculativeMethod) - with_kv <= set(DRAFTS_WITHOUT_KV)
