"""How much of a hit is worth loading, by what its sources took lately."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from connector_parts import BLOCK, GEOMETRY, layout

from connector.layout.block_plan import Placed
from connector.limits import LOAD_SOURCES_MAX, LOAD_TIMEOUT_MIN_S
from connector.messages import BlockRead
from connector.scheduler.load_costs import (
    RETRY_MAX_S,
    RETRY_S,
    TRY_SHARE,
    Choice,
    Hit,
    LoadCosts,
    SourceSpeed,
)
from connector.scheduler.patience import ComputeRate
from kvstore.spi import BlockRef

BLOCK_BYTES = GEOMETRY.token_bytes * BLOCK
BLOCKS = 100
ALL = BLOCKS * BLOCK
BLOCK_S = 0.01
"""Time to compute a block."""
HOST, FAR, DISK = "host", "other_host:1", "disk:1"


def rate(tokens_per_s: float = BLOCK / BLOCK_S) -> ComputeRate:
    known = ComputeRate()
    known.step(0.0, int(tokens_per_s))
    known.step(1.0, 0)
    return known


def row(*places: tuple[str, int]) -> list[list[Placed | None]]:
    """Return where blocks are, so many after each other in each source."""
    sources = [source for source, count in places for _ in range(count)]
    return [[Placed(0, (BlockRef(b"%032d" % i, s.encode()),)) for i, s in enumerate(sources)]]


def sources(found: Sequence[BlockRef]) -> list[str]:
    return [one.record.decode() for one in found]


class Costs(LoadCosts):
    """Of an engine that computes a block in `BLOCK_S`."""

    def __init__(self, known: ComputeRate | None = None) -> None:
        super().__init__(layout(), known or rate())

    def reads(self, source: str, block_s: float, blocks: int = 50) -> None:
        """Tell of reads that took so long a block."""
        for _ in range(3):
            self.add([BlockRead(source, blocks * BLOCK_BYTES, blocks * block_s)])

    def chosen(self, *places: tuple[str, int], now: float = 0.0, start: int = 0) -> Choice:
        hit = Hit(row(*places), start, ALL - start, sources)
        return self.choose(hit, ALL - start, _any_end, now)

    def loads(self, name: str, choice: Choice, *places: tuple[str, int], now: float = 0.0):
        return self.begin(name, Hit(row(*places), 0, choice.tokens, sources), choice, now)

    def cut(self, *places: tuple[str, int], now: float = 0.0) -> int:
        """Return the blocks that are loaded where nothing is tried."""
        first = self.chosen(*places, now=now)
        if first.timeout_s is not None:
            self.loads("try", first, *places, now=now)
            self.end("try", now)
        again = self.chosen(*places, now=now)
        assert again.timeout_s is None
        return again.tokens // BLOCK


def _any_end(blocks: int) -> int:
    return min(blocks, BLOCKS)


class TestSpeed:
    def test_nobody_knows_before_the_first_read(self) -> None:
        assert SourceSpeed().seconds(1000) == 0.0

    def test_a_latency_is_told_from_a_rate(self) -> None:
        self.check_latency(1_000, 1_000_000, 50_000)
        self.check_latency(1_000_000, 1_000, 50_000)

    def check_latency(self, *sizes: int) -> None:
        speed = SourceSpeed()
        for size_bytes in sizes:
            speed.add(BlockRead(FAR, size_bytes, 0.05 + size_bytes / 1e7))
        assert speed.seconds(10) == pytest.approx(0.05, rel=0.01)
        assert speed.seconds(10_000_000) == pytest.approx(1.05, rel=0.01)

    def test_reads_of_one_size_say_a_rate(self) -> None:
        speed = SourceSpeed()
        for _ in range(3):
            speed.add(BlockRead(FAR, 1_000_000, 0.1))
        assert speed.seconds(10_000_000) == pytest.approx(1.0)

    def test_one_slow_read_is_a_doubt_and_two_are_believed(self) -> None:
        speed = SourceSpeed()
        speed.add(BlockRead(FAR, 1_000_000, 0.1))
        speed.add(BlockRead(FAR, 1_000_000, 10.0))
        assert speed.seconds(1_000_000) == pytest.approx(0.1)
        assert speed.seconds(1_000_000, doubting=True) == pytest.approx(10.0)
        speed.add(BlockRead(FAR, 1_000_000, 10.0))
        assert speed.seconds(1_000_000) == pytest.approx(10.0)

    def test_a_doubt_ends_with_a_read_as_expected(self) -> None:
        speed = SourceSpeed()
        for took_s in (0.1, 10.0, 0.1):
            speed.add(BlockRead(FAR, 1_000_000, took_s))
        assert speed.seconds(1_000_000, doubting=True) == pytest.approx(0.1)

    def test_a_fast_read_is_believed_at_once(self) -> None:
        speed = SourceSpeed()
        for took_s in (10.0, 10.0, 0.1):
            speed.add(BlockRead(FAR, 1_000_000, took_s))
        assert speed.seconds(1_000_000) == pytest.approx(0.1)

    def test_a_read_of_nothing_is_slow(self) -> None:
        speed = SourceSpeed()
        speed.add(BlockRead(FAR, 0, 0.1))
        assert speed.seconds(1_000_000) > 1000.0


class TestChoice:
    def test_all_is_loaded_while_the_engine_or_the_source_is_not_known(self) -> None:
        costs = Costs(ComputeRate())
        costs.reads(FAR, 10.0)
        assert costs.chosen((FAR, BLOCKS)) == Choice(ALL)
        assert costs.loads("r", Choice(ALL), (FAR, BLOCKS)) == (None, None)
        assert Costs().chosen((FAR, BLOCKS)) == Choice(ALL)

    @pytest.mark.parametrize("source", [HOST, "vram", FAR, DISK])
    def test_what_is_slower_than_computing_is_computed(self, source: str) -> None:
        costs = Costs()
        costs.reads(source, 2 * BLOCK_S)
        assert costs.cut((source, BLOCKS)) == 0
        costs = Costs()
        costs.reads(source, BLOCK_S / 2)
        assert costs.cut((source, BLOCKS)) == BLOCKS

    def test_a_load_ends_where_a_slow_source_begins(self) -> None:
        costs = Costs()
        costs.reads(HOST, BLOCK_S / 100)
        costs.reads(FAR, BLOCK_S / 3)
        costs.reads(DISK, 3 * BLOCK_S)
        assert costs.cut((HOST, 20), (FAR, 30), (DISK, 50)) == 50
        assert costs.chosen((HOST, 20), (DISK, 80)).source == DISK

    def test_behind_a_little_that_is_slow_may_lie_much_that_is_worth_it(self) -> None:
        costs = Costs()
        costs.reads(FAR, BLOCK_S / 10)
        costs.reads(DISK, 3 * BLOCK_S)
        assert costs.cut((DISK, 10), (FAR, 90)) == BLOCKS
        assert costs.cut((DISK, 60), (FAR, 40)) == 0

    def test_a_latency_is_worth_it_for_much_only(self) -> None:
        costs = Costs()
        for blocks in (1, 100, 10):
            costs.add([BlockRead(FAR, blocks * BLOCK_BYTES, 0.3 + blocks * BLOCK_S / 100)])
        assert costs.chosen((FAR, BLOCKS)).tokens == ALL
        last = 10 * BLOCK
        few = costs.choose(Hit(row((FAR, 10)), 0, last, sources), last, _any_end, 0.0)
        assert few.source == FAR

    def test_the_end_is_one_at_which_every_group_has_what_it_needs(self) -> None:
        costs = Costs()
        costs.reads(DISK, 3 * BLOCK_S)
        places = Hit(row((HOST, 30), (DISK, 70)), 0, ALL, sources)
        choice = costs.choose(places, ALL, lambda b: b // 16 * 16, 0.0)
        assert choice.source == DISK
        assert choice.tokens // BLOCK % 16 == 0
        costs.loads("try", choice, (HOST, 30), (DISK, 70))
        costs.end("try", 0.0)
        choice = costs.choose(places, ALL, lambda b: b // 16 * 16, 0.0)
        assert (choice.tokens, choice.timeout_s) == (16 * BLOCK, None)

    def test_the_slowest_shard_counts(self) -> None:
        costs = Costs()
        costs.reads(FAR, BLOCK_S / 100)
        costs.reads(DISK, 3 * BLOCK_S)
        shards = [
            [Placed(0, (BlockRef(b"a", FAR.encode()), BlockRef(b"b", DISK.encode())))] * BLOCKS
        ]
        assert costs.choose(Hit(shards, 0, ALL, sources), ALL, _any_end, 0.0).source == DISK

    def test_loads_under_way_are_waited_for(self) -> None:
        costs = Costs()
        costs.reads(FAR, BLOCK_S / 3)
        for name in "abc":
            costs.loads(name, Choice(ALL), (FAR, BLOCKS))
        assert costs.chosen((FAR, BLOCKS)) == Choice(0, FAR)
        assert costs.chosen((HOST, BLOCKS)).tokens == ALL, "memory of this host comes in between"
        costs.end("a", BLOCKS * BLOCK_S / 3)
        costs.end("b", BLOCKS * BLOCK_S * 2 / 3)
        costs.end("c", BLOCKS * BLOCK_S)
        costs.end("of nothing from elsewhere", 0.0)
        assert costs.chosen((FAR, BLOCKS), now=BLOCKS * BLOCK_S).tokens == ALL

    def test_what_hangs_is_waited_for_no_more(self) -> None:
        costs = Costs()
        costs.reads(FAR, BLOCK_S / 10)
        costs.loads("a", Choice(ALL), (FAR, BLOCKS))
        assert costs.chosen((FAR, BLOCKS), now=0.0).tokens == ALL
        assert costs.chosen((FAR, BLOCKS), now=60.0).tokens == 0


class TestTries:
    def test_a_slow_source_is_tried_by_a_small_load_that_may_fail(self) -> None:
        costs = Costs()
        costs.reads(FAR, 2 * BLOCK_S)
        choice = costs.chosen((FAR, BLOCKS))
        assert choice.tokens == int(TRY_SHARE * ALL)
        assert choice.timeout_s == pytest.approx(TRY_SHARE * BLOCKS * BLOCK_S, abs=0.03)
        timeout_s, compute_s = costs.loads("r", choice, (FAR, BLOCKS))
        assert (timeout_s, compute_s) == (choice.timeout_s, pytest.approx(0.05))

    def test_tries_become_rare_and_never_end(self) -> None:
        costs = Costs()
        tries, now = [], 0.0
        while now < 300.0:
            costs.reads(FAR, 2 * BLOCK_S)
            choice = costs.chosen((FAR, BLOCKS), now=now)
            if choice.timeout_s is not None:
                tries.append(now)
                costs.loads("r", choice, (FAR, BLOCKS), now=now)
                costs.end("r", now)
            now += 0.5
        pauses = [later - sooner for sooner, later in pairwise(tries)]
        assert pauses[:4] == [RETRY_S, 2 * RETRY_S, 4 * RETRY_S, 8 * RETRY_S]
        assert max(pauses) == RETRY_MAX_S == pauses[-1]

    def test_a_source_that_is_fast_again_is_loaded_from(self) -> None:
        costs = Costs()
        costs.reads(FAR, 2 * BLOCK_S)
        assert costs.cut((FAR, BLOCKS)) == 0
        costs.add([BlockRead(FAR, 5 * BLOCK_BYTES, 5 * BLOCK_S / 10)])
        assert costs.chosen((FAR, BLOCKS)) == Choice(ALL)

    def test_loads_of_others_under_way_do_not_put_a_try_off(self) -> None:
        costs = Costs()
        costs.reads(FAR, BLOCK_S / 100)
        costs.reads(DISK, 2 * BLOCK_S)
        costs.loads("other", Choice(ALL), (FAR, BLOCKS))
        choice = costs.chosen((DISK, BLOCKS))
        assert choice.timeout_s is not None
        assert costs.loads("try", choice, (DISK, BLOCKS))[0] > choice.timeout_s

    def test_where_only_whole_loads_are_possible_one_is_the_try(self) -> None:
        costs = Costs()
        costs.reads(FAR, 2 * BLOCK_S)
        hit = Hit(row((FAR, BLOCKS)), 0, ALL, sources)
        whole = costs.choose(hit, ALL, lambda b: b if b == BLOCKS else 0, 0.0)
        assert (whole.tokens, whole.source) == (ALL, FAR)
        assert whole.timeout_s is not None


class TestBounds:
    def test_a_load_has_as_long_as_computing_takes_behind_those_before_it(self) -> None:
        costs = Costs()
        costs.reads(FAR, BLOCK_S / 10)
        whole = Choice(ALL)
        assert costs.loads("a", whole, (FAR, BLOCKS)) == (pytest.approx(1.0), pytest.approx(1.0))
        assert costs.loads("b", whole, (FAR, BLOCKS)) == (pytest.approx(1.1), pytest.approx(1.0))
        assert costs.loads("c", whole, (HOST, BLOCKS)) == (pytest.approx(1.0), pytest.approx(1.0))
        few = costs.loads("d", Choice(BLOCK), (HOST, 1))
        assert few == (LOAD_TIMEOUT_MIN_S, pytest.approx(BLOCK_S))

    def test_the_sources_that_are_remembered_are_bounded(self) -> None:
        costs = Costs()
        for number in range(LOAD_SOURCES_MAX + 5):
            costs.reads(f"other_host:{number}", 2 * BLOCK_S)
        assert costs.cut(("other_host:0", BLOCKS)) == BLOCKS, "it is forgotten"
        assert costs.cut((f"other_host:{LOAD_SOURCES_MAX + 4}", BLOCKS)) == 0
