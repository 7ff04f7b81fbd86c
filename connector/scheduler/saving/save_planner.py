"""Plans the save jobs of a step, and follows each job to its end.

    planned -> in flight, its engine blocks pinned (ledger.py) -> ended by every worker
                                                               -> dropped: it was given to none

Block events (events.py), wishes to retain (retaining.py) and generated.py hear of a job twice: when
it is planned, and once when it has ended, in whichever way. A request's `saved_blocks` say how far
it is planned; whoever drops a job says whether its blocks are to be planned anew.

Only the engine's scheduling thread calls; no call waits. Must never happen: a job that the ledger
has ended and of which the others were not told, or the other way round.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from connector.layout.block_plan import full_blocks, save_blocks, save_part, save_states
from connector.limits import RUN_TOUCHED_MAX, SAVE_JOB_BLOCKS_MAX, SHARED_ENDS_MAX, Clock
from connector.messages import (
    BlockPins,
    BlockTables,
    EngineRequest,
    Runs,
    SaveBlock,
    SaveJob,
    StateBlock,
    WorkerReport,
    trace_id,
)
from connector.scheduler.saving.ledger import NoPins, SaveLedger
from kvstore.spi import Key

if TYPE_CHECKING:
    from connector.layout.geometry import GroupLayout, StoreLayout
    from connector.scheduler.request_settings import RequestSettings
    from connector.scheduler.requests import RequestState
    from connector.scheduler.saving.events import EngineEvents
    from connector.scheduler.saving.generated import GeneratedBlocks
    from connector.scheduler.saving.retaining import Retainer
    from connector.scheduler.settings import SchedulerSettings
GroupKeys = Sequence[Sequence[Sequence[Key]]]
"""Keys of a prefix, per group and shard."""


class SavePlanner:
    """Plans the saves of one engine; before `bind_pins` none."""

    def __init__(
        self,
        layout: StoreLayout,
        settings: SchedulerSettings,
        events: EngineEvents,
        retainer: Retainer,
        generated: GeneratedBlocks,
        clock: Clock,
    ) -> None:
        self._layout = layout
        self._settings = settings
        self._events = events
        self._retainer = retainer
        self._generated = generated
        self._clock = clock
        self._ledger = SaveLedger(NoPins(), workers=1, pinned_blocks_max=0)
        self._not_kept = False
        self._shared: OrderedDict[bytes, None] = OrderedDict()
        """Hashes of the ends of prefixes behind which more than one prompt is likely to go on."""
        self._blocks_per_key = sum(map(layout.blocks_per_key, range(len(layout.groups))))

    def bind_pins(self, pins: BlockPins, workers: int, num_blocks: int) -> None:
        """Take what keeps engine blocks alive, of which there are `num_blocks`, and how many
        workers end each job."""
        most = int(num_blocks * self._settings.pinned_fraction)
        self._ledger = SaveLedger(pins, workers, most)

    def __len__(self) -> int:
        """Return the jobs in flight."""
        return len(self._ledger)

    def jobs(self) -> list[int]:
        """Return the numbers of the jobs in flight."""
        return self._ledger.jobs()

    def next_full(self, state: RequestState | None) -> int:
        """Return with how many tokens a block of the request is full that was not before."""
        first = max(state.saved_blocks, state.present_blocks) if state is not None else 0
        full_with = (first + 1) * self._layout.block_tokens + self._settings.volatile_tokens
        if state is not None and state.hands_over_tokens and not state.part_planned:
            return min(full_with, state.hands_over_tokens)
        return full_with

    def seen(self, own: RequestSettings) -> None:
        """Note what a new request says about its KV; it concerns those that share its blocks."""
        self._not_kept = self._not_kept or own.max_save_tokens is not None

    def plan(
        self,
        request: EngineRequest,
        state: RequestState,
        num_scheduled_tokens: int,
        block_ids: Callable[[str], BlockTables | None],
        out: list[SaveJob],
    ) -> None:
        """Add to `out` the saves of what is full with `num_scheduled_tokens` more tokens, as far
        as there is room; the rest waits for a later step. With a prompt that is handed over also
        its last, partial block, in the step that computes it."""
        self._plan_full(request, state, num_scheduled_tokens, block_ids, out)
        prompt = state.hands_over_tokens
        tokens = request.num_computed_tokens + num_scheduled_tokens
        if prompt and not state.part_planned and tokens >= prompt:
            state.part_planned = True
            self._plan_part(request, state, block_ids, out)

    def _plan_part(
        self,
        request: EngineRequest,
        state: RequestState,
        block_ids: Callable[[str], BlockTables | None],
        out: list[SaveJob],
    ) -> None:
        """Plan a job of its own for the partial block: no event names it, because it is no block of
        any other prompt.

        Where an engine block is one piece, what is behind the part is stored with it: not in an
        engine that has had a prompt which must not be kept.
        """
        layout, settings, prompt = self._layout, self._settings, state.hands_over_tokens
        most = state.own_settings(request).max_save_tokens
        if state.save_barred or settings.volatile_tokens or not layout.takes_parts:
            return
        if (most is not None and most < prompt) or (layout.opaque and self._not_kept):
            return
        part: bytes | None = getattr(request, "part_hash", None)
        tables = block_ids(request.request_id)
        if part is None or tables is None:
            return
        keys = [
            [namespace.engine_keys([part])[0] for namespace in group.namespaces]
            for group in layout.groups
        ]
        blocks = save_part(keys, prompt, tables, layout, settings.null_block_id)
        if 0 < sum(len(block.block_ids) for block in blocks) <= self._ledger.room_blocks:
            job = self._ledger.open(request.request_id, blocks, (), trace_id(request))
            self._retainer.saving(state.own_settings(request).retain, job)
            out.append(job)
            state.part_saving = True

    def handed_over(self, state: RequestState) -> int:
        """Return the number of the prompt's tokens whose KV is in the store or on its way there."""
        if state.part_saving:
            return state.hands_over_tokens
        blocks = max(state.saved_blocks, state.present_blocks)
        return min(state.hands_over_tokens, blocks * self._layout.block_tokens)

    def _plan_full(
        self,
        request: EngineRequest,
        state: RequestState,
        num_scheduled_tokens: int,
        block_ids: Callable[[str], BlockTables | None],
        out: list[SaveJob],
    ) -> None:
        settings, layout = self._settings, self._layout
        first = max(state.saved_blocks, state.present_blocks)
        last = full_blocks(request, num_scheduled_tokens, layout, settings.volatile_tokens)
        prompt_blocks = request.num_prompt_tokens // layout.block_tokens
        if last > prompt_blocks and not self._generated.wanted(state, self._clock()):
            last = prompt_blocks
        most = state.own_settings(request).max_save_tokens
        if most is not None:
            last = min(last, most // layout.block_tokens)
        if last <= first or state.save_barred:
            return
        keys = state.keys(request, last, layout)
        last = min(last, len(keys[0][0]))
        tables = block_ids(request.request_id)
        interval = settings.window_interval_tokens
        checkpoints = state.checkpoints(request, interval, layout.block_tokens)
        while tables is not None and first < last:
            room = self._ledger.room_blocks // self._blocks_per_key
            count = min(last - first, SAVE_JOB_BLOCKS_MAX, room)
            state.waiting_blocks = last - first - count
            if count == 0:
                return
            blocks = save_blocks(
                keys, first, first + count, tables, layout, settings.null_block_id, checkpoints
            )
            if blocks:
                before = min(first, RUN_TOUCHED_MAX)
                # Of windows and states the end alone is needed: the rest may go first.
                starts = [
                    before if state.leaves and group.forgetful else self._needed(group, before)
                    for group in layout.groups
                ]
                run = _runs(keys, starts, [before] * len(keys))
                out.append(self._open(request, state, blocks, keys, run))
            first += count
            state.saved_blocks = first

    def plan_states(
        self,
        request: EngineRequest,
        state: RequestState,
        states: Sequence[StateBlock],
        out: list[SaveJob],
    ) -> None:
        """Add to `out` the save of `states`, which a step shows once: those that find no room are
        not saved."""
        layout = self._layout
        if not states or state.save_barred:
            return
        tokens = request.num_prompt_tokens
        generated = max(s.num_tokens for s in states) > tokens
        if generated and self._generated.wanted(state, self._clock()):
            tokens = request.num_tokens
        most = state.own_settings(request).max_save_tokens
        tokens = tokens if most is None else min(tokens, most)
        last = max(s.num_tokens for s in states) // layout.block_tokens
        keys = state.keys(request, last, layout)
        interval = self._settings.state_interval_tokens
        checkpoints = state.checkpoints(request, interval, layout.block_tokens)
        blocks = save_states(keys, state.present_blocks, tokens, states, layout, checkpoints)
        if 0 < len(blocks) <= self._ledger.room_blocks:
            out.append(self._open(request, state, blocks, keys))

    def _needed(self, group: GroupLayout, blocks: int) -> int:
        """Return from which block on a prefix of so many needs the group."""
        return group.needed_from(blocks * self._layout.block_tokens) // self._layout.block_tokens

    def _left(
        self,
        request: EngineRequest,
        state: RequestState,
        blocks: Sequence[SaveBlock],
        keys: GroupKeys,
    ) -> Runs:
        """Return the windows and states at the end of what the request found which no longer
        prefix of it needs, once, when it saves `blocks` of these behind it. Nothing where others
        are likely to go on from the same end: one has before, or two prompts parted there."""
        groups, found = self._layout.groups, state.present_blocks
        if state.goes_on or not any(groups[block.group].forgetful for block in blocks):
            return ()
        state.goes_on = True
        parted, ends = state.junction_blocks, self._shared
        state.leaves = found > 0 and self._end(request, found) not in ends
        for end in {found, parted} - {0}:
            ends[self._end(request, end)] = None
            ends.move_to_end(self._end(request, end))
        while len(ends) > SHARED_ENDS_MAX:
            ends.popitem(last=False)
        if not state.leaves:
            return ()
        last = max(found, (request.num_prompt_tokens - 1) // self._layout.block_tokens)
        stops = [min(found, self._needed(g, last)) if g.forgetful else 0 for g in groups]
        starts = [min(self._needed(g, found), s) for g, s in zip(groups, stops, strict=True)]
        return _runs(keys, starts, stops)

    def _end(self, request: EngineRequest, blocks: int) -> bytes:
        return request.block_hashes[blocks * self._layout.hashes_per_key - 1]

    def _open(
        self,
        request: EngineRequest,
        state: RequestState,
        blocks: tuple[SaveBlock, ...],
        keys: GroupKeys,
        run: Runs = (),
    ) -> SaveJob:
        left = self._left(request, state, blocks, keys)
        job = self._ledger.open(request.request_id, blocks, run, trace_id(request), left)
        self._events.saving(request, job)
        self._generated.saving(request, state, job)
        self._retainer.saving(state.own_settings(request).retain, job)
        return job

    def report(self, report: WorkerReport) -> None:
        """Take from `report` which jobs have ended, and what of them is stored."""
        for job_id, workers in report.ended_saves.items():
            stored = report.stored_blocks.get(job_id, frozenset())
            stored_by_all = self._ledger.ended(job_id, workers, stored)
            if stored_by_all is not None:
                self._tell(job_id, stored_by_all)

    def drop(self, jobs: Iterable[SaveJob]) -> None:
        """End jobs that were given to no worker."""
        for job in jobs:
            self._ledger.drop(job.job_id)
            self._tell(job.job_id, ())

    def _tell(self, job_id: int, stored: Collection[int]) -> None:
        self._events.saved(job_id, stored)
        self._generated.saved(job_id, stored, self._clock())
        self._retainer.saved(job_id, stored)


def _runs(keys: GroupKeys, starts: Sequence[int], stops: Sequence[int]) -> Runs:
    """Return of each group the keys from the one block to the other."""
    return tuple(
        tuple(tuple(shard[start:stop]) for shard in group)
        for group, start, stop in zip(keys, starts, stops, strict=True)
    )
