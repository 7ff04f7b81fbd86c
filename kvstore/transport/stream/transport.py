"""Reads from a node on another host over TCP: straight into the destination, then checked.

A connection is in one of these, and its `Pool` alone moves it, under its lock:

    busy     one thread's own from `take` to `give`; another thread may only break it off
    idle     kept for the next request: the last reply was read to its end, and if anything came
             after it, the connection is closed instead of taken
    closed   for good: after a deadline, a fault or an interruption, and in a forked child

A reply does not name its blocks; it is known by its turn alone. So a connection on which a reply
was not read to its end (not `in_step`) is closed, and never asked again.

A block is a HIT by what is known after its last byte has come: the node says that it was in place
from its first byte to its last (rule 4), the tag of that is right, and what came has the checksum
that the node says, and that the location has, if it has one.

Must never happen:

- two requests under way on one connection, or one after a reply that was not read to its end;
- a byte that goes into a destination once `read` has returned: the calling thread alone receives;
- a wait beyond the deadline, for a free connection too.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence

from kvstore.errors import DeadlineError, NodeUnavailableError, PeerError, UsageError
from kvstore.limits import STREAM_CONNECTIONS_PER_NODE, STREAM_IDLE_TIMEOUT_S
from kvstore.nodedir import Announcement
from kvstore.protocol.stream import Frame, WireError, pack_read
from kvstore.protocol.stream_reply import BlockReply, ReadReply
from kvstore.system import tcp
from kvstore.system.fork import in_each_child
from kvstore.transport.base import Outcome, Read, Transport, Wanted, check_wanted
from kvstore.transport.stream.address import Address, parse
from kvstore.transport.stream.channel import Channel
from kvstore.transport.stream.greeting import shake_hands
from kvstore.transport.stream.refusals import Refusals
from kvstore.transport.stream.security import StreamSecurity

NAME = "stream"
CHECKSUM_REASON = "its bytes arrived with another checksum"
NOT_THERE_REASON = "the node does not have it (any more)"
DISK_FAILED_REASON = "its node did not get it from its disk in time"
UNUSED_S = 60.0
"""A node without a connection that was asked nothing for this long is gone, or can wait."""
PoolKey = tuple[int, int, str]


class StreamTransport(Transport):
    """Implements `Transport`; keeps at most `STREAM_CONNECTIONS_PER_NODE` connections a node."""

    name = NAME
    checks_bytes = True

    def __init__(self, security: StreamSecurity) -> None:
        self._security = security
        self.has_secret = security.secret is not None
        self._tls = security.client_context() is not None
        self._lock = threading.RLock()
        self._pools: dict[PoolKey, Pool] = {}
        self.refusals = Refusals()
        self._closed = False
        in_each_child(self)

    def usable(self, node: Announcement) -> bool:
        """Return whether the node can be reached like this: a client with a CA uses TLS, and only
        that."""
        address = self._address(node)
        return address is not None and (address.scheme == "tls") == self._tls

    @staticmethod
    def _address(node: Announcement) -> Address | None:
        try:
            return parse(node.transports.get(NAME, ""))
        except UsageError:
            return None

    def read(
        self, node: Announcement, wanted: Sequence[Wanted], deadline: float
    ) -> Sequence[Outcome]:
        """See `Transport.read`. The caller's thread receives the bytes itself."""
        check_wanted(wanted)
        if not wanted:
            return []
        try:
            pool = self.pool(node)
            channel = pool.take(deadline)
        except PeerError as e:
            return [Outcome(Read.FAILED, str(e))] * len(wanted)
        reply, reason = ReadReply([one.location.length for one in wanted]), ""
        in_step = False
        try:
            request = pack_read([(w.key, w.location) for w in wanted], deadline - time.monotonic())
            channel.send_frame(request, deadline)
            for memory in reply.memory([one.into for one in wanted], channel.seals.received):
                channel.receive(memory, deadline)
            in_step = True
        except PeerError as e:
            reason = str(e)
        finally:  # also when it was interrupted: there are only so many connections to a node
            pool.give(channel, in_step)
        both = zip(wanted, reply.replies, strict=True)
        return [_outcome(one, answer, reason) for one, answer in both]

    def pool(self, node: Announcement) -> Pool:
        """Return the connections to that start of that node.

        Raises `NodeUnavailableError` when the node offers no stream that this client may use, or
        the client is closed.
        """
        name = _pool_of(node)
        pool = self._pools.get(name)
        if pool is not None:
            return pool
        address = self._address(node)
        if address is None or not self.usable(node):
            raise NodeUnavailableError(
                f"node {node.name} offers no stream that this client may use"
            )
        with self._lock:
            if self._closed:
                raise NodeUnavailableError("this client is closed")
            pool = self._pools.get(name)
            if pool is None:
                stale = [key for key in self._pools if key[0] == node.node_id]
                replaced = [self._pools.pop(key) for key in stale]
                # Nodes come and go, under other ids where hosts do: what is of no use goes.
                for key in [key for key, kept in self._pools.items() if kept.retired()]:
                    del self._pools[key]
                pool = self._pools[name] = Pool(
                    lambda deadline: self._connect(node, address, deadline)
                )
            else:
                replaced = []
        for old in replaced:
            old.close()
        return pool

    def keep_ready(self, node: Announcement, count: int, deadline: float) -> int:
        """Return how many connections to that start of `node` a caller may now use at the same
        time, at most `count`; those that are missing are opened until `deadline`. One is left to
        whoever comes meanwhile. What cannot be opened is no fault of the node: it may be full."""
        try:
            return self.pool(node).keep_ready(count, deadline)
        except NodeUnavailableError:
            return 0

    def hung_up(self, node: Announcement) -> bool:
        """Return whether that start of `node` has ended a connection that was kept for later."""
        pool = self._pools.get(_pool_of(node))
        return pool is not None and pool.hung_up()

    def greet(self, node: Announcement, deadline: float) -> None:
        """Connect to one that is `usable` and shake hands, no more. Raises `PeerError` unless that
        start of `node` serves this client."""
        self._connect(node, parse(node.transports[NAME]), deadline).close()

    def _connect(self, node: Announcement, address: Address, deadline: float) -> Channel:
        try:
            connection = tcp.connect(address.host, address.port, deadline)
        except OSError as e:
            self.refusals.over(node)
            if isinstance(e, TimeoutError):
                raise DeadlineError(f"node {node.name} at {address}: no connection in time") from e
            raise NodeUnavailableError(f"node {node.name} at {address}: {e}") from e
        try:
            if (tls := self._security.client_context()) is not None:
                connection.settimeout(max(deadline - time.monotonic(), 0.001))
                connection = tls.wrap_socket(connection, server_hostname=address.host)
            channel = Channel(connection)
            own = next(iter(self._security.secrets()), None)
            shake_hands(channel, own, (node.node_id, node.epoch), deadline)
        except PeerError as e:
            connection.close()
            self.refusals.heard(node, e)
            raise type(e)(f"node {node.name} at {address}: {e}") from e
        except (OSError, ValueError) as e:  # of the TLS handshake
            connection.close()
            self.refusals.heard(node, e)
            raise NodeUnavailableError(f"node {node.name} at {address}: {e}") from e
        self.refusals.over(node)
        return channel

    def close(self) -> None:
        """See `Transport.close`."""
        with self._lock:
            self._closed = True
            pools, self._pools = list(self._pools.values()), {}
        for pool in pools:
            pool.close()

    def after_fork_in_child(self) -> None:
        """Let go of the parent's connections: of two processes on one, each could read the reply
        that is meant for the other."""
        self._lock = threading.RLock()
        pools, self._pools = list(self._pools.values()), {}
        for pool in pools:
            pool.abandon()


def _pool_of(node: Announcement) -> PoolKey:
    return node.node_id, node.epoch, node.transports.get(NAME, "")


class _Place:
    """One of the connections that a pool may have in use."""


class Pool:
    """Connections to one start of one node. Thread-safe.

    A call that is interrupted between taking a connection and holding it never gives it back: a
    place that nobody holds any more is free.
    """

    def __init__(self, connect: Callable[[float], Channel]) -> None:
        self._connect = connect
        self._lock = threading.RLock()
        self._returned = threading.Condition(self._lock)
        self._places: weakref.WeakSet[_Place] = weakref.WeakSet()
        self._idle: list[Channel] = []
        self._busy: weakref.WeakKeyDictionary[Channel, _Place] = weakref.WeakKeyDictionary()
        self._taken_at = time.monotonic()
        self._keeps = True
        self._closed = False

    def take(self, deadline: float) -> Channel:
        """Return a connection that is the caller's own until `give`.

        Raises `PeerError` when it cannot be had: `DeadlineError` when all are in use until
        `deadline`, which is in seconds of `time.monotonic`.
        """
        place, channel = _Place(), None
        try:
            with self._lock:
                while len(self._places) >= STREAM_CONNECTIONS_PER_NODE:
                    left_s = deadline - time.monotonic()
                    if left_s <= 0:
                        most = STREAM_CONNECTIONS_PER_NODE
                        raise DeadlineError(f"timed out: all {most} connections are in use")
                    self._returned.wait(left_s)
                self._places.add(place)
                self._taken_at = time.monotonic()
            taken = self._kept() or self._connect(deadline)
            with self._lock:
                self._busy[taken] = place
                if self._closed:
                    taken.break_off()
            channel = taken
            return channel
        finally:
            if channel is None:
                self._leave(place)

    def _leave(self, place: _Place | None) -> None:
        with self._lock:
            if place is not None:
                self._places.discard(place)
            self._returned.notify()

    def _kept(self) -> Channel | None:
        while True:
            with self._lock:
                if not self._idle:
                    return None
                channel = self._idle.pop()
            if channel.quiet():
                return channel
            channel.close()  # the node hung up, or says what nobody asked for

    def keep_ready(self, count: int, deadline: float) -> int:
        ready: list[Channel] = []
        try:
            while len(ready) < count and len(self._places) < STREAM_CONNECTIONS_PER_NODE - 1:
                ready.append(self.take(deadline))
        except PeerError:
            pass  # the read goes by those that there are, and says what is wrong with the node
        finally:
            for channel in ready:
                self.give(channel, True)
        return len(ready)

    def hung_up(self) -> bool:
        with self._lock:
            return any(not channel.quiet() for channel in self._idle)

    def retired(self) -> bool:
        """Return whether it is of no use, and keeps no connection from here on: it is not in use,
        and was not for so long that the node would have hung up, or for `UNUSED_S` where the node
        has. Who has this pool in hand can still use it."""
        with self._lock:
            unused_s = time.monotonic() - self._taken_at
            lives = any(channel.quiet() for channel in self._idle)
            if self._places or unused_s < (STREAM_IDLE_TIMEOUT_S if lives else UNUSED_S):
                return False
            self._keeps = False
            idle, self._idle = self._idle, []
        for channel in idle:
            channel.close()
        return True

    def give(self, channel: Channel, in_step: bool) -> None:
        """Give a connection back. One that is not `in_step` with the node is closed, and those that
        are idle too: what was lost in silence on one of them was lost on all, and each would cost
        a deadline."""
        unfit: list[Channel] = []
        with self._lock:
            self._leave(self._busy.pop(channel, None))
            if not in_step or not self._keeps or self._closed:
                unfit, self._idle = [channel, *self._idle], []
            else:
                self._idle.append(channel)
        for one in unfit:
            one.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            busy = list(self._busy)
        for channel in idle:
            channel.close()
        for channel in busy:
            channel.break_off()

    def abandon(self) -> None:
        """Close this process's descriptors of connections that are another process's."""
        self._lock = threading.RLock()
        self._returned = threading.Condition(self._lock)
        self._closed = True
        for channel in (*self._idle, *self._busy):
            channel.close()
        self._idle = []


def receive_frame(channel: Channel, expected: Frame, deadline: float) -> bytes:
    """Return the body of the next frame, which must be of type `expected`. Raises `PeerError`."""
    kind, size_bytes = channel.receive_head(deadline)
    if kind is not expected:
        raise WireError(f"frame type {kind} where {expected} was due")
    return channel.receive_rest(kind, size_bytes, deadline)


def _outcome(wanted: Wanted, reply: BlockReply | None, reason: str) -> Outcome:
    """Return what became of one block; `reason` is why the reply ended early, if it did."""
    if reply is None:
        return Outcome(Read.FAILED, reason)
    if reply.damaged or (reply.good and wanted.location.checksum not in (0, reply.checksum)):
        return Outcome(Read.MISS, CHECKSUM_REASON)
    if reply.failed:
        return Outcome(Read.FAILED, DISK_FAILED_REASON)
    if not reply.good:
        return Outcome(Read.MISS, NOT_THERE_REASON)
    return Outcome(Read.HIT, "", reply.kind, reply.meta_length)
