"""Defines what a node answers, one type for each kind of question. Plain data, no behaviour.

Threads of the node's own process get it as it is; protocol/control_replies.py says it in bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from kvstore.types import Key, Kind, PutResult, Retained, rejected


class Grant(NamedTuple):
    """A slot that is the asking session's own until it commits, aborts or is dead (rule 5)."""

    slot_id: int
    generation: int
    offset: int
    """Bytes from the start of the segment."""


grant_of: Callable[[tuple[int, int, int]], Grant] = partial(tuple.__new__, Grant)
"""As `Grant(...)`, without taking its parts apart: there is one for each block."""
NOT_HELD = rejected("not reserved by this client (any more)")
PutAnswer = Grant | PutResult
"""To `Reserve`, for each key: where to write it, or what became of it already."""
PinAnswer = bytes | str | None
"""To `Pin`, for each key: its record, why it is not pinned, or None when it is not there."""


class ResetAnswer(NamedTuple):
    """Answer to `Reset`."""

    number: int
    """Which the reset got."""
    dropped: int


class BlockRow(NamedTuple):
    """Answer to `Listing`, of which there is one for each sealed block."""

    key: Key
    size_bytes: int
    namespace_id: int
    pins: int
    kind: Kind
    age_s: float | None
    """Since it was saved; None when that was before the node's start."""
    idle_s: float | None
    """Since it was last used; None when that was before the node's start."""
    name: bytes
    """What its user calls it; empty when the node does not know."""


Fate = tuple[int, float]
"""(code, age in seconds: of the departure or the reservation, 0 where there is none); the codes
are in report.py and those of `GoneWhy`"""
NamespaceRow = tuple[int, int, bytes]
"""(namespace id, blocks, fields as canonical JSON; empty when no client has told)"""
Explained = tuple[list[Fate], float | None, list[NamespaceRow]]
"""To `Explain`: a fate for each key, how far back departures are known (None: to the start),
namespaces."""
Counters = dict[str, int | float]
"""To `Stat`."""


class ColdBlock(NamedTuple):
    """Answer to `Coldest`: a block that is to leave, pinned for whoever asked."""

    key: Key
    slot: int
    generation: int
    offset: int
    """Of the payload, in the segment."""
    length: int
    namespace_id: int
    checksum: int = 0
    """As it was saved with; 0: none."""


Answer = (
    list[PutAnswer]
    | list[PutResult]
    | list[PinAnswer]
    | list[Retained]
    | list[bool]
    | list[BlockRow]
    | list[ColdBlock]
    | ResetAnswer
    | Explained
    | Counters
    | int
    | None
)
