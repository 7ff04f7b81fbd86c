"""Computes how long a request may wait for its lookup: as long as computing what it may save takes.

To wait so long and then compute costs at most twice what knowing the answer would have. Pure:
time comes in as `now` (seconds that never run backwards). See docs/decisions/0046.
"""

from __future__ import annotations

from collections import deque

from connector.limits import LOOKUP_TIMEOUT_MIN_S, RATE_WINDOW_S, RATE_WINDOWS_MAX


class ComputeRate:
    """Estimates the tokens a second that this engine computes, from what its steps schedule.

    Of the last windows the best one counts: in the others the engine generated token by token,
    or had nothing to do. A window is longer than a step, since an engine may plan two steps at
    once and then wait for both.
    """

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=RATE_WINDOWS_MAX)
        self._step_tokens = 0
        """Tokens of the step that runs since `_step_at`."""
        self._step_at = 0.0
        self._tokens = 0
        self._busy_s = 0.0

    def step(self, now: float, tokens: int) -> None:
        """Note that a step of `tokens` begins, and the one before it has ended."""
        if self._step_tokens:
            self._tokens += self._step_tokens
            self._busy_s += now - self._step_at
        if self._busy_s >= RATE_WINDOW_S:
            self._rates.append(self._tokens / self._busy_s)
            self._tokens, self._busy_s = 0, 0.0
        self._step_tokens, self._step_at = tokens, now

    @property
    def tokens_per_s(self) -> float | None:
        """Return the rate; None until a window is over."""
        return max(self._rates, default=None)


def patience_s(tokens: int, tokens_per_s: float | None, most_s: float) -> float:
    """Return seconds to wait for a lookup that may save computing `tokens`, at most `most_s`.

    While the engine's rate is not known, the wait is `most_s`.
    """
    if tokens_per_s is None:
        return most_s
    return min(max(tokens / tokens_per_s, LOOKUP_TIMEOUT_MIN_S), most_s)
