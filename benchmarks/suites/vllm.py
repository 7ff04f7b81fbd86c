"""Suite `vllm` measures time to first token: nothing cached, vLLM's own hit, a hit in the store.

Also of many hits at once, and of the first hits of an engine that has just started.
"""

from __future__ import annotations

import random
import tempfile
import time
from argparse import ArgumentParser, Namespace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.memory import Buffers, Memory, memcpy
from benchmarks.processes import house
from benchmarks.report import Row, machine, median, percentile, ratios, spread
from benchmarks.serving.family import read_process

ROOT = Path(__file__).parents[2]
PROMPT_TOKENS = 2050
"""A multiple of the block, and a tail: the last token is always computed."""
BLOCK_TOKENS = 64
NODE_BYTES = 4 << 30
"""What 30 prompts take in float32, and those at once: nothing is evicted."""
KV_BLOCKS = 600
PROMPTS = 8
WARM_PROMPTS = 10
"""As many as touch every KV block of both engines once."""
LOOKUP_TIMEOUT_S = 0.5
PINNED_FRACTION = 0.8
"""Of 32 prompts at once every block is to be saved, however small the engine's cache."""
SETTLE_S = 0.2
"""Until the last blocks are published."""
QUIET_S = 0.05
"""Before each request that is timed: OpenMP's threads spin for up to 5 ms after a forward, on cores
that the engine which is measured next needs."""
COPIED_AT_ONCE_BYTES = 1 << 20
AT_ONCE = 32
AT_ONCE_TOKENS = 514
AT_ONCE_ROUNDS = 5
FIRST = 8


IDLE = {
    "kv_connector": "IdleConnector",
    "kv_connector_module_path": "benchmarks.idle_connector",
    "kv_role": "kv_both",
}


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="repetitions, at least 5")


def run(options: Namespace) -> tuple[dict[str, Any], list[Row]]:
    """Measure three engines of the same random-weight model in turns: without a connector, with one
    that does nothing, and with ours."""
    if find_spec("vllm") is None:
        raise SystemExit("vLLM is not installed here (scripts/setup says why)")
    from engines import EngineProcess, EngineSettings, ModelShape, build_model, kv_transfer

    shape = ModelShape(layers=16, hidden=768, heads=12, kv_heads=4, vocabulary=8192)
    with house(NODE_BYTES) as here, tempfile.TemporaryDirectory(prefix="kvb-model-") as where:
        about = machine(here.url)
        model = build_model(Path(where), shape)
        transfer = kv_transfer(
            url=here.url,
            run_dir=str(here.run_dir),
            block_tokens=BLOCK_TOKENS,
            lookup_timeout_s=LOOKUP_TIMEOUT_S,
            pinned_fraction=PINNED_FRACTION,
        )

        def settings(connector: dict[str, Any] | None) -> EngineSettings:
            return EngineSettings(
                connector=connector,
                kv_blocks=KV_BLOCKS,
                max_batched_tokens=4096,
                extra={"max_num_seqs": AT_ONCE},
                env={"PYTHONPATH": str(ROOT)},
            )

        def engine(connector: dict[str, Any] | None, name: str) -> EngineProcess:
            log = Path(where) / f"{name}.log"
            return EngineProcess(model, settings(connector), log=log, fresh=True)

        with engine(None, "alone") as alone:
            with engine(transfer, "stored") as stored:
                with engine(IDLE, "idle") as idle:
                    made = _measure(alone, idle, stored, _Copy(shape), options.prompts)
                made += _measure_at_once(alone, stored)
                wanted = _prompts(random.Random(3), FIRST, PROMPT_TOKENS)
                for prompt in wanted:
                    stored.generate([prompt], max_tokens=1)
                stored.drain()
                time.sleep(SETTLE_S)
            with engine(transfer, "fresh") as fresh:
                made += _measure_first(fresh, wanted)
        return about, made


def _prompts(source: random.Random, count: int, tokens: int) -> list[list[int]]:
    return [[source.randrange(2, 8000) for _ in range(tokens)] for _ in range(count)]


def _measure_at_once(alone: Any, stored: Any) -> list[Row]:
    """Hand in many requests whose prompts are cached, in vLLM's own cache or in the store."""
    whole = AT_ONCE_TOKENS // BLOCK_TOKENS * BLOCK_TOKENS
    took: dict[str, list[float]] = {"local": [], "store": []}

    def hand_in(engine: Any, case: str | None) -> None:
        done = engine.generate(prompts, max_tokens=2)
        if case is None:
            return
        if {one.cached_tokens for one in done} != {whole}:
            raise AssertionError(f"{[one.cached_tokens for one in done]} tokens cached: {whole}")
        took[case] += [float(one.ttft_s) for one in done]

    for round_number in range(AT_ONCE_ROUNDS):
        prompts = _prompts(random.Random(100 + round_number), AT_ONCE, AT_ONCE_TOKENS)
        hand_in(alone, None)
        hand_in(stored, None)
        stored.drain()
        time.sleep(SETTLE_S)
        hand_in(alone, "local")
        stored.call("reset", connector=False)
        hand_in(stored, "store")
    names = {"local": "vLLM's own prefix hits", "store": "hits from the store"}
    return [
        {
            "case": f"{AT_ONCE} at once: {name}",
            "ttft_ms": round(percentile(took[case], 50) * 1e3, 1),
            "ttft_ms_p99": round(percentile(took[case], 99) * 1e3, 1),
            "prompt_tokens": AT_ONCE_TOKENS,
            "repetitions": len(took[case]),
        }
        for case, name in names.items()
    ]


def _measure_first(fresh: Any, prompts: list[list[int]]) -> list[Row]:
    """Load one prompt after the other into an engine that has done nothing before, and have it hit
    its own cache with the same prompt right after: nothing is computed or saved in between."""
    whole = PROMPT_TOKENS // BLOCK_TOKENS * BLOCK_TOKENS

    def hit_ms(prompt: list[int]) -> float:
        time.sleep(QUIET_S)
        done = fresh.generate([prompt], max_tokens=2)[0]
        if done.cached_tokens != whole:
            raise AssertionError(f"{done.cached_tokens} tokens cached instead of {whole}")
        return round(float(done.ttft_s) * 1e3, 1)

    return [
        {
            "case": f"hit {number} of a fresh engine",
            "ttft_ms": hit_ms(prompt),
            "own_hit_ms": hit_ms(prompt),
            "prompt_tokens": PROMPT_TOKENS,
            "repetitions": 1,
        }
        for number, prompt in enumerate(prompts, 1)
    ]


class _Copy:
    """Copies as many bytes as a hit has to bring into the engine, on one core, from memory that was
    not read lately: what a hit from the store would take beyond vLLM's own if it did no more."""

    def __init__(self, shape: Any) -> None:
        from engines import cpu_dtype

        item_bytes = {"float32": 4, "bfloat16": 2}[cpu_dtype()]
        head_size = shape.hidden // shape.heads
        token_bytes = 2 * shape.layers * shape.kv_heads * head_size * item_bytes
        size_bytes = PROMPT_TOKENS // BLOCK_TOKENS * BLOCK_TOKENS * token_bytes
        count = -(-size_bytes // COPIED_AT_ONCE_BYTES)
        self._from = Buffers(Memory(count * COPIED_AT_ONCE_BYTES), count, COPIED_AT_ONCE_BYTES)
        self._to = Buffers(Memory(count * COPIED_AT_ONCE_BYTES), count, COPIED_AT_ONCE_BYTES)

    def take_s(self) -> float:
        started = time.perf_counter()
        memcpy(self._to.addresses, self._from.addresses, COPIED_AT_ONCE_BYTES)
        return time.perf_counter() - started


def _cpu_s(engine: Any) -> float:
    """Return the processor time of an engine so far: it is one process."""
    process = read_process(engine.pid)
    if process is None:
        raise AssertionError("the engine has ended")
    return process.cpu_s


def _measure(alone: Any, idle: Any, stored: Any, copy: _Copy, count: int) -> list[Row]:
    def prompts(count: int) -> list[list[int]]:
        return _prompts(source, count, PROMPT_TOKENS)

    def first_token_s(engine: Any, prompt: list[int], cached: int) -> float:
        """Time the first token of one request, which must have found exactly `cached` tokens."""
        time.sleep(QUIET_S)
        done = engine.generate([prompt], max_tokens=2)[0]
        if done.cached_tokens != cached:
            raise AssertionError(f"{done.cached_tokens} tokens cached instead of {cached}")
        answers.setdefault(tuple(prompt), done.tokens)
        if answers[tuple(prompt)] != done.tokens:
            raise AssertionError("other tokens than without the store")
        return float(done.ttft_s)

    names = {
        "recompute": "recompute, no connector",
        "recompute_idle": "recompute, with a connector that does nothing",
        "producer": "recompute and save (producer)",
        "local_hit": "vLLM's own prefix hit, no connector",
        "local_hit_idle": "vLLM's own prefix hit, with a connector that does nothing",
        "local_hit_with": "vLLM's own prefix hit, with the connector",
        "store_hit": "hit from the store",
        "floor": "vLLM's own prefix hit, and a memcpy of its KV",
    }
    source = random.Random(1)
    answers: dict[tuple[int, ...], list[int]] = {}
    whole = PROMPT_TOKENS // BLOCK_TOKENS * BLOCK_TOKENS
    for prompt in prompts(WARM_PROMPTS):
        for engine in (alone, idle, stored):
            first_token_s(engine, prompt, 0)
    took: dict[str, list[float]] = {case: [] for case in names}
    computed: dict[str, list[float]] = {"recompute": [], "recompute_idle": [], "producer": []}
    """Processor time of the engine, s."""
    fresh = list(zip(computed, (alone, idle, stored), strict=True))
    local = [("local_hit", alone), ("local_hit_idle", idle), ("local_hit_with", stored)]
    for prompt in prompts(count):
        fresh = [*fresh[1:], fresh[0]]
        for case, engine in fresh:
            before_s = _cpu_s(engine)
            took[case].append(first_token_s(engine, prompt, 0))
            if engine is stored:
                stored.drain()
            computed[case].append(_cpu_s(engine) - before_s)
        time.sleep(SETTLE_S)
        local = [*local[1:], local[0]]
        for case, engine in local:
            took[case].append(first_token_s(engine, prompt, whole))
        stored.call("reset", connector=False)
        took["store_hit"].append(first_token_s(stored, prompt, whole))
        time.sleep(QUIET_S)
        took["floor"].append(took["local_hit"][-1] + copy.take_s())
    return [
        {
            "case": name,
            "ttft_ms": round(median(took[case]) * 1e3, 1),
            "ratio_to_local_hit": round(median(ratios(took[case], took["local_hit"])), 2),
            "ratio_to_recompute": round(median(ratios(took[case], took["recompute"])), 3),
            "spread": round(spread(took[case]), 3),
            "prompt_tokens": PROMPT_TOKENS,
            "repetitions": len(took[case]),
            **_processor_time(computed, case),
        }
        for case, name in names.items()
    ]


def _processor_time(computed: dict[str, list[float]], case: str) -> Row:
    """Return what is said of the processor time of prompts that are computed, s by case."""
    if case not in computed:
        return {}
    by_pair = ratios(computed[case], computed["recompute"])
    low, middle, high = (percentile(by_pair, percent) for percent in (25, 50, 75))
    return {
        "engine_cpu_ms": round(median(computed[case]) * 1e3),
        "cpu_ratio_to_recompute": round(middle, 3),
        "cpu_ratio_quartiles": f"{low:.3f} to {high:.3f}",
    }
