"""Compares what is stored under a key with the value that was put, and drops it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import xxhash

from kvstore.client.nodes.remote import RemoteNodes
from kvstore.client.payloads.tensors import Payload
from kvstore.client.reader import Place, Reader
from kvstore.transport.base import Read, Wanted
from kvstore.types import Key, Location, PutResult, PutStatus


def told_apart(
    reader: Reader,
    remote: RemoteNodes,
    keys: Sequence[Key],
    payloads: Sequence[Payload],
    results: Sequence[PutResult],
    give_up_at: float = math.inf,
) -> list[PutResult]:
    """`results` with DIFFERS where another value than `payloads[i]` exists under `keys[i]`.

    EXISTS stays where it is the same value, and where nobody can tell any more: neither index
    nor other hosts are asked beyond `give_up_at`, in seconds of the machine's clock.
    """
    told = list(results)
    which = [i for i, result in enumerate(results) if result.status is PutStatus.EXISTS]
    if not which:
        return told
    found = reader.search([keys[i] for i in which], give_up_at=give_up_at)
    for i, place in zip(which, found.places, strict=True):
        if place is not None and _is_other(place, payloads[i]):
            told[i] = _differs(len(place.data))
    elsewhere = {
        which[at]: there
        for at, there in found.fetched.items()
        if told[which[at]].status is PutStatus.EXISTS
    }
    others = others_elsewhere(
        remote, [(keys[i], there, payloads[i]) for i, there in elsewhere.items()], give_up_at
    )
    for i, other in zip(elsewhere, others, strict=True):
        if other:
            told[i] = _differs(None)
    return told


def _differs(size_bytes: int | None) -> PutResult:
    which = "another value" if size_bytes is None else f"another value, of {size_bytes} bytes,"
    return PutResult(
        PutStatus.DIFFERS, f"{which} is stored under this key and stays: replace=True replaces it"
    )


def _is_other(place: Place, payload: Payload) -> bool:
    """By kind, length and description, then by the bytes: memory is as fast as a checksum."""
    data, meta, kind = payload
    its_meta = place.buffer[len(place.data) :]
    same = (
        (place.kind, len(place.data)) == (kind, data.nbytes)
        and its_meta == meta
        and xxhash.xxh3_64_intdigest(place.data) == xxhash.xxh3_64_intdigest(data)
    )
    return not same and place.valid()


def others_elsewhere(
    remote: RemoteNodes,
    blocks: Sequence[tuple[Key, Location, Payload]],
    give_up_at: float = math.inf,
) -> list[bool]:
    """Return whether each is another value, by length and checksum; those that have no checksum are
    read, all by one deadline, which costs what saving them would have, and none after
    `give_up_at`."""
    others = [False] * len(blocks)
    wanted: dict[int, Wanted] = {}
    for i, (key, location, payload) in enumerate(blocks):
        if location.length != payload.size_bytes:
            others[i] = True
        elif location.checksum:
            others[i] = location.checksum != _digest(payload)
        else:
            wanted[i] = Wanted(key, location, (memoryview(bytearray(location.length)),))
    if wanted:
        outcomes = remote.read([*wanted.values()], give_up_at)
        for (i, one), outcome in zip(wanted.items(), outcomes, strict=True):
            if outcome.read is Read.HIT:
                payload = blocks[i][2]
                described = (outcome.kind, outcome.meta_length)
                others[i] = described != (payload.kind, len(payload.meta)) or (
                    xxhash.xxh3_64_intdigest(one.into[0]) != _digest(payload)
                )
    return others


def _digest(payload: Payload) -> int:
    state = xxhash.xxh3_64(payload.data)
    state.update(payload.meta)
    return state.intdigest()
