"""A wait for a lookup is weighed against what computing would cost."""

from __future__ import annotations

import pytest
from connector_parts import BLOCK, Clock, Hold, Side, prompt

from connector.limits import LOOKUP_TIMEOUT_MIN_S, LOOKUP_TIMEOUT_S, RATE_WINDOWS_MAX
from connector.scheduler.patience import ComputeRate, patience_s
from kvstore.testing.blockstore import MemoryBlockStore


def steps(rate: ComputeRate, *planned: tuple[float, int]) -> float | None:
    """Plan a step of so many tokens at each of these times."""
    for now, tokens in planned:
        rate.step(now, tokens)
    return rate.tokens_per_s


def test_a_request_waits_as_long_as_computing_takes_between_two_bounds() -> None:
    assert patience_s(1000, 4000.0, 1.0) == 0.25
    assert patience_s(1000, 1_000_000.0, 1.0) == LOOKUP_TIMEOUT_MIN_S
    assert patience_s(100_000, 4000.0, 1.0) == 1.0
    assert patience_s(-3, 4000.0, 1.0) == LOOKUP_TIMEOUT_MIN_S


def test_what_the_user_allows_goes_before_the_least_wait() -> None:
    assert patience_s(1, 4000.0, 0.01) == 0.01


def test_of_an_engine_that_has_not_computed_yet_everything_is_at_stake() -> None:
    assert ComputeRate().tokens_per_s is None
    assert patience_s(1, None, 1.0) == 1.0


def test_the_rate_is_that_of_steps_that_have_ended() -> None:
    rate = ComputeRate()
    assert steps(rate, (0.0, 1000), (0.2, 1000)) is None
    assert steps(rate, (0.5, 5000)) == 4000.0


def test_time_without_work_does_not_count() -> None:
    assert steps(ComputeRate(), (0.0, 1000), (0.25, 0), (9.0, 1000), (9.25, 0)) == 4000.0


def test_steps_that_generate_do_not_hide_how_fast_a_prompt_is_computed() -> None:
    rate = ComputeRate()
    steps(rate, (0.0, 2000), (0.5, 0))
    assert steps(rate, *((1.0 + i * 0.02, 2) for i in range(100))) == 4000.0


def test_two_steps_that_are_planned_at_once_are_not_taken_for_a_fast_one() -> None:
    rate = steps(ComputeRate(), (0.0, 1000), (0.001, 1000), (0.5, 1))
    assert rate == pytest.approx(4000.0)


def test_a_rate_of_long_ago_is_forgotten() -> None:
    rate = ComputeRate()
    steps(rate, (0.0, 1000), (0.25, 0))
    slower = ((1.0 + i, tokens) for i, tokens in enumerate([100, 0] * RATE_WINDOWS_MAX))
    assert steps(rate, *slower) == 100.0


class TestScheduler:
    """An engine of 4 blocks a second, whose clock is played."""

    @pytest.fixture
    def clock(self) -> Clock:
        return Clock()

    @pytest.fixture
    def side(self, store: MemoryBlockStore, clock: Clock):
        side = Side(store, clock=clock, lookup_timeout_s=LOOKUP_TIMEOUT_S)
        side.step((prompt(4, extra=0, seed=9), 4 * BLOCK))
        clock.now += 1.0
        side.step()
        self.hold = store.on_match = Hold()
        yield side
        self.hold.release()
        side.core.close()

    def test_a_short_prompt_is_computed_where_a_long_one_still_waits(
        self, side: Side, clock: Clock
    ) -> None:
        short, long = prompt(1, extra=0, seed=1), prompt(3, extra=0, seed=2)
        assert (side.core.match(short, 0), side.core.match(long, 0)) == (None, None)
        clock.now += 0.3
        assert (side.core.match(short, 0), side.core.match(long, 0)) == (0, None)
        clock.now += 0.5
        assert side.core.match(long, 0) == 0

    def test_what_the_engine_has_itself_is_not_at_stake(self, side: Side, clock: Clock) -> None:
        request = prompt(3, extra=0, seed=1)
        assert side.core.match(request, 2 * BLOCK) is None
        clock.now += 0.3
        assert side.core.match(request, 2 * BLOCK) == 0

    def test_no_stake_is_waited_for_longer_than_the_user_allows(
        self, side: Side, clock: Clock
    ) -> None:
        request = prompt(100, extra=0, seed=1)
        assert side.core.match(request, 0) is None
        clock.now += LOOKUP_TIMEOUT_S
        assert side.core.match(request, 0) == 0

    def test_time_in_the_engines_queue_is_no_wait_for_the_lookup(
        self, side: Side, clock: Clock
    ) -> None:
        request = prompt(3, extra=0, seed=1)
        side.core.on_new_request(request)
        clock.now += 10.0
        assert side.core.match(request, 0) is None

    def test_a_late_answer_is_used_by_who_still_waits(
        self, side: Side, store: MemoryBlockStore, clock: Clock
    ) -> None:
        request = prompt(3, extra=1, seed=1)
        side.put(request, 3)
        assert side.core.match(request, 0) is None
        clock.now += 0.7
        assert side.core.match(request, 0) is None
        self.hold.release()
        assert side.match(request) == 3 * BLOCK

    def test_who_has_given_up_is_not_asked_for_any_more(
        self, side: Side, store: MemoryBlockStore, clock: Clock
    ) -> None:
        first, second = prompt(1, extra=0, seed=1), prompt(1, extra=0, seed=2)
        assert (side.core.match(first, 0), side.core.match(second, 0)) == (None, None)
        self.hold.await_reached()
        clock.now += 0.3
        assert side.core.match(second, 0) == 0
        asked = store.match_calls
        self.hold.release()
        lookup = side.core._requests[second.request_id].lookup
        assert lookup is not None
        assert lookup.done.wait(60)
        assert store.match_calls == asked
