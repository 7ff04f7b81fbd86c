"""Decides for a node whose blocks are moved to a lower tier instead of being evicted.

Taking a slot never evicts: a block leaves only by `Retire`, after somebody has put it
elsewhere or has said that it cannot be kept. Who finds no free slot saves to the lower
tier itself.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

from kvstore.core.answers import ColdBlock
from kvstore.core.events import Coldest, Effects, Hold, Reply, Reserve, Retain, Retire, Write
from kvstore.core.holdings import Session
from kvstore.core.memory.slots import Slot, SlotEvent, SlotState
from kvstore.core.node import NodeCore
from kvstore.core.outgoing.departures import GoneWhy
from kvstore.keys import TTL_FIELD, ttl_of
from kvstore.types import NO_SPACE, PutResult, Retained, rejected


class DemotingCore(NodeCore):
    """A core whose sealed blocks stay until they are retired or dropped."""

    def __init__(self, **options: Any) -> None:
        """See `NodeCore`."""
        super().__init__(**options)
        self.blocks.allocator.evicts = False
        self._refused_bytes = 0
        """The largest value that found no room in one piece, since a value as large found some."""
        self._handlers[Retain] = self._retain_nothing
        self._handlers[Coldest] = self._coldest
        self._handlers[Retire] = self._retire

    def _take_for(
        self, session: Session, event: Reserve, at: int, writes: list[Write], now: float
    ) -> list[Slot] | PutResult:
        if ttl_of(event.namespace_id):
            return rejected(f"{TTL_FIELD}: blocks whose life is bounded are not kept in VRAM")
        taken, length = super()._take_for(session, event, at, writes, now), event.sizes[at]
        if taken is NO_SPACE:
            self._refused_bytes = max(self._refused_bytes, length)
        elif isinstance(taken, list) and length >= self._refused_bytes:
            self._refused_bytes = 0
        return taken

    def _retain_nothing(self, event: Retain, effects: Effects, now: float) -> None:
        """Answer that no block is here: blocks in VRAM move to host memory, and may be retained
        there."""
        answers = [Retained.ABSENT] * len(event.keys)
        effects.replies.append(Reply(event.session, event.request, answers, False))

    def _coldest(self, event: Coldest, effects: Effects, now: float) -> None:
        session = self._sessions.setdefault(event.session, Session())
        short_bytes = event.free_bytes - self.blocks.allocator.free_bytes
        leave: list[Slot] = []
        if short_bytes > 0:
            for slot in islice(self.blocks.allocator.coldest(), event.at_most):
                if short_bytes <= 0:
                    break
                short_bytes -= slot.length
                leave.append(slot)
        elif self._refused_bytes:
            # Enough is free, but not in one piece.
            leave = self.blocks.allocator.in_the_way(self._refused_bytes)[: event.at_most]
            self._refused_bytes = 0
        chosen: list[ColdBlock] = []
        for slot in leave:
            self.blocks.allocator.became_busy(slot)
            slot.pins = 1
            session.pins[slot.slot_id] = 1
            effects.writes.append(Hold(slot.slot_id, True))
            chosen.append(
                ColdBlock(
                    slot.key,
                    slot.slot_id,
                    slot.generation,
                    slot.offset,
                    slot.length,
                    slot.namespace_id,
                    slot.checksum,
                )
            )
        effects.replies.append(Reply(event.session, event.request, chosen, False))

    def _retire(self, event: Retire, effects: Effects, now: float) -> None:
        session = self._sessions.get(event.session, Session())
        for slot_id, generation in event.items:
            slot = self.blocks.allocator.slot(slot_id)
            if slot is None or slot.generation != generation or slot_id not in session.pins:
                continue
            # Who took it down has not used it.
            self.blocks.unpin(slot, session.pins.pop(slot_id), effects.writes, min_uses=0)
            if slot.state is not SlotState.SEALED:
                continue  # it was dropped meanwhile, and is free by now
            self.blocks.departures.note(slot.key, GoneWhy.EVICTED, now)
            self.blocks.counts["evicted"] += 1
            self.blocks.watched.evicted([slot], now)
            self.blocks.allocator.evicted([slot])
            self.blocks.free(
                [slot], SlotEvent.DOOM if slot.pins else SlotEvent.EVICT, effects.writes
            )
        effects.replies.append(Reply(event.session, event.request, None, False))
