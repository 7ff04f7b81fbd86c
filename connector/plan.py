"""Which blocks to load and save: pure arithmetic over plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from connector.base import EngineRequest, LoadBlock, SaveBlock
from kvstore import Found, Key

if TYPE_CHECKING:
    from connector.geometry import StoreLayout


def usable_run(runs: Sequence[Sequence[Found]], barred: Mapping[Key, bytes]) -> int:
    """Length of the leading run in which no shard points to a record that failed before."""
    length = len(runs[0]) if runs else 0
    if not barred:
        return length
    for i in range(length):
        if any(barred.get(run[i].key) == run[i].record for run in runs):
            return i
    return length


def offered_tokens(run: int, num_computed_tokens: int, layout: StoreLayout) -> int:
    """Tokens of `run` store blocks beyond what the engine has.

    None of it when the engine stands within one of its own blocks: a load
    writes whole engine blocks and would overwrite what is there.
    """
    if num_computed_tokens % layout.engine_block_tokens:
        return 0
    return max(0, run * layout.block_tokens - num_computed_tokens)


def load_blocks(
    runs: Sequence[Sequence[Found]],
    start_token: int,
    num_tokens: int,
    block_ids: Sequence[int],
    layout: StoreLayout,
) -> tuple[LoadBlock, ...]:
    """Loads that fill tokens `start_token` to `start_token + num_tokens`.

    `block_ids` is the request's whole table; `start_token` lies on an engine
    block's start, not necessarily on a store block's.
    """
    per_key = layout.blocks_per_key
    first = start_token // layout.engine_block_tokens
    last = -(-(start_token + num_tokens) // layout.engine_block_tokens)
    blocks: list[LoadBlock] = []
    for index in range(first // per_key, -(-last // per_key)):
        begin = max(first, index * per_key)
        end = min(last, (index + 1) * per_key)
        found = tuple(run[index] for run in runs)
        blocks.append(LoadBlock(found, begin - index * per_key, tuple(block_ids[begin:end])))
    return tuple(blocks)


def full_blocks(
    request: EngineRequest,
    num_scheduled_tokens: int,
    layout: StoreLayout,
    save_decode: bool,
    volatile_tokens: int,
) -> int:
    """Store blocks that are full and final once this step's forward has run.

    Bounded by the tokens that are known: beyond them may lie rejected drafts.
    `volatile_tokens` at the end are left out as well (a draft model that shares
    the group writes them one step late).
    """
    tokens = min(request.num_computed_tokens + num_scheduled_tokens, request.num_tokens)
    tokens -= volatile_tokens
    if not save_decode:
        tokens = min(tokens, request.num_prompt_tokens)
    return max(0, tokens) // layout.block_tokens


def save_blocks(
    keys: Sequence[Sequence[Key]],
    first: int,
    last: int,
    block_ids: Sequence[int],
    layout: StoreLayout,
    null_block_id: int | None,
) -> tuple[SaveBlock, ...]:
    """Saves of store blocks `first` to `last`; those the engine no longer holds are left out."""
    per_key = layout.blocks_per_key
    blocks: list[SaveBlock] = []
    for index in range(first, last):
        ids = tuple(block_ids[index * per_key : (index + 1) * per_key])
        if len(ids) == per_key and null_block_id not in ids:
            blocks.append(SaveBlock(tuple(shard[index] for shard in keys), ids))
    return tuple(blocks)
