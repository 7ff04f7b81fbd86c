"""Adds up what one node says of its blocks; what is missing is asked for. No I/O, no clock.

A view is in one of these:

    new       nothing is known: everything is asked for
    in sync   each message has the number that follows: it is applied
    asking    a number was missing, or the node has started anew: what it says meanwhile waits, and
              the keys of before stand. The answer is what was missed, or a snapshot, which takes
              the place of all keys at once, when it is complete

Must never happen: a message applied that does not follow on the keys that are there.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from kvstore.compiled.key_set import KeySet, new_key_set
from kvstore.errors import PeerError
from kvstore.limits import (
    EVENT_BLOCKS_MAX,
    EVENT_MESSAGES_WAITING_MAX,
    EVENTS_ANSWER_S,
    EVENTS_SILENT_S,
)
from kvstore.protocol.block_events import (
    END,
    BlockChanges,
    Source,
    sequence_of,
    source_of,
    unpack_changes,
)

EVERYTHING = 0
"""The number that is asked for to have a snapshot."""


class EventsMessage(NamedTuple):
    """What a node said, on either of its sockets."""

    source: Source
    sequence: int
    changes: list[BlockChanges]


def message_of(topic: bytes, sequence: bytes, payload: bytes) -> EventsMessage:
    """Raises `PeerError` for what no node sends."""
    return EventsMessage(source_of(topic), sequence_of(sequence), unpack_changes(payload))


class NodeView:
    """The blocks of one node, as far as it has told. One thread changes it; `keys` may be looked at
    by others."""

    def __init__(self) -> None:
        self.source: Source | None = None
        self.keys: KeySet = new_key_set()
        self.gaps = 0
        """How often something was missed."""
        self.snapshots = 0
        self._sequence = -1
        """Of the last message in `keys`."""
        self._fresh: KeySet | None = None
        """Of a snapshot that is not complete."""
        self._fresh_source: Source | None = None
        self._asking = False
        self._asked_at = float("-inf")
        self._heard_at = float("-inf")
        self._later: deque[EventsMessage] = deque(maxlen=EVENT_MESSAGES_WAITING_MAX)

    def in_sync(self, now: float) -> bool:
        """Return whether `keys` are what the node has, as far as it has been heard."""
        return self.source is not None and not self._asking and self.alive(now)

    def alive(self, now: float) -> bool:
        """Return whether the node was heard lately. One that was not holds nothing."""
        return now - self._heard_at <= EVENTS_SILENT_S

    def overdue(self, now: float) -> int | None:
        """Return the number to ask for, on a new connection, because nothing is known or the answer
        does not come; None while there is no need."""
        if self.source is not None and not self._asking:
            return None
        if now - self._asked_at < EVENTS_ANSWER_S:
            return None
        return self._ask(EVERYTHING, now)

    def published(self, message: EventsMessage, now: float) -> int | None:
        """The node said this to everybody. Returns the number to ask for, None without need."""
        self._heard_at = now
        if self._asking or self.source is None:
            self._later.append(message)
            return None
        return self._take(message, now)

    def answered(self, parts: list[bytes], now: float) -> int | None:
        """The node answered with one more message, of `[topic, sequence, payload]`. Returns as
        `published`. Raises `PeerError` for what no node sends, and for an answer that leaves
        something out, as a node does that has too much to say: it is overdue soon."""
        if not self._asking or len(parts) != 3:
            raise PeerError("an answer about events that was not asked for")
        self._heard_at = self._asked_at = now
        if parts[1] == END:
            return self._answer_ends(now)
        message = message_of(*parts)
        if message.changes and message.changes[0].cleared and message.source != self._fresh_source:
            self._fresh, self._fresh_source = new_key_set(), message.source
            self._sequence = message.sequence
        if message.source != (self._fresh_source or self.source):
            raise PeerError(f"an answer about events comes from {message.source}")
        if self._fresh_source and message.sequence == self._sequence:
            self._apply(message)
            return None
        if message.sequence > self._sequence + 1:
            raise PeerError(f"an answer about events lacks number {self._sequence + 1}")
        return self._follow(message, now)

    def _answer_ends(self, now: float) -> int | None:
        if self._fresh is not None:
            self.source, self.keys = self._fresh_source, self._fresh
            self._fresh = self._fresh_source = None
            self.snapshots += 1
        self._asking = False
        later, self._later = self._later, deque(maxlen=EVENT_MESSAGES_WAITING_MAX)
        for message in later:
            missing = self._take(message, now)
            if missing is not None:
                return missing
        return None

    def _take(self, message: EventsMessage, now: float) -> int | None:
        if message.source != self.source:
            self.gaps += 1
            return self._ask(EVERYTHING, now)
        return self._follow(message, now)

    def _follow(self, message: EventsMessage, now: float) -> int | None:
        if message.sequence <= self._sequence:
            return None
        if message.sequence > self._sequence + 1:
            self.gaps += 1
            return self._ask(self._sequence + 1, now)
        self._apply(message)
        self._sequence = message.sequence
        return None

    def _apply(self, message: EventsMessage) -> None:
        keys = self.keys if self._fresh is None else self._fresh
        for change in message.changes:
            if change.cleared:
                keys.clear()
            keys.difference_update(change.removed)
            if len(keys) < EVENT_BLOCKS_MAX:
                keys.update(change.stored)

    def _ask(self, start: int, now: float) -> int:
        self._fresh = self._fresh_source = None
        self._asking = True
        self._asked_at = now
        return start
