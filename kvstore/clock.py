"""The one place that reads a clock; `core/` takes `now` as an argument instead."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Seconds that never run backwards."""

monotonic: Clock = time.monotonic
