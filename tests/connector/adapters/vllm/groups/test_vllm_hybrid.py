"""Several KV cache groups and other block sizes under vLLM's own scheduler."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from vllm_model_checks import (
    check_answers,
    check_under_pressure,
    evict_some,
    evict_unnoticed,
    spoil_last_block,
)
from vllm_model_config import BLOCK
from vllm_model_engine import MakeEngine, expected_output, prompt

from kvstore.testing.blockstore import MemoryBlockStore

pytestmark = pytest.mark.vllm
WINDOW = 40


@pytest.mark.usefixtures("token_by_token")
@pytest.mark.parametrize(("writer", "reader"), [(16, 32), (32, 16), (8, 32), (32, 8)])
@pytest.mark.covers("engines of other block sizes", "model")
def test_trap_engines_with_other_block_sizes_share_blocks(
    make: MakeEngine, writer: int, reader: int
) -> None:
    producer, consumer = make(block_size=writer), make(block_size=reader)
    tokens = prompt(4 * BLOCK + 5)
    check_answers([producer, consumer], tokens)
    assert consumer.loaded_tokens == 4 * BLOCK


def test_trap_blocks_that_are_not_laid_out_by_token_stay_with_their_block_size(
    make: MakeEngine,
) -> None:
    """As on CPU, where a block holds all of K, then all of V."""
    producer, consumer = make(block_size=16), make(block_size=32)
    tokens = prompt(4 * BLOCK + 5)
    check_answers([producer, consumer], tokens)
    assert consumer.loaded_tokens == 0


@pytest.mark.usefixtures("token_by_token")
@pytest.mark.covers("LoRA", "model")
def test_trap_adapters_and_salts_stay_apart_across_block_sizes(
    make: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.lora.request import LoRARequest

    monkeypatch.chdir(tmp_path)
    for path in ("a/path", "b/path", "another/path"):
        Path(path).mkdir(parents=True)
        (Path(path) / "adapter_model.safetensors").write_bytes(b"the same")

    producer, consumer = make(block_size=16), make(block_size=32)
    tokens = prompt(2 * BLOCK + 5)
    cases = {
        "plain": {},
        "a": {"lora_request": LoRARequest("a", 1, "a/path")},
        "b": {"lora_request": LoRARequest("b", 2, "b/path")},
        "moved": {"lora_request": LoRARequest("a", 1, "another/path")},
        "salted": {"cache_salt": "salt"},
    }
    for name, more in cases.items():
        if name in ("a", "plain"):
            producer.add(name, tokens, **more)
    producer.run()
    loaded = {}
    for name, more in cases.items():
        before = consumer.loaded_tokens
        consumer.serve(name, tokens, **more)
        loaded[name] = consumer.loaded_tokens - before
        lora = more.get("lora_request")
        context = lora.lora_name.encode() if lora is not None else b""
        assert consumer.outputs[name] == expected_output(tokens, 4, context=context)
    assert loaded == {"plain": 2 * BLOCK, "a": 2 * BLOCK, "b": 0, "moved": 0, "salted": 0}


@pytest.mark.covers("multimodal input", "model")
def test_images_at_the_same_place_share_and_others_do_not() -> None:
    from types import SimpleNamespace

    from connector.adapters.vllm.request import HashedRequest

    def hashes(identifier: str, offset: int, hash_tokens: int) -> list[bytes]:
        feature = SimpleNamespace(
            identifier=identifier, mm_position=SimpleNamespace(offset=offset, length=40)
        )
        request = SimpleNamespace(
            request_id="r",
            num_tokens=4 * BLOCK,
            all_token_ids=[7] * 4 * BLOCK,
            mm_features=[feature],
            lora_request=None,
            cache_salt=None,
            prompt_embeds=None,
            block_hashes=[b"%d" % i for i in range(4 * BLOCK // hash_tokens)],
        )
        return list(HashedRequest(request, BLOCK, hash_tokens).block_hashes)

    base = hashes("cat", 40, 16)
    assert hashes("cat", 40, 32) == base
    assert hashes("dog", 40, 16)[:1] == base[:1]
    assert not set(hashes("dog", 40, 16)[1:]) & set(base)
    assert not set(hashes("cat", 41, 16)[1:]) & set(base)


def test_trap_a_session_that_replaces_tokens_gets_other_hashes() -> None:
    from types import SimpleNamespace

    from connector.adapters.vllm.request import HashedRequest

    request = SimpleNamespace(
        request_id="r",
        num_tokens=2 * BLOCK,
        all_token_ids=list(range(2 * BLOCK)),
        mm_features=[],
        lora_request=None,
        cache_salt=None,
        prompt_embeds=None,
        block_hashes=[b"0", b"1", b"2", b"3"],
    )
    hashed = HashedRequest(request, BLOCK, 16)
    before = list(hashed.block_hashes)
    request.all_token_ids[-1] = 999
    request.block_hashes[-1] = b"other"
    assert hashed.block_hashes[0] == before[0]
    assert hashed.block_hashes[1] != before[1]


def test_trap_extras_without_canonical_bytes_are_neither_loaded_nor_saved() -> None:
    from types import SimpleNamespace

    from connector.adapters.vllm.request import HashedRequest

    request = SimpleNamespace(
        request_id="r",
        num_tokens=BLOCK,
        all_token_ids=list(range(BLOCK)),
        mm_features=[],
        lora_request=None,
        cache_salt=object(),
        prompt_embeds=None,
        block_hashes=[b"0", b"1"],
    )
    assert HashedRequest(request, BLOCK, 16).block_hashes == []


class TestSlidingWindow:
    @pytest.mark.covers("sliding + full attention", "model")
    def test_what_one_hybrid_engine_computed_another_loads(self, make: MakeEngine) -> None:
        tokens = prompt(6 * BLOCK + 5)
        producer, consumer = make(window=WINDOW), make(window=WINDOW)
        check_answers([producer, consumer], tokens, window=WINDOW)
        assert producer.loaded_tokens == 0
        assert consumer.loaded_tokens == 6 * BLOCK
        assert consumer.computed_tokens == 5 + 3
        groups = [{b.group for job in m.plan.loads for b in job.blocks} for m in consumer.metadata]
        assert {0, 1} in groups

    def test_negative_control_a_wrong_byte_in_the_window_group_changes_the_output(
        self, make: MakeEngine, store: MemoryBlockStore
    ) -> None:
        tokens = prompt(2 * BLOCK + 5)
        producer = make(window=WINDOW)
        producer.serve("a", tokens)
        spoil_last_block(producer, store, group=1)
        consumer = make(window=WINDOW)
        consumer.serve("a", tokens)
        assert consumer.loaded_tokens == 2 * BLOCK
        assert consumer.outputs["a"] != expected_output(tokens, 4, window=WINDOW)

    def test_trap_a_whole_prompt_hit_leaves_a_whole_window(self, make: MakeEngine) -> None:
        tokens = prompt(4 * BLOCK)
        producer, consumer = make(window=BLOCK + 1), make(window=BLOCK + 1)
        check_answers([producer, consumer], tokens, window=BLOCK + 1)
        assert consumer.loaded_tokens == 3 * BLOCK

    def test_chunks_that_push_a_block_out_of_the_window_cost_a_shorter_hit(
        self, make: MakeEngine
    ) -> None:
        """Chunks of 19 tokens and a window of 8: some blocks are never whole in the engine."""
        tokens = prompt(6 * BLOCK + 5)
        producer = make(window=8, max_batched_tokens=19)
        consumer = make(window=8)
        check_answers([producer, consumer], tokens, window=8)

    def test_trap_a_lost_window_block_is_told_by_request_and_computed(
        self, make: MakeEngine, store: MemoryBlockStore
    ) -> None:
        tokens = prompt(4 * BLOCK + 5)
        producer = make(window=WINDOW)
        producer.serve("a", tokens)
        evict_unnoticed(store)
        consumer = make(window=WINDOW)
        check_answers([consumer], tokens, steps_max=200, window=WINDOW)
        assert consumer.free_blocks == 127

    @pytest.mark.usefixtures("token_by_token")
    @pytest.mark.parametrize("seed", range(4))
    def test_many_hybrid_engines_under_pressure_never_give_a_wrong_token(
        self, make: MakeEngine, store: MemoryBlockStore, seed: int
    ) -> None:
        """Shared prefixes, preemption, eviction and aborts with two block sizes."""
        rng = random.Random(seed)
        store.capacity_blocks = 24
        engines = [
            make(window=WINDOW, blocks=44, max_batched_tokens=50, block_size=16),
            make(window=WINDOW, blocks=24, max_batched_tokens=50, block_size=32),
        ]
        check_under_pressure(
            engines, rng, requests=20, between=lambda: evict_some(store, rng), window=WINDOW
        )
