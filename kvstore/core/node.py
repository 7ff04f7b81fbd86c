"""Decides for a memory node: who gets which slot, what is sealed, what the index must learn.

`NodeCore.handle(event, now) -> Effects` is the whole interface towards the outside, `outbox`
the one towards the index. The daemon and the simulator drive the same code.

What there is: slots, each in a state of memory/slots.py, and sessions, each what one client holds:
reservations (slots in RESERVED) and pins. blocks.py has every way from one state to the next;
reservations.py and this file say who may ask for it. A reservation is of one session, and ends in
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

One class, because each event is a method of a few lines; a longer file for the table above.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

from kvstore.core.answers import PinAnswer, ResetAnswer
from kvstore.core.bounded import NO_TENANT
from kvstore.core.events import (
    NOBODY,
    Abort,
    CheckSlot,
    Clear,
    Commit,
    Corrupt,
    Drop,
    Effects,
    Event,
    Expire,
    Explain,
    Introduce,
    Keep,
    Listing,
    Named,
    Pin,
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
)
from kvstore.core.holdings import Session
from kvstore.core.memory.eviction import LRU, PolicyFactory
from kvstore.core.memory.slots import SlotState
from kvstore.core.namespaces import Namespaces
from kvstore.core.outgoing.departures import GoneWhy
from kvstore.core.report import explain, listing, stats
from kvstore.core.reservations import Reservations
from kvstore.core.resets import Resets
from kvstore.limits import (
    CHECKED_BYTES_PER_S_MAX,
    EXPIRED_AT_ONCE_BYTES,
    NAMESPACES_MAX,
    Limits,
)
from kvstore.record import RecordSigner
from kvstore.token_bucket import TokenBucket
from kvstore.types import Key, Retained

NAMES_MAX = 1 << 14
"""Values whose names a node remembers for `kvstore ls`: at most about 6 MB together."""


class NodeCore(Reservations):
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
        super().__init__(
            node_id=node_id,
            epoch=epoch,
            size_bytes=size_bytes,
            limits=limits or Limits(),
            policy=policy,
            signer=signer,
        )
        self._sessions: dict[int, Session] = {}
        self.namespaces = Namespaces(NAMESPACES_MAX)
        self.resets = Resets()
        self._checks = TokenBucket(CHECKED_BYTES_PER_S_MAX)
        self._handlers: dict[type, Callable[[Any, Effects, float], None]] = {
            Reserve: self._reserve,
            Commit: self._commit,
            Abort: self._abort,
            Pin: self._pin,
            Unpin: self._unpin,
            Retain: self._retain_keys,
            Touch: self._touch,
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
        self.now = now
        self.allocator.begins(now)
        if self.retained.next_end <= now:
            for slot in self.retained.over(now):
                self._end_retention(slot, effects.writes)
        if self.bounded.next_end <= now:
            self._expire(effects.writes, EXPIRED_AT_ONCE_BYTES)
        self._handlers[type(event)](event, effects, now)
        return effects

    def _nothing(self, event: Expire, effects: Effects, now: float) -> None:
        """Every event ends the lives that are over."""

    # --- dropping -------------------------------------------------------

    def _drop(self, event: Drop, effects: Effects, now: float) -> None:
        dropped = [
            slot is not None and self._drop_slot(slot, GoneWhy.DELETED, effects.writes, now)
            for slot in map(self.by_key.get, event.keys)
        ]
        effects.replies.append(Reply(event.session, event.request, dropped, True))

    def _clear(self, event: Clear, effects: Effects, now: float) -> None:
        keys = () if event.swept else list(self.by_key)
        dropped = self._swept(keys, (event.namespace_id,), effects, now)
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
        for key in keys:
            slot = self.by_key.get(key)
            if slot is not None and (not of or slot.namespace_id in of):
                dropped += self._drop_slot(slot, GoneWhy.CLEARED, effects.writes, now)
        return dropped

    def _reset(self, event: Reset, effects: Effects, now: float) -> None:
        """Once for each number, however often and by whomever it is told.

        A block that is reserved will not be sealed: what is saved after this was reserved after.
        """
        asked = event.session != NOBODY
        number = self.resets.next_number(event.number) if asked else event.number
        new = self.resets.add(number, event.namespace_ids)
        keys = list(self.by_key) if new and not event.swept else ()
        dropped = self._swept(keys, event.namespace_ids, effects, now)
        effects.replies.append(
            Reply(event.session, event.request, ResetAnswer(number, dropped), True)
        )

    def _suspect(self, event: Suspect, effects: Effects, now: float) -> None:
        """Nothing is dropped on a client's word: it may lie, or have read what was evicted."""
        for key in event.keys:
            slot = self.by_key.get(key)
            if slot is None or slot.state is not SlotState.SEALED or not slot.checksum:
                continue
            if self._checks.allows(slot.length, now):
                effects.checks.append(
                    CheckSlot(
                        slot.slot_id, slot.generation, slot.offset, slot.length, slot.checksum
                    )
                )

    def _corrupt(self, event: Corrupt, effects: Effects, now: float) -> None:
        slot = self.allocator.slot(event.slot_id)
        if (
            slot is None
            or slot.state is not SlotState.SEALED
            or slot.generation != event.generation
        ):
            return
        self.counts["corrupt"] += 1
        self._drop_slot(slot, GoneWhy.CORRUPT, effects.writes, now)

    # --- using ----------------------------------------------------------

    def _touch(self, event: Touch, effects: Effects, now: float) -> None:
        by_key = self.by_key
        self._begin_run(event.session, event.goes_on)
        self._used([by_key[key] for key in event.keys if key in by_key])

    def _pin(self, event: Pin, effects: Effects, now: float) -> None:
        session = self._sessions.setdefault(event.session, Session())
        answers: list[PinAnswer] = []
        for key in event.keys:
            slot = self.by_key.get(key)
            if slot is None or slot.state is not SlotState.SEALED:
                answers.append(None)
                continue
            if len(session.pins) >= self.limits.pins_per_client:
                answers.append(f"pins={len(session.pins)}: at most this many a client")
                continue
            self._pin_slot(slot, effects.writes)
            slot.used_at = now
            session.pins[slot.slot_id] = session.pins.get(slot.slot_id, 0) + 1
            answers.append(slot.record)
        effects.replies.append(Reply(event.session, event.request, answers, False))

    def _unpin(self, event: Unpin, effects: Effects, now: float) -> None:
        session = self._sessions.get(event.session, Session())
        self._begin_run(event.session, event.goes_on)
        for slot_id, generation in reversed(event.items):  # see `_used`
            slot = self.allocator.slot(slot_id)
            held = session.pins.get(slot_id, 0)
            if slot is None or held == 0 or slot.generation != generation:
                continue
            if held == 1:
                del session.pins[slot_id]
            else:
                session.pins[slot_id] = held - 1
            self.least = self._unpin_slot(slot, 1, effects.writes, self.least)
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
        slot = self.by_key.get(key)
        if slot is None or slot.state is not SlotState.SEALED:
            return Retained.ABSENT
        if slot.dies_at:
            return Retained.BOUNDED if until_s else Retained.YES
        if slot.kept_until and slot.tenant != tenant:
            return Retained.YES if until_s <= slot.kept_until else Retained.OTHERS
        if slot.kept_until:
            if not until_s:
                self._end_retention(slot, writes)
            elif until_s > slot.kept_until:
                self.retained.extend(slot, until_s)
                writes.append(Keep(slot.slot_id, until_s, tenant))
            return Retained.YES
        if not until_s:
            return Retained.YES
        refusal = self.retained.refusal(slot, tenant)
        if refusal is not None:
            self.counts["retentions_refused"] += 1
            return refusal
        self.counts["retentions"] += 1
        self.allocator.became_busy(slot)
        self._retain(slot, until_s, tenant, writes)
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
            if key in self.by_key:
                self.names[key] = name
                if len(self.names) > NAMES_MAX:
                    del self.names[next(iter(self.names))]

    def _introduce(self, event: Introduce, effects: Effects, now: float) -> None:
        self.namespaces.told(event.namespace)
