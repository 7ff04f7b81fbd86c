"""Which nodes of other hosts there are, by what the index says of them.

An entry is one start of one node. It goes as a whole when the node is heard of under another epoch:
what the former start failed at, or was sent, says nothing of this one. Its announcement is

    unheard  before the index has answered once: nobody knows yet
    there    what the index said last: believed for `NODE_BELIEVED_S`, then asked for again; where
             the index cannot be asked, for `NODE_TTL_S` since it was heard last
    absent   None: the index does not know the node, or it offers nothing that this client may use

Only this file changes that. The breakers and when they were fed are changed by `Peers` alone, under
its lock, and what was sent by the writer. What else is kept of nodes is not here, because it is
something else: segments of this host are true as long as a lock file says so (local/nodes.py), and
connections and proved NIXL endpoints are things of the transports, which close them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from kvstore.circuit_breaker import Breaker
from kvstore.errors import IndexUnavailableError
from kvstore.index.announced import announced_node, nodes_among, strangers_among
from kvstore.index.base import Index
from kvstore.limits import NODE_BELIEVED_S, NODE_TTL_S
from kvstore.machine import REAL, Machine
from kvstore.nodedir import Announcement, Stranger
from kvstore.record import RecordSigner
from kvstore.system.fork import in_each_child

NODES_KNOWN_MAX = 4096
LOOK_AROUND_S = 5.0
"""How often the index is asked which nodes there are, by those who save."""
HURRIED_MAX = 3
"""So many failures in a row of reads that had too little time, and the node is left alone for a
while, as after one that had its time."""
RETRY_AFTER_S = 0.25
RETRY_AFTER_MAX_S = 5.0


class KnownNode:
    """One start of one node."""

    __slots__ = (
        "announced",
        "announcement",
        "believed_until",
        "breaker",
        "confirmed_at",
        "epoch",
        "heard_at",
        "looked_at",
        "loop",
        "offered",
        "sent_bytes",
    )

    def __init__(self) -> None:
        self.announcement: Announcement | None = None
        self.announced: Announcement | None = None
        """The same, also where it offers nothing that this client may use."""
        self.epoch: int | None = None
        """None until it was heard of."""
        self.offered: Collection[str] = ()
        """Transports by which this client can reach it."""
        self.believed_until = float("-inf")
        """The index need not be asked."""
        self.confirmed_at = float("-inf")
        self.heard_at = float("-inf")
        """When the announcement was another one than before."""
        self.sent_bytes = 0
        """Since then."""
        self.looked_at = float("-inf")
        """When its idle connections were looked at."""
        # One failure costs a whole deadline: the next calls must not.
        self.breaker, self.loop = (
            Breaker(
                failures_max=HURRIED_MAX,
                retry_after_s=RETRY_AFTER_S,
                retry_after_max_s=RETRY_AFTER_MAX_S,
            )
            for _ in range(2)
        )
        """Of reads, and of what its event loop has to answer."""


class NodeDirectory:
    """Keeps what the index says of nodes on other hosts. Thread-safe. Never raises for a peer's
    fault."""

    def __init__(
        self,
        index: Index,
        offered: Callable[[Announcement], Collection[str]],
        signer: RecordSigner | None = None,
        *,
        machine: Machine = REAL,
    ) -> None:
        """`offered` names the transports by which this client can reach a node: without one it is
        absent. With `signer` only nodes count whose announcement it signed."""
        self._index = index
        self._offered = offered
        self._signer = signer
        self._machine = machine
        self._nodes: dict[int, KnownNode] = {}
        self.strangers: list[Stranger] = []
        """Nodes of another version, when the index was last asked which there are."""
        self.looked_at = float("-inf")
        self._looks = 0
        self.after_fork_in_child()
        in_each_child(self)

    def after_fork_in_child(self) -> None:
        """A thread of the parent may have had them."""
        self._lock = self._machine.lock()
        self._looking = self._machine.lock()
        """Of the one that asks the index which nodes there are."""

    def get(self, node_id: int) -> KnownNode | None:
        """Return what is known of it; asks nobody."""
        return self._nodes.get(node_id)

    def all(self) -> list[tuple[KnownNode, Announcement]]:
        """Return the nodes that are there; asks nobody."""
        nodes = [*self._nodes.values()]
        return [(known, known.announcement) for known in nodes if known.announcement]

    def announced(self) -> list[Announcement]:
        """Return the nodes that the index says are there, also those of no use; asks nobody."""
        return [known.announced for known in [*self._nodes.values()] if known.announced]

    def node(self, node_id: int, now: float) -> KnownNode:
        """Return what is believed of it; the index is asked for what is not."""
        known = self._nodes.get(node_id)
        if known is not None and now < known.believed_until:
            return known
        with self._lock:
            known = self._nodes.get(node_id) or self._new(node_id)
            if now < known.believed_until:
                return known
            if known.confirmed_at != float("-inf"):  # others go on with what was heard, if anything
                known.believed_until = now + NODE_BELIEVED_S
        try:
            announcement = announced_node(self._index, node_id, self._signer)
        except IndexUnavailableError:
            if now >= known.confirmed_at + NODE_TTL_S - NODE_BELIEVED_S:
                known.announcement = None
            return known
        with self._lock:
            return self._heard(node_id, announcement, now)

    def look_around(self, now: float, deadline: float) -> None:
        """Ask the index which nodes there are, if that is long ago. Whoever comes meanwhile goes on
        with those that are known, or waits for what the first one finds, until its deadline."""
        if now < self.looked_at + LOOK_AROUND_S:
            return
        looks = self._looks
        wait_s = 0.0 if self.all() else max(deadline - self._machine.monotonic(), 0.0)
        try:
            if self._looking.acquire(timeout=wait_s) and self._looks == looks:
                self._ask_all()
        finally:
            try:  # noqa: SIM105  # as in client/local/control.py: a signal could end it before
                self._looking.release()
            except RuntimeError:  # it was never got
                pass

    def _ask_all(self) -> None:
        now = self._machine.monotonic()
        try:
            raws = self._index.nodes()
        except IndexUnavailableError:
            pass  # those known before may still be there
        else:
            words = nodes_among(raws, self._signer)
            self.strangers = strangers_among(raws)
            with self._lock:
                for node_id in [*self._nodes, *words]:
                    self._heard(node_id, words.get(node_id), now)
        self.looked_at = self._machine.monotonic()
        self._looks += 1

    def _heard(self, node_id: int, announcement: Announcement | None, now: float) -> KnownNode:
        """The index said this; None: nothing. The caller holds the lock."""
        known = self._nodes.get(node_id) or self._new(node_id)
        if announcement is not None and known.epoch not in (None, announcement.epoch):
            known = self._new(node_id)
        if announcement is not None and announcement != known.announcement:
            known.epoch, known.offered = announcement.epoch, self._offered(announcement)
            known.heard_at, known.sent_bytes = now, 0
        known.announcement = announcement if known.offered else None
        known.announced = announcement
        known.confirmed_at, known.believed_until = now, now + NODE_BELIEVED_S
        return known

    def _new(self, node_id: int) -> KnownNode:
        if node_id not in self._nodes and len(self._nodes) >= NODES_KNOWN_MAX:
            self._nodes.pop(next(iter(self._nodes)))
        known = self._nodes[node_id] = KnownNode()
        return known
