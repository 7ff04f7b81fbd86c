"""A circuit breaker: after failures, calls are refused at once instead of waiting again.

Pure: time comes in as `now` (seconds that never run backwards). Not thread-safe.

    state      success     failure                    time
    closed     closed      open after the N-th in a   -
                           row, or one that hung,
                           else closed
    open       open        open                       half-open once the delay is over
    half-open  closed      open, with a longer delay  another probe once the delay is over

A call that hung has cost its whole deadline, so the next one must not (rule 8); one
that failed at once cost nothing and may be chance.

A success or failure that arrives while open comes from a call that began before
it opened: it says nothing new.
"""

from __future__ import annotations

import enum

from kvstore.errors import UsageError


class BreakerState(enum.StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Breaker:
    """Opens after `failures_max` failures in a row or a call that hung; lets one probe through
    per delay. The caller asks `allows` before each call and reports how it ended."""

    __slots__ = (
        "_delay_s",
        "_failures_max",
        "_retry_after_max_s",
        "_retry_after_s",
        "failures",
        "probe_at",
        "state",
    )

    def __init__(
        self,
        *,
        failures_max: int = 3,
        retry_after_s: float = 0.05,
        retry_after_max_s: float = 5.0,
    ) -> None:
        """Start with a delay of `retry_after_s`, which doubles per failed probe up to the
        maximum."""
        if failures_max < 1:
            raise UsageError("failures_max", failures_max, "must be at least 1")
        if not 0 < retry_after_s <= retry_after_max_s:
            raise UsageError(
                "retry_after_s", retry_after_s, f"above 0, at most {retry_after_max_s}"
            )
        self._failures_max = failures_max
        self._retry_after_s = retry_after_s
        self._retry_after_max_s = retry_after_max_s
        self.failures = 0
        """Consecutive failures while closed (read-only). At 0 a success changes nothing."""
        self._delay_s = retry_after_s
        self.state = BreakerState.CLOSED
        """State as of the last call (read-only); an open breaker becomes half-open inside
        `allows`."""
        self.probe_at = 0.0
        """Time at which `allows` lets the next probe through, unless closed (read-only)."""

    def allows(self, now: float) -> bool:
        """Return whether a call may go ahead now; unless closed, that call is the one probe."""
        if self.state is BreakerState.CLOSED:
            return True
        if now < self.probe_at:
            return False
        self.state = BreakerState.HALF_OPEN
        # A probe whose outcome never comes must not keep the breaker shut for ever.
        self.probe_at = now + self._delay_s
        return True

    def succeeded(self) -> None:
        if self.state is BreakerState.OPEN:
            return
        self.state = BreakerState.CLOSED
        self.failures = 0
        self._delay_s = self._retry_after_s

    def failed(self, now: float, *, hung: bool = False) -> None:
        """Note that a call failed at `now`; `hung` says that it ended by its deadline, without an
        answer."""
        if self.state is BreakerState.OPEN:
            return
        if self.state is BreakerState.HALF_OPEN:
            self._delay_s = min(self._delay_s * 2, self._retry_after_max_s)
            self._open(now)
            return
        self.failures += 1
        if hung or self.failures >= self._failures_max:
            self._open(now)

    def _open(self, now: float) -> None:
        self.state = BreakerState.OPEN
        self.probe_at = now + self._delay_s
