"""Publishes a node's records to the index in batches, and holds the answers that wait for it.

The node's event loop waits for the index only in here, at most `publish_timeout_s` at a
time, and behind a circuit breaker that makes a dead index cost nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterator, Sequence

from kvstore.core.events import Reply
from kvstore.core.node import NodeCore
from kvstore.errors import IndexUnavailableError
from kvstore.index.announced import announced_nodes
from kvstore.index.base import Index, KeyedRecord, Record
from kvstore.machine import REAL, Machine
from kvstore.node.control.liveness import Speaker
from kvstore.node.control.turns import AT_ONCE_ITEMS, TURN_ITEMS
from kvstore.record import RecordSigner, unpack_record
from kvstore.types import Key, Location

log = logging.getLogger("kvstore.node")

PUBLISH_BATCH = 2000
"""Records of one publication. Clients' requests wait for 4 ms of it; Redis works on its first part
while the next is packed."""
COPIES_BATCH = 256
"""Places of the disks' index that are looked through for records at a time: 2 ms."""
REMOVE_BATCH = 512
REMOVE_DELAY_S = 0.05
"""Delay of removals, so that several travel together. They are only hygiene: a stale record is a
miss."""
INDEX_RETRY_S = 0.2
NODES_BELIEVED_S = 1.0
"""Time for which other nodes are believed to be there once they were asked for."""
STOP_TIMEOUT_S = 5.0
"""Time to remove all records of a node that ends; the rest becomes stale, which is a miss."""


class Publisher:
    """Takes the outbox of `core` to `index`, batch by batch. Only the node's loop uses it."""

    def __init__(
        self,
        core: NodeCore,
        index: Index,
        loop: asyncio.AbstractEventLoop,
        *,
        machine: Machine = REAL,
        signer: RecordSigner | None = None,
    ) -> None:
        """With `signer`, other nodes count only where it signed what they say."""
        self._core = core
        self._index = index
        self._loop = loop
        self._now = machine.monotonic
        self._signer = signer
        self._epochs: dict[int, int] = {}
        """Of each node the start that is announced, believed until `_believed_until`."""
        self._believed_until = float("-inf")
        self.away = False
        """Whether the last publication failed: then no answer waits for the next one."""
        self.error: IndexUnavailableError | None = None
        """Why it failed, where all of it did."""
        self._held: list[tuple[Speaker, Reply]] = []
        self._large: deque[tuple[Speaker, Reply]] = deque()
        """Answers that no longer wait for the index, and are sent in turns of the loop."""
        self._flush_due = False
        self._remove_due = False
        self._round_due = False

    def answer(self, to: Speaker, reply: Reply) -> None:
        """Send `reply` once all that was sealed up to now is in the index; at once while the index
        is away."""
        if self._core.blocks.outbox.awaited and not self.away:
            self._held.append((to, reply))
        else:
            to.send(reply)

    def schedule(self) -> None:
        """Have what is pending sent to the index: publications in the loop's next turn, removals
        after `REMOVE_DELAY_S`."""
        if self._core.blocks.outbox.publications_pending and not self._flush_due:
            # All requests that are ready in this turn of the loop are handled
            # before the flush: that is the group commit.
            self._flush_due = True
            self._loop.call_soon(self._flush)
        if self._core.blocks.outbox.removals_pending and not self._remove_due:
            self._remove_later(REMOVE_DELAY_S)
        if self._core.blocks.outbox.rounds_due and not self._round_due:
            self._round_due = True
            self._loop.call_later(0.0, self._go_round)

    def _go_round(self) -> None:
        """Go on with a round over what is on disks, where the index takes what it finds."""
        outbox, disk = self._core.blocks.outbox, self._core.disk
        self._round_due = False
        if not outbox.rounds_due or disk is None:
            return
        waits = outbox.publications_pending > PUBLISH_BATCH or self.away
        if waits or outbox.removals_pending > REMOVE_BATCH:
            self._round_due = True
            self._loop.call_later(REMOVE_DELAY_S, self._go_round)
            return
        disk.queue_copies(COPIES_BATCH)
        self.schedule()

    def _flush(self) -> None:
        outbox = self._core.blocks.outbox
        work = outbox.take_publications(PUBLISH_BATCH)
        again_s = 0.0
        try:
            if outbox.only_copies:
                work = self._not_nearer(work)
            lost = self._index.publish(work)
            if lost:
                away = set(lost)
                outbox.published([item for item in work if item not in away])
                outbox.postpone(lost)
            else:
                outbox.published(work)
            self.error = None
            self.away = bool(lost)
            if lost and len(lost) == len(work):
                again_s = INDEX_RETRY_S  # nothing is left that the other shards could take
        except IndexUnavailableError as e:
            log.debug("publication waits: %s", e)
            self.away, self.error = True, e
            again_s = INDEX_RETRY_S
        if again_s or not outbox.awaited:
            self._release()
        if outbox.publications_pending:
            self._loop.call_later(again_s, self._flush)
        else:
            self._flush_due = False

    def _not_nearer(self, copies: Sequence[KeyedRecord]) -> list[KeyedRecord]:
        """Return those records of blocks on disks whose place no other node's record has; the
        others need not be told. One that comes between is found by its node's scrub. Raises
        `IndexUnavailableError`."""
        keys = [key for key, _ in copies]
        others = self.elsewhere(keys, self._index.lookup(keys))
        pairs = list(zip(copies, others, strict=True))
        self._core.blocks.outbox.published([copy for copy, other in pairs if other is not None])
        return [copy for copy, other in pairs if other is None]

    def elsewhere(
        self, keys: Sequence[Key], records: Sequence[Record | None]
    ) -> list[Location | None]:
        """Return where another node that lives has each of `keys`, by its record in the index.
        Raises `IndexUnavailableError`."""
        places = [
            None if record is None else unpack_record(key, record)
            for key, record in zip(keys, records, strict=True)
        ]
        others = {at.node_id for at in places if at is not None} - {self._core.node_id}
        # All in one request: records can name as many nodes as there are records.
        if others - self._epochs.keys() or (others and self._now() >= self._believed_until):
            words = announced_nodes(self._index, self._signer)
            self._epochs = {node_id: word.epoch for node_id, word in words.items()}
            self._believed_until = self._now() + NODES_BELIEVED_S
        living = {node_id: self._epochs[node_id] for node_id in others & self._epochs.keys()}
        return [at if at and living.get(at.node_id) == at.epoch else None for at in places]

    def _release(self) -> None:
        """Send what was held. To encode what became of 4,096 blocks takes a millisecond, and many
        clients may wait for as much: such answers go out a turn's worth at a time."""
        held, self._held = self._held, []
        begins = not self._large
        for to, reply in held:
            if _items(reply) > AT_ONCE_ITEMS:
                self._large.append((to, reply))
            else:
                to.send(reply)
        if begins and self._large:
            self._loop.call_later(0.0, self._send_large)

    def _send_large(self) -> None:
        left = TURN_ITEMS
        while left > 0 and self._large:
            to, reply = self._large.popleft()
            to.send(reply)
            left -= _items(reply)
        if self._large:
            self._loop.call_later(0.0, self._send_large)

    def remove(self) -> None:
        """Remove a batch of records that are due from the index now, and the rest later."""
        work = self._core.blocks.outbox.take_removals(REMOVE_BATCH)
        if not work:
            return
        again_s = REMOVE_DELAY_S
        try:
            self._index.remove(work)
            self._core.blocks.outbox.removed(work)
        except IndexUnavailableError:
            again_s = INDEX_RETRY_S
        if self._core.blocks.outbox.removals_pending and not self._remove_due:
            self._remove_later(again_s)

    def _remove_later(self, wait_s: float) -> None:
        """Schedule a removal once, however many ask for it meanwhile."""
        self._remove_due = True
        self._loop.call_later(wait_s, self._remove_due_now)

    def _remove_due_now(self) -> None:
        self._remove_due = False
        self.remove()

    def refill(self) -> None:
        """Publish every block anew: the index lost keys."""
        count = self._core.blocks.republish()
        log.info("the index was emptied, restarted or failed over: publishing %d blocks", count)
        self.schedule()

    def withdraw_all(self) -> None:
        """Remove the records of all blocks, for at most `STOP_TIMEOUT_S`: the node ends and its
        segment goes. Raises `IndexUnavailableError`."""
        give_up_at = self._now() + STOP_TIMEOUT_S
        for batch in self._published():
            if self._now() >= give_up_at:
                return
            self._index.remove(batch)

    def _published(self) -> Iterator[list[KeyedRecord]]:
        blocks, disk, start = self._core.blocks, self._core.disk, 0
        while batch := blocks.take_published(REMOVE_BATCH):
            yield batch
        while disk is not None:
            copies, start = disk.index.walk(start, REMOVE_BATCH)
            if copies:
                yield [(copy.key, blocks.copy_record(copy)) for copy in copies]
            if not start:
                return


def _items(reply: Reply) -> int:
    return len(reply.body) if isinstance(reply.body, list) else 1
