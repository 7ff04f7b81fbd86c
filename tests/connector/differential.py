"""What the tests have in common that give the same random input to us and to vLLM."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

differential = settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
NAMES = ["a", "b", "c"]
ids = st.sets(st.sampled_from(NAMES), max_size=2)
maybe = st.one_of(st.none(), st.lists(st.integers(0, 3), max_size=2))


def outcome(make: Callable[[], Any]) -> Any:
    """What it gives, or "refused": both packages refuse with kinds of ValueError, or worse."""
    try:
        return make()
    except (ValueError, AttributeError, ImportError):
        return "refused"


@dataclasses.dataclass
class Sum:
    """Stats or worker metadata, for both packages."""

    said: list[int]

    def aggregate(self, other: Sum) -> Sum:
        return Sum(self.said + other.said)
