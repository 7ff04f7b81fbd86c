"""The index of what lies on a node's disks as a dict: for tests and simulations."""

from collections.abc import Collection, Sequence

from kvstore.core.disk.base import adopt_each
from kvstore.types import DiskBlock, Key


class DictIndex:
    """The index as a dict: for tests and simulations."""

    def __init__(self) -> None:
        self._blocks: dict[Key, DiskBlock] = {}
        self._used: set[Key] = set()
        self.block_bytes = 0
        self.closed: set[int] = set()

    @property
    def blocks(self) -> int:
        return len(self._blocks)

    def put(self, block: DiskBlock) -> DiskBlock | None:
        former = self._blocks.get(block.key)
        self.remove(block.key)
        self._blocks[block.key] = block
        self.block_bytes += block.length
        return former

    def adopt(
        self, blocks: Sequence[DiskBlock], keys: Collection[Key], namespace_ids: Collection[int]
    ) -> tuple[Sequence[DiskBlock], Sequence[DiskBlock]]:
        return adopt_each(self, blocks, keys, namespace_ids)

    def get(self, key: Key) -> DiskBlock | None:
        return self._blocks.get(key)

    def remove(self, key: Key) -> bool:
        block = self._blocks.pop(key, None)
        self._used.discard(key)
        self.block_bytes -= 0 if block is None else block.length
        return block is not None

    def device_closed(self, device: int) -> None:
        self.closed.add(device)

    def mark_used(self, key: Key) -> bool:
        was = key in self._used
        if key in self._blocks:
            self._used.add(key)
        return was

    def is_used(self, key: Key) -> bool:
        return key in self._used

    def clear(
        self, namespace_ids: Sequence[int], start: int, at_most: int
    ) -> tuple[list[DiskBlock], int]:
        of = frozenset(namespace_ids)
        gone = [b for b in self._blocks.values() if not of or b.namespace_id in of]
        for block in gone:
            self.remove(block.key)
        return gone, 0

    def walk(self, start: int, at_most: int) -> tuple[list[DiskBlock], int]:
        blocks = list(self._blocks.values())
        end = start + at_most
        return blocks[start:end], end if end < len(blocks) else 0

    def drop_lap(self, device: int, lap: int, keys: Sequence[Key]) -> int:
        there = filter(None, map(self.get, keys))
        gone = [b.key for b in there if (b.place.device, b.place.lap) == (device, lap)]
        return sum(map(self.remove, gone))
