from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.circuit_breaker import Breaker, BreakerState
from kvstore.errors import UsageError


def opened(now: float = 0.0) -> Breaker:
    breaker = Breaker(failures_max=1, retry_after_s=1.0, retry_after_max_s=4.0)
    breaker.failed(now)
    assert breaker.state is BreakerState.OPEN
    return breaker


def test_opens_after_that_many_failures_in_a_row_and_not_before() -> None:
    breaker = Breaker(failures_max=3)
    for now in (0.0, 1.0):
        breaker.failed(now)
        assert breaker.allows(now)
    breaker.failed(2.0)
    assert not breaker.allows(2.0)


def test_one_call_that_hung_opens_it_at_once() -> None:
    breaker = Breaker(failures_max=3)
    breaker.failed(0.0, hung=True)
    assert not breaker.allows(0.0)


def test_a_success_starts_the_count_again() -> None:
    breaker = Breaker(failures_max=2)
    for now in range(10):
        breaker.failed(now)
        assert breaker.state is BreakerState.CLOSED
        breaker.succeeded()
    assert breaker.allows(10)


def test_half_opens_by_itself_for_one_probe() -> None:
    breaker = opened(5.0)
    assert not breaker.allows(5.999)
    assert breaker.allows(6.0)
    assert breaker.state is BreakerState.HALF_OPEN
    assert not breaker.allows(6.0)


def test_a_probe_that_succeeds_closes_it() -> None:
    breaker = opened()
    breaker.allows(1.0)
    breaker.succeeded()
    assert breaker.state is BreakerState.CLOSED
    assert breaker.allows(1.0)


def test_each_probe_that_fails_doubles_the_delay_up_to_the_maximum() -> None:
    breaker = opened()
    now, delays = 0.0, []
    for _ in range(5):
        delays.append(breaker.probe_at - now)
        now = breaker.probe_at
        assert breaker.allows(now)
        breaker.failed(now)
    assert delays == [1, 2, 4, 4, 4]


def test_closing_forgets_the_longer_delay() -> None:
    breaker = opened()
    breaker.allows(1.0)
    breaker.failed(1.0)
    breaker.allows(3.0)
    breaker.succeeded()
    breaker.failed(3.0)
    assert breaker.probe_at == 4.0


def test_late_answers_of_calls_from_before_change_nothing_while_open() -> None:
    breaker = opened()
    breaker.succeeded()
    breaker.failed(0.5)
    assert breaker.state is BreakerState.OPEN
    assert breaker.probe_at == 1.0


def test_a_probe_that_never_reports_is_followed_by_another() -> None:
    breaker = opened()
    assert breaker.allows(1.0)
    assert not breaker.allows(1.9)
    assert breaker.allows(2.0)


@given(st.lists(st.tuples(st.sampled_from("sfa"), st.integers(0, 12)), max_size=60))
def test_while_not_closed_it_lets_at_most_one_call_through_per_delay(
    events: list[tuple[str, int]],
) -> None:
    breaker = Breaker(failures_max=2, retry_after_s=1.0, retry_after_max_s=4.0)
    now, last_probe = 0.0, float("-inf")
    for event, quarters_s in events:
        now += quarters_s / 4  # exact in binary
        if event == "s":
            breaker.succeeded()
        elif event == "f":
            breaker.failed(now)
        elif breaker.state is not BreakerState.CLOSED and breaker.allows(now):
            assert now - last_probe >= 1.0
            last_probe = now
        if breaker.state is BreakerState.CLOSED:
            last_probe = float("-inf")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"failures_max": 0}, "failures_max"),
        ({"retry_after_s": 0}, "retry_after_s"),
        ({"retry_after_s": 9, "retry_after_max_s": 8}, "retry_after_s"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(options: dict[str, float], field: str) -> None:
    with pytest.raises(UsageError, match=field):
        Breaker(**options)


def test_after_it_was_open_it_takes_as_many_failures_as_before() -> None:
    breaker = Breaker(failures_max=2, retry_after_s=1.0, retry_after_max_s=1.0)
    breaker.failed(0.0)
    breaker.failed(0.0)
    assert breaker.allows(1.0)
    breaker.succeeded()
    breaker.failed(2.0)
    assert breaker.state is BreakerState.CLOSED
    breaker.failed(2.0)
    assert breaker.state is BreakerState.OPEN
