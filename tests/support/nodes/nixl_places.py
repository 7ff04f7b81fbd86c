"""A node that is read through NIXL on the same host: UCX's cma for payload, TCP on the loopback
to connect (NIXL wants a transport that notices a peer's death, as RDMA's do)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Iterator

import pytest
from contract.cuda import get, put
from contract.transport import PATIENCE_S, SECURITY, Place, room
from vram_parts import StreamedVram

from kvstore.segment.layout import Layout
from kvstore.testing.cuda import ModelCuda
from kvstore.transport.base import Wanted
from kvstore.transport.nixl.process import installed
from kvstore.transport.nixl.transport import NixlTransport
from kvstore.transport.stream.transport import StreamTransport


@contextlib.contextmanager
def same_host() -> Iterator[pytest.MonkeyPatch]:
    """Have UCX choose what it chooses on one host, in this process and in those that it starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_TLS", "tcp,cma,self")
        patch.setenv("UCX_NET_DEVICES", "lo")
        yield patch


def why_not() -> str:
    """Return why these tests cannot run here; empty when they can."""
    if not installed():
        return "NIXL is not installed (scripts/setup installs it where it can)"
    if not _reads_others_memory():
        return "this system lets no process read another one's memory (process_vm_readv)"
    return ""


def _reads_others_memory() -> bool:
    """Tell whether a child of ours could read our memory, as UCX's cma does."""

    class Vector(ctypes.Structure):
        _fields_ = (("at", ctypes.c_void_p), ("size_bytes", ctypes.c_size_t))

    source, target = (ctypes.create_string_buffer(8) for _ in range(2))
    ours, theirs = (Vector(ctypes.addressof(b), 8) for b in (target, source))
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        readv = ctypes.CDLL(None).process_vm_readv
        os._exit(readv(parent, ctypes.byref(ours), 1, ctypes.byref(theirs), 1, 0) != 8)
    return os.waitpid(child, 0)[1] == 0


needs_nixl = pytest.mark.skipif(bool(why_not()), reason=why_not())


def nixl_transport(place: Place | None = None) -> NixlTransport:
    return NixlTransport(StreamTransport(SECURITY), Layout)


class NixlPlace(Place):
    """The node's memory is ready to be read when this is made."""

    def __init__(self, run_dir, **config) -> None:
        super().__init__(run_dir, nixl_transport, nixl="read-only", **config)
        self._saved: list[bytes] = []
        self.wait_until_ready()

    @property
    def sidecar(self):
        return self.node._stream.nixl

    def wait_until_ready(self, timeout_s: float = 3 * PATIENCE_S) -> None:
        give_up_at = time.monotonic() + timeout_s
        while not self.transport.ready(self.word):
            assert time.monotonic() < give_up_at, self.transport._peer(self.word).reason
            time.sleep(0.05)

    def save(self, *args, **options):
        block = super().save(*args, **options)
        self._saved.append(block[0])
        return block

    def tidy(self) -> None:
        """Forget all that was saved, for the next test."""
        self.writer.drop(self._saved)
        self._saved = []


class NixlVramPlace(StreamedVram):
    """As `NixlPlace`, of a node in VRAM over the model of a device."""

    sidecar = NixlPlace.sidecar
    wait_until_ready = NixlPlace.wait_until_ready
    tidy = NixlPlace.tidy

    def __init__(self, run_dir, *, device=None, ready: bool = True, **config) -> None:
        model_dir = run_dir / "model"
        model_dir.mkdir(exist_ok=True)
        super().__init__(run_dir, device or ModelCuda(model_dir), nixl="read-only", **config)
        self.transport = nixl_transport()
        self._saved: list[bytes] = []
        if ready:
            self.wait_until_ready()

    def save(self, *args, **options):
        block = super().save(*args, **options)
        self._saved.append(block[0])
        return block

    def spoil(self, address: int) -> None:
        """Change the byte there, in the node's memory."""
        byte = get(self.device, address, 1)
        put(self.device, address, bytes([byte[0] ^ 1]))

    @staticmethod
    def wanted(block) -> Wanted:
        key, location = block
        return Wanted(key, location, (room(location),))
