"""What the scheduler side remembers of each request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from connector.base import LoadJob
from connector.lookup import Lookup
from kvstore import Key


@dataclass(slots=True, eq=False)
class Offer:
    """What the last `match` offered; taken up by `allocated`, or not."""

    lookup: Lookup
    start_token: int
    tokens: int


@dataclass(slots=True, eq=False)
class RequestState:
    lookup: Lookup | None = None
    offer: Offer | None = None
    barred: dict[Key, bytes] = field(default_factory=dict)
    """Records of this request that could not be loaded: never offered to it again."""
    failed_loads: int = 0
    present_blocks: int = 0
    """Leading store blocks that the last lookup found: not saved again."""
    saved_blocks: int = 0
    """Leading store blocks that were planned for saving since the last preemption."""
    save_barred: bool = False
    """Computed before a reset: not saved until it is computed anew."""
    keys: tuple[tuple[list[Key], ...], ...] = ()
    """Of the engine's own split, per group and shard."""
    key_hashes: Sequence[bytes] = ()
    """What they were made from."""


@dataclass(slots=True, eq=False)
class LoadUnderWay:
    job: LoadJob
    first_block: int
    """Index in the prefix of the job's first store block."""
