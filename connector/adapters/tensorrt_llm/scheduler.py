"""The scheduler side under TensorRT-LLM: which blocks the workers load and save in each step.

It runs on rank 0 alone, in the engine's thread. What it has promised cannot fail any more
(promises.py), because the engine could not be told.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from connector.adapters.tensorrt_llm.interface import (
    LlmRequest,
    RequestData,
    SchedulerBase,
    SchedulerOutput,
)
from connector.adapters.tensorrt_llm.messages import Orders, Run
from connector.adapters.tensorrt_llm.promises import Promises
from connector.adapters.tensorrt_llm.shape import check, salt_of, why_not
from connector.adapters.tensorrt_llm.worker import shared
from connector.layout.block_hashes import extend
from kvstore import UsageError
from kvstore.spi import BlockRef

log = logging.getLogger(f"kvstore.{__name__}")

HELD_STEPS = 3
"""Steps after which every rank has loaded what it was told: the forward of the step needs all
ranks, and the engine runs at most one step ahead of its results."""


@dataclass(slots=True)
class _Request:
    """Holds one request from its first lookup to its end."""

    request: LlmRequest
    salt: str | int | None
    stored: bool
    """Whether anything of it may be loaded or saved."""
    names: list[bytes]
    promise: int
    """Number of the promise it was offered; a request that starts again gets another."""
    tokens: list[int] = field(default_factory=list)
    """Tokens as the engine has reported them."""
    blocks: list[int] = field(default_factory=list)
    first: int = 0
    """Blocks that the engine had itself."""
    promised: int = 0
    """Blocks after these that were offered."""
    refs: list[tuple[BlockRef, ...]] = field(default_factory=list)
    """Where the offered blocks are, for each rank."""
    saved: int = 0
    """Blocks that are saved, or need not be."""
    reported: bool = False


class KVStoreScheduler(SchedulerBase):  # type: ignore[misc]
    """Offers what is in the store, and plans loads and saves."""

    def __init__(self, llm_args: object) -> None:
        super().__init__(llm_args)
        check(llm_args)
        self._args = llm_args
        self._promises: Promises | None = None
        self._block_tokens = 0
        self._requests: dict[int, _Request] = {}
        self._step = 0
        self._made = 0
        """Number of promises so far."""
        self._ends_at: deque[tuple[int, int]] = deque()
        """(step, promise) in order: from that step on the promise is over whose blocks ranks were
        told to load. Its request may have ended, or started again, before."""

    def _ready(self) -> Promises | None:
        """Return where the worker of this process has its pool: without one nothing is known of
        it."""
        if self._promises is None:
            side = shared(self._args)
            if side is None:
                return None
            self._promises = Promises(side.store, side.shards)
            self._block_tokens = side.block_tokens
        return self._promises

    def get_num_new_matched_tokens(
        self, request: LlmRequest, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Return the tokens of whole blocks, behind those computed, that the store will give. They
        are read as part of the step, so the second is False."""
        id_ = int(request.request_id)
        self._forget(id_)
        promises = self._ready()
        if promises is None:
            return 0, False
        why = why_not(request)
        salt = salt_of(request)
        tokens = list(request.get_tokens(0))
        names = [] if why else self._names([], tokens, salt, id_)
        self._made += 1
        state = _Request(request, salt, not why, names, self._made)
        self._requests[id_] = state
        size = self._block_tokens
        state.first = state.saved = -(-num_computed_tokens // size)
        if why or num_computed_tokens % size:
            return 0, False
        # One token at least is computed: its output is wanted.
        last = (len(tokens) - 1) // size
        state.refs = promises.make(state.promise, names[state.first : last])
        state.promised = len(state.refs[0])
        return state.promised * size, False

    def update_state_after_alloc(self, request: LlmRequest, block_ids: list[int]) -> None:
        """Do nothing: what is allocated comes with each step, in chunks too."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Orders:
        """Return what the workers load before and save after the forward of this step."""
        self._step += 1
        loads: list[Run] = []
        saves: list[Run] = []
        for data in scheduler_output.new_requests:
            state = self._requests.get(int(data.request_id))
            if state is None or not state.stored:
                continue
            if state.reported:  # it starts again, and was not asked for anew
                state.tokens, state.blocks = [], []
                state.first = state.promised = state.saved = 0
            state.reported = True
            self._note(state, data)
            taken = self._honoured(state)
            # A block that is taken in part is loaded whole: the rest is computed to the same.
            state.saved = state.first + -(-taken // self._block_tokens)
            if run := self._run(data.request_id, state, state.first, state.saved, state.refs):
                loads.append(run)
            self._ends_at.append((self._step + HELD_STEPS, state.promise))
            end = data.computed_position + data.num_scheduled_tokens
            self._plan_save(data.request_id, state, end + taken, saves)
        for data in scheduler_output.cached_requests:
            state = self._requests.get(int(data.request_id))
            if state is None or not state.stored or not state.reported:
                continue
            self._note(state, data)
            end = data.computed_position + data.num_scheduled_tokens
            self._plan_save(data.request_id, state, end, saves)
        self._end_promises()
        return Orders(tuple(loads), tuple(saves))

    def request_finished(self, request: LlmRequest, cache_block_ids: list[int]) -> bool:
        """Return False: what is saved of it was copied in the steps that computed it."""
        self._forget(int(request.request_id))
        return False

    def request_reset(self, request: LlmRequest) -> None:
        """Forget the blocks of a request that starts again from its first token. What ranks were
        told to load stays pinned until they have."""
        self._forget(int(request.request_id))

    def cancel_load(self, request: LlmRequest, start: int, end: int) -> None:
        """Take back the blocks that lie whole between tokens `start` and `end`. Those before them
        are still loaded, or, where it is the offer's beginning (the engine has it by now), those
        after."""
        state = self._requests.get(int(request.request_id))
        if state is None:
            return
        size = self._block_tokens
        first, last = state.first, state.first + state.promised
        begin, behind = max(first, -(-start // size)), min(last, end // size)
        if begin >= behind:
            return
        if begin == first and behind < last:
            state.refs = [row[behind - first :] for row in state.refs]
            state.first = state.saved = behind
            state.promised = last - behind
        else:
            state.promised = begin - first
        if not state.promised:
            self._end_if_not_ordered(state)

    def _note(self, state: _Request, data: RequestData) -> None:
        state.tokens += data.new_tokens
        state.blocks += data.new_block_ids

    def _honoured(self, state: _Request) -> int:
        """Return how many tokens of its offer the engine has taken, and counts as computed."""
        tokens = getattr(state.request, "py_num_connector_matched_tokens", None)
        offered = state.promised * self._block_tokens
        return offered if tokens is None else max(0, min(int(tokens), offered))

    def _plan_save(self, id_: int, state: _Request, end: int, saves: list[Run]) -> None:
        """Have blocks saved that are full once the step's forward is over."""
        size = self._block_tokens
        full = min(end, len(state.tokens)) // size
        if full <= state.saved:
            return
        state.names = self._names(state.names, state.tokens[: full * size], state.salt, id_)
        if run := self._run(id_, state, state.saved, min(full, len(state.names))):
            saves.append(run)
        state.saved = full

    def _run(
        self,
        id_: int,
        state: _Request,
        first: int,
        end: int,
        refs: Sequence[tuple[BlockRef, ...]] = (),
    ) -> Run | None:
        """Return blocks `first` to `end` that the engine has a place for, and where these are."""
        known = range(first, min(end, len(state.names), len(state.blocks)))
        # Behind a window there is no place, and nobody reads.
        placed = [i for i in known if state.blocks[i] >= 0]
        if not placed:
            return None
        return Run(
            int(id_),
            tuple(state.names[i] for i in placed),
            tuple(state.blocks[i] for i in placed),
            tuple(tuple(row[i - first] for i in placed) for row in refs),
        )

    def _names(
        self, known: list[bytes], tokens: list[int], salt: str | int | None, id_: int = 0
    ) -> list[bytes]:
        extra: Callable[[int, int], object] = lambda first, end: salt  # noqa: E731
        try:
            return extend(known, tokens, self._block_tokens, extra)
        except UsageError as e:
            log.warning("request %d is neither loaded nor saved: %s", id_, e)
            return []

    def _forget(self, id_: int) -> None:
        state = self._requests.pop(id_, None)
        if state is not None:
            self._end_if_not_ordered(state)

    def _end_if_not_ordered(self, state: _Request) -> None:
        """Let the blocks go that it was offered, unless ranks may be loading them just now."""
        if self._promises is not None and not state.reported:
            self._promises.end(state.promise)

    def _end_promises(self) -> None:
        while self._ends_at and self._ends_at[0][0] <= self._step:
            _, promise = self._ends_at.popleft()
            if self._promises is not None:
                self._promises.end(promise)
