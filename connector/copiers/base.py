"""Defines what a copier does: gather engine blocks into a store block and scatter them back.

The contract suite tests/contract/kvblocks.py runs against every copier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

from kvstore import Buffer

Payload = Buffer
"""Where a payload is. On a device only where `KVMemory.device` says that it may be."""


class HeadPart(NamedTuple):
    """Names a range of a payload's heads and where it goes among the engine's."""

    payload_heads: int
    """Heads that the whole payload has."""
    source: int
    target: int
    heads: int


class Gather(NamedTuple):
    """Asks for engine blocks, in token order, to be copied into a whole payload."""

    block_ids: Sequence[int]
    out: Payload


class Scatter(NamedTuple):
    """Asks for the payload's engine blocks from number `skip` on to be copied to `block_ids`.

    With `part` only those heads of it, and only those bytes are read.
    """

    payload: Payload
    skip: int
    block_ids: Sequence[int]
    part: HeadPart | None = None


class Ready(Protocol):
    """Stands for work that was submitted to a device: what of torch's events is used."""

    def synchronize(self) -> object:
        """Return when the work is done. No deadline: a device cannot be told to stop, and nobody
        else waits for the calling thread for longer than a deadline of its own."""
        ...


class KVCopier(Protocol):
    """Copies between an engine's KV and payloads laid out `[layer][head][token][C]`.

    With `layer` only that layer of each payload, one contiguous part of it, is
    copied. A call ends when all of it is done.
    """

    batch_blocks: int
    """Store blocks that are best copied together. One, where that gains nothing: what holds up
    or spoils one block then leaves the others alone."""

    def gather_many(self, items: Sequence[Gather], layer: int | None = None) -> None: ...

    def scatter_many(self, items: Sequence[Scatter], layer: int | None = None) -> None: ...

    def mark_ready(self) -> Ready | None:
        """Return a token for "all that was submitted so far has written the KV"; see
        `wait_ready`."""
        ...

    def wait_ready(self, token: Ready | None) -> None:
        """Return when the work before `mark_ready` is done; None stands for none."""
        ...


Holding = Callable[[Iterable[memoryview]], AbstractContextManager[None]]


def nothing_held(buffers: Iterable[memoryview]) -> AbstractContextManager[None]:
    """`KVMemory.holding` where nothing is page-locked."""
    return nullcontext()


class KVMemory(NamedTuple):
    """Holds the copiers of all of an engine's KV."""

    groups: list[KVCopier]
    """One copier per KV cache group."""
    close: Callable[[], None]
    """Give back what the copiers have of the system; nothing may be copied any more."""
    device: int | None = None
    """Ordinal of the device whose memory payloads may be in, too."""
    holding: Holding = nothing_held
    """A context that is held while somebody else copies between that device and buffers of the
    store: they stay page-locked as they are."""
