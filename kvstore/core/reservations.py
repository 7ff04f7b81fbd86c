"""Gives slots to the clients of a node, and takes them back: where a reservation begins and ends.

The table at the head of node.py says by what each ends; what must never happen is said there too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvstore.core.answers import NOT_HELD, PutAnswer, grant_of
from kvstore.core.blocks import Blocks
from kvstore.core.events import (
    Abort,
    Commit,
    Effects,
    Fill,
    Reply,
    Reserve,
    SessionDead,
    SessionResumed,
    Write,
    mark_of,
)
from kvstore.core.holdings import FORMER, Session
from kvstore.core.memory.granules import GRANULE_BYTES, PAGE
from kvstore.core.memory.slots import Slot, SlotState
from kvstore.core.outgoing.departures import GoneWhy
from kvstore.limits import MOVED_BYTES_MAX, VALUE_BYTES_MAX
from kvstore.types import EXISTS, IN_PROGRESS, NO_SPACE, STORED, Key, PutResult, rejected


class Reservations(Blocks):
    """Knows what each client holds, and carries out what begins and ends that."""

    _sessions: dict[int, Session]
    """By number of the client."""
    _run_of = FORMER
    """Whose run was walked last."""

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
        self._may_move = MOVED_BYTES_MAX // GRANULE_BYTES
        self._no_room_bytes = VALUE_BYTES_MAX + 1
        answers: list[PutAnswer] = []
        used: list[Slot] = []
        stored = self.counts["stored"]
        while (at := len(answers)) < len(event.keys):
            slot = self.by_key.get(event.keys[at])
            if slot is not None:
                answers.append(self._already(slot))
                used.append(slot)
                continue
            taken = self._take_for(session, event, at, effects.writes, now)
            if isinstance(taken, PutResult):
                self.counts["rejected"] += 1
                full = taken is NO_SPACE
                why = GoneWhy.REFUSED_SPACE if full else GoneWhy.REFUSED_SIZE
                self.gone.note(event.keys[at], why, now)
                answers.append(taken)
                continue
            used += self._give(session, taken, event, answers, effects.writes, now)
        if len(used) > 1:
            self._begin_run(event.session, goes_on=False)
            self._used(used)
        effects.replies.append(
            Reply(event.session, event.request, answers, self.counts["stored"] > stored)
        )

    def _give(
        self,
        session: Session,
        slots: Sequence[Slot],
        event: Reserve,
        answers: list[PutAnswer],
        writes: list[Write],
        now: float,
    ) -> list[Slot]:
        """Make them those of the next keys that have no answer, and answer; returns the ones whose
        values came along, which are SEALED."""
        reserved, marks = SlotState.RESERVED, []
        fills: list[Write] = []
        filled: list[Slot] = []
        at = slice(len(answers), len(answers) + len(slots))
        for slot, key, length, kind, meta_length, value, checksum in zip(
            slots,
            event.keys[at],
            event.sizes[at],
            event.kinds[at],
            event.meta_lengths[at],
            event.values[at],
            event.checksums[at],
            strict=True,
        ):
            slot.key = key
            slot.length = length
            slot.kind = kind
            slot.meta_length = meta_length
            slot.namespace_id = event.namespace_id
            slot.reserved_at = slot.used_at = now
            slot.void = False
            slot.published = False
            slot.former_epoch = 0
            self.by_key[key] = slot
            slot_id, generation = slot.slot_id, slot.generation
            marks.append((slot_id, reserved, generation, slot.start % PAGE, slot.size))
            if value is None:
                session.reserved[slot_id] = slot
                answers.append(grant_of((slot_id, generation, slot.offset)))
            else:
                fills.append(Fill(slot.offset, value))
                slot.checksum = checksum
                filled.append(slot)
                answers.append(STORED)
        writes += map(mark_of, marks)
        writes += fills
        self._seal(filled, writes)
        self.counts["stored"] += len(filled)
        return filled

    def _already(self, slot: Slot) -> PutResult:
        if slot.state is SlotState.SEALED:
            self.counts["exists"] += 1
            self.allocator.used(slot)
            slot.used_at = self.now
            return EXISTS
        self.counts["in_progress"] += 1
        return IN_PROGRESS

    def _take_for(
        self, session: Session, event: Reserve, at: int, writes: list[Write], now: float
    ) -> list[Slot] | PutResult:
        """Slots in state RESERVED for the key at that place and those behind it, as many as there
        is room for at once; or why there is none."""
        length, most = event.sizes[at], self.limits.reservations_per_client
        if not 0 < length <= self.allocator.value_bytes_max:
            return rejected(f"size_bytes={length}: must be 1 to {self.allocator.value_bytes_max}")
        left = most - len(session.reserved)
        if left <= 0:
            return rejected(f"open reservations={len(session.reserved)}: at most {most} a client")
        count = min(left, self._alike(event, at))
        return self._take(length, count, writes, now) or NO_SPACE

    def _alike(self, event: Reserve, at: int) -> int:
        """How many keys from that place on are new, each another, for values of one size."""
        size, keys, by_key = event.sizes[at], set[Key](), self.by_key
        for i in range(at, len(event.keys)):
            key = event.keys[i]
            if event.sizes[i] != size or key in keys or key in by_key:
                break
            keys.add(key)
        return len(keys)

    def _commit(self, event: Commit, effects: Effects, now: float) -> None:
        session = self._sessions.get(event.session)
        answers: list[PutResult] = []
        sealed: list[Slot] = []
        self._begin_run(event.session, event.goes_on)
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
            slot.checksum = checksum
            sealed.append(slot)
            answers.append(STORED)
        self._seal(sealed, effects.writes, run=True)
        self.counts["stored"] += len(sealed)
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

    def _begin_run(self, session: int, goes_on: bool) -> None:
        """A message about a run of blocks begins, or goes on with what is before another part. When
        others' runs came between the two, the part counts as a run of its own."""
        if not goes_on or session != self._run_of:
            self._run_of, self.least = session, 1

    def _used(self, run: Sequence[Slot]) -> None:
        """Blocks of one message were used; they come in the order of their prefix.

        The last of them counts as used first: a prefix without its end is still a
        prefix, so the end of a run must be evicted before its head.
        """
        least = self.least
        for slot in reversed(run):
            if slot.state is SlotState.SEALED:
                least = self.allocator.used(slot, least)
                slot.used_at = self.now
        self.least = least
