"""What a trace of two days writes to a disk: within its budget in any 24 hours, and each block
once."""

from __future__ import annotations

import random
from array import array
from typing import NamedTuple

import pytest

from kvstore.cli.replay import replayed
from kvstore.cli.replay.traces import PromptTrace
from kvstore.core.disk.budget import WriteBudget
from kvstore.core.node import NodeCore

BLOCK = 16 << 10
HOUR_S = 3600.0
DAY_S = 24 * HOUR_S


class Writes(NamedTuple):
    """What a replay wrote."""

    times: list[tuple[float, int]]
    """When, and how many bytes."""
    blocks: int
    again: int
    """Of the blocks, those that were written again with their region."""

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
    trace: PromptTrace, memory: int, disk: int, monkeypatch: pytest.MonkeyPatch
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

    monkeypatch.setattr(WriteBudget, "spend", spend)
    monkeypatch.setattr(replayed, "NodeCore", core)
    how = {"size_bytes": memory * BLOCK, "block_bytes": BLOCK, "disk_bytes": disk * BLOCK}
    replayed.replayed(trace, replayed.keys_of(trace), policy="lru", **how)  # type: ignore[arg-type]
    tier = cores[0].disk
    assert tier is not None
    counts = tier.counts
    return Writes(times, counts["written_bytes"] // BLOCK, counts["again_bytes"] // BLOCK)


@pytest.mark.long
def test_in_no_24_hours_more_than_the_budget_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = 1024
    writes = writes_of(agents(2), 64, disk, monkeypatch)
    assert 0.9 * disk * BLOCK < writes.most_in_a_day <= disk * BLOCK
    assert 0 < writes.again <= 0.1 * writes.blocks


def test_each_block_is_written_once_where_the_disk_has_room_for_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trace = agents(1, sessions=4)
    writes = writes_of(trace, 512, 4 * trace.distinct, monkeypatch)
    assert 0.9 * trace.distinct < writes.blocks <= trace.distinct
