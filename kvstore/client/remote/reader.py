"""Reads blocks of nodes on other hosts, from many of them at once."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial

from kvstore.batches import in_batches
from kvstore.circuit_breaker import BreakerState
from kvstore.client.remote.peers import HURRIED_SHARE, PROBE_TIMEOUT_S, Peers
from kvstore.client.remote.shares import by_node, connections_per_read, in_shares
from kvstore.errors import PeerError
from kvstore.limits import STREAM_BATCH_BYTES_MAX, STREAM_BLOCKS_MAX, STREAM_SHARE_BYTES
from kvstore.nodedir import Announcement
from kvstore.protocol.control import Op, join_keys
from kvstore.transport.base import Outcome, Read, Transport, Wanted
from kvstore.transport.registry import TRANSPORTS
from kvstore.transport.stream.requests import look, tell
from kvstore.transport.stream.transport import CHECKSUM_REASON
from kvstore.types import Key, Location

log = logging.getLogger("kvstore.client")

REPORT_TIMEOUT_S = 0.25
"""For saying that a block is damaged, over a connection that has just been used."""
TOUCH_TIMEOUT_S = 0.05
UNCHECKED_REASON = "it has no checksum and can be read in no way that makes one"


class RemoteNodes(Peers):
    """Thread-safe. Never raises for a peer's fault: what a node has that cannot be reached is
    FAILED or a MISS."""

    def _ways(self, announcement: Announcement) -> list[Transport]:
        """Return how to read from it, best first: by those that are ready, and the last there
        is."""
        *nearer, last = self.transports.of(announcement) or [self.stream]
        return [*(one for one in nearer if one.ready(announcement)), last]

    # --- reading ------------------------------------------------------------

    def read(self, wanted: Sequence[Wanted], deadline: float | None = None) -> list[Outcome]:
        """Return one outcome per block; all nodes at the same time, each in batches with deadlines,
        large ones by several connections, and all of it by one deadline, whatever is asked for."""
        total_bytes = sum(one.location.length for one in wanted)
        give_up_at = time.monotonic() + self.timeout_s(total_bytes)
        deadline = give_up_at if deadline is None else min(deadline, give_up_at)
        outcomes: list[Outcome] = [Outcome(Read.FAILED)] * len(wanted)
        parts = by_node([one.location for one in wanted])
        if total_bytes >= 2 * STREAM_SHARE_BYTES:
            parts = self._in_shares(parts, wanted, deadline)
        parts_of = Counter(wanted[which[0]].location.node_id for which in parts)

        def read_part(which: list[int]) -> None:
            batch = [wanted[i] for i in which]
            at_once = parts_of[batch[0].location.node_id]
            for i, outcome in zip(which, self._read_node(batch, deadline, at_once), strict=True):
                outcomes[i] = outcome

        self._at_once(parts, read_part)
        return outcomes

    def there(
        self, blocks: Sequence[tuple[Key, Location]], deadline: float | None = None
    ) -> list[bool]:
        """Return which of `blocks` their nodes have, as long as the locations say, as far as is
        known by one deadline: that of a question, which does not depend on what they claim, or
        `deadline`, in seconds of the machine's clock, if that is earlier."""
        give_up_at = time.monotonic() + self.timeout_s(0)
        deadline = give_up_at if deadline is None else min(deadline, give_up_at)
        found = [False] * len(blocks)

        def look_at_node(which: list[int]) -> None:
            for batch in in_batches(which, STREAM_BLOCKS_MAX):
                answers = self._look([blocks[i] for i in batch], deadline)
                for i, answer in zip(batch, answers, strict=True):
                    found[i] = answer

        self._at_once(by_node([location for _, location in blocks]), look_at_node)
        return found

    def _look(self, blocks: Sequence[tuple[Key, Location]], deadline: float) -> list[bool]:
        """Return which of `blocks`, all of one node, are there."""
        at, now = blocks[0][1], time.monotonic()
        if self.vram is not None:
            here = self.vram.node(at.node_id, at.epoch, now)
            if here is not None:
                return self.vram.there(here, blocks)
        announcement = self.node(at.node_id, at.epoch, now)
        known = self.directory.get(at.node_id)
        if announcement is None or known is None or now >= deadline:
            return [False] * len(blocks)
        try:
            answers = look(self.stream, announcement, blocks, deadline)
        except PeerError:
            with self._lock:
                self._broke(known, hung=not self._hurried(now, deadline))
            return [False] * len(blocks)
        with self._lock:
            self._answered(known)
        return answers

    def _at_once(self, parts: Sequence[list[int]], work: Callable[[list[int]], None]) -> None:
        """Call `work` with each of `parts`, all at the same time. What runs in there makes no parts
        of its own: it would hold one of the threads that these wait for."""
        first, *others = parts
        pending: list[Future[None]] = []
        try:
            with suppress(PeerError):  # the host gives no thread: what is left is not read
                pending.extend(self._threads.submit(partial(work, which)) for which in others)
            work(first)
        finally:
            wait(pending)  # also when it was interrupted: they write into the caller's memory
        for future in pending:
            future.result()

    def _in_shares(
        self, parts: Sequence[list[int]], wanted: Sequence[Wanted], deadline: float
    ) -> list[list[int]]:
        """Cut what is large of `parts`, each of one node. Nodes are asked for connections one after
        the other, by one deadline for all: the others are not to wait for those that are silent."""
        until = min(time.monotonic() + PROBE_TIMEOUT_S, deadline)
        sizes = [one.location.length for one in wanted]
        shares: list[list[int]] = []
        for which in parts:
            count_max = 1
            if sum(sizes[i] for i in which) >= 2 * STREAM_SHARE_BYTES:
                count_max = self._connections(wanted[which[0]].location, until)
            shares += in_shares(which, sizes, count_max)
        return shares

    def _connections(self, at: Location, until: float) -> int:
        """Return by how many connections a large read of that node comes: one, unless it is read
        by streams, and more of them are open or can be opened at once."""
        most, now = connections_per_read(), time.monotonic()
        if most == 1 or (self.vram is not None and self.vram.node(at.node_id, at.epoch, now)):
            return 1
        announcement = self.node(at.node_id, at.epoch, now)
        if announcement is None or self._ways(announcement)[0] is not self.stream:
            return 1
        return max(self.stream.keep_ready(announcement, most, until), 1)

    def _read_node(
        self, wanted: Sequence[Wanted], deadline: float, at_once: int = 1
    ) -> list[Outcome]:
        """Return one outcome per block of one node, from which `at_once` such calls read."""
        if self.vram is not None:
            at, now = wanted[0].location, time.monotonic()
            announcement = self.vram.node(at.node_id, at.epoch, now)
            if announcement is not None:
                give_up_at = now + self.timeout_s(sum(one.location.length for one in wanted))
                return self.vram.read(announcement, wanted, min(give_up_at, deadline))
        outcomes: list[Outcome] = []
        for batch in _batches(wanted):
            outcomes += self._read_batch(batch, deadline, at_once)
        return outcomes

    def _read_batch(
        self, batch: Sequence[Wanted], deadline: float, at_once: int = 1
    ) -> Sequence[Outcome]:
        now = time.monotonic()
        location = batch[0].location
        announcement = self.node(location.node_id, location.epoch, now)
        known = self.directory.get(location.node_id)
        # Those that read beside this one have as much of the link.
        left_s = self.timeout_s(at_once * sum(one.location.length for one in batch))
        left_s = min(left_s, deadline - now)
        with self._lock:
            ready = (
                announcement is not None
                and known is not None
                and left_s > 0
                and (known.breaker.state is BreakerState.CLOSED or known.breaker.allows(now))
            )
        if announcement is None or known is None or not ready:
            unreached = [Outcome(Read.FAILED, "the node cannot be reached")] * len(batch)
            for way in self.transports.names[-1:]:
                self._count(way, unreached, batch)
            return unreached
        give_up_at = now + left_s
        outcomes = self._read_by(self._ways(announcement), announcement, batch, give_up_at)
        failed = next((o.reason for o in outcomes if o.read is Read.FAILED), None)
        if failed is not None:
            log.warning(
                "node %s on %s cannot be read for now: %s",
                announcement.name,
                announcement.host,
                failed,
            )
        with self._lock:
            if failed is not None:
                self._broke(known, hung=not self._hurried(now, give_up_at))
            else:
                self._answered(known)
        damaged = [
            one.key
            for one, outcome in zip(batch, outcomes, strict=True)
            if outcome.reason == CHECKSUM_REASON
        ]
        if damaged:
            self._report(announcement, damaged, give_up_at)
        return outcomes

    def _hurried(self, began: float, deadline: float) -> bool:
        """Return whether what was asked then and has just failed did so for want of time: it had
        little, and used it up."""
        had_little = deadline - began < self._timeout_s * HURRIED_SHARE
        return had_little and time.monotonic() >= deadline

    def _read_by(
        self,
        ways: Sequence[Transport],
        announcement: Announcement,
        batch: Sequence[Wanted],
        deadline: float,
    ) -> Sequence[Outcome]:
        """Read by the first way; what fails is read by the next, for which half of the time is
        left."""
        transport, *others = ways
        if not transport.checks_bytes and not all(one.location.checksum for one in batch):
            return self._read_apart(ways, announcement, batch, deadline)
        now = time.monotonic()
        until = now + (deadline - now) / 2 if others else deadline
        outcomes = transport.read(announcement, batch, until)
        self._count(transport.name, outcomes, batch)
        if not transport.checks_bytes:
            self._touch(announcement, batch, outcomes)
        again = [i for i, outcome in enumerate(outcomes) if outcome.read is Read.FAILED]
        if not again or not others:
            return outcomes
        second = self._read_by(others, announcement, [batch[i] for i in again], deadline)
        outcomes = list(outcomes)
        for i, outcome in zip(again, second, strict=True):
            outcomes[i] = outcome
        return outcomes

    def _read_apart(
        self,
        ways: Sequence[Transport],
        announcement: Announcement,
        batch: Sequence[Wanted],
        deadline: float,
    ) -> Sequence[Outcome]:
        """Not by the first way what has no checksum: only a stream computes one (rule 4)."""
        outcomes = [Outcome(Read.MISS, UNCHECKED_REASON)] * len(batch)
        for checked, its in ((True, ways), (False, ways[1:])):
            which = [i for i, one in enumerate(batch) if bool(one.location.checksum) is checked]
            if which and its:
                read = self._read_by(its, announcement, [batch[i] for i in which], deadline)
                for i, outcome in zip(which, read, strict=True):
                    outcomes[i] = outcome
        return outcomes

    def _touch(
        self, announcement: Announcement, batch: Sequence[Wanted], outcomes: Sequence[Outcome]
    ) -> None:
        """Tell the node what was used: it does not see who reads its memory."""
        used = [w.key for w, o in zip(batch, outcomes, strict=True) if o.read is Read.HIT]
        if used:
            with suppress(PeerError):  # it only spoils the order of eviction
                message = [Op.TOUCH, 0, join_keys(used)]
                tell(self.stream, announcement, message, time.monotonic() + TOUCH_TIMEOUT_S)

    def _report(
        self, announcement: Announcement, damaged: Sequence[Key], give_up_at: float
    ) -> None:
        """Let the node look for itself: its memory is wrong, or the wire was (rule 2).

        Never raises for a peer's fault; what could not be said, the next reader says.
        """
        log.warning("%d blocks of node %s arrived damaged: misses", len(damaged), announcement.name)
        deadline = min(time.monotonic() + REPORT_TIMEOUT_S, give_up_at)
        with suppress(PeerError):
            tell(self.stream, announcement, [Op.SUSPECT, 0, join_keys(damaged)], deadline)

    def _count(self, way: str, outcomes: Sequence[Outcome], batch: Sequence[Wanted]) -> None:
        with self._lock:
            counts = self.counts
            for one, outcome in zip(batch, outcomes, strict=True):
                if outcome.read is Read.HIT:
                    apart = outcome.in_vram and TRANSPORTS[way].to_vram
                    took = f"{way}_vram" if apart else way
                    counts[f"{took}_hits"] += 1
                    counts[f"{took}_bytes"] += one.location.length
                elif outcome.read is Read.FAILED:
                    counts[f"{way}_failed"] += 1
                else:
                    counts[f"{way}_misses"] += 1
                    counts[f"{way}_checksum"] += outcome.reason == CHECKSUM_REASON


def _batches(wanted: Sequence[Wanted]) -> Iterator[Sequence[Wanted]]:
    """Return runs that fit one request; a block larger than that travels alone."""
    return in_batches(
        wanted, STREAM_BLOCKS_MAX, lambda one: one.location.length, STREAM_BATCH_BYTES_MAX
    )
