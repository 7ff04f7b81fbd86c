"""Lists the sealed blocks in small pages, and counts them and their bytes by namespace.

Whoever goes through all pages hears of each block that is there all the while exactly once, of
one that comes or goes meanwhile once or not at all: a page goes on above the last key of the
page before, whatever has changed. No page looks at much more blocks than it has.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import chain

from kvstore.core.memory.slots import Slot
from kvstore.types import TAG_BYTES, Key

BUCKETS = 1 << 12


def place_of(key: bytes) -> bytes:
    """Return what keys are ordered by: blocks that go on from one prefix share their tag, the
    digest behind it is evenly spread."""
    return key[TAG_BYTES:] + key[:TAG_BYTES]


def _bucket(key: bytes) -> int:
    return key[TAG_BYTES] << 4 | key[TAG_BYTES + 1] >> 4


class Listed:
    """The sealed blocks by key. A change costs the same however many there are."""

    def __init__(self) -> None:
        self._buckets: defaultdict[int, set[Key]] = defaultdict(set)
        self._by_namespace: dict[int, int] = {}
        self._bytes_by_namespace: dict[int, int] = {}
        self.bytes = 0
        """Bytes of all payloads."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, *slots: Slot) -> None:
        """Add blocks that were sealed."""
        buckets, blocks, sizes = self._buckets, self._by_namespace, self._bytes_by_namespace
        for slot in slots:
            key, namespace_id = slot.key, slot.namespace_id
            buckets[_bucket(key)].add(key)
            blocks[namespace_id] = blocks.get(namespace_id, 0) + 1
            sizes[namespace_id] = sizes.get(namespace_id, 0) + slot.length
            self.bytes += slot.length
        self._count += len(slots)

    def remove(self, *slots: Slot) -> None:
        """Remove sealed blocks that are about to leave."""
        blocks, sizes = self._by_namespace, self._bytes_by_namespace
        for slot in slots:
            number = _bucket(slot.key)
            bucket = self._buckets[number]
            bucket.remove(slot.key)
            if not bucket:
                del self._buckets[number]
            blocks[slot.namespace_id] -= 1
            sizes[slot.namespace_id] -= slot.length
            if not blocks[slot.namespace_id]:
                del blocks[slot.namespace_id], sizes[slot.namespace_id]
            self.bytes -= slot.length
        self._count -= len(slots)

    def page(self, after: bytes, at_most: int) -> list[Key]:
        """Return the first `at_most` keys behind `after`, all when that is empty."""
        found: list[Key] = []
        last = place_of(after)
        for number in range(_bucket(after) if after else 0, BUCKETS):
            bucket = self._buckets.get(number)
            if bucket:
                found += sorted((key for key in bucket if place_of(key) > last), key=place_of)
                if len(found) >= at_most:
                    break
        return found[:at_most]

    def keys(self) -> list[Key]:
        """Return all keys at once, in no order: 4 ms for 100,000."""
        return list(chain.from_iterable(self._buckets.values()))

    def namespaces(self, at_most: int) -> list[tuple[int, int]]:
        """Return (namespace id, blocks) of the namespaces with most blocks, in descending order."""
        return Counter(self._by_namespace).most_common(at_most)

    def bytes_by_namespace(self, at_most: int) -> list[tuple[int, int]]:
        """Return (namespace id, bytes of payloads) of those with most, in descending order."""
        return Counter(self._bytes_by_namespace).most_common(at_most)
