"""Which block goes when space is needed. A policy orders the evictable slots of one size class."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol


class EvictionPolicy(Protocol):
    """Holds exactly the slots that may be evicted: sealed and not pinned.

    Pure and deterministic. Every operation is constant time.
    """

    def insert(self, slot_id: int) -> None:
        """A slot became evictable and counts as just used."""
        ...

    def touch(self, slot_id: int) -> None:
        """A slot was used; a slot that is not held is ignored."""
        ...

    def remove(self, slot_id: int) -> None:
        """A slot is evictable no more; a slot that is not held is ignored."""
        ...

    def victim(self) -> int | None:
        """The slot to evict next (it stays until removed), None when there is none."""
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

    def remove(self, slot_id: int) -> None:
        self._order.pop(slot_id, None)

    def victim(self) -> int | None:
        return next(iter(self._order), None)


POLICIES: dict[str, PolicyFactory] = {"lru": LRU}
"""Eviction policies by the name a user gives."""
