"""Keeps the connection to one node of this host, and the account of what a client holds there."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from pathlib import Path

from kvstore.client.local.control import ControlChannel, Held
from kvstore.client.pins import Handle, PinRef
from kvstore.machine import REAL, Machine
from kvstore.nodedir import Announcement
from kvstore.segment.attached import AttachedShm
from kvstore.segment.header import KEY_PART, fields
from kvstore.types import Key


class SlotsRef(weakref.ref[object]):
    """Lives as long as the memory that one answer of a node has granted: until nobody has it, nor
    a view of it."""

    __slots__ = ("handles",)
    handles: Sequence[Handle]


class Holdings:
    """Names what this client may still use at one start of one node.

    Each change of `reserved` and of `pins` is one call of a function of C: a HELLO that another
    thread says meanwhile finds all of it or nothing, and so does a handler of signals.
    """

    def __init__(self) -> None:
        self.reserved: dict[Handle, SlotsRef | None] = {}
        """By (slot, generation) with whose end it is nobody's any more; None: its caller says."""
        self.pins: set[PinRef] = set()
        self.lost: deque[SlotsRef] = deque()
        """Grants that have ended, some of whose slots may be in `reserved`: the finaliser appends
        here, and `Writer.tidy` gives back."""

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

    def reserve(self, handles: Sequence[Handle], owner: object) -> None:
        """Count these as reserved until they are `released`, or `lost` with their `owner`."""
        grant = None
        if owner is not None:
            grant = SlotsRef(owner, self.lost.append)
            grant.handles = handles
        self.reserved.update(dict.fromkeys(handles, grant))

    def release(self, handles: Iterable[Handle]) -> None:
        """These are not written to any more."""
        deque(map(self.reserved.pop, handles, repeat(None)), maxlen=0)

    def still_reserved(self, handles: Iterable[Handle]) -> list[Handle]:
        return [handle for handle in handles if handle in self.reserved]

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
        self._undo: list[Callable[[], object]] = []

    def note(self, undo: Callable[[], object]) -> None:
        """Have `undo` give back what an answer grants; what is given back by then is passed over
        there."""
        self._undo.append(undo)

    def close(self) -> None:
        """Give back what is still held. Never raises for a peer's fault."""
        self.over = True
        for channel in self.asked:  # its answer may still come, and grant what nobody has
            channel.doubt()
        for undo in self._undo:
            undo()


class NodeLink:
    """The connection to one start of one node, with its segment mapped for writing."""

    def __init__(
        self,
        announcement: Announcement,
        control: ControlChannel,
        held: Holdings,
        *,
        machine: Machine = REAL,
    ) -> None:
        self.announcement = announcement
        self.control = control
        self.held = held
        data, head = Path(announcement.data_path), Path(announcement.head_path)
        shm = AttachedShm(data, head, writable=True, owner=os.geteuid(), machine=machine)
        shm.populate_ahead()
        self.shm: AttachedShm | None = shm
        self.payload = shm.payload
        self._whole = ctypes.c_ubyte * len(self.payload)
        self.inline_bytes = announcement.inline_bytes
        self.introduced: set[int] = set()
        """Namespaces of which this start of the node was told."""
        self.retired = False
        """No answer that comes can make anything held any more."""

    def buffers(
        self, grants: Sequence[Sequence[int]], sizes: Sequence[int]
    ) -> tuple[list[memoryview], object] | None:
        """Return where to write to the slots that the node has reserved, (slot, generation, offset)
        of each, and an object that lives as long as any view of these; None when one is not in its
        segment, or is not there any more."""
        shm = self.shm
        ends = [grant[2] + size for grant, size in zip(grants, sizes, strict=True)]
        if shm is None or max(ends, default=0) > shm.superblock.size_bytes:
            return None
        if not shm.is_populated and not all(
            shm.populate(grant[2], size) for grant, size in zip(grants, sizes, strict=True)
        ):
            return None
        owner = self._whole.from_buffer(self.payload[:])
        whole = memoryview(owner).cast("B")
        return [whole[grant[2] : end] for grant, end in zip(grants, ends, strict=True)], owner

    def has_checksum(self, key: Key) -> bool:
        """Return whether the block is found here and has one; hints forget some."""
        image = b"" if self.shm is None else self.shm.hinted(key)[1]
        header = fields(image) if image[KEY_PART] == key else None
        return header is not None and header[6] != 0

    def retire(self) -> None:
        """The node is gone: no slot is granted any more, and its memory is not kept. The buffers
        of reservations keep it until they are dropped (rule 5)."""
        self.control.retire()
        self.retired = True
        self._unmap()

    def linger(self) -> None:
        """The client is closed, and somebody still looks at what it has pinned here."""
        self._unmap()
        self.held.keep_viewed()
        self.control.restate()

    def _unmap(self) -> None:
        self.shm, self.payload = None, memoryview(b"")
