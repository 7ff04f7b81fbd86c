"""Saves to a node of another host, one that can be reached, where this host has none.

The node takes the bytes out of this process's memory (rule 6), so a reservation here
is only memory: nothing is asked of a node before the commit.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial

from kvstore.batches import in_batches
from kvstore.client.base import Later, Reservation, ReserveAnswer
from kvstore.client.nodes.remote import RemoteNodes
from kvstore.client.nodes.saving.placement import RAMP_S, Candidate, two_choices
from kvstore.client.nodes.saving.savers import answered
from kvstore.core.answers import NOT_HELD
from kvstore.errors import IndexUnavailableError, NodeUnavailableError, PeerError
from kvstore.index.base import Record
from kvstore.limits import STREAM_BATCH_BYTES_MAX, STREAM_BLOCKS_MAX
from kvstore.machine import REAL, Machine
from kvstore.nodedir import Announcement
from kvstore.protocol.control import Op
from kvstore.protocol.control_replies import InvalidReplyError, reset_number
from kvstore.record import unpack_record
from kvstore.system.fork import in_each_child
from kvstore.transport.registry import CUDA_IPC
from kvstore.transport.stream.requests import SavePayload, ask, put
from kvstore.types import EXISTS, NO_SPACE, Key, Kind, PutResult, rejected

ANSWER_SHARE = 0.5
"""Of a save's time besides that of its bytes, what the first node has to say what it takes: in
the rest all others can be asked."""
CAPACITY_BYTES_MAX = 1 << 50
REPLACED_MAX = 1 << 14
STRANGERS_NAMED_MAX = 4
NOBODY = "no memory node on another host that can be reached: start one with `kvstore node`"


class RemoteWriter:
    """Saves to nodes of other hosts. Thread-safe. Implements `kvstore.client.base.Saver`."""

    def __init__(
        self,
        remote: RemoteNodes,
        readable: Callable[[Sequence[Key]], Sequence[Record | None]],
        introductions: Mapping[int, bytes],
        taken: Callable[[Sequence[Key]], set[Key]] = lambda keys: set(),
        *,
        machine: Machine = REAL,
    ) -> None:
        """`readable` gives the records of blocks that can be read from here (`Reader.readable`),
        `introductions` the fields of namespaces, by id, `taken` the keys whose record names a node
        that cannot be."""
        self._remote = remote
        self._machine = machine
        self._now = machine.monotonic
        self._directory = remote.directory
        self._readable = readable
        self._introductions = introductions
        self._taken = taken
        self._replaced: dict[Key, None] = {}
        """Whose record was taken back from a node that cannot be read here: once each, for the
        clients of that node may do the same."""
        self._random = random.Random()
        self._lock = self._machine.lock()
        in_each_child(self)
        self._numbers = itertools.count(1)
        self._open: dict[int, int] = {}
        """Namespace ids of reservations, by number."""

    # --- where to -----------------------------------------------------------

    def _targets(self, deadline: float) -> list[Announcement]:
        """Nodes that can be reached or are to be tried again."""
        now = self._now()
        self._directory.look_around(now, deadline)
        there = [
            announcement
            for known, announcement in self._directory.all()
            if self._remote.stream in known.offered
            and CUDA_IPC not in announcement.transports  # its slots are written by a device
            and self._remote.node(announcement.node_id, announcement.epoch, now) is not None
        ]
        if not there:
            self._directory.looked_at = float("-inf")
        return there

    def _candidate(self, announcement: Announcement) -> Candidate:
        known = self._directory.get(announcement.node_id)
        sent_bytes, heard_at = (known.sent_bytes, known.heard_at) if known else (0, 0.0)
        return Candidate(
            announcement.node_id,
            # Of another host's word only what can be true is reckoned with.
            min(max(announcement.size_bytes, 1), CAPACITY_BYTES_MAX),
            min(max(announcement.free_bytes - sent_bytes, 0), CAPACITY_BYTES_MAX),
            min(announcement.up_s, RAMP_S) + self._now() - heard_at,
        )

    # --- resets -------------------------------------------------------------

    def reset(self, number: int, namespace_ids: Sequence[int], deadline: float) -> int:
        """Tell one node of a reset, which tells the others; the number that it got.

        Raises `PeerError` when none can be told.
        """
        failure: PeerError = NodeUnavailableError(NOBODY)
        for announcement in self._in_turn(deadline):
            message = [Op.RESET, 1, number, list(namespace_ids)]
            try:
                return reset_number(ask(self._remote.stream, announcement, message, deadline))
            except InvalidReplyError as e:
                failure = NodeUnavailableError(
                    f"node {announcement.name} sent an invalid answer: {e}"
                )
            except PeerError as e:
                self._remote.failed(announcement.node_id)
                failure = e
        raise failure

    # --- saving -------------------------------------------------------------

    def save(self, payloads: Sequence[SavePayload], namespace_id: int) -> list[PutResult]:
        """Return what became of each. Raises `NodeUnavailableError` when no node can be reached."""
        namespace = namespace_id, self._introductions.get(namespace_id, b"")
        results: list[PutResult] = []
        for batch in in_batches(
            payloads, STREAM_BLOCKS_MAX, lambda one: one.size_bytes, STREAM_BATCH_BYTES_MAX
        ):
            try:
                results += self._save(batch, namespace)
            except PeerError as e:
                if not results:
                    raise
                results += [rejected(str(e))] * len(batch)
        return results

    def _save(self, batch: Sequence[SavePayload], namespace: tuple[int, bytes]) -> list[PutResult]:
        """Save to one node, and offer to the next what finds no room there; by one deadline for all
        of it."""
        size_bytes = sum(payload.size_bytes for payload in batch)
        began = self._now()
        deadline = began + self._remote.timeout_s(size_bytes)
        answer_by = began + self._remote.timeout_s(0) * ANSWER_SHARE
        failure: PeerError = NodeUnavailableError(NOBODY)
        results: dict[int, PutResult] = {}
        left = list(range(len(batch)))
        for announcement in self._in_turn(deadline):
            offered = [batch[i] for i in left]
            try:
                answers = put(
                    self._remote.stream,
                    announcement,
                    offered,
                    namespace,
                    deadline,
                    answer_by=answer_by,
                )
            except PeerError as e:
                self._remote.failed(announcement.node_id)
                failure = e
                continue
            finally:
                answer_by = deadline  # who comes next has just answered a question
            self._remote.succeeded(announcement.node_id)
            self._count_sent(announcement.node_id, sum(payload.size_bytes for payload in offered))
            results |= dict(zip(left, answers, strict=True))
            with suppress(PeerError):
                results |= self._taken_back(announcement, batch, results, namespace, deadline)
            left = [i for i in left if results[i] is NO_SPACE]
            if not left:
                break
        if not results:
            raise failure if failure.args != (NOBODY,) else NodeUnavailableError(self._nobody())
        return [results[i] for i in range(len(batch))]

    def _taken_back(
        self,
        node: Announcement,
        batch: Sequence[SavePayload],
        results: Mapping[int, PutResult],
        namespace: tuple[int, bytes],
        deadline: float,
    ) -> dict[int, PutResult]:
        """Save anew what `node` has and the index says of a node that this client cannot read: the
        index has one record for a key, and the last that is saved counts."""
        exists = [
            i for i, r in results.items() if r == EXISTS and batch[i].key not in self._replaced
        ]
        taken = self._taken([batch[i].key for i in exists]) if exists else set()
        which = [i for i in exists if batch[i].key in taken]
        for i in which:
            if len(self._replaced) >= REPLACED_MAX:
                self._replaced.clear()
            self._replaced[batch[i].key] = None
            ask(self._remote.stream, node, [Op.DROP, 1, batch[i].key], deadline)
        saved = [batch[i] for i in which]
        answers = put(self._remote.stream, node, saved, namespace, deadline) if saved else []
        return dict(zip(which, answers, strict=True))

    def _nobody(self) -> str:
        """Return why there is none to save to: nodes of another version, and those that cannot be
        reached, are told by name."""
        others = [f"{other} (on {other.host})" for other in self._directory.strangers_elsewhere]
        others += [
            f"node {word.name} on {word.host} is {self._remote.why_not(word.node_id, word.epoch)}"
            for word in self._directory.announced()
        ]
        return "; ".join([NOBODY, *others[:STRANGERS_NAMED_MAX]])

    def _in_turn(self, deadline: float) -> Iterator[Announcement]:
        """Yield who may take a save: a healthy node (placement.py); when it fails or is
        full, whichever of all the others answers first."""
        targets = self._targets(deadline)
        healthy = [
            announcement for announcement in targets if self._remote.healthy(announcement.node_id)
        ]
        others = [
            announcement
            for announcement in targets
            if not self._remote.healthy(announcement.node_id)
        ]
        if healthy:
            self._remote.try_again(others, loop=True)
            chosen = two_choices(
                [self._candidate(announcement) for announcement in healthy], self._random
            ).node_id
            first = next(announcement for announcement in healthy if announcement.node_id == chosen)
            if self._remote.allows(chosen):
                yield first
            others = [announcement for announcement in healthy if announcement is not first]
        yield from self._remote.answering(others, deadline)

    def _count_sent(self, node_id: int, size_bytes: int) -> None:
        known = self._directory.get(node_id)
        if known is not None:
            with self._lock:
                known.sent_bytes += size_bytes

    # --- as connectors save --------------------------------------------------

    def reserve(
        self, keys: Sequence[Key], size_bytes: int, namespace_id: int
    ) -> list[ReserveAnswer]:
        """Return memory for each of `keys` that cannot be read from here: a record that a dead node
        left would keep its block away for ever.

        Raises `NodeUnavailableError` when no node can be reached.
        """
        if not self._targets(self._now() + self._remote.timeout_s(0)):
            raise NodeUnavailableError(self._nobody())
        try:
            records = self._readable(keys)
        except IndexUnavailableError:
            records = [None] * len(keys)
        answers: list[ReserveAnswer] = []
        now = self._now()
        for key, record in zip(keys, records, strict=True):
            if record is not None and not self._in_vram(key, record, now):
                answers.append(EXISTS)
                continue
            number = next(self._numbers)
            self._open[number] = namespace_id
            buffer = memoryview(bytearray(size_bytes))
            answers.append(Reservation(key, buffer, self, 0, 0, 0, number))
        return answers

    def _in_vram(self, key: Key, record: Record, now: float) -> bool:
        """Return whether it is in VRAM of this host, from where blocks go down by being saved
        here."""
        at = unpack_record(key, record)
        return at is not None and self._remote.in_vram(at.node_id, at.epoch, now) is not None

    def commit_later(self, reservations: Sequence[Reservation]) -> Later[PutResult]:
        """See `Saver.commit_later`: the nodes ask for the bytes before they answer."""
        return answered(partial(self._commit, reservations))

    def _commit(self, reservations: Sequence[Reservation]) -> list[PutResult]:
        by_namespace: dict[int, list[int]] = {}
        results: dict[int, PutResult] = {}
        for i, reservation in enumerate(reservations):
            namespace_id = self._open.pop(reservation.generation, None)
            if namespace_id is None:
                results[i] = NOT_HELD
            else:
                by_namespace.setdefault(namespace_id, []).append(i)
        for namespace_id, which in by_namespace.items():
            payloads = [
                SavePayload(reservations[i].key, (reservations[i].buffer,), Kind.BLOCK, 0)
                for i in which
            ]
            results.update(zip(which, self.save(payloads, namespace_id), strict=True))
        return [results[i] for i in range(len(reservations))]

    def abort(self, reservations: Sequence[Reservation]) -> None:
        """See `Saver.abort`."""
        for reservation in reservations:
            self._open.pop(reservation.generation, None)

    def after_fork_in_child(self) -> None:
        """A thread of the parent may have had it."""
        self._lock = self._machine.lock()
