"""What is true in a simulated world, and the rules that must hold in it."""

from __future__ import annotations

import random
from hashlib import blake2b
from typing import NamedTuple

from kvstore.core.allocator import Allocator
from kvstore.core.events import Mark, Write
from kvstore.core.node import NodeCore
from kvstore.core.report import stats
from kvstore.core.slots import SlotState
from kvstore.segment.header import RESERVED, unpack
from kvstore.testing.sim.faults import Faults
from kvstore.testing.sim.index import SimIndex
from kvstore.testing.sim.memory import SimSegment
from kvstore.types import Key


class ViolationError(AssertionError):
    """A rule of the design does not hold. The message carries the seed."""


class Grant(NamedTuple):
    client: int
    slot: int
    generation: int


def content(key: Key, put: int, size_bytes: int) -> bytes:
    """What put number `put` saves under `key`: any mixture with another put shows."""
    unit = blake2b(key + put.to_bytes(8, "little"), digest_size=16).digest()
    return (unit * (size_bytes // 16 + 1))[:size_bytes]


class World:
    """Everything the actors share, and the referee."""

    def __init__(self, seed: int, faults: Faults) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.faults = faults
        self.index = SimIndex(self.rng)
        self.step = 0
        self.puts: dict[Key, dict[int, int]] = {}
        """Puts by key: number -> size. Only these bytes may ever be read."""
        self.writing: dict[tuple[int, int], Grant] = {}
        """(epoch, slot) that a living client may be writing to at this moment."""
        self.pinned: dict[tuple[int, int], int] = {}
        """(epoch, slot) -> open pins of living clients."""
        self.generations: dict[tuple[int, int], int] = {}
        self.counts: dict[str, int] = {}

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def fail(self, rule: str) -> None:
        raise ViolationError(f"seed {self.seed}, step {self.step}: {rule}")

    # --- checks at every step ----------------------------------------------

    def begin_put(self, key: Key, size_bytes: int) -> tuple[int, bytes]:
        puts = self.puts.setdefault(key, {})
        number = sum(map(len, self.puts.values()))
        puts[number] = size_bytes
        return number, content(key, number, size_bytes)

    def check_hit(self, key: Key, data: bytes) -> None:
        """Rule 1: exactly the bytes of one put of this key."""
        for number, size_bytes in self.puts.get(key, {}).items():
            if size_bytes == len(data) and content(key, number, size_bytes) == data:
                return
        self.fail(f"rule 1: a hit for {key.hex()[:12]} gave bytes that nobody saved for it")

    def check_write(self, epoch: int, write: Write, segment: SimSegment) -> None:
        """Before a node's store: rules 4 and 5, and generations that only grow."""
        if not isinstance(write, Mark):
            return
        place = (epoch, write.slot_id)
        if write.generation < self.generations.get(place, 0):
            self.fail(f"slot {write.slot_id}: generation went back to {write.generation}")
        if write.state == RESERVED:
            if write.generation <= self.generations.get(place, -1):
                self.fail(f"slot {write.slot_id}: generation {write.generation} used twice")
            writer = self.writing.get(place)
            if writer is not None:
                self.fail(f"rule 5: slot {write.slot_id} reused while {writer} may write")
            if self.pinned.get(place):
                self.fail(f"a pinned slot ({write.slot_id}) was reused")
        self.generations[place] = write.generation

    def check_publication(self, core: NodeCore, segment: SimSegment, key: Key, slot: int) -> None:
        """Rule 3: what is published is SEALED and whole."""
        header = unpack(segment.header(slot))
        if header is None or header.key != key:
            self.fail(f"rule 3: slot {slot} was published before it was sealed")
            return
        offset = core.by_key[key].offset
        self.check_hit(key, bytes(segment.payload[offset : offset + header.length]))

    # --- checks on a node ------------------------------------------------------

    def check_node(self, core: NodeCore) -> None:
        """Free, reserved, sealed and doomed slots add up, and no slot is in two lists."""
        allocator: Allocator = core.allocator
        for arena in allocator.arenas:
            busy = 0
            for position, slot in arena.slots.items():
                if slot.slot_id != arena.index * allocator.slots_per_arena + position:
                    self.fail(f"slot {slot.slot_id} stands in the wrong place")
                free = allocator.is_free(slot)
                if free != (slot.state is SlotState.FREE):
                    self.fail(f"slot {slot.slot_id} is {slot.state.name}, listed free: {free}")
                evictable = slot.state is SlotState.SEALED and slot.pins == 0
                busy += not (free or evictable)
                if slot.state is SlotState.SEALED and core.by_key.get(slot.key) is not slot:
                    self.fail(f"slot {slot.slot_id} is sealed but its key leads elsewhere")
            if busy != arena.busy:
                self.fail(f"arena {arena.index}: {busy} busy slots, {arena.busy} counted")

    def check_settled(self, core: NodeCore) -> None:
        """After faults stopped: nothing leaked, nothing stale, everything reachable."""
        now = stats(core, 0.0)
        for what in ("reserved", "pinned", "unpublished", "removals_pending"):
            if now[what]:
                self.fail(f"after the faults: {now[what]} {what}")
        truth = self.index.truth()
        for key, slot in core.by_key.items():
            if truth.get(key) != slot.record:
                self.fail(f"after the faults: block {key.hex()[:12]} cannot be found")
        epoch = core.epoch.to_bytes(4, "little")
        for key, record in truth.items():
            slot_or_none = core.by_key.get(key)
            # Records of an earlier start of the node stay until they are
            # overwritten; every reader takes them for a miss.
            if record[4:8] == epoch and (slot_or_none is None or slot_or_none.record != record):
                self.fail(f"after the faults: the index has a stale record of {key.hex()[:12]}")
