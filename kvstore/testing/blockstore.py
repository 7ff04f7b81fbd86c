"""Keeps a `BlockStore` in this process's memory: the model that connectors are tested with.

It keeps the promises of the contracts (tests/contract/blockstore.py and saver.py run against
it and against `BlockSession`) and lets a test be the rest of the world: evict a
block, fill the node, hang, take the index away, change a block while it is read.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvstore.client.arguments import tenant_id, whole
from kvstore.client.base import (
    AnyReservation,
    BlockRef,
    HostView,
    Later,
    LookupResult,
    MissQuery,
    PoolMapping,
    PrefixMatch,
    Reservation,
    ReserveAnswer,
    ResetResult,
)
from kvstore.client.explanation import Missing, MissReason
from kvstore.client.nodes.saving.savers import answered
from kvstore.errors import DeadlineError, NodeUnavailableError
from kvstore.keys import Namespace
from kvstore.limits import RESET_TIMEOUT_S, RETAINED_S_MAX
from kvstore.record import pack_record, unpack_record
from kvstore.types import (
    EXISTS,
    IN_PROGRESS,
    STORED,
    Key,
    Location,
    PutResult,
    Retained,
    Tier,
    rejected,
)

NODE_ID = 1
EPOCH = 1


@dataclass(slots=True)
class _Slot:
    key: Key
    namespace_id: int
    payload: bytearray
    generation: int
    sealed: bool = False
    pins: int = 0


class _View:
    def __init__(self, store: MemoryBlockStore, slot_id: int, slot: _Slot) -> None:
        self._store = store
        self._slot_id = slot_id
        self._generation = slot.generation
        self._buffer = memoryview(slot.payload).toreadonly()

    @property
    def buffer(self) -> memoryview:
        return self._buffer

    def valid(self) -> bool:
        self._store.on_check()
        slot = self._store._slots.get(self._slot_id)
        return slot is not None and slot.sealed and slot.generation == self._generation


class MemoryBlockStore:
    """Keeps blocks in this process. Thread-safe. Slots are reused, lowest first, with a new
    generation each time."""

    def __init__(self, capacity_blocks: int = 1 << 16) -> None:
        self.capacity_blocks = capacity_blocks
        self._lock = threading.RLock()
        self._slots: dict[int, _Slot] = {}
        self._index: dict[Key, bytes] = {}
        self._generations: dict[int, int] = {}
        self.touched: list[Key] = []
        self.left: list[Key] = []
        self.read: set[Key] = set()
        self.reported: list[dict[str, int]] = []
        self.reserve_calls = 0
        self.match_calls = 0
        """Questions to the index, of either kind."""
        self.here: set[Key] = set()
        """Keys of blocks that are found without the index."""
        self.elsewhere: dict[Key, Tier] = {}
        """Where blocks lie that are not in this host's memory."""
        self.node_down = False
        self.index_down = False
        self.index_trouble = MissReason.INDEX_ERROR
        """What a match says of an index that is down."""
        self._gone: dict[Key, MissReason] = {}
        self.closed = False
        self.on_match: Callable[[], None] = _nothing
        """Runs inside `match`, before it answers: a test may wait in it."""
        self.on_view: Callable[[], None] = _nothing
        self.on_check: Callable[[], None] = _nothing
        """Runs between a reader's copy and its check."""
        self.on_reserve: Callable[[], None] = _nothing
        self.on_commit: Callable[[], None] = _nothing
        self.on_why: Callable[[], None] = _nothing
        self.on_pin: Callable[[], None] = _nothing
        self.pins_max = 1 << 16
        self.retained: dict[Key, tuple[int, str]] = {}
        """For how long, and for which tenant."""

    # --- the contract -----------------------------------------------------

    def slots(self) -> list[_Slot]:
        """Return what is stored, in the order of slots: a test may damage it."""
        with self._lock:
            return [self._slots[number] for number in sorted(self._slots)]

    def match(self, keys: Sequence[Key], timeout_s: float | None = None) -> PrefixMatch:
        """See `BlockStore.match`."""
        answers = self.lookup(keys, timeout_s)
        run = PrefixMatch()
        for found in answers:
            if found is None:
                break
            run.append(found)
        if len(run) < len(keys):
            run.short = answers.short or MissReason.ABSENT
        return run

    def lookup(self, keys: Sequence[Key], timeout_s: float | None = None) -> LookupResult:
        """See `BlockStore.lookup`."""
        started = time.monotonic()
        answers = LookupResult(self._indexed(key) if key in self.here else None for key in keys)
        if None not in answers:
            return answers
        if timeout_s == 0.0:
            answers.short = MissReason.DEADLINE
            return answers
        self.match_calls += 1
        self.on_match()
        late = timeout_s is not None and time.monotonic() - started > timeout_s
        if self.index_down or late:
            answers.short = MissReason.DEADLINE if late else self.index_trouble
            return answers
        return LookupResult(map(self._indexed, keys))

    def _indexed(self, key: Key) -> BlockRef | None:
        with self._lock:
            record = self._index.get(key)
        return None if record is None else BlockRef(key, record)

    def tiers(self, found: Sequence[BlockRef]) -> list[Tier]:
        """See `BlockStore.tiers`."""
        return [self.elsewhere.get(one.key, Tier.HOST) for one in found]

    def sources(self, found: Sequence[BlockRef]) -> list[str]:
        """See `BlockStore.sources`."""
        near = (Tier.VRAM, Tier.HOST)
        return [tier if tier in near else f"{tier}:{NODE_ID}" for tier in self.tiers(found)]

    def view(self, found: BlockRef) -> HostView | None:
        """See `BlockStore.view`."""
        self.on_view()
        location = unpack_record(found.key, found.record)
        if location is None or self.node_down:
            return None
        with self._lock:
            slot = self._slots.get(location.slot)
            if (
                slot is None
                or not slot.sealed
                or slot.key != found.key
                or slot.generation != location.generation
            ):
                return None
            return _View(self, location.slot, slot)

    def views(
        self, found: Sequence[BlockRef], staging: memoryview | None, timeout_s: float | None = None
    ) -> Iterator[HostView | None]:
        """See `BlockStore.views`."""
        return map(self.view, found)

    def reserve(
        self, keys: Sequence[Key], size_bytes: int, namespace_id: int
    ) -> list[ReserveAnswer]:
        """See `BlockStore.reserve`."""
        self.on_reserve()
        self._need_node()
        with self._lock:
            self.reserve_calls += 1
            return [self._reserve(key, size_bytes, namespace_id) for key in keys]

    def _reserve(self, key: Key, size_bytes: int, namespace_id: int) -> ReserveAnswer:
        for slot in self._slots.values():
            if slot.key == key:
                return EXISTS if slot.sealed else IN_PROGRESS
        if len(self._slots) >= self.capacity_blocks:
            return rejected("full")
        slot_id = next(i for i in range(self.capacity_blocks) if i not in self._slots)
        generation = self._generations[slot_id] = self._generations.get(slot_id, 0) + 1
        slot = _Slot(key, namespace_id, bytearray(size_bytes), generation)
        self._slots[slot_id] = slot
        return Reservation(key, memoryview(slot.payload), self, NODE_ID, EPOCH, slot_id, generation)

    def commit(self, reservations: Sequence[AnyReservation]) -> list[PutResult]:
        """See `BlockStore.commit`."""
        self.on_commit()
        self._need_node()
        with self._lock:
            return [self._commit(reservation) for reservation in reservations]

    def commit_later(self, reservations: Sequence[Reservation]) -> Later[PutResult]:
        """See `Saver.commit_later`."""
        return answered(lambda: self.commit(reservations))

    def _commit(self, reservation: AnyReservation) -> PutResult:
        slot = self._slots.get(reservation.slot)
        if slot is None or slot.generation != reservation.generation or slot.sealed:
            return rejected("not reserved")
        slot.sealed = True
        self._index[slot.key] = self._record(reservation.slot, slot)
        return STORED

    @staticmethod
    def _record(slot_id: int, slot: _Slot) -> bytes:
        location = Location(NODE_ID, EPOCH, 0, slot_id, slot.generation, 0, len(slot.payload), 0)
        return pack_record(slot.key, location)

    def _sealed_slot(self, key: Key) -> int | None:
        return next((i for i, s in self._slots.items() if s.key == key and s.sealed), None)

    def abort(self, reservations: Sequence[AnyReservation]) -> None:
        """See `BlockStore.abort`."""
        with self._lock:
            for reservation in reservations:
                slot = self._slots.get(reservation.slot)
                if (
                    slot is not None
                    and slot.generation == reservation.generation
                    and not slot.sealed
                ):
                    del self._slots[reservation.slot]

    def touch(self, keys: Sequence[Key], *, saved: bool = False, left: bool = False) -> None:
        """See `BlockStore.touch`."""
        self.left += keys if left else ()
        self.touched += () if left else keys
        self.read |= set() if saved or left else set(keys)

    def were_read(self, keys: Sequence[Key]) -> list[bool | None]:
        """See `BlockStore.were_read`."""
        with self._lock:
            evicted = {key for key in keys if self._gone.get(key) is MissReason.EVICTED}
        return [key in self.read or (False if key in evicted else None) for key in keys]

    def report(self, counts: Mapping[str, int]) -> bool:
        """See `BlockStore.report`."""
        self.reported.append(dict(counts))
        return True

    def pin(self, keys: Sequence[Key]) -> list[BlockRef | None]:
        """See `BlockStore.pin`."""
        self.on_pin()
        self._need_node()
        pinned: list[BlockRef | None] = []
        with self._lock:
            for key in keys:
                slot_id = self._sealed_slot(key)
                if slot_id is None or self.pins() >= self.pins_max:
                    pinned.append(None)
                    continue
                slot = self._slots[slot_id]
                slot.pins += 1
                pinned.append(BlockRef(key, self._record(slot_id, slot)))
        return pinned

    def unpin(self, found: Sequence[BlockRef]) -> None:
        """See `BlockStore.unpin`."""
        with self._lock:
            for key, record in found:
                location = unpack_record(key, record)
                slot = self._slots.get(location.slot) if location is not None else None
                if (
                    slot is not None
                    and location is not None
                    and slot.generation == location.generation
                    and slot.pins > 0
                ):
                    slot.pins -= 1

    def retain(self, keys: Sequence[Key], for_s: int, tenant: str = "") -> list[Retained]:
        """See `BlockStore.retain`. There are no budgets here, and no time passes."""
        whole("for_s", for_s, 0, RETAINED_S_MAX)
        tenant_id(tenant)
        self._need_node()
        with self._lock:
            there = [key for key in keys if self._sealed_slot(key) is not None]
            for key in there:
                self.retained.pop(key, None)
                if for_s:
                    self.retained[key] = (for_s, tenant)
        return [Retained.YES if key in there else Retained.ABSENT for key in keys]

    def drop(self, keys: Sequence[Key]) -> list[bool]:
        """See `BlockStore.drop`."""
        self._need_node()
        return [self._drop(key, MissReason.CLEARED, forget=True) for key in keys]

    def reset(
        self, namespace_ids: Sequence[int], timeout_s: float = RESET_TIMEOUT_S
    ) -> ResetResult:
        for namespace_id in namespace_ids:
            self.clear(namespace_id)
        return ResetResult(("model@here",), (), index_answered=True)

    def clear(self, namespace_id: int) -> int:
        """See `BlockStore.clear`."""
        self._need_node()
        with self._lock:
            keys = [
                slot.key
                for slot in self._slots.values()
                if slot.sealed and slot.namespace_id == namespace_id
            ]
        return sum(self._drop(key, MissReason.CLEARED, forget=True) for key in keys)

    def read_bytes(self) -> Mapping[str, int]:
        """See `BlockStore.read_bytes`; nothing leaves this process."""
        return {}

    def mappings(self) -> Sequence[PoolMapping]:
        return ()

    def register_namespaces(self, namespaces: Iterable[Namespace]) -> None:
        """See `BlockStore.register_namespaces`; the model knows no fields."""

    def why_missing(self, question: MissQuery) -> Missing:
        """See `BlockStore.why_missing`."""
        self.on_why()
        block = question.block
        if self.index_down:
            return Missing(block=block, reason=self.index_trouble, detail="the model's index")
        with self._lock:
            slots = {slot.key: slot.sealed for slot in self._slots.values()}
            reason = self._gone.get(question.key, MissReason.NEVER_STORED)
        if question.key in slots:
            reason = MissReason.NOT_INDEXED if slots[question.key] else MissReason.BEING_WRITTEN
        return Missing(block=block, reason=reason, detail="says the model", node="model")

    def close(self) -> None:
        """See `BlockStore.close`."""
        self.closed = True

    def _need_node(self) -> None:
        if self.node_down:
            raise NodeUnavailableError("the model's node is down")

    # --- the rest of the world --------------------------------------------

    def evict(self, key: Key, *, forget: bool = True) -> bool:
        """Take a sealed block's slot away, unless it is pinned or retained; with `forget=False` the
        index still points there."""
        with self._lock:
            slot_id = self._sealed_slot(key)
            if slot_id is not None and (self._slots[slot_id].pins or key in self.retained):
                return False
            return self._drop(key, MissReason.EVICTED, forget=forget)

    def _drop(self, key: Key, why: MissReason, *, forget: bool) -> bool:
        with self._lock:
            if forget:
                self._index.pop(key, None)
            slot_id = self._sealed_slot(key)
            if slot_id is None:
                return False
            del self._slots[slot_id]
            self.retained.pop(key, None)
            self._gone[key] = why
            return True

    def pins(self) -> int:
        """Return the slots that are pinned, however often."""
        with self._lock:
            return sum(slot.pins > 0 for slot in self._slots.values())

    def sealed(self) -> list[Key]:
        """Return the sealed blocks, oldest first."""
        with self._lock:
            return [slot.key for slot in self._slots.values() if slot.sealed]

    def payload(self, key: Key) -> bytes:
        """Return the sealed bytes under `key`; `KeyError` when there are none."""
        with self._lock:
            for slot in self._slots.values():
                if slot.key == key and slot.sealed:
                    return bytes(slot.payload)
        raise KeyError(key)

    def reserved(self) -> int:
        """Return the slots that were reserved and neither committed nor given back."""
        with self._lock:
            return sum(not slot.sealed for slot in self._slots.values())


def timed_out() -> None:
    """Raise, for the `on_…` hooks, what a node causes that did not answer in time."""
    raise DeadlineError("the model's node did not answer")


def _nothing() -> None:
    return None
