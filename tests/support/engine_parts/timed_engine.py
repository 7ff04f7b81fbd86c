"""An engine that computes so many tokens a second, one request after another, around a real
scheduler side and a real worker side.

Over a `TimedStore` time is virtual: what lies farther than this host's memory comes as fast as a
`Link` says. Only the threads are real; nothing waits for the time that passes. Over any other store
time is real, and the engine sleeps where it would compute.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from connector_parts import Clock, FakeRequest, wait_for

from connector.layout.geometry import GroupLayout, KVGeometry, StoreLayout, splits_of
from connector.layout.topology import TpKVTopology
from connector.messages import StepPlan, WorkerReport
from connector.scheduler.lazy_store import LazyStore
from connector.scheduler.scheduler import SchedulerCore
from connector.scheduler.settings import SchedulerSettings
from connector.worker.worker import WorkerCore
from kvstore import PutResult
from kvstore.spi import BlockRef, BlockStore, BlockView, Key, Tier
from kvstore.testing.blockstore import MemoryBlockStore

ENGINE_BLOCK = 4
BLOCK = 64
PROMPT_TOKENS_MAX = 4096
STEP_TOKENS = 512
KV_BYTES_PER_TOKEN = 128 << 10
"""Of the model whose times are played. What the tests move is smaller in one proportion."""
HOST_BYTES_PER_S = 20e9
GEOMETRY = KVGeometry(layers=1, heads=1, channel_bytes=8, engine_block_tokens=ENGINE_BLOCK)


@dataclass
class Link:
    """How a tier is reached: a rate, a latency for each read, times without a byte, and errors."""

    bytes_per_s: float
    latency_s: float = 0.0005
    stalls: Sequence[tuple[float, float]] = ()
    """(from, to), in seconds of the clock."""
    changes: Sequence[tuple[float, float]] = ()
    """(from, bytes per second)."""
    broken: Callable[[Key], bool] = lambda key: False
    """Which blocks cannot be read."""

    def after(self, now: float, size_bytes: float) -> float:
        """Return when so many bytes have come that are asked for at `now`."""
        for begin, end in self.stalls:
            if begin <= now < end:
                now = end
        rate = self.bytes_per_s
        for begin, changed in self.changes:
            rate = changed if now >= begin else rate
        return now + size_bytes / rate


class TimedStore(MemoryBlockStore):
    """The model of a store, with tiers that take time."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.links: dict[str, Link] = {}
        """Tier -> how it is reached; tiers without one are as fast as this host's memory."""
        self.absent = False
        """Whether what is in a tier with a link counts as absent."""
        self.idle = threading.Event()
        self.idle.set()

    def tier_of(self, key: Key) -> Tier:
        return self.elsewhere.get(key, Tier.HOST)

    def _indexed(self, key: Key) -> BlockRef | None:
        if self.absent and self.tier_of(key) in self.links:
            return None
        return super()._indexed(key)

    def views(
        self, found: Sequence[BlockRef], staging: memoryview | None, timeout_s: float | None = None
    ) -> Iterator[BlockView | None]:
        deadline = self.clock.now + (1e9 if timeout_s is None else timeout_s)
        self.idle.clear()
        try:
            links: set[str] = set()
            for one in found:
                tier = self.tier_of(one.key)
                link = self.links.get(tier, Link(HOST_BYTES_PER_S, 0.0))
                if tier not in links:
                    links.add(tier)
                    self._pass(link.latency_s, deadline)
                arrives = link.after(self.clock.now, BLOCK * KV_BYTES_PER_TOKEN)
                late = arrives > deadline
                self.clock.now = max(self.clock.now, min(arrives, deadline))
                yield None if late or link.broken(one.key) else self.view(one)
        finally:
            self.idle.set()

    def _pass(self, seconds: float, deadline: float) -> None:
        self.clock.now = max(self.clock.now, min(self.clock.now + seconds, deadline))


class TimedEngine:
    """Computes `tokens_per_s`, one request after the other."""

    def __init__(
        self,
        tokens_per_s: float,
        store: BlockStore | None = None,
        geometry: KVGeometry = GEOMETRY,
    ) -> None:
        import torch

        self.tokens_per_s = tokens_per_s
        virtual = Clock()
        self.timed = TimedStore(virtual)
        self.store: BlockStore = self.timed if store is None else store
        self.now: Callable[[], float] = virtual if store is None else time.monotonic
        self._geometry = geometry
        splits = splits_of({"model": "timed"}, geometry, TpKVTopology.of(), BLOCK)
        group = GroupLayout(geometry=geometry, topology=TpKVTopology.of(), splits=splits)
        self.layout = StoreLayout(
            block_tokens=BLOCK, hash_block_tokens=ENGINE_BLOCK, groups=(group,)
        )
        lazy = LazyStore(lambda: self.store)
        settings = SchedulerSettings(saves=False, null_block_id=0, lookup_timeout_s=10.0)
        self.core = SchedulerCore(lazy, self.layout, settings, self.now)
        self.worker = WorkerCore(
            lazy,
            self.layout,
            rank=0,
            saves=False,
            load_timeout_s=60.0,
            save_timeout_s=60.0,
            clock=self.now,
        )
        blocks = PROMPT_TOKENS_MAX // ENGINE_BLOCK + 1
        kv = torch.zeros((blocks, 1, ENGINE_BLOCK, geometry.channel_bytes), dtype=torch.int8)
        self.worker.register_kv_caches({"layer": kv})
        self.loaded_tokens = 0
        self.failed_loads = 0

    def keys_of(self, request: FakeRequest) -> list[Key]:
        namespace = self.layout.groups[0].namespaces[0]
        return namespace.engine_keys(request.block_hashes, self.layout.hashes_per_key)

    def put(
        self, request: FakeRequest, tiers: Sequence[Tier], store: BlockStore | None = None
    ) -> None:
        """Have the first blocks of a prompt lie in these tiers; in `store`, in all there are."""
        namespace = self.layout.groups[0].namespaces[0]
        for key, tier in zip(self.keys_of(request), tiers, strict=False):
            into = store or self.store
            (slot,) = into.reserve([key], self._geometry.token_bytes * BLOCK, namespace.id)
            assert not isinstance(slot, PutResult)
            into.commit([slot])
            self.timed.here.add(key)
            self.timed.elsewhere[key] = tier

    def passes(self, seconds: float) -> None:
        """Let so much time pass."""
        if self.store is self.timed:
            self.timed.clock.now += seconds
        else:
            time.sleep(seconds)

    def first_token_s(self, request: FakeRequest) -> float:
        """Return how long the first token of a request takes that arrives now."""
        began = self.now()
        tokens = None
        while tokens is None:
            tokens = self.core.match(request, 0)
            self._step()
        table = list(range(1, PROMPT_TOKENS_MAX // ENGINE_BLOCK + 1))
        self.core.allocated(request, lambda: [table], tokens)
        plan = self._step()
        if plan.loads:
            tokens = self._loaded(plan, tokens)
        self.loaded_tokens += tokens
        request.num_computed_tokens = min(tokens, request.num_tokens - 1)
        while request.num_computed_tokens < request.num_tokens:
            count = min(STEP_TOKENS, request.num_tokens - request.num_computed_tokens)
            self._step((request, count))
            self.passes(count / self.tokens_per_s)
            request.num_computed_tokens += count
        took_s = self.now() - began
        self._step()
        self.core.finished(request.request_id)
        return took_s

    def _step(self, *scheduled: tuple[FakeRequest, int]) -> StepPlan:
        report = self.worker.poll()
        self.core.report(report)
        return self.core.plan_step(scheduled, [], lambda _: None)

    def _loaded(self, plan: StepPlan, tokens: int) -> int:
        """Carry out the load; return the leading tokens that are in place."""
        (job,) = plan.loads
        self.worker.start_loads(plan.loads)
        total = WorkerReport()

        def ended() -> bool:
            self.timed.idle.wait(1.0)
            total.merge(self.worker.poll(0.001))
            return job.request_id in total.finished_loads

        wait_for(ended, "the load to end")
        self.core.report(total)
        self.core.loads_ended([job.request_id])
        if not total.invalid_block_ids:
            return tokens
        self.failed_loads += 1
        return (min(total.invalid_block_ids) - 1) * ENGINE_BLOCK

    def best_s(self, request: FakeRequest, tiers: Sequence[Tier]) -> float:
        """Return the time of who knows how fast every tier is now: the best end of the load."""
        best = request.num_tokens / self.tokens_per_s
        began = now = self.now()
        last = None
        for number, (tier, key) in enumerate(zip(tiers, self.keys_of(request), strict=False), 1):
            link = self.timed.links.get(tier, Link(HOST_BYTES_PER_S, 0.0))
            if link.broken(key):
                break
            now += link.latency_s if tier != last else 0.0
            now, last = link.after(now, BLOCK * KV_BYTES_PER_TOKEN), tier
            left = max(1, request.num_tokens - number * BLOCK)
            best = min(best, now - began + left / self.tokens_per_s)
        return best

    def close(self) -> None:
        self.core.close()
        self.worker.close()
