"""Small stand-ins for an engine: a request, a block pool, KV tensors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from connector.copiers.base import KVCopier
from connector.copiers.registered import kv_memory
from connector.layout.geometry import GroupLayout, KVGeometry, StoreLayout, splits_of
from connector.layout.topology import TpKVTopology
from connector.messages import LoadBlock, LoadJob, SaveBlock, SaveJob, StepPlan, WorkerReport
from connector.scheduler.lazy_store import LazyStore
from connector.scheduler.scheduler import SchedulerCore
from connector.scheduler.settings import SchedulerSettings
from connector.stats import CountStats
from connector.worker.worker import WorkerCore
from kvstore.spi import BlockStore
from kvstore.testing.blockstore import MemoryBlockStore

ENGINE_BLOCK = 4
BLOCK = 8
GEOMETRY = KVGeometry(layers=2, heads=2, channel_bytes=16, engine_block_tokens=ENGINE_BLOCK)
PER_KEY = BLOCK // ENGINE_BLOCK
PATIENCE_S = 10.0
"""How long a test waits for a thread that should take milliseconds."""
TO_PREFILL: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What vLLM's toy proxy and llm-d's sidecar send with a prompt that is to be prefilled."""


def layout(
    topology: TpKVTopology | None = None, tp_sizes: Sequence[int] = (), **fields: Any
) -> StoreLayout:
    """Return a layout of one group of `GEOMETRY`, hashed by engine block."""
    topology = topology or TpKVTopology.of()
    splits = splits_of({"model": "m", **fields}, GEOMETRY, topology, BLOCK, tp_sizes)
    group = GroupLayout(geometry=GEOMETRY, topology=topology, splits=splits)
    return StoreLayout(block_tokens=BLOCK, hash_block_tokens=ENGINE_BLOCK, groups=(group,))


def hashes_of(tokens: Sequence[int], size: int = ENGINE_BLOCK) -> list[bytes]:
    """Return the chained hashes of the full engine blocks of `tokens`."""
    out: list[bytes] = []
    for i in range(len(tokens) // size):
        raw = repr(list(tokens[i * size : (i + 1) * size])).encode()
        out.append(blake2b((out[-1] if out else b"") + raw, digest_size=16).digest())
    return out


@dataclass
class FakeRequest:
    request_id: str
    tokens: list[int]
    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    kv_transfer_params: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.num_prompt_tokens or len(self.tokens)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def block_hashes(self) -> list[bytes]:
        return hashes_of(self.tokens)


def prompt(blocks: int, extra: int = 2, seed: int = 0) -> FakeRequest:
    """Return tokens of `seed` alone that fill so many store blocks, and `extra` more."""
    tokens = [seed * 1000 + i for i in range(blocks * BLOCK + extra)]
    return FakeRequest(f"r{seed}", tokens)


@dataclass
class FakePins:
    """Counts references per engine block, as an engine's pool does."""

    references: dict[int, int] = field(default_factory=dict)

    def pin(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            self.references[block_id] = self.references.get(block_id, 0) + 1

    def unpin(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            self.references[block_id] -= 1
            if self.references[block_id] == 0:
                del self.references[block_id]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.001)


class Side:
    """A scheduler side over the model of a store, with the calls an engine makes."""

    def __init__(
        self,
        store: MemoryBlockStore,
        *,
        topology: TpKVTopology | None = None,
        clock: Callable[[], float] = time.monotonic,
        pinned_blocks_max: int = 1000,
        lookup_timeout_s: float = PATIENCE_S,
        tp_sizes: Sequence[int] = (),
        **settings: Any,
    ) -> None:
        self.store = store
        self.layout = layout(topology, tp_sizes)
        self.pins = FakePins()
        self.core = SchedulerCore(
            LazyStore(lambda: store),
            self.layout,
            SchedulerSettings(
                lookup_timeout_s=lookup_timeout_s,
                null_block_id=0,
                **{"pinned_fraction": 1.0, **settings},
            ),
            clock,
        )
        if settings.get("loads", True):
            wait_for(lambda: store.match_calls == 1, "the lookup thread to have connected")
            store.match_calls = 0
        workers = (topology or TpKVTopology.of()).workers
        self.core.bind_pins(self.pins, workers, pinned_blocks_max)
        self.tables: dict[str, list[int]] = {}

    def match(self, request: FakeRequest, computed: int = 0) -> int:
        """Return the final answer, asking again as an engine does."""
        answer: list[int | None] = [None]

        def asked() -> bool:
            answer[0] = self.core.match(request, computed)
            self.core.plan_step([], [], self.table)
            return answer[0] is not None

        wait_for(asked, "an answer")
        assert answer[0] is not None
        return answer[0]

    def step(self, *scheduled: tuple[FakeRequest, int], preempted: Sequence[str] = ()) -> StepPlan:
        plan = self.core.plan_step(scheduled, preempted, self.table)
        for request, tokens in scheduled:
            request.num_computed_tokens += tokens
        return plan

    def table(self, request_id: str) -> list[list[int]] | None:
        table = self.tables.get(request_id)
        return None if table is None else [table]

    def put(self, request: FakeRequest, blocks: int, shards: Sequence[int] = (0,)) -> None:
        """Have the store hold the first `blocks` store blocks of a request's prompt."""
        for shard in shards:
            namespace = self.layout.groups[0].namespaces[shard]
            keys = self.keys(request, shard)
            for key in keys[:blocks]:
                (reservation,) = self.store.reserve(
                    [key], GEOMETRY.token_bytes * BLOCK, namespace.id
                )
                self.store.commit([reservation])  # type: ignore[list-item]

    def keys(self, request: FakeRequest, shard: int = 0) -> list[bytes]:
        return (
            self.layout.groups[0]
            .namespaces[shard]
            .engine_keys(request.block_hashes, self.layout.hashes_per_key)
        )


def copier_of(kv_caches: dict[str, Any], geometry: KVGeometry, block_tokens: int) -> KVCopier:
    """Return the copier of one group's layers."""
    return kv_memory([(kv_caches, geometry)], block_tokens).groups[0]


def kv_tensors(blocks: int, order: str = "HND", tokens: int = ENGINE_BLOCK, seed: int = 0) -> Any:
    """Return layer tensors [B, H, N, C] of `GEOMETRY` with random bytes, in one allocation."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    heads, channels = GEOMETRY.heads, GEOMETRY.channel_bytes // 2
    shape = (
        (GEOMETRY.layers, blocks, heads, tokens, channels)
        if order == "HND"
        else (GEOMETRY.layers, blocks, tokens, heads, channels)
    )
    raw = torch.randint(-30000, 30000, shape, generator=generator, dtype=torch.int16)
    layers = raw if order == "HND" else raw.transpose(2, 3)
    return {f"layer{i}": layers[i].view(torch.bfloat16) for i in range(GEOMETRY.layers)}


def bits(tensors: Any) -> Any:
    """Return all layers as integers, so that NaNs compare."""
    import torch

    return torch.stack([layer.contiguous().view(torch.int16) for layer in tensors.values()])


class Worker:
    """A worker side over the model of a store, and its KV."""

    def __init__(
        self,
        store: BlockStore,
        *,
        blocks: int = 32,
        seed: int = 0,
        rank: int = 0,
        saves: bool = True,
        timeout_s: float = PATIENCE_S,
        topology: TpKVTopology | None = None,
        clock: Callable[[], float] = time.monotonic,
        kind: type[WorkerCore] = WorkerCore,
        device: str = "cpu",
    ) -> None:
        self.kv = {name: kv.to(device) for name, kv in kv_tensors(blocks, seed=seed).items()}
        self.core = kind(
            LazyStore(lambda: store),
            layout(topology),
            rank=rank,
            saves=saves,
            load_timeout_s=timeout_s,
            save_timeout_s=timeout_s,
            clock=clock,
        )
        self.core.register_kv_caches(self.kv)

    def until(self, enough: Callable[[WorkerReport], bool]) -> WorkerReport:
        """Poll as an engine does until what was reported is enough."""
        total = WorkerReport()

        def done() -> bool:
            total.merge(self.core.poll(0.01))
            return enough(total)

        wait_for(done, "a report")
        return total


def blocks_of(worker: Worker) -> Any:
    """Return what copies a worker's own KV blocks, one for each group."""
    return worker.core._blocks


def keys(count: int, shard: int = 0, topology: TpKVTopology | None = None) -> list[bytes]:
    hashes = hashes_of(list(range(count * BLOCK)))
    return layout(topology).groups[0].namespaces[shard].engine_keys(hashes, PER_KEY)


def save_job(count: int, first_block_id: int = 1, job_id: int = 0) -> SaveJob:
    blocks = [
        SaveBlock(
            (key,), tuple(range(first_block_id + i * PER_KEY, first_block_id + (i + 1) * PER_KEY))
        )
        for i, key in enumerate(keys(count))
    ]
    return SaveJob(job_id, "s", tuple(blocks))


def save(worker: Worker, job: SaveJob) -> None:
    worker.core.start_saves([job])
    worker.until(lambda report: job.job_id in report.ended_saves)


def load_job(
    store: BlockStore, count: int, first_block_id: int = 11, name: str = "q", job_id: int = 0
) -> LoadJob:
    found = store.match(keys(count))
    assert len(found) == count
    blocks = [
        LoadBlock(
            (f,), 0, tuple(range(first_block_id + i * PER_KEY, first_block_id + (i + 1) * PER_KEY))
        )
        for i, f in enumerate(found)
    ]
    return LoadJob(job_id, name, tuple(blocks))


def loaded(worker: Worker, name: str = "q") -> WorkerReport:
    return worker.until(lambda report: name in report.finished_loads)


def taken(take: Callable[[], CountStats | None]) -> dict[str, Any]:
    """Return all that is counted now, samples as how many there are."""
    stats = take()
    counts = stats.to_dict() if stats is not None else {}
    return {
        name.removeprefix("kvstore_"): len(value) if isinstance(value, list) else value
        for name, value in counts.items()
        if value
    }


class Hold:
    """A place where a thread of the code under test waits until the test lets it go."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._go = threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        assert self._go.wait(PATIENCE_S)

    def await_reached(self) -> None:
        assert self.reached.wait(PATIENCE_S)

    def release(self) -> None:
        self._go.set()


def hinder(store: MemoryBlockStore, worker: Worker, reason: str) -> Hold:
    """Have what the worker moves of two blocks fail for this reason. What stands still for it goes
    on when the test lets it."""
    hold = Hold()
    if reason == "node-dead":
        store.node_down = True
    elif reason == "error":
        store.on_reserve = store.on_view = lambda: 1 // 0 and None  # type: ignore[func-returns-value]
    elif reason == "no-store":
        worker.core._store.close()
    elif reason == "too-busy":
        worker.core._blocks = []  # as before the engine has given its memory
    elif reason == "load-failed":
        store.evict(keys(2)[1])
    elif reason in ("deadline", "aborted"):
        store.on_reserve = store.on_view = hold
    return hold
