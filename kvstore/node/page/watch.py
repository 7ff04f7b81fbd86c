"""Follows a cluster by what its nodes announce: rates, the last minute, and who comes and goes.

`kvstore top` and a node's page (page.py) feed it with all announcements about once a second. No I/O
and no clock: whoever feeds it says what time it is.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kvstore.limits import NODE_TTL_S
from kvstore.nodedir import Announcement

MINUTE_S = 60.0
SILENT_S = 3.0
"""Time without a heartbeat after which a node is shown as silent. Nodes beat every second."""
GONE_SHOWN_S = 60.0
"""Time for which a node that died is still shown."""
EVENTS_MAX = 200
NODES_MAX = 1000
"""Nodes that are followed; further nodes are not counted."""
HOST_CHARS_MAX = 64


class Happened(NamedTuple):
    """A node came, came back or went."""

    at: float
    what: str
    """joined, restarted, is back (it was there all the time), left (it was stopped) or died."""
    name: str
    host: str


class WatchedNode:
    """What is known of one node."""

    def __init__(self, announcement: Announcement, now: float) -> None:
        self.announcement = announcement
        self.beat_at = now
        """When it last said something new."""
        self.delta: Mapping[str, int] = {}
        """How much its counters grew in the last tick."""
        self.gone_at: float | None = None
        self._mark: Mapping[str, int] = announcement.counts

    @property
    def counts(self) -> Mapping[str, int]:
        return self.announcement.counts

    @property
    def tier(self) -> str:
        return "VRAM" if "cuda_ipc" in self.announcement.transports else "DRAM"

    @property
    def used_bytes(self) -> int:
        """Return the bytes of its memory that blocks take."""
        return max(self.announcement.size_bytes - self.announcement.free_bytes, 0)

    def state(self, now: float) -> str:
        if self.gone_at is not None:
            return "gone"
        return "silent" if now - self.beat_at > SILENT_S else "alive"

    def beat(self, announcement: Announcement, now: float) -> None:
        before = self.announcement
        if announcement.epoch != before.epoch:
            self._mark = {}  # its counters began anew
        if (announcement.epoch, announcement.up_s) != (before.epoch, before.up_s):
            self.beat_at = now
        self.announcement, self.gone_at = announcement, None

    def tick(self) -> None:
        before, self._mark = self._mark, self.counts
        self.delta = {
            name: grown for name, n in self.counts.items() if (grown := n - before.get(name, 0)) > 0
        }


class Watch:
    """Follows all nodes. For one thread."""

    def __init__(self, tick_s: float) -> None:
        """Compute rates over the last `tick_s` seconds."""
        self.tick_s = tick_s
        self.nodes: dict[int, WatchedNode] = {}
        self.events: deque[Happened] = deque(maxlen=EVENTS_MAX)
        """The latest last."""
        self._ticks: deque[Counter[str]] = deque(maxlen=max(round(MINUTE_S / tick_s), 1))
        """How much all counters together grew in each tick of the last minute."""
        self._tick_at: float | None = None
        """Time of the next tick; None before anything was heard."""

    def hear(self, announcements: Iterable[Announcement], now: float) -> bool:
        """Take note of all nodes that the index knows of now. Return whether a tick has ended."""
        first, said = self._tick_at is None, {word.node_id: word for word in announcements}
        for node_id, word in said.items():
            seen = self.nodes.get(node_id)
            if seen is None:
                if len(self.nodes) >= NODES_MAX:
                    continue
                self.nodes[node_id] = WatchedNode(word, now)
                if not first:
                    self._happened(now, "joined", word)
                continue
            if word.epoch != seen.announcement.epoch:
                self._happened(now, "restarted", word)
            elif seen.gone_at is not None:
                self._happened(now, "is back", word)
            seen.beat(word, now)
        for node_id, seen in list(self.nodes.items()):
            if node_id in said:
                continue
            if seen.gone_at is None:
                stopped = now - seen.beat_at < NODE_TTL_S / 2
                self._happened(now, "left" if stopped else "died", seen.announcement)
                seen.gone_at = now
            if now - seen.gone_at > GONE_SHOWN_S:
                del self.nodes[node_id]
        return self._tick(now)

    def _happened(self, now: float, what: str, word: Announcement) -> None:
        self.events.append(Happened(now, what, word.name, word.host[:HOST_CHARS_MAX]))

    def _tick(self, now: float) -> bool:
        if self._tick_at is None:
            self._tick_at = now + self.tick_s
        if now < self._tick_at:
            return False
        self._tick_at = now + self.tick_s
        grown = Counter[str]()
        for seen in self.nodes.values():
            seen.tick()
            if seen.gone_at is None:
                grown.update(seen.delta)
        self._ticks.append(grown)
        return True

    @property
    def last(self) -> Counter[str]:
        """Return how much all counters together grew in the last tick."""
        return self._ticks[-1] if self._ticks else Counter()

    def minute(self) -> Counter[str]:
        """Return how much all counters together grew in the last minute, or since the start."""
        return sum(self._ticks, Counter())

    def living(self) -> list[WatchedNode]:
        """Return the nodes that the index knows of, by host and name."""
        return [seen for seen in self.all() if seen.gone_at is None]

    def all(self) -> list[WatchedNode]:
        """Return these, and those that went lately."""
        seen = self.nodes.values()
        return sorted(seen, key=lambda one: (one.announcement.host, one.announcement.name))


def hit_shares(counts: Mapping[str, int]) -> tuple[float, float, float] | None:
    """Return which shares of engines' tokens were in their own cache, in the store and missed; None
    when no engine asked for any."""
    asked = counts.get("asked_tokens", 0)
    if not asked:
        return None
    engine, hit = counts.get("engine_tokens", 0) / asked, counts.get("hit_tokens", 0) / asked
    return engine, hit, max(1 - engine - hit, 0.0)


def by_reason(counts: Mapping[str, int]) -> list[tuple[str, float]]:
    """Return the reasons for which tokens were missed and the share of each, largest first."""
    missed = {
        name.partition(":")[2]: n for name, n in counts.items() if name.startswith("missed_tokens:")
    }
    total = sum(missed.values())
    return sorted(((why, n / total) for why, n in missed.items() if n), key=lambda one: -one[1])


def by_age(counts: Mapping[str, int], bounds_s: Iterable[int]) -> list[tuple[int, float]]:
    """Return which share of evicted blocks was at most as old as each bound: of bounds that tell
    something, from the first that some reached to the first that all did."""
    total, found = counts.get("evicted_age", 0), list[tuple[int, float]]()
    for bound in bounds_s:
        count = counts.get(f"evicted_age_le_{bound}", 0)
        if count and not (found and found[-1][1] == 1.0):
            found.append((bound, count / total))
    return found
