"""Defines a slot and the table of its states, on which the whole store rests."""

from __future__ import annotations

import enum
from collections.abc import Iterable

from kvstore.core.memory.granules import GRANULE_BYTES, PAGE
from kvstore.errors import InternalError
from kvstore.record import BlockParts
from kvstore.types import Key


class SlotState(enum.IntEnum):
    """The state of a slot. A header can say the first three; DOOMED only the node knows."""

    FREE = 0
    RESERVED = 1
    """One writer's own; rule 5 says until when."""
    SEALED = 2
    DOOMED = 3
    """Dropped while pinned: readers see FREE, but the bytes stay until the last unpin."""


class SlotEvent(enum.IntEnum):
    """What happens to a slot; `TRANSITIONS` says in which state it may."""

    RESERVE = 0
    COMMIT = 1
    ABORT = 2
    EVICT = 3
    DOOM = 4
    UNPIN = 5


TRANSITIONS: dict[tuple[SlotState, SlotEvent], SlotState] = {
    (SlotState.FREE, SlotEvent.RESERVE): SlotState.RESERVED,
    (SlotState.RESERVED, SlotEvent.COMMIT): SlotState.SEALED,
    (SlotState.RESERVED, SlotEvent.ABORT): SlotState.FREE,
    (SlotState.SEALED, SlotEvent.EVICT): SlotState.FREE,
    (SlotState.SEALED, SlotEvent.DOOM): SlotState.DOOMED,
    (SlotState.DOOMED, SlotEvent.UNPIN): SlotState.FREE,
}
"""Every transition there is; anything else is our bug."""

_NEXT = tuple(tuple(TRANSITIONS.get((s, e)) for s in SlotState) for e in SlotEvent)
"""The same by position, the event first: looking up a pair of enums takes a microsecond, three
times a block."""


class Slot:
    """One place for one block. Mutable; only the node's core changes it."""

    __slots__ = (
        "checksum",
        "counted_at",
        "dies_at",
        "former_epoch",
        "generation",
        "kept_until",
        "key",
        "kind",
        "last_use",
        "length",
        "meta_length",
        "namespace_id",
        "offset",
        "pins",
        "placed_at",
        "published",
        "record",
        "reserved_at",
        "size",
        "slot_id",
        "start",
        "state",
        "tenant",
        "used_at",
        "uses",
        "void",
    )

    def __init__(self, start: int, size: int) -> None:
        """An extent of `size` granules (granules.py) from number `start` of its segment."""
        self.start = start
        self.size = size
        self.slot_id = start // PAGE
        """The page that it begins in, where its header is."""
        self.offset = start * GRANULE_BYTES
        """Bytes from the start of the segment."""
        self.generation = 0
        self.state = SlotState.FREE
        self.key: Key = b""
        self.length = 0
        self.kind = 0
        self.meta_length = 0
        self.namespace_id = 0
        self.checksum = 0
        self.pins = 0
        self.last_use = 0
        """Allocator ticks, not time."""
        self.record = b""
        """What the index says about it; set when sealed."""
        self.published = False
        """The index may hold `record`."""
        self.former_epoch = 0
        """Of the start that sealed it, if not this one: the index may hold a record of then."""
        self.reserved_at = 0.0
        """Of the node's clock; 0 when a former start granted it."""
        self.used_at = 0.0
        """The same; 0 when nobody has used it since that start."""
        self.void = False
        """RESERVED, but its key was cleared meanwhile: the commit will not seal it."""
        self.kept_until = 0
        """Retained up to that second of the node's clock (retained.py); 0: it is not."""
        self.tenant = 0
        """For whom it is retained."""
        self.dies_at = 0
        """Of the node's clock: when its life is over (bounded.py); 0: it has no bound."""
        # Only an eviction policy that counts uses changes these (head_start.py).
        self.uses = 0
        """How often its block was used, as far as the policy counts; 0: it has not seen it."""
        self.counted_at = 0.0
        """When the last of them was."""
        self.placed_at = 0.0
        """Since when it has its place in the order; that may be later."""

    @property
    def granule(self) -> int:
        """The granule of its page with which the slot begins."""
        return self.start % PAGE

    def move(self, event: SlotEvent) -> None:
        """Take the transition for `event`."""
        move_each((self,), event)


def parts_of(slots: Iterable[Slot]) -> list[BlockParts]:
    """Return what headers and records say of each."""
    return [
        (
            slot.slot_id,
            slot.generation,
            slot.key,
            slot.length,
            slot.start % PAGE,
            slot.kind,
            slot.meta_length,
            slot.checksum,
            slot.namespace_id,
        )
        for slot in slots
    ]


def move_each(slots: Iterable[Slot], event: SlotEvent) -> None:
    """Have each of them take the transition for `event`."""
    after = _NEXT[event]
    for slot in slots:
        target = after[slot.state]
        if target is None:
            raise InternalError(
                f"slot {slot.slot_id}, generation {slot.generation}: "
                f"{event.name} in {slot.state.name}"
            )
        slot.state = target
