"""What this host's segments hold, for lookups while the index does not answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from kvstore.client.base import BlockRef
from kvstore.client.local.nodes import LocalNodes
from kvstore.index.base import Record
from kvstore.machine import REAL, Clock
from kvstore.record import RecordSigner, pack_place
from kvstore.segment.locate import hinted
from kvstore.types import Key

KEYS_AT_ONCE = 64
"""Looked for between two looks at the clock; about 1 ms."""


def found_here(
    nodes: LocalNodes,
    signer: RecordSigner | None,
    keys: Sequence[Key],
    give_up_at: float,
    now: Clock = REAL.monotonic,
) -> Iterator[BlockRef | None]:
    """Each of `keys` with the record that its node would publish; None when it is not found here.

    Ends early at `give_up_at` of the clock `now`. Headers are found by the tables of hints,
    which forget some keys: such a block is a miss until the index answers. Records are for
    processes that may be others; whoever reads the block looks at its header (rule 4).
    """
    began = now()
    nodes.check(began)
    nodes.map_all(began)
    for i, key in enumerate(keys):
        if i % KEYS_AT_ONCE == 0 and now() >= give_up_at:
            return
        record = _record(nodes, key)
        if record is None:
            yield None
        else:
            yield BlockRef(key, record if signer is None else signer.signed(key, record))


def leading(found: Iterable[BlockRef | None]) -> Iterator[BlockRef]:
    """Those before the first that is missing."""
    for one in found:
        if one is None:
            return
        yield one


def _record(nodes: LocalNodes, key: Key) -> Record | None:
    for attached in nodes.mapped:
        spot = hinted(attached.shm, key)
        if spot is None:
            continue
        generation, _, length, granule, _, _, checksum, _ = spot.header
        announcement = attached.announcement
        return pack_place(
            key,
            announcement.node_id,
            announcement.epoch,
            0,
            spot.slot_id,
            generation,
            granule,
            length,
            checksum,
        )
    return None
