"""A node's state from the slot headers that a former start of it left (warm restart).

What was SEALED is a block again. What a client of then may still write to (RESERVED) or
look at without checking (pinned) is held for all of them together, as session `FORMER`,
until the last of them is known to have let go (rule 5). The rest is free. Generations go
on where they were, so that a reader that mapped the segment before still notices a reuse.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import itemgetter
from typing import NamedTuple

from kvstore.core.events import Mark, Seal, Write
from kvstore.core.node import NodeCore
from kvstore.core.sizes import SLOT_BYTES
from kvstore.core.slots import Slot, SlotState

_AGE = itemgetter(1, 0)
"""Of a `Seal`: its generation, then its slot."""


class HeldSlot(NamedTuple):
    """A slot that a client of a former start may use, and that holds no block."""

    slot_id: int
    generation: int
    reserved: bool
    """It may be written to; otherwise it was dropped while it was pinned."""


class ArenaSeen(NamedTuple):
    """What the headers of one arena say. They agree about its size class."""

    arena: int
    size_class: int
    """-1: nothing lives in it."""
    generation: int
    """The highest of all its slots."""
    sealed: list[Seal]
    """Whole headers of blocks, as they were written."""
    pinned: set[int]
    """Slots among `sealed` that clients have pinned."""
    held: list[HeldSlot]
    damaged: list[Mark]
    """Headers that say SEALED and are not whole, as they will be marked: FREE."""
    gone: list[Seal]
    """Blocks that had left before the end: the index may not have heard of it."""


def recover(core: NodeCore, arenas: Iterable[ArenaSeen], former_epoch: int) -> list[Write]:
    """Fill a fresh `core`; the header writes that are due before anyone is served.

    `former_epoch` is that of the records the index holds. All blocks must be
    published anew, under the new epoch, the last used first. In which order is not known:
    slots of a class are reused in turn, so a lower generation counts as longer ago.
    """
    seen = list(arenas)
    core.allocator.restore((a.arena, a.size_class, a.generation) for a in seen)
    writes: list[Write] = []
    for arena in seen:
        writes += arena.damaged
        core.counts["recovery_dropped"] += len(arena.damaged)
        for held in arena.held:
            _hold(core, held)
    blocks = [block for arena in seen for block in arena.sealed]
    blocks.sort(key=_AGE)
    pinned: set[int] = set().union(*(arena.pinned for arena in seen))
    evictable: list[Slot] = []
    for block in blocks:
        if block.key in core.by_key:  # two blocks of one key: not written by any node
            writes.append(Mark(block.slot_id, SlotState.FREE, block.generation))
            core.counts["recovery_dropped"] += 1
            if block.slot_id in pinned:
                _hold(core, HeldSlot(block.slot_id, block.generation, False))
            continue
        slot = _found(core, block.slot_id, block.generation, SlotState.SEALED)
        _describe(slot, block, former_epoch)
        slot.record = core.record(slot, core.epoch)
        core.by_key[block.key] = slot
        if block.slot_id in pinned:
            _pin(core, slot)
        else:
            evictable.append(slot)
    core.counts["recovered"] = len(core.by_key)
    core.allocator.restored(evictable)
    core.allocator.restored(_held_by_former(core), held=True)
    for slot in reversed(core.by_key.values()):
        core.outbox.publish_again(slot)
    for arena in seen:
        for block in arena.gone:
            _disown(core, block, former_epoch)
    return writes


def fits(seal: Seal, slots_per_arena: int, arena_bytes: int) -> bool:
    """Whether a node with such arenas can have written this header."""
    if seal.size_class >= len(SLOT_BYTES):
        return False
    slot_bytes = SLOT_BYTES[seal.size_class]
    position = seal.slot_id % slots_per_arena
    return (
        seal.meta_length <= seal.length <= slot_bytes and (position + 1) * slot_bytes <= arena_bytes
    )


def _found(core: NodeCore, slot_id: int, generation: int, state: SlotState) -> Slot:
    """The one place where a slot gets its state from elsewhere than the table of transitions."""
    slot = core.allocator.slot(slot_id)
    assert slot is not None
    assert slot.state is SlotState.FREE
    slot.generation = generation
    slot.state = state
    return slot


def _describe(slot: Slot, block: Seal, former_epoch: int) -> None:
    slot.key = block.key
    slot.length = block.length
    slot.kind = block.kind
    slot.meta_length = block.meta_length
    slot.checksum = block.checksum
    slot.namespace_id = block.namespace_id
    slot.former_epoch = former_epoch


def _hold(core: NodeCore, held: HeldSlot) -> None:
    former = core.former()
    if held.reserved:
        slot = _found(core, held.slot_id, held.generation, SlotState.RESERVED)
        former.reserved[slot.slot_id] = slot
        core.counts["recovery_dropped"] += 1
    else:
        slot = _found(core, held.slot_id, held.generation, SlotState.DOOMED)
        _pin(core, slot)


def _pin(core: NodeCore, slot: Slot) -> None:
    slot.pins = 1
    core.former().pins[slot.slot_id] = 1


def _held_by_former(core: NodeCore) -> list[Slot]:
    former = core.former()
    pinned = [core.allocator.slot(slot_id) for slot_id in former.pins]
    return [*former.reserved.values(), *(slot for slot in pinned if slot is not None)]


def _disown(core: NodeCore, block: Seal, former_epoch: int) -> None:
    """Its record may be in the index still; compare and delete takes that one alone."""
    if core.outbox.removals_pending >= core.limits.pending_remove:
        return
    slot = Slot(block.slot_id, 0, block.size_class, block.generation)
    _describe(slot, block, former_epoch)
    core.outbox.remove(slot.key, core.record(slot, former_epoch))
