"""What the scheduler side tells the workers for one step."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.spi import BlockRef


@dataclass(frozen=True, slots=True)
class Run:
    """Names engine blocks of one request: what the store calls each, and which block it is."""

    request_id: int
    names: tuple[bytes, ...]
    block_ids: tuple[int, ...]
    refs: tuple[tuple[BlockRef, ...], ...] = ()
    """Where the blocks are, for each rank; none for those to save."""


@dataclass(frozen=True, slots=True)
class Orders:
    """Holds what every worker does in one step. It is pickled."""

    loads: tuple[Run, ...] = field(default=())
    """Loads to do before the forward."""
    saves: tuple[Run, ...] = field(default=())
    """Saves to do after the forward, which computes the last of their tokens or has them from
    before."""
