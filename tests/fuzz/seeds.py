"""How the tests of this folder draw: the same examples each time, or from another seed.

KVSTORE_FUZZ_SEED=N draws from N; KVSTORE_FUZZ_TIMES=50 tries fifty times as many.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from hypothesis import HealthCheck, seed, settings

SEED = int(os.environ.get("KVSTORE_FUZZ_SEED") or 0)
TIMES = int(os.environ.get("KVSTORE_FUZZ_TIMES") or 1)
EXAMPLE_TIMEOUT = timedelta(seconds=20)
"""Of one example, on a busy machine: what is meant is that it ends."""


def fuzz(examples: int) -> Callable[[Any], Any]:
    """Below `@given`'s place: how many examples, and from which seed."""

    def decorate(test: Any) -> Any:
        drawn = settings(
            max_examples=examples * TIMES,
            deadline=EXAMPLE_TIMEOUT,
            suppress_health_check=list(HealthCheck),
        )(test)
        return seed(SEED)(drawn)

    return decorate
