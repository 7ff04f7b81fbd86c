from __future__ import annotations

from array import array
from typing import Any

from kvstore.cli.replay.optimum import next_uses
from kvstore.cli.replay.replayed import Found, hints_of, keys_of, replayed
from kvstore.cli.replay.traces import PromptTrace

BLOCK = 16 << 10
KEPT = [0, 1, 2, 3]


def conversation() -> PromptTrace:
    """A prompt that comes back after a flood of others that never do."""
    flood = [list(range(start, start + 4)) for start in range(4, 44, 4)]
    prompts = [KEPT, *flood, KEPT]
    return PromptTrace("t", [10.0 * i for i in range(len(prompts))],
                 [array("I", prompt) for prompt in prompts], 44)  # fmt: skip


def found(trace: PromptTrace, hints: list[bool] | None) -> int:
    return replay(trace, hints=hints).hits


def replay(trace: PromptTrace, **more: Any) -> Found:
    """What a node of 16 blocks finds."""
    how = {"size_bytes": 16 * BLOCK, "block_bytes": BLOCK, "policy": "lru", **more}
    return replayed(trace, keys_of(trace), **how)


def test_what_memory_evicted_is_found_on_the_disk_and_comes_back_the_second_time() -> None:
    trace = conversation()
    twice = trace._replace(
        times=[*trace.times, 130.0, 140.0, 141.0], prompts=[*trace.prompts, *[trace.prompts[0]] * 3]
    )
    assert replay(trace) == Found(0)
    assert replay(trace, disk_bytes=8 << 20) == Found(hits=4, disk_written=44, disk_read=4)
    again = replay(twice, disk_bytes=8 << 20)
    assert again.hits == 16
    assert again.disk_read == 8, "the second read from the disk brings them into memory"


def test_a_disk_is_written_no_more_than_once_a_day_and_keeps_its_size() -> None:
    prompts = [array("I", range(start, start + 64)) for start in range(0, 64 * 64, 64)]
    trace = PromptTrace("t", [10.0 * i for i in range(64)], prompts, 64 * 64)
    disk = 4 << 20
    assert replay(trace, disk_bytes=disk).disk_written <= disk // BLOCK
    assert replay(trace, disk_bytes=disk, disk_writes_per_day=2.0).disk_written > disk // BLOCK
    slowly = trace._replace(times=[90_000.0 * i for i in range(64)])
    assert replay(slowly, disk_bytes=disk).disk_written > 3 * disk // BLOCK


def test_a_right_hint_keeps_what_goes_on_and_a_wrong_one_does_not() -> None:
    trace = conversation()
    uses = next_uses(trace)
    right = hints_of(uses, 1.0, seed=7)
    assert right == [True, *[False] * 11]
    assert hints_of(uses, 0.0, seed=7) == [not one for one in right]
    assert (found(trace, None), found(trace, right)) == (0, 4)
    assert found(trace, hints_of(uses, 0.0, seed=7)) == 0


def test_a_prompt_goes_on_when_all_but_its_last_block_comes_again() -> None:
    trace = PromptTrace("t", [0.0, 1.0], [array("I", [0, 1, 2]), array("I", [0, 1, 3])], 4)
    assert hints_of(next_uses(trace), 1.0, seed=7) == [True, False]
