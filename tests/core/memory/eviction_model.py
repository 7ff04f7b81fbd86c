"""`Model` is the policy `head-start` once more, as slow and as plain as it can be: a list of all
that is held, in the order of use, sorted anew by when each would go."""

import math

from kvstore.core.memory.slots import Slot

HEADS = {1: 0, 2: 6, 3: 10, 4: 12, 5: 14, 6: 16, 7: 17, 8: 18}
"""In quarters of the gap; as docs/decisions/0092 has them."""


def key_of(number):
    """32 bytes: a tag that all share, as blocks of one run do, and what differs as digests do."""
    digest = (number * 0x9E3779B97F4A7C15 % (1 << 64)).to_bytes(8, "little")
    return b"of a run" + digest + bytes(16)


def slot_of(number, place=None):
    slot = Slot(4 * (number if place is None else place), 4)
    slot.key = key_of(number)
    return slot


class Block:
    def __init__(self, uses, now):
        self.uses, self.counted, self.placed = uses, now, now


class Model:
    def __init__(self, words=512, learn_every=256, counted_max=4096):
        self.learn_every, self.counted_max = learn_every, counted_max
        self.now, self.gap_s = 0.0, 100.0
        self.known = {}
        """All blocks that were inserted and not freed, by key."""
        self.order = []
        """Keys of those held, in the order of their use."""
        self.fresh = set()
        self.ghosts = {}
        """Place -> (upper 16 bits, last use, uses)."""
        self.words = words
        self.gaps, self.new = [], 0

    def begins(self, now):
        self.now = now
        if self.fresh:
            while self.words < 8 * len(self.order):
                wider = {place + self.words: ghost for place, ghost in self.ghosts.items()}
                self.ghosts, self.words = {**self.ghosts, **wider}, 2 * self.words
        self.fresh.clear()
        if self.new >= self.learn_every:
            self.new = 0
            half_octaves = sorted(self.gaps)
            middle = half_octaves[(len(half_octaves) - 1) // 2]
            self.gap_s = min(max(2 ** ((middle + 0.5) / 2), 5.0), 3600.0)
            if len(self.gaps) > self.counted_max:
                kept = []
                for one in set(self.gaps):
                    kept += [one] * (self.gaps.count(one) // 2)
                self.gaps = kept

    def learn(self, gap_s):
        if gap_s >= 1:
            self.gaps.append(min(int(2 * math.log2(gap_s)), 39))
            self.new += 1

    def use(self, block, least):
        gap_s = self.now - block.counted
        if gap_s >= 1:
            if block.uses < 6:
                self.learn(gap_s)
            block.uses += 1
            block.counted = self.now
        block.uses = min(max(block.uses, least), 8)
        return block.uses

    def insert(self, slot, least):
        key = slot.key
        block = self.known.get(key)
        if block is None:
            ghost = self.ghosts.get(int.from_bytes(key[8:16], "little") % self.words)
            uses = 1
            if ghost is not None and ghost[0] == key[14:16]:
                uses = ghost[2] + 2
                if ghost[2] == 1:
                    self.learn((int(self.now) - int(ghost[1])) % (1 << 14))
            block = self.known[key] = Block(min(max(uses, least), 8), self.now)
        elif least:
            self.use(block, least)
        self.place(key)
        return block.uses

    def touch(self, slot, least):
        block = self.known.get(slot.key)
        if block is None:
            return least
        self.use(block, least)
        if slot.key in self.order:
            self.place(slot.key)
        return block.uses

    def place(self, key):
        self.known[key].placed = self.now
        if key in self.order:
            self.order.remove(key)
        self.order.append(key)
        self.fresh.add(key)

    def remove(self, slot):
        if slot.key not in self.order:
            return False
        self.order.remove(slot.key)
        self.fresh.discard(slot.key)
        return True

    def freed(self, slot):
        self.known.pop(slot.key, None)

    def evicted(self, slots):
        for slot in slots:
            block = self.known.get(slot.key)
            if block is not None:
                place = int.from_bytes(slot.key[8:16], "little") % self.words
                self.ghosts[place] = slot.key[14:16], block.placed, min(block.uses, 4)

    def stays_until(self, key):
        head = 18 if key in self.fresh else HEADS[self.known[key].uses]
        return self.known[key].placed + head * self.gap_s / 4

    def coldest(self):
        """All keys, in the order in which they would go."""
        return sorted(self.order, key=self.stays_until)
