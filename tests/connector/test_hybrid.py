"""Models with several KV cache groups: what a prefix needs of each, saved and loaded."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator

import pytest
from connector_parts import wait_for
from hypothesis import given, settings
from hypothesis import strategies as st
from tp_engine import Model, TpEngine

from connector.layout.block_plan import (
    Checkpoints,
    Placed,
    load_blocks,
    save_blocks,
    save_states,
    usable_run,
)
from connector.layout.geometry import GroupLayout, KVGeometry, StoreLayout
from connector.layout.topology import TpKVTopology
from connector.messages import StateBlock, WorkerReport
from kvstore.spi import BlockRef
from kvstore.testing.blockstore import MemoryBlockStore

BLOCK = 8
HYBRID = Model(window_tokens=10)
Make = Callable[..., TpEngine]


def layout(*windows: int | None, engine_block: int = 4) -> StoreLayout:
    geometry = KVGeometry(layers=1, heads=1, channel_bytes=8, engine_block_tokens=engine_block)
    groups = tuple(
        GroupLayout(geometry=geometry, topology=TpKVTopology.of(), splits=(), window_tokens=window)
        for window in windows
    )
    return StoreLayout(block_tokens=BLOCK, hash_block_tokens=BLOCK, groups=groups)


def row(present: str, group: int = 0) -> list[Placed | None]:
    return [
        Placed(0, (BlockRef(b"%d-%d" % (group, i), b"record"),)) if c == "x" else None
        for i, c in enumerate(present)
    ]


class TestUsableRun:
    @given(
        full=st.text("x.", min_size=0, max_size=12),
        chunks=st.text("x.", min_size=12, max_size=12),
        chunk=st.integers(1, 5 * BLOCK),
        tokens=st.integers(1, 13 * BLOCK),
    )
    def test_of_a_group_with_chunks_the_chunk_that_the_end_lies_in_is_needed(
        self, full: str, chunks: str, chunk: int, tokens: int
    ) -> None:
        """The longest prefix of which, token by token, everything is there."""
        groups = layout(None, None)
        chunked = dataclasses.replace(groups.groups[1], chunk_tokens=chunk)
        both = dataclasses.replace(groups, groups=(groups.groups[0], chunked))

        def usable(run: int) -> bool:
            end = run * BLOCK
            last_chunk = range(end // chunk * chunk, end)
            return full[:run] == "x" * run and all(chunks[t // BLOCK] == "x" for t in last_chunk)

        most = min(len(full), (tokens - 1) // BLOCK)
        expected = max(run for run in range(most + 1) if usable(run))
        assert usable_run([row(full), row(chunks, 1)[: len(full)]], {}, both, tokens) == expected

    def run(self, full: str, window: str, tokens: int = 1000, window_tokens: int = 10) -> int:
        placement = [row(full), row(window, 1)]
        return usable_run(placement, {}, layout(None, window_tokens), tokens)

    def test_trap_full_attention_needs_all_and_a_window_its_end(self) -> None:
        assert self.run("xxxxx", "xxxxx") == 5
        assert self.run("xx.xx", "xxxxx") == 2
        assert self.run("xxxxx", "...xx") == 5  # 9 tokens before token 40: blocks 3 and 4
        assert self.run("xxxxx", "xx.xx", window_tokens=18) == 2

    def test_trap_a_hole_in_the_window_falls_back_to_a_shorter_prefix(self) -> None:
        assert self.run("xxxxx", "xxx.x") == 3
        assert self.run("xxxxx", ".xx..") == 3
        assert self.run("xxxxx", ".x.x.") == 0
        assert self.run("xxxxx", ".....") == 0

    @pytest.mark.parametrize(("window", "run"), [(9, 5), (10, 0)])
    def test_the_window_reaches_to_the_token(self, window: int, run: int) -> None:
        """The next token sees itself and window - 1 before it: with 9 that is block 4 alone."""
        assert self.run("xxxxx", "....x", window_tokens=window) == run

    def test_trap_a_whole_prompt_is_cut_because_its_last_token_is_computed_again(self) -> None:
        assert self.run("xxxxx", "xxxxx", tokens=5 * BLOCK) == 4
        assert self.run("xxxxx", "xxxxx", tokens=5 * BLOCK + 1) == 5
        assert usable_run([row("xxxxx")], {}, layout(None), 5 * BLOCK) == 5

    def test_a_barred_record_counts_as_missing_in_its_group(self) -> None:
        barred = {b"1-3": b"record"}
        assert usable_run([row("xxxxx"), row("xxxxx", 1)], barred, layout(None, 10), 99) == 3
        assert usable_run([row("xxxxx"), row("xxxxx", 1)], {b"1-3": b""}, layout(None, 10), 99) == 5


class TestLoadBlocks:
    def test_trap_blocks_before_the_window_are_not_loaded(self) -> None:
        tables = [[1, 2, 3, 4, 5, 6], [0, 0, 0, 14, 15, 16]]
        blocks = load_blocks([row("xxx"), row(".xx", 1)], 0, 24, tables, layout(None, 10), 0)
        assert [(b.group, b.skip, b.block_ids) for b in blocks] == [
            (0, 0, (1, 2)),
            (0, 0, (3, 4)),
            (1, 1, (14,)),
            (0, 0, (5, 6)),
            (1, 0, (15, 16)),
        ]

    def test_trap_a_block_with_room_but_without_bytes_is_a_load_that_fails(self) -> None:
        blocks = load_blocks([row("x"), row(".", 1)], 0, 8, [[1, 2], [3, 4]], layout(None, 10), 0)
        assert [(b.group, len(b.found)) for b in blocks] == [(0, 1), (1, 0)]


def test_trap_blocks_that_left_the_window_are_not_saved() -> None:
    keys = [[[b"a0", b"a1"]], [[b"b0", b"b1"]]]
    tables = [[1, 2, 3, 4], [0, 12, 13, 14]]
    blocks = save_blocks(keys, 0, 2, tables, layout(None, 10), 0)
    assert [(b.group, b.keys, b.block_ids) for b in blocks] == [
        (0, (b"a0",), (1, 2)),
        (0, (b"a1",), (3, 4)),
        (1, (b"b1",), (13, 14)),
    ]


@pytest.fixture
def make(store: MemoryBlockStore) -> Iterator[Make]:
    pytest.importorskip("torch")
    engines: list[TpEngine] = []

    def one(tp_size: int = 1, model: Model = HYBRID, **changes: object) -> TpEngine:
        engines.append(TpEngine(store, model, tp_size, **changes))  # type: ignore[arg-type]
        return engines[-1]

    yield one
    for engine in engines:
        engine.close()


def prompt(blocks: int, extra: int = 3) -> list[int]:
    rng = random.Random(blocks)
    return [rng.randrange(32000) for _ in range(blocks * BLOCK + extra)]


@pytest.mark.parametrize(("writer", "reader"), [(1, 1), (2, 4), (4, 1)])
def test_every_group_comes_back_byte_for_byte(make: Make, writer: int, reader: int) -> None:
    tokens = prompt(4)
    make(writer).save(tokens)
    engine = make(reader, seed=1)
    offered, tables, _, report = engine.load(tokens)
    assert offered == 4 * BLOCK
    assert tables[1][:5] == [0] * 5, "9 tokens before the end: the last three blocks of four"
    assert report.failed_requests == set()
    engine.check(tokens, offered, tables)


def test_trap_groups_have_keys_of_their_own(make: Make, store: MemoryBlockStore) -> None:
    make().save(prompt(2))
    assert len(set(store.sealed())) == 2 * 2


def test_trap_groups_with_other_replicas_are_saved_by_their_own_first_one(
    make: Make, store: MemoryBlockStore
) -> None:
    model = Model(heads=4, window_tokens=10, window_heads=1)
    tokens = prompt(2)
    make(4, model).save(tokens)
    assert len(store.sealed()) == 2 * (4 + 1)
    assert store.reserve_calls == 4 + 1
    engine = make(2, model, seed=3)
    offered, tables, _, _ = engine.load(tokens)
    engine.check(tokens, offered, tables)


def test_trap_a_lost_block_of_one_group_fails_the_request_and_bars_it(
    make: Make, store: MemoryBlockStore
) -> None:
    tokens = prompt(4)
    engine = make()
    engine.save(tokens)
    hashes = engine.request("r", tokens).block_hashes
    keys = engine.layout.groups[1].namespaces[0].engine_keys(hashes)
    store.evict(keys[3], forget=False)
    _, _, _, report = make(seed=1).load(tokens)
    assert report.failed_requests == {"load"}
    assert report.invalid_block_ids == set(), "an id would be one of either group's table"


@settings(max_examples=25)
@given(data=st.data())
def test_any_hybrid_geometry_byte_for_byte(data: st.DataObject) -> None:
    pytest.importorskip("torch")
    heads = data.draw(st.sampled_from([1, 2, 4]), "heads")
    model = Model(
        layers=data.draw(st.integers(1, 2), "layers"),
        heads=heads,
        channel_bytes=4,
        dtype="uint8",
        window_tokens=data.draw(st.integers(1, 40), "window"),
        window_heads=data.draw(st.sampled_from([1, 2, 4]), "window heads"),
    )
    store = MemoryBlockStore()
    engines = [
        TpEngine(
            store,
            model,
            data.draw(st.sampled_from([1, 2, 4]), "tp"),
            engine_block=data.draw(st.sampled_from([4, 8]), "engine block"),
            seed=i,
        )
        for i in (1, 2)
    ]
    tokens = prompt(data.draw(st.integers(1, 4), "blocks"), data.draw(st.integers(1, 7), "extra"))
    try:
        engines[0].save(tokens)
        offered, tables, _, report = engines[1].load(tokens)
        assert offered == len(tokens) // BLOCK * BLOCK
        assert report.invalid_block_ids == set()
        engines[1].check(tokens, offered, tables)
    finally:
        for engine in engines:
            engine.close()


def test_a_block_of_a_later_group_that_was_lost_is_saved_again(
    make: Make, store: MemoryBlockStore
) -> None:
    """Where a load of several groups failed does not say how much of the prefix is there."""
    tokens = prompt(4)
    make().save(tokens)
    engine = make(seed=1)
    hashes = engine.request("r", tokens).block_hashes
    lost = engine.layout.groups[1].namespaces[0].engine_keys(hashes)[3]
    store.evict(lost, forget=False)
    request = engine.request("load", tokens)
    offered = engine.match(request)
    tables = engine.tables(len(tokens))
    engine.scheduler.allocated(request, lambda: tables, offered)
    (job,) = engine.scheduler.plan_step([], [], lambda _: None).loads
    engine.workers[0].start_loads([job])
    total = WorkerReport()

    def reported() -> bool:
        total.merge(engine.workers[0].poll(0.002))
        return bool(total.failed_requests)

    wait_for(reported, "the load to fail")
    engine.scheduler.report(total)
    engine.scheduler.loads_ended(["load"])
    plan = engine.scheduler.plan_step([(request, len(tokens))], [], lambda _: tables)
    assert lost in {key for save in plan.saves for block in save.blocks for key in block.keys}


class TestCheckpoints:
    """Windows and states are saved where a later prompt is likely to begin, not everywhere."""

    @given(
        window=st.integers(2, 5 * BLOCK),
        every=st.integers(0, 5),
        ends=st.frozensets(st.integers(1, 12), max_size=2),
        first=st.integers(0, 11),
        count=st.integers(1, 12),
    )
    def test_windows_are_those_that_a_kept_end_needs_and_no_others(
        self, window: int, every: int, ends: frozenset[int], first: int, count: int
    ) -> None:
        both = layout(None, window)
        keys = [[[b"%d-%d" % (group, i) for i in range(24)]] for group in range(2)]
        tables = [list(range(1, 49)), list(range(101, 149))]
        last = min(12, first + count)
        chosen = Checkpoints(every, ends)
        blocks = save_blocks(keys, first, last, tables, both, 0, chosen)

        def needed(index: int) -> bool:
            """Token by token, for every end that may come."""
            kept = ends | set(range(every, 40, every) if every else ())
            span = range(index * BLOCK, (index + 1) * BLOCK)
            return any(
                index < end and any(end * BLOCK - window < token for token in span) for end in kept
            )

        assert [b.place for b in blocks if b.group == 0] == [*range(first, last)]
        expected = [index for index in range(first, last) if needed(index)]
        assert [b.place for b in blocks if b.group == 1] == expected

    def test_states_are_those_at_kept_ends(self) -> None:
        states = [StateBlock(0, 10 + n, n * BLOCK) for n in range(1, 8)]
        one = layout(None)
        keys = [[[b"%d" % i for i in range(8)]]]
        kept = save_states(keys, 0, 99, states, one, Checkpoints(3, frozenset({7})))
        assert [b.place + 1 for b in kept] == [3, 6, 7]
        assert len(save_states(keys, 0, 99, states, one)) == 7

    @pytest.mark.parametrize(
        ("interval", "saved", "loaded"), [(None, 8, 5), (0, 2, 0), (4 * BLOCK, 4, 4), (1, 8, 5)]
    )
    def test_a_prompt_that_goes_on_loads_it_whole_and_one_that_parts_from_it_what_the_interval_left(
        self,
        make: Make,
        store: MemoryBlockStore,
        interval: int | None,
        saved: int,
        loaded: int,
    ) -> None:
        tokens = prompt(8)
        make(window_interval_tokens=interval).save(tokens)
        windows = len(store.sealed()) - 8
        assert windows == saved
        engine = make(seed=1, window_interval_tokens=interval)
        offered, tables, _, report = engine.load([*tokens, 1, 2, 3])
        assert (offered, report.failed_requests) == (8 * BLOCK, set())
        engine.check(tokens, offered, tables)
        parted = [*tokens[: 5 * BLOCK], *(token + 1 for token in tokens[5 * BLOCK :])]
        other = make(seed=2, window_interval_tokens=interval)
        assert other.load(parted)[0] == loaded * BLOCK

    def test_where_a_second_prompt_parted_the_third_one_loads(self, make: Make) -> None:
        tokens = prompt(8)
        more = {"window_interval_tokens": 0}
        make(**more).save(tokens)
        for seed, found in ((1, 0), (2, 5)):
            parted = [*tokens[: 5 * BLOCK], *(t + seed for t in tokens[5 * BLOCK :])]
            engine = make(seed=seed, **more)
            assert engine.match(engine.request("save", parted)) == found * BLOCK
            engine.save(parted)

    def test_a_save_keeps_of_what_it_continues_only_the_window_that_is_needed(
        self, make: Make
    ) -> None:
        """With all of it the windows that nobody reads any more would outlive what is in use."""
        engine, tokens = make(), prompt(8)
        request = engine.request("save", tokens)
        tables = engine.tables(len(tokens))
        engine.scheduler.plan_step([(request, 6 * BLOCK)], [], lambda _: tables)
        request.num_computed_tokens = 6 * BLOCK
        plan = engine.scheduler.plan_step([(request, 2 * BLOCK)], [], lambda _: tables)
        ((attention,), (window,)) = plan.saves[0].before
        assert (len(attention), len(window)) == (6, 2), "9 tokens before token 48: blocks 4 and 5"


class TestLeft:
    """Windows that are left once a prompt has gone on: blocks 3 and 4 are those at its former end,
    of 5 blocks."""

    def left(self, engine: TpEngine, store: MemoryBlockStore, tokens: list[int]) -> list[int]:
        """Find and save a prompt; the blocks of it whose windows are left."""
        request = engine.request("save", tokens)
        engine.match(request)
        store.left.clear()
        engine.save(tokens)
        per_key, (namespace,) = engine.layout.hashes_per_key, engine.layout.groups[1].namespaces
        keys = namespace.engine_keys(request.block_hashes, per_key)
        return [keys.index(key) for key in store.left]

    @pytest.mark.parametrize("interval", [None, 0])
    @pytest.mark.parametrize(
        ("more", "left"), [(3 * BLOCK, [3, 4]), (BLOCK, [3]), (BLOCK - 4, []), (0, [])]
    )
    def test_a_prompt_that_goes_on_leaves_what_its_new_end_does_not_need(
        self, make: Make, store: MemoryBlockStore, interval: int | None, more: int, left: list[int]
    ) -> None:
        tokens = prompt(5)
        assert self.left(make(window_interval_tokens=interval), store, tokens) == []
        engine = make(seed=1, window_interval_tokens=interval)
        assert self.left(engine, store, [*tokens, *range(more)]) == left

    def test_the_end_behind_which_a_second_prompt_goes_on_is_not_left_again(
        self, make: Make, store: MemoryBlockStore
    ) -> None:
        tokens, engine = prompt(5), make(window_interval_tokens=0)
        self.left(engine, store, tokens)
        left = [self.left(engine, store, [*tokens, *[i] * 24]) for i in (1, 2)]
        assert left == [[3, 4], []]

    def test_an_end_behind_which_nothing_could_be_stored_is_not_left(
        self, make: Make, store: MemoryBlockStore
    ) -> None:
        tokens, engine = prompt(5), make(window_interval_tokens=0)
        self.left(engine, store, tokens)
        store.capacity_blocks = 0
        assert self.left(engine, store, [*tokens, *range(24)]) == []

    def test_where_prompts_part_is_not_left(self, make: Make, store: MemoryBlockStore) -> None:
        tokens, engine = prompt(5), make(window_interval_tokens=0)
        parted = [[*tokens[: 3 * BLOCK], *[i] * 24] for i in (1, 2, 3)]
        assert [self.left(engine, store, one) for one in (tokens, *parted)] == [[]] * 4
