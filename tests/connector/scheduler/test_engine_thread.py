"""What the scheduler side costs the engine's thread, counted in calls: a clock is no judge here."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
from connector_parts import BLOCK, Side, prompt

CALLS_A_REQUEST_MAX = 4
"""In a step that fills no block of it, as most steps of most requests are."""


def calls_of(work: Callable[[], object]) -> int:
    """Calls of functions, ours and built-in ones, that `work` makes on this thread."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
    return calls


@pytest.mark.parametrize("saved", [0, 1])
def test_a_request_of_which_no_block_is_full_costs_a_handful_of_calls(
    side: Side, saved: int
) -> None:
    requests = [prompt(saved, extra=BLOCK // 2, seed=i) for i in range(120)]
    for request in requests:
        side.tables[request.request_id] = list(range(1, 10))
        side.step((request, len(request.tokens)))
        request.tokens.append(0)

    def step_of(count: int) -> int:
        return calls_of(lambda: side.core.plan_step([(r, 1) for r in requests[:count]], (), table))

    table = side.table
    assert (step_of(120) - step_of(20)) / 100 <= CALLS_A_REQUEST_MAX


def test_a_block_that_fills_after_many_such_steps_is_saved(side: Side) -> None:
    request = prompt(1, extra=1)
    side.tables[request.request_id] = list(range(1, 10))
    saved = []
    for tokens in [len(request.tokens)] + [1] * (2 * BLOCK):
        saved.append([len(job.blocks) for job in side.step((request, tokens)).saves])
        request.tokens.append(0)
    assert [i for i, jobs in enumerate(saved) if jobs] == [0, BLOCK - 1, 2 * BLOCK - 1]
