"""The connection to the local node, and what a client holds there."""

from __future__ import annotations

import os
from pathlib import Path

from kvstore.client.control import ControlChannel, Held
from kvstore.nodedir import Announcement
from kvstore.segment.shm import AttachedShm


class Holdings:
    """(slot, generation) pairs at one start of one node that this client may still use."""

    def __init__(self) -> None:
        self.reserved: set[tuple[int, int]] = set()
        self.pinned: dict[tuple[int, int], int] = {}

    def said(self) -> Held:
        # Copied at once: other threads change both, and need no lock of the connection's for it.
        pinned = list(self.pinned.items())
        return list(self.reserved), [(*handle, times) for handle, times in pinned]

    def __bool__(self) -> bool:
        return bool(self.reserved or self.pinned)

    def unpin(self, handle: tuple[int, int]) -> None:
        count = self.pinned.get(handle, 0)
        if count <= 1:
            self.pinned.pop(handle, None)
        else:
            self.pinned[handle] = count - 1


class NodeLink:
    """The connection to one start of one node, with its segment mapped for writing."""

    def __init__(self, word: Announcement, control: ControlChannel, held: Holdings) -> None:
        self.word = word
        self.control = control
        self.held = held
        self.reads_only = not os.access(word.data_path, os.W_OK)
        """This user is of the node's group (node/sharing.py)."""
        self.shm: AttachedShm | None = AttachedShm(
            Path(word.data_path), Path(word.head_path), writable=not self.reads_only
        )
        self.shm.populate_ahead()
        self.payload = self.shm.payload
        self.inline_bytes = word.inline_bytes
        self.introduced: set[int] = set()
        """Namespaces of which this start of the node was told."""

    @property
    def retired(self) -> bool:
        """No answer that comes can make anything held any more."""
        return self.shm is None

    def retire(self) -> None:
        """The node is gone: no slot is granted any more, and its memory is not kept. The buffers
        of reservations keep it until they are dropped (rule 5)."""
        self.control.retire()
        self.shm, self.payload = None, memoryview(b"")
