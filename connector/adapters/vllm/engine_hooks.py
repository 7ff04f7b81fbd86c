"""Hooks into vLLM's engine core for what no connector is told: changed weights, emptied caches.

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
    from vllm.v1.request import Request

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
"""Calls of workers, by name, that leave weights unchanged. After any other call, and after a
function, the weights may have changed."""
_LOADING = "WAITING_FOR_REMOTE_KVS"
DISCARDS_WEIGHTS = 2
"""The level of sleep from which on weights return by another load."""
_MARK = "_kvstore_wrapped"
Around = Callable[..., Callable[[], object] | None]
"""Called before a method of the engine core, with (core, our connectors, an exit stack that is
closed after the call) before its arguments. It may return a function to call afterwards."""


class Watcher:
    """Describes a connector's scheduler side, as far as the engine core is concerned."""

    def weights_may_have_changed(self) -> None: ...
    def weights_named(self, version: str) -> None: ...
    def adapter_changes(self, lora_id: int) -> None: ...

    @contextmanager
    def own_cache_emptied(self) -> Iterator[None]:
        """Return a context in which `reset_cache` concerns the engine's own cache, not the
        store."""
        yield

    @property
    def saves_in_flight(self) -> bool:
        return False

    def saves_ended(self, report: WorkerReport) -> None: ...
    def end_saves(self, timeout_s: float) -> WorkerReport:
        """End the saves in flight, and return which; called on a worker's side."""
        raise NotImplementedError

    @property
    def loads_under_way(self) -> dict[str, int]:
        return {}

    def ended_everywhere(self, job_ids: set[int]) -> set[int]:
        """Return those of the loads, which have ended on workers here, that have ended on all
        workers."""
        return job_ids

    def end_loads(self, job_ids: set[int], timeout_s: float) -> set[int]:
        """End these loads, and return which have ended; called on a worker's side."""
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
    """Return our connectors: the connector itself, or those of a MultiConnector."""
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
    for one in ours:
        stack.enter_context(one.own_cache_emptied())


def _reset_prefix_cache(
    core: EngineCore,
    ours: list[Watcher],
    stack: ExitStack,
    reset_running_requests: bool = False,
    *args: object,
    **kwargs: object,
) -> None:
    _end_saves_in_flight(core, ours)
    if ours:
        _take_back_loads(core, ours, of_all=reset_running_requests)


def _end_saves_in_flight(core: EngineCore, ours: list[Watcher]) -> None:
    """End the saves in flight: vLLM cannot empty its cache while a block of it is in use, and a
    save uses its blocks."""
    if not any(one.saves_in_flight for one in ours):
        return
    for reports in core.model_executor.collective_rpc(end_saves):
        for one, report in zip(ours, reports, strict=False):
            one.saves_ended(report)


def _take_back_loads(core: EngineCore, ours: list[Watcher], *, of_all: bool) -> None:
    """Free blocks that something was loaded into, or is: vLLM preempts what runs, and neither what
    waits for a load nor what has just got one. Without `of_all` only those of aborted requests.

    Each request goes on as after a load that failed. Of one that some worker still copies nothing
    is freed (rule 5), and vLLM says that it cannot empty its cache.
    """
    scheduler, loads = core.scheduler, [one.loads_under_way for one in ours]
    names = scheduler.finished_recving_kv_req_ids.union(*loads)
    held = {r.request_id: r for r in scheduler.requests.values() if _has_loaded(r, names, of_all)}
    for name, request in held.items():
        if request.status.name == _LOADING:  # from here on nothing counts, whatever workers report
            scheduler.failed_recving_kv_req_ids.add(name)
            request.num_computed_tokens = 0
    asked = [{job_id for name, job_id in one.items() if name in held} for one in loads]
    if any(asked):
        replies = core.model_executor.collective_rpc(end_loads, args=(asked,))
        for one, of_one, *ended in zip(ours, loads, *replies, strict=True):
            done = one.ended_everywhere(set.intersection(*ended))
            for name in [name for name, job_id in of_one.items() if job_id not in done]:
                held.pop(name, None)
    tables = [scheduler.kv_cache_manager.get_block_ids(name) for name in held]
    for future, *_ in getattr(core, "batch_queue", None) or ():
        # Of a step under way: the blocks that it says are invalid may be another's by then.
        transfers = getattr(future.result(), "kv_connector_output", None)
        if transfers is not None:
            transfers.failed_recving.difference_update(held)
            transfers.invalid_block_ids.difference_update(*(ids for t in tables for ids in t))
    for name, request in held.items():
        if not request.is_finished():
            scheduler.reset_preempted_req_ids.add(name)
        request.num_computed_tokens = 0
        scheduler.kv_cache_manager.free(request)


def _has_loaded(request: Request, names: set[str], of_all: bool) -> bool:
    """Return whether the request, one of `names`, has blocks of a load, or waits with some."""
    if request.is_finished() or (of_all and request.status.name == _LOADING):
        return request.request_id in names
    waits = request.status.name in ("WAITING", "PREEMPTED") and request.num_computed_tokens > 0
    return of_all and waits and not (request.resumable or request.num_in_flight_tokens)


def end_saves(worker: object) -> list[WorkerReport]:
    """End saves on each worker; return one report for each connector of ours, in their order."""
    return [one.end_saves(END_SAVES_S) for one in _on_worker()]


def end_loads(worker: object, asked: list[set[int]]) -> list[set[int]]:
    """End loads on each worker; return which of these loads have ended, for each connector of
    ours."""
    return [one.end_loads(jobs, END_SAVES_S) for one, jobs in zip(_on_worker(), asked, strict=True)]


def _on_worker() -> list[Watcher]:
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    return watchers(get_kv_transfer_group()) if has_kv_transfer_group() else []


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
    "reset_prefix_cache": "it may fail while saves or loads are in flight",
}
