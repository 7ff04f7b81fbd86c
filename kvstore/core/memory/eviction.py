"""Orders the evictable slots of a segment: which block goes first when space is needed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Protocol


class EvictionPolicy(Protocol):
    """Orders exactly the slots that may be evicted: those sealed and not pinned.

    Pure and deterministic. Every operation, and every step of `coldest`, is constant time.
    """

    def insert(self, slot_id: int) -> None:
        """A slot became evictable and counts as just used."""
        ...

    def touch(self, slot_id: int) -> None:
        """A slot was used; a slot that is not held is ignored."""
        ...

    def remove(self, slot_id: int) -> bool:
        """A slot is evictable no more; False when it was not."""
        ...

    def coldest(self) -> Iterator[int]:
        """All slots, the one to evict first first; good until the next operation."""
        ...


PolicyFactory = Callable[[], EvictionPolicy]


class LRU:
    """Least recently used first."""

    __slots__ = ("_order",)

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def insert(self, slot_id: int) -> None:
        self._order[slot_id] = None
        self._order.move_to_end(slot_id)

    def touch(self, slot_id: int) -> None:
        if slot_id in self._order:
            self._order.move_to_end(slot_id)

    def remove(self, slot_id: int) -> bool:
        return self._order.pop(slot_id, slot_id) is None

    def coldest(self) -> Iterator[int]:
        return iter(self._order)


POLICIES: dict[str, PolicyFactory] = {"lru": LRU}
"""Eviction policies by the name a user gives."""
