"""Computes which blocks to load and save: pure arithmetic over plain data."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from connector.messages import BlockTables, EngineRequest, LoadBlock, SaveBlock, StateBlock
from kvstore.spi import BlockRef, Key

if TYPE_CHECKING:
    from connector.layout.geometry import GroupLayout, StoreLayout


class Placed(NamedTuple):
    """Names a store block of one group all of whose shards are there, as one writer saved them."""

    split: int
    found: tuple[BlockRef, ...]


Placement = Sequence[Sequence[Placed | None]]
"""Per group, per store block of the prefix: where it is."""


class Checkpoints(NamedTuple):
    """Names the ends of a prefix, in store blocks, at which its windows and states are saved."""

    every: int | None = None
    """Positions at the multiples of this; 0: none, None: each."""
    ends: frozenset[int] = frozenset()
    """Further positions, at which a later prompt is likely to begin."""

    def keeps(self, blocks: int) -> bool:
        if self.every is None or blocks in self.ends:
            return True
        return self.every > 0 and blocks % self.every == 0

    def window_blocks(
        self, group: GroupLayout, first: int, last: int, block_tokens: int
    ) -> Container[int]:
        """Return which blocks from `first` to `last` of a group some kept end needs."""
        if self.every is None or group.window_tokens is None:
            return range(first, last)
        reach = -(-group.window_tokens // block_tokens)
        return {
            index
            for end in filter(self.keeps, range(first + 1, last + reach + 1))
            for index in range(group.needed_from(end * block_tokens) // block_tokens, end)
        }


EVERYWHERE = Checkpoints()


def usable_run(
    placement: Placement,
    barred: Mapping[Key, bytes],
    layout: StoreLayout,
    num_tokens: int,
    blocks_max: int | None = None,
) -> int:
    """Return the store blocks of the longest prefix of which every group has what it needs, at
    most `blocks_max`.

    A group with a window needs the blocks that the window before the end
    touches, one with chunks those of the chunk that the end lies in, one with
    states the block that ends there, the others need all. No record that failed
    before counts. A prefix of all `num_tokens` is cut by one block for windows,
    chunks and states: engines compute the last token again, whose window
    reaches one token further back, and whose state is the one before it.
    """
    if not placement:
        return 0
    usable = [
        [one is not None and not _barred(one, barred) for one in row[:blocks_max]]
        for row in placement
    ]
    run = min(len(row) for row in usable)
    if layout.forgetful:
        run = min(run, max(0, num_tokens - 1) // layout.block_tokens)
    for group, row in zip(layout.groups, usable, strict=True):
        if not group.forgetful and False in row[:run]:
            run = row.index(False)
    while run > 0:
        missing = -1
        for group, row in zip(layout.groups, usable, strict=True):
            if group.forgetful:
                first = group.needed_from(run * layout.block_tokens)
                needed = range(first // layout.block_tokens, run)
                missing = max([missing, *(i for i in needed if not row[i])])
        if missing < 0:
            return run
        run = missing  # every longer prefix up to `run` needs it too
    return 0


def attention_run(
    placement: Placement, barred: Mapping[Key, bytes], layout: StoreLayout, num_tokens: int
) -> int:
    """Return the longest prefix of which all but windows and states is there."""
    pairs = list(zip(layout.groups, placement, strict=False))
    rows = [row for group, row in pairs if not group.forgetful]
    groups = tuple(group for group in layout.groups if not group.forgetful)
    return usable_run(rows, barred, replace(layout, groups=groups), num_tokens)


def covers(
    placement: Placement, barred: Mapping[Key, bytes], layout: StoreLayout, end_token: int
) -> bool:
    """Return whether every group has what the prefix of `end_token` tokens needs, which may end
    within a block: for layouts that take parts."""
    if not placement:
        return False
    last = (end_token - 1) // layout.block_tokens
    for group, row in zip(layout.groups, placement, strict=True):
        first = group.needed_from(end_token) // layout.block_tokens
        needed = row[first : last + 1]
        if len(row) <= last or any(one is None or _barred(one, barred) for one in needed):
            return False
    return True


def _barred(placed: Placed, barred: Mapping[Key, bytes]) -> bool:
    return bool(barred) and any(barred.get(found.key) == found.record for found in placed.found)


def offered_tokens(
    run: int, num_computed_tokens: int, layout: StoreLayout, part_end: int = 0
) -> int:
    """Return tokens of `run` store blocks, or up to `part_end`, beyond what the engine has.

    None of it when the engine stands within one of its own blocks: a load
    writes whole engine blocks and would overwrite what is there.
    """
    if num_computed_tokens % layout.engine_block_tokens:
        return 0
    return max(0, max(run * layout.block_tokens, part_end) - num_computed_tokens)


def load_blocks(
    placement: Placement,
    start_token: int,
    num_tokens: int,
    tables: BlockTables,
    layout: StoreLayout,
    null_block_id: int | None,
) -> tuple[LoadBlock, ...]:
    """Return loads that fill tokens `start_token` to `start_token + num_tokens`.

    `tables` are the request's whole tables; `start_token` lies on a boundary of engine blocks, not
    necessarily on a store block's. Blocks that the engine left out (before a window) are not
    loaded. One that it has made room for and that is nowhere becomes a load that fails: the engine
    would take it as valid. Of states only the one at the end is loaded; the engine reads no other.
    """
    end_token = start_token + num_tokens
    blocks: list[LoadBlock] = []
    for index in range(start_token // layout.block_tokens, -(-end_token // layout.block_tokens)):
        for group, table in enumerate(tables):
            geometry = layout.groups[group].geometry
            if geometry.recurrent:
                continue
            tokens = geometry.engine_block_tokens
            per_key = layout.blocks_per_key(group)
            begin = max(start_token // tokens, index * per_key)
            end = min(-(-end_token // tokens), (index + 1) * per_key)
            while begin < end and table[begin] == null_block_id:
                begin += 1
            if begin < end:
                row = placement[group]
                placed = (row[index] if index < len(row) else None) or Placed(0, ())
                skip = begin - index * per_key
                ids = tuple(table[begin:end])
                blocks.append(LoadBlock(placed.found, skip, ids, placed.split, group))
    return (*blocks, *_load_states(placement, end_token, tables, layout, null_block_id))


def _load_states(
    placement: Placement,
    end_token: int,
    tables: BlockTables,
    layout: StoreLayout,
    null_block_id: int | None,
) -> Iterator[LoadBlock]:
    index, rest = divmod(end_token, layout.block_tokens)
    for group, table in enumerate(tables):
        geometry = layout.groups[group].geometry
        if geometry.recurrent:
            block_id = table[-(-end_token // geometry.engine_block_tokens) - 1]
            if block_id != null_block_id:
                row = placement[group]
                placed = row[index - 1] if not rest and index <= len(row) else None
                placed = placed or Placed(0, ())  # the store has no state at that token
                yield LoadBlock(placed.found, 0, (block_id,), placed.split, group)


def full_blocks(
    request: EngineRequest,
    num_scheduled_tokens: int,
    layout: StoreLayout,
    volatile_tokens: int,
) -> int:
    """Store blocks that are full and final once this step's forward has run.

    Bounded by the tokens that are known: beyond them may lie rejected drafts.
    `volatile_tokens` at the end are left out as well (a draft model that shares
    the group writes them one step late).
    """
    tokens = min(request.num_computed_tokens + num_scheduled_tokens, request.num_tokens)
    tokens -= volatile_tokens
    return max(0, tokens) // layout.block_tokens


def save_blocks(
    keys: Sequence[Sequence[Sequence[Key]]],
    first: int,
    last: int,
    tables: BlockTables,
    layout: StoreLayout,
    null_block_id: int | None,
    checkpoints: Checkpoints = EVERYWHERE,
) -> tuple[SaveBlock, ...]:
    """Return saves of store blocks `first` to `last`; those the engine no longer holds are left
    out.

    So are states (`save_states`), and windows that none of the `checkpoints` needs. `keys` are per
    group, shard and block.
    """
    blocks: list[SaveBlock] = []
    size = layout.block_tokens
    kept = [checkpoints.window_blocks(group, first, last, size) for group in layout.groups]
    for index in range(first, last):
        for group, table in enumerate(tables):
            if layout.groups[group].geometry.recurrent or index not in kept[group]:
                continue
            per_key = layout.blocks_per_key(group)
            ids = tuple(table[index * per_key : (index + 1) * per_key])
            if len(ids) == per_key and null_block_id not in ids:
                shards = tuple(shard[index] for shard in keys[group])
                blocks.append(SaveBlock(shards, ids, group, index))
    return tuple(blocks)


def save_part(
    keys: Sequence[Sequence[Key]],
    num_tokens: int,
    tables: BlockTables,
    layout: StoreLayout,
    null_block_id: int | None,
) -> tuple[SaveBlock, ...]:
    """Return saves of the partial block that a prompt of `num_tokens` has behind its last full
    store block, one for each group; none when the engine no longer holds all of it. `keys` are per
    group and shard."""
    index, rest = divmod(num_tokens, layout.block_tokens)
    blocks: list[SaveBlock] = []
    for group, table in enumerate(tables):
        begin = index * layout.blocks_per_key(group)
        end = -(-num_tokens // layout.groups[group].geometry.engine_block_tokens)
        ids = tuple(table[begin:end])
        if len(ids) < end - begin or null_block_id in ids:
            return ()
        blocks.append(SaveBlock(tuple(keys[group]), ids, group, index, rest))
    return tuple(blocks)


def save_states(
    keys: Sequence[Sequence[Sequence[Key]]],
    first: int,
    num_tokens: int,
    states: Sequence[StateBlock],
    layout: StoreLayout,
    checkpoints: Checkpoints = EVERYWHERE,
) -> tuple[SaveBlock, ...]:
    """Return saves of those `states` that end a store block from number `first` on, within
    `num_tokens`, at one of the `checkpoints`.

    `keys` are per group, shard and block.
    """
    blocks: list[SaveBlock] = []
    for state in states:
        blocks_before, rest = divmod(state.num_tokens, layout.block_tokens)
        index = blocks_before - 1
        if rest or index < first or state.num_tokens > num_tokens:
            continue
        if not checkpoints.keeps(blocks_before):
            continue
        shards = keys[state.group]
        if index < len(shards[0]):
            found = tuple(shard[index] for shard in shards)
            blocks.append(SaveBlock(found, (state.block_id,), state.group, index))
    return tuple(blocks)
