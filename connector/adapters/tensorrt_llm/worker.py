"""The worker side under TensorRT-LLM: copies engine blocks before and after a forward.

Both are done in the engine's thread. TensorRT-LLM may give a request's blocks to another one
between two steps, without saying so, and a load cannot be taken back; within a step neither
happens.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from connector.adapters.tensorrt_llm.interface import KvCacheLayout, WorkerBase, rank, release
from connector.adapters.tensorrt_llm.messages import Orders, Run
from connector.adapters.tensorrt_llm.shape import (
    PoolShape,
    block_tokens,
    check,
    check_layout,
    engine_fields,
    settings,
    tp_size,
)
from connector.build import open_store
from connector.pages.pages import Pages, Parts, memory_at
from kvstore import KVStoreError, PutStatus, UsageError
from kvstore.spi import NodeUnavailableError, in_batches

if TYPE_CHECKING:
    import torch

    from kvstore.spi import BlockSession

log = logging.getLogger(f"kvstore.{__name__}")

STAGED_BLOCKS = 16
"""Engine blocks on a device that are copied through host memory at a time."""
QUIET_AFTER_FAILURE_S = 5.0
"""Time for which nothing is saved after the node did not answer, because each attempt costs a
deadline of the engine's thread."""


@dataclass(slots=True)
class Side:
    """The part of a worker that the scheduler of its process needs."""

    store: BlockSession
    shards: list[Pages]
    block_tokens: int


_sides: dict[int, Side] = {}
"""Sides by the identity of the arguments with which a worker and a scheduler of one engine were
made."""


def shared(llm_args: object) -> Side | None:
    """Return the side of the worker that has registered its pool in this process."""
    return _sides.get(id(llm_args))


class KVStoreWorker(WorkerBase):  # type: ignore[misc]
    """Moves the bytes of one rank."""

    def __init__(self, llm_args: object) -> None:
        super().__init__(llm_args)
        check(llm_args)
        self._args = llm_args
        self._config = settings()
        self._store = open_store(self._config)
        self._pages: Pages | None = None
        self._rows: torch.Tensor
        self._rank = 0
        self._taken: Orders | None = None
        self._step: Orders | None = None
        self._failed: str | None = None
        self._quiet_until = 0.0

    def register_kv_caches(self, kv_cache_tensor: torch.Tensor) -> None:
        """Take the pool: its first index is the engine block. Raises `UsageError` for another
        shape of memory."""
        import torch

        if not kv_cache_tensor.is_contiguous() or kv_cache_tensor.dim() < 2:
            raise UsageError("kv_cache_tensor", tuple(kv_cache_tensor.shape), "must be contiguous")
        self._rows = kv_cache_tensor.view(torch.uint8).reshape(kv_cache_tensor.shape[0], -1)
        pool = PoolShape(
            block_tokens(self._args),
            int(self._rows.shape[1]),
            tuple(int(n) for n in kv_cache_tensor.shape[1:]),
            str(kv_cache_tensor.dtype),
        )
        engine = engine_fields(self._args, release(), self._config.weights_id)
        ranks = tp_size(self._args)
        shards = [
            Pages(self._store, name)
            for name in pool.namespaces(self._args, self._config, engine, ranks)
        ]
        self._rank = rank()
        self._pages = shards[self._rank]
        _sides[id(self._args)] = Side(self._store, shards, pool.block_tokens)
        log.info("kvstore: namespace %s", self._pages.namespace)

    def register_kv_cache_layout(self, layout: KvCacheLayout) -> None:
        """Take the pool by the base class's way to the call above. Raises `UsageError` where
        there are layer groups."""
        check_layout(layout)
        super().register_kv_cache_layout(layout)

    def start_load_kv(self, stream: torch.cuda.Stream) -> None:
        """Read what this step needs into the pool. A block that cannot be read raises in the
        forward, where the engine expects errors (docs/engines.md)."""
        orders, self._failed = self.get_connector_meta(), None
        self._step = None if orders is self._taken else orders
        self._taken = orders  # a step without requests leaves the last one's orders in place
        for run in self._step.loads if self._step is not None else ():
            if not self._loaded(run):
                self._failed = (
                    f"kvstore: blocks promised to request {run.request_id} cannot be read; the "
                    "engine has no way to compute them instead, so its step must not go on"
                )
                log.error(self._failed)

    def wait_for_layer_load(self, layer_idx: int, stream: torch.cuda.Stream) -> None:
        """Raise `NodeUnavailableError` in a step whose blocks could not be read."""
        if self._failed is not None:
            raise NodeUnavailableError(self._failed)

    def save_kv_layer(self, layer_idx: int, stream: torch.cuda.Stream) -> None:
        """Do nothing: whole blocks are saved at the end of the forward."""

    def wait_for_save(self, stream: torch.cuda.Stream) -> None:
        """Copy the blocks that are full now to the store. Raises `NodeUnavailableError` in a step
        whose blocks could not be read, should no layer have asked."""
        if self._failed is not None:
            raise NodeUnavailableError(self._failed)
        orders, self._step = self._step, None
        if orders is None or not orders.saves or time.monotonic() < self._quiet_until:
            return
        if self._rows.is_cuda:
            stream.synchronize()
        for run in orders.saves:
            self._save(run)

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        """Return nothing: loads and saves end within the step."""
        return [], []

    def close(self) -> None:
        """Give everything back. The engine has no call for it; the process's end does the same."""
        _sides.pop(id(self._args), None)
        self._store.close()

    def _loaded(self, run: Run) -> bool:
        try:
            return self._load(run)
        except (KVStoreError, RuntimeError, OSError):  # torch's errors are RuntimeErrors
            log.exception("kvstore: blocks were not loaded")
            return False

    def _load(self, run: Run) -> bool:
        assert self._pages is not None
        found = run.refs[self._rank]
        for part in in_batches(list(zip(found, run.block_ids, strict=False)), STAGED_BLOCKS):
            refs, ids = [ref for ref, _ in part], [block for _, block in part]
            staged = self._staging(ids)
            if not all(self._pages.read(refs, self._parts(staged))):
                return False
            self._rows[ids] = staged.to(self._rows.device)
        self._store.touch([ref.key for ref in found])
        return True

    def _save(self, run: Run) -> None:
        assert self._pages is not None
        for part in in_batches(list(zip(run.names, run.block_ids, strict=False)), STAGED_BLOCKS):
            names, ids = [name for name, _ in part], [block for _, block in part]
            staged = self._rows[ids].cpu().contiguous()
            try:
                results = self._pages.save(names, self._parts(staged))
            except KVStoreError as e:
                results = []
                log.warning("kvstore: nothing is saved for a while: %s", e)
            if not results or all(one.status is PutStatus.REJECTED for one in results):
                self._quiet_until = time.monotonic() + QUIET_AFTER_FAILURE_S
                return

    def _staging(self, ids: list[int]) -> torch.Tensor:
        import torch

        return torch.empty((len(ids), self._rows.shape[1]), dtype=torch.uint8)

    @staticmethod
    def _parts(staged: torch.Tensor) -> list[Parts]:
        size = int(staged.shape[1])
        return [[memory_at(row.data_ptr(), size)] for row in staged]
