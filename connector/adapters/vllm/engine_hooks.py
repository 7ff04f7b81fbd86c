"""Hooks into vLLM's engine core for what it tells no connector: weights changed, caches emptied.

Its methods are wrapped, once in a process, because vLLM 0.32 and 0.33 have no call for it. A
version without one of them goes on without what that one is for, and says so.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from connector.limits import END_SAVES_S

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.core import EngineCore

    from connector.messages import WorkerReport

log = logging.getLogger(f"kvstore.{__name__}")

LEAVES_WEIGHTS_ALONE = frozenset(
    {
        "check_health",
        "checkpoint_prepare",
        "compute_weight_checksums",
        "get_model_inspection",
        "init_weight_transfer_engine",
        "profile",
        "release_late_interaction_query_cache",
        "save_sharded_state",
        "shutdown_weight_transfer_engine",
        "synchronize_device",
        "update_max_model_len",
    }
)
"""Calls of workers by name. After any other, and after a function, the weights may be others."""
DISCARDS_WEIGHTS = 2
"""Level of sleep from which on weights come back by another load."""
_MARK = "_kvstore_wrapped"
Around = Callable[..., Callable[[], object] | None]
"""Is called before a method of the engine core, with (core, our connectors, what is left after the
call) before its arguments, and may return what is to be called afterwards."""


class Watcher:
    """Describes a connector's scheduler side, as far as the engine core is concerned."""

    def weights_may_have_changed(self) -> None: ...
    def weights_named(self, version: str) -> None: ...
    def adapter_changes(self, lora_id: int) -> None: ...

    @contextmanager
    def own_cache_emptied(self) -> Iterator[None]:
        """A context in which `reset_cache` is about the engine's own cache, not about the store."""
        yield

    @property
    def saves_in_flight(self) -> bool:
        return False

    def saves_ended(self, report: WorkerReport) -> None: ...
    def end_saves(self, timeout_s: float) -> WorkerReport:
        """On a worker's side: end the saves in flight, and say which."""
        raise NotImplementedError


def watch_engine_core() -> None:
    """Hook into vLLM's engine core. Safe to call again.

    Does nothing where that is not loaded: then nobody runs one in this process.
    """
    module = sys.modules.get("vllm.v1.engine.core")
    core = getattr(module, "EngineCore", None)
    if core is None or getattr(core, _MARK, False):
        return
    setattr(core, _MARK, True)
    for name, around in _AROUND.items():
        original = getattr(core, name, None)
        if original is None:
            log.warning("this vLLM has no EngineCore.%s: %s", name, _WITHOUT.get(name, "unseen"))
            continue
        setattr(core, name, _wrapped(original, around))


def _wrapped(original: Callable[..., object], around: Around) -> Callable[..., object]:
    @functools.wraps(original)
    def call(core: EngineCore, *args: object, **kwargs: object) -> object:
        with ExitStack() as stack:
            try:
                after = around(core, watchers(_scheduler_connector(core)), stack, *args, **kwargs)
            except Exception:  # nothing of ours keeps the engine from what it was told to do
                log.exception("the store was not told of %s", original.__name__)
                after = None
            result = original(core, *args, **kwargs)
            if after is not None:
                after()
            return result

    return call


def _scheduler_connector(core: EngineCore) -> object:
    scheduler = getattr(core, "scheduler", None)
    return getattr(scheduler, "connector", None)


def watchers(connector: object) -> list[Watcher]:
    """Our connectors: the connector itself, or those of a MultiConnector."""
    if isinstance(connector, Watcher):
        return [connector]
    return [c for child in getattr(connector, "_connectors", ()) for c in watchers(child)]


def _set_weight_version(
    core: EngineCore, ours: list[Watcher], stack: ExitStack, weight_version: str
) -> None:
    for one in ours:
        one.weights_named(weight_version)


def _collective_rpc(
    core: EngineCore,
    ours: list[Watcher],
    stack: ExitStack,
    method: object,
    *args: object,
    **kwargs: object,
) -> None:
    if not isinstance(method, str) or method not in LEAVES_WEIGHTS_ALONE:
        for one in ours:
            one.weights_may_have_changed()


def _sleep(
    core: EngineCore,
    ours: list[Watcher],
    stack: ExitStack,
    level: int = 1,
    *args: object,
    **kwargs: object,
) -> None:
    if level >= DISCARDS_WEIGHTS:
        for one in ours:
            one.weights_may_have_changed()


def _add_lora(
    core: EngineCore, ours: list[Watcher], stack: ExitStack, lora_request: LoRARequest
) -> None:
    for one in ours if lora_request.load_inplace else ():
        one.adapter_changes(int(lora_request.lora_int_id))


def _remove_lora(core: EngineCore, ours: list[Watcher], stack: ExitStack, lora_id: int) -> None:
    for one in ours:
        one.adapter_changes(int(lora_id))


def _reset_caches(
    core: EngineCore, ours: list[Watcher], stack: ExitStack, *args: object, **kwargs: object
) -> None:
    _end_saves_in_flight(core, ours)
    for one in ours:
        stack.enter_context(one.own_cache_emptied())


def _reset_prefix_cache(
    core: EngineCore, ours: list[Watcher], stack: ExitStack, *args: object, **kwargs: object
) -> None:
    _end_saves_in_flight(core, ours)


def _end_saves_in_flight(core: EngineCore, ours: list[Watcher]) -> None:
    """vLLM cannot empty its cache while a block of it is in use, and a save uses its blocks."""
    if not any(one.saves_in_flight for one in ours):
        return
    for reports in core.model_executor.collective_rpc(end_saves):
        for one, report in zip(ours, reports, strict=False):
            one.saves_ended(report)


def end_saves(worker: object) -> list[WorkerReport]:
    """Runs on each worker: one report for each connector of ours, in their order."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if not has_kv_transfer_group():
        return []
    return [one.end_saves(END_SAVES_S) for one in watchers(get_kv_transfer_group())]


_AROUND: dict[str, Around] = {
    "set_weight_version": _set_weight_version,
    "collective_rpc": _collective_rpc,
    "sleep": _sleep,
    "add_lora": _add_lora,
    "remove_lora": _remove_lora,
    "_reset_caches": _reset_caches,
    "reset_prefix_cache": _reset_prefix_cache,
}
_WITHOUT = {
    "_reset_caches": "sleep and pause drop what is in the store, as reset_prefix_cache does",
    "reset_prefix_cache": "it may fail while saves are in flight",
}
