"""Reads from a node on another host by RDMA, through NIXL: experimental.

A node is read like this only after a first READ of known bytes from it was right.
That is tried in the background; until then, and for a while after anything went
wrong, the node is not `ready` and another transport reads from it. NIXL itself runs in a
process of its own (reader.py): no peer can crash or hang this one.
"""

from __future__ import annotations

import logging
import os
import secrets
import struct
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from kvstore.circuit_breaker import Breaker
from kvstore.cuda.base import CudaDevice
from kvstore.errors import (
    DeadlineError,
    DeviceError,
    InternalError,
    NodeUnavailableError,
    PeerError,
)
from kvstore.limits import NIXL_PEERS_MAX, NIXL_QUARANTINED_MAX, NIXL_REQUEST_BYTES_MAX
from kvstore.nodedir import Announcement
from kvstore.protocol.nixl import PROBE_BYTES, Endpoint
from kvstore.protocol.stream import WireError
from kvstore.system.fork import in_each_child
from kvstore.system.on_failure import on_failure
from kvstore.transport.base import Outcome, Read, Transport, Wanted, check_wanted
from kvstore.transport.nixl.process import START_TIMEOUT_S, installed, wait_for
from kvstore.transport.nixl.reader import NixlReader, Stage
from kvstore.transport.nixl.transfer import NixlBatch, RemoteLayout
from kvstore.transport.nixl.vram import VramArena, VramWay
from kvstore.transport.proving import ProvedPeer, say_failed
from kvstore.transport.stream.requests import nixl_endpoint
from kvstore.transport.stream.transport import StreamTransport

log = logging.getLogger("kvstore.nixl")

NAME = "nixl"
PROBE_TIMEOUT_S = 3.0
"""Time for the endpoint and the first READ; a connection over RDMA takes up to 0.1 s."""
START_RETRY_AFTER_S = 1.0
START_RETRY_AFTER_MAX_S = 300.0
"""Each start costs a second of a core, for nothing where there is no RDMA."""


def agent_prefix(node_id: int, epoch: int) -> str:
    """Return what the names of the agents of one start of a node begin with."""
    return f"{node_id:016x}#{epoch}."


class _Peer(ProvedPeer):
    """The reader and endpoint by which one start of one node was read; None: it was not."""

    proved: tuple[NixlReader, Endpoint] | None = None

    def usable(self) -> tuple[NixlReader, Endpoint] | None:
        proved = self.proved
        return proved if proved is not None and proved[0].usable else None


class NixlTransport(Transport):
    """Implements `Transport`. `stream` brings the nodes' endpoints; `layout_of` says how the
    segment of an announced node is divided."""

    name = NAME

    def __init__(
        self,
        stream: StreamTransport,
        layout_of: Callable[[Announcement], RemoteLayout],
        device: CudaDevice | None = None,
    ) -> None:
        """Make the transport. With a `device`, blocks that are wanted there arrive there, where
        that is possible."""
        self._vram = None if device is None else VramWay(device)
        self._stream = stream
        self._layout_of = layout_of
        self._installed = installed()
        self._begin()
        in_each_child(self)
        self._starts = Breaker(
            failures_max=1,
            retry_after_s=START_RETRY_AFTER_S,
            retry_after_max_s=START_RETRY_AFTER_MAX_S,
        )
        self._closed = False

    @property
    def to_vram(self) -> bool:
        """Return whether blocks that are wanted in VRAM arrive there now."""
        reader = self._reader
        arena = None if reader is None or not reader.usable else reader.vram
        return arena is not None and arena.proved

    @property
    def why_not_to_vram(self) -> str:
        """Return why no block comes to the memory of a device; empty when blocks do."""
        return "it is not wanted" if self._vram is None else self._vram.reason

    def after_fork_in_child(self) -> None:
        """Begin anew: the reader is the parent's, and so are its answers and its device."""
        self._begin()
        self._vram = None

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._starting = threading.Lock()
        self._peers: dict[int, _Peer] = {}
        self._reader: NixlReader | None = None
        self._readers: set[NixlReader] = set()
        """All readers that may still live, the retired ones included."""

    def usable(self, node: Announcement) -> bool:
        """Return whether it is worth trying: the node says so, NIXL is here, and it can be
        asked."""
        return self._installed and NAME in node.transports and self._stream.usable(node)

    def ready(self, node: Announcement) -> bool:
        """Return whether a read can begin now; if not, it is tried in the background when it is
        time."""
        peer = self._peer(node)
        proved = peer.usable()
        if proved is None or (self._vram is not None and self._vram.due(proved[0].vram)):
            self._prove_soon(peer, node)
        return proved is not None

    def read(
        self, node: Announcement, wanted: Sequence[Wanted], deadline: float
    ) -> Sequence[Outcome]:
        """See `Transport.read`. Waits for a first READ that is being tried."""
        check_wanted(wanted)
        if not wanted:
            return []
        if not self.usable(node):
            reason = f"node {node.name} offers no NIXL that this client may use"
            return [Outcome(Read.FAILED, reason)] * len(wanted)
        peer = self._peer(node)
        proved = peer.usable()
        if proved is None and (proving := self._prove_soon(peer, node)) is not None:
            proving.wait(max(deadline - time.monotonic(), 0.0))
            proved = peer.usable()
        if proved is None or time.monotonic() >= deadline:
            reason = "timed out" if proved is not None else peer.reason
            return [Outcome(Read.FAILED, reason)] * len(wanted)
        batch = NixlBatch(*proved, self._layout_of(node), wanted, deadline, self._vram)
        return batch.read(lambda reason: self._failed(peer, node, reason))

    @property
    def quarantined(self) -> int:
        """Return the number of arenas that late bytes may still come into."""
        with self._lock:
            self._readers = {reader for reader in self._readers if reader.alive}
            return sum(not reader.usable for reader in self._readers)

    # --- peers --------------------------------------------------------------

    def _peer(self, node: Announcement) -> _Peer:
        with self._lock:
            peer = self._peers.get(node.node_id)
            if peer is None or peer.epoch != node.epoch:
                if peer is None and len(self._peers) >= NIXL_PEERS_MAX:
                    self._peers.pop(next(iter(self._peers)))
                peer = self._peers[node.node_id] = _Peer(node.epoch, self._lock)
            return peer

    def _prove_soon(self, peer: _Peer, node: Announcement) -> threading.Event | None:
        """Return the attempt to prove it that is under way, or start one when it is time; else
        None."""
        prove, give_up = partial(self._prove, peer, node), partial(self._failed, peer, node)
        with self._lock:
            if self._closed:
                return None
            return peer.prove_soon(prove, give_up, "kvstore-nixl-probe")

    def _prove(self, peer: _Peer, node: Announcement) -> None:
        # Of a peer that is read, the device's memory alone is to be tried.
        reader, endpoint = peer.usable() or self._proved(node)
        self._prove_vram(reader, endpoint)
        with self._lock:
            peer.proved = (reader, endpoint)
            peer.succeeded()
        log.info("node %s on %s is read through NIXL", node.name, node.host)

    def _proved(self, node: Announcement) -> tuple[NixlReader, Endpoint]:
        """Return what reads from the node, once a first READ was right. Raises `PeerError`."""
        reader = self._ready_reader()
        deadline = time.monotonic() + PROBE_TIMEOUT_S
        endpoint = nixl_endpoint(self._stream, node, deadline)
        if endpoint is None:
            raise NodeUnavailableError("the node offers no NIXL endpoint now")
        if not endpoint.agent.startswith(agent_prefix(node.node_id, node.epoch)):
            raise WireError(f"agent {endpoint.agent!r} is not this node's")
        reader.know(node.node_id, endpoint.agent, endpoint.metadata, deadline)
        _probe(reader, endpoint, deadline)
        return reader, endpoint

    def _prove_vram(self, reader: NixlReader, endpoint: Endpoint) -> None:
        """READ the same into the device's memory, once for each process that reads, and again some
        time after a failure. A wrong answer is no fault of the node. When the READ itself failed,
        `PeerError` is raised: this process cannot be used any more, and the next one has no memory
        there."""
        way, arena = self._vram, reader.vram
        if way is None or arena is None or not way.may_prove(arena):
            return
        deadline = time.monotonic() + PROBE_TIMEOUT_S
        try:
            if _first_read(reader, endpoint, deadline, way) == endpoint.probe:
                way.proved(arena)
            else:
                way.failed("the first READ brought other bytes to the device than the node has")
        except (DeviceError, InternalError) as e:
            way.failed(str(e))
        except PeerError as e:
            way.failed(str(e))
            raise

    def _failed(self, peer: _Peer, node: Announcement, reason: str) -> None:
        with self._lock:
            peer.proved = None
            level = peer.failed(reason)
        say_failed(log, level, node, "through NIXL", reason)

    # --- the process that reads ----------------------------------------------

    def _ready_reader(self) -> NixlReader:
        """Return the reader if it is usable, else a new one. Raises `PeerError` when there is
        none."""
        with self._starting:
            with self._lock:
                reader = self._reader
                if self._closed:
                    raise NodeUnavailableError("this client is closed")
            if reader is not None and reader.usable:
                return reader
            if self.quarantined >= NIXL_QUARANTINED_MAX:
                raise NodeUnavailableError(f"{self.quarantined} arenas wait for late bytes")
            if not self._starts.allows(time.monotonic()):
                raise NodeUnavailableError("NIXL does not start here; it is tried again later")
            try:
                return self._start_reader()
            except (PeerError, OSError) as e:
                self._starts.failed(time.monotonic())
                raise NodeUnavailableError(f"NIXL does not start here: {e}") from e

    def _start_reader(self) -> NixlReader:
        vram = None if self._vram is None else self._vram.new_arena()
        try:
            return self._start_with(vram)
        except PeerError as e:
            if self._vram is None or vram is None or self._closed:
                raise
            # The device's memory cannot be registered, or there is no room for a context.
            self._vram.failed(str(e))
            return self._start_with(None)

    def _start_with(self, vram: VramArena | None) -> NixlReader:
        reader = NixlReader(f"client-{os.getpid()}-{secrets.token_hex(4)}", vram)
        with self._lock:
            if not self._closed:
                self._reader = reader
                self._readers.add(reader)
        if self._reader is not reader:
            reader.close()
            raise NodeUnavailableError("this client is closed")
        try:
            reader.ready(time.monotonic() + START_TIMEOUT_S)
        except PeerError:
            reader.close()
            raise
        self._starts.succeeded()
        return reader

    def close(self) -> None:
        """See `Transport.close`."""
        with self._lock:
            self._closed = True
            readers = list(self._readers)
            for peer in self._peers.values():
                peer.proved = None
                peer.reason = "this client is closed"
        for reader in readers:
            reader.close()
        if self._vram is not None:
            self._vram.close()


_PIECE = struct.Struct("<QQQ")


def _probe(reader: NixlReader, endpoint: Endpoint, deadline: float) -> None:
    """READ what the node says it has there, and compare. Raises `PeerError`."""
    if _first_read(reader, endpoint, deadline) != endpoint.probe:
        raise WireError("the first READ brought other bytes than the node has there")


def _first_read(
    reader: NixlReader,
    endpoint: Endpoint,
    deadline: float,
    way: VramWay | None = None,
) -> bytes:
    """Return what a READ of the node's probe brings; with `way` to the device. Raises `PeerError`,
    and with `way` as `VramWay.bring`."""
    part = reader.take(deadline)
    if part is None:
        raise DeadlineError("no room for the first READ")
    arena = None if way is None else reader.vram
    to_vram = arena is not None
    to = part.number * NIXL_REQUEST_BYTES_MAX if to_vram else part.start
    part.memory[:PROBE_BYTES] = bytes(PROBE_BYTES)
    piece = _PIECE.pack(endpoint.probe_at, to, PROBE_BYTES)
    with on_failure(reader.give, part):
        if way is not None and arena is not None:
            way.clear(arena, part.vram, PROBE_BYTES)
        stages = [Stage(piece, endpoint.device, to_vram)]
        future = reader.read(endpoint.agent, part, stages, deadline)
    try:
        wait_for(future, deadline, "the first READ did not end in time")
        if way is not None and arena is not None:
            return way.bytes_at(arena, part.vram, PROBE_BYTES)
        return bytes(part.memory[:PROBE_BYTES])
    except DeadlineError:
        reader.retire()
        raise
    finally:
        reader.abandon(part, future)
