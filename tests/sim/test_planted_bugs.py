"""The simulator must find each of these bugs, or it is broken itself."""

from collections.abc import Callable

import pytest

from kvstore.client import reader
from kvstore.core.events import Effects, SessionResumed
from kvstore.core.gone import GoneWhy
from kvstore.core.node import NodeCore
from kvstore.core.slots import SlotEvent
from kvstore.errors import InternalError
from kvstore.testing.sim import run

SEEDS = 120


class SealsBeforeTheCopy(NodeCore):
    """Readers can find a block whose bytes are not there yet (rule 3)."""

    def _reserve(self, event, effects, now):
        super()._reserve(event, effects, now)
        for answer in effects.replies[-1].body:
            if isinstance(answer, tuple):
                slot = self.allocator.slot(answer[0])
                del self._sessions[event.session].reserved[slot.slot_id]
                self._seal(slot, 0, effects.writes)


class PublishesBeforeTheSeal(NodeCore):
    """The index learns of a slot that is still being written (rule 3)."""

    def _reserve(self, event, effects, now):
        super()._reserve(event, effects, now)
        for answer in effects.replies[-1].body:
            if isinstance(answer, tuple):
                slot = self.allocator.slot(answer[0])
                slot.record = self.record(slot, self.epoch)
                self.outbox.publish(slot)


class ReservationsTimeOut(NodeCore):
    """A paused writer's slot goes to somebody else (rule 5)."""

    def handle(self, event, now):
        writes = []
        for session in self._sessions.values():
            for slot in list(session.reserved.values()):
                if now - slot.reserved_at > 200:
                    del session.reserved[slot.slot_id]
                    self._release(slot, GoneWhy.WRITER_DIED, writes, now)
        effects = super().handle(event, now)
        return Effects([*writes, *effects.writes], effects.replies)


class ALostConnectionCountsAsDeath(NodeCore):
    """A living writer loses its slots when only its connection is gone (rule 5)."""

    def _session_resumed(self, event, effects, now):
        super()._session_resumed(SessionResumed(event.session, [], []), effects, now)


class DropsPinnedBlocks(NodeCore):
    """A pinned slot is reused while somebody reads it in place."""

    def _drop_slot(self, slot, why, writes, now):
        if slot.pins:
            pins, slot.pins = slot.pins, 0
            self.allocator.became_evictable(slot)
            self._free(slot, SlotEvent.EVICT, writes)
            slot.pins = pins
            return True
        return super()._drop_slot(slot, why, writes, now)


class ForgetsRemovals(NodeCore):
    """Evicted blocks stay in the index for ever."""

    def _free(self, slot, event, writes):
        slot.published = False
        super()._free(slot, event, writes)


class ForgetsDeadWriters(NodeCore):
    """Slots of dead writers leak."""

    def _session_dead(self, event, effects, now):
        pass


class KeepsOneRemovalPerKey(NodeCore):
    """The bug of seed 4: a record of a publication that never arrived hides an older one."""

    def _free(self, slot, event, writes):
        removals = self.outbox._removals
        for key, record in [item for item in removals if item[0] == slot.key and slot.published]:
            del removals[key, record]
        super()._free(slot, event, writes)


def found(make_core: Callable[..., NodeCore] = NodeCore) -> bool:
    for seed in range(SEEDS):
        try:
            run(seed, make_core=make_core)
        except (AssertionError, InternalError):  # a ViolationError, or the node noticed
            return True
    return False


@pytest.mark.parametrize(
    "bug",
    [
        SealsBeforeTheCopy,
        PublishesBeforeTheSeal,
        ReservationsTimeOut,
        ALostConnectionCountsAsDeath,
        DropsPinnedBlocks,
        ForgetsRemovals,
        ForgetsDeadWriters,
        KeepsOneRemovalPerKey,
    ],
)
def test_the_simulator_finds_a_node_that(bug):
    assert found(bug)


def test_the_simulator_finds_a_reader_that_does_not_check_after_reading(monkeypatch):
    monkeypatch.setattr(reader.Place, "valid", lambda self: True)
    assert found()
