"""Checks that real vLLM engines on this machine's device share KV, from the safest kind to the
usual one.

An engine that starts must load what was computed before, and give its tokens. Runs on vLLM for
CPUs as well, where there are neither CUDA graphs nor pools in VRAM.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from engines import EngineProcess, EngineSettings, Generated, ModelShape, build_model, kv_transfer

BLOCK_TOKENS = 64
PREFIX_TOKENS = 8 * BLOCK_TOKENS
PROMPT_TOKENS = PREFIX_TOKENS + 2
"""Every engine splits its prefill behind the prefix: the tail runs through the same kernels."""
PROMPTS = 3
ENGINES = (("kv_producer", True), ("kv_consumer", True), ("kv_both", False))
"""Role, and whether it uses VRAM pools."""
BY_DEFAULT = ("model runner V2", "asynchronous scheduling", "CUDA graphs")
"""What vLLM settles on with a GPU; an engine without one of these proves little."""
EAGER: dict[str, Any] = {"enforce_eager": True}
GRAPHS: dict[str, Any] = {
    "enforce_eager": False,
    "compilation_config": {
        "mode": 0,  # nothing is compiled
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 2, 4],
    },
}
USUAL: dict[str, Any] = {
    "enforce_eager": False,
    "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4]},  # each takes time to capture
}
SHAPE = ModelShape(weights_std=0.08)
"""At such weights an answer depends on all of its prompt: a wrong block shows."""
LOG_LINES = 40


def on_device() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def attention() -> dict[str, Any]:
    """Return the setting for an engine that was taken along without FlashAttention: in its place
    is a file that only says that it is there."""
    found = find_spec("vllm")
    folders = found.submodule_search_locations if found is not None else None
    absent = folders and (Path(folders[0]) / "vllm_flash_attn" / "_vllm_fa2_C.py").exists()
    return {"attention_backend": "TRITON_ATTN"} if absent else {}


def settings(
    folder: Path, role: str, vram: bool, kind: dict[str, Any] | None = None
) -> EngineSettings:
    """Return settings of an engine of that `kind` (by default as users start it)."""
    more: dict[str, Any] = {}
    if on_device():
        more = {"gpu_memory_utilization": 0.2, **(USUAL if kind is None else kind), **attention()}
    connector = kv_transfer(
        role,
        run_dir=str(folder / "run"),
        node_size_bytes=256 << 20,
        vram=vram,
        block_tokens=BLOCK_TOKENS,
        lookup_timeout_s=1.0,
        load_timeout_s=30.0,
    )
    return EngineSettings(
        connector=connector, max_batched_tokens=PREFIX_TOKENS, max_model_len=1024, extra=more
    )


class DidNotStartError(Exception):
    """Has what an engine said that did not start, and the end of its log."""


def started(name: str, model: Path, wanted: EngineSettings, folder: Path) -> EngineProcess:
    """Start an engine. Raises `DidNotStartError`."""
    log = folder / f"{name}.log"
    try:
        return EngineProcess(model, wanted, log, fresh=True)
    except RuntimeError as e:
        lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        raise DidNotStartError("\n".join([f"{name}: {e}", *lines])) from e


@contextmanager
def closing() -> Iterator[list[EngineProcess]]:
    """Close the engines that are put into the list."""
    engines: list[EngineProcess] = []
    try:
        yield engines
    finally:
        for engine in engines:
            engine.close()


def prompts() -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(2, 500) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)]


def asked(engine: EngineProcess) -> list[Generated]:
    """Return the answers to each prompt, one after the other, when what they saved is in place."""
    results = [engine.generate([prompt])[0] for prompt in prompts()]
    engine.drain()
    return results


def compared(
    name: str, results: Sequence[Generated], expected: Sequence[Sequence[int]], loaded: int
) -> list[str]:
    """Return what is wrong with answers, of each of which so many tokens were to be loaded."""
    wrong = []
    cached = [result.cached_tokens for result in results]
    if cached != [loaded] * len(results):
        wrong.append(f"{name}: {cached} tokens of each prompt loaded, {loaded} expected")
    if [result.tokens for result in results] != list(expected):
        wrong.append(f"{name}: other tokens than the engine that computed them")
    ttft = ", ".join(f"{1e3 * result.ttft_s:.0f}" for result in results)
    print(f"{name}: {cached} tokens of each prompt loaded, first tokens after {ttft} ms")
    return wrong


def lacking(name: str, engine: EngineProcess, wanted: Sequence[str]) -> list[str]:
    """Return what an engine on a device runs without, of what it is to run with."""
    runs = [what for what, does in engine.call("running").items() if does]
    print(f"{name}: runs with {', '.join(runs) or 'none of what GPUs have'}")
    lacks = [what for what in wanted if what not in runs] if on_device() else []
    return [f"{name}: it runs without {what}" for what in lacks]


def alone(folder: Path, kind: dict[str, Any], wanted: Sequence[str] = ()) -> list[str]:
    """Have one engine save, forget, and load; return what was wrong."""
    model = build_model(folder / "model", SHAPE)
    with closing() as engines:
        engine = started("alone", model, settings(folder, "kv_both", False, kind), folder)
        engines.append(engine)
        wrong = lacking("alone", engine, wanted)
        first = asked(engine)
        wrong += compared("computed", first, [one.tokens for one in first], 0)
        engine.call("reset", connector=False)
        again = asked(engine)
        return wrong + compared("loaded", again, [one.tokens for one in first], PREFIX_TOKENS)


def check(folder: Path, kind: dict[str, Any] | None = None) -> list[str]:
    """Have one engine save, a second load, a third do both; return what was wrong."""
    model = build_model(folder / "model", SHAPE)
    wrong: list[str] = []
    expected: list[list[int]] = []
    with closing() as engines:
        for role, vram in ENGINES:
            name = f"{role}{' with VRAM' if vram else ''}"
            try:
                engine = started(role, model, settings(folder, role, vram, kind), folder)
            except DidNotStartError as e:
                return [*wrong, *str(e).splitlines()]
            engines.append(engine)  # the producer goes on: its VRAM is read
            wrong += lacking(name, engine, BY_DEFAULT if kind is None else ())
            results = asked(engine)
            expected = expected or [result.tokens for result in results]
            wanted = 0 if role == "kv_producer" else PREFIX_TOKENS
            wrong += compared(name, results, expected, wanted)
    return wrong


def killed(folder: Path, kind: dict[str, Any]) -> list[str]:
    """Have a producer with a pool in VRAM end by SIGKILL between two loads of a consumer: the
    tokens stay the same, whatever is still found. Return what was wrong."""
    model = build_model(folder / "model", SHAPE)
    with closing() as engines:
        producer, consumer = (
            started(role, model, settings(folder, role, True, kind), folder)
            for role in ("kv_producer", "kv_consumer")
        )
        engines += [producer, consumer]
        expected = [one.tokens for one in asked(producer)]
        wrong = compared("out of another process's VRAM", asked(consumer), expected, PREFIX_TOKENS)
        producer.kill()
        consumer.call("reset", connector=False)
        after = asked(consumer)
        loaded = [one.cached_tokens for one in after]
        print(f"after its producer was killed: {loaded} tokens loaded")
        if [one.tokens for one in after] != expected:
            wrong.append("after its producer was killed: other tokens")
        return wrong


Rung = Callable[[Path], list[str]]
"""What is wrong, given a folder for models and logs."""
RUNGS: dict[str, Rung] = {
    "eager": lambda folder: alone(folder, EAGER),
    "graphs": lambda folder: alone(folder, GRAPHS, BY_DEFAULT),
    "vram": lambda folder: killed(folder, GRAPHS),
    "default": check,
}
