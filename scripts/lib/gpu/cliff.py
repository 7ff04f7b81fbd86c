"""Measures the throughput of an engine that has more users than its KV memory has room for.

With as many users as fit, every turn finds its history in the engine's own cache. With a third
more the cache forgets each history before it is needed, and all of it is computed again, unless it
is kept elsewhere. One engine a variant: without a connector, with ours, and with the two that vLLM
itself has for host memory. All run at the same time and take turns, so that what changes on the
machine changes for all; a variant that does not start is named as not run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from engines import EngineProcess, EngineSettings, cpu_dtype, kv_transfer

from gpu.engine import GRAPHS, DidNotStartError, attention, on_device
from gpu.rows import Say

PROGRAM = Path(__file__).with_name("users.py")
PATH = [str(PROGRAM.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
"""Where the program finds what it imports."""
LOADS = (1.0, 1.33)
"""Users, as a multiple of those whose histories fit."""
USERS = 8
REPEATS = 3
SECONDS = float(os.environ.get("GPU_CLIFF_S", "30"))
"""Of each load, variant and repeat."""
START_S = 100.0
VARIANTS = 4
LIMIT_S = VARIANTS * START_S + REPEATS * VARIANTS * len(LOADS) * (SECONDS + 5)
OURS, NONE = "kvstore", "none"
KEPT_LEAST = 0.8
"""Throughput at the higher load, of the best at the lower one."""
NATIVE_LEAST = 0.97
"""The same, of the best of vLLM's own connectors."""


class Size(NamedTuple):
    """Says how large model and histories are."""

    model: Mapping[str, int]
    shape: Mapping[str, int]
    """See `users.User`."""
    host_bytes: int
    """What each connector may use."""


LARGE = Size(
    # As Llama 3 8B.
    {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    {"first": 6144, "new": 256, "answer": 64, "longest": 8192, "vocabulary": 128000},
    24 << 30,
)
SMALL = Size(
    {
        "num_hidden_layers": 4,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
    },
    {"first": 768, "new": 64, "answer": 8, "longest": 1024, "vocabulary": 500},
    256 << 20,
)
"""For processors: shows that it runs."""


def write_model(path: Path, size: Size) -> Path:
    """Write a model's configuration; its weights are drawn where it is loaded."""
    path.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2 * size.shape["longest"],
        "bos_token_id": 0,
        "eos_token_id": 1,
        **size.model,
    }
    (path / "config.json").write_text(json.dumps(config))
    return path


def connectors(folder: Path, size: Size) -> dict[str, dict[str, Any] | None]:
    """Return the kv_transfer_config of each variant."""
    native = {
        name: {
            "kv_connector": name,
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_bytes_to_use": size.host_bytes},
        }
        for name in ("SimpleCPUOffloadConnector", "OffloadingConnector")
    }
    ours = kv_transfer(
        run_dir=str(folder / "run"),
        node_size_bytes=size.host_bytes,
        weights_id="cliff",  # there are no files to tell the weights by
    )
    return {NONE: None, OURS: ours, **native}


def settings(size: Size, connector: dict[str, Any] | None) -> EngineSettings:
    """Return settings of an engine whose KV memory has room for `USERS` histories."""
    more: dict[str, Any] = {"load_format": "dummy", "max_num_seqs": 2 * USERS}
    if on_device():
        more |= {"gpu_memory_utilization": 0.23, **GRAPHS, **attention()}
        more["compilation_config"] = {**GRAPHS["compilation_config"]}
        more["compilation_config"]["cudagraph_capture_sizes"] = [1, 2, 4, 8, 16]
    block_size = 16 if on_device() else 32
    return EngineSettings(
        connector=connector,
        block_size=block_size,
        kv_blocks=USERS * size.shape["longest"] // block_size,
        max_model_len=size.shape["longest"] + block_size,
        max_batched_tokens=8192 if on_device() else 1024,
        extra=more,
        env={"PYTHONPATH": os.pathsep.join(PATH)},
        dtype="bfloat16" if on_device() else cpu_dtype(),
    )


Start = Callable[[str, EngineSettings], Any]
"""An engine of that name; raises `DidNotStartError`."""


def measured(start: Start, folder: Path, size: Size, say: Say) -> dict[str, dict[float, float]]:
    """Return tokens a second of each variant that starts, by load: medians over the repeats."""
    rates: dict[str, dict[float, list[float]]] = {}
    with ExitStack() as stack:
        engines = {}
        for name, connector in connectors(folder, size).items():
            try:
                engines[name] = stack.enter_context(start(name, settings(size, connector)))
            except DidNotStartError as e:
                print(f"SKIPPED cliff with {name}: it did not start")
                say(f"{name} did not start", str(e)[-2000:])
        for repeat in range(REPEATS):
            for load in LOADS:
                first, names = repeat % max(1, len(engines)), list(engines)
                for name in names[first:] + names[:first]:
                    users = round(USERS * load)
                    seen = engines[name].call(
                        "talk", users=users, seconds=SECONDS, shape=dict(size.shape)
                    )
                    rate = seen["tokens"] / seen["seconds"]
                    rates.setdefault(name, {}).setdefault(load, []).append(rate)
                    cached = seen["cached_tokens"] / max(1, seen["prompt_tokens"])
                    say(
                        f"{name}, {users} users, turn {repeat}",
                        round(rate, 1),
                        "tokens/s",
                        turns=seen["turns"],
                        cached=round(cached, 3),
                    )
    return {
        name: {load: median(some) for load, some in by_load.items()}
        for name, by_load in rates.items()
    }


def judged(rates: Mapping[str, Mapping[float, float]], say: Say) -> list[str]:
    """Say what is left of the best throughput beyond the cliff; return what could not be said."""
    low, high = LOADS
    if idle := [name for name, by_load in rates.items() if not all(by_load.values())]:
        return [f"{', '.join(idle)}: no turn ended within {SECONDS:g} s"]
    for name, by_load in rates.items():
        kept = by_load[high] / by_load[low]
        say(f"{name}: tokens/s at {high} x, of its own at {low} x", round(kept, 3))
    if OURS not in rates:
        return [f"{OURS} did not start: nothing is known of it"]
    peak = max(by_load[low] for by_load in rates.values())
    ours = rates[OURS][high]
    say(f"{OURS} at {high} x, of the best at {low} x", round(ours / peak, 3), least=KEPT_LEAST)
    native = {name: one[high] for name, one in rates.items() if name not in (OURS, NONE)}
    if not native:
        print("SKIPPED cliff beside vLLM's own connectors: none of them started")
        return []
    best = max(native, key=native.__getitem__)
    ratio = round(ours / native[best], 3)
    say(f"{OURS} at {high} x, of the best of vLLM's own", ratio, least=NATIVE_LEAST, best=best)
    return []


def run(folder: Path, say: Say) -> list[str]:
    """Return what went wrong; figures go to `say`."""
    size = LARGE if on_device() else SMALL
    model = write_model(folder / "model", size)

    def start(name: str, wanted: EngineSettings) -> EngineProcess:
        log = folder / f"{name}.log"
        try:
            # Processes that have started CUDA cannot be forked; others start sooner so.
            return EngineProcess(model, wanted, log, program=PROGRAM, fresh=on_device())
        except RuntimeError as e:
            lines = log.read_text(errors="replace").splitlines()[-40:]
            raise DidNotStartError("\n".join([str(e), *lines])) from e

    return judged(measured(start, folder, size, say), say)
