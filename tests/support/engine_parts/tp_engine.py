"""An engine of several tensor-parallel workers, whose KV bytes follow from the tokens alone.

Every byte of a token's KV depends on all tokens up to it, its layer and its head
in the whole model, so that engines of all sizes agree on what must be where.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal

import numpy as np
from connector_parts import PATIENCE_S, FakePins, wait_for

from connector.build import EngineShape, GroupShape
from connector.layout.block_hashes import extend
from connector.layout.geometry import KVGeometry
from connector.layout.topology import HeadRange, TpKVTopology
from connector.messages import LoadJob, WorkerReport
from connector.scheduler.lazy_store import LazyStore
from connector.scheduler.scheduler import SchedulerCore
from connector.scheduler.settings import SchedulerSettings
from connector.settings import ConnectorSettings
from connector.worker.layerwise_worker import LayerwiseWorker
from connector.worker.worker import WorkerCore
from kvstore.testing.blockstore import MemoryBlockStore

POOL_BLOCKS = 40


@dataclass(frozen=True)
class Model:
    layers: int = 2
    heads: int = 4
    """KV heads of the whole model; 1 for latent attention."""
    channel_bytes: int = 8
    dtype: str = "bfloat16"
    window_tokens: int | None = None
    """With one, the model has a second group of layers with this window."""
    window_heads: int | None = None
    """KV heads of those layers; None: as many as the others."""

    def heads_of(self, group: int) -> int:
        return self.window_heads or self.heads if group else self.heads


@dataclass
class TokenRequest:
    """A request that hashes its own store blocks, as the vLLM adapter's do."""

    request_id: str
    tokens: list[int]
    block_tokens: int
    num_computed_tokens: int = 0
    salt: str | None = None
    kv_transfer_params: dict[str, Any] | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.tokens)

    @property
    def block_hashes(self) -> list[bytes]:
        return extend([], self.tokens, self.block_tokens, lambda first, _: self.salt)


def truth(model: Model, tokens: Sequence[int], group: int = 0) -> Any:
    """Return the KV bytes `[layer, head, token, C]` of a prompt."""
    shape = (model.layers, model.heads_of(group), len(tokens), model.channel_bytes)
    out = np.zeros(shape, np.uint8)
    state = b""
    for i, token in enumerate(tokens):
        state = blake2b(state + b"%d" % token, digest_size=16).digest()
        seed = int.from_bytes(state[:8], "little") + group
        out[:, :, i] = np.random.default_rng(seed).integers(0, 256, out.shape[:2] + out.shape[3:])
    return out


class TpEngine:
    def __init__(
        self,
        store: MemoryBlockStore,
        model: Model,
        tp_size: int,
        *,
        engine_block: int = 4,
        block_tokens: int = 8,
        order: str = "HND",
        tp_sizes: Sequence[int] = (1, 2, 4, 8),
        seed: int = 0,
        layerwise: bool = False,
        shape: EngineShape | None = None,
        payload_order: Literal["heads", "tokens"] = "heads",
        window_interval_tokens: int | None = None,
    ) -> None:
        """`shape` is what an adapter has read of such an engine; None: what is right."""
        self.model, self.store, self.engine_block = model, store, engine_block
        self.layer_names = [f"l{i}" for i in range(model.layers)]
        """Of each group."""
        self.block_tokens = block_tokens
        self._rng = random.Random(seed)
        windows = [None] if model.window_tokens is None else [None, model.window_tokens]
        groups = [self._group(i, window, tp_size) for i, window in enumerate(windows)]
        shape = shape or EngineShape(groups=tuple(groups), workers=tp_size, model={"model": "m"})
        settings = ConnectorSettings(
            block_tokens=block_tokens, tp_sizes=list(tp_sizes), payload_order=payload_order
        )
        self.layout = shape.layout(settings)
        self.scheduler = SchedulerCore(
            LazyStore(lambda: store),
            self.layout,
            SchedulerSettings(
                lookup_timeout_s=PATIENCE_S,
                null_block_id=0,
                layerwise=layerwise,
                window_interval_tokens=window_interval_tokens,
            ),
        )
        self.pins = FakePins()
        self.scheduler.bind_pins(self.pins, tp_size, 1000)
        self.workers = [
            (LayerwiseWorker if layerwise else WorkerCore)(
                LazyStore(lambda: store),
                self.layout,
                rank=rank,
                saves=True,
                load_timeout_s=PATIENCE_S,
                save_timeout_s=PATIENCE_S,
            )
            for rank in range(tp_size)
        ]
        self.heads = [
            [self._heads(i, rank, tp_size) for i in range(len(groups))] for rank in range(tp_size)
        ]
        # Per worker and group: [layer, block, head, token, C], whatever the memory's order.
        self.kv = [[self._memory(g.geometry, order) for g in groups] for _ in self.workers]
        for worker, per_group in zip(self.workers, self.kv, strict=True):
            worker.register_kv_caches(*(self._layers(kv) for kv in per_group))

    def _heads(self, group: int, rank: int, tp_size: int) -> HeadRange:
        """Return the heads that a worker holds, as engines place them, whatever an adapter
        believes."""
        total = self.model.heads_of(group)
        return HeadRange(rank * total // tp_size, max(1, total // tp_size))

    def _group(self, number: int, window: int | None, tp_size: int) -> GroupShape:
        heads = self.model.heads_of(number)
        topology = TpKVTopology.of(tp_size, 1, heads)
        geometry = KVGeometry(
            layers=self.model.layers,
            heads=heads // topology.tp_shards,
            channel_bytes=self.model.channel_bytes,
            engine_block_tokens=self.engine_block,
        )
        return GroupShape(geometry=geometry, topology=topology, number=number, window_tokens=window)

    def _memory(self, geometry: KVGeometry, order: str) -> Any:
        shape = [geometry.layers, POOL_BLOCKS, geometry.heads, self.engine_block]
        if order == "NHD":
            shape[2], shape[3] = shape[3], shape[2]
        raw = np.full((*shape, geometry.channel_bytes), 0xA5, np.uint8)
        return raw if order == "HND" else raw.transpose(0, 1, 3, 2, 4)

    def _layers(self, kv: Any) -> dict[str, Any]:
        import torch

        dtype = getattr(torch, self.model.dtype)
        layers = zip(self.layer_names, kv, strict=True)
        return {name: torch.from_numpy(layer).view(dtype) for name, layer in layers}

    def request(self, name: str, tokens: list[int], salt: str | None = None) -> TokenRequest:
        return TokenRequest(name, tokens, self.block_tokens, salt=salt)

    def tables(self, tokens: int) -> list[list[int]]:
        """Draw random blocks of a pool that the groups share, never block 0."""
        count = -(-tokens // self.engine_block)
        ids = self._rng.sample(range(1, POOL_BLOCKS), count * len(self.layout.groups))
        return [ids[i * count : (i + 1) * count] for i in range(len(self.layout.groups))]

    def fill(self, tokens: list[int], tables: list[list[int]]) -> None:
        """Write what a forward over all of `tokens` would."""
        for group, table in enumerate(tables):
            expected = truth(self.model, tokens, group)
            for heads, kv in zip(self.heads, self.kv, strict=True):
                for i in range(len(tokens)):
                    block, offset = divmod(i, self.engine_block)
                    mine = expected[:, heads[group].first : heads[group].end, i]
                    kv[group][:, table[block], :, offset] = mine

    def wipe(self) -> None:
        """Make the memory as it was before anything was computed or loaded."""
        for per_group in self.kv:
            for kv in per_group:
                kv[...] = 0xA5

    def save(self, tokens: list[int], salt: str | None = None) -> None:
        """Compute a prompt and save its full blocks."""
        request = self.request("save", tokens, salt)
        tables = self.tables(len(tokens))
        self.fill(tokens, tables)
        plan = self.scheduler.plan_step([(request, len(tokens))], [], lambda _: tables)
        for worker in self.workers:
            for name in self.layer_names:
                worker.layer_written(name, plan.saves)
            worker.start_saves(plan.saves)
        wanted = {job.job_id: len(self.workers) for job in plan.saves}
        total = self._until(lambda report: report.ended_saves == wanted)
        self.scheduler.report(total)
        self.scheduler.finished("save")
        assert not self.pins.references

    def match(self, request: TokenRequest) -> int:
        answer: list[int | None] = [None]

        def asked() -> bool:
            answer[0] = self.scheduler.match(request, 0)
            self.scheduler.plan_step([], [], lambda _: None)
            return answer[0] is not None

        wait_for(asked, "an answer")
        assert answer[0] is not None
        return answer[0]

    def load(
        self, tokens: list[int], salt: str | None = None
    ) -> tuple[int, list[list[int]], list[LoadJob], WorkerReport]:
        """Load once; return (tokens offered, block tables, jobs, all workers' words)."""
        request = self.request("load", tokens, salt)
        offered = self.match(request)
        tables = self.tables(len(tokens))
        for group, table in zip(self.layout.groups, tables, strict=True):
            if group.window_tokens is not None:  # as an engine leaves out what it will not read
                skipped = max(0, offered - group.window_tokens + 1) // self.engine_block
                table[:skipped] = [0] * skipped
        self.scheduler.allocated(request, lambda: tables, offered)
        loads = self.scheduler.plan_step([], [], lambda _: None).loads
        for worker in self.workers:
            worker.start_loads(loads)
            for name in self.layer_names:
                worker.wait_layer_load(name)
        reports = [0]

        def enough(report: WorkerReport) -> bool:
            return reports[0] == len(self.workers)

        total = WorkerReport()
        if loads:
            total = self._until(enough, reports)
        self.scheduler.report(total)
        self.scheduler.loads_ended(["load"])
        self.scheduler.finished("load")
        return offered, tables, loads, total

    def _until(self, enough: Any, ended_loads: list[int] | None = None) -> WorkerReport:
        total = WorkerReport()

        def done() -> bool:
            for worker in self.workers:
                report = worker.poll(0.002)
                if ended_loads is not None:
                    ended_loads[0] += len(report.finished_loads) + len(report.ended_loads)
                total.merge(report)
            return bool(enough(total))

        wait_for(done, "the workers' reports")
        return total

    def check(self, tokens: list[int], loaded: int, tables: list[list[int]]) -> None:
        """Check that loaded tokens are the truth byte for byte, and no other block was touched."""
        for group, table in enumerate(tables):
            expected = truth(self.model, tokens[:loaded], group)
            first = table.count(0)
            used = table[first : loaded // self.engine_block]
            others = [i for i in range(POOL_BLOCKS) if i not in used]
            for heads, kv in zip(self.heads, self.kv, strict=True):
                got = kv[group]
                assert (got[:, others] == 0xA5).all()
                for i, block in enumerate(used, first):
                    span = slice(i * self.engine_block, (i + 1) * self.engine_block)
                    mine = expected[:, heads[group].first : heads[group].end, span]
                    assert (got[:, block] == mine).all()

    def close(self) -> None:
        self.scheduler.close()
        for worker in self.workers:
            worker.close()
