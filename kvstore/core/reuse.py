"""Estimates what a node of another size would find: hits by bytes, from a sample of keys.

A block that is used again is found if the node holds it and all that was used since: its distance.
Under LRU that is all there is to know, of every size at once. Distances are taken of a sample of
keys, by their hash, so that all uses of a key are in it or none (SHARDS, FAST '15).

The node learns of a use when a client saves blocks, which it looked for in vain or generated, or
says that it has read some; not of a look-up that no save follows, nor of hits in an engine's own
cache. What a save says of its own run, right behind it, is no use. Nothing is decided by any of it.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from math import log2

from kvstore.core.memory.granules import GRANULE_BYTES
from kvstore.core.memory.head_start import SAME_USE_S
from kvstore.core.memory.slots import Slot
from kvstore.types import KEY_BYTES, TAG_BYTES, Key

SAMPLES_MAX = 1 << 12
"""Keys in the sample, those used last: 2 MB with all that stands beside them."""
REACH = 8
"""Times the node's size up to which distances are known: the sample is thinned until it is."""
RUNS_MAX = 2 * SAMPLES_MAX
"""Runs in order before those of the sample are numbered anew, which takes 5 ms."""
LEFT_MAX = 1 << 16
"""Words that remember which keys have left the sample: an unlimited node would have them."""
TIMES = (0.125, 0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6, REACH)
"""Sizes that the curve is told of, in that of the node."""
PER_OCTAVE, OCTAVES = 16, 40
HALVED_EVERY_S = 7 * 86_400.0
"""Time after which what was counted so far counts half."""
SAVE_S = 5.0
"""Time after a save in which it tells of its own run."""
LEFT, FIRST = PER_OCTAVE * OCTAVES, PER_OCTAVE * OCTAVES + 1
"""Where uses are counted of blocks that had left the sample, and of blocks never seen."""
NEVER = (0, 0.0, 0)
_AT, _END = TAG_BYTES, TAG_BYTES + 8


def _low(thinned: int) -> re.Pattern[bytes]:
    """Return what finds the first bytes of hashes that may be in the sample."""
    return re.compile(b"[\\x00-\\x%02x]" % (255 >> thinned))


class Reuse:
    """The curve of one node, since its start."""

    def __init__(self, capacity_bytes: int, by_key: Mapping[Key, Slot]) -> None:
        self._capacity = capacity_bytes // GRANULE_BYTES
        self._by_key = by_key
        self._thinned = self._granules = 0
        """How often the sample was halved, and what its blocks have."""
        self._low = _low(0)
        self._last: OrderedDict[int, tuple[int, float, int]] = OrderedDict()
        """Hash -> (number of the run that used it last, when, its granules), as last used."""
        self._sums, self._runs = [0] * (RUNS_MAX + 1), 0
        """A Fenwick tree: the granules that each run used last."""
        self._left = array("Q", bytes(8 * LEFT_MAX))
        self._counts = [0.0] * (FIRST + 1)
        """Uses by distance, in steps of one ratio."""
        self._own_run = False
        self._halve_at = 0.0

    def touched(self, keys: Sequence[Key], now: float, *, goes_on: bool) -> None:
        """Note what a client tells of blocks of one prefix, in its order, before the slots learn of
        it. Those that are not here are another node's."""
        if not goes_on:
            slot = self._by_key.get(keys[-1]) if keys else None
            untouched = slot is not None and slot.used_at == slot.reserved_at
            self._own_run = untouched and slot is not None and now - slot.reserved_at < SAVE_S
        self.used(keys, now, counts=not self._own_run)

    def used(self, keys: Sequence[Key], now: float, new: int = 0, *, counts: bool = True) -> None:
        """Note a use of blocks of one prefix, in its order. Those that are not here have `new`
        granules, and are left out where that is 0."""
        # One byte of each key, looked through in C.
        low = self._low.finditer(b"".join(keys)[_AT::KEY_BYTES])
        sampled = [keys[found.start()] for found in low]
        if not sampled:
            return
        if now >= self._halve_at:
            self._counts = [count / 2 for count in self._counts]
            self._halve_at = now + HALVED_EVERY_S
        if self._runs == RUNS_MAX:
            self._number_runs()
        self._runs += 1
        since: dict[int, int] = {}
        """Granules used since a run."""
        taken: Counter[int] = Counter()
        """Granules of each run that are used again now."""
        for hashed, key in ((int.from_bytes(key[_AT:_END], "big"), key) for key in sampled):
            run, at, granules = self._last.get(hashed, NEVER)
            if run == self._runs or hashed >> 64 - self._thinned:
                continue
            if not run:
                slot = self._by_key.get(key)
                granules = new if slot is None else slot.size
                if not granules:
                    continue
                step = LEFT if self._left[hashed % LEFT_MAX] == hashed else FIRST
            else:
                if run not in since:
                    since[run] = self._used_since(run)
                distance = (since[run] + taken[run] << self._thinned) + granules
                step = min(int(log2(distance) * PER_OCTAVE), LEFT - 1)
                taken[run] += granules
            if counts and (not run or now - at >= SAME_USE_S):
                self._counts[step] += 1
            self._last[hashed] = self._runs, now, granules
            self._last.move_to_end(hashed)
            taken[self._runs] -= granules
        for run, granules in taken.items():
            self._add(run, -granules)
        self._granules -= sum(taken.values())
        while len(self._last) > SAMPLES_MAX:
            self._thin()

    def _thin(self) -> None:
        """Forget the block used least recently; within reach, half of the sample."""
        hashes = [next(iter(self._last))]
        if self._granules << self._thinned < REACH * self._capacity:
            self._thinned += 1
            self._low = _low(self._thinned)
            self._counts = [count / 2 for count in self._counts]
            hashes = [hashed for hashed in self._last if hashed >> 64 - self._thinned]
        else:
            self._left[hashes[0] % LEFT_MAX] = hashes[0]
        for hashed in hashes:
            run, _, granules = self._last.pop(hashed)
            self._granules -= granules
            self._add(run, -granules)

    def _used_since(self, run: int) -> int:
        found = self._granules
        while run:
            found -= self._sums[run]
            run &= run - 1
        return found

    def _add(self, run: int, granules: int) -> None:
        while run <= RUNS_MAX:
            self._sums[run] += granules
            run += run & -run

    def _number_runs(self) -> None:
        """Give the runs that have blocks the numbers from 1 on, in their order."""
        self._sums, self._runs, former = [0] * (RUNS_MAX + 1), 0, 0
        for hashed, (run, at, granules) in self._last.items():
            self._runs, former = self._runs + (run != former), run
            self._last[hashed] = self._runs, at, granules
            self._add(self._runs, granules)

    def told(self) -> dict[str, int | float]:
        """Return by name how many uses are counted, and the share of them that nodes of `TIMES`
        this one's size would have found, and an unlimited one; nothing before the first use."""
        if not (uses := sum(self._counts)):
            return {}
        found: dict[str, int | float] = {"reuse_sampled": round(uses)}
        for times in TIMES:
            place = log2(times * self._capacity) * PER_OCTAVE
            whole = int(place)
            known = sum(self._counts[:whole]) + (place - whole) * self._counts[whole]
            found[f"reuse_hit_rate:{times:g}"] = known / uses
        return found | {"reuse_hit_rate:unlimited": 1 - self._counts[FIRST] / uses}
