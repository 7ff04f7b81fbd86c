"""Reaches the nodes on other hosts, and those in VRAM of this one: asks whether they are there,
leaves those that failed alone for a while, and reads from many of them at once.

In one file because what becomes of a read is what the next call to that node goes by.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from kvstore.batches import in_batches
from kvstore.circuit_breaker import BreakerState
from kvstore.client.explanation import MissReason, Unreadable
from kvstore.client.nodes.directory import NodeDirectory
from kvstore.client.nodes.known import Attached, KnownNode, NodeState
from kvstore.client.nodes.shares import by_node, connections_per_read, in_shares
from kvstore.client.nodes.unreadable import why_not_by
from kvstore.errors import NodeUnavailableError, PeerError
from kvstore.limits import (
    STREAM_BATCH_BYTES_MAX,
    STREAM_BLOCKS_MAX,
    STREAM_NODES_AT_ONCE,
    STREAM_SHARE_BYTES,
    STREAM_SLOW_BYTES_PER_S,
)
from kvstore.nodedir import Announcement
from kvstore.protocol.control import Op, join_keys
from kvstore.system.fork import in_each_child
from kvstore.system.threads import DaemonThreads, interpreter_ends
from kvstore.transport.base import Outcome, Read, Transport, Wanted
from kvstore.transport.registry import DISK, TRANSPORTS, VARIABLE, Transports, counters
from kvstore.transport.stream.requests import ask, look, tell
from kvstore.transport.stream.transport import CHECKSUM_REASON, DISK_FAILED_REASON, StreamTransport
from kvstore.types import KEY_BYTES, Key, Location

if TYPE_CHECKING:
    from kvstore.client.nodes.disks import OwnDisks
    from kvstore.client.nodes.vram import VramNodes
    from kvstore.transport.cuda_memory import DeviceBlock

log = logging.getLogger("kvstore.client")

RETRY_TIMEOUT_S = 0.25
"""For a node to show that it is there (again)."""
FIRST_LOOK_TIMEOUT_S = 1.0
"""For a node to refuse this client when it is first heard of."""
HURRIED_SHARE = 0.5
"""Of the time that a node may take: a read that had less, and failed for it, was hurried. A share,
for that time grows with the bytes and the way; `HURRIED_MAX` in a row count all the same."""
HUNG_UP_CHECK_S = 0.25
"""Idle connections to a node are looked at so often: a process that ends hangs up."""
REPORT_TIMEOUT_S = 0.25
"""For saying that a block is damaged, over a connection that has just been used."""
TOUCH_TIMEOUT_S = 0.05
UNCHECKED_REASON = "it has no checksum and can be read in no way that makes one"


def _has_time(stream: StreamTransport, announcement: Announcement, deadline: float) -> None:
    """Ask what the node's event loop has to answer: a save needs it. Raises `PeerError`."""
    ask(stream, announcement, [Op.STAT, 1], deadline)


def _is_there(stream: StreamTransport, announcement: Announcement, deadline: float) -> None:
    """Ask what a thread of the node answers, as it does reads. Raises `PeerError`."""
    nowhere = Location(announcement.node_id, announcement.epoch, 0, 0, 0, 0, 0, 0)
    look(stream, announcement, [(bytes(KEY_BYTES), nowhere)], deadline)


class RemoteNodes:
    """Reads from nodes whose blocks have to travel, and keeps the ways to them. Thread-safe. Never
    raises for a peer's fault: a node that cannot be reached is None, what it has FAILED or a
    MISS."""

    def __init__(
        self,
        directory: NodeDirectory,
        transports: Transports,
        timeout_s: float,
        vram: VramNodes | None = None,
        disks: OwnDisks | None = None,
    ) -> None:
        """With `vram`, nodes in VRAM of this host count too: their blocks have to travel. So have
        those of `disks` of this host."""
        self.directory = directory
        self.transports = transports
        self.stream = transports.stream
        self.vram = vram
        self._disks = disks
        self._timeout_s = timeout_s
        self._lock = threading.RLock()
        self._asking = 0
        """Threads that ask a node whether it is there."""
        self._threads = DaemonThreads(STREAM_NODES_AT_ONCE, "kvstore-remote")
        """For what is asked of several nodes at once."""
        self.counts = dict.fromkeys(counters(), 0)
        """What was read from other hosts, by transport."""
        in_each_child(self)

    # --- who is there -------------------------------------------------------

    def node(self, node_id: int, epoch: int, now: float) -> Announcement | None:
        """That start of that node when it can be read from here now; asks the index now and then.

        One that failed, or that has hung up and does not answer, is not there until it has
        answered again: it is tried beside this.
        """
        if self.vram is not None and (here := self.vram.node(node_id, epoch, now)) is not None:
            return here
        if not self.transports.names:
            return None
        known = self.directory.node(node_id, now)
        announcement = known.announcement
        if announcement is None or announcement.epoch != epoch:
            return None
        if known.state is NodeState.SILENT:
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

    def in_vram(self, node_id: int, epoch: int, now: float) -> Announcement | None:
        """Return that start of that node when its blocks are in VRAM of this host, and can be read
        from here now."""
        return None if self.vram is None else self.vram.node(node_id, epoch, now)

    def why_not(self, node_id: int, epoch: int) -> Unreadable:
        """Return why that start of that node, which cannot be read from here, cannot, as far as is
        known; asks nobody."""
        failure = "" if self.vram is None else self.vram.why_not(node_id, epoch)
        if failure:
            return Unreadable(MissReason.UNREADABLE_UNMAPPED, f"its VRAM cannot be read: {failure}")
        known = self.directory.get(node_id)
        word = None if known is None else known.announced
        if not self.transports.names:
            detail = f"this client may use {', '.join(self.transports.allowed)} alone ({VARIABLE})"
            return Unreadable(MissReason.UNREADABLE_TRANSPORTS, detail)
        if word is None or word.epoch != epoch:
            return Unreadable(MissReason.OUT_OF_REACH, "that start of it is not announced any more")
        return why_not_by(self.transports, word) or Unreadable(
            MissReason.OUT_OF_REACH, "it failed lately"
        )

    def try_now(self, word: Announcement, deadline: float) -> Unreadable | None:
        """Connect to a node; return why it cannot be read from here, None when it can."""
        if self.in_vram(word.node_id, word.epoch, time.monotonic()) is not None:
            return None
        if not self.transports.of(word):
            self.stream.refusals.over(word)
            return why_not_by(self.transports, word)
        known = self.directory.get(word.node_id)
        try:
            self.stream.greet(word, deadline)
        except PeerError as e:
            with self._lock:
                if known is not None and known.epoch == word.epoch:
                    self._broke(known, hung=True)
            return why_not_by(self.transports, word) or Unreadable(MissReason.OUT_OF_REACH, str(e))
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
            self._probe(announcement, time.monotonic() + RETRY_TIMEOUT_S, lambda _: None, loop=loop)

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

    # --- reading ------------------------------------------------------------

    def read(self, wanted: Sequence[Wanted], deadline: float | None = None) -> Sequence[Outcome]:
        """Return one outcome per block; all nodes at the same time, each in batches with deadlines,
        large ones by several connections, and all of it by one deadline, whatever is asked for."""
        total_bytes = sum(one.location.length for one in wanted)
        give_up_at = time.monotonic() + self.timeout_s(total_bytes)
        deadline = give_up_at if deadline is None else min(deadline, give_up_at)
        if len(wanted) == 1:
            return self._read_node(wanted, deadline)
        parts = by_node([one.location for one in wanted])
        if total_bytes >= 2 * STREAM_SHARE_BYTES:
            parts = self._in_shares(parts, wanted, deadline)
        if len(parts) == 1:
            return self._read_node(wanted, deadline)
        outcomes: list[Outcome] = [Outcome(Read.FAILED)] * len(wanted)
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
        if self.vram is not None and (here := self.in_vram(*at[:2], now)) is not None:
            return self.vram.there(here, blocks)
        if at.segment and self._disks and (holder := self._disks.holder(at, now)) is not None:
            return self._disks.there(holder, blocks)
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
        until = min(time.monotonic() + RETRY_TIMEOUT_S, deadline)
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
        if most == 1 or at.segment or self.in_vram(*at[:2], now) is not None:
            return 1
        announcement = self.node(at.node_id, at.epoch, now)
        known = self.directory.get(at.node_id)
        if (
            announcement is None
            or known is None
            or self._ways(known, announcement)[0] is not self.stream
        ):
            return 1
        return max(self.stream.keep_ready(announcement, most, until), 1)

    def _read_node(
        self, wanted: Sequence[Wanted], deadline: float, at_once: int = 1
    ) -> Sequence[Outcome]:
        """Return one outcome per block of one node, from which `at_once` such calls read. The node
        is told what was used, and what is damaged."""
        now, at = time.monotonic(), wanted[0].location
        size_bytes = sum([one.location.length for one in wanted])
        if self.vram is not None and (here := self.in_vram(*at[:2], now)) is not None:
            return self.vram.read(here, wanted, min(now + self.timeout_s(size_bytes), deadline))
        if at.segment and self._disks and (holder := self._disks.holder(at, now)) is not None:
            return self._read_disks(self._disks, holder, wanted, deadline)
        return self._read_there(wanted, deadline, at_once)

    def _read_disks(
        self, disks: OwnDisks, holder: Attached, wanted: Sequence[Wanted], deadline: float
    ) -> Sequence[Outcome]:
        """Return one outcome per block on disks of a node of this host. What is on a disk that this
        process cannot open comes by the node's stream, if it has one."""
        now, at = time.monotonic(), wanted[0].location
        streamed = [i for i, one in enumerate(wanted) if disks.streams(holder, one.location)]
        own = sorted({*range(len(wanted))} - {*streamed})
        outcomes = [Outcome(Read.FAILED, "its disk cannot be opened by this process")] * len(wanted)
        if own:
            batch = [wanted[i] for i in own]
            size_bytes = sum([one.location.length for one in batch])
            read = disks.read(holder, batch, min(now + self.timeout_s(size_bytes), deadline))
            self._count(DISK, read, batch)
            for i, outcome in zip(own, read, strict=True):
                outcomes[i] = outcome
                if outcome.read is Read.FAILED and disks.streams(holder, wanted[i].location):
                    streamed.append(i)
        if streamed and self.node(at.node_id, at.epoch, now) is not None:
            came = self._read_there([wanted[i] for i in streamed], deadline)
            for i, outcome in zip(streamed, came, strict=True):
                outcomes[i] = outcome
        return outcomes

    def _read_there(
        self, wanted: Sequence[Wanted], deadline: float, at_once: int = 1
    ) -> Sequence[Outcome]:
        """Do what `_read_node` does, with a node whose blocks come over a network."""
        if len(wanted) > 1 and len(batches := list(_batches(wanted))) > 1:
            parts = [self._read_there(batch, deadline, at_once) for batch in batches]
            return [outcome for part in parts for outcome in part]
        now, at = time.monotonic(), wanted[0].location
        size_bytes = sum([one.location.length for one in wanted])
        announcement = self.node(at.node_id, at.epoch, now)
        known = self.directory.get(at.node_id)
        # Those that read beside this one have as much of the link.
        give_up_at = min(now + self.timeout_s(at_once * size_bytes), deadline)
        with self._lock:
            ready = (
                announcement is not None
                and known is not None
                and give_up_at > now
                and (known.breaker.state is BreakerState.CLOSED or known.breaker.allows(now))
            )
        if announcement is None or known is None or not ready:
            outcomes = [Outcome(Read.FAILED, "the node cannot be reached")] * len(wanted)
            for way in self.transports.names[-1:]:
                self._count(way, outcomes, wanted)
            return outcomes
        ways = self._ways(known, announcement)
        if at.segment:  # only its own process reads its disks for others
            ways = [way for way in ways if way.checks_bytes] or [self.stream]
        read = self._read_by(ways, announcement, wanted, give_up_at)
        failed = next((one.reason for one in read if one.read is Read.FAILED), None)
        if failed == DISK_FAILED_REASON:
            failed = None  # the node has answered: what it has in memory can be read
        with self._lock:
            if failed is None:
                self._answered(known)
            else:
                self._broke(known, hung=not self._hurried(now, give_up_at))
        if failed is not None:
            log.warning(
                "node %s on %s cannot be read for now: %s",
                announcement.name,
                announcement.host,
                failed,
            )
        pairs = zip(wanted, read, strict=True)
        damaged = [one.key for one, outcome in pairs if outcome.reason == CHECKSUM_REASON]
        if damaged:
            self._report(announcement, damaged, give_up_at)
        return read

    def _ways(self, known: KnownNode, announcement: Announcement) -> list[Transport]:
        """Return how to read from it, best first: by those that are ready, and the last there
        is."""
        *nearer, last = known.offered or [self.stream]
        return [*(one for one in nearer if one.ready(announcement)), last]

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

    def _hurried(self, began: float, deadline: float) -> bool:
        """Return whether what was asked then and has just failed did so for want of time: it had
        little, and used it up."""
        had_little = deadline - began < self._timeout_s * HURRIED_SHARE
        return had_little and time.monotonic() >= deadline

    def drop(self, key: Key, location: Location, by: float = math.inf) -> bool:
        """Drop a block on the node of another host that has it, by then at the latest; whether it
        was still there.

        Raises `NodeUnavailableError` or `DeadlineError` when that node cannot be asked.
        """
        announcement = self.node(*location[:2], time.monotonic())
        if announcement is None:
            raise NodeUnavailableError(
                "the node of another host that has this value cannot be reached"
            )
        deadline = min(by, time.monotonic() + self.timeout_s(0))
        try:
            answer = ask(self.stream, announcement, [Op.DROP, 1, key], deadline)
        except PeerError:
            self.failed(announcement.node_id)
            raise
        return bool(answer == [True])

    # --- of VRAM of this host alone ------------------------------------------

    def open_vram(self) -> frozenset[tuple[int, int]]:
        """See `BlockSession.open_vram`."""
        if self.vram is None:
            return frozenset()
        self.vram.watched = True
        return self.vram.opened()

    def device_view(self, key: Key, at: Location, now: float) -> DeviceBlock | None:
        """Return a block in VRAM of this host in place; None for one that is elsewhere, or is not
        there any more."""
        here = self.in_vram(at.node_id, at.epoch, now)
        return None if here is None or self.vram is None else self.vram.view(here, key, at)

    def let_go(self) -> None:
        """Close the memory of nodes in VRAM that have ended."""
        if self.vram is not None:
            self.vram.sweep()

    # --- the rest ------------------------------------------------------------

    def read_bytes(self) -> dict[str, int]:
        """Return the bytes that were read, by transport."""
        counts = self.counts if self.vram is None else self.vram.counts | self.counts
        ends = "_bytes"
        return {k.removesuffix(ends): n for k, n in counts.items() if k.endswith(ends)}

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
        if self._disks is not None:
            self._disks.close()


def _batches(wanted: Sequence[Wanted]) -> Iterator[Sequence[Wanted]]:
    """Return runs that fit one request; a block larger than that travels alone."""
    return in_batches(
        wanted, STREAM_BLOCKS_MAX, lambda one: one.location.length, STREAM_BATCH_BYTES_MAX
    )
