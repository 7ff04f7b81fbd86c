"""Reads from a node in VRAM on another host of the same NVLink domain, with copies of our own.

The node's memory is mapped here by its fabric handle, which comes over the node's stream, and is
copied as memory of this host is (cuda_ipc.py). Its headers are not mapped: after the copies the
node is asked, over the stream, whether each block is still where its location says (rule 4), and
what has arrived is compared with the block's checksum, for it has crossed a host.

A node is read like this only once its memory is open and its probe was right. That is tried in
the background; until then, and for a while after anything went wrong, the node is not `ready` and
another transport reads from it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from kvstore.cuda.base import CudaDevice, Shared
from kvstore.cuda.probe import PROBE_BYTES
from kvstore.errors import NodeUnavailableError, PeerError
from kvstore.limits import CUDA_IPC_NODES_MAX
from kvstore.nodedir import Announcement
from kvstore.protocol.stream import WireError
from kvstore.system.fork import in_each_child
from kvstore.transport.base import Outcome, Read, Wanted, check_wanted
from kvstore.transport.cuda_ipc import CudaIpcTransport, WantedAnywhere
from kvstore.transport.cuda_memory import DeviceAddress, DevicePlace
from kvstore.transport.proving import ProvedPeer, say_failed
from kvstore.transport.stream.requests import fabric_memory, look_at
from kvstore.transport.stream.transport import StreamTransport
from kvstore.types import Key, Location

log = logging.getLogger("kvstore.client")

NAME = "cuda_fabric"
PROVE_TIMEOUT_S = 3.0
"""For the handle; the copy of the probe has a deadline of its own."""
HURRIED_S = 1.0
"""A read that had less time than this, and was late, says nothing of its node."""


class FabricLayout(Protocol):
    """Says where blocks are in a node's segment; `kvstore.segment.layout.Layout` is one."""

    def places(self, location: Location) -> tuple[int, int] | None:
        """(offset of the header, of the payload in the segment); None when it leads nowhere."""
        ...


class _Heads:
    """Implements `Heads` where no header can be read: the node is asked after the copies."""

    def __init__(self, node: Announcement, layout: FabricLayout, shared: Shared) -> None:
        self.node = node
        self._layout = layout
        self._shared = shared
        self.gone = False

    def memory(self, timeout_s: float) -> Shared:
        return self._shared

    def locate(self, key: Key, location: Location) -> DevicePlace | None:
        places = self._layout.places(location)
        return None if places is None else DevicePlace(places[1], 0, 0, None)

    def same(self, place: DevicePlace) -> bool:
        return True

    def alive(self) -> bool:
        return not self.gone

    def close(self) -> None:
        """Nothing of it is mapped but the memory."""


class _Peer(ProvedPeer):
    """Whether the memory of one start of one node is open here and right."""

    heads: _Heads | None = None
    """Of the memory that was proved, or is being."""
    proved = False


class FabricTransport:
    """Implements `Transport`. `stream` brings the nodes' handles and says what is still there;
    `layout_of` says how the segment of an announced node is divided."""

    name = NAME

    def __init__(
        self,
        stream: StreamTransport,
        layout_of: Callable[[Announcement], FabricLayout],
        device: CudaDevice,
    ) -> None:
        self._stream = stream
        self._layout_of = layout_of
        self._copies = CudaIpcTransport(device, self._attach, verifies=True, way=NAME)
        self._lock = threading.Lock()
        in_each_child(self)
        self._peers: dict[int, _Peer] = {}
        self._closed = False

    def usable(self, node: Announcement) -> bool:
        """Whether it is worth trying: the node offers its memory, and can be asked."""
        offered = DeviceAddress.parse(node.transports.get(NAME, "")) is not None
        return offered and not self._closed and self._stream.usable(node)

    def ready(self, node: Announcement) -> bool:
        """Whether a read can begin now; if not, it is tried in the background when it is time."""
        peer = self._peer(node)
        if not peer.proved:
            self._prove_soon(peer, node)
        return peer.proved

    def read(
        self, node: Announcement, wanted: Sequence[Wanted], deadline: float
    ) -> Sequence[Outcome]:
        """See `Transport.read`; as late as `CudaIpcTransport.read`. Waits for memory that is being
        opened. What has a place in VRAM goes there."""
        began = time.monotonic()
        check_wanted(wanted)
        if not wanted:
            return []
        if not self.usable(node):
            reason = f"node {node.name} offers no memory over NVLink that this client may use"
            return [Outcome(Read.FAILED, reason)] * len(wanted)
        peer = self._peer(node)
        if not peer.proved and (proving := self._prove_soon(peer, node)) is not None:
            proving.wait(max(deadline - time.monotonic(), 0.0))
        if not peer.proved or time.monotonic() >= deadline:
            reason = "timed out" if peer.proved else peer.reason
            return [Outcome(Read.FAILED, reason)] * len(wanted)
        copies = [
            WantedAnywhere(one.key, one.location, one.into if one.vram is None else (one.vram,))
            for one in wanted
        ]
        outcomes = list(self._copies.read(node, copies, deadline))
        self._look_again(node, wanted, outcomes, deadline)
        failed = next((o.reason for o in outcomes if o.read is Read.FAILED), None)
        late = time.monotonic() >= deadline
        if failed is not None and not (late and deadline - began < HURRIED_S):
            self._failed(peer, node, failed)
        return outcomes

    def _look_again(
        self,
        node: Announcement,
        wanted: Sequence[Wanted],
        outcomes: list[Outcome],
        deadline: float,
    ) -> None:
        """Ask the node whether what was copied was, and still is, the block of its location."""
        arrived = [i for i, outcome in enumerate(outcomes) if outcome.read is Read.HIT]
        if not arrived:
            return
        try:
            asked = [wanted[i][:2] for i in arrived]
            heads = look_at(self._stream, node, asked, deadline)
        except PeerError as e:
            heads = [None] * len(arrived)
            gone = Outcome(Read.FAILED, str(e))
        else:
            gone = Outcome(Read.MISS, "the node does not have it (any more)")
        for i, head in zip(arrived, heads, strict=True):
            in_vram = wanted[i].vram is not None
            outcomes[i] = (
                gone
                if head is None
                else Outcome(Read.HIT, "", head.kind, head.meta_length, in_vram=in_vram)
            )

    # --- peers --------------------------------------------------------------

    def _peer(self, node: Announcement) -> _Peer:
        with self._lock:
            peer = self._peers.get(node.node_id)
            if peer is None or peer.epoch != node.epoch:
                if peer is None and len(self._peers) >= CUDA_IPC_NODES_MAX:
                    peer = self._peers.pop(next(iter(self._peers)))
                if peer is not None and peer.heads is not None:
                    peer.heads.gone = True
                peer = self._peers[node.node_id] = _Peer(node.epoch, self._lock)
            return peer

    def _attach(self, node: Announcement) -> _Heads | None:
        return self._peer(node).heads

    def _prove_soon(self, peer: _Peer, node: Announcement) -> threading.Event | None:
        """The attempt that is under way to open it; a new one when it is time; else None."""
        prove, give_up = partial(self._prove, peer, node), partial(self._failed, peer, node)
        with self._lock:
            if self._closed:
                return None
            return peer.prove_soon(prove, give_up, "kvstore-fabric-probe")

    def _prove(self, peer: _Peer, node: Announcement) -> None:
        peer.heads = self._offered(node)
        opened = self._copies.memory.use(node)
        if opened is None:
            raise NodeUnavailableError("no more memory of nodes may be open here")
        self._copies.memory.done_with(opened)
        with self._lock:
            peer.proved = True
            peer.succeeded()
        log.info("node %s on %s is read over NVLink", node.name, node.host)

    def _offered(self, node: Announcement) -> _Heads:
        """What is known of the memory that the node offers now. Raises `PeerError`."""
        found = fabric_memory(self._stream, node, time.monotonic() + PROVE_TIMEOUT_S)
        if found is None:
            raise NodeUnavailableError("the node offers no memory over NVLink now")
        if found.size_bytes < node.size_bytes + PROBE_BYTES:
            raise WireError(f"memory of {found.size_bytes} bytes for {node.size_bytes}")
        shared = Shared(found.name, found.size_bytes, -1, found.handle)
        return _Heads(node, self._layout_of(node), shared)

    def _failed(self, peer: _Peer, node: Announcement, reason: str) -> None:
        """It is left alone for a while, and its memory is not kept from who owns it."""
        with self._lock:
            peer.proved = False
            if peer.heads is not None:
                peer.heads.gone = True
            level = peer.failed(reason)
        say_failed(log, level, node, "over NVLink", reason)
        self._copies.memory.sweep()

    def sweep(self) -> None:
        """Let go of the memory of nodes that have ended: it stays as long as it is open here."""
        with self._lock:
            peers = [peer for peer in self._peers.values() if peer.proved]
        for peer in peers:
            if peer.heads is not None and self._stream.hung_up(peer.heads.node):
                self._failed(peer, peer.heads.node, "it has hung up")
        self._copies.memory.sweep()

    def after_fork_in_child(self) -> None:
        """The device, and all that is open on it, is the parent's."""
        self._lock = threading.Lock()
        self._peers = {}
        self._closed = True

    def close(self) -> None:
        """See `Transport.close`."""
        with self._lock:
            self._closed = True
            for peer in self._peers.values():
                peer.proved, peer.reason = False, "this client is closed"
        self._copies.close()
