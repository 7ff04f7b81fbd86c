"""Looks keys up in the tables of hints of this host's segments, without the index."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from kvstore.client.base import BlockRef
from kvstore.client.local.nodes import Attached, LocalNodes
from kvstore.machine import REAL, Clock
from kvstore.record import RecordSigner, pack_place
from kvstore.segment.header import KEY_PART, fields
from kvstore.segment.locate import offset_of
from kvstore.types import Key

KEYS_AT_ONCE = 64
"""Looked for between two looks at the clock; about 0.1 ms."""
RECORDS_KEPT_MAX = 1 << 14
"""Of one segment: about 5 MB. To make one costs more than all the rest of finding it."""


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
    for batch in _batches(keys):
        if now() >= give_up_at:
            return
        yield from _found(nodes.mapped, signer, batch)


def sure_here(
    nodes: LocalNodes, signer: RecordSigner | None, keys: Sequence[Key]
) -> Iterator[BlockRef | None]:
    """As `found_here`, of nodes of the client's own index alone, which a lookup may believe as it
    believes the index.

    Nobody is waited for, so no deadline is asked: a starved reader would miss what lies here.
    """
    now = nodes.machine.monotonic()
    nodes.check(now)
    if signer is None:  # else only a signed record says that a node is to be believed
        nodes.map_ours(now)
    ours = [one for one in nodes.mapped if one.ours]
    for batch in _batches(keys):
        yield from _found(ours, signer, batch)


def leading(found: Iterable[BlockRef | None]) -> Iterator[BlockRef]:
    """The leading records, up to the first that is missing."""
    for one in found:
        if one is None:
            return
        yield one


def _batches(keys: Sequence[Key]) -> Iterator[Sequence[Key]]:
    return (keys[i : i + KEYS_AT_ONCE] for i in range(0, len(keys), KEYS_AT_ONCE))


def _found(
    mapped: Sequence[Attached], signer: RecordSigner | None, keys: Sequence[Key]
) -> list[BlockRef | None]:
    found: list[BlockRef | None] = [None] * len(keys)
    for attached in mapped:
        known = attached.records.get
        for i, (slot_id, image) in enumerate(attached.shm.hinted_each(keys)):
            seen = known(slot_id)
            if seen is None or seen[0] != image:
                seen = _made_of(attached, signer, slot_id, image, keys[i])
            if seen is not None and seen[1][0] == keys[i]:
                found[i] = seen[1]
    return found


def _made_of(
    attached: Attached, signer: RecordSigner | None, slot_id: int, image: bytes, wanted: Key
) -> tuple[bytes, BlockRef] | None:
    """The header and the block that it describes, None unless that is the wanted one, whole, and
    in the segment."""
    if image[KEY_PART] != wanted:
        return None
    header = fields(image)
    if header is None or offset_of(attached.shm.superblock.size_bytes, slot_id, header) is None:
        return None
    generation, key, length, granule, _, _, checksum, _ = header
    node = attached.announcement
    record = pack_place(
        key, node.node_id, node.epoch, 0, slot_id, generation, granule, length, checksum
    )
    ref = BlockRef(key, record if signer is None else signer.signed(key, record))
    if len(attached.records) >= RECORDS_KEPT_MAX:
        attached.records.clear()
    attached.records[slot_id] = made = image, ref
    return made
