"""Puts together what a node says about itself. Reads the core, changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvstore.core.answers import BlockRow, Counters, Explained, Fate, NamespaceRow
from kvstore.core.memory.slots import SlotState
from kvstore.limits import NAMESPACES_MAX
from kvstore.types import Key, Kind

if TYPE_CHECKING:
    from kvstore.core.node import NodeCore

UNKNOWN_CODE, SEALED_CODE, RESERVED_CODE = -1, 0, 1
"""What became of a key; further codes are those of `GoneWhy`."""


def stats(core: NodeCore, now: float) -> Counters:
    """Counts since the start and what is there now; sizes in bytes, times in seconds."""
    reserved = [slot for session in core.sessions() for slot in session.reserved.values()]
    former = core.former()
    return {
        **core.blocks.counts,
        "quarantined": len(former.reserved) + len(former.pins),
        "capacity_bytes": core.blocks.allocator.capacity_bytes,
        "free_bytes": core.blocks.allocator.free_bytes,
        "largest_free_bytes": core.blocks.allocator.largest_free_bytes,
        "value_bytes_max": core.blocks.allocator.value_bytes_max,
        "blocks": len(core.blocks.listed),
        "block_bytes": core.blocks.listed.bytes,
        "reserved": len(reserved),
        "oldest_reservation_s": max((now - slot.reserved_at for slot in reserved), default=0.0),
        "pinned": sum(len(session.pins) for session in core.sessions()),
        "retained": len(core.blocks.retained),
        "retained_bytes": core.blocks.retained.bytes,
        "unpublished": core.blocks.outbox.publications_pending,
        "removals_pending": core.blocks.outbox.removals_pending,
        "removals_forgotten": core.blocks.outbox.forgotten,
    }


def counts(core: NodeCore) -> dict[str, int]:
    """The part of `stats` that costs nothing: every heartbeat says it."""
    told = ("stored", "exists", "rejected", "evicted")
    return {
        **{name: core.blocks.counts[name] for name in told},
        "blocks": len(core.blocks.by_key),
        "pinned": sum(len(session.pins) for session in core.sessions()),
        "unpublished": core.blocks.outbox.publications_pending,
    }


def explain(core: NodeCore, keys: Sequence[Key], now: float) -> Explained:
    """Return what became of each of `keys` here, and which namespaces have blocks here."""
    fates = [_fate(core, key, now) for key in keys]
    return fates, core.blocks.gone.reaches_back_s(now), _namespaces(core)


def _fate(core: NodeCore, key: Key, now: float) -> Fate:
    slot = core.blocks.by_key.get(key)
    if slot is not None:
        if slot.state is SlotState.SEALED:
            return SEALED_CODE, 0.0
        return RESERVED_CODE, max(now - slot.reserved_at, 0.0)
    departure = core.blocks.gone.get(key)
    if departure is None:
        return UNKNOWN_CODE, 0.0
    return int(departure.why), max(now - departure.at, 0.0)


def _namespaces(core: NodeCore) -> list[NamespaceRow]:
    """Those with most blocks first; at most as many as the node remembers the fields of."""
    fields = {namespace.id: namespace.canonical() for namespace in core.namespaces.all()}
    most = core.blocks.listed.namespaces(NAMESPACES_MAX)
    return [(namespace_id, count, fields.get(namespace_id, b"")) for namespace_id, count in most]


def listing(core: NodeCore, after: bytes, at_most: int, now: float) -> list[BlockRow]:
    """A page of the sealed blocks behind the key `after` (listed.py)."""
    slots = (core.blocks.by_key[key] for key in core.blocks.listed.page(after, at_most))
    return [
        BlockRow(
            slot.key,
            slot.length,
            slot.namespace_id,
            slot.pins,
            Kind(slot.kind),
            max(now - slot.reserved_at, 0.0) if slot.reserved_at else None,
            max(now - slot.used_at, 0.0) if slot.used_at else None,
            core.blocks.names.get(slot.key, b""),
        )
        for slot in slots
    ]
