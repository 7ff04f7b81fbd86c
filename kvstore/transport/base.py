"""The transport contract. One suite (tests/contract/transport.py) runs against every one."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvstore.errors import UsageError
from kvstore.limits import STREAM_BLOCKS_MAX
from kvstore.nodedir import Announcement
from kvstore.types import Key, Location


class Wanted(NamedTuple):
    """One block to read, and where its payload goes."""

    key: Key
    location: Location
    into: Sequence[memoryview]
    """Writable, format 'B', contiguous, together `location.length` bytes."""


class Read(enum.StrEnum):
    """What became of one block."""

    HIT = "hit"
    """All of it is in place, and was the block of that key."""
    MISS = "miss"
    """It is not there (any more), or its bytes are not the right ones."""
    FAILED = "failed"
    """Nobody knows: the node could not be reached or did not answer in time."""


class Outcome(NamedTuple):
    """Unless a HIT, what the destination holds is undefined."""

    read: Read
    reason: str = ""
    """For people, when it is no HIT."""
    kind: int = 0
    meta_length: int = 0


class Transfer(Protocol):
    """A batch under way, driven by whoever polls or waits for it. Thread-safe."""

    def poll(self) -> bool:
        """Do what can be done without waiting; True when all outcomes are known."""
        ...

    def wait(self) -> Sequence[Outcome]:
        """One outcome for each block in order, at the deadline at the latest."""
        ...

    def cancel(self) -> None:
        """Give up what is not there yet. When this returns, no destination is written any more."""
        ...


class Transport(Protocol):
    """Reads batches of blocks from one node at a time.

    A peer that is dead, slow or lying never raises here and never makes a call outlive its
    deadline: its blocks are FAILED or MISS. Only wrong arguments raise (`UsageError`).
    """

    @property
    def name(self) -> str: ...

    def submit(self, node: Announcement, wanted: Sequence[Wanted], deadline: float) -> Transfer:
        """Start reading at most `STREAM_BLOCKS_MAX` blocks of `node`.

        `deadline` is in seconds of `time.monotonic`. May wait for a connection, no
        longer than that.
        """
        ...

    def close(self) -> None:
        """Give connections back; transfers under way end as FAILED. Safe to call twice."""
        ...


def check_wanted(wanted: Sequence[Wanted]) -> None:
    """Raises `UsageError` for what no peer is to be blamed for."""
    if len(wanted) > STREAM_BLOCKS_MAX:
        raise UsageError("wanted", len(wanted), f"at most {STREAM_BLOCKS_MAX} blocks a batch")
    for one in wanted:
        size_bytes = sum(piece.nbytes for piece in one.into)
        if size_bytes != one.location.length or any(piece.readonly for piece in one.into):
            raise UsageError(
                "into", f"{size_bytes} bytes", f"must be {one.location.length} writable bytes"
            )
