"""Evicts by last use, with a head start for what was used more than once: policy `head-start`.

A block goes by the time of its last use and a head start, which grows with the uses that are known
of it, in units of the typical gap between two uses of a block. That gap is learned from the uses
themselves: a fixed one is a trap (docs/decisions/0092). Who has left is remembered for a while
(`Ghosts`), so that a block that comes back does not begin anew.

Blocks are of use as prefixes alone, so a block never counts as used less often than the one behind
it: `min_uses`, which whoever walks a run from its end carries along. Anything that forgets single
blocks, or draws lots, punches holes into prefixes.

What the event at hand has used stands in a list of its own, as if used most often, and joins the
others when the next event begins. What was learned counts from then on, too.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heapreplace
from itertools import accumulate
from math import log2

from kvstore.core.memory.slots import Slot
from kvstore.types import TAG_BYTES, Key

USES_MAX = 8
"""The highest number of uses that counts."""
STEP = 4
"""Parts of a gap in which head starts are counted."""
FRESH = 0
"""Number of the list of blocks that the event at hand has used; the other lists have the number of
uses."""
HEADS = tuple(round(1.5 * STEP * log2(uses)) for uses in (USES_MAX, *range(1, USES_MAX + 1)))
"""The head start of each list."""
SAME_USE_S = 1.0
"""Uses within this time count as one: a request is several messages, and may name a block in
each."""
LEARNED_USES_MAX = 5
"""Gaps are learned from blocks with at most this many uses. What all prompts begin with is used all
the time and says nothing of other blocks."""
GAP_FIRST_S, GAP_MAX_S = 100.0, 3600.0
"""The gap until one was learned, and the longest gap. None is shorter than `SAME_USE_S`."""
LEARN_EVERY = 256
"""Gaps that are learned between two computations of the median."""
GAPS_COUNTED_MAX = 4096
"""Above this number, the gaps learned so far count half."""
GAP_BUCKETS = 40
"""Buckets of half an octave from a second on; the last one also has gaps longer than six days."""
TICKS = 1024
"""Uses that are told apart among blocks that go within the same millisecond."""

GHOSTS = 8
"""Ghost words per block, at least."""
GHOST_WORDS_FIRST = 1 << 9
GHOST_WORDS_MAX = 1 << 24
"""The largest number of ghost words, of 4 bytes: those of two million blocks. With more blocks each
has fewer."""
GHOST_S = 1 << 14
"""Seconds after which the time in a ghost repeats."""
GHOST_USES_MAX = 4
_DIGEST_END = TAG_BYTES + 8


class Ghosts:
    """Remembers of keys that left when they were used last, and how often.

    A word has 16 bits of the key's digest, the second in 14 and the uses in 2; 0 is nobody's. Each
    key has one place, and who comes there last has it. The place is the lower bits of the digest
    (never of the tag, which a run of blocks shares), so a table that is twice as large says the
    same when it has each word at both places.
    """

    __slots__ = ("_words",)

    def __init__(self) -> None:
        self._words = array("I", bytes(4 * GHOST_WORDS_FIRST))

    def __len__(self) -> int:
        return len(self._words)

    def hold(self, blocks: int) -> None:
        """Make room for the ghosts of a store of this many blocks."""
        while len(self._words) < min(GHOSTS * blocks, GHOST_WORDS_MAX):
            self._words += self._words

    def note(self, key: Key, used_at: float, uses: int) -> None:
        """Remember a block that left: 16 bits of its digest are in the word, lower bits give its
        place."""
        bits = int.from_bytes(key[TAG_BYTES:_DIGEST_END], "little")
        low_bits = (
            int(used_at) % GHOST_S << 2 | (uses if uses < GHOST_USES_MAX else GHOST_USES_MAX) - 1
        )
        self._words[bits & len(self._words) - 1] = (bits >> 48 or 1) << 16 | low_bits

    def find(self, key: Key, now: float) -> tuple[int, int] | None:
        """Return the uses of a block that left, and how many seconds ago it was used; None when it
        is not remembered."""
        bits = int.from_bytes(key[TAG_BYTES:_DIGEST_END], "little")
        word = self._words[bits & len(self._words) - 1]
        if word >> 16 != (bits >> 48 or 1):
            return None
        return (word & 3) + 1, (int(now) - (word >> 2)) % GHOST_S


class Gaps:
    """Learns how long it usually is until a block is used again."""

    __slots__ = ("_counts", "_new", "typical_s")

    def __init__(self) -> None:
        self._counts = [0] * GAP_BUCKETS
        self._new = 0
        self.typical_s = GAP_FIRST_S

    def learn(self, gap_s: float) -> None:
        """Learn from a block that was used again after `gap_s`, at least a second."""
        self._counts[min(int(2 * log2(gap_s)), GAP_BUCKETS - 1)] += 1
        self._new += 1

    def look(self) -> None:
        """Go by what was learned, if it is enough."""
        if self._new < LEARN_EVERY:
            return
        self._new = 0
        counted = list(accumulate(self._counts))
        middle = next(i for i, below in enumerate(counted) if 2 * below >= counted[-1])
        self.typical_s = min(2 ** ((middle + 0.5) / 2), GAP_MAX_S)
        if counted[-1] > GAPS_COUNTED_MAX:
            self._counts = [count // 2 for count in self._counts]


class HeadStart:
    """Orders by last use and head start; see above. Contract: `EvictionPolicy` (eviction.py).

    What it knows of a block stands in its slot (`uses`, `counted_at`, `placed_at`), and stays there
    while the slot is pinned or retained.
    """

    __slots__ = ("_gaps", "_ghosts", "_lists", "_now")

    def __init__(self) -> None:
        self._lists: list[OrderedDict[Key, Slot]] = [OrderedDict() for _ in HEADS]
        """Blocks by their number of uses, each list in the order of last use."""
        self._ghosts = Ghosts()
        self._gaps = Gaps()
        self._now = 0.0

    def begins(self, now: float) -> None:
        self._now = now
        fresh = self._lists[FRESH]
        if fresh:
            lists = self._lists
            for key, slot in fresh.items():
                lists[slot.uses][key] = slot
            fresh.clear()
            self._ghosts.hold(sum(map(len, lists)))
        self._gaps.look()

    def insert(self, slot: Slot, min_uses: int) -> int:
        if slot.uses:
            self.remove(slot)
            uses = self._used(slot, min_uses) if min_uses else slot.uses
        else:
            uses = min(max(self._uses_before(slot) + 1, min_uses), USES_MAX)
            slot.uses, slot.counted_at = uses, self._now
        slot.placed_at = self._now
        self._lists[FRESH][slot.key] = slot
        return uses

    def _uses_before(self, slot: Slot) -> int:
        """Return the uses that a block had before it was evicted, plus one. It would not have left,
        had its uses been known, so it counts as used once more."""
        ghost = self._ghosts.find(slot.key, self._now)
        if ghost is None:
            return 0
        uses, gap_s = ghost
        if uses == 1 and gap_s >= SAME_USE_S:
            # Who had more has left because his gap is long: he would teach how long others' are.
            self._gaps.learn(gap_s)
        return uses + 1

    def touch(self, slot: Slot, min_uses: int) -> int:
        uses, key, now = slot.uses, slot.key, self._now
        if not uses:
            return min_uses
        fresh = self._lists[FRESH]
        if fresh.get(key) is slot:
            fresh.move_to_end(key)
        else:
            order = self._lists[uses]
            if order.get(key) is slot:
                del order[key]
                fresh[key] = slot
        slot.placed_at = now
        if uses < min_uses or now - slot.counted_at >= SAME_USE_S:
            return self._used(slot, min_uses)
        return uses

    def _used(self, slot: Slot, min_uses: int) -> int:
        """Count a use, of a slot that is not in the list of its uses."""
        uses, since_s = slot.uses, self._now - slot.counted_at
        if since_s >= SAME_USE_S:
            if uses <= LEARNED_USES_MAX:
                self._gaps.learn(since_s)
            uses += 1
            slot.counted_at = self._now
        slot.uses = uses = min(max(uses, min_uses), USES_MAX)
        return uses

    def remove(self, slot: Slot) -> bool:
        key = slot.key
        order = self._lists[slot.uses]
        if order.get(key) is not slot:
            order = self._lists[FRESH]
            if order.get(key) is not slot:
                return False
        del order[key]
        return True

    def left(self, slot: Slot, coldest: Slot) -> None:
        # As one without a head start that was used when the coldest one's would be over.
        slot.placed_at = self._stays_until(coldest)
        slot.uses = 1
        self._lists[1][slot.key] = slot
        self._lists[1].move_to_end(slot.key, last=False)

    def _stays_until(self, slot: Slot) -> float:
        head = HEADS[FRESH if self._lists[FRESH].get(slot.key) is slot else slot.uses]
        return slot.placed_at + head * self._gaps.typical_s / STEP

    def evicted(self, slots: Iterable[Slot]) -> None:
        for slot in slots:
            if slot.uses:
                self._ghosts.note(slot.key, slot.placed_at, slot.uses)

    def coldest(self) -> Iterator[int]:
        each_s = self._gaps.typical_s / STEP
        # Two may go at the same time: then by last use, of which no two are the same in a segment.
        fronts: list[tuple[float, int, int, Slot, Iterator[Slot]]] = []
        for number, order in enumerate(self._lists):
            slots = iter(order.values())
            for slot in slots:
                stays_until = slot.placed_at + HEADS[number] * each_s
                fronts.append((stays_until, slot.last_use, number, slot, slots))
                break
        heapify(fronts)
        while fronts:
            _, _, number, slot, slots = fronts[0]
            yield slot.slot_id
            after = next(slots, None)
            if after is None:
                heappop(fronts)
            else:
                stays_until = after.placed_at + HEADS[number] * each_s
                heapreplace(fronts, (stays_until, after.last_use, number, after, slots))

    def costs(self, coldest: Slot, later: int) -> Callable[[Slot], int]:
        since, tick = self._stays_until(coldest), coldest.last_use

        def cost(slot: Slot) -> int:
            later_ms = max(int((self._stays_until(slot) - since) * 1000), 0)
            ticks = min(max(slot.last_use - tick, 0), TICKS - 1)
            return slot.size * (1 + later * (later_ms * TICKS + ticks))

        return cost
