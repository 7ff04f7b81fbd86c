"""Decides whether generated blocks are saved: no longer where hardly any is asked for again.

A trail is what is known of the generated blocks of one request:

    saving -> waiting (stored) -> judged when all are asked for, one is evicted, or `OLD_S` old
                               -> dropped, if part of its prefix was not stored

A block was asked for if a look-up of this engine names it, found or not, or a node says that it was
read: the next turn of a conversation may come to another engine. So were those before it.

While all are saved, less than `ASKED_SHARE_MIN` of `JUDGED_BLOCKS` ends that. Then one request in
`SAMPLED_ONE_IN` is saved whole, since a look-up ends at the first gap; that share of the last
`SAMPLES_MAX` of these, in at least `SAMPLES_ASKED_MIN`, has all saved again. Each change begins
anew, as an engine does that starts: with all saved (docs/decisions/0119).

Only the engine's scheduling thread calls; a thread of our own asks the nodes. Must never happen: a
request that saves a generated block and not those before it.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Collection, Sequence
from itertools import islice, takewhile
from typing import TYPE_CHECKING

from connector import metrics
from connector.limits import SHUTDOWN_TIMEOUT_S
from connector.scheduler.requests import RequestState, Trail
from connector.work_thread import WorkThread
from kvstore.spi import Key

if TYPE_CHECKING:
    from connector.layout.geometry import StoreLayout
    from connector.messages import EngineRequest, SaveJob
    from connector.metrics import Counts
    from connector.scheduler.lazy_store import LazyStore

log = logging.getLogger(f"kvstore.{__name__}")

ASKED_SHARE_MIN = 0.05
"""Share of saved generated blocks that must be asked for if all are to be saved."""
JUDGED_BLOCKS = 1000
"""Blocks of which that share is taken while all are saved."""
SAMPLED_ONE_IN = 50
"""Requests of which one is saved whole while the others are not."""
SAMPLES_MAX = 16
"""Such requests, the last ones, of which the share is taken then."""
SAMPLES_ASKED_MIN = 2
"""Such requests that must be asked for: one may be by chance."""
OLD_S = 600.0
"""Age at which a block that nobody has asked for is judged."""
ASK_EVERY_S = 30.0
"""Pause between two questions to the nodes, each about all blocks that wait."""
TRAILS_MAX = 256
"""Trails that wait while all are saved; further requests are not followed."""
TRAIL_BLOCKS_MAX = 16
"""Generated blocks of one request that are followed, its first ones."""


class GeneratedBlocks:
    """Says of each request whether its generated blocks are saved, and learns what becomes of
    them."""

    def __init__(
        self, store: LazyStore, layout: StoreLayout, counts: Counts, setting: bool | str
    ) -> None:
        """Start with all saved, or with no more than `setting` allows: true, false or `auto`."""
        self._store = store
        self._counts = counts
        self._layout = layout
        # Of windows and states the end alone is read.
        whole = (number for number, group in enumerate(layout.groups) if not group.forgetful)
        self._group = next(whole, 0)
        self._auto = setting == "auto"
        self._saves_all = bool(setting)
        self._turn = self._sampled_turn = 0
        self._jobs: dict[int, tuple[Trail, int, dict[bytes, Key]]] = {}
        """Save job in flight -> its request's trail, its blocks, and the generated ones of them."""
        self._trails: list[Trail] = []
        """Trails that wait; while not all are saved also those judged, at most `SAMPLES_MAX`."""
        self._judged_blocks = self._judged_asked = 0
        self._thread = WorkThread("kvstore-generated", self._ask, 1)
        """Runs from the first question on."""
        self._ask_at = 0.0
        self._answers: deque[list[tuple[Trail, float, Sequence[bool | None]]]] = deque()
        """Trails, when nodes were asked, and what they say of their blocks."""

    def wanted(self, state: RequestState, now: float) -> bool:
        """Return whether generated blocks of the request are saved; the same at each call."""
        if not self._auto:
            return self._saves_all
        if state.saves_generated is None:
            self._look(now)
            state.saves_generated = self._saves_all or self._sampled()
        return state.saves_generated

    def _sampled(self) -> bool:
        # By chance: of clients that take turns it would always be the same.
        if self._turn % SAMPLED_ONE_IN == 0:
            self._sampled_turn = self._turn + random.randrange(SAMPLED_ONE_IN)
        self._turn += 1
        return self._turn - 1 == self._sampled_turn

    def saving(self, request: EngineRequest, state: RequestState, job: SaveJob) -> None:
        """Note that a save of blocks of `request` was planned."""
        if not self._auto:
            return
        state.trail = state.trail or Trail()
        hashes, per_key = request.block_hashes, self._layout.hashes_per_key
        first = request.num_prompt_tokens // self._layout.block_tokens
        generated = {
            hashes[(block.place + 1) * per_key - 1]: block.keys[0]
            for block in job.blocks
            if block.group == self._group and block.place >= first
        }
        self._jobs[job.job_id] = state.trail, len(job.blocks), generated

    def saved(self, job_id: int, stored: Collection[int], now: float) -> None:
        """Note that the job has ended; the blocks at `stored` are there."""
        trail, count, generated = self._jobs.pop(job_id, (Trail(), 0, {}))
        if len(stored) < count:
            trail.over, trail.asked = True, 0
            trail.blocks.clear()
        if trail.over or not generated:
            return
        if not trail.blocks:
            trail.over = self._saves_all and len(self._trails) >= TRAILS_MAX
            if trail.over:
                return
            self._trails.append(trail)
        trail.blocks.update(islice(generated.items(), TRAIL_BLOCKS_MAX - len(trail.blocks)))
        trail.stored_at = now
        self._look(now)

    def asked(self, request: EngineRequest, now: float) -> None:
        """Note which blocks a new request asks for."""
        if not self._trails:
            return
        per_key = self._layout.hashes_per_key
        asked = set(islice(request.block_hashes, per_key - 1, None, per_key))
        for trail in self._trails:
            trail.asked += sum(1 for _ in islice(trail.blocks, trail.asked, None) if _ in asked)
        self._look(now)

    def close(self) -> None:
        """Stop the thread; waits at most `SHUTDOWN_TIMEOUT_S`."""
        self._thread.end()
        self._thread.join(SHUTDOWN_TIMEOUT_S)

    def _look(self, now: float) -> None:
        """Take what nodes have answered, decide, and ask them when it is time."""
        while self._answers:
            for trail, asked_at, read in self._answers.popleft():
                if not trail.over:
                    self._hear(trail, read, asked_at - trail.stored_at >= OLD_S)
        self._decide()
        if self._trails and now >= self._ask_at:
            if not self._ask_at:
                self._thread.start()
            self._ask_at = now + ASK_EVERY_S
            waiting = [(t, list(t.blocks.values())) for t in self._trails if not t.over]
            self._thread.put((now, waiting))

    def _hear(self, trail: Trail, read: Sequence[bool | None], old: bool) -> None:
        trail.asked = max(trail.asked, *(n for n, one in enumerate(read, 1) if one), 0)
        # At once if all were asked for, too: nodes may evict the others long before they are old.
        if old or trail.asked == len(trail.blocks) or False in read[trail.asked : trail.asked + 1]:
            trail.over = True
            blocks, asked = len(trail.blocks), trail.asked
            self._counts.add(metrics.GENERATED_BLOCKS, asked, metrics.ASKED)
            self._counts.add(metrics.GENERATED_BLOCKS, blocks - asked, metrics.UNASKED)

    def _decide(self) -> None:
        if self._saves_all:
            # In their order: what is asked for is known sooner than what is not.
            judged = list(takewhile(lambda trail: trail.over, self._trails))
            del self._trails[: len(judged)]
            self._judged_blocks += sum(len(trail.blocks) for trail in judged)
            self._judged_asked += sum(trail.asked for trail in judged)
            if self._judged_blocks < JUDGED_BLOCKS:
                return
            blocks, asked = self._judged_blocks, self._judged_asked
        else:
            self._trails = self._trails[-SAMPLES_MAX:]
            if sum(trail.asked > 0 for trail in self._trails) < SAMPLES_ASKED_MIN:
                return
            blocks = sum(len(trail.blocks) for trail in self._trails)
            asked = sum(trail.asked for trail in self._trails)
        self._judged_blocks = self._judged_asked = 0
        saves_all = asked > 0 and asked >= ASKED_SHARE_MIN * blocks
        if saves_all is not self._saves_all:
            for trail in self._trails:
                trail.over = True
            self._saves_all, self._turn, self._trails = saves_all, 0, []
            does = "are saved again" if saves_all else f"of 1 request in {SAMPLED_ONE_IN} are saved"
            log.info("generated blocks %s: %d of %d were asked for", does, asked, blocks)

    def _ask(self, question: tuple[float, list[tuple[Trail, list[Key]]]]) -> None:
        """Ask the nodes about all blocks that wait; our thread calls."""
        now, waiting = question
        store = self._store.get()
        keys = [key for _, of_trail in waiting for key in of_trail]
        read = iter([] if store is None else store.were_read(keys))
        answers = [(trail, now, list(islice(read, len(its)))) for trail, its in waiting]
        self._answers.append([answer for answer in answers if answer[2]])
