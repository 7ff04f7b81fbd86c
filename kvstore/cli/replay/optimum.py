"""Computes what a store finds at most that knows the future: Belady's optimum for prefixes.

What is used again last goes first, and of what one prompt uses again, the deepest: a prefix without
its end is still a prefix. Blocks are a tree (traces.py), so what is held for a coming prompt is
always a prefix of it, and its length says all: nothing is kept block by block.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from heapq import heappop, heappush

from kvstore.cli.replay.traces import PromptTrace

NEVER = (1 << 32) - 1
Pieces = list[tuple[int, int]]
"""(number of the prompt that uses them next, how many blocks) along one prompt, head first."""


def next_uses(trace: PromptTrace) -> list[Pieces]:
    """Return for each prompt when its blocks are used again."""
    following = array("I", [NEVER]) * trace.distinct
    found: list[Pieces] = []
    for number in range(len(trace.prompts) - 1, -1, -1):
        blocks, pieces, at = trace.prompts[number], [], 0
        while at < len(blocks):
            use = following[blocks[at]]
            # The deeper, the later: whoever uses a block uses those before it.
            end = bisect_right(blocks, use, at, key=following.__getitem__)
            pieces.append((use, end - at))
            at = end
        for block in blocks:
            following[block] = number
        found.append(pieces)
    found.reverse()
    return found


def optimum(uses: Sequence[Pieces], capacity_blocks: int) -> int:
    """Return how many blocks are found at most by a store of so many."""
    held: dict[int, int] = {}
    """Blocks that are held for a prompt to come, by its number."""
    last: list[int] = []
    """The numbers in `held`, negative, as a heap; those of prompts that came are there too."""
    hits = total = 0
    for number, pieces in enumerate(uses):
        found = held.pop(number, 0)
        hits += found
        total -= found
        for use, count in pieces:
            if use not in held:
                heappush(last, -use)
            held[use] = held.get(use, 0) + count
            total += count
        while total > capacity_blocks:
            use = -last[0]
            gone = min(total - capacity_blocks, held.get(use, 0))
            total -= gone
            if gone < held.get(use, 0):
                held[use] -= gone
            else:
                held.pop(use, None)
                heappop(last)
    return hits
