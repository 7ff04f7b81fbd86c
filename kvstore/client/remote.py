"""Nodes on other hosts: who can be reached, and blocks read from them, many at once."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress

from kvstore.client.vram import VramNodes
from kvstore.core.breaker import Breaker, BreakerState
from kvstore.core.record import RecordSigner
from kvstore.core.wire import Op, join_keys
from kvstore.errors import IndexUnavailableError, PeerError
from kvstore.forks import in_each_child
from kvstore.index.announced import announced_node
from kvstore.index.base import Index
from kvstore.limits import (
    NODE_BELIEVED_S,
    NODE_TTL_S,
    STREAM_BATCH_BYTES_MAX,
    STREAM_BLOCKS_MAX,
    STREAM_SLOW_BYTES_PER_S,
)
from kvstore.nodedir import Announcement
from kvstore.segment.layout import Layout
from kvstore.transport.base import Outcome, Read, Transport, Wanted
from kvstore.transport.nixl import NAME as NIXL
from kvstore.transport.nixl import NixlTransport
from kvstore.transport.security import StreamSecurity
from kvstore.transport.select import choose
from kvstore.transport.stream import CHECKSUM_REASON, StreamTransport
from kvstore.transport.stream import NAME as STREAM
from kvstore.transport.stream_requests import tell
from kvstore.types import Key

log = logging.getLogger("kvstore.client")

NODES_KNOWN_MAX = 1024
NODES_AT_ONCE = 8
"""Nodes that one call reads from at the same time."""
REPORT_TIMEOUT_S = 0.25
"""For saying that a block is damaged, over a connection that has just been used."""
HURRIED_MAX = 3
"""Reads in a row that had less time than a node may take, and failed for it: it is then left
alone for a while, as after one that had its time."""
RETRY_AFTER_S = 0.25
RETRY_AFTER_MAX_S = 5.0
TOUCH_TIMEOUT_S = 0.05
UNCHECKED_REASON = "it has no checksum and can be read in no way that makes one"


class _Known:
    """What is known of one node."""

    __slots__ = ("asked_at", "breaker", "confirmed_at", "word")

    def __init__(self) -> None:
        self.word: Announcement | None = None
        self.asked_at = float("-inf")
        self.confirmed_at = float("-inf")
        # One failure costs a whole deadline: the next calls must not.
        self.breaker = Breaker(
            failures_max=HURRIED_MAX,
            retry_after_s=RETRY_AFTER_S,
            retry_after_max_s=RETRY_AFTER_MAX_S,
        )


class RemoteNodes:
    """Thread-safe. Never raises for a peer's fault: a node that cannot be reached is None, and
    what it has is FAILED or a MISS."""

    def __init__(
        self,
        index: Index,
        allowed: Sequence[str],
        security: StreamSecurity,
        timeout_s: float,
        vram: VramNodes | None = None,
        signer: RecordSigner | None = None,
    ) -> None:
        """With `vram`, nodes in VRAM of this host count too: their blocks have to travel. With
        `signer` only nodes count whose announcement it signed."""
        self.vram = vram
        self._index = index
        self._signer = signer
        self._allowed = allowed
        self._timeout_s = timeout_s
        self.stream = StreamTransport(security)
        self._nixl = NixlTransport(self.stream, Layout) if NIXL in allowed else None
        self._lock = threading.Lock()
        self._known: dict[int, _Known] = {}
        self._workers: ThreadPoolExecutor | None = None
        self.counts = {
            f"{way}_{what}": 0
            for way in (STREAM, NIXL)
            for what in ("hits", "bytes", "misses", "failed", "checksum")
        }
        in_each_child(self)

    # --- who is there -------------------------------------------------------

    def node(self, node_id: int, epoch: int, now: float) -> Announcement | None:
        """That start of that node when it can be read from here now; asks the index now and then.

        One whose last read failed is not there until it is time to try it again.
        """
        if self.vram is not None and (word := self.vram.node(node_id, epoch, now)) is not None:
            return word
        if STREAM not in self._allowed and self._nixl is None:
            return None
        known = self._known.get(node_id)
        if known is None or now >= known.asked_at + NODE_BELIEVED_S:
            known = self._ask(node_id, now)
        word = known.word
        if word is None or word.epoch != epoch:
            return None
        if known.breaker.state is not BreakerState.CLOSED and now < known.breaker.probe_at:
            return None
        return word

    def _ask(self, node_id: int, now: float) -> _Known:
        with self._lock:
            known = self._known.get(node_id)
            if known is None:
                if len(self._known) >= NODES_KNOWN_MAX:
                    self._known.pop(next(iter(self._known)))
                known = self._known[node_id] = _Known()
            if now < known.asked_at + NODE_BELIEVED_S:
                return known
            known.asked_at = now
        try:
            word = announced_node(self._index, node_id, self._signer)
        except IndexUnavailableError:
            if now >= known.confirmed_at + NODE_TTL_S - NODE_BELIEVED_S:
                known.word = None
            return known
        if word is not None and not choose(self._allowed, self._offered(word), mapped=False):
            word = None
        known.word, known.confirmed_at = word, now
        return known

    def _offered(self, word: Announcement) -> list[str]:
        offered = [STREAM] if self.stream.usable(word) else []
        return [*offered, NIXL] if self._nixl is not None and self._nixl.usable(word) else offered

    def _ways(self, word: Announcement) -> list[tuple[str, Transport]]:
        """How to read from it, best first. NIXL only when it is ready, or all there is."""
        nixl = self._nixl
        if nixl is None or not nixl.usable(word):
            return [(STREAM, self.stream)]
        if STREAM not in self._allowed:
            return [(NIXL, nixl)]
        ready = [(NIXL, nixl)] if nixl.ready(word) else []
        return [*ready, (STREAM, self.stream)]

    # --- reading ------------------------------------------------------------

    def read(self, wanted: Sequence[Wanted], deadline: float | None = None) -> list[Outcome]:
        """One outcome per block; all nodes at the same time, each in batches with deadlines."""
        by_node: dict[tuple[int, int], list[int]] = {}
        for i, one in enumerate(wanted):
            by_node.setdefault((one.location.node_id, one.location.epoch), []).append(i)
        outcomes: list[Outcome] = [Outcome(Read.FAILED)] * len(wanted)

        def read_node(which: list[int]) -> None:
            batch = [wanted[i] for i in which]
            for i, outcome in zip(which, self._read_node(batch, deadline), strict=True):
                outcomes[i] = outcome

        first, *others = by_node.values()
        pending = [task for which in others if (task := self._start(read_node, which)) is not None]
        try:
            read_node(first)
        finally:
            wait(pending)  # also when it was interrupted: they write into the caller's memory
        for future in pending:
            future.result()
        return outcomes

    def _start(self, read: Callable[[list[int]], None], which: list[int]) -> Future[None] | None:
        """Read in another thread; None, and it never will be, when there is none to be had."""
        task: Future[None] = Future()

        def run() -> None:
            if task.set_running_or_notify_cancel():
                try:
                    read(which)
                except BaseException as e:
                    task.set_exception(e)
                else:
                    task.set_result(None)

        try:
            self._pool().submit(run)
        except RuntimeError:  # it is in the queue of those that there are, unless this is closed
            return None if task.cancel() else task
        return task

    def _pool(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._workers is None:
                self._workers = ThreadPoolExecutor(NODES_AT_ONCE, "kvstore-remote")
            return self._workers

    def _read_node(self, wanted: Sequence[Wanted], deadline: float | None) -> list[Outcome]:
        if self.vram is not None:
            at, now = wanted[0].location, time.monotonic()
            word = self.vram.node(at.node_id, at.epoch, now)
            if word is not None:
                give_up_at = now + self.timeout_s(sum(one.location.length for one in wanted))
                return self.vram.read(word, wanted, min(give_up_at, deadline or give_up_at))
        outcomes: list[Outcome] = []
        for batch in _batches(wanted):
            outcomes += self._read_batch(batch, deadline)
        return outcomes

    def _read_batch(self, batch: Sequence[Wanted], deadline: float | None) -> Sequence[Outcome]:
        now = time.monotonic()
        location = batch[0].location
        word = self.node(location.node_id, location.epoch, now)
        known = self._known.get(location.node_id)
        left_s = self.timeout_s(sum(one.location.length for one in batch))
        if deadline is not None:
            left_s = min(left_s, deadline - now)
        with self._lock:
            ready = (
                word is not None and known is not None and left_s > 0 and known.breaker.allows(now)
            )
        if word is None or known is None or not ready:
            unreached = [Outcome(Read.FAILED, "the node cannot be reached")] * len(batch)
            return self._counted(STREAM if STREAM in self._allowed else NIXL, unreached, batch)
        give_up_at = now + left_s
        outcomes = self._read_by(self._ways(word), word, batch, give_up_at)
        failed = next((o.reason for o in outcomes if o.read is Read.FAILED), None)
        if failed is not None:
            log.warning("node %s on %s cannot be read for now: %s", word.name, word.host, failed)
        with self._lock:
            if failed is not None:
                ended_at = time.monotonic()
                hurried = left_s < self._timeout_s and ended_at >= give_up_at
                known.breaker.failed(ended_at, hung=not hurried)
                known.asked_at = float("-inf")
            else:
                known.breaker.succeeded()
        damaged = [
            one.key
            for one, outcome in zip(batch, outcomes, strict=True)
            if outcome.reason == CHECKSUM_REASON
        ]
        if damaged:
            self._report(word, damaged, give_up_at)
        return outcomes

    def _read_by(
        self,
        ways: Sequence[tuple[str, Transport]],
        word: Announcement,
        batch: Sequence[Wanted],
        deadline: float,
    ) -> Sequence[Outcome]:
        """What fails one way is read the next way, for which half of the time is left."""
        (name, transport), *others = ways
        if name == NIXL and not all(one.location.checksum for one in batch):
            return self._read_apart(ways, word, batch, deadline)
        now = time.monotonic()
        until = now + (deadline - now) / 2 if others else deadline
        outcomes = self._counted(name, transport.submit(word, batch, until).wait(), batch)
        if name == NIXL:
            self._touch(word, batch, outcomes)
        again = [i for i, outcome in enumerate(outcomes) if outcome.read is Read.FAILED]
        if not again or not others:
            return outcomes
        second = self._read_by(others, word, [batch[i] for i in again], deadline)
        outcomes = list(outcomes)
        for i, outcome in zip(again, second, strict=True):
            outcomes[i] = outcome
        return outcomes

    def _read_apart(
        self,
        ways: Sequence[tuple[str, Transport]],
        word: Announcement,
        batch: Sequence[Wanted],
        deadline: float,
    ) -> Sequence[Outcome]:
        """Not by the first way what has no checksum: only a stream computes one (rule 4)."""
        outcomes = [Outcome(Read.MISS, UNCHECKED_REASON)] * len(batch)
        for checked, its in ((True, ways), (False, ways[1:])):
            which = [i for i, one in enumerate(batch) if bool(one.location.checksum) is checked]
            if which and its:
                read = self._read_by(its, word, [batch[i] for i in which], deadline)
                for i, outcome in zip(which, read, strict=True):
                    outcomes[i] = outcome
        return outcomes

    def _touch(
        self, word: Announcement, batch: Sequence[Wanted], outcomes: Sequence[Outcome]
    ) -> None:
        """Tell the node what was used: it does not see who reads its memory."""
        used = [w.key for w, o in zip(batch, outcomes, strict=True) if o.read is Read.HIT]
        if used:
            with suppress(PeerError):  # it only spoils the order of eviction
                message = [Op.TOUCH, 0, join_keys(used)]
                tell(self.stream, word, message, time.monotonic() + TOUCH_TIMEOUT_S)

    def _report(self, word: Announcement, damaged: Sequence[Key], give_up_at: float) -> None:
        """Let the node look for itself: its memory is wrong, or the wire was (rule 2).

        Never raises for a peer's fault; what could not be said, the next reader says.
        """
        log.warning("%d blocks of node %s arrived damaged: misses", len(damaged), word.name)
        deadline = min(time.monotonic() + REPORT_TIMEOUT_S, give_up_at)
        with suppress(PeerError):
            tell(self.stream, word, [Op.SUSPECT, 0, join_keys(damaged)], deadline)

    def failed(self, node_id: int) -> None:
        """A save there failed: it is left alone for a while, by reads too."""
        with self._lock:
            known = self._known.get(node_id)
            if known is not None:
                known.breaker.failed(time.monotonic(), hung=True)
                known.asked_at = float("-inf")

    def timeout_s(self, size_bytes: int) -> float:
        """What a batch of `size_bytes` may take."""
        return self._timeout_s + size_bytes / STREAM_SLOW_BYTES_PER_S

    def _counted(
        self, way: str, outcomes: Sequence[Outcome], batch: Sequence[Wanted]
    ) -> Sequence[Outcome]:
        with self._lock:
            counts = self.counts
            for one, outcome in zip(batch, outcomes, strict=True):
                if outcome.read is Read.HIT:
                    counts[f"{way}_hits"] += 1
                    counts[f"{way}_bytes"] += one.location.length
                elif outcome.read is Read.FAILED:
                    counts[f"{way}_failed"] += 1
                else:
                    counts[f"{way}_misses"] += 1
                    counts[f"{way}_checksum"] += outcome.reason == CHECKSUM_REASON
        return outcomes

    def after_fork_in_child(self) -> None:
        self._lock = threading.Lock()
        self._workers = None

    def close(self) -> None:
        if self._nixl is not None:
            self._nixl.close()
        self.stream.close()
        if self.vram is not None:
            self.vram.close()
        with self._lock:
            workers, self._workers = self._workers, None
        if workers is not None:
            workers.shutdown(wait=False)


def _batches(wanted: Sequence[Wanted]) -> Iterator[Sequence[Wanted]]:
    """Runs that fit one request; a block larger than that travels alone."""
    start = size_bytes = 0
    for i, one in enumerate(wanted):
        length = one.location.length
        full = size_bytes + length > STREAM_BATCH_BYTES_MAX or i - start == STREAM_BLOCKS_MAX
        if i > start and full:
            yield wanted[start:i]
            start, size_bytes = i, 0
        size_bytes += length
    yield wanted[start:]
