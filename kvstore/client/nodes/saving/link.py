"""Saves to one start of one node of this host, and keeps the account of what a client holds there.

In one file because what a client holds (`Holdings`) must change under the same lock as the
requests that change it (rule 5).
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Protocol, cast

import xxhash

from kvstore.batches import in_batches, picked
from kvstore.client.base import AnyReservation, Later, Reservation, ReserveAnswer
from kvstore.client.nodes.control import Accept, Answer, ControlChannel, Held, Ticket, as_it_is
from kvstore.client.pins import Handle, PinRef
from kvstore.errors import DeviceError, NodeUnavailableError, PeerError
from kvstore.limits import BATCH_KEYS_MAX
from kvstore.machine import REAL, Machine
from kvstore.nodedir import Announcement
from kvstore.protocol.control import Op
from kvstore.protocol.control_replies import InvalidReplyError, grants, outcomes
from kvstore.protocol.control_requests import Wants, reserve_arguments
from kvstore.segment.attached import AttachedShm
from kvstore.segment.header import KEY_PART, fields
from kvstore.types import EXISTS, Key, PutResult, rejected


class Holdings:
    """Names what this client may still use at one start of one node.

    Each change of `reserved` and of `pins` is one call of a function of C: a HELLO that another
    thread says meanwhile finds all of it or nothing, and so does a handler of signals.
    """

    def __init__(self) -> None:
        self.reserved: dict[Handle, weakref.ref[object] | None] = {}
        """By (slot, generation) with whose end it is nobody's any more; None: its caller says."""
        self.pins: set[PinRef] = set()
        self.lost: dict[tuple[Handle, ...], object] = {}
        """Slots whose memory nobody has any more; some may be in `reserved`. The finaliser adds
        them, and `NodeLink.tidy` gives them back."""

    def said(self) -> Held:
        pinned = Counter([ref.handle for ref in list(self.pins)])
        return list(self.reserved), [(*handle, times) for handle, times in pinned.items()]

    def __bool__(self) -> bool:
        return bool(self.reserved) or bool(self.pins)

    @property
    def is_viewed(self) -> bool:
        """Return whether somebody may look at something of it also when the client is closed."""
        grants = [grant for grant in list(self.reserved.values()) if grant is not None]
        owners: list[Callable[[], object]] = [*list(self.pins), *grants]
        return any(owner() is not None for owner in owners)

    def release(self, handles: Iterable[Handle]) -> None:
        """These are not written to any more."""
        deque(map(self.reserved.pop, handles, repeat(None)), maxlen=0)

    def keep_viewed(self) -> None:
        """The client is closed: nothing else is in use any more."""
        reserved = list(self.reserved.items())
        self.release([handle for handle, grant in reserved if grant is None or grant() is None])
        self.pins.difference_update([ref for ref in list(self.pins) if ref() is None])


class Grants:
    """Owns what the requests of one call are granted until the call has its result.

    Who makes it closes it in its own `finally`, unless the result has it all. What an answer grants
    is noted in it before it is held.
    """

    def __init__(self) -> None:
        self.asked: list[ControlChannel] = []
        """One for each request whose answer was not read yet."""
        self.over = False
        """What another thread reads of an answer from here on is nobody's."""
        self.undo: list[Callable[[], object]] = []
        """Each gives back what an answer grants; what is given back by then is passed over
        there."""

    def close(self) -> None:
        """Give back what is still held. Never raises for a peer's fault."""
        self.over = True
        for channel in self.asked:  # its answer may still come, and grant what nobody has
            channel.doubt()
        for undo in self.undo:
            undo()


Row = tuple[int, ...]
"""(number of the block, slot, generation, offset) of what was granted."""


class Keeper(Protocol):
    """Has the links to one node: that to its present start, and those to former ones."""

    introductions: dict[int, bytes]
    """Fields of the namespaces that this client saves to, by id."""

    def gone(self, link: NodeLink) -> None:
        """Let the link go, if its start of the node is over."""
        ...

    def settle(self) -> None:
        """Let those to former starts go where nothing is held any more."""
        ...

    def drop_unchecked(self, keys: Sequence[Key], granted: Grants) -> list[int]:
        """Drop the blocks of `keys` that have no checksum, and return which they are."""
        ...


class SlotMemory(Protocol):
    """The memory of one start of a node, mapped for writing."""

    shm: AttachedShm | None
    """The segment, while it is mapped here; None for memory of a device."""
    is_open: bool
    """Slots may be granted and sealed there."""

    def place(
        self, saver: NodeLink, wants: Wants, rows: Sequence[Row], answers: list[ReserveAnswer]
    ) -> object | None:
        """Put a reservation of each of `rows` in its place in `answers`. Returns with whose end the
        slots are nobody's any more; None where their caller says it. Raises
        `InvalidReplyError`."""
        ...

    def checksums(self, reservations: Sequence[AnyReservation]) -> Sequence[int]:
        """Return those of the bytes in place. Raises `DeviceError`."""
        ...

    def retire(self) -> None:
        """The node is gone: keep what somebody may still write to, nothing else."""
        ...

    def close(self) -> None:
        """Nobody writes there any more. Safe to call twice."""
        ...


class HostSlots:
    """Implements `SlotMemory` by a segment of this host."""

    def __init__(self, announcement: Announcement, machine: Machine = REAL) -> None:
        """Raises `OSError` and `ValueError`."""
        data, head = Path(announcement.data_path), Path(announcement.head_path)
        shm = AttachedShm(data, head, writable=True, owner=os.geteuid(), machine=machine)
        shm.populate_ahead()
        self.shm: AttachedShm | None = shm
        self.is_open = True
        self._payload = shm.payload
        self._whole = ctypes.c_ubyte * len(self._payload)
        self._start = announcement.node_id, announcement.epoch

    def place(
        self, saver: NodeLink, wants: Wants, rows: Sequence[Row], answers: list[ReserveAnswer]
    ) -> object | None:
        """See `SlotMemory.place`."""
        shm, keys, sizes, (node_id, epoch) = self.shm, wants.keys, wants.sizes, self._start
        if shm is None:
            raise InvalidReplyError("an answer of a node that is gone")
        # Lives as long as any view of these slots.
        owner = self._whole.from_buffer(self._payload[:])
        whole, room = memoryview(owner).cast("B"), shm.superblock.size_bytes
        for i, slot, generation, offset in rows:
            size_bytes = sizes if isinstance(sizes, int) else sizes[i]
            end = offset + size_bytes
            if end > room or not (shm.is_populated or shm.populate(offset, size_bytes)):
                raise InvalidReplyError("a slot outside the segment, whose file may have been cut")
            buffer = whole[offset:end]
            answers[i] = Reservation(keys[i], buffer, saver, node_id, epoch, slot, generation)
        return owner

    def checksums(self, reservations: Sequence[AnyReservation]) -> Sequence[int]:
        ours = [r.buffer for r in reservations if isinstance(r, Reservation)]
        return list(map(xxhash.xxh3_64_intdigest, ours))

    def retire(self) -> None:
        """The buffers of reservations keep the memory until they are dropped (rule 5)."""
        self.is_open, self.shm, self._payload = False, None, memoryview(b"")

    close = retire


class NodeLink:
    """The connection to one start of one node of this host, with the memory that it grants slots
    in. Thread-safe. Implements `kvstore.client.base.Saver`.
    """

    def __init__(
        self,
        announcement: Announcement,
        control: ControlChannel,
        held: Holdings,
        keeper: Keeper,
        memory: SlotMemory,
        *,
        checksums: bool,
    ) -> None:
        self.announcement = announcement
        self.control = control
        self.held = held
        self.memory = memory
        self._keeper = keeper
        self._checksums = checksums
        self.inline_bytes = announcement.inline_bytes
        self._introduced: set[int] = set()
        """Namespaces of which this start of the node was told."""
        self.retired = False
        """No answer that comes can make anything held any more."""

    # --- saving -----------------------------------------------------------

    def reserve_later(
        self, wants: Wants, namespace_id: int, granted: Grants, *, replaces: bool | None = None
    ) -> Later[ReserveAnswer]:
        """Ask for a slot for each of `wants`, or what becomes of it: sent now, answered when
        called. What is granted is `granted`'s, also when nobody calls. What one request cannot
        carry is asked and answered at once. It `replaces` what has no checksum: by default where
        this client writes them."""
        replaces = self._checksums if replaces is None else replaces
        if len(wants.keys) > BATCH_KEYS_MAX:
            answers: list[ReserveAnswer] = []
            for batch in in_batches(range(len(wants)), BATCH_KEYS_MAX):
                answers += self.reserve_later(wants.of(batch), namespace_id, granted)()
            return lambda: answers
        if self.held.lost:
            self.tidy()
        arguments = reserve_arguments(wants, namespace_id, checksums=self._checksums)
        granted.asked.append(self.control)
        try:
            accept = partial(self._granted, granted, wants)
            ticket = self.control.post(Op.RESERVE, *arguments, accept=accept)
        except NodeUnavailableError:
            self._keeper.gone(self)
            raise
        return partial(self._reserved, granted, ticket, wants, namespace_id, replaces)

    def _reserved(
        self, granted: Grants, ticket: Ticket, wants: Wants, namespace_id: int, replaces: bool
    ) -> list[ReserveAnswer]:
        try:
            answers: list[ReserveAnswer] = self._answer(ticket)
        finally:
            if ticket.done:
                granted.asked.remove(self.control)
        if namespace_id not in self._introduced:
            self._introduce(namespace_id)
        if replaces and EXISTS in answers:
            self._replace(answers, wants, namespace_id, granted)
        return answers

    def _granted(self, granted: Grants, wants: Wants, raw: object) -> list[ReserveAnswer]:
        """Return what the node's answer means; from here on the slots count as held."""
        if not self.memory.is_open:
            raise InvalidReplyError("an answer of a node that is gone")
        told = grants(len(wants.keys), raw)
        answers = cast("list[ReserveAnswer]", list(told))  # once the grants among them are replaced
        rows = [(i, *answer) for i, answer in enumerate(told) if type(answer) is list]
        if not rows:
            return answers
        owner = self.memory.place(self, wants, rows, answers)
        handles = tuple([(slot, generation) for _, slot, generation, _ in rows])
        # One call of C when the memory ends, complete from the start: a handler of signals may
        # raise after any instruction here.
        grant = None
        if owner is not None:
            grant = weakref.ref(owner, partial(self.held.lost.setdefault, handles))
        granted.undo.append(partial(self._give_back, handles))
        self.held.reserved.update(dict.fromkeys(handles, grant))
        if granted.over:
            self.held.release(handles)
        return answers

    def _introduce(self, namespace_id: int) -> None:
        """Tell the node once what the id stands for. After a request: then the channel is open,
        and a node that is slow costs this nothing."""
        raw = self._keeper.introductions.get(namespace_id)
        if raw is None or self.control.say(Op.NAMESPACE, namespace_id, raw):
            self._introduced.add(namespace_id)

    def _replace(
        self, answers: list[ReserveAnswer], wants: Wants, namespace_id: int, granted: Grants
    ) -> None:
        """Reserve anew what exists without a checksum: who verifies does not read it."""
        keys = wants.keys
        rest = [i for i, a in enumerate(answers) if a == EXISTS and not self._checked(keys[i])]
        dropped = self._keeper.drop_unchecked(picked(keys, rest), granted)
        which = picked(rest, dropped)
        if which:
            wanted = wants.of(which)
            again = self.reserve_later(wanted, namespace_id, granted, replaces=False)()
            for i, answer in zip(which, again, strict=True):
                answers[i] = answer

    def _checked(self, key: Key) -> bool:
        """Return whether the block is found here and has one; hints forget some."""
        image = b"" if self.memory.shm is None else self.memory.shm.hinted(key)[1]
        header = fields(image) if image[KEY_PART] == key else None
        return header is not None and header[6] != 0

    def commit_later(self, reservations: Sequence[AnyReservation]) -> Later[PutResult]:
        """See `Saver.commit_later`. What one request cannot carry is asked and answered at once.
        Who calls this aborts what it leaves reserved when it raises."""
        if len(reservations) > BATCH_KEYS_MAX:
            results: list[PutResult] = []
            for batch in in_batches(reservations, BATCH_KEYS_MAX):
                results += self.commit_later(batch)()
            return lambda: results
        handles = [(r.slot, r.generation) for r in reservations]
        if not self.memory.is_open:
            self.abort(reservations)
            raise NodeUnavailableError("the node that reserved these slots is gone")
        try:
            sums = self.memory.checksums(reservations) if self._checksums else repeat(0)
        except DeviceError as e:
            self.abort(reservations)
            refused = [rejected(str(e))] * len(handles)
            return lambda: refused
        items = [(slot, gen, checksum) for (slot, gen), checksum in zip(handles, sums)]  # noqa: B905
        accept = partial(outcomes, len(items))
        ticket = self._end(Op.COMMIT, items, partial(self.held.release, handles), accept)
        return partial(self._answer, ticket)

    def abort(self, reservations: Sequence[AnyReservation]) -> None:
        """Give slots back; what cannot be said now is said by the next reconnect."""
        self._give_back([(r.slot, r.generation) for r in reservations])
        self._keeper.settle()

    def _give_back(self, handles: Sequence[Handle]) -> None:
        """Give back those that are still reserved."""
        left = [handle for handle in handles if handle in self.held.reserved]
        if not left:
            return
        for batch in in_batches(left, BATCH_KEYS_MAX):
            self.give_up(Op.ABORT, batch, partial(self.held.release, batch))

    def give_up(self, op: Op, handles: Sequence[Handle], forget: Callable[[], object]) -> None:
        """End what is held, here and at the node. Never raises for a peer's fault."""
        if self.retired:
            forget()
            return
        with suppress(PeerError):
            self._answer(self._end(op, handles, forget, as_it_is))

    def _end(
        self, op: Op, items: Sequence[object], forget: Callable[[], object], accept: Accept
    ) -> Ticket:
        """Send what ends something that is held, and `forget` it, as one: a HELLO in between would
        not name it, and what was behind it take what somebody else has by then. It is forgotten
        when the node cannot be reached, too, and still held when a handler of signals raises
        before it is sent."""
        try:
            return self.control.post(op, items, accept=accept, before=forget)
        except PeerError as e:
            forget()
            self.control.doubt()
            if isinstance(e, NodeUnavailableError):
                self._keeper.gone(self)
            raise

    def _answer(self, ticket: Ticket) -> Answer:
        try:
            return self.control.collect(ticket)
        except NodeUnavailableError:
            self._keeper.gone(self)
            raise

    # --- the end ------------------------------------------------------------

    def tidy(self) -> None:
        """Give back what nobody has any more, and say anew what is held where the connection was
        broken. Never raises for a peer's fault."""
        for handles in list(self.held.lost):
            self._give_back(handles)
            self.held.lost.pop(handles, None)
        self.control.catch_up()

    def retire(self) -> None:
        """The node is gone: no slot is granted any more."""
        self.control.retire()
        self.retired = True
        self.memory.retire()

    def linger(self) -> None:
        """The client is closed, and somebody still looks at what it has pinned here."""
        self.memory.retire()
        self.held.keep_viewed()
        self.control.restate()

    def close(self) -> None:
        """Say goodbye, and let the memory go."""
        self.control.close()
        self.memory.close()
