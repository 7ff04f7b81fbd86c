"""Runs the process that READs for this one, and owns the memory that it reads into.

NIXL cannot cancel: bytes of a READ that was given up may still come. So nothing is
read into a caller's memory. A READ that is late or fails makes the whole arena suspect:
it is *retired*, gets no new requests, and its process is killed. Then nobody writes
there any more, and the next reader has an arena and an agent of its own.

Payload may go to a second arena, in memory of a device (vram.py); headers never do.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

from kvstore.limits import NIXL_PIECES_MAX, NIXL_REQUEST_BYTES_MAX, NIXL_REQUESTS_MAX
from kvstore.machine import REAL
from kvstore.system.on_failure import on_failure
from kvstore.transport.nixl.child import ADD, OK, READ, REMOVE
from kvstore.transport.nixl.process import ChildAnswer, NixlProcess, wait_for
from kvstore.transport.nixl.vram import VramArena

HEADERS_BYTES = NIXL_PIECES_MAX * 64
"""Bytes of one part for headers, behind the payload."""
PART_BYTES = NIXL_REQUEST_BYTES_MAX + HEADERS_BYTES
READ_TIMEOUT_MIN_S = 0.25
"""The shortest time that a READ gets before it makes the arena suspect, whatever its caller's
deadline."""
OVERDUE_S = 1.0
"""Seconds after that in which the process has to report that it is late."""
DRAIN_S = 1.0
"""Seconds for which READs of others may continue in a retired arena."""


class Part(NamedTuple):
    """Room in the arena for one request."""

    number: int
    start: int
    """Position in the arena."""
    memory: memoryview
    vram: int = 0
    """Address of its room on a device, for payload only; 0: it has none."""


class Stage(NamedTuple):
    """A part of a READ, which begins when the one before it is done."""

    pieces: bytes
    """u64 triples: address at the owner, offset in the arena, length."""
    device: int = -1
    """Which of the owner's they are on; -1: in its host memory."""
    to_vram: bool = False
    """Whether the arena is that on a device."""


class NixlReader:
    """A process that READs, with its arena of `NIXL_REQUESTS_MAX` parts. Thread-safe."""

    def __init__(self, name: str, vram: VramArena | None = None) -> None:
        """Start the reading process; it gives `vram` back when nobody READs into it any more."""
        self.vram = vram
        size_bytes = NIXL_REQUESTS_MAX * PART_BYTES
        fd = os.memfd_create("kvstore-nixl", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, size_bytes)
            arena = memoryview(mmap.mmap(fd, size_bytes))
            self._parts = [
                Part(
                    i, start, arena[start : start + PART_BYTES], 0 if vram is None else vram.part(i)
                )
                for i, start in enumerate(range(0, size_bytes, PART_BYTES))
            ]
            self._free = list(self._parts)
            self._due: dict[int, float] = {}
            """When the process must have answered, of parts in use, by number."""
            self._lock = threading.RLock()
            self._changed = threading.Condition(self._lock)
            self._retired = False
            self._agents: dict[int, str] = {}
            fds, arguments = [fd], [name, str(fd)]
            if vram is not None:
                fds.append(vram.fd)
                arguments += vram.arguments()
            self._process = NixlProcess("reader", arguments, pass_fds=fds, ended=self._end_vram)
        except BaseException:
            self._end_vram()
            raise
        finally:
            os.close(fd)
            if vram is not None:
                vram.handed_over()
        self.pid = self._process.pid

    @property
    def usable(self) -> bool:
        return not self._retired and self._process.alive

    @property
    def alive(self) -> bool:
        """Return whether the process lives: unless it does, nobody writes into the arena any
        more."""
        return self._process.alive

    def ready(self, deadline: float) -> None:
        """Wait until it can read. Raises `PeerError` when it cannot."""
        self._process.ready(deadline)

    def know(self, node_id: int, agent: str, metadata: bytes, deadline: float) -> None:
        """Make an owner's agent known in place of the one that `node_id` had before.

        Raises `PeerError`; then nobody knows what the metadata did, and this reader is retired.
        """
        with on_failure(self.retire):
            former = self._agents.pop(node_id, None)
            if former is not None:
                asked = self._process.ask(REMOVE, former, deadline=deadline)
                wait_for(asked, deadline, "its old agent cannot be removed")
            asked = self._process.ask(ADD, agent, metadata, deadline=deadline)
            wait_for(asked, deadline, "its agent cannot be added")
        self._agents[node_id] = agent

    # --- reading ------------------------------------------------------------

    def take(self, deadline: float) -> Part | None:
        """Return room for a request until `give`, None when none is free by `deadline`."""
        with self._lock:
            while not self._free:
                now = time.monotonic()
                if self._due and now > min(self._due.values()) + OVERDUE_S:
                    self.retire()
                if not self.usable or now >= deadline:
                    return None
                self._changed.wait(min(deadline - now, OVERDUE_S))
            return self._free.pop() if self.usable else None

    def give(self, part: Part) -> None:
        with self._lock:
            self._due.pop(part.number, None)
            self._free.append(part)
            self._changed.notify()

    def read(
        self, agent: str, part: Part, stages: Sequence[Stage], deadline: float
    ) -> Future[ChildAnswer]:
        """READ `stages` one after the other into `part`. Raises `PeerError`."""
        timeout_s = max(deadline - time.monotonic(), READ_TIMEOUT_MIN_S)
        with self._lock:
            self._due[part.number] = time.monotonic() + timeout_s
        future = self._process.ask(READ, agent, timeout_s, list(stages), deadline=deadline)
        future.add_done_callback(self._retire_unless_ok)
        return future

    def abandon(self, part: Part, future: Future[ChildAnswer]) -> None:
        """Free the part once its READ has ended well; nobody waits for the READ any more."""

        def free(ended: Future[ChildAnswer]) -> None:
            if ended.result().status == OK:
                self.give(part)

        future.add_done_callback(free)

    # --- ending -------------------------------------------------------------

    def _end_vram(self) -> None:
        if self.vram is not None:
            self.vram.end()

    def _retire_unless_ok(self, future: Future[ChildAnswer]) -> None:
        # Of a READ that failed, other pieces may still be under way.
        if future.result().status != OK:
            self.retire()

    def retire(self) -> None:
        """Take no new requests, and kill the process when those under way have ended, or have had
        `DRAIN_S`."""
        with self._lock:
            if self._retired:
                return
            self._retired = True
            self._changed.notify_all()

        def bury() -> None:
            self._process.drain(time.monotonic() + DRAIN_S)
            self._process.kill()

        try:
            REAL.start_thread(bury, "kvstore-nixl-retire")
        except RuntimeError:  # no more threads: nobody waits for what is under way
            self._process.kill()

    def close(self) -> None:
        """Kill the process; what is under way fails."""
        with self._lock:
            self._retired = True
            self._changed.notify_all()
        self._process.kill()
        self._process.join(OVERDUE_S)
