"""Keeps an hour of a cluster for the page, in arrays whose size is known before anything happens.

Most that it ever takes: `POINTS` numbers for each of `SERIES`, a byte a minute for each of
`NODES_MAX` nodes, and the most frequent reasons of each minute; together less than 1 MiB.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque

from kvstore.core.outgoing.watched import AGE_BOUNDS_S
from kvstore.node.page.watch import Watch

TICK_S = 10.0
POINTS = 360
"""An hour of ticks."""
MINUTES = 60
REASONS_MAX = 8
"""Reasons that are kept of each minute, those by which most tokens were missed."""
COUNTED = ("stored_bytes", "served_bytes", "asked_tokens", "engine_tokens", "hit_tokens", "evicted")
AGES = (*(f"evicted_age_le_{bound}" for bound in AGE_BOUNDS_S), "evicted_age")
SHOWN = ("nodes", "used_bytes", "size_bytes", *COUNTED)
SERIES = (*SHOWN, *AGES)


class History:
    """The last hour, tick by tick."""

    def __init__(self) -> None:
        self._series = {name: array("d", bytes(8 * POINTS)) for name in SERIES}
        self._ticks = 0
        self._fills: dict[int, bytearray] = {}
        """By node id: how full it was at each minute, in percent."""
        self._minute = Counter[str]()
        self._missed: deque[dict[str, int]] = deque(maxlen=MINUTES)

    def note(self, watch: Watch) -> None:
        """Take the tick of `watch` that has just ended."""
        living, last = watch.living(), watch.last
        now = {
            **last,
            "nodes": len(living),
            "used_bytes": sum(one.used_bytes for one in living),
            "size_bytes": sum(one.announcement.size_bytes for one in living),
        }
        for name, numbers in self._series.items():
            numbers[self._ticks % POINTS] = now.get(name, 0)
        self._minute.update({n: count for n, count in last.items() if n.startswith("missed_")})
        if self._ticks % (POINTS // MINUTES) == 0:
            self._missed.append(dict(self._minute.most_common(REASONS_MAX)))
            self._minute.clear()
            for node_id in self._fills.keys() - watch.nodes.keys():
                del self._fills[node_id]
            for node_id, one in watch.nodes.items():
                fill = self._fills.setdefault(node_id, bytearray())
                del fill[: max(len(fill) + 1 - MINUTES, 0)]
                fill.append(round(100 * min(one.used_bytes / one.announcement.size_bytes, 1)))
        self._ticks += 1

    def series(self, name: str) -> list[float]:
        """Return that number at each tick, the oldest first."""
        numbers, at = self._series[name], self._ticks % POINTS
        return list(numbers[:at] if self._ticks < POINTS else numbers[at:] + numbers[:at])

    def fill(self, node_id: int) -> list[int]:
        return list(self._fills.get(node_id, b""))

    def missed(self) -> Counter[str]:
        """Return how many tokens were missed for which reason."""
        return sum((Counter(minute) for minute in self._missed), Counter(self._minute))

    def ages(self) -> list[float]:
        """Return how many evicted blocks were at most as old as each bound, and how many all."""
        return [sum(self._series[name]) for name in AGES]
