"""Opens the memory of nodes in VRAM in this process: once each, for as long as it is used."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from kvstore.cuda.base import SHARED_NAME_BYTES, CudaDevice, DeviceRange, Shared, Stream
from kvstore.cuda.probe import PROBE_EVERY_S, read_probe
from kvstore.errors import DeviceError
from kvstore.limits import CUDA_IPC_NODES_MAX, CUDA_IPC_OPEN_S
from kvstore.nodedir import Announcement
from kvstore.system.on_failure import on_failure
from kvstore.transport.registry import CUDA_IPC
from kvstore.types import Key, Location

NAME = CUDA_IPC
SAVES = "/saves"
MOMENT_S = 0.001
"""The shortest time-out: a socket with none fails without waiting."""


class DeviceAddress(NamedTuple):
    """The address that a node in VRAM announces: `UUID/NAME`, the device's and the memory's, and
    `/saves` where other processes may save to it."""

    uuid: str
    name: bytes
    saves: bool = False

    def __str__(self) -> str:
        return f"{self.uuid}/{self.name.hex()}{SAVES if self.saves else ''}"

    @classmethod
    def parse(cls, text: str) -> DeviceAddress | None:
        uuid, _, name = text.removesuffix(SAVES).rpartition("/")
        try:
            raw = bytes.fromhex(name)
        except ValueError:
            return None
        return (
            cls(uuid, raw, text.endswith(SAVES)) if uuid and len(raw) == SHARED_NAME_BYTES else None
        )


class DevicePlace(NamedTuple):
    """A sealed block: where its payload begins in the segment, and what its header says."""

    offset: int
    kind: int
    meta_length: int
    token: tuple[int, bytes] | None
    """The slot and its header as it was located, with which `Heads.same` compares; None where no
    header can be read here."""
    checksum: int = 0
    """The checksum in its header; 0: it was saved without one."""


class Heads(Protocol):
    """The headers of one start of a node of this host. Thread-safe."""

    def locate(self, key: Key, location: Location) -> DevicePlace | None:
        """Return where the block is; None unless its header is SEALED and says what the location
        does."""
        ...

    def same(self, place: DevicePlace) -> bool:
        """Return whether the header is what it was when it was located."""
        ...

    def alive(self) -> bool:
        """Return whether the node's process lives."""
        ...

    def memory(self, timeout_s: float) -> Shared:
        """Return the memory that the node hands over; its descriptor is the caller's to close.
        Raises `OSError` when it does not within `timeout_s`."""
        ...

    def close(self) -> None: ...


class Opened:
    """The memory of one start of a node, open in this process."""

    __slots__ = ("address", "heads", "probed_at", "retired", "users")

    def __init__(self, heads: Heads, address: int) -> None:
        self.heads = heads
        self.address = address
        self.users = 0
        """Reads and views that use it; the lock of `OpenMemory` guards it."""
        self.retired = False
        self.probed_at = -math.inf


class DeviceBlock:
    """A block in VRAM, in place: for kernels and copies of the caller's own.

    Queue them, wait until they are done, then ask `valid` (rule 4). Until it is closed the node's
    memory stays open here; when it is forgotten, until memory of a node is next opened or swept.
    """

    def __init__(self, memory: OpenMemory, opened: Opened, place: DevicePlace, size: int) -> None:
        address = opened.address + place.offset
        self.memory = DeviceRange(address, size, memory.device.ordinal)
        """Read-only memory, valid as long as the block."""
        self.checksum = place.checksum
        self._open = memory
        self._opened: Opened | None = opened
        self._place = place

    def valid(self) -> bool:
        """Return True when all that was read from `memory` so far is the block of this key."""
        opened = self._opened
        return opened is not None and opened.heads.alive() and opened.heads.same(self._place)

    def close(self) -> None:
        """Close it. Safe to call twice."""
        opened, self._opened = self._opened, None
        if opened is not None:
            self._open.done_with(opened)

    def __del__(self) -> None:
        if self._opened is not None:
            self._open.forgotten.append(self._opened)

    def __enter__(self) -> DeviceBlock:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class OpenMemory:
    """The memory of nodes that is open in this process, at most `CUDA_IPC_NODES_MAX` of them.

    Thread-safe. `attach` finds the headers of a node, None when it is out of reach.
    """

    def __init__(
        self,
        device: CudaDevice,
        attach: Callable[[Announcement], Heads | None],
        way: str = NAME,
    ) -> None:
        """Make it without open memory. `way` is the name under which nodes announce their
        memory."""
        self.device = device
        self._attach = attach
        self._way = way
        self._lock = threading.Lock()
        self._opened: dict[tuple[int, int], Opened] = {}
        """Open memory by node id and epoch, that used last at the end."""
        self.forgotten: deque[Opened] = deque()
        """Memory whose users ended without a call. The garbage collector appends to it, perhaps
        inside the lock; the next holder of the lock empties it."""
        self._closed = False
        self._stream: Stream | None = None
        """The stream for probes."""

    def use(self, node: Announcement, deadline: float = math.inf) -> Opened | None:
        """Return the node's memory, opened now if it is not yet; it stays open until `done_with`.

        None when it is out of reach: the node is not on this host or has no VRAM, or all the memory
        that may be open is in use. Raises `DeviceError` when the node does not hand it over, by
        `deadline` (seconds of `time.monotonic`) and within `CUDA_IPC_OPEN_S`, when the driver does
        not open it, or when what is read there is not what the node has written: that is looked at
        now, and every `PROBE_EVERY_S`.
        """
        address = DeviceAddress.parse(node.transports.get(self._way, ""))
        with self._lock:
            self._recall()
            if self._closed or address is None:
                return None
            known = (node.node_id, node.epoch)
            opened = self._opened.pop(known, None) or self._open(node, address, deadline)
            if opened is not None:
                with on_failure(self._retire, opened):
                    self._probe(opened, node, address)
                self._opened[known] = opened
                opened.users += 1
            return opened

    def _probe(self, opened: Opened, node: Announcement, address: DeviceAddress) -> None:
        now = time.monotonic()
        if now < opened.probed_at + PROBE_EVERY_S:
            return
        self._stream = self._stream or self.device.stream()
        read_probe(self._stream, opened.address + node.size_bytes, address.name)
        opened.probed_at = now

    def _open(self, node: Announcement, address: DeviceAddress, deadline: float) -> Opened | None:
        if len(self._opened) >= CUDA_IPC_NODES_MAX:
            idle = next((k for k, o in self._opened.items() if o.users == 0), None)
            if idle is None:
                return None
            self._close(self._opened.pop(idle))
        if not self.device.reaches(address.uuid):
            raise DeviceError(f"no peer access from device {self.device.ordinal} to {address.uuid}")
        heads = self._attach(node)
        if heads is None:
            return None
        with on_failure(heads.close):
            return Opened(heads, self._mapped(heads, address, deadline))

    def _mapped(self, heads: Heads, address: DeviceAddress, deadline: float) -> int:
        timeout_s = min(max(deadline - time.monotonic(), MOMENT_S), CUDA_IPC_OPEN_S)
        try:
            shared = heads.memory(timeout_s)
        except OSError as e:
            raise DeviceError(f"the node does not hand its memory over: {e}") from e
        try:
            if shared.name != address.name:
                raise DeviceError("the node has been started anew")
            return self.device.open(shared)
        finally:
            if shared.fd >= 0:
                os.close(shared.fd)

    def done_with(self, opened: Opened) -> None:
        """End one `use` of it."""
        with self._lock:
            self._ended(opened)

    def _ended(self, opened: Opened) -> None:
        opened.users -= 1
        if opened.retired and opened.users == 0:
            self._close(opened)

    def _recall(self) -> None:
        """End the uses that were forgotten."""
        with contextlib.suppress(IndexError):
            while True:
                self._ended(self.forgotten.popleft())

    def starts(self) -> frozenset[tuple[int, int]]:
        """Return the (node id, epoch) of each node whose memory is open here."""
        with self._lock:
            return frozenset(self._opened)

    def sweep(self) -> None:
        """Close the memory of nodes that have ended."""
        with self._lock:
            self._recall()
            dead = [known for known, opened in self._opened.items() if not opened.heads.alive()]
            for known in dead:
                self._retire(self._opened.pop(known))

    def _retire(self, opened: Opened) -> None:
        opened.retired = True
        if opened.users == 0:
            self._close(opened)

    def _close(self, opened: Opened) -> None:
        try:
            self.device.close(opened.address)
        except DeviceError:
            pass  # the context is lost, and all that was mapped with it
        finally:
            opened.heads.close()

    def view(self, node: Announcement, key: Key, location: Location) -> DeviceBlock | None:
        """Return the block in place; None when it is not there (any more). Raises `DeviceError`, as
        `use` does."""
        opened = self.use(node)
        if opened is None:
            return None
        right = location.epoch == node.epoch
        place = opened.heads.locate(key, location) if right else None
        if place is None:
            self.done_with(opened)
            return None
        return DeviceBlock(self, opened, place, location.length)

    def shut(self) -> None:
        """Open nothing any more."""
        with self._lock:
            self._closed = True

    def close(self) -> None:
        """Open nothing any more, and close each memory once nobody uses it."""
        self.shut()
        with self._lock:
            self._recall()
            for known in list(self._opened):
                self._retire(self._opened.pop(known))
            stream, self._stream = self._stream, None
        if stream is not None:
            with contextlib.suppress(DeviceError):
                stream.close()
