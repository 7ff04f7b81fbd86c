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

NAMESPACES_TOLD_MAX = 4
"""Namespaces, those with most bytes, of which all nodes are told."""
SPACE_BYTES = "namespace_bytes:"
"""What a namespace's id stands behind, in the name of a number."""
TOLD_OF_DISKS = ("disk_bytes", "disk_capacity_bytes")
"""What all nodes are told of one's disks."""
READ_CODE, UNKNOWN_CODE, SEALED_CODE, RESERVED_CODE, ON_DISK_CODE = -2, -1, 0, 1, 32
"""Codes of what became of a key; further codes are those of `GoneWhy`. READ is SEALED, and somebody
has read it."""


def stats(core: NodeCore, now: float) -> Counters:
    """Return counts since the start and what is there now; sizes in bytes, times in seconds."""
    reserved = [slot for session in core.sessions() for slot in session.reserved.values()]
    former = core.former()
    return {
        **core.blocks.counts,
        **core.blocks.watched.numbers(),
        **core.reuse.told(),
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
        **(core.disk.numbers() if core.disk is not None else {}),
    }


def counts(core: NodeCore) -> dict[str, int]:
    """Return the part of `stats` that costs nothing, for every heartbeat."""
    reported = ("stored", "exists", "rejected", "evicted")
    spaces = core.blocks.listed.bytes_by_namespace(NAMESPACES_TOLD_MAX)
    disk = core.disk.numbers() if core.disk is not None else None
    return {
        **{name: core.blocks.counts[name] for name in reported},
        **core.blocks.watched.for_heartbeat(),
        **{f"{SPACE_BYTES}{namespace_id:x}": size for namespace_id, size in spaces},
        "blocks": len(core.blocks.by_key),
        "block_bytes": core.blocks.listed.bytes,
        "pinned": sum(len(session.pins) for session in core.sessions()),
        "unpublished": core.blocks.outbox.publications_pending,
        **({name: disk[name] for name in TOLD_OF_DISKS} if disk is not None else {}),
    }


def explain(core: NodeCore, keys: Sequence[Key], now: float) -> Explained:
    """Return what became of each of `keys` here, and which namespaces have blocks here."""
    fates = [_fate(core, key, now) for key in keys]
    return fates, core.blocks.departures.reaches_back_s(now), _namespaces(core)


def _fate(core: NodeCore, key: Key, now: float) -> Fate:
    slot = core.blocks.by_key.get(key)
    if slot is not None:
        if slot.state is SlotState.SEALED:
            return READ_CODE if slot.read else SEALED_CODE, 0.0
        return RESERVED_CODE, max(now - slot.reserved_at, 0.0)
    if core.disk is not None and core.disk.there(key) is not None:
        return ON_DISK_CODE, 0.0
    departure = core.blocks.departures.get(key)
    if departure is None:
        return UNKNOWN_CODE, 0.0
    return int(departure.why), max(now - departure.at, 0.0)


def _namespaces(core: NodeCore) -> list[NamespaceRow]:
    """Return the namespaces with most blocks first, at most as many as the node remembers the
    fields of."""
    fields = {namespace.id: namespace.canonical() for namespace in core.namespaces.all()}
    most = core.blocks.listed.namespaces(NAMESPACES_MAX)
    return [(namespace_id, count, fields.get(namespace_id, b"")) for namespace_id, count in most]


def listing(core: NodeCore, after: bytes, at_most: int, now: float) -> list[BlockRow]:
    """Return a page of the sealed blocks behind the key `after` (listed.py)."""
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
