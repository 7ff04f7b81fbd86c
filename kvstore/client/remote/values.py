"""Values and blocks of other hosts into the caller's memory."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvstore.client.base import BlockView
from kvstore.client.remote.reader import RemoteNodes
from kvstore.client.values import tensors
from kvstore.client.values.out import Out
from kvstore.errors import UsageError
from kvstore.limits import CLAIMED_BYTES_MAX, META_BYTES_MAX
from kvstore.segment.copying import copy
from kvstore.transport.base import Outcome, Read, Wanted
from kvstore.types import Key, Kind, Location


class RemoteBlock(NamedTuple):
    """A block that a node on another host has, and where the caller wants it."""

    key: Key
    location: Location
    out: Any
    """None for a fresh value."""


class _Place(NamedTuple):
    """Where a payload goes, in two parts of which one may be empty."""

    there: memoryview
    """Of the caller's memory."""
    aside: memoryview


def fetch_values(remote: RemoteNodes, aways: Sequence[RemoteBlock]) -> list[Any]:
    """The values; None for what cannot be had. Raises `UsageError` for an `out` that does not fit
    its value; nothing is then written into it."""
    began = time.monotonic()
    outs = [None if away.out is None else Out(away.out) for away in aways]
    rooms = [0 if out is None else out.room.nbytes for out in outs]
    blocks = [(away.key, away.location) for away in aways]
    too_small = [
        i
        for i, (_, location) in enumerate(blocks)
        if outs[i] is not None and location.length > rooms[i] + META_BYTES_MAX
    ]
    values: list[Any] = [None] * len(aways)
    places = {i: _place(aways[i], outs[i]) for i in _believed(remote, blocks, rooms, too_small)}
    wanted = [
        Wanted(aways[i].key, aways[i].location, [part for part in place if part.nbytes])
        for i, place in places.items()
    ]
    # What was asked before is part of the same call.
    deadline = began + remote.timeout_s(sum(one.location.length for one in wanted))
    outcomes = remote.read(wanted, deadline) if wanted else []
    for (i, place), outcome in zip(places.items(), outcomes, strict=True):
        if outcome.read is Read.HIT:
            values[i] = _value(aways[i], outs[i], place, outcome)
    return values


def _believed(
    remote: RemoteNodes,
    blocks: Sequence[tuple[Key, Location]],
    rooms: Sequence[int],
    doubted: Sequence[int] = (),
) -> list[int]:
    """The numbers of the `blocks` that are worth room of their own, in bytes beyond `rooms`.

    A record can lie about a length, and neither memory nor time nor an error is due to a lie:
    the nodes are asked about those that are `doubted`, and about all that claim too much.
    """
    claimed_bytes = sum(
        max(location.length - room, 0) for (_, location), room in zip(blocks, rooms, strict=True)
    )
    if claimed_bytes > CLAIMED_BYTES_MAX:
        doubted = range(len(blocks))
    if not doubted:
        return list(range(len(blocks)))
    there = remote.there([blocks[i] for i in doubted])
    lies = {i for i, answer in zip(doubted, there, strict=True) if not answer}
    return [i for i in range(len(blocks)) if i not in lies]


def _place(away: RemoteBlock, out: Out | None) -> _Place:
    """The caller's memory when all of it fits there. The last bytes may be the value's description,
    for which a larger `out` is no place; and what is not plain bytes must not be written before
    the description was seen."""
    length = away.location.length
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
    return _Place(room[:sure], memoryview(bytearray(length - sure)))


def _value(away: RemoteBlock, out: Out | None, place: _Place, outcome: Outcome) -> Any:
    there_bytes = place.there.nbytes
    data_bytes = away.location.length - outcome.meta_length
    if out is not None:
        # With a description in `there`, it is not asked for: bytes may go to plain bytes.
        meta = bytes(place.aside[place.aside.nbytes - outcome.meta_length :])
        try:
            out.check(outcome.kind, meta, data_bytes)
        except ValueError as e:
            if isinstance(e, UsageError):
                raise
            return None
        if data_bytes > there_bytes:
            copy(out.room[there_bytes:data_bytes], place.aside[: data_bytes - there_bytes])
        return out.answer(data_bytes)
    payload = place.aside
    data = payload[:data_bytes]
    if outcome.kind in (Kind.BYTES, Kind.BLOCK):
        return data.tobytes()
    try:
        value, target = tensors.make(outcome.kind, bytes(payload[data_bytes:]), data_bytes)
    except UsageError:
        raise  # a library is missing here
    except ValueError:  # its description is none
        return None
    copy(target, data)
    return value


class FetchedBlock(NamedTuple):
    """Implements `BlockView`: a block of another host, in this process's memory and checked."""

    buffer: memoryview

    def valid(self) -> bool:
        return True


def fetch_blocks(
    remote: RemoteNodes,
    away: Mapping[int, tuple[Key, Location]],
    staging: memoryview | None,
    deadline: float | None,
) -> dict[int, BlockView]:
    """The blocks that could be read, by the same numbers; those that `staging` has no room for
    could not."""
    if not away:
        return {}
    began = time.monotonic()
    if staging is None:
        numbers = list(away)
        believed = _believed(remote, list(away.values()), [0] * len(away))
        away = {numbers[i]: away[numbers[i]] for i in believed}
        staging = memoryview(bytearray(sum(location.length for _, location in away.values())))
    start = 0
    wanted: dict[int, Wanted] = {}
    for i, (key, location) in away.items():
        end = start + location.length
        if end <= staging.nbytes:
            wanted[i] = Wanted(key, location, (staging[start:end],))
            start = end
    give_up_at = began + remote.timeout_s(sum(one.location.length for one in wanted.values()))
    deadline = give_up_at if deadline is None else min(deadline, give_up_at)
    outcomes = remote.read(list(wanted.values()), deadline) if wanted else []
    return {
        i: FetchedBlock(one.into[0].toreadonly())
        for (i, one), outcome in zip(wanted.items(), outcomes, strict=True)
        if outcome.read is Read.HIT
    }
