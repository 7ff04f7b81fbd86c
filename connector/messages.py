"""Defines what scheduler and worker side say to each other: plans of a step, reports, requests.

All of it is plain, picklable data: the two sides usually live in different processes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from kvstore.spi import BlockRef, Key


class EngineRequest(Protocol):
    """Shows what the core reads of an engine's request; it never writes one.

    Beside these, where an engine has them: `cache_salt`; `kv_transfer_params`, a mapping of what
    the sender wants done with the request's KV; `kv_hints`, whose `actions` say so too;
    `trace_headers`, a mapping; and `part_hash`, that of the prompt's tokens behind its last full
    store block, the blocks before them included, or None.
    """

    @property
    def request_id(self) -> str: ...
    @property
    def num_tokens(self) -> int:
        """Return the tokens known so far: prompt and accepted output."""
        ...

    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_computed_tokens(self) -> int:
        """Return the tokens whose KV is in the engine, before the step that is being planned."""
        ...

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """Return the chained hashes of the known tokens, one per full hash block of the layout."""
        ...


def trace_id(request: EngineRequest) -> str:
    """Return the id of the trace that the request is part of (W3C); empty where it is of none."""
    return _trace_id(getattr(request, "trace_headers", None) or {})


def _trace_id(headers: Mapping[str, str]) -> str:
    found = re.match(r"[0-9a-f]{2}-([0-9a-f]{32})-", str(headers.get("traceparent", "")))
    return found[1] if found else ""


def log_name(request: EngineRequest) -> str:
    """Return what log lines call the request."""
    return named(request.request_id, getattr(request, "trace_headers", None) or {})


def named(request_id: str, headers: Mapping[str, str]) -> str:
    """Return what log lines call a request of this id, with its trace's if it is part of one."""
    trace = _trace_id(headers)
    return f"{request_id} (trace {trace})" if trace else request_id


def job_name(job: LoadJob | SaveJob) -> str:
    """Return what log lines of workers call the request of a job."""
    return f"{job.request_id} (trace {job.trace_id})" if job.trace_id else job.request_id


BlockTables = Sequence[Sequence[int]]
"""A request's engine blocks in token order, one list per KV cache group of the layout."""


class BlockPins(Protocol):
    """Keeps engine blocks from being given to somebody else while a save reads them."""

    def pin(self, block_ids: Sequence[int]) -> None: ...
    def unpin(self, block_ids: Sequence[int]) -> None: ...


class LoadBlock(NamedTuple):
    """Names one store block, or the rest of one, on its way into the engine."""

    found: tuple[BlockRef, ...]
    """Where it is, one place per shard of the split; empty: nowhere, so that the load fails."""
    skip: int
    """Engine blocks at the head of the store block that are not needed."""
    block_ids: tuple[int, ...]
    """Engine blocks to write, in token order, following the skipped ones."""
    split: int = 0
    """Number of the group's split that the shards belong to."""
    group: int = 0
    """Number of the KV cache group in the layout."""


class LoadJob(NamedTuple):
    """Lists blocks that every worker loads for one request; each reports the job once."""

    job_id: int
    request_id: str
    blocks: tuple[LoadBlock, ...]
    timeout_s: float | None = None
    """Time after which the engine rather computes what is missing; None: the worker's own."""
    compute_s: float | None = None
    """Time that the engine takes to compute all of it; None: not known yet."""
    trace_id: str = ""
    """Id of the trace that the request is part of; empty: of none."""


class BlockRead(NamedTuple):
    """Tells how long a worker has read from one source (`BlockStore.sources`)."""

    source: str
    size_bytes: int
    """What came in that time and was right; 0: nothing."""
    took_s: float


def is_far(source: str) -> bool:
    """Return whether a source (`BlockStore.sources`) is not the memory of this host."""
    return ":" in source


class SaveBlock(NamedTuple):
    """Names one store block that workers save, each its own shard."""

    keys: tuple[Key, ...]
    """Keys, one per shard."""
    block_ids: tuple[int, ...]
    """The engine blocks that make one store block, in token order."""
    group: int = 0
    """Number of the KV cache group in the layout."""
    place: int = 0
    """Its number in the request's prefix."""
    tokens: int = 0
    """Tokens of a partial block, which has fewer engine blocks than a whole one; 0: the block is
    whole. What is stored has a whole block's size, with zeros behind the part."""


class StateBlock(NamedTuple):
    """Names an engine block in which the forward of a step leaves a state that stays."""

    group: int
    block_id: int
    num_tokens: int
    """Number of the request's tokens after which it is the state."""


Runs = tuple[tuple[tuple[Key, ...], ...], ...]
"""Keys of a part of a prefix, per group and shard."""


class SaveJob(NamedTuple):
    """Lists blocks that workers save for one request; each reports the job once, and it may end
    after the request. The engine blocks are pinned until then."""

    job_id: int
    request_id: str
    blocks: tuple[SaveBlock, ...]
    before: Runs = ()
    """Keys of the prefix that the blocks continue, per group and shard. The request used them too,
    and they are to be kept longer than what follows."""
    trace_id: str = ""
    """As that of `LoadJob`."""
    left: Runs = ()
    """Keys of windows and states that the prefix does not need any more once the blocks are stored:
    they may go first."""


@dataclass(slots=True)
class StepPlan:
    """Says what the workers do in one engine step."""

    loads: list[LoadJob] = field(default_factory=list)
    saves: list[SaveJob] = field(default_factory=list)
    dropped_loads: list[str] = field(default_factory=list)
    """Requests whose loads in flight are to end early, because they load what is from before a
    reset."""
    idle: bool = False
    """Whether no forward runs in this step, so that the worker may wait a moment for transfers."""
    reported: WorkerReport | None = None
    """Reports of all workers by now, for this step to tell the engine, where each process has a
    scheduler of its own (`LockstepScheduler`); None: the engine combines them."""


@dataclass(slots=True)
class WorkerReport:
    """Carries what one worker, or after `merge` all of them, has to say about one step."""

    finished_loads: set[str] = field(default_factory=set)
    """Requests whose load between steps ended on this worker, each exactly once, failed or not."""
    failed_requests: set[str] = field(default_factory=set)
    """Requests whose load failed at least in part, if the layout `fails_by_request`."""
    invalid_block_ids: set[int] = field(default_factory=set)
    """Otherwise the engine blocks that hold no valid KV although a load was planned into them."""
    failed_blocks: dict[int, int] = field(default_factory=dict)
    """Load job -> position of its first store block that could not be loaded."""
    ended_saves: dict[int, int] = field(default_factory=dict)
    """Save job -> how many workers no longer read its blocks, done or dropped."""
    stored_blocks: dict[int, frozenset[int]] = field(default_factory=dict)
    """Ended save job -> positions of its blocks that are in the store, as far as these
    workers are concerned: saved by them, found there, or another worker's to save."""
    ended_loads: dict[int, int] = field(default_factory=dict)
    """Load job within a step -> on how many workers it ended, failed or not."""
    vram: dict[int, frozenset[tuple[int, int]]] = field(default_factory=dict)
    """Worker -> id and epoch of the nodes whose VRAM it has open, when that has changed."""
    reads: list[BlockRead] = field(default_factory=list)
    """What loads have read since the last report, at most `READS_MAX` of a worker."""

    def merge(self, other: WorkerReport) -> WorkerReport:
        """Fold `other` into this report; the first failure of a load job wins."""
        self.finished_loads |= other.finished_loads
        self.failed_requests |= other.failed_requests
        self.invalid_block_ids |= other.invalid_block_ids
        for job_id, position in other.failed_blocks.items():
            self.failed_blocks[job_id] = min(position, self.failed_blocks.get(job_id, position))
        for job_id, workers in other.ended_saves.items():
            self.ended_saves[job_id] = self.ended_saves.get(job_id, 0) + workers
        for job_id, stored in other.stored_blocks.items():
            self.stored_blocks[job_id] = stored & self.stored_blocks.get(job_id, stored)
        for job_id, workers in other.ended_loads.items():
            self.ended_loads[job_id] = self.ended_loads.get(job_id, 0) + workers
        self.vram |= other.vram
        self.reads += other.reads
        return self

    def for_scheduler(self) -> WorkerReport | None:
        """Return the part that only the connector's own scheduler side needs; None: there is
        none."""
        mine = (self.failed_blocks, self.ended_saves, self.ended_loads, self.vram, self.reads)
        if not any(mine):
            return None
        return WorkerReport(
            failed_blocks=self.failed_blocks,
            ended_saves=self.ended_saves,
            stored_blocks=self.stored_blocks,
            ended_loads=self.ended_loads,
            vram=self.vram,
            reads=self.reads,
        )


class BlockEvent(NamedTuple):
    """Tells of one store block of one KV cache group, all shards of it."""

    stored: bool
    """False: it is not there (any more)."""
    request: EngineRequest
    """A request whose prefix the block is part of."""
    block: int
    """Its index in that prefix: it covers tokens `block * block_tokens` and on."""
    group: int
    """Number of the KV cache group in the layout."""
    block_hash: bytes
    """The request's own hash of the prefix up to the block's end, at the time of the event. A
    request whose hash there differs has other tokens by then."""
