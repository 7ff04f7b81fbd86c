"""Defines a slot and the table of its states, on which the whole store rests."""

from __future__ import annotations

import enum
from collections.abc import Iterable

from kvstore.core.memory.granules import GRANULE_BYTES, PAGE
from kvstore.errors import InternalError
from kvstore.record import BlockParts
from kvstore.types import Key


class SlotState(enum.IntEnum):
    """The state of a slot. A header can show the first three; only the node knows DOOMED."""

    FREE = 0
    RESERVED = 1
    """It belongs to one writer; rule 5 says until when."""
    SEALED = 2
    DOOMED = 3
    """It was dropped while pinned: readers see FREE, but the bytes stay until the last unpin."""


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
"""All transitions; any other is our bug."""

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
        "on_disk",
        "pins",
        "placed_at",
        "published",
        "read",
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
        "written",
    )

    def __init__(self, start: int, size: int) -> None:
        """Make an extent of `size` granules (granules.py) from number `start` of its segment."""
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
        """Ticks of the allocator, not time."""
        self.record = b""
        """The record for the index; set when sealed."""
        self.published = False
        """The index may hold `record`."""
        self.former_epoch = 0
        """Epoch of the start that sealed it, if not this one: the index may hold a record of that
        epoch."""
        self.reserved_at = 0.0
        """Time on the node's clock; 0 when a former start granted it."""
        self.used_at = 0.0
        """Time on the node's clock; 0 when nobody has used it since that start."""
        self.read = False
        """Whether somebody has read it since this start of the node."""
        self.void = False
        """RESERVED, but its key was cleared meanwhile: the commit will not seal it."""
        self.kept_until = 0
        """Second of the node's clock up to which it is retained (retained.py); 0: it is not."""
        self.tenant = 0
        """The tenant for whom it is retained."""
        self.dies_at = 0
        """Second of the node's clock at which its life ends (bounded.py); 0: it has no bound."""
        self.on_disk = False
        """A disk of the node is known to have its block too (disk/tier.py)."""
        self.written = False
        """Whether one had it since it was saved, or when it was."""
        # Only an eviction policy that counts uses changes these (head_start.py).
        self.uses = 0
        """Uses of its block, as the policy counts them; 0: the policy does not hold it."""
        self.counted_at = 0.0
        """Time of the last counted use."""
        self.placed_at = 0.0
        """Time at which it got its place in the order; it may be later than the last counted
        use."""

    @property
    def granule(self) -> int:
        """Return the granule of its page with which the slot begins."""
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
