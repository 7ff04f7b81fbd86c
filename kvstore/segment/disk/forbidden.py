"""Knows what must not be found on a device any more, and encodes it for the log.

A record is 48 bytes: kind, number, name. Records only ever add: a number grows, a name comes in. So
their order does not matter, and one that is read twice says nothing new.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import IntEnum

from kvstore.core.disk.base import EVERYTHING, order_of
from kvstore.core.resets import Resets
from kvstore.errors import InternalError
from kvstore.segment.disk.images import Images
from kvstore.types import DiskBlock, Key, Kind

CLOSED_MAX = 64
"""Devices that were closed for good whose UUIDs are remembered, the last ones."""
RECORD = struct.Struct("<B7xQ32s")
LAST_PAGE = (1 << 32) - 1
_ALL_NAMESPACES = 1 << 32
"""Stands for a namespace in a reset that drops everything."""


class Record(IntEnum):
    """Kinds of records. Those of `Forbidden.numbers` have no name."""

    NONE = 0
    RUN = 1
    """The start of the node that used the device last."""
    DELETED_IN = 2
    """The last start in which a key was deleted, on whatever device."""
    LAPS = 3
    """No lap above it was ever begun."""
    RESETS_FLOOR = 4
    ALL_UP_TO = 5
    VALUES_UP_TO = 6
    """Order up to which only blocks of engines count, whose keys name their content."""
    KEY = 7
    NAMESPACE = 8
    RESET = 9
    CLOSED = 10
    """The UUID of another device that was closed for good."""
    REGION = 11
    CLEARED = 12
    """As NAMESPACE, but of no reset, whose number would tell when that was."""


_NUMBERS = range(Record.RUN, Record.KEY)


class Forbidden:
    """What the log of one device says."""

    def __init__(self) -> None:
        self.numbers = dict.fromkeys(_NUMBERS, 0)
        self.resets = Resets()
        """Resets that were carried out on this device."""
        self.closed: dict[bytes, None] = {}
        self._keys: dict[Key, int] = {}
        self._namespaces: dict[int, int] = {}
        self._regions: dict[int, int] = {}
        """All three: up to which order."""
        self._cleared: set[int] = set()
        """Which of the namespaces were not only reset."""

    def forbids(self, block: DiskBlock, region: int) -> bool:
        order, numbers = order_of(block.place), self.numbers
        return (
            order <= numbers[Record.ALL_UP_TO]
            or order <= self._keys.get(block.key, 0)
            or order <= self._namespaces.get(block.namespace_id, 0)
            or order <= self._regions.get(region, 0)
            or (order <= numbers[Record.VALUES_UP_TO] and block.kind != Kind.BLOCK)
        )

    def names(self, block: DiskBlock) -> bool:
        """Return whether the block's key was deleted or its namespace cleared, as of a block of
        another device, of which nobody knows whether it was written before that."""
        return block.key in self._keys or block.namespace_id in self._cleared

    def allowed(self, blocks: Sequence[DiskBlock], region: int) -> Sequence[DiskBlock]:
        """Return those blocks of one lap of a region that are not forbidden."""
        if not isinstance(blocks, Images) or not blocks:
            return [block for block in blocks if not self.forbids(block, region)]
        first = blocks[0].place.lap << 32
        up_to = max(self.numbers[Record.ALL_UP_TO], self._regions.get(region, 0))
        if up_to >= first + LAST_PAGE:
            return blocks[:0]
        values = self.numbers[Record.VALUES_UP_TO] >= first
        named = blocks.named(self._keys, self._namespaces, values=values)
        looked_at = range(len(blocks)) if up_to >= first else named
        return blocks.without({i for i in looked_at if self.forbids(blocks[i], region)})

    def add(self, records: Iterable[bytes]) -> None:
        """Take over what the records say."""
        resets: dict[int, set[int]] = {}
        for record in records:
            kind, number, name = RECORD.unpack(record)
            if kind in _NUMBERS:
                self.numbers[kind] = max(self.numbers[kind], number)
            elif kind == Record.KEY:
                self._keys[name] = max(self._keys.get(name, 0), number)
            elif kind in (Record.NAMESPACE, Record.CLEARED, Record.REGION):
                of = self._regions if kind == Record.REGION else self._namespaces
                one = int.from_bytes(name, "little")
                if kind == Record.CLEARED:
                    self._cleared.add(one)
                of[one] = max(of.get(one, 0), number)
            elif kind == Record.RESET:
                resets.setdefault(number, set()).add(int.from_bytes(name, "little"))
            elif kind == Record.CLOSED:
                self.closed[name[:16]] = None
                while len(self.closed) > CLOSED_MAX:
                    del self.closed[next(iter(self.closed))]
            elif kind != Record.NONE:
                raise InternalError(f"the log of a disk has a record of kind {kind}")
        self.resets.floor = max(self.resets.floor, self.numbers[Record.RESETS_FLOOR])
        for number, ids in sorted(resets.items()):
            self.resets.add(number, EVERYTHING if _ALL_NAMESPACES in ids else ids)

    def records(self) -> Iterator[bytes]:
        """Yield all of it, for a checkpoint."""
        self.numbers[Record.RESETS_FLOOR] = self.resets.floor
        for kind, number in self.numbers.items():
            yield record(kind, number)
        for number, ids in Resets().news(self.resets):
            yield from reset_records(number, ids)
        for uuid in self.closed:
            yield record(Record.CLOSED, 0, uuid)
        for namespace_id, up_to in self._namespaces.items():
            kind = Record.CLEARED if namespace_id in self._cleared else Record.NAMESPACE
            yield record(kind, up_to, namespace_id)
        for region, up_to in self._regions.items():
            yield record(Record.REGION, up_to, region)
        for key, up_to in self._keys.items():
            yield record(Record.KEY, up_to, key)

    def forget(self, up_to: int, laps: Mapping[int, int]) -> None:
        """Leave out what forbids nothing above that order, or nothing in the laps that the regions
        have. What was a region before the device was made smaller stays."""
        self._keys = {key: order for key, order in self._keys.items() if order > up_to}
        self._namespaces = {n: order for n, order in self._namespaces.items() if order > up_to}
        self._cleared &= self._namespaces.keys()
        self._regions = {
            r: order for r, order in self._regions.items() if order >> 32 >= laps.get(r, 0)
        }

    def fold(self) -> None:
        """Forbid everything up to half of what is forbidden by name, and forget those names."""
        orders = sorted([*self._keys.values(), *self._namespaces.values()])
        if not orders:
            raise InternalError("the log of a disk has no room for resets")
        self.add([record(Record.ALL_UP_TO, orders[len(orders) // 2])])
        self.forget(self.numbers[Record.ALL_UP_TO], dict.fromkeys(self._regions, 0))


def record(kind: int, number: int, name: bytes | int = b"") -> bytes:
    """Return one record; `name` is a key, a UUID or the id of a namespace."""
    raw = name if isinstance(name, bytes) else name.to_bytes(32, "little")
    return RECORD.pack(kind, number, raw)


def reset_records(number: int, namespace_ids: Iterable[int]) -> Iterator[bytes]:
    """Yield the records of a reset's number and what it named."""
    for namespace_id in list(namespace_ids) or [_ALL_NAMESPACES]:
        yield record(Record.RESET, number, namespace_id)
