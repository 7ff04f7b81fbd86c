"""What a node says about itself. Reads the core, changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.core.slots import SlotState
from kvstore.types import Key

if TYPE_CHECKING:
    from kvstore.core.node import NodeCore

BlockRow = tuple[Key, int, int, int]
"""(key, length in bytes, namespace id, pins) of a sealed block."""


def stats(core: NodeCore, now: float) -> dict[str, int | float]:
    """Counts since the start and what is there now; sizes in bytes, times in seconds."""
    reserved = [slot for session in core.sessions() for slot in session.reserved.values()]
    sealed = [slot for slot in core.by_key.values() if slot.state is SlotState.SEALED]
    return {
        **core.counts,
        "capacity_bytes": core.allocator.capacity_bytes,
        "arena_bytes": core.allocator.arena_bytes,
        "arenas": len(core.allocator.arenas),
        "arenas_free": core.allocator.free_arenas,
        "blocks": len(sealed),
        "block_bytes": sum(slot.length for slot in sealed),
        "reserved": len(reserved),
        "oldest_reservation_s": max((now - slot.reserved_at for slot in reserved), default=0.0),
        "pinned": sum(len(session.pins) for session in core.sessions()),
        "unpublished": core.outbox.publications_pending,
        "removals_pending": core.outbox.removals_pending,
        "removals_forgotten": core.outbox.forgotten,
    }


def listing(core: NodeCore, after: bytes, at_most: int) -> list[BlockRow]:
    """Sealed blocks in key order, from the first key above `after`."""
    keys = sorted(
        key for key, slot in core.by_key.items() if key > after and slot.state is SlotState.SEALED
    )
    slots = (core.by_key[key] for key in keys[:at_most])
    return [(slot.key, slot.length, slot.namespace_id, slot.pins) for slot in slots]
