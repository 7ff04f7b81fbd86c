"""What vLLM's engine core does and tells no connector reaches ours all the same."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from engine_core import core_class, core_of
from vllm_model_config import BLOCK
from vllm_model_engine import MakeEngine, expected_output, prompt

from connector.adapters.vllm import engine_hooks
from kvstore.testing.blockstore import MemoryBlockStore

pytestmark = pytest.mark.vllm
TOKENS = prompt(2 * BLOCK + 5)
OTHER = prompt(2 * BLOCK + 5, seed=9)


def reset_caches(core: Any) -> None:
    """Call what vLLM's own pausing calls."""
    core._reset_caches()


def run(engine: Any, name: str) -> int:
    """Tokens that were loaded for a request with the same tokens as all others."""
    before = engine.loaded_tokens
    engine.serve(name, TOKENS)
    assert engine.outputs[name] == expected_output(TOKENS, 4)
    return int(engine.loaded_tokens - before)


def test_every_method_that_is_wrapped_is_there() -> None:
    """Of this vLLM: another one is told in the log what it goes without."""
    core = core_class()
    assert all(hasattr(core, name) for name in engine_hooks._AROUND)
    before = core.set_weight_version
    engine_hooks.watch_engine_core()
    assert core.set_weight_version is before, "once"


@pytest.mark.parametrize(
    "change",
    [
        lambda core: core.set_weight_version("2"),
        lambda core: core.collective_rpc("reload_weights"),
        lambda core: core.collective_rpc("update_weights", kwargs={"update_info": {}}),
        lambda core: core.collective_rpc("something_of_the_users_own"),
        lambda core: core.collective_rpc(lambda worker: None),
    ],
    ids=["version", "reload", "update", "unknown", "function"],
)
def test_after_the_weights_changed_nothing_older_is_loaded(make: MakeEngine, change: Any) -> None:
    engine, other = make(), make()
    core = core_of(engine)
    run(engine, "before")
    reset_caches(core)
    assert run(engine, "again") == 2 * BLOCK
    reset_caches(core)
    change(core)
    assert run(engine, "after") == 0
    reset_caches(core)
    assert run(engine, "own") == 2 * BLOCK, "what it saved with these it finds"
    assert run(other, "other") == 2 * BLOCK, "who has the first weights goes on with them"


@pytest.mark.parametrize("method", sorted(engine_hooks.LEAVES_WEIGHTS_ALONE))
def test_calls_that_leave_the_weights_alone_cost_nothing(make: MakeEngine, method: str) -> None:
    engine = make()
    core = core_of(engine)
    run(engine, "before")
    reset_caches(core)
    core.collective_rpc(method)
    assert run(engine, "after") == 2 * BLOCK


def test_engines_with_a_weights_id_share_by_version(make: MakeEngine) -> None:
    engines = [make(weights_id="run-17"), make(weights_id="run-17"), make(weights_id="run-18")]
    for engine in engines:
        core_of(engine).set_weight_version("5")
    assert [run(engine, "r") for engine in engines] == [0, 2 * BLOCK, 0]


def test_without_one_versions_of_the_same_name_are_not_the_same(make: MakeEngine) -> None:
    engines = [make(), make()]
    for engine in engines:
        core_of(engine).set_weight_version("5")
    assert [run(engine, "r") for engine in engines] == [0, 0]


def test_a_lookup_under_way_when_the_weights_change_comes_to_nothing(
    make: MakeEngine, store: MemoryBlockStore
) -> None:
    engine = make()
    core = core_of(engine)
    run(engine, "before")
    reset_caches(core)
    engine.add("asked", TOKENS)  # its lookup starts here
    core.collective_rpc("reload_weights")
    engine.run()
    assert engine.loaded_tokens == 0
    assert engine.outputs["asked"] == expected_output(TOKENS, 4)


def test_what_is_computed_on_kv_of_other_weights_is_not_saved(
    make: MakeEngine, store: MemoryBlockStore
) -> None:
    """The user kept the engine's own cache over the update: its prefix is of the old weights."""
    engine = make()
    core = core_of(engine)
    run(engine, "before")
    saved = len(store.sealed())
    core.collective_rpc("reload_weights")
    run(engine, "mixed")
    assert len(store.sealed()) == saved
    reset_caches(core)
    run(engine, "clean")
    assert len(store.sealed()) == 2 * saved


def test_sleep_and_pause_leave_the_store_as_it_is_and_a_reset_does_not(
    make: MakeEngine, store: MemoryBlockStore
) -> None:
    engine = make()
    core = core_of(engine)
    run(engine, "a")
    saved = len(store.sealed())
    reset_caches(core)
    assert len(store.sealed()) == saved
    assert core.reset_prefix_cache(reset_connector=True) is True
    assert store.sealed() == []


def test_a_store_that_is_down_fails_neither(make: MakeEngine, store: MemoryBlockStore) -> None:
    engine = make()
    core = core_of(engine)
    run(engine, "a")
    store.node_down = True
    reset_caches(core)
    assert core.reset_prefix_cache(reset_connector=True) is True


def test_saves_in_flight_fail_neither(make: MakeEngine, store: MemoryBlockStore) -> None:
    engine = make()
    core = core_of(engine)
    worker = engine.worker

    def on_workers(method: Any, *args: Any, **kwargs: Any) -> list[Any]:
        return [[worker.end_saves(5.0)]] if method is engine_hooks.end_saves else []

    core.model_executor.collective_rpc = on_workers
    engine.add("a", TOKENS, max_tokens=1)
    while engine.scheduler.has_unfinished_requests():
        engine.step()
    connector = engine.scheduler.connector
    assert connector.saves_in_flight
    reset_caches(core)
    assert not connector.saves_in_flight
    engine.run()


class Loading:
    """A request whose load stands still while `go` is not set: in a copy, or before it."""

    def __init__(self, make: MakeEngine, monkeypatch: pytest.MonkeyPatch, in_copy: bool) -> None:
        from connector.worker import transfers

        self.go = threading.Event()
        begun = threading.Event()
        run(make(), "before")
        self.engine = make()
        self.core = core_of(self.engine)
        self.core.model_executor.collective_rpc = self._on_workers(monkeypatch)
        load_blocks, scatter_all = transfers.load_blocks, transfers.scatter_all

        def before_copy(*args: Any) -> Any:
            begun.set()
            assert in_copy or self.go.wait(20)
            return load_blocks(*args)

        def copy(blocks: Any, opened: Any, layer: Any = None) -> Any:
            with opened[0][0].guard.copying():
                begun.set()
                assert not in_copy or self.go.wait(20)
            return scatter_all(blocks, opened, layer)

        monkeypatch.setattr(transfers, "load_blocks", before_copy)
        monkeypatch.setattr(transfers, "scatter_all", copy)
        self.engine.add("r", TOKENS)
        while self.status != "WAITING_FOR_REMOTE_KVS" or not begun.wait(0.01):
            self.engine.step()

    def _on_workers(self, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
        from vllm.distributed import kv_transfer

        monkeypatch.setattr(kv_transfer, "has_kv_transfer_group", lambda: True)
        monkeypatch.setattr(kv_transfer, "get_kv_transfer_group", lambda: self.engine.worker)

        def on_workers(method: Any, *, args: Any = (), **kwargs: Any) -> list[Any]:
            return [method(None, *args)] if callable(method) else []

        return on_workers

    @property
    def status(self) -> str:
        return str(self.engine.scheduler.requests["r"].status.name)

    @property
    def blocks_in_use(self) -> int:
        return 128 - 1 - self.engine.free_blocks


@contextmanager
def loading(
    make: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    *,
    in_copy: bool = False,
) -> Iterator[Loading]:
    made = Loading(make, monkeypatch, in_copy)
    try:
        yield made
    finally:
        made.go.set()


EMPTYING: dict[str, Callable[[Any], object]] = {
    "pause, keep": lambda core: core.pause_scheduler(mode="keep"),
    "pause, abort": lambda core: core.pause_scheduler(mode="abort"),
    "sleep, keep": lambda core: core.sleep(1, mode="keep"),
    "reset": lambda core: core.reset_prefix_cache(reset_running_requests=True),
    "reset of all": lambda core: core.reset_prefix_cache(
        reset_running_requests=True, reset_connector=True
    ),
    "release": lambda core: (
        core.pause_scheduler(mode="keep", clear_cache=False),
        core.release_kv_cache_memory(),
    ),
}


@pytest.mark.parametrize("how", EMPTYING)
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_the_cache_is_emptied_while_a_request_loads(
    make: MakeEngine, monkeypatch: pytest.MonkeyPatch, how: str, policy: str
) -> None:
    with loading(make, monkeypatch) as one:
        one.engine.scheduler.recompute_kv_load_failures = policy == "recompute"
        EMPTYING[how](one.core)
        assert one.blocks_in_use == 0
        one.go.set()
        one.core.resume_scheduler()
        one.engine.run()
        wanted = [] if "abort" in how else expected_output(TOKENS, 4)
        assert one.engine.outputs["r"] == wanted
    assert run(one.engine, "next") >= 0


@pytest.mark.parametrize("in_copy", [False, True])
def test_what_is_loaded_late_reaches_no_block_that_was_taken_back(
    make: MakeEngine, monkeypatch: pytest.MonkeyPatch, in_copy: bool
) -> None:
    """Rule 5: a block that is being copied into stays in use, however long that takes."""
    monkeypatch.setattr(engine_hooks, "END_SAVES_S", 0.05)
    with loading(make, monkeypatch, in_copy=in_copy) as one:
        used = one.blocks_in_use
        if in_copy:
            with pytest.raises(RuntimeError, match="Failed to reset KV cache"):
                one.core.reset_prefix_cache(reset_running_requests=True)
            assert one.blocks_in_use == used
        else:
            one.core.reset_prefix_cache(reset_running_requests=True)
        one.engine.add("other", OTHER, max_tokens=8)  # where the load would have written
        for _ in range(3):
            one.engine.step()
        one.go.set()
        one.engine.run()
        assert one.engine.outputs["other"] == expected_output(OTHER, 8)
        assert one.engine.outputs["r"] == expected_output(TOKENS, 4)


def test_a_copy_that_ends_in_time_is_waited_for(
    make: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with loading(make, monkeypatch, in_copy=True) as one:
        threading.Timer(0.1, one.go.set).start()
        one.core.reset_prefix_cache(reset_running_requests=True)
        assert one.blocks_in_use == 0
        one.engine.run()
        assert one.engine.outputs["r"] == expected_output(TOKENS, 4)


@pytest.mark.parametrize("room", [True, False])
def test_blocks_of_a_load_that_is_over_are_taken_back_too(
    make: MakeEngine, monkeypatch: pytest.MonkeyPatch, room: bool
) -> None:
    """Before vLLM looks at the request again, and where it then finds no room in its step."""
    with loading(make, monkeypatch) as one:
        one.go.set()
        scheduler = one.engine.scheduler
        while not scheduler.finished_recving_kv_req_ids:
            one.engine.step()
        if not room:
            assert scheduler._handle_blocked_waiting_request(scheduler.requests["r"])
            assert one.status == "WAITING"
        one.core.reset_prefix_cache(reset_running_requests=True)
        assert one.blocks_in_use == 0
        one.engine.run()
        assert one.engine.outputs["r"] == expected_output(TOKENS, 4)


def test_a_plain_reset_leaves_a_request_that_loads_alone(
    make: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM's leaves one that runs; aborted ones hold nothing up."""
    with loading(make, monkeypatch) as one:
        assert not one.core.reset_prefix_cache()
        one.engine.abort("r")
        assert one.core.reset_prefix_cache()
        assert one.blocks_in_use == 0
        one.go.set()
        one.engine.run()


def test_failures_in_reports_of_steps_under_way_are_of_nobody_any_more(
    make: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from concurrent.futures import Future

    from vllm.v1.outputs import KVConnectorOutput

    with loading(make, monkeypatch) as one:
        (table,) = one.engine.scheduler.kv_cache_manager.get_block_ids("r")
        transfers = KVConnectorOutput(invalid_block_ids={*table, 77}, failed_recving={"r", "s"})
        step: Future[Any] = Future()
        step.set_result(SimpleNamespace(kv_connector_output=transfers))
        one.core.batch_queue = [(step, None, None)]
        one.core.reset_prefix_cache(reset_running_requests=True)
        assert transfers.invalid_block_ids == {77}
        assert transfers.failed_recving == {"s"}


def test_an_error_of_ours_keeps_nobody_from_anything(
    make: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make()
    core = core_of(engine)

    def broken(version: str) -> None:
        raise LookupError("a bug")

    monkeypatch.setattr(engine.scheduler.connector, "weights_named", broken)
    core.set_weight_version("7")
    assert core.get_weight_version() == "7"


def test_an_adapter_that_is_loaded_again_is_looked_at_again(
    make: MakeEngine, tmp_path: Any
) -> None:
    from vllm.lora.request import LoRARequest

    engine = make()
    core = core_of(engine)
    weights = engine.scheduler.connector._weights
    file = tmp_path / "adapter_model.safetensors"
    request = SimpleNamespace(lora_request=LoRARequest("a", 1, str(tmp_path)))
    seen = []
    for content in (b"one", b"two"):
        file.write_bytes(content)
        core.add_lora(LoRARequest("a", 1, str(tmp_path), load_inplace=True))
        seen.append(weights.of(request))
    assert seen[0] != seen[1]
