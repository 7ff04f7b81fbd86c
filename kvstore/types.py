"""Defines the terms of the design as types: keys, locations and the results of a put.

Nothing here does I/O; everything above imports from here.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:
    from typing_extensions import Buffer

KEY_BYTES = 32
"""Size of a key. Bytes 0..8 are the run tag, 8..32 the chained digest (see keys.py)."""

TAG_BYTES = 8

Key = bytes
"""32 bytes: the chained hash of a whole prefix up to a block's end, bound to a namespace."""

Value: TypeAlias = Any
"""What a caller puts and gets: bytes of any kind, a numpy array, a torch tensor. It has no static
type, because neither library need be there."""


class Array(Protocol):
    """An array of numpy's or a tensor of torch's, to type checkers."""

    def __array__(self) -> object: ...


class Rows(Array, Protocol):
    """Something that has a length."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: Any, /) -> Any: ...


ValueLike: TypeAlias = "Buffer | Array"
"""`Value`, as type checkers see it from outside."""
Tokens: TypeAlias = "Sequence[int] | Rows"
StrPath: TypeAlias = "str | os.PathLike[str]"


class Location(NamedTuple):
    """Where one block is. A hint: rule 4 makes a stale one a miss, never wrong bytes."""

    node_id: int
    """64-bit id of the owning node; stable over its restarts."""
    epoch: int
    """Grows with each start of that node (32 bits)."""
    segment: int
    slot: int
    generation: int
    """Grows with each reuse of the slot."""
    granule: int
    """Number of the KiB in its page at which the slot begins."""
    length: int
    """Payload bytes in the slot."""
    checksum: int
    """xxh3-64 of the payload, 0 when none was computed."""


DiskKeys = Mapping[bytes, bytes]
"""What disks are encrypted with, by the ids of the keys; the first one encrypts (secret.py)."""


class DiskPlace(NamedTuple):
    """Where a block lies on a node's disks."""

    device: int
    """0 to 15: its number at this start of the node."""
    page: int
    """First 4 KiB page of its payload within the device."""
    lap: int
    """Which filling of the region it is in."""


class DiskBlock(NamedTuple):
    """A block on disk, as the table tells it."""

    key: Key
    place: DiskPlace
    length: int
    kind: int
    meta_length: int
    checksum: int
    """xxh3-64 of the payload; never 0 on disk."""
    namespace_id: int
    tag: bytes = b""
    """Of AES-GCM (segment/disk/seal.py); empty where it is not encrypted."""


class Kind(enum.IntEnum):
    """What a value was when it was put, so that a get can give the same back."""

    BLOCK = 0
    """Raw bytes of a KV block, shape known to the caller."""
    BYTES = 1
    NUMPY = 2
    TORCH = 3


class PutStatus(enum.StrEnum):
    """What a put did. No status is an error: a cache may decline."""

    STORED = "stored"
    EXISTS = "exists"
    DIFFERS = "differs"
    """A different value is stored under the key, and stays there."""
    IN_PROGRESS = "in_progress"
    """Another writer holds a reservation for this key."""
    REJECTED = "rejected"


IN_STORE = frozenset({PutStatus.STORED, PutStatus.EXISTS})


class PutResult(NamedTuple):
    """Result of one put; truthy when this value was in the store then. What is not retained may be
    evicted by the next one, of the same call too."""

    status: PutStatus
    reason: str = ""
    """Why it was rejected, or which value is there instead; empty otherwise."""

    def __bool__(self) -> bool:
        return self.status in IN_STORE


STORED = PutResult(PutStatus.STORED)
EXISTS = PutResult(PutStatus.EXISTS)
IN_PROGRESS = PutResult(PutStatus.IN_PROGRESS)


class Retained(enum.IntEnum):
    """What became of the wish to retain one block; true when it is YES, and its name as text. The
    numbers are part of the protocol."""

    YES = 0
    """It is retained; of a release: not for this tenant (any more)."""
    ABSENT = 1
    """It is not there, or not sealed yet."""
    NODE_BUDGET = 2
    """Its node retains as much as it may (`Limits.retained_percent`)."""
    TENANT_BUDGET = 3
    """Its node retains as much for this tenant as it may (half of `Limits.retained_percent`)."""
    OTHERS = 4
    """Another tenant retains it, for a shorter time: that tenant's budget pays, and nobody else
    ends or lengthens it."""
    BOUNDED = 5
    """Its namespace bounds its life, which wins over a wish to retain it."""

    def __bool__(self) -> bool:
        return self is Retained.YES

    def __str__(self) -> str:
        return self.name

    def __format__(self, spec: str) -> str:
        return format(self.name, spec)


class Tier(enum.StrEnum):
    """Where a block lies, seen from who reads it; the nearest first."""

    VRAM = "vram"
    """Memory of a device of this host."""
    HOST = "host"
    """Memory of this host."""
    DISK = "disk"
    """A disk of this host."""
    OTHER_HOST = "other_host"


def rejected(reason: str) -> PutResult:
    return PutResult(PutStatus.REJECTED, reason)


NO_SPACE = rejected("no space: every slot that fits is reserved or pinned")
"""There is no room at this moment; it is worth another try soon."""
