"""Decides for a memory node: who gets which slot, what is sealed, what the index must learn.

`NodeCore.handle(event, now) -> Effects` is the whole interface towards the outside, `outbox`
the one towards the index. The daemon and the simulator drive the same code.

What there is: slots, each in a state of memory/slots.py, and sessions, each what one client holds:
reservations (slots in RESERVED) and pins. blocks.py has every way from one state to the next;
this file says who may ask for it. A reservation is of one session, and ends in
one of these:

    event            from                                  the slot becomes
    Commit           its session, with its generation      SEALED; FREE if it was cleared meanwhile
    Abort            its session, with its generation      FREE
    SessionResumed   its session, which names what it      FREE, if it is not named
                     holds when it connects again
    SessionDead      the daemon, once the client's lease   FREE
                     is free (rule 5)

A value that travels in the Reserve itself is SEALED at once. Drop, Clear and Reset free what is
SEALED (DOOMED while it is pinned, until the last unpin), and only mark what is RESERVED: its
writer may still write, so the slot stays its own until one of the above. A pin is one of its
session's too, and ends by Unpin, SessionResumed or SessionDead.

Changed by the thread of the daemon's event loop alone, one event at a time; an event from
another thread goes through node/control/local_session.py.

Must never happen:

- a key with two slots that are RESERVED or SEALED (`by_key` is the one list of them);
- a slot that goes to somebody else while its writer may write to it: no time-out ends a
  reservation, nor does a lost connection;
- a pinned slot that is evicted, moved or given out;
- a generation that comes twice, over restarts too;
- a publication in `outbox` of what is not SEALED (rule 3), or effects in another order than this
  file put them in: headers are written before anybody is answered.

In one file, because it is one class: each event is a method, and a reservation ends in one of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from kvstore.core.answers import NOT_HELD, PinAnswer, PutAnswer, ResetAnswer, grant_of
from kvstore.core.blocks import Blocks
from kvstore.core.bounded import NO_TENANT
from kvstore.core.disk.tier import DiskTier
from kvstore.core.events import (
    DISK_REQUESTS,
    ELSEWHERE,
    NOBODY,
    Abort,
    CheckSlot,
    Clear,
    Commit,
    Corrupt,
    DiskRequest,
    Drop,
    Effects,
    EngineCounts,
    Event,
    Expire,
    Explain,
    Fill,
    Introduce,
    Keep,
    Listing,
    Named,
    Pin,
    Promoted,
    Reply,
    Reserve,
    Reset,
    Retain,
    SessionDead,
    SessionResumed,
    Stat,
    Suspect,
    Sweep,
    Touch,
    Unpin,
    Write,
    mark_of,
)
from kvstore.core.holdings import FORMER, Session
from kvstore.core.memory.eviction import LRU, PolicyFactory
from kvstore.core.memory.granules import PAGE, granules_of
from kvstore.core.memory.slots import Slot, SlotState
from kvstore.core.namespaces import Namespaces
from kvstore.core.outgoing.departures import GoneWhy
from kvstore.core.report import explain, listing, stats
from kvstore.core.resets import Resets
from kvstore.core.reuse import Reuse
from kvstore.limits import CHECKED_BYTES_PER_S_MAX, NAMESPACES_MAX, Limits
from kvstore.record import RecordSigner
from kvstore.token_bucket import TokenBucket
from kvstore.types import (
    EXISTS,
    IN_PROGRESS,
    NO_SPACE,
    STORED,
    Key,
    PutResult,
    Retained,
    rejected,
)

RESERVATIONS_MAX = 8192
"""Slots that one client may have reserved and not committed."""
NAMES_MAX = 1 << 14
"""Values whose names a node remembers for `kvstore ls`: about 6 MB together at most."""


class NodeCore:
    """State of one node: its blocks, and which client holds what."""

    def __init__(
        self,
        *,
        node_id: int,
        epoch: int,
        size_bytes: int,
        limits: Limits | None = None,
        policy: PolicyFactory = LRU,
        signer: RecordSigner | None = None,
    ) -> None:
        self.node_id, self.epoch = node_id, epoch
        self.limits = limits or Limits()
        self.blocks = Blocks(
            node_id=node_id,
            epoch=epoch,
            size_bytes=size_bytes,
            limits=self.limits,
            policy=policy,
            signer=signer,
        )
        self._sessions: dict[int, Session] = {}
        """Sessions by the number of the client."""
        self._run_of = FORMER
        """The session whose run was walked last."""
        self.namespaces = Namespaces(NAMESPACES_MAX)
        self.resets = Resets()
        self.reuse = Reuse(size_bytes, self.blocks.by_key)
        self.disk: DiskTier | None = None
        """What it keeps on disks; None where it has none."""
        self._checks = TokenBucket(CHECKED_BYTES_PER_S_MAX)
        self._handlers: dict[type, Callable[[Any, Effects, float], None]] = {
            Reserve: self._reserve,
            Commit: self._commit,
            Abort: self._abort,
            Pin: self._pin,
            Unpin: self._unpin,
            Retain: self._retain_keys,
            Touch: self._touch,
            EngineCounts: self._report,
            Drop: self._drop,
            Clear: self._clear,
            Sweep: self._sweep,
            Reset: self._reset,
            Stat: self._stat,
            Listing: self._listing,
            Explain: self._explain,
            Introduce: self._introduce,
            Named: self._named,
            Suspect: self._suspect,
            Corrupt: self._corrupt,
            Expire: self._nothing,
            SessionResumed: self._session_resumed,
            SessionDead: self._session_dead,
        }

    def handle(self, event: Event, now: float) -> Effects:
        """Decide. `now` is in seconds of a clock that never runs backwards."""
        effects = Effects([], [], [])
        self.blocks.begin_event(now, effects.writes)
        self._handlers[type(event)](event, effects, now)
        if self.disk is not None and self.disk.confirms():
            effects.replies[:] = [reply._replace(after_log=True) for reply in effects.replies]
        return effects

    def use_disks(self, disk: DiskTier) -> None:
        """Keep copies on disks from here on."""
        self.disk = disk
        disk.attach(self.blocks, lambda: self.resets.newest)
        self._handlers |= dict.fromkeys(DISK_REQUESTS, self._ask_disk)
        self._handlers[Promoted] = self._promoted

    def _ask_disk(self, event: DiskRequest, effects: Effects, now: float) -> None:
        assert self.disk is not None
        body = self.disk.handle(event, now)
        effects.replies.append(Reply(event.session, event.request, body, False))

    def _promoted(self, event: Promoted, effects: Effects, now: float) -> None:
        assert self.disk is not None
        if event.clears != self.disk.clears:
            unwritten = [(slot_id, generation) for slot_id, generation, _ in event.items]
            self._abort(Abort(event.session, event.request, unwritten), effects, now)
            return
        commit = Commit(event.session, event.request, event.items)
        self.disk.promoted(self._seal_each(commit, effects, now))

    def _nothing(self, event: Expire, effects: Effects, now: float) -> None:
        """Do nothing more: each event ends the lives that are over."""

    # --- reserving ------------------------------------------------------

    def holds(self, session: int) -> bool:
        """Return whether this session has reservations or pins that must outlive its connection."""
        state = self._sessions.get(session)
        return state is not None and bool(state.reserved or state.pins)

    def held_slots(self, session: int) -> list[int]:
        """Return the slots that this session has reserved or pinned, in the order in which they are
        released when it ends."""
        state = self._sessions.get(session)
        return [] if state is None else [*state.reserved, *reversed(state.pins)]

    def former(self) -> Session:
        """Return what clients of former starts of this node may hold; `SessionDead(FORMER)` ends
        it."""
        return self._sessions.setdefault(FORMER, Session())

    def sessions(self) -> Iterable[Session]:
        """Return the clients that have reserved or pinned something."""
        return self._sessions.values()

    def _reserve(self, event: Reserve, effects: Effects, now: float) -> None:
        session = self._sessions.setdefault(event.session, Session())
        self.blocks.begin_request()
        answers: list[PutAnswer] = []
        used: list[Slot] = []
        stored = self.blocks.counts["stored"]
        while (at := len(answers)) < len(event.keys):
            slot = self.blocks.by_key.get(event.keys[at])
            if slot is not None:
                answers.append(self._already(slot))
                used.append(slot)
                continue
            taken = self._take_for(session, event, at, effects.writes, now)
            if isinstance(taken, PutResult):
                self.blocks.counts["rejected"] += 1
                full = taken is NO_SPACE
                why = GoneWhy.REFUSED_SPACE if full else GoneWhy.REFUSED_SIZE
                self.blocks.departures.note(event.keys[at], why, now)
                answers.append(taken)
                continue
            used += self._give(session, taken, event, answers, effects.writes, now)
        if event.sizes:
            self.reuse.used(event.keys, now, granules_of(event.sizes[0]))
        if len(used) > 1:
            self._begin_run(event.session, goes_on=False)
            self._used(used)
        effects.replies.append(
            Reply(event.session, event.request, answers, self.blocks.counts["stored"] > stored)
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
            slot.read = False
            slot.void = False
            slot.published = False
            slot.former_epoch = 0
            self.blocks.by_key[key] = slot
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
        self.blocks.seal(filled, writes)
        self._stored(filled)
        return filled

    def _stored(self, slots: Sequence[Slot]) -> None:
        self.blocks.counts["stored"] += len(slots)
        self.blocks.watched.stored(slots, self.blocks.departures)
        if self.disk is not None:
            self.disk.stored(slots)

    def _already(self, slot: Slot) -> PutResult:
        if slot.state is SlotState.SEALED:
            self.blocks.counts["exists"] += 1
            self.blocks.allocator.used(slot)
            slot.used_at = self.blocks.now
            return EXISTS
        self.blocks.counts["in_progress"] += 1
        return IN_PROGRESS

    def _take_for(
        self, session: Session, event: Reserve, at: int, writes: list[Write], now: float
    ) -> list[Slot] | PutResult:
        """Return RESERVED slots for the key at that place and those behind it, as many as find room
        at once; or the reason why there is none."""
        length, most = event.sizes[at], RESERVATIONS_MAX
        if not 0 < length <= self.blocks.allocator.value_bytes_max:
            return rejected(
                f"size_bytes={length}: must be 1 to {self.blocks.allocator.value_bytes_max}"
            )
        left = most - len(session.reserved)
        if left <= 0:
            return rejected(f"open reservations={len(session.reserved)}: at most {most} a client")
        count = min(left, self._alike(event, at))
        return self.blocks.take(length, count, writes, now) or NO_SPACE

    def _alike(self, event: Reserve, at: int) -> int:
        """Return how many keys from that place on are new, each another, for values of one size."""
        size, keys, by_key = event.sizes[at], set[Key](), self.blocks.by_key
        for i in range(at, len(event.keys)):
            key = event.keys[i]
            if event.sizes[i] != size or key in keys or key in by_key:
                break
            keys.add(key)
        return len(keys)

    def _commit(self, event: Commit, effects: Effects, now: float) -> None:
        self._stored(self._seal_each(event, effects, now))

    def _seal_each(self, event: Commit, effects: Effects, now: float) -> list[Slot]:
        """Seal what is the session's, and answer; returns what was sealed."""
        session = self._sessions.get(event.session)
        answers: list[PutResult] = []
        sealed: list[Slot] = []
        self._begin_run(event.session, event.goes_on)
        # Backwards: see `_used`.
        for slot_id, generation, checksum in reversed(event.items):
            slot = self._owned(session, slot_id, generation)
            if slot is None or session is None:
                answers.append(NOT_HELD)
                self.blocks.counts["rejected"] += 1
                continue
            del session.reserved[slot_id]
            if slot.void:
                self.blocks.release(slot, GoneWhy.CLEARED, effects.writes, now)
                self.blocks.counts["rejected"] += 1
                answers.append(rejected("cleared while it was being written"))
                continue
            slot.checksum = checksum
            sealed.append(slot)
            answers.append(STORED)
        self.blocks.seal(sealed, effects.writes, run=True)
        answers.reverse()
        effects.replies.append(Reply(event.session, event.request, answers, True))
        return sealed

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
                self.blocks.release(slot, GoneWhy.ABORTED, effects.writes, now)
        effects.replies.append(Reply(event.session, event.request, None, False))

    def _session_resumed(self, event: SessionResumed, effects: Effects, now: float) -> None:
        session = self._sessions.get(event.session)
        if session is None:
            return
        for slot_id in self.held_slots(event.session) if event.slots is None else event.slots:
            slot = session.reserved.get(slot_id)
            if slot is not None and event.reserved.get(slot_id) != slot.generation:
                del session.reserved[slot_id]
                self.blocks.release(slot, GoneWhy.ABORTED, effects.writes, now)
            self._unpin_to(session, slot_id, event.pinned.get(slot_id, 0), effects.writes)

    def _unpin_to(self, session: Session, slot_id: int, times: int, writes: list[Write]) -> None:
        """Reduce a session's pins of a slot to at most `times`."""
        count = session.pins.get(slot_id, 0)
        kept = min(times, count)
        if kept == count:
            return
        session.pins[slot_id] = kept
        if kept == 0:
            del session.pins[slot_id]
        self.blocks.unpin(self.blocks.pinned(slot_id), count - kept, writes)

    def _session_dead(self, event: SessionDead, effects: Effects, now: float) -> None:
        session = self._sessions.get(event.session)
        if session is None:
            return
        for slot_id in self.held_slots(event.session) if event.slots is None else event.slots:
            slot = session.reserved.pop(slot_id, None)
            if slot is not None:
                self.blocks.counts["writers_died"] += 1
                self.blocks.release(slot, GoneWhy.WRITER_DIED, effects.writes, now)
            self._unpin_to(session, slot_id, 0, effects.writes)
        if event.slots is None:
            del self._sessions[event.session]

    def _begin_run(self, session: int, goes_on: bool) -> None:
        """Start a new run, unless this message continues the previous part of the same session's
        run."""
        if not goes_on or session != self._run_of:
            self._run_of, self.blocks.min_uses = session, 1

    def _used(self, run: Sequence[Slot]) -> None:
        """Note that the blocks of one message were used; they come in the order of their prefix.

        The last of them counts as used first: a prefix without its end is still a prefix, so the
        end of a run must be evicted before its head.
        """
        min_uses = self.blocks.min_uses
        for slot in reversed(run):
            if slot.state is SlotState.SEALED:
                min_uses = self.blocks.allocator.used(slot, min_uses)
                slot.used_at = self.blocks.now
        self.blocks.min_uses = min_uses

    # --- dropping -------------------------------------------------------

    def _drop(self, event: Drop, effects: Effects, now: float) -> None:
        dropped = [
            slot is not None and self.blocks.drop(slot, GoneWhy.DELETED, effects.writes, now)
            for slot in map(self.blocks.by_key.get, event.keys)
        ]
        if self.disk is not None:
            dropped = self.disk.dropped(event.keys, dropped)
        effects.replies.append(Reply(event.session, event.request, dropped, True))

    def _clear(self, event: Clear, effects: Effects, now: float) -> None:
        keys = () if event.swept else list(self.blocks.by_key)
        dropped = self._swept(keys, (event.namespace_id,), effects, now)
        if self.disk is not None:
            self.disk.cleared((event.namespace_id,), 0)
        effects.replies.append(Reply(event.session, event.request, dropped, True))

    def _sweep(self, event: Sweep, effects: Effects, now: float) -> None:
        known = event.number and self.resets.knows(event.number)
        keys = () if known else event.keys
        dropped = self._swept(keys, event.namespace_ids, effects, now)
        effects.replies.append(Reply(event.session, event.request, dropped, True))

    def _swept(
        self, keys: Sequence[Key], namespace_ids: Collection[int], effects: Effects, now: float
    ) -> int:
        """Drop those of `keys` that are of these namespaces, of all when there are none; a block
        that is reserved will not be sealed."""
        of, dropped = frozenset(namespace_ids), 0
        if self.disk is not None:
            self.disk.clearing()
        for key in keys:
            slot = self.blocks.by_key.get(key)
            if slot is not None and (not of or slot.namespace_id in of):
                dropped += self.blocks.drop(slot, GoneWhy.CLEARED, effects.writes, now)
        return dropped

    def _reset(self, event: Reset, effects: Effects, now: float) -> None:
        """Carry out a reset once for each number, however often and by whomever it is told.

        A reserved block will not be sealed: what is saved after the reset was reserved after it.
        """
        asked = event.session != NOBODY
        number = self.resets.next_number(event.number) if asked else event.number
        new = self.resets.add(number, event.namespace_ids)
        keys = list(self.blocks.by_key) if new and not event.swept else ()
        dropped = self._swept(keys, event.namespace_ids, effects, now)
        if new and self.disk is not None:
            self.disk.cleared(event.namespace_ids, number)
        effects.replies.append(
            Reply(event.session, event.request, ResetAnswer(number, dropped), True)
        )

    def _suspect(self, event: Suspect, effects: Effects, now: float) -> None:
        """Have the blocks checked. A client's report drops nothing: it may lie, or have read an
        evicted block."""
        for key in event.keys:
            slot = self.blocks.by_key.get(key)
            if slot is None and self.disk is not None:
                self.disk.suspected(key)
            if slot is None or slot.state is not SlotState.SEALED or not slot.checksum:
                continue
            if self._checks.allows(slot.length, now):
                effects.checks.append(
                    CheckSlot(
                        slot.slot_id, slot.generation, slot.offset, slot.length, slot.checksum
                    )
                )

    def _corrupt(self, event: Corrupt, effects: Effects, now: float) -> None:
        slot = self.blocks.allocator.slot(event.slot_id)
        if (
            slot is None
            or slot.state is not SlotState.SEALED
            or slot.generation != event.generation
        ):
            return
        self.blocks.counts["corrupt"] += 1
        self.blocks.drop(slot, GoneWhy.CORRUPT, effects.writes, now)
        self.blocks.go_on_from_disk([slot])

    # --- using ----------------------------------------------------------

    def _touch(self, event: Touch, effects: Effects, now: float) -> None:
        by_key = self.blocks.by_key
        if event.left:
            self.blocks.allocator.left(by_key[key] for key in event.keys if key in by_key)
            return
        self._begin_run(event.session, event.goes_on)
        self.reuse.touched(event.keys, now, goes_on=event.goes_on)
        used = [by_key[key] for key in event.keys if key in by_key]
        if not event.saved:
            self.blocks.watched.read(used, now)
        self._used(used)
        if self.disk is not None and not event.saved:
            self.disk.touched(event.keys)
        if event.session == ELSEWHERE:  # nobody else says so of what others read
            self.blocks.watched.bytes["served_bytes"] += sum(slot.length for slot in used)

    def _report(self, event: EngineCounts, effects: Effects, now: float) -> None:
        self.blocks.watched.report(event.counts)

    def _pin(self, event: Pin, effects: Effects, now: float) -> None:
        session = self._sessions.setdefault(event.session, Session())
        answers: list[PinAnswer] = []
        for key in event.keys:
            slot = self.blocks.by_key.get(key)
            if slot is None or slot.state is not SlotState.SEALED:
                answers.append(None)
                continue
            if len(session.pins) >= self.limits.pins_per_client:
                answers.append(f"pins={len(session.pins)}: at most this many a client")
                continue
            self.blocks.pin(slot, effects.writes)
            slot.used_at = now
            session.pins[slot.slot_id] = session.pins.get(slot.slot_id, 0) + 1
            answers.append(slot.record)
        effects.replies.append(Reply(event.session, event.request, answers, False))

    def _unpin(self, event: Unpin, effects: Effects, now: float) -> None:
        session = self._sessions.get(event.session, Session())
        self._begin_run(event.session, event.goes_on)
        for slot_id, generation in reversed(event.items):  # see `_used`
            slot = self.blocks.allocator.slot(slot_id)
            held = session.pins.get(slot_id, 0)
            if slot is None or held == 0 or slot.generation != generation:
                continue
            if held == 1:
                del session.pins[slot_id]
            else:
                session.pins[slot_id] = held - 1
            self.blocks.min_uses = self.blocks.unpin(slot, 1, effects.writes, self.blocks.min_uses)
        effects.replies.append(Reply(event.session, event.request, None, False))

    def _retain_keys(self, event: Retain, effects: Effects, now: float) -> None:
        """Retain blocks in the order of the keys: of a prefix its head is retained first."""
        until_s = math.ceil(now + event.ttl_s)
        tenant = min(event.tenant, NO_TENANT - 1)
        answers = [
            self._retained(key, until_s if event.ttl_s else 0, tenant, effects.writes)
            for key in event.keys
        ]
        effects.replies.append(Reply(event.session, event.request, answers, False))

    def _retained(self, key: Key, until_s: int, tenant: int, writes: list[Write]) -> Retained:
        slot = self.blocks.by_key.get(key)
        if slot is None or slot.state is not SlotState.SEALED:
            return Retained.ABSENT
        if slot.dies_at:
            return Retained.BOUNDED if until_s else Retained.YES
        if slot.kept_until and slot.tenant != tenant:
            return Retained.YES if until_s <= slot.kept_until else Retained.OTHERS
        if slot.kept_until:
            if not until_s:
                self.blocks.end_retention(slot, writes)
            elif until_s > slot.kept_until:
                self.blocks.retained.extend(slot, until_s)
                writes.append(Keep(slot.slot_id, until_s, tenant))
            return Retained.YES
        if not until_s:
            return Retained.YES
        refusal = self.blocks.retained.refusal(slot, tenant)
        if refusal is not None:
            self.blocks.counts["retentions_refused"] += 1
            return refusal
        self.blocks.counts["retentions"] += 1
        self.blocks.allocator.became_busy(slot)
        self.blocks.retain(slot, until_s, tenant, writes)
        return Retained.YES

    # --- telling --------------------------------------------------------

    def _stat(self, event: Stat, effects: Effects, now: float) -> None:
        effects.replies.append(Reply(event.session, event.request, stats(self, now), False))

    def _listing(self, event: Listing, effects: Effects, now: float) -> None:
        rows = listing(self, event.after, event.at_most, now)
        effects.replies.append(Reply(event.session, event.request, rows, False))

    def _explain(self, event: Explain, effects: Effects, now: float) -> None:
        answer = explain(self, event.keys, now)
        effects.replies.append(Reply(event.session, event.request, answer, False))

    def _named(self, event: Named, effects: Effects, now: float) -> None:
        for key, name in zip(event.keys, event.names, strict=True):
            if key in self.blocks.by_key:
                self.blocks.names[key] = name
                if len(self.blocks.names) > NAMES_MAX:
                    del self.blocks.names[next(iter(self.blocks.names))]

    def _introduce(self, event: Introduce, effects: Effects, now: float) -> None:
        self.namespaces.told(event.namespace)
