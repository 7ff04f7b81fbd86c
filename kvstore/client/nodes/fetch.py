"""Reads payloads of other hosts into this process's memory."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvstore.client.nodes.remote import RemoteNodes
from kvstore.client.payloads.out import Out
from kvstore.limits import CLAIMED_BYTES_MAX, META_BYTES_MAX
from kvstore.segment.copying import copy
from kvstore.transport.base import Read, Wanted
from kvstore.types import Key, Location

if TYPE_CHECKING:
    from kvstore.cuda.base import DeviceRange


class RemoteBlock(NamedTuple):
    """A block that a node on another host has, which can be reached."""

    key: Key
    location: Location
    remembered: bool = False
    """It was there when it was last read; nobody was asked whether it still is."""


class OnDisk(RemoteBlock):
    """A block on a disk of a node of this host."""

    __slots__ = ()


class FetchedBlock(NamedTuple):
    """Implements `BlockView`: a block of another host or of a disk, in this process's memory and
    checked.

    Its payload is in two parts, of which one may be empty.
    """

    location: Location
    there: memoryview
    """What was read straight into the caller's memory."""
    aside: memoryview
    """What follows it."""
    kind: int
    meta_length: int
    vram: DeviceRange | None = None
    """Where all of it is instead, when it came to a device: then nothing of it is in the others."""

    @property
    def buffer(self) -> memoryview:
        """All of the payload, where it is in one part."""
        return (self.there or self.aside).toreadonly()

    @property
    def size_bytes(self) -> int:
        """Of the value alone, without its description."""
        return self.location.length - self.meta_length

    @property
    def data(self) -> memoryview:
        """The rest of the value."""
        return self.aside[: max(self.size_bytes - self.there.nbytes, 0)]

    @property
    def meta(self) -> memoryview:
        return self.aside[self.aside.nbytes - self.meta_length :]

    def value(self) -> bytes:
        """Return a copy of the value; where nothing of it was read into the caller's memory."""
        return self.aside[: self.location.length - self.meta_length].tobytes()

    def copy_to(self, target: memoryview) -> None:
        """Copy over `target`, which is the caller's memory and has the value's size, what is not
        there yet."""
        written = self.there.nbytes
        copy(target[written:] if written else target, self.data)

    def valid(self) -> bool:
        return True


def fetch(
    remote: RemoteNodes,
    blocks: Mapping[int, RemoteBlock],
    outs: Sequence[Out | None] | None,
    deadline: float | None,
    rooms: Sequence[DeviceRange | None] | None = None,
) -> dict[int, FetchedBlock]:
    """Return the blocks that could be read, by the same numbers, all in one batch per node: into
    `outs`, by these numbers too, as far as that can be, the rest into memory of their own. With
    `rooms`, by these numbers too, those that come by RDMA may be there, on a device, instead.

    Raises `UsageError` for an `out` that is too small; nothing is then written into any.
    """
    began = time.monotonic()
    its = {i: None if outs is None else outs[i] for i in blocks}
    believed = _believed(remote, blocks, its, deadline)
    parts = {i: _parts(blocks[i].location, its[i]) for i in believed}
    wanted = [
        Wanted(
            blocks[i].key,
            blocks[i].location,
            [part for part in its_parts if part.nbytes],
            None if rooms is None else rooms[i],
        )
        for i, its_parts in parts.items()
    ]
    # What was asked before is part of the same call.
    give_up_at = began + remote.timeout_s(sum(one.location.length for one in wanted))
    deadline = give_up_at if deadline is None else min(deadline, give_up_at)
    outcomes = remote.read(wanted, deadline) if wanted else []
    return {
        i: FetchedBlock(
            blocks[i].location,
            *parts[i],
            outcome.kind,
            outcome.meta_length,
            one.vram if outcome.in_vram else None,
        )
        for i, one, outcome in zip(parts, wanted, outcomes, strict=True)
        if outcome.read is Read.HIT
    }


def _believed(
    remote: RemoteNodes,
    blocks: Mapping[int, RemoteBlock],
    outs: Mapping[int, Out | None],
    deadline: float | None,
) -> list[int]:
    """Return the numbers of the `blocks` that are worth memory of their own.

    A record can lie about a length, and neither memory nor time nor an error is due to a lie:
    the nodes are asked about those that fit no `out`, and about all that claim too much.
    """
    beyond = {
        i: block.location.length - (0 if (out := outs[i]) is None else out.room.nbytes)
        for i, block in blocks.items()
    }
    if sum(max(size_bytes, 0) for size_bytes in beyond.values()) > CLAIMED_BYTES_MAX:
        doubted = list(blocks)
    else:
        doubted = [i for i in blocks if outs[i] is not None and beyond[i] > META_BYTES_MAX]
    there = remote.there([blocks[i][:2] for i in doubted], deadline) if doubted else []
    lies = {i for i, answer in zip(doubted, there, strict=True) if not answer}
    return [i for i in blocks if i not in lies]


def _parts(location: Location, out: Out | None) -> tuple[memoryview, memoryview]:
    """Return the caller's memory when all of it fits there. The last bytes may be the value's
    description, for which a larger `out` is no place; and what is not plain bytes must not be
    written before the description was seen."""
    length = location.length
    sure = 0
    room = memoryview(b"")
    if out is not None:
        room = out.room
        value_min = max(length - META_BYTES_MAX, 0)
        if out.plain and room.nbytes == length:
            sure = length
        elif out.plain and room.nbytes > length:
            sure = value_min
        else:
            out.check_room(value_min)
    return room[:sure], memoryview(bytearray(length - sure))
