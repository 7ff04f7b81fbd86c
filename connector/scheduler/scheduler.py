"""Decides per engine step what to load and what to save: the scheduler side.

It knows no engine. What it keeps of a request, in `RequestState` and beside it:

    lookup     none -> asked (`on_new_request`, `match`) -> answered, or too late: a miss.
               Asked anew when older than `LOOKUP_TTL_S`, after a failed load, after `forget`,
               and while another engine is saving what it hands over (hand_over.py)
    offer      made by `match`; ended by the next `match`, or by `allocated`, which takes it up
               It is cut where computing is quicker than loading (load_costs.py)
    load       planned (`allocated`) -> under way (`plan_step`) -> ended (`loads_ended`), whole
               or in part (`report`). After `LOAD_ATTEMPTS_MAX` failures nothing is offered, and
               never again the very record that could not be loaded
    save jobs  planned when a step completes blocks (`plan_step`, save_planner.py) -> held back
               while a load of their step may fail (save_gate.py, with `layerwise`) -> given to
               the workers -> ended by all of them. They outlive their request

`save_barred` says that a request has KV which may not be saved: of before a reset or of other
weights, or from somebody else's load; only a preemption, after which all of it is computed
anew, or the request's end ends that.

Only the engine's scheduling thread changes any of it, by calling; so no call may wait, but
`match`, for lookups, at most `LOOKUP_WAIT_PER_STEP_S` in a step, and `reset`. The helper threads
(lookup.py, explain.py, resetting.py, prefetching.py, in saving/ retaining.py and generated.py) have
queues of their own and hand back what they found.

Must never happen:

- KV saved that was computed on blocks which did not load (rule 1);
- an engine block unpinned while a worker may read it, or pinned for ever: each job ends once
  on each worker;
- more offered than the prompt has; with `layerwise` the engine computes at least one token;
- an exception, or a wait, because the store is away.

Longer than other files, since lookups, loads and their failures change the same fields of the same
requests. What decides without them, or on its own fields of them, has a file of its own.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from connector import metrics
from connector.layout.block_plan import (
    load_blocks,
    offered_tokens,
    usable_run,
)
from connector.limits import (
    HAND_OVER_POLL_S,
    LOAD_ATTEMPTS_MAX,
    LOOKUP_TTL_S,
    LOOKUP_WAIT_PER_STEP_S,
    Clock,
)
from connector.messages import (
    BlockEvent,
    BlockPins,
    BlockTables,
    EngineRequest,
    LoadJob,
    StateBlock,
    StepPlan,
    WorkerReport,
    log_name,
    trace_id,
)
from connector.metrics import Counts
from connector.scheduler.explain import RequestHistory
from connector.scheduler.hand_over import awaited, part_found, part_wanted
from connector.scheduler.hit_sources import hit_sources
from connector.scheduler.load_costs import Choice, Hit, LoadCosts
from connector.scheduler.lookup import Lookup, Lookups
from connector.scheduler.patience import ComputeRate, patience_s
from connector.scheduler.prefetching import Prefetcher
from connector.scheduler.requests import LoadUnderWay, Offer, RequestState
from connector.scheduler.resetting import Resetter
from connector.scheduler.saving.events import EngineEvents
from connector.scheduler.saving.generated import GeneratedBlocks
from connector.scheduler.saving.retaining import Retainer
from connector.scheduler.saving.save_gate import SaveGate
from connector.scheduler.saving.save_planner import SavePlanner
from kvstore import Explanation, MissReason
from kvstore.spi import Tier

if TYPE_CHECKING:
    from connector.layout.geometry import StoreLayout
    from connector.scheduler.lazy_store import LazyStore
    from connector.scheduler.settings import SchedulerSettings
    from connector.stats import CountStats

log = logging.getLogger(f"kvstore.{__name__}")


class SchedulerCore:
    """Decides what is loaded and saved, over a `BlockStore`. One per engine; called by one thread,
    but for `explain`."""

    def __init__(
        self,
        store: LazyStore,
        layout: StoreLayout,
        settings: SchedulerSettings,
        clock: Clock = time.monotonic,
    ) -> None:
        self._store = store
        self._layout = layout
        self._settings = settings
        self._clock = clock
        self._counts = Counts()
        self._counts.add(metrics.BLOCK_TOKENS, layout.block_tokens)
        self._history = RequestHistory(store, layout, clock, self._counts)
        self._events = EngineEvents(layout, wanted=settings.events)
        self._retainer = Retainer(store, self._counts, self._history.noted)
        self._prefetcher = Prefetcher(store, layout, self._counts, self._history.noted)
        self._lookups = Lookups(
            store,
            layout,
            settings.lookup_timeout_s,
            clock,
            warm_up=settings.loads,
            on_answer=self._history.looked_up,
        )
        self._generated = GeneratedBlocks(store, layout, self._counts, settings.save_decode)
        self._saves = SavePlanner(
            layout, settings, self._events, self._retainer, self._generated, clock
        )
        self._unconfirmed = SaveGate(layout.groups[0].topology.workers)
        self._forget: Callable[[set[int]], None] = lambda _: None
        self._workers = 1
        self._vram: dict[int, frozenset[tuple[int, int]]] = {}
        """Reports of open VRAM by worker."""
        self.vram_open: frozenset[tuple[int, int]] = frozenset()
        """Nodes, by id and epoch, whose VRAM every worker has open. Any thread may read it."""
        self._requests: dict[str, RequestState] = {}
        self._planned_loads: list[LoadJob] = []
        self._known_tokens: dict[str, int] = {}
        """Request matched since the last step -> tokens that the engine had, or that we load."""
        self._loads: dict[str, LoadUnderWay] = {}
        """Loads by request, until they have ended on every worker."""
        self._computed = False
        """Whether something was computed since the engine's own cache was last emptied."""
        self._mixed = False
        """Whether that cache may hold KV of other weights; what requests compute on it belongs to
        neither."""
        self._dropped_loads: list[str] = []
        """Requests whose loads in flight are to end; the next step carries them."""
        self._resetter = Resetter(
            store, sorted({namespace.id for namespace in layout.all_namespaces()})
        )
        self._next_load_id = 0
        self._wait_left_s = LOOKUP_WAIT_PER_STEP_S
        self._rate = ComputeRate()
        self._costs = LoadCosts(layout, self._rate)

    def bind_pins(
        self,
        pins: BlockPins,
        workers: int,
        num_blocks: int,
        forget: Callable[[set[int]], None] = lambda _: None,
    ) -> None:
        """Take what keeps engine blocks alive, of which there are `num_blocks`; before this call
        nothing is saved.

        `forget` takes blocks out of the engine's own prefix cache whose KV is wrong.
        """
        self._saves.bind_pins(pins, workers, num_blocks)
        self._workers = workers
        self._forget = forget

    # Loads

    def on_new_request(self, request: EngineRequest, *, loads: bool = True) -> None:
        """Ask early: the answer is usually there when the engine first schedules it. Without
        `loads` nothing is loaded for this one."""
        self._generated.asked(request, self._clock())
        if getattr(request, "kv_transfer_params", None) or getattr(request, "kv_hints", None):
            state = self._state(request.request_id)
            own = state.own_settings(request)
            self._saves.seen(own)
            state.hands_over_tokens = request.num_prompt_tokens if own.hands_over else 0
            if own.prefetch_tokens:
                self._prefetcher.ask(request, own.prefetch_tokens)
        if loads and self._settings.loads and self._long_enough(request):
            state = self._state(request.request_id)
            if state.lookup is None and state.own_settings(request).max_load_tokens != 0:
                state.lookup = self._submit(state, request)

    def match(self, request: EngineRequest, num_computed_tokens: int) -> int | None:
        """Return tokens beyond `num_computed_tokens` to load; None: no answer yet, ask next step.

        May be called any number of times without anything coming of it.
        """
        self._known_tokens[request.request_id] = num_computed_tokens
        layout = self._layout
        if not self._settings.loads:
            return 0
        if not self._long_enough(request):
            self._history.refused(request, MissReason.TOO_SHORT)
            return 0
        state = self._state(request.request_id)
        state.offer = None
        if self._mixed and num_computed_tokens:
            state.save_barred = True
            self._history.refused(request, MissReason.CLEARED)
            return 0
        if self._resetter.pending:
            self._history.refused(request, MissReason.CLEARED)
            return 0
        most = state.own_settings(request).max_load_tokens
        if most == 0:
            self._history.refused(request, MissReason.SKIPPED)
            return 0
        if state.to_be_computed or state.failed_loads >= LOAD_ATTEMPTS_MAX:
            self._history.barred(request, state.failed_loads)
            return 0
        lookup = self._lookup(state, request)
        if lookup is None:
            self._history.refused(request, MissReason.TOO_BUSY)
            return 0
        if not lookup.done.is_set() and not self._wait(lookup):
            if self._worth_waiting(lookup, request.num_tokens - num_computed_tokens):
                return None
            here = self._lookups.here(lookup)
            if here is None:
                lookup.given_up = True
                self._history.refused(request, MissReason.DEADLINE)
                return 0
            lookup = here
        run = usable_run(lookup.placement, state.barred, layout, request.num_tokens)
        part_end = part_found(state, request, lookup, layout, self._settings)
        found_tokens = max(run * layout.block_tokens, part_end)
        if self._awaits(state, request, lookup, found_tokens, num_computed_tokens):
            return None
        state.found(lookup, run, request, layout)
        self._events.looked_up(request, lookup)
        self._retainer.found(request.request_id, state.own_settings(request).retain, lookup)
        wanted = run
        if most is not None:
            blocks_max = (num_computed_tokens + most) // layout.block_tokens
            wanted = usable_run(
                lookup.placement, state.barred, layout, request.num_tokens, blocks_max
            )
        tokens = offered_tokens(wanted, num_computed_tokens, layout, part_end)
        if most is not None and tokens > most:
            tokens = offered_tokens(wanted, num_computed_tokens, layout)
        # Tokens that came after the lookup are not part of the prompt it saw.
        tokens = max(0, min(tokens, self._load_end(request) - num_computed_tokens))
        choice = self._worth_loading(state, request, lookup, num_computed_tokens, tokens)
        if choice.tokens:
            state.offer = Offer(lookup, num_computed_tokens, choice)
        limit = MissReason.SKIPPED if wanted < run else None
        if choice.tokens < tokens:
            limit = self._shortened(state, tokens, choice)
        self._history.answered(
            request, lookup, run, num_computed_tokens, choice.tokens, limited=limit
        )
        return choice.tokens

    def _worth_loading(
        self, state: RequestState, request: EngineRequest, lookup: Lookup, start: int, tokens: int
    ) -> Choice:
        """Return how many of `tokens` that were found from `start` on to load."""
        hit = self._hit(lookup, start, tokens)
        if not tokens or hit is None:
            return Choice(tokens)
        placement, layout = lookup.placement, self._layout
        usable = partial(usable_run, placement, state.barred, layout, request.num_tokens)
        return self._costs.choose(hit, request.num_tokens - start, usable, self._clock())

    def _shortened(self, state: RequestState, tokens: int, choice: Choice) -> MissReason:
        """Count once what a request computes although it was found; return why."""
        if not state.shortened:
            tier = choice.source.partition(":")[0]
            self._counts.add(metrics.SLOWER_TOKENS, tokens - choice.tokens, tier)
        state.shortened = True
        return MissReason.SLOWER

    def _hit(self, lookup: Lookup, start: int, tokens: int) -> Hit | None:
        store = self._store.opened
        return None if store is None else Hit(lookup.placed, start, tokens, store.sources)

    def allocated(
        self, request: EngineRequest, block_ids: Callable[[], BlockTables], num_tokens: int
    ) -> None:
        """Plan the load of what was offered, or of the part the engine made room for.

        Decided by `num_tokens` alone: the engine calls again after a load, and
        when somebody else's offer won, with 0 and real blocks.
        """
        state = self._requests.get(request.request_id)
        if state is None or state.offer is None:
            return
        offer, state.offer = state.offer, None
        num_tokens = min(num_tokens, offer.choice.tokens)
        self._history.allocated(request.request_id, offer.start_token, max(0, num_tokens))
        if num_tokens <= 0:
            return
        blocks = load_blocks(
            offer.lookup.placed,
            offer.start_token,
            num_tokens,
            block_ids(),
            self._layout,
            self._settings.null_block_id,
        )
        job = LoadJob(self._next_load_id, request.request_id, blocks, trace_id=trace_id(request))
        hit = self._hit(offer.lookup, offer.start_token, num_tokens)
        if hit is not None:
            times = self._costs.begin(request.request_id, hit, offer.choice, self._clock())
            job = job._replace(timeout_s=times[0], compute_s=times[1])
        self._next_load_id += 1
        self._planned_loads.append(job)
        first_block = offer.start_token // self._layout.block_tokens
        self._loads[request.request_id] = LoadUnderWay(job, first_block, offer)
        self._known_tokens[request.request_id] = offer.start_token + num_tokens

    def _load_end(self, request: EngineRequest) -> int:
        """Return the end of the tokens that may be loaded for this request."""
        last = request.num_tokens
        if self._settings.layerwise:  # one is computed, in a block that is not being loaded
            last -= 1 + (last - 1) % self._layout.engine_block_tokens
        return last

    def hit_sources(self, request_id: str, num_tokens: int) -> dict[Tier, int]:
        """Return where the first `num_tokens` of the load that was just planned come from; empty
        when none was. Waits for nobody."""
        load, store = self._loads.get(request_id), self._store.opened
        if load is None or store is None:
            return {}
        offer = load.offer
        tokens = min(num_tokens, offer.choice.tokens)
        placement = offer.lookup.placed
        return hit_sources(placement, offer.start_token, tokens, self._layout, store.tiers)

    def _long_enough(self, request: EngineRequest) -> bool:
        if request.num_tokens >= self._layout.block_tokens:
            return True
        state = self._requests.get(request.request_id)
        own = None if state is None else state.own_settings(request)
        return part_wanted(own, request, self._layout, self._settings) is not None

    def _lookup(self, state: RequestState, request: EngineRequest) -> Lookup | None:
        """Return the current lookup, a new one when there is none or it is too old."""
        lookup = state.lookup
        if lookup is not None and lookup.done.is_set():
            age_s = self._clock() - lookup.answered_at
            lookup = lookup if age_s < LOOKUP_TTL_S else None
        if lookup is None:
            lookup = state.lookup = self._submit(state, request)
        return lookup

    def _submit(self, state: RequestState, request: EngineRequest) -> Lookup | None:
        part = part_wanted(state.own_settings(request), request, self._layout, self._settings)
        return self._lookups.submit(tuple(request.block_hashes), part, log_name(request))

    def _awaits(
        self,
        state: RequestState,
        request: EngineRequest,
        lookup: Lookup,
        found_tokens: int,
        num_computed_tokens: int,
    ) -> bool:
        """Return whether the request waits for what another engine is still saving; then it is
        looked up again. As long as computing it takes, at most `hand_over_wait_s`."""
        missing = awaited(state, request, self._layout) - max(found_tokens, num_computed_tokens)
        if missing <= 0 or state.failed_loads or lookup.short in _ASKED_IN_VAIN:
            return False
        now = self._clock()
        if state.awaits_since is None:
            state.awaits_since = now
        most_s = self._settings.hand_over_wait_s
        wait_s = patience_s(missing, self._rate.tokens_per_s, most_s)
        if now - state.awaits_since >= wait_s:
            return False
        if now - lookup.answered_at >= HAND_OVER_POLL_S:
            state.lookup = self._submit(state, request)
        return state.lookup is not None

    def _wait(self, lookup: Lookup) -> bool:
        """Spend what is left of this step's time on `lookup`."""
        started = self._clock()
        done = lookup.done.wait(max(0.0, self._wait_left_s))
        self._wait_left_s -= self._clock() - started
        return done

    def _worth_waiting(self, lookup: Lookup, tokens: int) -> bool:
        now = self._clock()
        if lookup.wanted_at is None:
            lookup.wanted_at = now
        most_s = self._settings.lookup_timeout_s
        return now - lookup.wanted_at < patience_s(tokens, self._rate.tokens_per_s, most_s)

    # Saves

    def plan_step(
        self,
        scheduled: Iterable[tuple[EngineRequest, int]],
        preempted: Iterable[str],
        block_ids: Callable[[str], BlockTables | None],
        states: Callable[[str], Sequence[StateBlock]] = lambda _: (),
    ) -> StepPlan:
        """Return loads planned since the last step, and saves of what this step's forward fills.

        `block_ids` gives a request's current block tables, `states` the blocks of its groups of
        state-space layers that this step completes: a table does not tell them from blocks whose
        state still changes.
        """
        self._wait_left_s = LOOKUP_WAIT_PER_STEP_S
        for request_id in preempted:
            if request_id in self._requests:
                self._requests[request_id].forget_progress()
        scheduled = list(scheduled)
        self._rate.step(self._clock(), sum(tokens for _, tokens in scheduled))
        self._computed = self._computed or bool(scheduled)
        if self._known_tokens:
            self._bar_saves_on_others_loads(request for request, _ in scheduled)
        plan = StepPlan(
            loads=self._planned_loads, dropped_loads=self._dropped_loads, idle=not scheduled
        )
        self._planned_loads, self._dropped_loads = [], []
        recurrent = self._layout.recurrent
        for request, num_scheduled_tokens in scheduled if self._settings.saves else ():
            if recurrent:
                # First, since they are shown once, while other blocks can wait for room.
                state = self._state(request.request_id)
                completed = states(request.request_id)
                self._saves.plan_states(request, state, completed, plan.saves)
            # The engine's thread comes by here for every request in every step.
            full_with = self._saves.next_full(self._requests.get(request.request_id))
            if request.num_computed_tokens + num_scheduled_tokens >= full_with:
                state = self._state(request.request_id)
                self._saves.plan(request, state, num_scheduled_tokens, block_ids, plan.saves)
        if self._settings.layerwise:
            names = [request.request_id for request, _ in scheduled]
            plan.saves = self._unconfirmed.step(plan.loads, plan.saves, names, block_ids)
        return plan

    def _bar_saves_on_others_loads(self, scheduled: Iterable[EngineRequest]) -> None:
        """Save nothing of a request that, under a MultiConnector, another connector loads for
        within the step: it was matched for this step and has more tokens than the engine and we
        gave it. That load may fail, which is reported after the step has been saved (rule 1)."""
        known, self._known_tokens = self._known_tokens, {}
        for request in scheduled:
            if request.num_computed_tokens > known.get(request.request_id, sys.maxsize):
                self._state(request.request_id).save_barred = True

    # What came back

    def report(self, report: WorkerReport) -> None:
        """Bar what could not be loaded, and give back what is no longer read."""
        self._costs.add(report.reads)
        failed = report.failed_blocks
        invalid: set[int] = set()
        for request_id, load in self._loads.items() if failed else ():
            position = failed.get(load.job.job_id)
            state = self._requests.get(request_id)
            if position is not None:
                invalid.update(*(block.block_ids for block in load.job.blocks[position:]))
            if position is not None and state is not None:
                block = load.job.blocks[position]
                for found in block.found:
                    state.barred[found.key] = found.record
                # With several groups a position counts more than one block of the
                # prefix, and the engine computes all of it again.
                loaded = position if len(self._layout.groups) == 1 else 0
                keys = tuple(found.key for found in block.found)
                self._history.load_failed(request_id, load.first_block + loaded, keys)
                state.failed_loads += 1
                state.to_be_computed = not self._settings.loads_again
                state.lookup = None
                state.present_blocks = load.first_block + loaded
        self._saves.report(report)
        self._resetter.in_flight(self._saves.jobs())
        if report.vram:
            self._vram |= report.vram
            all_reported = len(self._vram) == self._workers
            self.vram_open = (
                frozenset.intersection(*self._vram.values()) if all_reported else frozenset()
            )
        if report.ended_loads:
            self._step_loads_ended(report.ended_loads, invalid)

    def _step_loads_ended(self, ended: Mapping[int, int], invalid: set[int]) -> None:
        done = self._unconfirmed.ended(ended)
        names = [name for name, load in self._loads.items() if load.job.job_id in done]
        self.loads_ended(names)
        if not invalid:
            return
        dropped, wrong = self._unconfirmed.spoilt(invalid)
        self._saves.drop(dropped)
        for job in dropped:
            if job.request_id in self._requests:
                self._requests[job.request_id].saved_blocks = 0
        self._forget(wrong)

    def loads_ended(self, request_ids: Iterable[str]) -> None:
        """Note that every worker is done with the loads of these requests."""
        for request_id in request_ids:
            self._loads.pop(request_id, None)
            self._costs.end(request_id, self._clock())
            self._history.load_ended(request_id)

    @property
    def loads_under_way(self) -> dict[str, int]:
        """Return the load job of each request whose load has not ended on every worker."""
        return {name: load.job.job_id for name, load in self._loads.items()}

    def handed_over(self, request_id: str) -> int:
        """Return for how many tokens of a prompt that is handed over the KV is in the store, or on
        its way there; 0 when it is not handed over. Call it before `finished`."""
        state = self._requests.get(request_id)
        return 0 if state is None else self._saves.handed_over(state)

    def finished(self, request_id: str) -> None:
        """Forget the request. Its saves go on by themselves: they hold their blocks."""
        state = self._requests.pop(request_id, None)
        if state is not None and state.waiting_blocks:
            self._counts.add(metrics.UNSAVED_BLOCKS, state.waiting_blocks, metrics.PINNED)
            text = "%d blocks not saved: other saves held pinned_fraction of the engine's blocks"
            self._history.noted(request_id, text % state.waiting_blocks)
        self._history.finished(request_id)

    # Telling

    def explain(self, request_id: str) -> Explanation | None:
        """Return what a request could have got, what it got, and why not the rest; from any thread.

        None when it is not known (any more): the last `EXPLAIN_REQUESTS_MAX` are.
        """
        return self._history.explain(request_id)

    def explain_prompt(self, request: EngineRequest, local_tokens: int) -> Explanation:
        """Return what `request`, which the engine does not have, would load now where the engine's
        own cache has `local_tokens` of it. From any thread but the engine's: it waits for the
        index and for nodes."""
        if not self._settings.loads:
            return self._history.explain_refused(request, local_tokens, NOT_LOADING)
        if not self._long_enough(request):
            return self._history.explain_refused(request, local_tokens, MissReason.TOO_SHORT)
        if self._resetter.pending or (self._mixed and local_tokens):
            return self._history.explain_refused(request, local_tokens, MissReason.CLEARED)
        lookup = self._lookups.now(tuple(request.block_hashes))
        run = usable_run(lookup.placement, {}, self._layout, request.num_tokens)
        tokens = offered_tokens(run, local_tokens, self._layout)
        tokens = max(0, min(tokens, self._load_end(request) - local_tokens))
        choice = self._worth_loading(RequestState(), request, lookup, local_tokens, tokens)
        limit = MissReason.SLOWER if choice.tokens < tokens else None
        return self._history.explain_lookup(request, lookup, local_tokens, choice.tokens, limit)

    def explain_named(self, api_id: str) -> list[Explanation]:
        """Return what became of the requests that have this id in the engine's API; from any
        thread."""
        return self._history.explain_named(api_id)

    def stats(self) -> dict[str, dict[str, int]]:
        """Return totals of ended requests ("requests"), and how many missed by reason
        ("missed")."""
        return self._history.stats()

    def take_stats(self) -> CountStats | None:
        """Return what was counted since the last call; None: nothing. A request's share comes a
        moment after its end."""
        return self._counts.take()

    def take_events(self) -> list[BlockEvent]:
        """Return events about blocks since the last call; none unless the settings want them."""
        return self._events.take()

    def say_with(self, say: Callable[[str], None]) -> None:
        """Set where the lines of requests that got less than possible go; else to our own log."""
        self._history.say = say

    def has_pending_work(self) -> bool:
        """Return whether saves are in flight: an engine that stops stepping never learns of their
        end."""
        return len(self._saves) > 0

    def forget(self) -> None:
        """Offer nothing that was asked for before this, nor save what was computed before it.

        For when the engine's own cache is emptied: what is in the store stays, for this engine
        too. A lookup under way comes to nothing, a load under way fails.
        """
        for state in self._requests.values():
            state.lookup = None
            state.offer = None
            state.present_blocks = 0
            state.save_barred = True
        self._saves.drop(self._unconfirmed.spoilt(set())[0])
        self._planned_loads = [_without_source(job) for job in self._planned_loads]
        self._dropped_loads += self._loads

    def own_cache_emptied(self) -> None:
        """Do `forget`, when the engine has just lost all that it had computed."""
        self.forget()
        self._computed = self._mixed = False

    def weights_changed(self) -> None:
        """Do `forget`, and save nothing that was computed on what other weights have left behind.

        Hashes of requests must be different from here on.
        """
        self.forget()
        self._mixed = self._mixed or self._computed

    def reset(self) -> bool:
        """Do `forget`, and drop the namespaces on all nodes.

        Waits up to `RESET_WAIT_S` for them. Never fails: what could not be done now continues in
        the background, and until it is complete nothing is loaded.
        """
        self.forget()
        if not self._resetter.ask(self._saves.jobs()):
            log.warning("the reset goes on in the background: until its end nothing is loaded here")
        self._events.clear()
        return True

    def close(self) -> None:
        """Stop the lookup thread and close the store."""
        self._lookups.close()
        self._history.close()
        self._resetter.close()
        self._retainer.close()
        self._generated.close()
        self._prefetcher.close()
        self._store.close()

    def _state(self, request_id: str) -> RequestState:
        state = self._requests.get(request_id)
        if state is None:
            state = self._requests[request_id] = RequestState()
        return state


NOT_LOADING = "this engine only saves: its kv_role is kv_producer"
_ASKED_IN_VAIN = (MissReason.BREAKER_OPEN, MissReason.NO_STORE, MissReason.TOO_BUSY)
"""Ends of a lookup after which another one soon would end in the same way. A late index is not
among them: it counts as away when the breaker says so."""


def _without_source(job: LoadJob) -> LoadJob:
    """Return the same load from nowhere: it fails, and the engine computes."""
    return job._replace(blocks=tuple(block._replace(found=()) for block in job.blocks))
