"""Values and blocks of other hosts into the caller's memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgpack

from kvstore.client import tensors
from kvstore.client.base import BlockView
from kvstore.client.out import Out
from kvstore.client.remote import RemoteNodes
from kvstore.errors import UsageError
from kvstore.limits import META_BYTES_MAX
from kvstore.segment.copying import copy
from kvstore.transport.base import Outcome, Read, Wanted
from kvstore.types import Key, Kind, Location

_BAD_META = (
    ValueError,
    TypeError,
    AttributeError,
    MemoryError,
    OverflowError,
    RuntimeError,
    msgpack.UnpackException,
)
"""What making a value raises when its description is none."""


class Away(NamedTuple):
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


def fetch_values(remote: RemoteNodes, aways: Sequence[Away]) -> list[Any]:
    """The values; None for what cannot be had. Raises `UsageError` for an `out` that does not fit
    its value; nothing is then written into it."""
    if not aways:
        return []
    outs = [None if away.out is None else Out(away.out) for away in aways]
    places = [_place(away, out) for away, out in zip(aways, outs, strict=True)]
    wanted = [
        Wanted(away.key, away.location, [part for part in place if part.nbytes])
        for away, place in zip(aways, places, strict=True)
    ]
    outcomes = remote.read(wanted)
    return [
        _value(away, out, place, outcome) if outcome.read is Read.HIT else None
        for away, out, place, outcome in zip(aways, outs, places, outcomes, strict=True)
    ]


def _place(away: Away, out: Out | None) -> _Place:
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


def _value(away: Away, out: Out | None, place: _Place, outcome: Outcome) -> Any:
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
    except _BAD_META:
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
    if staging is None:
        staging = memoryview(bytearray(sum(location.length for _, location in away.values())))
    start = 0
    wanted: dict[int, Wanted] = {}
    for i, (key, location) in away.items():
        end = start + location.length
        if end <= staging.nbytes:
            wanted[i] = Wanted(key, location, (staging[start:end],))
            start = end
    outcomes = remote.read(list(wanted.values()), deadline) if wanted else []
    return {
        i: FetchedBlock(one.into[0].toreadonly())
        for (i, one), outcome in zip(wanted.items(), outcomes, strict=True)
        if outcome.read is Read.HIT
    }
