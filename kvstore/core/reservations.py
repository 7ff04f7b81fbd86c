"""Gives slots to the clients of a node, and takes them back: where a reservation begins and ends.

The table at the head of node.py says by what each ends; what must never happen is said there too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvstore.core.answers import NOT_HELD, Grant, PutAnswer
from kvstore.core.blocks import Blocks
from kvstore.core.events import (
    Abort,
    Commit,
    Effects,
    Fill,
    Mark,
    Reply,
    Reserve,
    SessionDead,
    SessionResumed,
    Write,
)
from kvstore.core.holdings import FORMER, Session
from kvstore.core.memory.granules import GRANULE_BYTES
from kvstore.core.memory.slots import Slot, SlotState
from kvstore.core.outgoing.departures import GoneWhy
from kvstore.limits import MOVED_BYTES_MAX
from kvstore.types import EXISTS, IN_PROGRESS, NO_SPACE, STORED, PutResult, rejected


class Reservations(Blocks):
    """Knows what each client holds, and carries out what begins and ends that."""

    _sessions: dict[int, Session]
    """By number of the client."""

    def holds(self, session: int) -> bool:
        """Whether this session has reservations or pins that must outlive its connection."""
        state = self._sessions.get(session)
        return state is not None and bool(state.reserved or state.pins)

    def held_slots(self, session: int) -> list[int]:
        """The slots that this session has reserved or pinned, in the order in which they are let
        go of when it ends."""
        state = self._sessions.get(session)
        return [] if state is None else [*state.reserved, *reversed(state.pins)]

    def former(self) -> Session:
        """What clients of former starts of this node may hold; `SessionDead(FORMER)` ends it."""
        return self._sessions.setdefault(FORMER, Session())

    def sessions(self) -> Iterable[Session]:
        """Clients that have reserved or pinned something."""
        return self._sessions.values()

    def _reserve(self, event: Reserve, effects: Effects, now: float) -> None:
        session = self._sessions.setdefault(event.session, Session())
        self._may_move, self._moves_help = MOVED_BYTES_MAX // GRANULE_BYTES, True
        answers: list[PutAnswer] = []
        used: list[Slot] = []
        sealed_any = False
        for i, key in enumerate(event.keys):
            slot = self.by_key.get(key)
            if slot is not None:
                answers.append(self._already(slot))
                used.append(slot)
                continue
            taken = self._take_for(session, event.sizes[i], effects.writes, now, event.namespace_id)
            if isinstance(taken, PutResult):
                self.counts["rejected"] += 1
                full = taken is NO_SPACE
                why = GoneWhy.REFUSED_SPACE if full else GoneWhy.REFUSED_SIZE
                self.gone.note(key, why, now)
                answers.append(taken)
                continue
            slot = taken
            slot.key = key
            slot.length = event.sizes[i]
            slot.kind = event.kinds[i]
            slot.meta_length = event.meta_lengths[i]
            slot.namespace_id = event.namespace_id
            slot.reserved_at = slot.used_at = now
            slot.void = False
            slot.published = False
            slot.former_epoch = 0
            self.by_key[key] = slot
            effects.writes.append(
                Mark(slot.slot_id, SlotState.RESERVED, slot.generation, slot.granule, slot.size)
            )
            value = event.values[i]
            if value is None:
                session.reserved[slot.slot_id] = slot
                answers.append(Grant(slot.slot_id, slot.generation, slot.offset))
            else:
                effects.writes.append(Fill(slot.offset, value))
                self._seal(slot, event.checksums[i], effects.writes)
                self.counts["stored"] += 1
                used.append(slot)
                sealed_any = True
                answers.append(STORED)
        if len(used) > 1:
            self._used(used)
        effects.replies.append(Reply(event.session, event.request, answers, sealed_any))

    def _already(self, slot: Slot) -> PutResult:
        if slot.state is SlotState.SEALED:
            self.counts["exists"] += 1
            self.allocator.used(slot)
            slot.used_at = self.now
            return EXISTS
        self.counts["in_progress"] += 1
        return IN_PROGRESS

    def _take_for(
        self, session: Session, length: int, writes: list[Write], now: float, namespace_id: int
    ) -> Slot | PutResult:
        """A slot in state RESERVED, or why there is none."""
        if not 0 < length <= self.allocator.value_bytes_max:
            return rejected(f"size_bytes={length}: must be 1 to {self.allocator.value_bytes_max}")
        if len(session.reserved) >= self.limits.reservations_per_client:
            return rejected(
                f"open reservations={len(session.reserved)}: "
                f"at most {self.limits.reservations_per_client} a client"
            )
        return self._take(length, writes, now) or NO_SPACE

    def _commit(self, event: Commit, effects: Effects, now: float) -> None:
        session = self._sessions.get(event.session)
        answers: list[PutResult] = []
        # Backwards: see `_used`.
        for slot_id, generation, checksum in reversed(event.items):
            slot = self._owned(session, slot_id, generation)
            if slot is None or session is None:
                answers.append(NOT_HELD)
                self.counts["rejected"] += 1
                continue
            del session.reserved[slot_id]
            if slot.void:
                self._release(slot, GoneWhy.CLEARED, effects.writes, now)
                self.counts["rejected"] += 1
                answers.append(rejected("cleared while it was being written"))
                continue
            self._seal(slot, checksum, effects.writes)
            answers.append(STORED)
        self.counts["stored"] += answers.count(STORED)
        answers.reverse()
        effects.replies.append(Reply(event.session, event.request, answers, True))

    @staticmethod
    def _owned(session: Session | None, slot_id: int, generation: int) -> Slot | None:
        if session is None:
            return None
        slot = session.reserved.get(slot_id)
        return slot if slot is not None and slot.generation == generation else None

    def _abort(self, event: Abort, effects: Effects, now: float) -> None:
        session = self._sessions.get(event.session)
        for slot_id, generation in event.items:
            slot = self._owned(session, slot_id, generation)
            if slot is not None and session is not None:
                del session.reserved[slot_id]
                self._release(slot, GoneWhy.ABORTED, effects.writes, now)
        effects.replies.append(Reply(event.session, event.request, None, False))

    def _session_resumed(self, event: SessionResumed, effects: Effects, now: float) -> None:
        session = self._sessions.get(event.session)
        if session is None:
            return
        for slot_id in self.held_slots(event.session) if event.slots is None else event.slots:
            slot = session.reserved.get(slot_id)
            if slot is not None and event.reserved.get(slot_id) != slot.generation:
                del session.reserved[slot_id]
                self._release(slot, GoneWhy.ABORTED, effects.writes, now)
            self._unpin_to(session, slot_id, event.pinned.get(slot_id, 0), effects.writes)

    def _unpin_to(self, session: Session, slot_id: int, times: int, writes: list[Write]) -> None:
        """Have a session's pins of a slot be no more than so many."""
        count = session.pins.get(slot_id, 0)
        kept = min(times, count)
        if kept == count:
            return
        session.pins[slot_id] = kept
        if kept == 0:
            del session.pins[slot_id]
        self._unpin_slot(self._pinned_slot(slot_id), count - kept, writes)

    def _session_dead(self, event: SessionDead, effects: Effects, now: float) -> None:
        session = self._sessions.get(event.session)
        if session is None:
            return
        for slot_id in self.held_slots(event.session) if event.slots is None else event.slots:
            slot = session.reserved.pop(slot_id, None)
            if slot is not None:
                self.counts["writers_died"] += 1
                self._release(slot, GoneWhy.WRITER_DIED, effects.writes, now)
            self._unpin_to(session, slot_id, 0, effects.writes)
        if event.slots is None:
            del self._sessions[event.session]

    def _used(self, run: Sequence[Slot]) -> None:
        """Blocks of one message were used; they come in the order of their prefix.

        The last of them counts as used first: a prefix without its end is still a
        prefix, so the end of a run must be evicted before its head.
        """
        for slot in reversed(run):
            if slot.state is SlotState.SEALED:
                self.allocator.used(slot)
                slot.used_at = self.now
