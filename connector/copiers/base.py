"""Defines what a copier does: gather engine blocks into a store block and scatter them back.

The contract suite tests/contract/kvblocks.py runs against every copier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

from kvstore.spi import Buffer

Payload = Buffer
"""The memory of a payload. It is on a device only where `KVMemory.device` allows it."""


class HeadPart(NamedTuple):
    """Names a range of a payload's heads and where it goes among the engine's."""

    payload_heads: int
    """Heads of the whole payload."""
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
    """Stands for work that was submitted to a device: the part of torch's events that is used."""

    def synchronize(self) -> object:
        """Return when the work is done. There is no deadline: a device cannot be told to stop, and
        other threads wait for this one only up to their own deadlines."""
        ...


class KVCopier(Protocol):
    """Copies between an engine's KV and payloads laid out `[layer][head][token][C]`.

    With `layer` only that layer of each payload, one contiguous part of it, is
    copied. A call ends when all of it is done.
    """

    batch_blocks: int
    """Store blocks that are best copied together. It is one where a batch gains nothing, so that a
    block that fails does not affect others."""

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
    """Return the context of `KVMemory.holding` where nothing is page-locked."""
    return nullcontext()


class KVMemory(NamedTuple):
    """Holds the copiers of all of an engine's KV."""

    groups: list[KVCopier]
    """One copier per KV cache group."""
    close: Callable[[], None]
    """Returns what the copiers hold of the system; nothing may be copied afterwards."""
    device: int | None = None
    """Ordinal of the device whose memory may hold payloads, too."""
    holding: Holding = nothing_held
    """A context that is entered while somebody else copies between that device and buffers of the
    store: the buffers stay page-locked as they are."""
