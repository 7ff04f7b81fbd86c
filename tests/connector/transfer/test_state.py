"""The process's own connector: made once, ended once, whoever asks."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
from own_python import holds_in_child
from threads_at_once import at_once

from connector.transfer import state
from connector.transfer.base_v1 import KVConnectorBase_V1, KVConnectorRole
from connector.transfer.config import KVTransferConfig
from connector.transfer.engine import EngineInfo
from connector.transfer.state import (
    ensure_kv_transfer_initialized,
    ensure_kv_transfer_shutdown,
    get_kv_connector_cache_layout,
    get_kv_transfer_group,
    has_kv_transfer_group,
    is_v1_kv_transfer_group,
)
from kvstore import DeadlineError, UsageError


class Counted(KVConnectorBase_V1):
    """A worker's connector that counts how often it is made and ended."""

    made: ClassVar[list[tuple[Any, Any]]] = []
    ended: ClassVar[int] = 0
    make_takes_s: ClassVar[float] = 0.0
    shutdown_raises: ClassVar[bool] = False
    meanwhile: ClassVar[list[Callable[[], object]]] = []

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        assert role is KVConnectorRole.WORKER, "a process's connector is the worker's"
        super().__init__(vllm_config, role, kv_cache_config)
        time.sleep(self.make_takes_s)
        for call in self.meanwhile:
            call()
        self.made.append((self._kv_transfer_config, vllm_config.engine_info))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...
    def wait_for_layer_load(self, layer_name: str) -> None: ...
    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None:
        pass

    def wait_for_save(self) -> None: ...
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any: ...
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> Any: ...
    def shutdown(self) -> None:
        Counted.ended += 1
        if self.shutdown_raises:
            raise RuntimeError("cannot end")


ENGINE, OTHER = EngineInfo(rank=1), EngineInfo(rank=2)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(Counted, "made", [])
    monkeypatch.setattr(Counted, "ended", 0)
    monkeypatch.setattr(Counted, "make_takes_s", 0.0)
    monkeypatch.setattr(Counted, "shutdown_raises", False)
    yield
    with contextlib.suppress(RuntimeError):
        ensure_kv_transfer_shutdown()


def config(**changes: Any) -> KVTransferConfig:
    values = {
        "kv_connector": "Counted",
        "kv_connector_module_path": __name__,
        "kv_role": "kv_both",
        "engine_id": "e",
    }
    return KVTransferConfig.from_dict({**values, **changes})


def test_there_is_no_connector_before_and_after() -> None:
    assert not has_kv_transfer_group()
    assert not is_v1_kv_transfer_group()
    with pytest.raises(UsageError, match="ensure_kv_transfer_initialized"):
        get_kv_transfer_group()
    ensure_kv_transfer_initialized(config(), ENGINE)
    assert has_kv_transfer_group()
    assert is_v1_kv_transfer_group()
    assert type(get_kv_transfer_group()).__name__ == "Counted"
    ensure_kv_transfer_shutdown()
    assert not has_kv_transfer_group()


def test_second_call_changes_nothing_and_says_when_it_wanted_something_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ensure_kv_transfer_initialized(config(), ENGINE)
    first = get_kv_transfer_group()
    ensure_kv_transfer_initialized(config(), ENGINE)
    assert not caplog.records
    ensure_kv_transfer_initialized(config(kv_role="kv_consumer"), OTHER)
    assert "another config is ignored" in caplog.text
    assert get_kv_transfer_group() is first
    assert Counted.made == [(config(), ENGINE)]


@pytest.mark.parametrize("wanted", [None, KVTransferConfig(), KVTransferConfig(kv_role="kv_both")])
def test_config_without_a_connector_makes_none(wanted: KVTransferConfig | None) -> None:
    ensure_kv_transfer_initialized(wanted, ENGINE)
    assert not has_kv_transfer_group()


def test_many_threads_get_one_connector() -> None:
    Counted.make_takes_s = 0.02
    got: list[KVConnectorBase_V1] = []

    def start() -> None:
        ensure_kv_transfer_initialized(config(), ENGINE)
        got.append(get_kv_transfer_group())

    at_once([start] * 8)
    assert len(got) == 8
    assert len(set(map(id, got))) == 1
    assert len(Counted.made) == 1


def test_shutdown_ends_it_once_and_a_new_one_can_be_made() -> None:
    ensure_kv_transfer_shutdown()
    ensure_kv_transfer_initialized(config(), ENGINE)
    ensure_kv_transfer_shutdown()
    ensure_kv_transfer_shutdown()
    assert Counted.ended == 1
    ensure_kv_transfer_initialized(config(), OTHER)
    assert [engine for _, engine in Counted.made] == [ENGINE, OTHER]


def test_connector_that_cannot_end_is_gone_all_the_same() -> None:
    ensure_kv_transfer_initialized(config(), ENGINE)
    Counted.shutdown_raises = True
    with pytest.raises(RuntimeError, match="cannot end"):
        ensure_kv_transfer_shutdown()
    assert not has_kv_transfer_group()


def test_connector_that_cannot_be_made_leaves_none() -> None:
    with pytest.raises(UsageError):
        ensure_kv_transfer_initialized(config(kv_connector="Absent"), ENGINE)
    assert not has_kv_transfer_group()
    ensure_kv_transfer_initialized(config(), ENGINE)
    assert has_kv_transfer_group()


@contextlib.contextmanager
def in_the_making() -> Iterator[None]:
    """Have another thread make the connector meanwhile."""
    begun, go_on = threading.Event(), threading.Event()
    Counted.meanwhile[:] = [begun.set, lambda: go_on.wait(30)]
    other = threading.Thread(target=ensure_kv_transfer_initialized, args=(config(), ENGINE))
    other.start()
    assert begun.wait(30)
    try:
        yield
    finally:
        Counted.meanwhile.clear()
        go_on.set()
        other.join()


def test_wait_for_another_thread_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "GROUP_WAIT_S", 0.02)
    with in_the_making():
        with pytest.raises(DeadlineError):
            ensure_kv_transfer_initialized(config(), ENGINE)
        with pytest.raises(DeadlineError):
            ensure_kv_transfer_shutdown()


def test_forked_process_has_no_connector_and_no_held_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "GROUP_WAIT_S", 1.0)

    def has_none() -> bool:
        ensure_kv_transfer_shutdown()
        return not has_kv_transfer_group()

    with in_the_making():
        assert holds_in_child(has_none)
    assert has_kv_transfer_group()
    assert holds_in_child(has_none)


def test_anything_else_is_no_connector() -> None:
    described = ENGINE.config_with(config())
    assert is_v1_kv_transfer_group(Counted(described, KVConnectorRole.WORKER))
    assert not is_v1_kv_transfer_group("KVStoreConnector")


def test_who_is_interrupted_when_its_turn_comes_does_not_keep_it(monkeypatch: pytest.MonkeyPatch):
    """A handler of signals raises just then: others would wait out their time for ever after."""
    group = state._group
    lock = group.lock

    class Interrupting:
        def acquire(self, timeout):
            assert lock.acquire(timeout=timeout)
            raise KeyboardInterrupt

        def __getattr__(self, name):
            return getattr(lock, name)

    group.lock = Interrupting()
    with pytest.raises(KeyboardInterrupt):
        state.ensure_kv_transfer_shutdown()
    group.lock = lock
    monkeypatch.setattr(state, "GROUP_WAIT_S", 1.0)
    ended = []
    other = threading.Thread(target=lambda: ended.append(ensure_kv_transfer_shutdown()))
    other.start()
    other.join()
    assert ended == [None]


def test_the_layout_that_the_kv_must_have_is_the_connectors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert get_kv_connector_cache_layout() == "NHD"
    ensure_kv_transfer_initialized(config(), ENGINE)
    assert get_kv_connector_cache_layout() == "NHD", "it takes any"
    ensure_kv_transfer_shutdown()
    layout = classmethod(lambda cls, vllm_config: f"HND of {vllm_config.engine_info.rank}")
    monkeypatch.setattr(Counted, "get_required_kvcache_layout", layout)
    ensure_kv_transfer_initialized(config(), ENGINE)
    assert get_kv_connector_cache_layout() == "HND of 1"
