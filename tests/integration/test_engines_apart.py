"""Real vLLM engines on hosts of their own share KV over TCP and give the same tokens."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import cluster
import pytest
from engines import EngineProcess, EngineSettings, Generated, build_model, kv_transfer

from kvstore.testing.hosts import Hosts, why_not

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]
BLOCK = 64
T = 8 * BLOCK
PROMPTS = [random.Random(i).choices(range(2, 500), k=T + 2) for i in range(4)]
"""T + 2 tokens, split at T everywhere, so that the tail runs through the same kernels."""


def engine(model: Path, connector: dict[str, Any], **options: Any) -> EngineProcess:
    settings = EngineSettings(
        connector=connector, max_batched_tokens=T, prefix_caching=False, **options.pop("set", {})
    )
    return EngineProcess(model, settings, **options)


def generate(on: EngineProcess) -> list[Generated]:
    return [on.generate([prompt], max_tokens=8)[0] for prompt in PROMPTS]


def test_what_an_engine_computes_on_one_host_another_loads_on_the_other(tmp_path):
    model = build_model(tmp_path / "llama")
    with Hosts(2) as hosts:
        places = cluster.Places("engines", tmp_path)
        processes = cluster.start(hosts, places, "128MiB")
        patience = {"lookup_timeout_s": 5.0, "load_timeout_s": 60.0, "block_tokens": BLOCK}

        def on_host(host: str) -> EngineProcess:
            settings = {"env": places.environment(hosts, host)}
            return engine(model, kv_transfer(**patience), on=hosts.command(host, []), set=settings)

        try:
            with on_host("a") as producer:
                computed = generate(producer)
                producer.drain()
            expected = [result.tokens for result in computed]
            assert [result.cached_tokens for result in computed] == [0] * len(PROMPTS)
            with on_host("b") as consumer:
                loaded = generate(consumer)
            assert [result.tokens for result in loaded] == expected
            assert [result.cached_tokens for result in loaded] == [T] * len(PROMPTS)
            hosts.cut("a", "b")
            with on_host("b") as cut_off:
                started = time.monotonic()
                assert [result.tokens for result in generate(cut_off)] == expected
                assert time.monotonic() - started < 120
        finally:
            cluster.stop(processes)
