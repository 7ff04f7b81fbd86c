"""Rebuilds a node's state from the slot headers that a former start of it left (warm restart).

What was SEALED is a block again. What a client of then may still write to (RESERVED) or
look at without checking (pinned) is held for all of them together, as session `FORMER`,
until the last of them is known to have let go (rule 5). The rest is free. Generations go
on where they were, so that a reader that mapped the segment before still notices a reuse.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

from kvstore.core.bounded import NO_TENANT
from kvstore.core.events import Bounds, Keep, Mark, Seal, Write
from kvstore.core.memory.granules import PAGE, granules_of, within
from kvstore.core.memory.slots import Slot, SlotState
from kvstore.core.node import NodeCore
from kvstore.keys import ttl_of
from kvstore.limits import PENDING_REMOVE_MAX, RETAINED_S_MAX

_AGE = itemgetter(1, 0)
"""The age of a `Seal`: its generation, then its slot."""


class HeldSlot(NamedTuple):
    """A slot that a client of a former start may use, and that holds no block."""

    slot_id: int
    generation: int
    granule: int
    size: int
    """Size in granules."""
    reserved: bool
    """True if a client may write to it; otherwise it was dropped while it was pinned."""


class Seen(NamedTuple):
    """What the headers of a segment show when a node is started again."""

    bounds: Bounds
    sealed: list[Seal]
    """Whole headers of blocks, as they were written."""
    pinned: set[int]
    """Slots among `sealed` that clients have pinned."""
    held: list[HeldSlot]
    damaged: list[Mark]
    """Headers that say SEALED and are not whole; they are given as they will be marked: FREE."""
    gone: list[Seal]
    """Blocks that had left before the end, of which the index may not have heard."""
    retained: Sequence[Keep] = ()
    """Until when blocks among `sealed` are to stay."""


def recover(core: NodeCore, seen: Seen, former_epoch: int, now: float) -> list[Write]:
    """Fill a fresh `core`; the header writes that are due before anyone is served.

    `former_epoch` is that of the records the index holds, `now` the time of the node's clock, which
    goes on over its starts. All blocks must be
    published anew, under the new epoch, the last saved first: generations, of which a node
    has one count, say in which order they were reserved. When each was used last, and how
    often, is not known. Raises `InternalError` when slots overlap.
    """
    core.blocks.restore(seen.bounds)
    core.blocks.allocator.restore(
        [
            *((b.slot_id * PAGE + b.granule, granules_of(b.length)) for b in seen.sealed),
            *((h.slot_id * PAGE + h.granule, h.size) for h in seen.held),
        ],
        seen.bounds.used_below * PAGE,
        seen.bounds.used_from * PAGE,
    )
    writes: list[Write] = [*seen.damaged]
    core.blocks.counts["recovery_dropped"] += len(seen.damaged)
    for held in seen.held:
        _hold(core, held.slot_id, held.generation, reserved=held.reserved)
        if held.reserved:  # what was on its way there had its term already
            writes.append(Keep(held.slot_id, 0, 0))
    evictable: list[Slot] = []
    kept = {keep.slot_id: keep for keep in seen.retained}
    # The latest first: of two blocks of one key, which no node writes, that one stays.
    for block in sorted(seen.sealed, key=_AGE, reverse=True):
        slot = _found(core, block.slot_id, block.generation, SlotState.SEALED)
        dies_at = _end_of_life(block, kept, now)
        if block.key in core.blocks.by_key or dies_at is None:
            _drop(core, slot, block, writes, pinned=block.slot_id in seen.pinned)
            if block.slot_id in kept:
                writes.append(Keep(block.slot_id, 0, 0))
            continue
        _describe(slot, block, former_epoch)
        slot.record = core.blocks.record(slot, core.epoch)
        core.blocks.by_key[block.key] = slot
        core.blocks.listed.add(slot)
        if dies_at:
            core.blocks.bounded.add(slot, dies_at)
        elif block.slot_id in kept:
            _retain(core, slot, kept[block.slot_id], now, writes)
        if block.slot_id in seen.pinned:
            _pin(core, slot)
        else:
            evictable.append(slot)
        core.blocks.outbox.publish_again(slot)
    core.blocks.by_key = dict(reversed(core.blocks.by_key.items()))
    core.blocks.counts["recovered"] = len(core.blocks.by_key)
    core.blocks.allocator.begins(now)
    core.blocks.allocator.restored(reversed(evictable))
    for block in seen.gone:
        _disown(core, block, former_epoch)
    return writes


def fits(seal: Seal, size_bytes: int) -> bool:
    """Return whether a node with so large a segment can have written this header."""
    return 0 <= seal.meta_length <= seal.length and within(
        seal.slot_id, seal.granule, granules_of(seal.length), size_bytes
    )


def _found(core: NodeCore, slot_id: int, generation: int, state: SlotState) -> Slot:
    """Give a slot the state in which it was found. Nowhere else does a state come from elsewhere
    than the table of transitions."""
    slot = core.blocks.allocator.slot(slot_id)
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


def _hold(core: NodeCore, slot_id: int, generation: int, *, reserved: bool) -> None:
    former = core.former()
    if reserved:
        slot = _found(core, slot_id, generation, SlotState.RESERVED)
        former.reserved[slot.slot_id] = slot
        core.blocks.counts["recovery_dropped"] += 1
    else:
        slot = _found(core, slot_id, generation, SlotState.DOOMED)
        _pin(core, slot)


def _end_of_life(block: Seal, kept: dict[int, Keep], now: float) -> int | None:
    """Return when the life of `block` ends, 0 when it has no bound; None when it is over, or its
    end is not recorded."""
    ttl_s = ttl_of(block.namespace_id)
    if not ttl_s:
        return 0
    keep = kept.get(block.slot_id)
    lives = keep is not None and keep.tenant == NO_TENANT and now < keep.until_s <= now + ttl_s + 1
    return keep.until_s if keep is not None and lives else None


def _retain(core: NodeCore, slot: Slot, keep: Keep, now: float, writes: list[Write]) -> None:
    """Go on with a promise that is not over; no client can have been promised more than
    `RETAINED_S_MAX`."""
    if keep.tenant != NO_TENANT and now < keep.until_s <= now + RETAINED_S_MAX + 1:
        core.blocks.retained.add(slot, keep.until_s, keep.tenant)
    else:
        writes.append(Keep(slot.slot_id, 0, 0))


def _drop(core: NodeCore, slot: Slot, block: Seal, writes: list[Write], *, pinned: bool) -> None:
    writes.append(Mark(block.slot_id, SlotState.FREE, block.generation))
    core.blocks.counts["recovery_dropped"] += 1
    if pinned:
        slot.state = SlotState.DOOMED
        _pin(core, slot)
    else:
        slot.state = SlotState.FREE
        if ttl_of(block.namespace_id):
            core.blocks.wipe(slot, writes)  # it has no key: nothing of it is to stay
        core.blocks.allocator.became_free(slot)


def _pin(core: NodeCore, slot: Slot) -> None:
    slot.pins = 1
    core.former().pins[slot.slot_id] = 1


def _disown(core: NodeCore, block: Seal, former_epoch: int) -> None:
    """Queue the removal of its record, which may still be in the index. Compare-and-delete removes
    that record alone."""
    if core.blocks.outbox.removals_pending >= PENDING_REMOVE_MAX:
        return
    slot = Slot(block.slot_id * PAGE + block.granule, granules_of(block.length))
    slot.generation = block.generation
    _describe(slot, block, former_epoch)
    core.blocks.outbox.remove(slot.key, core.blocks.record(slot, former_epoch))
