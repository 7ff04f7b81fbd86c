"""Lets one scheduler side decide for several, where every process of an engine has its own.

vLLM's `external_launcher` (torchrun) puts a whole engine into each process of a tensor- or
pipeline-parallel group: a scheduler, and the worker of that rank. The engines stay together
because all are given the same requests in the same order, and schedule by nothing else. A store
breaks that: what it answers, and when, and when a load or a save ends, is each process's own.

So the first process, the leader, alone looks up and plans, over an ordinary `SchedulerCore`; the
others do what it says, whatever they would have found. What a worker reports counts when all
processes know it, in the same step. They talk at two points that schedulers in lock step reach in
the same order:

- `match`: the leader's answer, "not yet" included;
- `plan_step`, once a step: the leader's plan, and what each worker has reported until then.

Never within a forward: there a pipeline stage waits for the one before it. Reports therefore
count one step later than where one process gathers them.

At both points all compare what they were asked: tokens, by the hash of the prefix, and engine
blocks. Processes that were given different prompts, or other weights, compute nonsense without a
store too, but one would keep it (rule 1): they all see the same difference, and all raise.

Every call that changes the engine (reset, sleep, new weights) must reach all processes, as every
request must. A process that is gone ends the wait of the others: by its connection, or after
`LOCKSTEP_TIMEOUT_S`. They raise, for nobody can know what the others went on with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from connector.messages import (
    BlockEvent,
    BlockPins,
    BlockRead,
    BlockTables,
    EngineRequest,
    LoadBlock,
    LoadJob,
    Runs,
    SaveBlock,
    SaveJob,
    StateBlock,
    StepPlan,
    WorkerReport,
)
from connector.scheduler.saving.ledger import NoPins, SaveLedger
from kvstore import Explanation, InternalError, UsageError
from kvstore.spi import BlockRef, Tier

if TYPE_CHECKING:
    from connector.layout.geometry import StoreLayout
    from connector.scheduler.lockstep_group import Exchange
    from connector.scheduler.scheduler import SchedulerCore
    from connector.stats import CountStats


class LockstepScheduler:
    """Answers the calls of `SchedulerCore` in each process of an engine."""

    def __init__(
        self, exchange: Exchange, layout: StoreLayout, lead: Callable[[], SchedulerCore]
    ) -> None:
        """Agree with the other processes. `lead` makes the scheduler side that decides; it is
        called in the leader only.

        Raises `UsageError` in all processes when they would not share their blocks.
        """
        self._exchange = exchange
        self._block_tokens = layout.block_tokens
        self._ledger = SaveLedger(NoPins(), workers=1, pinned_blocks_max=0)
        """The ledger of a follower; the leader's is in its core."""
        self._workers = 0
        self._allocated: list[tuple[str, int, int]] = []
        """Allocations since the last step: request, tokens to load, digest of its blocks."""
        self._compared: dict[str, tuple[int, int]] = {}
        """Hashes, and store blocks of its table, of each request that is scheduled."""
        self._loading: dict[int, str] = {}
        """Load job -> this process's name of the request, until the load has ended in all
        processes."""
        self._loads_left: dict[int, int] = {}
        self._loads_failed: set[int] = set()
        self._own = WorkerReport()
        """Reports that the others have not had yet."""
        self._agreed = WorkerReport()
        """Reports that all processes have given, and the engine has not had yet."""
        names = [namespace.fingerprint for namespace in layout.all_namespaces()]
        agreed_ids = self._agree("namespaces", names, uuid4().hex)
        self.engine_id: str = agreed_ids[0]
        """An id that is the same in all processes of this engine, and in no other engine."""
        self._core = lead() if exchange.leads else None

    def _agree(self, what: str, asked: Any, message: Any = None) -> list[Any]:
        """Return what each process says, once all have been asked the same."""
        answers = self._exchange([what, asked, message])
        first = answers[0]
        for place, answer in enumerate(answers):
            if answer[:2] != first[:2]:
                raise UsageError(
                    "external_launcher",
                    f"{answer[0]} in process {place}, {first[0]} in process 0",
                    _MUST_AGREE if answer[0] != "namespaces" else _MUST_SHARE,
                )
        return [answer[2] for answer in answers]

    def bind_pins(
        self,
        pins: BlockPins,
        workers: int,
        num_blocks: int,
        forget: Callable[[set[int]], None] = lambda _: None,
    ) -> None:
        """Do as `SchedulerCore.bind_pins` does. Raises `UsageError` where engines have pools of
        different sizes: their schedulers would part when the smaller one is full."""
        self._agree("engine blocks", num_blocks)
        self._workers = workers
        if self._core is not None:
            self._core.bind_pins(pins, workers, num_blocks, forget)
        else:
            self._ledger = SaveLedger(pins, workers, num_blocks)

    # Loads

    def on_new_request(self, request: EngineRequest, *, loads: bool = True) -> None:
        if self._core is not None:
            self._core.on_new_request(request, loads=loads)

    def match(self, request: EngineRequest, num_computed_tokens: int) -> int | None:
        core = self._core
        tokens = core.match(request, num_computed_tokens) if core is not None else None
        asked = [num_computed_tokens, request.num_tokens, *_last(request.block_hashes)]
        answer: int | None = self._agree("a prompt", asked, tokens)[0]
        return answer

    def allocated(
        self, request: EngineRequest, block_ids: Callable[[], BlockTables], num_tokens: int
    ) -> None:
        if num_tokens > 0:
            self._allocated.append((request.request_id, num_tokens, _digest(block_ids())))
        if self._core is not None:
            self._core.allocated(request, block_ids, num_tokens)

    # Steps

    def plan_step(
        self,
        scheduled: Iterable[tuple[EngineRequest, int]],
        preempted: Iterable[str],
        block_ids: Callable[[str], BlockTables | None],
        states: Callable[[str], Sequence[StateBlock]] = lambda _: (),
    ) -> StepPlan:
        """Return the leader's plan, with the reports of all workers that this step is to tell."""
        scheduled, preempted = list(scheduled), list(preempted)
        for request_id in preempted:
            self._compared.pop(request_id, None)
        allocated, self._allocated = self._allocated, []
        names = [name for name, _, _ in allocated] + [r.request_id for r, _ in scheduled]
        asked = [
            len(preempted),
            [[tokens, digest] for _, tokens, digest in allocated],
            [self._scheduled(request, tokens, block_ids) for request, tokens in scheduled],
        ]
        plan = StepPlan(idle=not scheduled)
        theirs = None
        if self._core is not None:
            plan = self._core.plan_step(scheduled, preempted, block_ids, states)
            theirs = [names, plan.loads, plan.saves, self._jobs_of(plan.dropped_loads)]
        answers = self._agree("a step", asked, [self._take_own(), theirs])
        if self._core is None:
            self._follow(plan, dict(zip(answers[0][1][0], names, strict=True)), answers[0][1])
        for load in plan.loads:
            self._loading[load.job_id] = load.request_id
            self._loads_left[load.job_id] = self._workers
        self._settle([answer[0] for answer in answers])
        plan.reported, self._agreed = self._agreed, WorkerReport()
        return plan

    def _scheduled(
        self,
        request: EngineRequest,
        num_tokens: int,
        block_ids: Callable[[str], BlockTables | None],
    ) -> list[Any]:
        """Return what all must know alike of a request in this step: of its tokens and its blocks
        what has come since the last one, since a step has many requests and most only decode."""
        start = request.num_computed_tokens
        last = _last(request.block_hashes)
        blocks = (start + num_tokens) // self._block_tokens
        seen = self._compared.get(request.request_id, (-1, -1))
        self._compared[request.request_id] = (last[0], blocks)
        digest = None if blocks == seen[1] else _digest(block_ids(request.request_id) or ())
        return [start, num_tokens, last if last[0] != seen[0] else None, digest]

    def _jobs_of(self, requests: Iterable[str]) -> list[int]:
        jobs = {name: job_id for job_id, name in self._loading.items()}
        return [jobs[name] for name in requests if name in jobs]

    def _follow(self, plan: StepPlan, own: dict[str, str], message: list[Any]) -> None:
        """Fill `plan` from the leader's message, with this process's names of requests, which vLLM
        draws at random."""
        _, loads, saves, dropped = message
        plan.loads = [_load_job(load, own) for load in loads]
        plan.dropped_loads = [self._loading[job_id] for job_id in dropped]
        for save in saves:
            job = _save_job(save, own)
            if self._ledger.open(job.request_id, job.blocks).job_id != job.job_id:
                raise InternalError(f"save job {job.job_id} of the leader is another one here")
            plan.saves.append(job)

    # What came back

    def report(self, report: WorkerReport) -> None:
        """Take what this process's own worker says; it counts when the others know."""
        self._own.merge(report)

    def settle(self) -> None:
        """Tell the others what was reported and hear theirs, between steps and in all processes."""
        self._settle(self._agree("reports", None, self._take_own()))

    def _take_own(self) -> list[Any]:
        own, self._own = self._own, WorkerReport()
        return [
            self._jobs_of(own.finished_loads),
            self._jobs_of(own.failed_requests),
            list(own.invalid_block_ids),
            own.failed_blocks,
            own.ended_saves,
            {job_id: list(stored) for job_id, stored in own.stored_blocks.items()},
            {rank: list(there) for rank, there in own.vram.items()},
            own.reads,
        ]

    def _settle(self, reports: Iterable[list[Any]]) -> None:
        """Merge reports as an executor puts its workers' words together: a load has ended when it
        has on every worker, all else counts at once."""
        merged = WorkerReport()
        for finished, failed, invalid, failed_blocks, ended_saves, stored, vram, reads in reports:
            self._loads_failed.update(failed)
            for job_id in finished:
                self._loads_left[job_id] -= 1
            merged.merge(
                WorkerReport(
                    invalid_block_ids=set(invalid),
                    failed_blocks=failed_blocks,
                    ended_saves=ended_saves,
                    stored_blocks={job_id: frozenset(at) for job_id, at in stored.items()},
                    vram={
                        rank: frozenset((node_id, epoch) for node_id, epoch in there)
                        for rank, there in vram.items()
                    },
                    reads=[BlockRead(*read) for read in reads],
                )
            )
        for job_id in [job_id for job_id, left in self._loads_left.items() if left == 0]:
            del self._loads_left[job_id]
            name = self._loading.pop(job_id)
            merged.finished_loads.add(name)
            if job_id in self._loads_failed:
                self._loads_failed.discard(job_id)
                merged.failed_requests.add(name)
        self._agreed.merge(merged)
        if self._core is not None:
            self._core.report(merged)
            return
        for job_id, workers in merged.ended_saves.items():
            self._ledger.ended(job_id, workers)

    def loads_ended(self, request_ids: Iterable[str]) -> None:
        if self._core is not None:
            self._core.loads_ended(request_ids)

    @property
    def loads_under_way(self) -> dict[str, int]:
        return {name: job_id for job_id, name in self._loading.items()}

    def agreed(self, ended: set[int]) -> set[int]:
        """Return those of these loads that have ended on the workers of all processes. In all."""
        return ended.intersection(*self._agree("ended loads", None, sorted(ended)))

    def handed_over(self, request_id: str) -> int:
        """Return what the leader's core says; 0 in the other processes."""
        return self._core.handed_over(request_id) if self._core is not None else 0

    def finished(self, request_id: str) -> None:
        self._compared.pop(request_id, None)
        if self._core is not None:
            self._core.finished(request_id)

    # Telling: the leader knows

    def hit_sources(self, request_id: str, num_tokens: int) -> dict[Tier, int]:
        return self._core.hit_sources(request_id, num_tokens) if self._core is not None else {}

    def explain(self, request_id: str) -> Explanation | None:
        return self._core.explain(request_id) if self._core is not None else None

    def stats(self) -> dict[str, dict[str, int]]:
        return self._core.stats() if self._core is not None else {}

    def take_stats(self) -> CountStats | None:
        return self._core.take_stats() if self._core is not None else None

    def take_events(self) -> list[BlockEvent]:
        return self._core.take_events() if self._core is not None else []

    def say_with(self, say: Callable[[str], None]) -> None:
        if self._core is not None:
            self._core.say_with(say)

    def has_pending_work(self) -> bool:
        return len(self._ledger) > 0 or (self._core is not None and self._core.has_pending_work())

    def own_cache_emptied(self) -> None:
        self._compared.clear()
        if self._core is not None:
            self._core.own_cache_emptied()

    def weights_changed(self) -> None:
        self._compared.clear()
        if self._core is not None:
            self._core.weights_changed()

    def reset(self) -> bool:
        """Return True, as in the leader, which answers for all."""
        return self._core.reset() if self._core is not None else True

    def close(self) -> None:
        if self._core is not None:
            self._core.close()


_MUST_AGREE = (
    "all processes must be given the same prompts with the same sampling seed, and the same calls "
    "(sleep, reset, collective_rpc, new weights), in the same order: nothing is stored or loaded "
    "of what they would compute together now"
)
_MUST_SHARE = (
    "all processes must have the same model and settings, and weights with a fingerprint or a "
    "weights_id: each holds a part of every block"
)


def _last(hashes: Sequence[bytes]) -> list[Any]:
    """Return how many there are and the last one, which stands for all of them."""
    return [len(hashes), hashes[-1] if hashes else b""]


def _digest(tables: BlockTables) -> int:
    """Return a hash of block tables: of integers, Python's own is the same in every process."""
    return hash(tuple(tuple(table) for table in tables))


def _load_job(message: list[Any], own: dict[str, str]) -> LoadJob:
    job_id, request_id, blocks, *times = message
    return LoadJob(
        job_id,
        own[request_id],
        tuple(
            LoadBlock(tuple(BlockRef(*one) for one in found), skip, tuple(block_ids), split, group)
            for found, skip, block_ids, split, group in blocks
        ),
        *times,
    )


def _save_job(message: list[Any], own: dict[str, str]) -> SaveJob:
    job_id, request_id, blocks, before, trace, left = message
    return SaveJob(
        job_id,
        own[request_id],
        tuple(
            SaveBlock(tuple(keys), tuple(block_ids), group, place, tokens)
            for keys, block_ids, group, place, tokens in blocks
        ),
        _runs(before),
        trace,
        _runs(left),
    )


def _runs(message: Sequence[Sequence[Sequence[bytes]]]) -> Runs:
    return tuple(tuple(tuple(shard) for shard in group) for group in message)
