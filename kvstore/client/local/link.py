"""Keeps the connection to one node of this host, and the account of what a client holds there."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import methodcaller
from pathlib import Path

from kvstore.client.local.control import ControlChannel, Held
from kvstore.client.pins import Pin
from kvstore.machine import REAL, Machine
from kvstore.nodedir import Announcement
from kvstore.segment.attached import AttachedShm
from kvstore.segment.header import KEY_PART, fields
from kvstore.types import Key


class Holdings:
    """(slot, generation) pairs at one start of one node that this client may still use."""

    def __init__(self) -> None:
        self.reserved: set[tuple[int, int]] = set()
        self.pinned: dict[tuple[int, int], int] = {}
        self.viewed: dict[tuple[int, int], int] = {}
        """Of `pinned`, what somebody may look at also when the client is closed."""

    def said(self) -> Held:
        # Copied at once: other threads change both, and need no lock of the connection's for it.
        pinned = list(self.pinned.items())
        return list(self.reserved), [(*handle, times) for handle, times in pinned if times]

    def __bool__(self) -> bool:
        return bool(self.reserved) or any(list(self.pinned.values()))

    @property
    def is_viewed(self) -> bool:
        """Whether somebody may look at something of it also when the client is closed."""
        return any(list(self.viewed.values()))

    def pin(self, handles: Iterable[tuple[int, int]], also: Callable[[], object]) -> None:
        """Count each up, and do `also`, which is to be a function of C, in one step."""
        changed: dict[tuple[int, int], int] = {}
        for handle in handles:
            changed[handle] = changed.get(handle, self.pinned.get(handle, 0)) + 1
        _in_one_step(partial(self.pinned.update, changed), also)

    def unpin(
        self,
        handles: Sequence[tuple[int, int]],
        also: Callable[[], object] = int,
        *,
        viewed: bool = False,
    ) -> None:
        """Do `also`, which is to be a function of C, and count each down, in one step; when it
        raises, nothing is."""
        counts = [self.pinned, self.viewed] if viewed else [self.pinned]
        changes = [_less(count, handles) for count in counts]
        _in_one_step(also, *map(partial, [count.update for count in counts], changes))
        for count, change in zip(counts, changes, strict=True):
            for handle in change:
                if not count.get(handle):
                    count.pop(handle, None)

    def keep_viewed(self) -> None:
        """The client is closed: nothing else is in use any more."""
        self.reserved.clear()
        self.pinned = dict(self.viewed)


class Granted:
    """The slots that the answer to one request grants, until its caller has the answer.

    Another thread may take the answer while the caller gives up; then nobody would own the slots,
    and each HELLO would claim them. Whichever of the two comes second takes them off again.
    """

    def __init__(self) -> None:
        self._noted: list[tuple[Holdings, tuple[int, int]]] = []
        self._refused = False

    def note(self, held: Holdings, handles: Sequence[tuple[int, int]]) -> None:
        """Note slots that are granted: the next HELLO says them, unless the caller has given up."""
        self._noted += [(held, handle) for handle in handles]
        held.reserved.update(handles)
        if self._refused:
            held.reserved.difference_update(handles)

    def refuse(self) -> list[tuple[Holdings, tuple[int, int]]]:
        """The caller does not get the answer: nothing of it is held. What was noted so far."""
        self._refused = True
        noted = list(self._noted)
        for held, handle in noted:
            held.reserved.discard(handle)
        return noted


class GrantedPins:
    """The pins that the answers to one call grant, until its caller has them all: as `Granted`.
    Whoever looks at it or changes it has the writer's lock."""

    def __init__(self) -> None:
        self.noted: list[Pin] = []
        self.refused = False
        """The caller gives up: what is granted from here on is held by nobody."""


def _less(
    counts: dict[tuple[int, int], int], handles: Iterable[tuple[int, int]]
) -> dict[tuple[int, int], int]:
    """Return what is to be changed of `counts`."""
    changed: dict[tuple[int, int], int] = {}
    for handle in handles:
        changed[handle] = max(changed.get(handle, counts.get(handle, 0)) - 1, 0)
    return changed


def _in_one_step(*steps: Callable[[], object]) -> None:
    """All, or up to the first that raises. Handlers of signals run between instructions of Python,
    and this is a single one, where the steps are functions of C."""
    deque(map(methodcaller("__call__"), steps), maxlen=0)


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
        self.inline_bytes = announcement.inline_bytes
        self.introduced: set[int] = set()
        """Namespaces of which this start of the node was told."""
        self.retired = False
        """No answer that comes can make anything held any more."""

    def buffer(self, offset: int, size_bytes: int) -> memoryview | None:
        """Return where to write to what the node has reserved; None for what is not in its segment,
        or is not there any more."""
        shm = self.shm
        if shm is None or offset + size_bytes > shm.superblock.size_bytes:
            return None
        if not shm.is_populated and not shm.populate(offset, size_bytes):
            return None
        return self.payload[offset : offset + size_bytes]

    def buffers(
        self, grants: Sequence[Sequence[int]], sizes: Sequence[int]
    ) -> list[memoryview] | None:
        """`buffer` for each (slot, generation, offset) of its size; None when one has none."""
        shm, payload = self.shm, self.payload
        if shm is not None and shm.is_populated:
            ends = [grant[2] + size for grant, size in zip(grants, sizes, strict=True)]
            if max(ends, default=0) > len(payload):
                return None
            return [payload[grant[2] : end] for grant, end in zip(grants, ends, strict=True)]
        found: list[memoryview] = []
        for (_, _, offset), size_bytes in zip(grants, sizes, strict=True):
            buffer = self.buffer(offset, size_bytes)
            if buffer is None:
                return None
            found.append(buffer)
        return found

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
