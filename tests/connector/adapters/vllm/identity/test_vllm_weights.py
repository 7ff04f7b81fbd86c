"""Weights that change in place again and again: no two of them have one name."""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_core import core_of
from vllm_model_config import BLOCK, vllm_config
from vllm_model_engine import MakeEngine, ModelEngine, expected_output, prompt

from connector.adapters.vllm import engine_hooks

pytestmark = pytest.mark.vllm
TOKENS = prompt(2 * BLOCK + 5)
UPDATES: dict[str, Callable[[Any], object]] = {
    "version": lambda core: core.set_weight_version("7"),
    "update": lambda core: core.collective_rpc("update_weights", kwargs={"update_info": {}}),
    "start": lambda core: core.collective_rpc("start_weight_update"),
    "finish": lambda core: core.collective_rpc("finish_weight_update"),
    "draft": lambda core: core.collective_rpc("start_draft_weight_update"),
    "reload": lambda core: core.collective_rpc("reload_weights"),
    "load": lambda core: core.collective_rpc("load_model"),
    "reset": lambda core: core.collective_rpc("reset_weights"),
    "config": lambda core: core.collective_rpc("update_config", args=({},)),
    "restore": lambda core: core.collective_rpc("checkpoint_restore"),
    "unknown": lambda core: core.collective_rpc("something_of_the_users_own"),
    "function": lambda core: core.collective_rpc(lambda worker: None),
    "sleep": lambda core: (core.sleep(2), core.wake_up()),
    "sleep by name": lambda core: (core.sleep(level=2), core.wake_up()),
    "sleep deeper": lambda core: (core.sleep(3), core.wake_up()),
}
"""Each kind of update by itself, none of them named for other engines."""


def run(core: Any, engine: ModelEngine, name: str) -> int:
    """Tokens loaded for a request with the same tokens as all others, the engine's cache empty."""
    core._reset_caches()
    before = engine.loaded_tokens
    engine.serve(name, TOKENS)
    assert engine.outputs[name] == expected_output(TOKENS, 4)
    return engine.loaded_tokens - before


@pytest.mark.parametrize("kind", UPDATES)
def test_after_each_of_two_updates_nothing_older_is_loaded(make: MakeEngine, kind: str) -> None:
    engine = make()
    core = core_of(engine)
    run(core, engine, "before")
    for turn in range(2):
        UPDATES[kind](core)
        assert run(core, engine, f"after {turn}") == 0
        assert run(core, engine, f"own {turn}") == 2 * BLOCK, "what it saved with these it finds"


def test_updates_of_all_kinds_in_turn_share_nothing(make: MakeEngine) -> None:
    engine = make()
    core = core_of(engine)
    for name, update in (UPDATES | {f"{name} again": one for name, one in UPDATES.items()}).items():
        update(core)
        assert run(core, engine, name) == 0, name


@pytest.mark.parametrize("level", [0, 1])
def test_sleep_that_keeps_the_weights_keeps_their_name(make: MakeEngine, level: int) -> None:
    engine = make()
    core = core_of(engine)
    run(core, engine, "before")
    for turn in range(2):
        core.sleep(level)
        core.wake_up()
        assert run(core, engine, f"after {turn}") == 2 * BLOCK


def test_an_unnamed_update_of_a_named_run_is_nobody_elses_and_a_version_is(
    make: MakeEngine,
) -> None:
    engines = [make(weights_id="run-17"), make(weights_id="run-17")]
    cores = [core_of(engine) for engine in engines]
    for core in cores:
        core.collective_rpc("update_weights")
    assert [run(*both, "a") for both in zip(cores, engines, strict=True)] == [0, 0]
    for core in cores:
        core.set_weight_version("5")
    assert [run(*both, "b") for both in zip(cores, engines, strict=True)] == [0, 2 * BLOCK]
    for core in cores:
        core.collective_rpc("update_weights")
    assert [run(*both, "c") for both in zip(cores, engines, strict=True)] == [0, 0]


def test_no_two_changes_have_one_name(model: Path) -> None:
    from connector.adapters.vllm.weights import Weights

    request = SimpleNamespace(lora_request=None)
    names: list[tuple[str, ...]] = [()]
    for process in ("p", "q"):
        weights = Weights(vllm_config(model, blocks=8), process)
        for change in [weights.may_have_changed] * 3 + [partial(weights.name, "5")] * 3:
            change()
            names.append(weights.of(request))
    assert len(set(names)) == 13


def test_no_two_loads_of_an_adapter_that_nobody_can_read_have_one_name(model: Path) -> None:
    """An adapter that a plug-in of vLLM's loads from elsewhere lies in no file of this host."""
    from vllm.lora.request import LoRARequest

    from connector.adapters.vllm.weights import Weights

    def seen(weights: Weights, **more: Any) -> tuple[str, ...]:
        lora = LoRARequest("a", 1, "s3://adapters/a", **more)
        return weights.of(SimpleNamespace(lora_request=lora))

    weights = Weights(vllm_config(model, blocks=8), "p")
    first = seen(weights)
    assert seen(weights) == first, "vLLM has not loaded it again"
    again = [seen(weights, load_inplace=True), seen(weights, load_inplace=True)]
    weights.adapter_changes(1)
    names = {first, *again, seen(weights), seen(Weights(vllm_config(model, blocks=8), "q"))}
    assert len(names) == 5


def test_no_call_of_vllms_workers_is_unknown() -> None:
    """Of vLLM's own source: what is new there changes the weights, or leaves them alone."""
    import vllm

    root = Path(next(iter(vllm.__path__)))
    named = {
        str(call.args[0].value)
        for room in ("v1/engine", "entrypoints")
        for file in (root / room).rglob("*.py")
        for call in ast.walk(ast.parse(file.read_text()))
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("collective_rpc")
        if call.args and isinstance(call.args[0], ast.Constant)
    }
    changing = {
        "apply_model", "checkpoint_restore", "finish_weight_update", "reset_weights",
        "start_draft_weight_update", "start_weight_update", "update_weights",
    }  # fmt: skip
    assert changing <= named <= changing | engine_hooks.LEAVES_WEIGHTS_ALONE
    assert not changing & engine_hooks.LEAVES_WEIGHTS_ALONE
