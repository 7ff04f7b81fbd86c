"""What each of vLLM's architectures tells vLLM of its KV cache, and what our connector makes of it.

Run as a program with the cases as JSON on standard input; prints a line for each.
Models are built on torch's device `meta`, from the configuration that transformers or vLLM has for
them, as an engine's worker does: without weights, and without a forward.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import sys
import tempfile
import traceback
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import MagicMock

from specs_engine import VOCABULARY, SpecsEngine

LAYERS_MAX = 8
CASE_CPU_S = 120.0
MODEL_TOKENS_MAX = 4096
STORE_BLOCK_TOKENS = 256
"""A store block has no more, unless one of vLLM's has."""


def model_types() -> dict[str, str]:
    """By architecture the `model_type` of the configurations that transformers has for it."""
    from transformers.models.auto import modeling_auto

    found: dict[str, str] = {}
    for name, mapping in vars(modeling_auto).items():
        if name.startswith("MODEL_") and name.endswith("_MAPPING_NAMES"):
            for model_type, classes in mapping.items():
                for one in classes if isinstance(classes, tuple | list) else [classes]:
                    if one:
                        found.setdefault(one, model_type)
    return found


def write_config(folder: Path, architecture: str, given: dict[str, Any]) -> None:
    """Write the configuration of a model of this architecture, as its checkpoint has it: that of
    transformers or vLLM, with what is `given` and few layers."""
    from transformers import AutoConfig
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    model_type = given.get("model_type") or model_types()[architecture]
    if model_type in _CONFIG_REGISTRY:
        AutoConfig.register(model_type, _CONFIG_REGISTRY[model_type], exist_ok=True)
    fields = {name: value for name, value in given.items() if name != "model_type"}
    few = {"num_hidden_layers": LAYERS_MAX}
    tried: list[str] = []
    for shrunk in ({**few, **fields}, {"text_config": few, **fields}, fields):
        try:
            config = AutoConfig.for_model(model_type, **shrunk)
        except Exception as e:
            tried.append(f"{type(e).__name__}: {e}")
            continue
        config.architectures = [architecture]
        config.save_pretrained(folder)
        return
    raise ValueError("; ".join(tried))


def engine_config(model: Path, connector: bool, options: dict[str, Any]) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    transfer = {
        "kv_connector": "KVStoreConnector",
        "kv_connector_module_path": "connector.adapters.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"lookup_timeout_s": 30.0, "load_timeout_s": 60.0},
    }
    args = {
        "model": str(model),
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "dtype": "bfloat16",
        "max_num_seqs": 4,
        "enforce_eager": True,
        "async_scheduling": False,
        "kv_transfer_config": transfer if connector else None,
        **options,
    }
    config = EngineArgs(**args).create_engine_config()
    most = min(config.model_config.max_model_len, MODEL_TOKENS_MAX)
    config.model_config.max_model_len = config.scheduler_config.max_model_len = most
    return config


def in_groups(config: Any) -> None:
    """As if this process were the last worker of its stage: vLLM's layers ask who they are."""
    from vllm.distributed import parallel_state

    tp_size = config.parallel_config.tensor_parallel_size
    sizes = {"_TP": tp_size, "_EP": tp_size, "_ETP": 1, "_WORLD": tp_size}
    for name in list(vars(parallel_state)):
        if name in ("_WORLD", "_TP", "_ETP", "_PP", "_DP", "_EP", "_DCP", "_PCP", "_EPLB"):
            size = sizes.get(name, 1)
            group = MagicMock(world_size=size, rank_in_group=size - 1, rank=size - 1, local_rank=0)
            group.is_first_rank, group.is_last_rank = name == "_PP" or size == 1, True
            group.ranks = list(range(size))
            setattr(parallel_state, name, group)


def layers_of(config: Any) -> tuple[dict[str, Any], frozenset[str]]:
    """Build the model, and a draft's if there is one; return the layers' specs as a worker does,
    and which are the draft's."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

    drafted = getattr(config.speculative_config, "draft_model_config", None)
    with (
        set_current_vllm_config(config),
        set_default_torch_dtype(config.model_config.dtype),
        torch.device("meta"),
    ):
        in_groups(config)
        model = initialize_model(config)
        own = set(get_kv_cache_spec(config))
        if drafted is not None and config.speculative_config.use_eagle():
            model.draft = initialize_model(config, model_config=drafted)
        current_platform.update_block_size_for_backend(config)
        specs = get_kv_cache_spec(config)
    return specs, frozenset(set(specs) - own)


def planned(config: Any, specs: dict[str, Any]) -> Any:
    """Return vLLM's plan of the KV cache, with room for a few prompts."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
    from vllm.v1.attention.backends.utils import (
        get_supported_kv_cache_layouts,
        resolve_kv_cache_layout,
    )
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
    from vllm_planning import get_kv_cache_configs

    register_all_kvcache_specs(config)
    with set_current_vllm_config(config):
        names = [
            one.name for one in get_supported_kv_cache_layouts(get_current_attn_backends(config))
        ]
        resolve_kv_cache_layout(config, [names], list(specs.values()))
    (kv_cache,) = get_kv_cache_configs(config, [specs], [1 << 40])
    return kv_cache


def room_for(config: Any, kv_cache: Any) -> int:
    """Tell vLLM to plan for a few prompts of the length returned, which ends within blocks."""
    sizes = [group.kv_cache_spec.block_size for group in kv_cache.kv_cache_groups]
    unit = math.lcm(*sizes, STORE_BLOCK_TOKENS)
    tokens = min(2 * unit + 5, config.model_config.max_model_len - 8)
    blocks = sum(-(-(tokens + 8) // size) + 4 for size in sizes)
    config.cache_config.num_gpu_blocks_override = 6 * blocks  # a quarter may wait to be saved
    most = tokens + 8  # vLLM wants room for one such
    config.model_config.max_model_len = config.scheduler_config.max_model_len = most
    return tokens


class Started(NamedTuple):
    """vLLM's configuration and plan of a model."""

    config: Any
    kv_cache: Any
    drafts: frozenset[str]
    tokens: int
    """Of a prompt that two store blocks of each group are of."""


def started(model: Path, options: dict[str, Any], *, connector: bool) -> Started:
    config = engine_config(model, connector, options)
    specs, drafts = layers_of(config)
    tokens = room_for(config, planned(config, specs))
    kv_cache = planned(config, specs)
    config.cache_config.num_gpu_blocks = kv_cache.num_blocks
    return Started(config, kv_cache, drafts, tokens)


def outcome(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Start vLLM alone, then with our connector, and have engines share a prompt."""
    from kvstore import UsageError

    options = case.get("options", {})
    try:
        write_config(folder, case["architecture"], case.get("config", {}))
        one = started(folder, options, connector=False)
        groups = [
            f"{_kinds(group)} {group.kv_cache_spec.block_size}"
            for group in one.kv_cache.kv_cache_groups
        ]
        engine = SpecsEngine(one.config, one.kv_cache, one.drafts)
        ask(engine, "alone", prompt(one.tokens))
    except Exception as e:
        return {"verdict": "vLLM", "why": f"{type(e).__name__}: {e}", "at": last_frames(e)}
    try:
        return {"groups": groups, **shared(folder, options)}
    except UsageError as e:
        return {"groups": groups, "verdict": "refused", "why": str(e), "field": e.field}
    except Exception as e:
        why = f"{type(e).__name__}: {e}"
        return {"groups": groups, "verdict": "died", "why": why, "at": last_frames(e)}


def shared(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Two engines, one prompt; and a third one, with a prompt that begins alike."""
    from connector import build
    from connector.adapters.vllm.bystander import Bystander
    from kvstore.testing.blockstore import MemoryBlockStore

    store = MemoryBlockStore()
    build.open_store = lambda *_, **__: store  # type: ignore[assignment]
    one, loaded = started(folder, options, connector=True), []
    for name, same in (("writer", 1), ("reader", 1), ("other", 2)):
        engine = SpecsEngine(one.config, one.kv_cache, one.drafts)
        if isinstance(engine.worker._worker, Bystander):
            return {"verdict": "aside"}
        tokens = prompt(one.tokens)[: one.tokens // same]
        ask(engine, name, tokens + prompt(one.tokens - len(tokens), seed=1))
        loaded.append(engine.loaded_tokens[name])
        left_out = list(engine.scheduler.connector._shape.left_out)
        engine.close()
    return {
        "verdict": "stored",
        "tokens": one.tokens,
        "loaded": loaded,
        "left_out": left_out,
        "saved": len(store.sealed()),
    }


def ask(engine: SpecsEngine, name: str, tokens: list[int]) -> None:
    engine.add(name, tokens)
    engine.run()


def prompt(tokens: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCABULARY) for _ in range(tokens)]


def _kinds(group: Any) -> str:
    from vllm.v1.kv_cache_interface import iter_layer_specs

    kinds = dict.fromkeys(type(one).__name__ for one in iter_layer_specs(group.kv_cache_spec))
    return "+".join(kinds)


def last_frames(e: BaseException) -> list[str]:
    return [
        f"{Path(frame.filename).name}:{frame.lineno} {frame.name}"
        for frame in traceback.extract_tb(e.__traceback__)[-6:]
    ]


def in_a_child(case: dict[str, Any]) -> dict[str, Any]:
    """A case in a process of its own: vLLM keeps much of a model for the whole process."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        signal.setitimer(signal.ITIMER_PROF, CASE_CPU_S)
        with tempfile.TemporaryDirectory() as folder, os.fdopen(write, "w") as answer:
            json.dump(outcome(case, Path(folder)), answer)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        said = answer.read()
    _, status = os.waitpid(child, 0)
    found = json.loads(said) if said else {"verdict": "died", "why": f"process ended: {status}"}
    return {**case, **found}


def main() -> None:
    cases = json.load(sys.stdin)
    import vllm.engine.arg_utils
    import vllm.v1.core.sched.scheduler  # noqa: F401
    from vllm.model_executor.models import registry

    # Modules of models that see import it, those of their text models with them; no pictures here.
    if find_spec("torchvision") is None:
        for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2"):
            sys.modules[name] = MagicMock(__spec__=ModuleSpec(name, None))
    # Each case has a process of its own already, in which vLLM has been imported.
    registry._run_in_subprocess = lambda inspect: inspect()

    for case in cases:
        print(json.dumps(in_a_child(case)), flush=True)


if __name__ == "__main__":
    main()
