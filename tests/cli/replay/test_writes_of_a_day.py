"""What a trace of two days writes to a disk: within its budget in any 24 hours, and nearly each
block once."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import pytest

from kvstore.cli.replay import replayed
from kvstore.cli.replay.disk import ReplayedDisk
from kvstore.cli.replay.traces import PromptTrace
from kvstore.core.answers import SpillBlock
from kvstore.core.disk.budget import WriteBudget
from kvstore.core.disk.tier import DiskTier
from kvstore.core.memory.slots import Slot
from kvstore.core.node import NodeCore
from kvstore.types import Key

BLOCK = 16 << 10
HOUR_S = 3600.0
DAY_S = 24 * HOUR_S


class Writes(NamedTuple):
    """What a replay wrote."""

    times: list[tuple[float, int]]
    """When, and how many bytes."""
    blocks: int
    again: int
    """Of the blocks, those that were on the disk since they were saved, or when they were."""
    told: int
    """How many that were, by the node's own count."""

    @property
    def most_in_a_day(self) -> int:
        most = start = now_bytes = 0
        for at_s, size_bytes in self.times:
            now_bytes += size_bytes
            while self.times[start][0] <= at_s - DAY_S:
                now_bytes -= self.times[start][1]
                start += 1
            most = max(most, now_bytes)
        return most


def agents(seed: int, sessions: int = 14, hours: float = 50.0) -> PromptTrace:
    """Sessions that come and go over two days: each prompt is the one before and some more."""
    rng, new = random.Random(seed), 0
    found: list[tuple[float, array[int]]] = []
    for _ in range(sessions):
        at_s, blocks = rng.uniform(0, hours) * HOUR_S, array("I")
        for _ in range(rng.randint(5, 30)):
            more = rng.randint(1, 30)
            blocks = blocks[: len(blocks) - rng.choice([0, 0, 1])]
            blocks = blocks + array("I", range(new, new + more))
            new += more
            found.append((at_s, blocks))
            at_s += rng.expovariate(1 / rng.choice([10.0, 60.0, 2 * HOUR_S]))
    found.sort(key=lambda one: one[0])
    times, prompts = zip(*found, strict=True)
    return PromptTrace("agents", list(times), list(prompts), new)


def writes_of(
    trace: PromptTrace,
    memory: int,
    disk: int,
    monkeypatch: pytest.MonkeyPatch,
    per_day: float = 1.0,
) -> Writes:
    """Replay a trace, with so many blocks in memory and on a disk."""
    times: list[tuple[float, int]] = []
    cores: list[NodeCore] = []
    real_spend, real_core = WriteBudget.spend, NodeCore

    def spend(self: WriteBudget, size_bytes: int, now: float) -> None:
        times.append((now, size_bytes))
        real_spend(self, size_bytes, now)

    def core(**how: object) -> NodeCore:
        cores.append(real_core(**how))  # type: ignore[arg-type]
        return cores[-1]

    saves: Counter[Key] = Counter()
    written: Counter[tuple[Key, int]] = Counter()
    real_stored, real_write = DiskTier.stored, ReplayedDisk.write

    def stored(self: DiskTier, slots: Sequence[Slot]) -> None:
        saves.update(slot.key for slot in slots if self.there(slot.key) is None)
        real_stored(self, slots)

    def write(self: ReplayedDisk, asked: Sequence[SpillBlock], now: float) -> None:
        written.update((one.block.key, saves[one.block.key]) for one in asked)
        real_write(self, asked, now)

    monkeypatch.setattr(DiskTier, "stored", stored)
    monkeypatch.setattr(ReplayedDisk, "write", write)
    monkeypatch.setattr(WriteBudget, "spend", spend)
    monkeypatch.setattr(replayed, "NodeCore", core)
    how = {"size_bytes": memory * BLOCK, "block_bytes": BLOCK, "disk_bytes": disk * BLOCK}
    how |= {"disk_writes_per_day": per_day}
    found = replayed.replayed(trace, replayed.keys_of(trace), policy="lru", **how)  # type: ignore[arg-type]
    assert found.disk_written == written.total()
    return Writes(times, written.total(), written.total() - len(written), found.disk_again)


@pytest.mark.long
def test_in_no_24_hours_more_than_the_budget_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = 1024
    writes = writes_of(agents(2), 64, disk, monkeypatch)
    assert 0.9 * disk * BLOCK < writes.most_in_a_day <= disk * BLOCK
    assert 0 < writes.again <= 0.1 * (writes.blocks - writes.again)


def test_without_a_limit_a_tenth_is_written_again_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    writes = writes_of(agents(2), 256, 512, monkeypatch, per_day=0)
    assert 0 < writes.told == writes.again <= 0.1 * (writes.blocks - writes.again)


def test_each_block_is_written_once_where_the_disk_has_room_for_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trace = agents(1, sessions=4)
    writes = writes_of(trace, 512, 4 * trace.distinct, monkeypatch)
    assert 0.9 * trace.distinct < writes.blocks <= trace.distinct
