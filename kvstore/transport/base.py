"""Defines what a transport has to do. One suite (tests/contract/transport.py) runs against each."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

from kvstore.errors import UsageError
from kvstore.limits import STREAM_BLOCKS_MAX
from kvstore.nodedir import Announcement
from kvstore.types import Key, Location

if TYPE_CHECKING:
    from kvstore.cuda.base import DeviceRange


class Wanted(NamedTuple):
    """One block to read, and where its payload goes."""

    key: Key
    location: Location
    into: Sequence[memoryview]
    """Writable memory of format 'B', contiguous, together `location.length` bytes."""
    vram: DeviceRange | None = None
    """Memory of the same length on a device of this process, where the block may go instead if the
    transport can do that; its outcome says so. Its content is undefined unless the outcome is a HIT
    there."""


class Read(enum.StrEnum):
    """What became of one block."""

    HIT = "hit"
    """All of it is in place, and was the block of that key."""
    MISS = "miss"
    """It is not there (any more), or its bytes are not the right ones."""
    FAILED = "failed"
    """Nobody knows: the node could not be reached or did not answer in time."""


class Outcome(NamedTuple):
    """What became of one block, and why. Unless it is a HIT, the content of its destination is
    undefined."""

    read: Read
    reason: str = ""
    """For people, unless it is a HIT."""
    kind: int = 0
    meta_length: int = 0
    in_vram: bool = False
    """True if it is in `Wanted.vram`, and not in `Wanted.into`."""


class Transport(Protocol):
    """Reads batches of blocks from one node at a time, for any number of threads.

    A peer that is dead, slow or lying never raises here and never makes a call outlive its
    deadline: its blocks are FAILED or MISS. Only wrong arguments raise (`UsageError`). Those that
    registry.py makes are subclasses.
    """

    name: ClassVar[str]
    """Its registered name."""
    checks_bytes: ClassVar[bool] = False
    """Whether the node takes part in a read and makes a checksum of each block. Other transports
    read the node's memory: only blocks whose record has a checksum, and the node is told what was
    used."""

    @property
    def why_not_to_vram(self) -> str:
        """Return why no block comes to the memory of a device, for people; empty when blocks do."""
        return "it brings nothing to a device"

    def usable(self, node: Announcement) -> bool:
        """Return whether it is worth trying with `node`, which offers it. Asks nobody."""
        ...

    def ready(self, node: Announcement) -> bool:
        """Return whether a read can begin now. Where not, it is prepared beside: another transport
        reads meanwhile, if there is one."""
        return True

    def read(
        self, node: Announcement, wanted: Sequence[Wanted], deadline: float
    ) -> Sequence[Outcome]:
        """Read at most `STREAM_BLOCKS_MAX` blocks of `node`: one outcome for each, in order.

        Ends at `deadline`, in seconds of `time.monotonic`, whatever the peer does: what is not
        there by then is FAILED. When it has returned, or was interrupted, no destination is
        written any more.
        """
        ...

    def close(self) -> None:
        """Give connections back; reads under way in other threads end, with FAILED for what is
        not there yet. Safe to call twice."""
        ...


def check_wanted(wanted: Sequence[Wanted]) -> None:
    """Raise `UsageError` when there are more than `STREAM_BLOCKS_MAX` blocks, or a destination is
    read-only or not as long as its block."""
    if len(wanted) > STREAM_BLOCKS_MAX:
        raise UsageError("wanted", len(wanted), f"at most {STREAM_BLOCKS_MAX} blocks a batch")
    for one in wanted:
        size_bytes = sum(piece.nbytes for piece in one.into)
        if size_bytes != one.location.length or any(piece.readonly for piece in one.into):
            raise UsageError(
                "into", f"{size_bytes} bytes", f"must be {one.location.length} writable bytes"
            )
        if one.vram is not None and one.vram.size_bytes != one.location.length:
            raise UsageError(
                "vram", f"{one.vram.size_bytes} bytes", f"must be {one.location.length} bytes"
            )
