"""Saves a partial store block: the tokens behind a prompt's last full one.

A part is stored in a whole block's size. Behind its tokens the engine's blocks hold what their
owners of before left there, which may be another tenant's and is nobody's business: it becomes
zeros before anything is committed. Where an engine block is one piece, that can be done from the
next engine block on alone; the scheduler side saves no such part where the rest may matter
(`SavePlanner`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from connector.copiers.base import Gather, Payload
from connector.messages import SaveBlock

if TYPE_CHECKING:
    from connector.layout.shard_reads import GroupReads


def can_be_saved(reads: GroupReads, block: SaveBlock, payload: Payload) -> bool:
    """Return whether this worker can keep a part apart from what lies behind it: not on a device,
    nor where an entry stands for several tokens. True of whole blocks."""
    if not block.tokens:
        return True
    slots = {run.tokens_per_slot for run in reads.geometry.each_shape()}
    return slots == {1} and isinstance(payload, memoryview)


def gather_of(reads: GroupReads, block: SaveBlock, payload: Payload) -> Gather:
    """Return the copy of a block; of a part its last engine block stands for those that are
    missing."""
    ids = block.block_ids
    whole = reads.block_tokens // reads.geometry.engine_block_tokens
    if block.tokens:
        ids = (*ids, *(ids[-1:] * (whole - len(ids))))
    return Gather(ids, payload)


def clear_rest(reads: GroupReads, block: SaveBlock, payload: Payload, layer: int | None) -> None:
    """Write zeros behind the tokens of a part, in all layers or in one."""
    tokens, geometry = block.tokens, reads.geometry
    if not tokens:
        return
    if reads.opaque:
        tokens = -(-tokens // geometry.engine_block_tokens) * geometry.engine_block_tokens
    assert isinstance(payload, memoryview), "`can_be_saved` lets no other pass"
    payload = payload.cast("B")
    begin = 0
    for run in geometry.each_shape():
        head_bytes = reads.block_tokens * run.channel_bytes
        kept_bytes = tokens * run.channel_bytes
        rest = bytes(head_bytes - kept_bytes)
        heads = len(run.layers) * run.heads
        first, last = (0, heads) if layer is None else (layer * run.heads, (layer + 1) * run.heads)
        for head in range(first, last):
            end = begin + (head + 1) * head_bytes
            payload[end - len(rest) : end] = rest
        begin += heads * head_bytes
