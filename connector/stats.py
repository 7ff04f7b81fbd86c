"""Holds counters and samples on their way from workers and scheduler to an engine's metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from connector.limits import STATS_SAMPLES_MAX


class CountStats:
    """Implements `KVConnectorStats` of counters, which add up, and of samples (lists of numbers),
    which are put together, at most the last `STATS_SAMPLES_MAX` of a name. Equal when all are."""

    __slots__ = ("counts",)

    def __init__(self, counts: Mapping[str, float | list[float]] | None = None) -> None:
        self.counts: dict[str, Any] = dict(counts or {})

    def add(self, name: str, value: float | list[float]) -> None:
        """Add a count, or samples; a name has only ever one of the two."""
        if isinstance(value, list):
            self.counts[name] = (self.counts.get(name, []) + value)[-STATS_SAMPLES_MAX:]
        else:
            self.counts[name] = self.counts.get(name, 0) + value

    def aggregate(self, other: CountStats) -> Self:
        for name, value in other.counts.items():
            self.add(name, value)
        return self

    def is_empty(self) -> bool:
        return not any(self.counts.values())

    def to_dict(self) -> dict[str, Any]:
        return dict(self.counts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CountStats) and self.counts == other.counts

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"CountStats({self.counts!r})"
