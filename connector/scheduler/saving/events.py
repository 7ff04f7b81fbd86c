"""Makes the events by which an engine tells routers of blocks in the store (docs/decisions/0014).

"Stored" says that this engine saved the block, or found it there when it was about to. "Not
there" says that a block of which that was told could not be found by a later lookup.
Nobody is told when a node evicts one.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from connector.limits import EVENTS_ANNOUNCED_MAX, EVENTS_MAX
from connector.messages import BlockEvent
from kvstore import MissReason

if TYPE_CHECKING:
    from connector.layout.geometry import StoreLayout
    from connector.messages import EngineRequest, SaveJob
    from connector.scheduler.lookup import Lookup


class EngineEvents:
    """Makes the block events of one engine. Its scheduling thread alone may call."""

    def __init__(self, layout: StoreLayout, *, wanted: bool) -> None:
        """Start without events. Unless `wanted`, nothing is remembered and no event is made."""
        self._per_key = layout.hashes_per_key
        self._wanted = wanted
        self._saving: dict[int, list[BlockEvent]] = {}
        """Save job in flight -> the event for each of its blocks if it is stored."""
        self._announced: OrderedDict[tuple[int, bytes], None] = OrderedDict()
        self._events: deque[BlockEvent] = deque(maxlen=EVENTS_MAX)

    def saving(self, request: EngineRequest, job: SaveJob) -> None:
        """Note that a save of blocks of `request` was planned."""
        if self._wanted:
            hashes = request.block_hashes
            self._saving[job.job_id] = [
                BlockEvent(True, request, b.place, b.group, self._hash(hashes, b.place))
                for b in job.blocks
            ]

    def saved(self, job_id: int, stored: Iterable[int]) -> None:
        """Note that the job has ended on every worker; all shards of blocks at `stored` are
        there."""
        blocks = self._saving.pop(job_id, None)
        if blocks is None:
            return
        for position in sorted(stored):
            event = blocks[position]
            self._announced[event.group, event.block_hash] = None
            self._announced.move_to_end((event.group, event.block_hash))
            self._events.append(event)
        while len(self._announced) > EVENTS_ANNOUNCED_MAX:
            self._announced.popitem(last=False)

    def looked_up(self, request: EngineRequest, lookup: Lookup) -> None:
        """Announce that the first missing block is gone, if it was announced as stored.

        Only when the index answered: an index that is down or late says nothing about blocks.
        """
        if not self._announced or lookup.short is not MissReason.ABSENT:
            return
        block_hash = self._hash(lookup.hashes, lookup.run)
        for group, row in enumerate(lookup.placement):
            if row[lookup.run] is None and (group, block_hash) in self._announced:
                del self._announced[group, block_hash]
                self._events.append(BlockEvent(False, request, lookup.run, group, block_hash))

    def clear(self) -> None:
        """Forget all announcements: the store was cleared, and engines announce that by
        themselves."""
        self._announced.clear()
        self._events.clear()

    def take(self) -> list[BlockEvent]:
        """Return the events since the last call, in order."""
        events = list(self._events)
        self._events.clear()
        return events

    def _hash(self, hashes: Sequence[bytes], block: int) -> bytes:
        return hashes[(block + 1) * self._per_key - 1]
