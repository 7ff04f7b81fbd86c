"""Real vLLM engines: one computes a prompt, the other decodes it and computes one token of it.

All split the prompt before its last token, so that this one runs through the same kernel shapes
everywhere.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from connector_parts import TO_PREFILL
from engines import EngineProcess, EngineSettings, build_model
from test_vllm_engine import BLOCK, PATH, Store, prompts, tokens_of

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(600)]

TOKENS = 3 * BLOCK + 41
"""A block of the store, and an engine block, is begun and not full."""


@pytest.fixture
def store() -> Iterator[Store]:
    with tempfile.TemporaryDirectory(prefix="kvh") as path:
        store = Store(Path(path))
        yield store
        store.close()


def test_decode_computes_one_token_of_a_prompt(store: Store, tmp_path: Path) -> None:
    model = build_model(tmp_path / "llama")
    connectors = [None, store.transfer("kv_producer"), store.transfer("kv_both")]
    with ExitStack() as stack:
        engines = []
        for number, connector in enumerate(connectors):
            settings = EngineSettings(
                connector=connector, max_batched_tokens=TOKENS - 1, env={"PYTHONPATH": PATH}
            )
            engine = EngineProcess(model, settings, log=tmp_path / f"engine{number}.log")
            stack.callback(engine.close)
            engines.append(engine)
        alone, producer, consumer = engines
        for seed in range(3):
            wanted = prompts(1, seed, TOKENS)
            (computed,) = producer.generate(wanted, 1, kv_transfer_params=TO_PREFILL)
            told = computed.kv_transfer_params
            assert told is not None
            assert told["remote_num_tokens"] == TOKENS
            # vLLM reports this, the other engine's own hits, in place of what the decode engine
            # found (`remote_prefill_cached_tokens`): here its own count is wanted.
            del told["remote_prefill_cached_tokens"]
            decoded = consumer.generate(wanted, kv_transfer_params=told)
            assert decoded[0].cached_tokens == TOKENS - 1
            assert tokens_of(decoded) == tokens_of(alone.generate(wanted))
