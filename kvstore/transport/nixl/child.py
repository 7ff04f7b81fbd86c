"""A process with a NIXL agent: beside a node it lets its memory be read, beside a client it reads.

    python -P child.py owner FD NAME HEAD_PATH read-only|writable DATA_PATH
    python -P child.py vram-owner FD NAME HEAD_PATH read-only|writable SEGMENT_BYTES MEMORY
    python -P child.py reader FD NAME ARENA_FD [MEMORY]

MEMORY is a device's: its descriptor, its size in bytes, the device's number and its name.

The only place where NIXL is imported. UCX puts hooks into a process, cannot cancel,
and has aborted or crashed on a peer's death: here that costs this process, which its
parent starts again, and killing it is the way to cancel. It talks with its parent
over the socket FD, one msgpack list a packet, and ends with it.

Run as a file and importing nothing of kvstore, but for memory of a device: it starts in half
the time.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import mmap
import os
import resource
import select
import socket
import stat
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgpack

MODULES = ("nixl_cu12._api", "nixl_cu13._api", "nixl._api")
INSTALL = "pip install --no-deps nixl-cu12, or nixl-cu13 beside CUDA 13"
"""Both packages declare torch, with CUDA 3 GB, but need only numpy."""
OK, ERROR, LATE = 0, 1, 2
"""What became of a request. LATE: its READ goes on, and may write for as long as this lives."""
WAY, ADD, READ, REMOVE = 1, 2, 3, 4
HELLO = 0
"""The number of no request: it is answered when the process is ready."""
DRAM, VRAM = "DRAM", "VRAM"
"""NIXL's names for kinds of memory."""
PACKET_BYTES_MAX = 256 << 10
PROBE_BYTES = 4096
IDLE_POLL_S = 0.02
"""Seconds between two calls by which an owner lets UCX work when nobody is about to connect: 0.4%
of a core."""
EAGER_S = 2.0
"""Seconds for which it does so without a pause after somebody asked for the endpoint."""
EAGER_POLL_S = 0.0005
SPIN_S = 0.002
"""Seconds for which a reader polls for the end of a READ without a pause."""
ORPHAN_CHECK_S = 1.0
Agent: TypeAlias = Any
"""NIXL's agent; NIXL has no types."""
Message: TypeAlias = list[Any]
"""A packet of the parent's, as msgpack reads it, or a part of one. The parent is trusted."""


def guard(*, device: bool = False) -> None:
    """Set what UCX reads when it is loaded. An operator's UCX_TLS and UCX_NET_DEVICES stand."""
    environment = os.environ
    if not device:
        # UCX makes a context on every device that it finds: hundreds of MiB of an engine's VRAM
        # for each of these processes.
        environment["CUDA_VISIBLE_DEVICES"] = ""
    environment["UCX_PROTO_EMULATION_ENABLE"] = "n"  # over TCP a READ would be two-sided software
    environment.setdefault("UCX_MODULES", "^efa")  # libefa crashes at exit
    environment.setdefault("UCX_TLS", "^tcp")
    environment.setdefault("UCX_HANDLE_ERRORS", "none")
    environment.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
    environment.setdefault("NIXL_LOG_LEVEL", "WARN")
    environment.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy would start one for each core
    names = environment["UCX_TLS"].lstrip("^").split(",")
    without = environment["UCX_TLS"].startswith("^")
    if without != bool({"tcp", "all"} & set(names)) and "UCX_NET_DEVICES" not in environment:
        raise RuntimeError("UCX_TLS with tcp listens on every interface: set UCX_NET_DEVICES too")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # it would hold the whole segment
    os.dup2(2, 1)  # both libraries print to stdout


def make_agent(name: str) -> Agent:
    for module in MODULES:
        try:
            api = importlib.import_module(module)
        except ModuleNotFoundError:
            continue
        # The progress thread would take a whole core.
        return api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False))
    raise RuntimeError(f"NIXL is not installed: {INSTALL}")


def map_file(fd: int, size_bytes: int, protection: int) -> int:
    """Return the address of a shared mapping; Python's own mmap has no address when it is
    read-only."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
        ctypes.c_long,
    ]
    at = libc.mmap(None, size_bytes, protection, mmap.MAP_SHARED, fd, 0)
    if at is None or at == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "mmap")
    return int(at)


class ChildMemory(NamedTuple):
    """A range of memory in this process, and the kind as which it is registered."""

    address: int
    size_bytes: int
    kind: str = DRAM
    device: int = 0


def device_memory(
    fd: str, size_bytes: str, ordinal: str, name: str, *, writable: bool = False
) -> ChildMemory:
    """Map memory of a device that a descriptor stands for (docs/decisions/0054).

    Where it is a plain file, it is that of a model of a device (kvstore.testing.cuda), and host
    memory: here alone are the two told apart.
    """
    number, size, device_number = int(fd), int(size_bytes), int(ordinal)
    if stat.S_ISREG(os.fstat(number).st_mode):
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        return ChildMemory(map_file(number, size, protection), size)
    sys.path.append(str(Path(__file__).resolve().parents[3]))
    from kvstore.cuda.base import Shared
    from kvstore.cuda.bindings import open_device

    device = open_device(device_number)
    device.enter()  # NIXL takes the context that is current in this thread
    address = device.open(Shared(bytes.fromhex(name), size, number), writable=writable)
    return ChildMemory(address, size, VRAM, device_number)


def register(agent: Agent, regions: Sequence[ChildMemory]) -> None:
    for kind in (DRAM, VRAM):
        of_kind = [(r.address, r.size_bytes, r.device, "") for r in regions if r.kind == kind]
        if of_kind:
            agent.register_memory(of_kind, kind)


class Parent:
    """The parent process. Its death ends this process, which holds nothing worth an orderly end."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._pid = os.getppid()
        self._checked_at = time.monotonic()

    def request(self, timeout_s: float) -> Message | None:
        """Return the next request; None when none came in time."""
        if not self._poll.poll(timeout_s * 1000):
            now = time.monotonic()
            if now >= self._checked_at + ORPHAN_CHECK_S:
                self._checked_at = now
                if os.getppid() != self._pid:
                    os._exit(0)
            return None
        raw = self._socket.recv(PACKET_BYTES_MAX)
        if not raw:
            os._exit(0)
        message: Message = msgpack.unpackb(raw)
        return message

    def answer(self, number: int, status: int, body: object = "") -> None:
        self._socket.send(msgpack.packb([number, status, body]))


# --- beside a node --------------------------------------------------------------


def owner(
    parent: Parent, name: str, head: ChildMemory, data: ChildMemory, probe_at: int, probe: bytes
) -> None:
    """Offer the memory, of which `probe` is read first at `probe_at`, until the parent ends."""
    agent = make_agent(name)
    page = mmap.mmap(-1, PROBE_BYTES)
    if not probe_at:
        page[:] = probe
        probe_at = ctypes.addressof(ctypes.c_char.from_buffer(page))
        register(agent, [head, data, ChildMemory(probe_at, PROBE_BYTES)])
    else:
        register(agent, [head, data])
    way = [name, agent.get_agent_metadata(), head.address, data.address, probe_at, probe]
    if data.kind == VRAM:
        way.append(data.device)
    parent.answer(HELLO, OK)
    eager_until = 0.0
    while True:
        agent.get_new_notifs()  # lets UCX work: accept connections, notice dead ones
        eager = time.monotonic() < eager_until
        request = parent.request(EAGER_POLL_S if eager else IDLE_POLL_S)
        if request is not None:
            eager_until = time.monotonic() + EAGER_S
            parent.answer(request[1], OK, way)


def mapped_file(path: str, *, writable: bool) -> ChildMemory:
    fd = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
    size_bytes = os.fstat(fd).st_size
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    found = ChildMemory(map_file(fd, size_bytes, protection), size_bytes)
    os.close(fd)
    return found


def file_owner(parent: Parent, name: str, head_path: str, access: str, data_path: str) -> None:
    head = mapped_file(head_path, writable=False)
    data = mapped_file(data_path, writable=access == "writable")
    owner(parent, name, head, data, 0, os.urandom(PROBE_BYTES))


def vram_owner(
    parent: Parent, name: str, head_path: str, access: str, segment_bytes: str, *memory: str
) -> None:
    """Run `owner` for VRAM. The probe of docs/decisions/0053, which proves reads of VRAM, lies
    behind the segment."""
    data = device_memory(*memory, writable=access == "writable")
    probe = hashlib.shake_128(bytes.fromhex(memory[-1])).digest(PROBE_BYTES)
    head = mapped_file(head_path, writable=False)
    owner(parent, name, head, data, data.address + int(segment_bytes), probe)


# --- beside a client ------------------------------------------------------------


class Flight(NamedTuple):
    """A READ in flight: its stages follow one another, each when the one before is done."""

    number: int
    deadline: float
    start: Callable[[Message], object]
    stages: list[Message]
    handles: list[object]


class ReadingAgent:
    """Carries out requests of the parent; several READs may be in flight."""

    def __init__(self, parent: Parent, name: str, arena_fd: int, *vram: str) -> None:
        """`vram` is the arena on a device, if there is one: its MEMORY."""
        import numpy

        self._numpy = numpy
        self._parent = parent
        self._agent = make_agent(name)
        size_bytes = os.fstat(arena_fd).st_size
        at = map_file(arena_fd, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE)
        os.close(arena_fd)
        self._arenas = [ChildMemory(at, size_bytes)]
        if vram:
            self._arenas.append(device_memory(*vram, writable=True))
        register(self._agent, self._arenas)
        self._flights: list[Flight] = []
        self._given_up: list[Flight] = []
        """READs that were given up. Their handles are never released, because bytes may still come.
        The parent will kill this process."""

    def run(self) -> None:
        spin_until = 0.0
        while True:
            if not self._flights:
                wait_s = ORPHAN_CHECK_S
            else:
                wait_s = 0.0 if time.monotonic() < spin_until else 0.001
            request = self._parent.request(wait_s)
            if request is not None:
                spin_until = time.monotonic() + SPIN_S
                self._do(*request)
            self._flights = [flight for flight in self._flights if self._goes_on(flight)]

    def _do(self, operation: int, number: int, *arguments: Any) -> None:
        try:
            if operation == READ:
                self._read(number, *arguments)
                return
            (self._add if operation == ADD else self._remove)(*arguments)
        except Exception as e:  # NIXL's own classes; whatever it is, the parent hears of it
            self._parent.answer(number, ERROR, f"{type(e).__name__}: {e}")
        else:
            self._parent.answer(number, OK)

    def _add(self, name: str, metadata: bytes) -> None:
        added = self._agent.add_remote_agent(metadata)
        if (added.decode() if isinstance(added, bytes) else added) != name:
            raise ValueError(f"it is the metadata of {added!r}, not of {name!r}")

    def _remove(self, name: str) -> None:
        self._agent.remove_remote_agent(name)

    def _read(self, number: int, name: str, timeout_s: float, stages: list[Message]) -> None:
        def start(stage: Message) -> object:
            """Begin a READ. `stage` has u64 triples (their address there, offset in the arena,
            length), which device of the owner's they are on (-1: none), and the arena: 0 in host
            memory, 1 in VRAM."""
            pieces, device, arena_number = stage
            arena = self._arenas[arena_number]
            numpy = self._numpy
            table = numpy.frombuffer(pieces, dtype="<u8").reshape(-1, 3)
            zeros = numpy.zeros(len(table), dtype="<u8")
            devices = numpy.full(len(table), max(device, 0), dtype="<u8")
            mine = zeros + numpy.uint64(arena.device)
            at = table[:, 1] + numpy.uint64(arena.address)
            here = numpy.stack((at, table[:, 2], mine), axis=1)
            there = numpy.stack((table[:, 0], table[:, 2], devices), axis=1)
            agent = self._agent
            handle = agent.initialize_xfer(
                "READ",
                agent.get_xfer_descs(here, arena.kind),
                agent.get_xfer_descs(there, DRAM if device < 0 else VRAM),
                name,
            )
            agent.transfer(handle)
            return handle

        flight = Flight(number, time.monotonic() + timeout_s, start, stages, [])
        flight.handles.append(start(stages.pop(0)))
        self._flights.append(flight)

    def _goes_on(self, flight: Flight) -> bool:
        """Return whether it is still in flight; otherwise its end was reported."""
        try:
            state = self._agent.check_xfer_state(flight.handles[-1])
            while state == "DONE" and flight.stages:
                self._agent.release_xfer_handle(flight.handles.pop())
                flight.handles.append(flight.start(flight.stages.pop(0)))
                state = self._agent.check_xfer_state(flight.handles[-1])
            if state == "PROC" and time.monotonic() < flight.deadline:
                return True
            if state == "DONE":
                self._agent.release_xfer_handle(flight.handles.pop())
                self._parent.answer(flight.number, OK)
                return False
            status, reason = (LATE, "") if state == "PROC" else (ERROR, "the READ failed")
        except Exception as e:
            status, reason = ERROR, f"{type(e).__name__}: {e}"
        self._given_up.append(flight)
        self._parent.answer(flight.number, status, reason)
        return False


def main() -> None:
    role, fd, *arguments = sys.argv[1:]
    parent = Parent(int(fd))
    try:
        guard(device=role == "vram-owner" or (role == "reader" and len(arguments) > 2))
        if role == "owner":
            file_owner(parent, *arguments)
        elif role == "vram-owner":
            vram_owner(parent, *arguments)
        else:
            name, arena_fd, *vram = arguments
            reader = ReadingAgent(parent, name, int(arena_fd), *vram)
            parent.answer(HELLO, OK)
            reader.run()
    except Exception as e:
        parent.answer(HELLO, ERROR, f"{type(e).__name__}: {e}")


if __name__ == "__main__":
    try:
        main()
    finally:
        os._exit(1)  # an orderly end crashes in what UCX has loaded
