"""Defines what a node answers, one type for each kind of question. Plain data, no behaviour.

Threads of the node's own process get it as it is; protocol/control_replies.py says it in bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from kvstore.errors import PeerError
from kvstore.types import DiskBlock, DiskPlace, Key, Kind, PutResult, Retained, rejected


class Grant(NamedTuple):
    """A slot that belongs to the asking session until it commits, aborts or is dead (rule 5)."""

    slot_id: int
    generation: int
    offset: int
    """Bytes from the start of the segment."""


grant_of: Callable[[tuple[int, int, int]], Grant] = partial(tuple.__new__, Grant)
"""Does what `Grant(...)` does without unpacking its parts: there is one for each block."""
NOT_HELD = rejected("not reserved by this client (any more)")
PutAnswer = Grant | PutResult
"""The answer to `Reserve` for one key: where to write it, or what became of it already."""
PinAnswer = bytes | str | None
"""The answer to `Pin` for one key: its record, why it is not pinned, or None when it is not
there."""


class ResetAnswer(NamedTuple):
    """The answer to `Reset`."""

    number: int
    """The number that the reset got."""
    dropped: int


class BlockRow(NamedTuple):
    """One row of the answer to `Listing`, for each sealed block."""

    key: Key
    size_bytes: int
    namespace_id: int
    pins: int
    kind: Kind
    age_s: float | None
    """Seconds since it was saved; None when that was before the node's start."""
    idle_s: float | None
    """Seconds since it was last used; None when that was before the node's start."""
    name: bytes
    """The name that its user gave it; empty when the node does not know."""


Fate = tuple[int, float]
"""(code, age in seconds: of the departure or the reservation, 0 where there is none); the codes
are in report.py and those of `GoneWhy`"""
NamespaceRow = tuple[int, int, bytes]
"""(namespace id, blocks, fields as canonical JSON; empty when no client has sent them)"""
Explained = tuple[list[Fate], float | None, list[NamespaceRow]]
"""The answer to `Explain`: a fate for each key, how far back departures are known (None: to the
start), namespaces."""
Counters = dict[str, int | float]
"""The answer to `Stat`."""


class ColdBlock(NamedTuple):
    """One row of the answer to `Coldest`: a block that is to leave, pinned for the asking
    session."""

    key: Key
    slot: int
    generation: int
    offset: int
    """Position of the payload in the segment, in bytes."""
    length: int
    namespace_id: int
    checksum: int = 0
    """The checksum that it was saved with; 0: none."""


class Begin(NamedTuple):
    """A region of a device that is to be begun, once its former blocks are given up."""

    device: int
    region: int
    lap: int
    former_lap: int
    """The lap that it has; 0: it was never begun."""
    reset_number: int
    """The newest reset that the node knows."""


class SpillBlock(NamedTuple):
    """A block that is to be written to a disk."""

    block: DiskBlock
    """As the index is to have it. Its checksum is 0 where the slot has none."""
    slot: int
    """The slot that it is copied from, if that has the generation still when it was copied; -1
    where it is read from `former`."""
    generation: int
    offset: int
    """Position of the payload in the segment, in bytes."""
    former: DiskPlace | None = None
    """Its place in the region that is to be begun."""
    again: bool = False
    """Whether it was on a disk since it was saved, or when it was."""


class SpillPlan(NamedTuple):
    """The answer to `Spill`: what to write, the region to begin afterwards, and what to read back
    into memory because it was used again."""

    blocks: Sequence[SpillBlock]
    begin: Begin | None
    promote: Sequence[DiskBlock]
    clears: int
    """For `Promoted`."""


Answer = (
    list[PutAnswer]
    | list[PutResult]
    | list[PinAnswer]
    | list[Retained]
    | list[bool]
    | list[BlockRow]
    | list[ColdBlock]
    | list[SpillBlock]
    | SpillPlan
    | PeerError
    | ResetAnswer
    | Explained
    | Counters
    | int
    | None
)
