"""Answers listeners to a node's events: what they missed, or a snapshot; and bounds what waits.

What was published lately is kept, and the last snapshot. An answer waits in this process until its
listener has taken it or is gone, which its last message tells; how much waits so is bounded, in
all and for each listener, because whoever can connect may ask and never read.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from kvstore.limits import (
    EVENT_ANSWER_BYTES_MAX,
    EVENT_ANSWERS_MAX,
    EVENT_BACKLOG_MAX,
    EVENT_MESSAGES_WAITING_MAX,
    EVENT_REPLAYS_MAX,
)
from kvstore.protocol.block_events import END, BlockChanges, pack_snapshot, sequence_bytes
from kvstore.types import Key

log = logging.getLogger("kvstore.node")

_MESSAGE_COST_BYTES = 1 << 10
"""What a message takes that waits for a listener, beyond its payload."""


class EventMessage(NamedTuple):
    sequence: int
    time_s: float
    changes: BlockChanges

    @property
    def cost(self) -> int:
        return 1 + len(self.changes.stored) + len(self.changes.removed)


class Snapshot(NamedTuple):
    sequence: int
    time_s: float
    keys: list[Key]


class Tracker(Protocol):
    """Says whether the last message of an answer was sent, or its listener is gone."""

    @property
    def done(self) -> bool: ...


class _Going(NamedTuple):
    """An answer that a listener has not taken yet, as far as is known."""

    who: list[bytes]
    size_bytes: int
    tracker: Tracker


Send = Callable[[list[bytes]], None]
SendLast = Callable[[list[bytes]], Tracker]


class Answers:
    """What was published lately, the last snapshot, and who waits for which part of them."""

    def __init__(self, topic: bytes, medium: str) -> None:
        self._topic = topic
        self._medium = medium
        self._kept: deque[tuple[EventMessage, bytes]] = deque()
        """One after the other without a gap."""
        self._kept_cost = 0
        self._last = -1
        self._snapshot: tuple[int, list[bytes]] | None = None
        self._whole: list[list[bytes]] = []
        """Who waits for a snapshot."""
        self._since: list[tuple[list[bytes], int]] = []
        """Who waits for messages from a number on."""
        self.needs_snapshot = False
        self._coming = False
        """A snapshot was asked for."""
        self._going: list[_Going] = []
        self.dropped = 0
        """Answers that were not given because too much waited."""
        self._told = False
        """That was logged, and there were always others since."""

    def keep(self, message: EventMessage, payload: bytes) -> None:
        """That was published."""
        if message.sequence != self._last + 1:
            self._kept.clear()
            self._kept_cost = 0
        self._last = message.sequence
        self._kept.append((message, payload))
        self._kept_cost += message.cost
        while self._kept_cost > EVENT_BACKLOG_MAX:
            self._kept_cost -= self._kept.popleft()[0].cost

    def asked(self, who: list[bytes], start: int) -> None:
        """`who` wants all from that number on: its name, and what is to stand before an answer."""
        waiting = [*self._whole, *(one for one, _ in self._since)]
        own = sum(one[0] == who[0] for one in waiting)
        if len(waiting) >= EVENT_REPLAYS_MAX or own >= EVENT_ANSWERS_MAX:
            return  # it asks again
        if start and self._reaches(start):
            self._since.append((who, start))
            return
        self._whole.append(who)
        # One that is old would need very many messages after it.
        usable = self._snapshot is not None and (
            self._reaches(self._snapshot[0] + 1)
            and self._last - self._snapshot[0] <= EVENT_MESSAGES_WAITING_MAX
        )
        if not usable and not self._coming:
            self.needs_snapshot = self._coming = True

    def _reaches(self, start: int) -> bool:
        """Whether all from that number on is kept."""
        oldest = self._kept[0][0].sequence if self._kept else self._last + 1
        return oldest <= start <= self._last + 1

    def renew(self, snapshot: Snapshot) -> None:
        """This is what is there."""
        packed = list(pack_snapshot(snapshot.time_s, snapshot.keys, self._medium))
        self._snapshot = snapshot.sequence, packed
        self._coming = False

    def give(self, send: Send, send_last: SendLast) -> None:
        """Answer all who can be answered now."""
        self._going = [answer for answer in self._going if not answer.tracker.done]
        if not self._going:
            self._told = False
        since, self._since = self._since, []
        for who, start in since:
            self._answer(who, [], start, send, send_last)
        if self._coming or self._snapshot is None:
            return
        whole, self._whole = self._whole, []
        sequence, packed = self._snapshot
        for who in whole:
            self._answer(
                who, [(sequence, payload) for payload in packed], sequence + 1, send, send_last
            )

    def _answer(
        self,
        who: list[bytes],
        parts: list[tuple[int, bytes]],
        start: int,
        send: Send,
        send_last: SendLast,
    ) -> None:
        """`parts`, and what was kept from number `start` on, unless too much waits already."""
        kept = [(message.sequence, payload) for message, payload in self._kept]
        parts += [one for one in kept if one[0] >= start]
        size_bytes = sum(_MESSAGE_COST_BYTES + len(payload) for _, payload in parts)
        going_bytes = sum(answer.size_bytes for answer in self._going)
        own = sum(answer.who[0] == who[0] for answer in self._going)
        full = self._going and going_bytes + size_bytes > EVENT_ANSWER_BYTES_MAX
        if full or own >= EVENT_ANSWERS_MAX:
            self.dropped += 1
            if not self._told:
                self._told = True
                log.warning(
                    "a listener to events is not answered now: %d answers of %d bytes were not "
                    "taken yet, %d of them its own",
                    len(self._going),
                    going_bytes,
                    own,
                )
            return
        for sequence, payload in parts:
            send([*who, self._topic, sequence_bytes(sequence), payload])
        self._going.append(_Going(who, size_bytes, send_last([*who, b"", END, b""])))
