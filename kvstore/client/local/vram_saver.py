"""Saves to the node of this host that owns VRAM of one's own device (docs/decisions/0055)."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from kvstore.batches import in_batches, picked
from kvstore.client.base import DeviceReservation, Later
from kvstore.client.local.control import ControlChannel
from kvstore.client.local.link import Grants, Holdings
from kvstore.client.local.writer import NODE_SEARCH_S
from kvstore.client.savers import answered, device_items
from kvstore.cuda.base import CudaDevice, DeviceRange
from kvstore.cuda.checksum import DeviceChecksums
from kvstore.cuda.handover import take_over
from kvstore.errors import DeviceError, PeerError
from kvstore.keys import Namespace
from kvstore.limits import BATCH_KEYS_MAX, CUDA_IPC_OPEN_S, NAMESPACE_BYTES_MAX
from kvstore.nodedir import Announcement, NodeDir, announced, node_dirs
from kvstore.protocol.control import Op, join_keys
from kvstore.protocol.control_replies import InvalidReplyError, grants, outcomes, pins, whole
from kvstore.protocol.control_requests import Wants, reserve_arguments
from kvstore.record import has_checksum, slot_of
from kvstore.system.fork import in_each_child
from kvstore.system.on_failure import on_failure
from kvstore.transport.cuda_memory import NAME, DeviceAddress
from kvstore.types import EXISTS, Key, PutResult, rejected

NOBODY = rejected("no node of this host owns VRAM of this device")
GONE = rejected("the node in VRAM that granted it is gone")


class VramSaver:
    """Reserves for one device; commits go to who granted it (client/savers.py). Thread-safe.

    Finds the node when it is first needed, and its next start when it is gone. Who finds
    none, or no slot there, saves to host memory.
    """

    def __init__(
        self,
        run_dir: Path,
        key_prefix: str,
        index: str,
        device: CudaDevice,
        timeout_s: float,
        *,
        checksums: bool = False,
    ) -> None:
        """`index` is what the nodes call the index that they publish to. With `checksums` blocks
        are saved with theirs."""
        self._run_dir = run_dir
        self._key_prefix = key_prefix
        self._index = index
        self._device = device
        self._timeout_s = timeout_s
        self._checksums = DeviceChecksums(device) if checksums else None
        self._lock = threading.RLock()
        in_each_child(self)
        self._start: _Start | None = None
        self._search_at = 0.0
        self._closed = False
        self._namespaces: dict[int, bytes] = {}

    def found(self) -> bool:
        """Return whether there is such a node now."""
        return self._found() is not None

    def _found(self) -> _Start | None:
        with self._lock:
            start = self._start
            if start is not None and not start.gone():
                return start
            if start is not None:
                start.retire()
                self._start = None
            if self._closed or time.monotonic() < self._search_at:
                return None
            self._start = self._look()
            if self._start is None:
                self._search_at = time.monotonic() + NODE_SEARCH_S
            return self._start

    def _look(self) -> _Start | None:
        for word, directory in announced(node_dirs(self._run_dir), self._key_prefix):
            if word.index != self._index:
                continue
            address = DeviceAddress.parse(word.transports.get(NAME, ""))
            right = address is not None and address.saves and address.uuid == self._device.uuid
            if address is None or not right or not directory.alive() or not directory.is_ours():
                continue
            with suppress(DeviceError, OSError):
                return _Start(
                    word, directory, address, self._device, self._timeout_s, self._checksums
                )
        return None

    # --- saving -----------------------------------------------------------------

    def reserve(
        self, keys: Sequence[Key], size_bytes: int, namespace_id: int
    ) -> list[DeviceReservation | PutResult]:
        """Return a slot per key, or why there is none to be written: exists, in progress, rejected.

        Never raises for a peer's fault: then all are rejected.
        """
        granted, done = Grants(), False
        try:
            answers: list[DeviceReservation | PutResult] = []
            for batch in in_batches(keys, BATCH_KEYS_MAX):
                answers += self._reserve(batch, size_bytes, namespace_id, granted)
            done = True
            return answers
        finally:
            if not done:
                granted.close()

    def _reserve(
        self, keys: Sequence[Key], size_bytes: int, namespace_id: int, granted: Grants
    ) -> list[DeviceReservation | PutResult]:
        start = self._found()
        if start is None:
            return [NOBODY] * len(keys)
        batch = Grants()
        granted.note(batch.close)
        try:
            answers = start.reserve(keys, size_bytes, namespace_id, batch)
        except PeerError as e:
            batch.close()  # a request before the one that failed may have been granted slots
            return [rejected(str(e))] * len(keys)
        raw = self._namespaces.get(namespace_id)
        if raw is not None:
            start.introduce(namespace_id, raw)
        return answers

    # --- the rest ---------------------------------------------------------------

    def touch(self, keys: Sequence[Key]) -> None:
        """Say that blocks were used; those of them that are there stay longer."""
        start = self._start
        if start is not None:
            start.control.say(Op.TOUCH, join_keys(keys[:BATCH_KEYS_MAX]))

    def clear(self, namespace_id: int) -> int:
        """Drop every block of a namespace there; returns how many. Raises `PeerError`."""
        start = self._found()
        if start is None:
            return 0
        dropped: int = start.control.request(Op.CLEAR, namespace_id, accept=whole)
        return dropped

    def register_namespaces(self, namespaces: Iterable[Namespace]) -> None:
        """See `BlockStore.register_namespaces`."""
        for namespace in namespaces:
            raw = namespace.canonical()
            if len(raw) <= NAMESPACE_BYTES_MAX:
                self._namespaces[namespace.id] = raw

    def after_fork_in_child(self) -> None:
        self._lock = threading.RLock()  # a thread of the parent may have had it

    def stop(self) -> None:
        """Nothing is written to slots any more: all are given back. Safe to call twice."""
        with self._lock:
            self._closed = True
            start, self._start = self._start, None
        if start is not None:
            start.end()
        if self._checksums is not None:
            self._checksums.close()


class _Start:
    """One start of the node, with its memory mapped for writing: the saver of what it grants."""

    def __init__(
        self,
        announcement: Announcement,
        directory: NodeDir,
        address: DeviceAddress,
        device: CudaDevice,
        timeout_s: float,
        checksums: DeviceChecksums | None,
    ) -> None:
        """Raises `DeviceError` and `OSError`."""
        self._checksums = checksums
        self._announcement = announcement
        self._directory = directory
        self._device = device
        shared = take_over(directory.vram_socket, directory.owner(), CUDA_IPC_OPEN_S)
        try:
            if shared.name != address.name:
                raise DeviceError("the node has been started anew")
            self._address: int | None = device.open(shared, writable=True)
        finally:
            os.close(shared.fd)
        self._lock = threading.RLock()
        in_each_child(self)
        self._held = Holdings()
        self._retired = False
        self._introduced: set[int] = set()
        self.control = ControlChannel(
            directory, (announcement.node_id, announcement.epoch), timeout_s, self._held.said
        )

    def gone(self) -> bool:
        return not self._directory.lives_as(self._announcement)

    def reserve(
        self, keys: Sequence[Key], size_bytes: int, namespace_id: int, granted: Grants
    ) -> list[DeviceReservation | PutResult]:
        answers = self._ask(keys, size_bytes, namespace_id, granted)
        there = [i for i, answer in enumerate(answers) if answer == EXISTS]
        if self._checksums is None or not there:
            return answers
        with on_failure(self.control.doubt):  # a pin for looking may be left there
            which = self._without_checksum(keys, there)
            if which:
                dropped = picked(keys, which)
                self.control.request(Op.DROP, join_keys(dropped))
                again = self._ask(dropped, size_bytes, namespace_id, granted)
                for i, answer in zip(which, again, strict=True):
                    answers[i] = answer
        return answers

    def _ask(
        self, keys: Sequence[Key], size_bytes: int, namespace_id: int, granted: Grants
    ) -> list[DeviceReservation | PutResult]:
        arguments = reserve_arguments(Wants(keys, size_bytes), namespace_id, checksums=False)
        accept = partial(self._granted, granted, keys, size_bytes)
        granted.asked.append(self.control)
        ticket = self.control.post(Op.RESERVE, *arguments, accept=accept)
        try:
            answers: list[DeviceReservation | PutResult] = self.control.collect(ticket)
        finally:
            if ticket.done:
                granted.asked.remove(self.control)
        return answers

    def _without_checksum(self, keys: Sequence[Key], there: Sequence[int]) -> list[int]:
        """Return the numbers of blocks that exist without a checksum: who verifies does not read
        them. What is pinned to be looked at is not held: the next HELLO takes back such a pin."""
        records = self.control.request(Op.PIN, join_keys(picked(keys, there)), accept=pins)
        pinned = [(i, r) for i, r in zip(there, records, strict=False) if isinstance(r, bytes)]
        self.control.request(Op.UNPIN, [slot_of(record) for _, record in pinned])
        return [i for i, record in pinned if not has_checksum(record)]

    def _granted(
        self, granted: Grants, keys: Sequence[Key], size_bytes: int, raw: object
    ) -> list[DeviceReservation | PutResult]:
        """Return what the node's answer means; from here on the slots count as held."""
        answers: list[DeviceReservation | PutResult] = []
        address, room = self._address, self._announcement.size_bytes
        if address is None:
            raise InvalidReplyError("an answer of a node that is gone")
        for key, answer in zip(keys, grants(len(keys), raw), strict=True):
            if isinstance(answer, PutResult):
                answers.append(answer)
                continue
            slot, generation, offset = answer
            if offset + size_bytes > room:
                raise InvalidReplyError("a slot outside the segment")
            memory = DeviceRange(address + offset, size_bytes, self._device.ordinal)
            answers.append(DeviceReservation(key, memory, self, slot, generation))
        ours = [one for one in answers if isinstance(one, DeviceReservation)]
        slots = [(one.slot, one.generation) for one in ours]
        granted.note(partial(self._give_back, slots))
        self._held.reserve(slots, None)  # what a kernel writes to has no owner that ends
        if granted.over:
            self._held.release(slots)
        return answers

    def introduce(self, namespace_id: int, raw: bytes) -> None:
        """Tell the node once what the id stands for."""
        if namespace_id not in self._introduced and self.control.say(
            Op.NAMESPACE, namespace_id, raw
        ):
            self._introduced.add(namespace_id)

    def commit_later(self, reservations: Sequence[DeviceReservation]) -> Later[PutResult]:
        """See `Saver.commit_later`. The work that writes the bytes is done, not only queued."""
        if len(reservations) > BATCH_KEYS_MAX:
            return answered(partial(self._commit, reservations))
        try:
            items = device_items(reservations, self._checksums)
        except DeviceError as e:
            self.abort(reservations)
            results = [rejected(str(e))] * len(reservations)
            return lambda: results
        release = partial(self._held.release, [item[:2] for item in items])
        if self._retired:
            release()
            self._settle()
            return lambda: [GONE] * len(items)
        accept = partial(outcomes, len(items))
        ticket = self.control.post(Op.COMMIT, items, accept=accept, before=release)
        return partial(self.control.collect, ticket)

    def _commit(self, reservations: Sequence[DeviceReservation]) -> list[PutResult]:
        results: list[PutResult] = []
        for batch in in_batches(reservations, BATCH_KEYS_MAX):
            results += self.commit_later(batch)()
        return results

    def abort(self, reservations: Sequence[DeviceReservation]) -> None:
        """See `Saver.abort`."""
        self._give_back([(r.slot, r.generation) for r in reservations])
        self._settle()

    def _give_back(self, handles: Sequence[tuple[int, int]]) -> None:
        for batch in in_batches(self._held.still_reserved(handles), BATCH_KEYS_MAX):
            release = partial(self._held.release, batch)
            with suppress(PeerError):
                if not self._retired:
                    self.control.request(Op.ABORT, batch, before=release)
            if self._held.still_reserved(batch):
                release()
                self.control.doubt()

    def retire(self) -> None:
        """The node is gone; its memory stays while something may still be written there."""
        self.control.retire()
        self._retired = True
        self._settle()

    def _settle(self) -> None:
        if self._retired and not self._held:
            self.end()

    def end(self) -> None:
        """Say goodbye, and unmap the memory: nothing is written there any more."""
        self._retired = True
        self.control.close()
        with self._lock:
            address, self._address = self._address, None
        if address is not None:
            with suppress(DeviceError):
                self._device.close(address)

    def after_fork_in_child(self) -> None:
        self._lock = threading.RLock()  # a thread of the parent may have had it
