"""Saves to the node of this host that owns VRAM of one's own device (docs/decisions/0055)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import cast

from kvstore.client.base import AnyReservation, DeviceReservation, Reservation, ReserveAnswer
from kvstore.client.nodes.directory import NodeDirectory
from kvstore.client.nodes.saving.link import Grants, NodeLink, Row, SlotMemory
from kvstore.client.nodes.saving.writer import Writer
from kvstore.cuda.base import CudaDevice, DeviceRange
from kvstore.cuda.checksum import DeviceChecksums
from kvstore.cuda.handover import take_over
from kvstore.errors import DeviceError, NodeUnavailableError, PeerError
from kvstore.keys import Namespace
from kvstore.limits import BATCH_KEYS_MAX, CUDA_IPC_OPEN_S, NAMESPACE_BYTES_MAX
from kvstore.nodedir import Announcement, NodeDir
from kvstore.protocol.control_replies import InvalidReplyError
from kvstore.protocol.control_requests import Wants
from kvstore.segment.attached import AttachedShm
from kvstore.transport.cuda_memory import NAME, DeviceAddress
from kvstore.types import Key, PutResult, rejected


class DeviceSlots:
    """Implements `SlotMemory` by VRAM of a node of this host. It stays mapped until `close`: what a
    kernel writes to has no owner that ends."""

    shm: AttachedShm | None = None

    def __init__(
        self,
        announcement: Announcement,
        directory: NodeDir,
        device: CudaDevice,
        checksums: DeviceChecksums | None,
    ) -> None:
        """Raises `DeviceError` and `OSError`."""
        self.is_open = True
        self._device = device
        self._checksums = checksums
        self._room = announcement.size_bytes
        address = DeviceAddress.parse(announcement.transports[NAME])
        shared = take_over(directory.vram_socket, directory.owner(), CUDA_IPC_OPEN_S)
        try:
            if address is None or shared.name != address.name:
                raise DeviceError("the node has been started anew")
            self._address: int | None = device.open(shared, writable=True)
        finally:
            os.close(shared.fd)

    def place(
        self, saver: NodeLink, wants: Wants, rows: Sequence[Row], answers: list[ReserveAnswer]
    ) -> object | None:
        """See `SlotMemory.place`."""
        address = self._address
        if address is None:
            raise InvalidReplyError("an answer of a node that is gone")
        for (i, slot, generation, offset), size_bytes in zip(
            rows, wants.of([row[0] for row in rows]).each_size(), strict=True
        ):
            if offset + size_bytes > self._room:
                raise InvalidReplyError("a slot outside the segment")
            memory = DeviceRange(address + offset, size_bytes, self._device.ordinal)
            granted = DeviceReservation(wants.keys[i], memory, saver, slot, generation)
            answers[i] = cast("Reservation", granted)  # `VramSaver.reserve` says what it is
        return None

    def checksums(self, reservations: Sequence[AnyReservation]) -> Sequence[int]:
        assert self._checksums is not None, "who saves with checksums can make them"
        ours = [r.buffer for r in reservations if isinstance(r, DeviceReservation)]
        return self._checksums.of([[(one.address, one.size_bytes)] for one in ours])

    def retire(self) -> None:
        self.is_open = False

    def close(self) -> None:
        self.is_open = False
        address, self._address = self._address, None
        if address is not None:
            with suppress(DeviceError):
                self._device.close(address)


class DeviceFinder:
    """Implements `NodeFinder` by the nodes of this host that own VRAM of `device`."""

    nobody = "no node of this host owns VRAM of this device"

    def __init__(
        self, nodes: NodeDirectory, device: CudaDevice, checksums: DeviceChecksums | None
    ) -> None:
        self._nodes = nodes
        self._device = device
        self._checksums = checksums

    def find(self) -> Sequence[tuple[Announcement, NodeDir]]:
        return [one for one in self._nodes.named_ours() if self._is_right(one[0])]

    def _is_right(self, announcement: Announcement) -> bool:
        address = DeviceAddress.parse(announcement.transports.get(NAME, ""))
        return address is not None and address.saves and address.uuid == self._device.uuid

    def open(self, announcement: Announcement, directory: NodeDir) -> SlotMemory:
        return DeviceSlots(announcement, directory, self._device, self._checksums)


class VramSaver:
    """Reserves for one device; commits go to who granted it (savers.py). Thread-safe.

    Finds the node when it is first needed, and its next start when it is gone. Who finds
    none, or no slot there, saves to host memory.
    """

    def __init__(
        self,
        nodes: NodeDirectory,
        device: CudaDevice,
        timeout_s: float,
        *,
        checksums: bool = False,
    ) -> None:
        """With `checksums` blocks are saved with theirs."""
        self._checksums = DeviceChecksums(device) if checksums else None
        self._writer = Writer(
            nodes,
            name=None,
            timeout_s=timeout_s,
            checksums=checksums,
            finder=DeviceFinder(nodes, device, self._checksums),
        )

    def _link(self) -> NodeLink:
        """Return the link to the node. Raises `NodeUnavailableError` when there is none."""
        self._writer.let_go()
        return self._writer.link()

    def found(self) -> bool:
        """Return whether there is such a node now."""
        try:
            self._link()
        except NodeUnavailableError:
            return False
        return True

    def reserve(
        self, keys: Sequence[Key], size_bytes: int, namespace_id: int
    ) -> list[DeviceReservation | PutResult]:
        """Return a slot per key, or why there is none to be written: exists, in progress, rejected.

        Never raises for a peer's fault: then all are rejected.
        """
        if not keys:
            return []
        granted, done = Grants(), False
        try:
            later = self._link().reserve_later(Wants(keys, size_bytes), namespace_id, granted)
            answers = cast("list[DeviceReservation | PutResult]", later())
            done = True
            return answers
        except PeerError as e:
            return [rejected(str(e))] * len(keys)
        finally:
            if not done:
                granted.close()

    def touch(self, keys: Sequence[Key], *, saved: bool = False) -> None:
        """Say that blocks were read or saved; those of them that are there stay longer."""
        if self._writer.linked is not None:
            run = [keys[:BATCH_KEYS_MAX]]
            self._writer.touch(() if saved else run, run if saved else ())

    def clear(self, namespace_id: int) -> int:
        """Drop every block of a namespace there; returns how many. Raises `PeerError`."""
        return self._writer.clear(namespace_id) if self.found() else 0

    def register_namespaces(self, namespaces: Iterable[Namespace]) -> None:
        """See `BlockStore.register_namespaces`."""
        for namespace in namespaces:
            raw = namespace.canonical()
            if len(raw) <= NAMESPACE_BYTES_MAX:
                self._writer.introductions[namespace.id] = raw

    def stop(self) -> None:
        """Nothing is written to slots any more: all are given back. Safe to call twice."""
        self._writer.close()
        if self._checksums is not None:
            self._checksums.close()
