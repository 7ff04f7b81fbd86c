"""A model of TensorRT-LLM's executor around a connector: its calls, in its order, over pools of
numbers in which every token's entry depends on all before it.

Written after NVIDIA/TensorRT-LLM@035ab91cad04b7b77a479a9526edecfbc742c661
(`_torch/pyexecutor/connectors/kv_cache_connector.py`) and @00043967 (`py_executor.py`: the order
prepare_resources, handle_metadata, start_load_kv, forward with hooks of each layer, wait_for_save;
an error of the forward fails all active requests; `_event_loop_wrapper` ends the executor with any
other error).
"""

from __future__ import annotations

import itertools
import pickle
import sys
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

SCHEDULER_METHODS = {
    "build_connector_meta": ("scheduler_output",),
    "get_num_new_matched_tokens": ("request", "num_computed_tokens"),
    "request_finished": ("request", "cache_block_ids"),
    "update_state_after_alloc": ("request", "block_ids"),
}
"""Abstract ones of KvCacheConnectorScheduler, and their parameters, at that commit and at
@00fdcbff5ad82a6438b3e0c9dbc5480b6ee52bdc (`pyexecutor/kv_cache_connector.py`)."""
WORKER_METHODS = {
    "register_kv_caches": ("kv_cache_tensor",),
    "start_load_kv": ("stream",),
    "wait_for_layer_load": ("layer_idx", "stream"),
    "save_kv_layer": ("layer_idx", "stream"),
    "wait_for_save": ("stream",),
    "get_finished": ("finished_gen_req_ids", "started_loading_req_ids"),
}
"""Those of KvCacheConnectorWorker."""
OPTIONAL = {"request_reset": ("request",), "cancel_load": ("request", "start", "end")}
"""Calls of newer releases with a default (docs/source/features/kv-cache-connector.md@0972960b)."""

BLOCK = 4
LAYERS = 2
VOCABULARY = 97
_RANK = [0]


def _abstract(name: str, methods: Sequence[str], more: dict[str, Any]) -> type:
    def made(self: Any, *args: Any) -> None:
        raise NotImplementedError

    body: dict[str, Any] = {
        one: abstractmethod(types.FunctionType(made.__code__, {}, one)) for one in methods
    }
    return type(name, (ABC,), body | more)


def install(monkeypatch: Any, *, moved: bool = True) -> None:
    """Put packages of TensorRT-LLM's names into this process, with the interface where releases
    from 2026 on have it (`moved`), or where those of before do."""

    def init(self: Any, llm_args: Any) -> None:
        self._llm_args = llm_args
        self._metadata = None

    def bind(self: Any, metadata: object) -> None:
        self._metadata = metadata

    def clear(self: Any) -> None:
        self._metadata = None

    def layout(self: Any, layout: Any) -> None:
        """The default: one pool comes as the tensor that it always was."""
        self.register_kv_caches(layout.as_single_pool_tensor())

    worker = {
        "__init__": init,
        "bind_connector_meta": bind,
        "get_connector_meta": lambda self: self._metadata,
        "_clear_connector_meta": clear,
        "register_kv_cache_layout": layout,
    }
    place = "tensorrt_llm._torch.pyexecutor." + "connectors." * moved + "kv_cache_connector"
    names = ["tensorrt_llm._utils", place]
    for name in [*names, *(name.rpartition(".")[0] for name in names)]:
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            one = ".".join(parts[:end])
            module = types.ModuleType(one)
            module.__path__ = []  # type: ignore[attr-defined]
            if one not in sys.modules:
                monkeypatch.setitem(sys.modules, one, module)
    sys.modules["tensorrt_llm"].__version__ = "1.3.0"  # type: ignore[attr-defined]
    sys.modules["tensorrt_llm._utils"].mpi_rank = lambda: _RANK[0]  # type: ignore[attr-defined]
    found: Any = sys.modules[place]
    found.KvCacheConnectorScheduler = _abstract(
        "KvCacheConnectorScheduler", list(SCHEDULER_METHODS), {"__init__": init}
    )
    found.KvCacheConnectorWorker = _abstract("KvCacheConnectorWorker", list(WORKER_METHODS), worker)
    for name in [
        name for name in sys.modules if name.startswith("connector.adapters.tensorrt_llm")
    ]:
        monkeypatch.delitem(sys.modules, name)


def arguments(**changes: Any) -> SimpleNamespace:
    """Return the arguments of an engine, as far as the adapter reads them."""
    fields = {
        "model": "",
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "gpus_per_node": 8,
        "dtype": "float32",
        "kv_cache_config": SimpleNamespace(tokens_per_block=BLOCK, dtype="auto"),
        "speculative_config": None,
    }
    return SimpleNamespace(**{**fields, **changes})


@dataclass
class Request:
    """One request of the engine's, with what the connector may look at."""

    request_id: int
    prompt: list[int]
    max_tokens: int
    cache_salt: str | None = None
    lora_task_id: int | None = None
    multimodal_hashes: Any = None
    generated: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    position: int = 0
    """Tokens of the context that are computed."""
    error: str = ""
    cached: int = 0

    def get_tokens(self, beam: int) -> list[int]:
        assert beam == 0
        return self.prompt + self.generated


class DeadError(Exception):
    """Ends the executor: an error where the engine expects none."""


class ModelEngine:
    """One engine of `ranks` tensor-parallel ranks."""

    def __init__(
        self,
        make: Callable[[Any, int], Any],
        scheduler: Callable[[Any], Any],
        *,
        ranks: int = 1,
        blocks: int = 64,
        chunk: int = 1 << 20,
        grow: bool = False,
        window: int | None = None,
        **changes: Any,
    ) -> None:
        """`make` and `scheduler` make the connector's sides. With `grow` blocks are allocated for
        each chunk, as by KVCacheManagerV2. A block that lies whole behind the `window` of the
        tokens to be computed has no place: -1 stands for it (`BAD_PAGE_INDEX`)."""
        self.chunk, self.grow, self.window = chunk, grow, window
        self.calls: list[str] = []
        self.workers: list[Any] = []
        shape = (blocks, LAYERS, 2, BLOCK)
        self.pools = [torch.zeros(shape, dtype=torch.int64) for _ in range(ranks)]
        # Each rank is a process of its own, with arguments of its own.
        each = [arguments(tensor_parallel_size=ranks, **changes) for _ in range(ranks)]
        for rank, pool in enumerate(self.pools):
            _RANK[0] = rank
            self.workers.append(make(each[rank], rank))
            self.workers[-1].register_kv_caches(pool)
        _RANK[0] = 0
        self.scheduler = scheduler(each[0])
        self.free = list(range(blocks))
        self.active: list[Request] = []
        self.seen: dict[int, tuple[int, int]] = {}
        self.ids = itertools.count(1)
        self.asked_before: set[int] = set()
        self.lose_after_promise: Callable[[], None] = lambda: None

    def close(self) -> None:
        for worker in self.workers:
            worker.close()

    def generate(
        self, prompts: Sequence[list[int]], max_tokens: int = 3, **more: Any
    ) -> list[Request]:
        requests = [Request(next(self.ids), list(p), max_tokens, **more) for p in prompts]
        self.active += requests
        while self.active:
            self.step()
        return requests

    def step(self) -> None:
        batch, loads = list(self.active), {}
        for request in batch:
            if not request.blocks:
                loads[request.request_id] = self.add(request)
            self.allocate(request)
        self.lose_after_promise()
        output = SimpleNamespace(new_requests=[], cached_requests=[], attention_dp_rank=None)
        for request in batch:
            new = request.request_id not in self.seen
            data = self._data(request, loads.get(request.request_id, 0))
            (output.new_requests if new else output.cached_requests).append(data)
        orders = pickle.loads(pickle.dumps(self.scheduler.build_connector_meta(output)))
        self._check_saves(orders)
        for worker in self.workers:
            worker.bind_connector_meta(orders)
        self.calls.append("build_connector_meta")
        try:
            for worker in self.workers:
                worker.start_load_kv(None)
        except Exception as e:
            raise DeadError from e
        try:
            self._forward(batch)
        except Exception as e:
            for request in self.active:
                request.error = str(e)
            self._end(self.active)
            return
        for worker in self.workers:
            assert worker.get_finished([], []) == ([], [])
        self._end([r for r in batch if len(r.generated) >= r.max_tokens])

    def _check_saves(self, orders: Any) -> None:
        """Whatever is to be saved has been computed when the step is over."""
        for run in orders.saves if orders is not None else ():
            (request,) = [one for one in self.active if one.request_id == run.request_id]
            end = len(request.get_tokens(0))
            if request.position < len(request.prompt):
                end = min(len(request.prompt), request.position + self.chunk)
            for block in run.block_ids:
                assert (request.blocks.index(block) + 1) * BLOCK <= end, "saved before computed"

    def idle_step(self) -> None:
        """A step of which no metadata comes: the last one's stays bound."""
        for worker in self.workers:
            worker.start_load_kv(None)
            worker.wait_for_save(None)

    def preempt(self, request: Request, *, told: bool = True) -> None:
        """Take the blocks of a request away; it starts again from its first token. The connector
        is told, and asked again, or (older releases) just sees it as new once more."""
        if told:
            self.scheduler.request_reset(request)
        else:
            self.asked_before.add(request.request_id)
        self.seen.pop(request.request_id, None)
        self._free(request)
        request.prompt, request.generated = request.prompt + request.generated, []
        request.blocks, request.position = [], 0

    def add(self, request: Request) -> int:
        if request.request_id in self.asked_before:
            return 0
        self.calls.append("get_num_new_matched_tokens")
        matched, later = self.scheduler.get_num_new_matched_tokens(request, 0)
        assert not later
        request.position = request.cached = matched
        request.py_num_connector_matched_tokens = matched  # type: ignore[attr-defined]
        return int(matched)

    def allocate(self, request: Request) -> None:
        tokens = len(request.get_tokens(0)) + 1
        if self.grow and request.position < len(request.prompt):
            tokens = min(tokens, request.position + self.chunk)
        new = []
        while len(request.blocks) * BLOCK < tokens:
            end = (len(request.blocks) + 1) * BLOCK
            behind = self.window is not None and end <= request.position - self.window
            new.append(-1 if behind else self.free.pop(0))
            request.blocks.append(new[-1])
        if new and len(new) == len(request.blocks):
            self.calls.append("update_state_after_alloc")
            self.scheduler.update_state_after_alloc(request, list(request.blocks))

    def _free(self, request: Request) -> None:
        self.free += [block for block in request.blocks if block >= 0]

    def _data(self, request: Request, loaded: int) -> SimpleNamespace:
        tokens = request.get_tokens(0)
        had_tokens, had_blocks = self.seen.get(request.request_id, (0, 0))
        self.seen[request.request_id] = (len(tokens), len(request.blocks))
        if request.position < len(request.prompt):
            position = request.position
            scheduled = min(len(request.prompt) - position, self.chunk)
        else:
            position, scheduled = len(tokens) - 1, 1
        return SimpleNamespace(
            request_id=request.request_id,
            new_tokens=tokens[had_tokens:],
            new_block_ids=request.blocks[had_blocks:],
            computed_position=position - loaded,
            num_scheduled_tokens=scheduled,
        )

    def _forward(self, batch: list[Request]) -> None:
        for layer in range(LAYERS):
            for worker in self.workers:
                worker.wait_for_layer_load(layer, None)
            self.calls.append(f"layer {layer}")
            for rank in range(len(self.pools)):
                for request in batch:
                    self.compute(request, rank, layer)
            for worker in self.workers:
                worker.save_kv_layer(layer, None)
        for worker in self.workers:
            worker.wait_for_save(None)
        self.calls.append("wait_for_save")
        for request in batch:
            if request.position < len(request.prompt):
                request.position = min(len(request.prompt), request.position + self.chunk)
                if request.position < len(request.prompt):
                    continue
            last = len(request.get_tokens(0)) - 1
            said = sum(
                int(self._entry(request, r, last)[LAYERS - 1, 1]) for r in range(len(self.pools))
            )
            request.generated.append(said % VOCABULARY)

    def _entry(self, request: Request, rank: int, at: int) -> torch.Tensor:
        return self.pools[rank][request.blocks[at // BLOCK], :, :, at % BLOCK]

    def compute(self, request: Request, rank: int, layer: int) -> None:
        tokens = request.get_tokens(0)
        if request.position < len(request.prompt):
            first, end = request.position, min(len(request.prompt), request.position + self.chunk)
        else:
            first, end = len(tokens) - 1, len(tokens)
        for at in range(first, end):
            before = self._entry(request, rank, at - 1)[layer] if at else (0, 0)
            apart = hash(request.cache_salt) if request.cache_salt else 0
            apart += 7 * layer + rank + (request.lora_task_id or 0)
            for kind in range(2):
                value = int(before[kind]) * 31 + tokens[at] + kind + apart
                self._entry(request, rank, at)[layer, kind] = value % 1_000_003

    def _end(self, requests: list[Request]) -> None:
        for request in list(requests):
            self.active.remove(request)
            assert self.scheduler.request_finished(request, list(request.blocks)) is False
            self.calls.append("request_finished")
            self.seen.pop(request.request_id, None)
            self._free(request)
