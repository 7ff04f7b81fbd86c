"""Checks whether a node is ready: a round trip through the index and one through a slot.

A node serves its own host from its start, with or without an index. It is ready when it has
published a record, found it again and taken it out, and has read back what it wrote into a slot.
From then on an index that is away changes nothing (rule 7); one that refuses it, or is full, does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from hashlib import blake2b

import xxhash

from kvstore.core.answers import Grant
from kvstore.core.events import Abort, Fill, Reserve, SessionDead
from kvstore.core.holdings import TRIAL
from kvstore.core.node import NodeCore
from kvstore.errors import IndexBreakerOpenError, IndexRefusedError, IndexUnavailableError
from kvstore.index.base import Index, KeyRecord
from kvstore.limits import SLOT_BYTES_MIN
from kvstore.nodedir import NodeDir
from kvstore.record import RECORD_BYTES
from kvstore.segment.cuda import OwnedCuda
from kvstore.segment.shm import OwnedShm
from kvstore.types import KEY_BYTES, Key, Kind

log = logging.getLogger("kvstore.node")


TRIAL_ROOM_BYTES = 2 * SLOT_BYTES_MIN
"""Free room in one piece from which on a slot for a few bytes costs no block."""


def slot_works(core: NodeCore, segment: OwnedShm | OwnedCuda, key: Key, now: float) -> bool:
    """Write `key` into a slot and read it back; nothing is evicted for that, and where there is
    hardly any room, nothing is tried: True."""
    room = core.blocks.allocator
    if min(room.free_bytes, room.largest_free_bytes) < TRIAL_ROOM_BYTES:
        return True
    wanted = Reserve(TRIAL, 0, [key], [len(key)], 0, [Kind.BYTES], [0], [None], [0])
    effects = core.handle(wanted, now)
    answer = effects.replies[0].body
    if not (isinstance(answer, list) and isinstance(answer[0], Grant)):
        return False
    slot_id, generation, offset = answer[0]
    undone = core.handle(Abort(TRIAL, 0, [(slot_id, generation)]), now)
    segment.apply_all([*effects.writes, Fill(offset, key)])
    same = segment.checksum(offset, len(key)) == xxhash.xxh3_64_intdigest(key)
    segment.apply_all(undone.writes)
    core.handle(SessionDead(TRIAL), now)
    return same


class Readiness:
    """Says in the node's directory whether it is ready, or why not."""

    def __init__(
        self,
        index: Index,
        directory: NodeDir,
        node: tuple[int, int],
        try_slot: Callable[[bytes], bool],
    ) -> None:
        """`node` is its (id, epoch). `try_slot` writes a block whose key and payload are the bytes
        it is given, frees it, and says whether it read back the same."""
        self._index = index
        self._directory = directory
        self._key = blake2b(b"ready %x %x" % node, digest_size=KEY_BYTES).digest()
        self._try_slot = try_slot
        self._proved = False
        self._written: str | None = None
        self._lost = ""
        self._on_ready: Callable[[], None] | None = None

    def serving(self, on_ready: Callable[[], None] | None) -> None:
        """Note that clients can connect from now on; call `on_ready` once the rest is proved
        too."""
        if on_ready is not None and self._proved:
            on_ready()
        elif on_ready is not None:
            self._on_ready = on_ready

    def beaten(self, error: IndexUnavailableError | None) -> None:
        """Take note of a heartbeat; `error` is why it, or the last publication, did not reach the
        index, None when both did."""
        if error is None and not self._proved:
            error = self._prove()
        if isinstance(error, IndexBreakerOpenError):
            last = error.__cause__
            error = last if isinstance(last, IndexUnavailableError) else error
        if error is None:
            first, self._proved = not self._proved, True
            self._say("")
            if first and self._on_ready is not None:
                self._on_ready()
            return
        known = self._written and isinstance(error, IndexBreakerOpenError)
        if isinstance(error, IndexRefusedError) or not (self._proved or known):
            self._say(str(error))

    def _prove(self) -> IndexUnavailableError | None:
        record = bytes(RECORD_BYTES)  # no record of a block: whoever finds it has a miss
        try:
            self._index.publish([KeyRecord(self._key, record)])
            found = self._index.lookup([self._key])
            self._index.remove([KeyRecord(self._key, record)])
        except IndexUnavailableError as e:
            log.warning("node %s is not ready: %s", self._directory.name, e)
            return e
        if found != [record]:
            return IndexUnavailableError("the index does not give back what is published in it")
        if not self._try_slot(self._key):
            return IndexUnavailableError("a slot does not give back what is written into it")
        return None

    def say_again(self) -> bool:
        """Say it again if the file was taken away. Return whether it was."""
        missing = self._written is not None and not self._directory.ready_path.exists()
        if missing:
            self._directory.say_ready(self._written or "")
        return missing

    def lost(self, why: str) -> None:
        """Report that the node is not ready any more, because something is lost for good."""
        self._lost = why
        self._say(why)

    def _say(self, why_not: str) -> None:
        why_not = self._lost or why_not
        if why_not != self._written:
            self._written = why_not
            self._directory.say_ready(why_not)
