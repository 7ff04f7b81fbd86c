"""Keeps a producer's recent blocks in VRAM for readers on its host (docs/decisions/0023)."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial

from kvstore.batches import in_batches
from kvstore.client.base import DeviceReservation, Later
from kvstore.client.nodes.saving.savers import answered, device_items
from kvstore.client.session import BlockSession
from kvstore.core.answers import Answer, Grant, PutAnswer
from kvstore.core.events import (
    NOBODY,
    Abort,
    Clear,
    Commit,
    Event,
    Introduce,
    Request,
    Reserve,
    Stat,
    Touch,
)
from kvstore.cuda.base import CudaDevice, DeviceRange
from kvstore.cuda.checksum import DeviceChecksums
from kvstore.errors import DeadlineError, DeviceError, NodeUnavailableError, PeerError, UsageError
from kvstore.index.open import open_guarded
from kvstore.keys import Namespace
from kvstore.limits import BATCH_KEYS_MAX, SEGMENT_BYTES_MIN
from kvstore.node.config import NodeConfig
from kvstore.node.control.local_session import LocalSession
from kvstore.node.vram import VramNode
from kvstore.system.on_failure import on_failure
from kvstore.types import NO_SPACE, Key, Kind, PutResult, rejected
from kvstore.vram.demoter import Demoter, Holding, nothing_held

TIMEOUT_S = 5.0
"""How long the node may take to answer: it is a thread of this process, and publishes to the
index before it answers a commit."""
NAMES_MAX = 32
RESERVE_PART = 8
"""The demoter keeps one of this many parts of the pool free."""
DRAIN_S = 5.0
FULL = rejected("no space in VRAM: save it to host memory")


def _give_back(answer: Answer) -> Abort:
    """Give back the slots that an answer to `Reserve` grants."""
    assert isinstance(answer, list)
    return Abort(0, 0, [one[:2] for one in answer if isinstance(one, Grant)])


class VramPool:
    """A node in VRAM inside this process, and a thread that moves what is cold to host memory.
    Thread-safe. Implements `kvstore.client.base.Saver`.

    A producer that finds no slot saves to `store` instead: nothing is evicted here as long as host
    memory has room.
    """

    def __init__(
        self,
        store: BlockSession,
        device: CudaDevice,
        size_bytes: int,
        *,
        name: str | None = None,
        signing_key: bytes | None = None,
        takes_saves: bool = False,
        holding: Holding = nothing_held,
        like: NodeConfig | None = None,
    ) -> None:
        """Allocate `size_bytes` of the device. With `takes_saves`, other processes of this user may
        save to it. Other hosts are served as the configuration `like` says.

        `store` is where blocks go down to; the caller closes it after `stop`. Blocks get checksums
        where it verifies all. `holding` is entered while they are copied there. Raises
        `UsageError` (size, name taken), `NoSpaceError` and `DeviceError`.
        """
        if size_bytes < SEGMENT_BYTES_MIN:
            raise UsageError("size_bytes", size_bytes, f"at least {SEGMENT_BYTES_MIN}")
        self.device = device
        self._store = store
        self._lock = threading.Lock()
        self._stopped = False
        config = replace(
            like or NodeConfig(run_dir=store.run_dir),
            run_dir=store.run_dir,
            name=name or f"vram-{os.getpid()}",
            size_bytes=size_bytes,
            key_prefix=store.key_prefix,
            signing_key=signing_key,
            limits=store.limits,
        )
        self._index = open_guarded(
            None if store.embedded else store.url,
            key_prefix=store.key_prefix,
            run_dir=store.run_dir,
            limits=store.limits,
        )
        self._checksums = DeviceChecksums(device) if store.verify == "always" else None
        self._takes_saves = takes_saves
        with on_failure(self._release):
            self.node = self._made(config)
        free, stop = self.node.free, self.node.stop
        with on_failure(self._release), on_failure(free), on_failure(stop):
            self._start(own_name=name is None)
            self._session = self.node.session()
            self.demoter = Demoter(
                self.node.session(),
                self.node.address,
                device,
                store,
                size_bytes // RESERVE_PART,
                holding,
            )
            self.node.on_save = self.demoter.wake

    def _release(self) -> None:
        if self._checksums is not None:
            self._checksums.close()
        self._index.close()

    def _start(self, *, own_name: bool) -> None:
        """Start the node, with `own_name` under the first name that is free: other processes may
        have the same number, in containers that share the run directory, and this one may have
        several pools."""
        for number in itertools.count(2):
            try:
                self.node.start()
                return
            except UsageError as e:
                if not own_name or e.field != "name" or number > NAMES_MAX:
                    raise
            config = replace(self.node.config, name=f"vram-{os.getpid()}-{number}")
            self.node = self._made(config)

    def _made(self, config: NodeConfig) -> VramNode:
        return VramNode(config, self._index.index, self.device, takes_saves=self._takes_saves)

    @contextmanager
    def _asking(self, instead: Request | None = None) -> Iterator[tuple[LocalSession, float]]:
        """Return the session and the deadline for one request.

        While an earlier answer is late no further one is awaited: `instead` is called, and
        `DeadlineError` raised.
        """
        with self._lock:
            if self._session.busy:
                if instead is not None:
                    self._session.tell(instead)
                raise DeadlineError("the node in VRAM has not answered an earlier request")
            yield self._session, time.monotonic() + TIMEOUT_S

    def reserve(
        self, keys: Sequence[Key], size_bytes: int, namespace_id: int
    ) -> list[DeviceReservation | PutResult]:
        """Return a slot per key, or why there is none to be written: exists, in progress, rejected.

        Never raises for a peer's fault: then all are rejected.
        """
        answers: list[DeviceReservation | PutResult] = []
        for batch in in_batches(keys, BATCH_KEYS_MAX):
            answers += self._reserve(batch, size_bytes, namespace_id)
        return answers

    def _reserve(
        self, keys: Sequence[Key], size_bytes: int, namespace_id: int
    ) -> list[DeviceReservation | PutResult]:
        n = len(keys)
        sizes, kinds, zeros = [size_bytes] * n, [Kind.BLOCK] * n, [0] * n
        wanted = Reserve(0, 0, keys, sizes, namespace_id, kinds, zeros, [None] * n, zeros)
        try:
            with self._asking() as (session, deadline):
                answers = session.ask(wanted, deadline, _give_back)
        except PeerError as e:
            return [rejected(str(e))] * n
        return [self._meaning(key, size_bytes, one) for key, one in zip(keys, answers, strict=True)]

    def _meaning(
        self, key: Key, size_bytes: int, answer: PutAnswer
    ) -> DeviceReservation | PutResult:
        if isinstance(answer, PutResult):
            return FULL if answer is NO_SPACE else answer
        slot, generation, offset = answer
        memory = DeviceRange(self.node.address + offset, size_bytes, self.device.ordinal)
        return DeviceReservation(key, memory, self, slot, generation)

    def commit(self, reservations: Sequence[DeviceReservation]) -> list[PutResult]:
        """Seal and publish blocks whose bytes are in place: the work that writes them is done, not
        only queued. Never raises for a peer's fault: then all are rejected, but a node that is only
        late seals them when it can."""
        try:
            items = device_items(reservations, self._checksums)
        except DeviceError as e:
            self.abort(reservations)
            return [rejected(str(e))] * len(reservations)
        sealing = Commit(0, 0, items)
        try:
            with self._asking(instead=sealing) as (session, deadline):
                results = session.ask(sealing, deadline)
        except PeerError as e:
            return [rejected(str(e))] * len(items)
        return results

    def commit_later(self, reservations: Sequence[DeviceReservation]) -> Later[PutResult]:
        """See `Saver.commit_later`."""
        return answered(partial(self.commit, reservations))

    def abort(self, reservations: Sequence[DeviceReservation]) -> None:
        """Give slots back, to which nothing writes any more."""
        items = [(r.slot, r.generation) for r in reservations]
        giving_back = Abort(0, 0, items)
        with suppress(PeerError), self._asking(instead=giving_back) as (session, deadline):
            session.ask(giving_back, deadline)

    def clear(self, namespace_id: int) -> int:
        """Drop every block of a namespace here; returns how many. Raises `PeerError`."""
        with self._asking() as (session, deadline):
            return session.ask(Clear(0, 0, namespace_id), deadline)

    def touch(self, keys: Sequence[Key], *, saved: bool = False) -> None:
        """Say that blocks were read or saved; those of them that are here stay longer."""
        self._tell(Touch(NOBODY, keys, saved=saved))

    def _tell(self, event: Event) -> None:
        with suppress(NodeUnavailableError):
            self.node.tell(event)

    def register_namespaces(self, namespaces: Sequence[Namespace]) -> None:
        """See `BlockStore.register_namespaces`."""
        for namespace in namespaces:
            self._tell(Introduce(0, namespace))

    def stats(self) -> dict[str, int | float]:
        """Return the counters of the node and of the demoter; sizes in bytes. Raises
        `PeerError`."""
        with self._asking() as (session, deadline):
            counters = session.ask(Stat(0, 0), deadline)
        return {**counters, **self.demoter.counts}

    def stop(self, drain_s: float = DRAIN_S) -> None:
        """Move blocks to host memory for at most `drain_s`, and end. Safe to call twice.

        Nothing may be written to slots of the pool any more. VRAM that a copy that hangs may
        use stays until this process ends, that which others have open until they close it.
        """
        if self._stopped:
            return
        self._stopped = True
        ended = self.demoter.stop(drain_s)
        self.node.stop()
        self._store.remote.let_go()  # or it stays because this process has it open
        if self._checksums is not None:
            self._checksums.close()
        if ended:
            self.node.free()
        self._index.close()
