"""Knows the nodes on other hosts: which are there, and which failed and are left alone a while."""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from kvstore.circuit_breaker import BreakerState
from kvstore.client.missing.explanation import MissReason, Unreadable, of_other_user
from kvstore.client.remote.node_directory import KnownNode, NodeDirectory
from kvstore.errors import PeerError
from kvstore.index.base import Index
from kvstore.limits import STREAM_NODES_AT_ONCE, STREAM_SLOW_BYTES_PER_S
from kvstore.machine import REAL, Machine
from kvstore.nodedir import Announcement
from kvstore.protocol.control import Op
from kvstore.record import RecordSigner
from kvstore.segment.abandoned import user_of
from kvstore.segment.layout import Layout
from kvstore.system.fork import in_each_child
from kvstore.system.threads import DaemonThreads, interpreter_ends
from kvstore.transport.registry import CUDA_IPC, SHM, VARIABLE, Transports, counters
from kvstore.transport.stream.requests import ask, look
from kvstore.transport.stream.security import StreamSecurity
from kvstore.transport.stream.transport import NAME as STREAM
from kvstore.transport.stream.transport import StreamTransport
from kvstore.types import KEY_BYTES, Location

if TYPE_CHECKING:
    from kvstore.client.vram.nodes import VramNodes
    from kvstore.cuda.base import CudaDevice

PROBE_TIMEOUT_S = 0.25
"""For a node to show that it is there (again)."""
FIRST_LOOK_TIMEOUT_S = 1.0
"""For a node to refuse this client when it is first heard of."""
HURRIED_SHARE = 0.5
"""Of the time that a node may take: a read that had less, and failed for it, was hurried. A share,
for that time grows with the bytes and the way; `HURRIED_MAX` in a row count all the same."""
HUNG_UP_CHECK_S = 0.25
"""Idle connections to a node are looked at so often: a process that ends hangs up."""


def _has_time(stream: StreamTransport, announcement: Announcement, deadline: float) -> None:
    """Ask what the node's event loop has to answer: a save needs it. Raises `PeerError`."""
    ask(stream, announcement, [Op.STAT, 1], deadline)


def _is_there(stream: StreamTransport, announcement: Announcement, deadline: float) -> None:
    """Ask what a thread of the node answers, as it does reads. Raises `PeerError`."""
    nowhere = Location(announcement.node_id, announcement.epoch, 0, 0, 0, 0, 0, 0)
    look(stream, announcement, [(bytes(KEY_BYTES), nowhere)], deadline)


class Peers:
    """Keeps the ways to nodes of other hosts. Thread-safe. Never raises for a peer's fault: a node
    that cannot be reached is None."""

    def __init__(
        self,
        index: Index,
        allowed: Sequence[str],
        security: StreamSecurity,
        timeout_s: float,
        vram: VramNodes | None = None,
        signer: RecordSigner | None = None,
        *,
        nixl_device: CudaDevice | None = None,
        machine: Machine = REAL,
    ) -> None:
        """With `vram`, nodes in VRAM of this host count too: their blocks have to travel. With
        `signer` only nodes count whose announcement it signed. What is read by RDMA may arrive in
        memory of `nixl_device`, where that is wanted."""
        self.vram = vram
        self._allowed = allowed
        self._has_secret = security.secret is not None
        self._timeout_s = timeout_s
        self.stream = StreamTransport(security)
        self.transports = Transports(allowed, self.stream, Layout, nixl_device)
        self._lock = threading.RLock()
        self.directory = NodeDirectory(index, self._offered, signer, machine=machine)
        self._asking = 0
        """Threads that ask a node whether it is there."""
        self._threads = DaemonThreads(STREAM_NODES_AT_ONCE, "kvstore-remote")
        """For what is asked of several nodes at once."""
        self.counts = dict.fromkeys(counters(), 0)
        in_each_child(self)

    # --- who is there -------------------------------------------------------

    def node(self, node_id: int, epoch: int, now: float) -> Announcement | None:
        """That start of that node when it can be read from here now; asks the index now and then.

        One that failed, or that has hung up and does not answer, is not there until it has
        answered again: it is tried beside this.
        """
        if (
            self.vram is not None
            and (announcement := self.vram.node(node_id, epoch, now)) is not None
        ):
            return announcement
        if not self.transports.names:
            return None
        known = self.directory.node(node_id, now)
        announcement = known.announcement
        if announcement is None or announcement.epoch != epoch:
            return None
        if known.breaker.state is not BreakerState.CLOSED:
            if now >= known.breaker.probe_at:
                self.try_again([announcement], loop=False)
            return None
        if now >= known.looked_at + HUNG_UP_CHECK_S:
            is_new, known.looked_at = known.looked_at == float("-inf"), now
            if is_new and self.stream.usable(announcement):
                # Whoever looks up need not be who reads, and would never hear that it is refused.
                deadline = time.monotonic() + FIRST_LOOK_TIMEOUT_S
                self._probe(announcement, deadline, lambda _: None, loop=False, first=True)
            elif self.stream.hung_up(announcement):
                self.try_again([announcement], loop=False)
        return announcement

    def _offered(self, announcement: Announcement) -> list[str]:
        """Names of the transports by which it can be read."""
        return [transport.name for transport in self.transports.of(announcement)]

    def needs_checksum(self, node_id: int, epoch: int, *, verifies: bool) -> bool:
        """Return whether blocks of that node are read by their checksums alone: in VRAM of this
        host where the client `verifies`, and wherever no stream makes one."""
        if self.vram is not None and self.vram.known(node_id, epoch):
            return verifies
        known = self.directory.get(node_id)
        return known is not None and not any(map(self.transports.checks_bytes, known.offered))

    def why_not(self, node_id: int, epoch: int) -> Unreadable:
        """Return why that start of that node, which cannot be read from here, cannot, as far as is
        known; asks nobody."""
        failure = None if self.vram is None else self.vram.why_not(node_id, epoch)
        if failure is not None:
            return Unreadable(MissReason.UNREADABLE_UNMAPPED, f"its VRAM cannot be read: {failure}")
        known = self.directory.get(node_id)
        word = None if known is None else known.announced
        if not self.transports.names:
            detail = f"this client may use {', '.join(self._allowed)} alone ({VARIABLE})"
            return Unreadable(MissReason.UNREADABLE_TRANSPORTS, detail)
        if word is None or word.epoch != epoch:
            return Unreadable(MissReason.OUT_OF_REACH, "that start of it is not announced any more")
        return self._why_not(word) or Unreadable(MissReason.OUT_OF_REACH, "it failed lately")

    def _why_not(self, word: Announcement) -> Unreadable | None:
        refusal = self.stream.refusals.why(word)
        here = word.host == socket.gethostname()
        user = user_of(word.data_path) if here else None
        another = None if user == os.geteuid() else user
        if refusal is not None:
            if another is not None and refusal[0] == "secret" and not self._has_secret:
                return of_other_user(another, f"{refusal[1]}; give both the same")
            return Unreadable(MissReason(f"unreadable-{refusal[0]}"), refusal[1])
        if self._offered(word):
            return None
        if STREAM in word.transports and STREAM in self._allowed:
            by = "by TLS alone" if word.transports[STREAM].startswith("tls:") else "without TLS"
            detail = f"it serves {by}, this client the other way (KVSTORE_TLS_CA)"
            return Unreadable(MissReason.UNREADABLE_TLS, detail)
        ways = list(word.transports)
        if another is not None:
            lets = f"let this client use the transport {STREAM} ({VARIABLE})"
            return of_other_user(another, lets if STREAM in ways else "start it with --listen")
        if here and CUDA_IPC not in ways:
            ways.append(SHM)
        if excluded := [way for way in ways if way not in self._allowed]:
            detail = (
                f"it offers {', '.join(excluded)}, this client may use {', '.join(self._allowed)}"
            )
            return Unreadable(MissReason.UNREADABLE_TRANSPORTS, f"{detail} ({VARIABLE})")
        offers = f"only {', '.join(ways)}" if ways else "nothing"
        detail = f"it offers {offers} to clients like this one: start it with --listen"
        return Unreadable(MissReason.OUT_OF_REACH, detail)

    def try_now(self, word: Announcement, deadline: float) -> Unreadable | None:
        """Connect to a node; return why it cannot be read from here, None when it can."""
        now = time.monotonic()
        if self.vram is not None and self.vram.node(word.node_id, word.epoch, now) is not None:
            return None
        if not self._offered(word):
            self.stream.refusals.over(word)
            return self._why_not(word)
        known = self.directory.get(word.node_id)
        try:
            self.stream.greet(word, deadline)
        except PeerError as e:
            with self._lock:
                if known is not None and known.epoch == word.epoch:
                    self._broke(known, hung=True)
            return self._why_not(word) or Unreadable(MissReason.OUT_OF_REACH, str(e))
        with self._lock:
            if known is not None and known.epoch == word.epoch:
                self._answered(known)
        return None

    @property
    def why_not_to_vram(self) -> str:
        """Why what is read by RDMA does not arrive in VRAM, for people; empty when it does."""
        return self.transports.why_not_to_vram

    # --- what became of what was asked ------------------------------------------

    def _answered(self, known: KnownNode) -> None:
        """A thread of it answered, as it does reads. The caller holds the lock."""
        if known.breaker.failures or known.breaker.state is not BreakerState.CLOSED:
            known.breaker.succeeded()

    def _broke(self, known: KnownNode, *, hung: bool) -> None:
        """It did not. The caller holds the lock."""
        known.breaker.failed(time.monotonic(), hung=hung)
        known.believed_until = float("-inf")

    # --- asking its event loop: saves, questions ----------------------------------

    def healthy(self, node_id: int) -> bool:
        """Return whether the node's event loop answered what it was asked last."""
        known = self.directory.get(node_id)
        return known is not None and known.loop.state is BreakerState.CLOSED

    def allows(self, node_id: int) -> bool:
        """Return whether to ask it for something now. What becomes of that must be told:
        `succeeded` or `failed`."""
        with self._lock:
            known = self.directory.get(node_id)
            return known is not None and known.loop.allows(time.monotonic())

    def succeeded(self, node_id: int) -> None:
        """What `allows` allowed was answered."""
        with self._lock:
            known = self.directory.get(node_id)
            if known is not None:
                known.loop.succeeded()
                self._answered(known)

    def failed(self, node_id: int) -> None:
        """What `allows` allowed was not answered: the node is left alone for a while, by reads
        too until a thread of it has answered."""
        with self._lock:
            known = self.directory.get(node_id)
            if known is not None:
                known.loop.failed(time.monotonic(), hung=True)
                self._broke(known, hung=True)

    def answering(self, words: Sequence[Announcement], deadline: float) -> Iterator[Announcement]:
        """Yield those of `words` that answer a question now, in the order in which they do; all are
        asked at the same time, unless their breakers say no."""
        answers: queue.SimpleQueue[Announcement | None] = queue.SimpleQueue()
        asked = sum(
            self._probe(announcement, deadline, answers.put, loop=True, waits=True)
            for announcement in words
        )
        for _ in range(asked):
            try:
                announcement = answers.get(timeout=max(deadline - time.monotonic(), 0.001))
            except queue.Empty:
                return
            if announcement is not None:
                yield announcement

    def try_again(self, words: Sequence[Announcement], *, loop: bool) -> None:
        """Find out without waiting whether nodes are there (again), where it is time to; with
        `loop`, whether their event loops are."""
        for announcement in words:
            self._probe(announcement, time.monotonic() + PROBE_TIMEOUT_S, lambda _: None, loop=loop)

    def _probe(
        self,
        announcement: Announcement,
        deadline: float,
        tell_result: Callable[[Announcement | None], None],
        *,
        loop: bool,
        waits: bool = False,
        first: bool = False,
    ) -> bool:
        """Return whether another thread asks it now; that one tells the breaker, and the word or
        None. Where there are no threads, this one does, if it `waits` for the answer anyway or
        there will be none. The `first` time only a refusal counts: whoever reads finds out the
        rest."""
        with self._lock:
            known = self.directory.get(announcement.node_id)
            if known is None or self._asking >= STREAM_NODES_AT_ONCE:
                return False
            if not (known.loop if loop else known.breaker).allows(time.monotonic()):
                return False
            self._asking += 1

        def probe() -> None:
            answered = False
            try:
                if first:
                    self.stream.greet(announcement, deadline)
                else:
                    (_has_time if loop else _is_there)(self.stream, announcement, deadline)
                answered = True
            except PeerError:
                if loop:
                    self.failed(announcement.node_id)
                elif not first or announcement in self.stream.refusals:
                    with self._lock:
                        self._broke(known, hung=True)
            else:
                if loop:
                    self.succeeded(announcement.node_id)
                else:
                    with self._lock:
                        self._answered(known)
            finally:
                with self._lock:
                    self._asking -= 1
                tell_result(announcement if answered else None)

        try:
            threading.Thread(target=probe, name="kvstore-probe", daemon=True).start()
        except RuntimeError as e:  # this host has no more threads to give
            if not waits and not interpreter_ends(e):
                with self._lock:
                    self._asking -= 1
                return False
            probe()
        return True

    def look_after(self) -> None:
        """Look after memory of nodes in VRAM that is open here, or is to be; beside the caller's
        work."""
        if self.vram is not None:
            self.vram.look()

    def timeout_s(self, size_bytes: int) -> float:
        """Return what a batch of `size_bytes` may take."""
        return self._timeout_s + size_bytes / STREAM_SLOW_BYTES_PER_S

    def after_fork_in_child(self) -> None:
        self._lock = threading.RLock()
        self._asking = 0

    def close(self) -> None:
        self._threads.close()
        self.transports.close()
        if self.vram is not None:
            self.vram.close()
