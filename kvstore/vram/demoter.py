"""Moves the coldest blocks from VRAM to the host's memory, before anybody has to wait for slots."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from itertools import groupby

import xxhash

from kvstore.batches import in_batches
from kvstore.client.base import HostBlockStore, Reservation
from kvstore.core.answers import Answer, ColdBlock
from kvstore.core.events import Coldest, Retire, Unpin
from kvstore.cuda.base import Copy, CudaDevice, address_of, wait
from kvstore.errors import DeadlineError, DeviceError, InternalError, KVStoreError, PeerError
from kvstore.limits import (
    CUDA_IPC_DRAIN_S,
    DEMOTE_BLOCKS_MAX,
    DEMOTE_BYTES_MAX,
    LOCK_PART_BYTES,
    SLOT_BYTES_MIN,
)
from kvstore.node.control.local_session import LocalSession
from kvstore.types import PutStatus

log = logging.getLogger("kvstore.vram")

LOOK_EVERY_S = 1.0
"""Seconds between two looks without a request."""
END_TIMEOUT_S = 30.0

ANSWER_TIMEOUT_S = 5.0
"""How long the node in VRAM may take to answer; then it is asked again later."""
IN_DOUBT: list[object] = []
"""Memory that devices may still write to, and what holds it, for as long as this process lives:
reserved memory that nobody holds would be given back."""


Holding = Callable[[Iterable[memoryview]], AbstractContextManager[None]]
"""A context that is entered while memory below is copied to: meanwhile nothing of it is
unlocked."""


def nothing_held(buffers: Iterable[memoryview]) -> AbstractContextManager[None]:
    """Return the `Holding` of a process that page-locks nothing."""
    return nullcontext()


class Demoter:
    """A thread that keeps `reserve_bytes` of a node in VRAM free.

    The coldest blocks are pinned, copied into slots of `store`, committed there, and only
    then freed; one that is there already is only freed. What `store` does not take is
    freed too: that is an eviction.
    """

    def __init__(
        self,
        session: LocalSession,
        address: int,
        device: CudaDevice,
        store: HostBlockStore,
        reserve_bytes: int,
        holding: Holding = nothing_held,
    ) -> None:
        """Prepare the demoter. `session` is one of the node in VRAM, `address` that of its segment,
        and `holding` is entered while blocks are copied. Raises `DeviceError`."""
        self._holding = holding
        self._session = session
        self._address = address
        self._store = store
        self._reserve_bytes = reserve_bytes
        self._stream = device.stream()
        self._wake = threading.Event()
        self._ending = False
        self._drain_until = 0.0
        self._in_doubt: Sequence[object] = ()
        """Memory that a copy may still write to, with what keeps it reserved."""
        self.counts = dict.fromkeys(("demoted", "demoted_bytes", "already_below", "lost"), 0)
        self._thread = threading.Thread(target=self._run, name="kvstore-demoter", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Look now whether enough is free: slots were taken, or could not be."""
        self._wake.set()

    def stop(self, drain_s: float) -> bool:
        """End, after all blocks have gone down or `drain_s` have passed. Returns False when a copy
        hangs: then the node's memory must stay."""
        self._drain_until = time.monotonic() + drain_s
        self._ending = True
        self._wake.set()
        self._thread.join(drain_s + END_TIMEOUT_S)
        if self._thread.is_alive() or self._in_doubt:
            return False
        self._stream.close()
        return True

    def _run(self) -> None:
        try:
            while not self._ending:
                self._wake.wait(LOOK_EVERY_S)
                self._wake.clear()
                while not self._ending and self._step(self._reserve_bytes):
                    pass
            while time.monotonic() < self._drain_until and self._step(1 << 62):
                pass
        except KVStoreError as e:
            log.error("blocks in VRAM are no longer moved to host memory: %s", e)
        finally:
            if self._in_doubt:
                IN_DOUBT.append(self._in_doubt)

    def _step(self, free_bytes: int) -> bool:
        """Move some of the coldest blocks, unless `free_bytes` are free. Returns False when that is
        enough for now: enough is free, or nothing can be moved.

        The node has pinned all that it has named: each is freed or unpinned here.
        """
        if self._session.busy:
            return False
        try:
            cold = self._session.ask(
                Coldest(0, 0, free_bytes, DEMOTE_BLOCKS_MAX),
                time.monotonic() + ANSWER_TIMEOUT_S,
                _unpin_late,
            )
        except DeadlineError as e:
            log.debug("blocks stay in VRAM for now: %s", e)
            return False
        moved = False
        for batch in _batches(cold):
            stay = self._move(batch)
            self._retire([block for block in batch if block not in stay], stay)
            moved = moved or len(stay) < len(batch)
        return moved

    def _retire(self, leaving: Sequence[ColdBlock], stay: Sequence[ColdBlock]) -> None:
        free = [(block.slot, block.generation) for block in leaving]
        self._session.tell(Retire(0, 0, free))
        self._session.tell(_unpin(stay))

    def _move(self, batch: Sequence[ColdBlock]) -> list[ColdBlock]:
        """Save blocks of one size and namespace below; returns those that must stay for now.

        Raises `InternalError` when the device hangs: slots below may then be written to for
        ever, and stay reserved as long as this process lives.
        """
        keys = [block.key for block in batch]
        granted: list[tuple[ColdBlock, Reservation]] = []
        stay: list[ColdBlock] = []
        try:
            answers = self._store.reserve(keys, batch[0].length, batch[0].namespace_id)
        except PeerError as e:
            log.debug("host memory takes no blocks from VRAM: %s", e)
            self.counts["lost"] += len(batch)
            return stay
        for block, answer in zip(batch, answers, strict=True):
            if isinstance(answer, Reservation):
                granted.append((block, answer))
            elif answer.status is PutStatus.IN_PROGRESS:
                stay.append(block)  # its writer may die: look again later
            elif answer:
                self.counts["already_below"] += 1
            else:
                self.counts["lost"] += 1
        if granted:
            self._copy_and_commit(granted)
        return stay

    def _copy_and_commit(self, granted: Sequence[tuple[ColdBlock, Reservation]]) -> None:
        reservations = [reservation for _, reservation in granted]
        # Until the copies are known to be done the slots are not given back (rule 5), nor what
        # holds them: a device must not find memory unlocked under its copies.
        held = ExitStack()
        held.enter_context(self._holding(reservation.buffer for reservation in reservations))
        self._in_doubt = (granted, held)
        try:
            self._stream.copy(
                [
                    copy
                    for block, reservation in granted
                    for copy in _copies(reservation, self._address + block.offset, block.length)
                ]
            )
            done = wait(self._stream.record(), time.monotonic() + CUDA_IPC_DRAIN_S)
        except DeviceError as e:
            raise InternalError(f"the device refused to copy out of VRAM: {e}") from e
        if not done:
            raise InternalError(f"copies out of VRAM hang for {CUDA_IPC_DRAIN_S} s")
        held.close()
        self._in_doubt = ()
        right, damaged = [], []
        for block, reservation in granted:
            if block.checksum in (0, xxhash.xxh3_64_intdigest(reservation.buffer)):
                right.append((block, reservation))
            else:
                damaged.append(reservation)
        self._give_up(damaged)
        try:
            results = self._store.commit([reservation for _, reservation in right])
        except PeerError as e:
            log.debug("host memory takes no blocks from VRAM: %s", e)
            self.counts["lost"] += len(right)
            return
        for (block, _), result in zip(right, results, strict=True):
            self.counts["demoted" if result else "lost"] += 1
            self.counts["demoted_bytes"] += block.length if result else 0

    def _give_up(self, damaged: Sequence[Reservation]) -> None:
        """Keep nothing of blocks whose bytes are not those that were saved."""
        if damaged:
            log.warning("%d blocks in VRAM were damaged: they are dropped", len(damaged))
            self.counts["lost"] += len(damaged)
            self._store.abort(damaged)


def _copies(reservation: Reservation, source: int, size_bytes: int) -> Iterator[Copy]:
    """Yield the copies of one block, cut where memory below may be page-locked in parts: no copy
    may cross from one part into the next."""
    target = address_of(reservation.buffer)
    at = reservation.slot * SLOT_BYTES_MIN + target % SLOT_BYTES_MIN
    done = 0
    while done < size_bytes:
        part = min(LOCK_PART_BYTES - (at + done) % LOCK_PART_BYTES, size_bytes - done)
        yield target + done, source + done, part
        done += part


def _unpin(blocks: Sequence[ColdBlock]) -> Unpin:
    return Unpin(0, 0, [(block.slot, block.generation) for block in blocks])


def _unpin_late(answer: Answer) -> Unpin:
    assert isinstance(answer, list)
    return _unpin([one for one in answer if isinstance(one, ColdBlock)])


def _batches(cold: Sequence[ColdBlock]) -> Iterator[Sequence[ColdBlock]]:
    """Yield blocks of one size and one namespace, in the order of their coldness."""
    for _, alike in groupby(cold, lambda block: (block.length, block.namespace_id)):
        blocks = list(alike)
        yield from in_batches(blocks, len(blocks), lambda block: block.length, DEMOTE_BYTES_MAX)
