"""Answers listeners to a node's events: what they missed, or a snapshot; and bounds what waits.

What was published lately is kept, and the last snapshot. An answer waits in this process until its
listener has taken it or is gone, which its last message tells; how much waits so is bounded, in
all and for each listener, because whoever can connect may ask and never read. A question that does
not fit waits for its turn and is answered once earlier answers were taken, which `give` finds out
whenever it is called. Questions that wait are bounded too: of one listener, and in all. What is
beyond that is dropped, and its listener asks again.

While questions wait for room, or take all places, whoever had its answer for long enough and has
not taken it is hung up on, by whichever transport it came: whether it reads nothing, or a little
now and then. Others may take as long as they like.

The first that waits for room keeps what room there is for itself, so that small answers do not pass
a large one for ever. A listener's own answers keep nobody else waiting. What a question is answered
with is chosen when it is its turn: by then less may be kept, or the snapshot be old.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable
from itertools import islice
from typing import NamedTuple, Protocol

from kvstore.limits import (
    EVENT_ANSWER_BYTES_MAX,
    EVENT_ANSWER_TAKEN_S,
    EVENT_ANSWERS_MAX,
    EVENT_BACKLOG_MAX,
    EVENT_MESSAGES_WAITING_MAX,
    EVENT_REPLAYS_MAX,
)
from kvstore.protocol.block_events import END, BlockChanges, pack_snapshot, sequence_bytes
from kvstore.types import Key

log = logging.getLogger("kvstore.node")

_MESSAGE_COST_BYTES = 1 << 10
"""Bytes that a message waiting for a listener takes beyond its payload."""


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


class Origin(Protocol):
    """Where a question came from."""

    @property
    def gone(self) -> bool: ...

    def hang_up(self) -> None: ...


class _Kept(NamedTuple):
    """A message that was published."""

    sequence: int
    cost: int
    payload: bytes
    bytes_before: int
    """Bytes that all messages before it would take while they wait."""


class _Question(NamedTuple):
    """A question of a listener that wants everything from number `start` on; 0 means a snapshot."""

    who: list[bytes]
    start: int
    origin: Origin


class _Contents(NamedTuple):
    """What an answer consists of: a snapshot's parts, and what was kept from `start` on."""

    parts: list[tuple[int, bytes]]
    start: int
    size_bytes: int


class _Going(NamedTuple):
    """An answer that a listener has not taken yet, as far as is known."""

    who: list[bytes]
    size_bytes: int
    tracker: Tracker
    origin: Origin
    since_s: float


Send = Callable[[list[bytes]], None]
SendLast = Callable[[list[bytes]], Tracker]


class Answers:
    """What was published lately, the last snapshot, and who waits for which part of them."""

    def __init__(self, topic: bytes, medium: str) -> None:
        self._topic = topic
        self._medium = medium
        self._kept: deque[_Kept] = deque()
        """Messages with consecutive numbers."""
        self._kept_cost = 0
        self._kept_bytes = 0
        """Bytes that all messages ever kept would take while they wait."""
        self._last = -1
        self._snapshot: tuple[int, list[tuple[int, bytes]], int] | None = None
        """The snapshot's number, its parts, and the bytes they take while they wait."""
        self._fresh = False
        """Whether the snapshot was made for those who wait now."""
        self._waiting: list[_Question] = []
        """Questions in the order in which they came."""
        self.needs_snapshot = False
        self._coming = False
        """Whether a snapshot was asked for."""
        self._going: list[_Going] = []
        self.stuck = False
        """Somebody waits until an answer is taken, or its listener is gone: `give` must be called
        again without another reason."""
        self.dropped = 0
        """Questions that are not answered because too many waited."""
        self._logged = False
        """Whether that was logged, and something has waited ever since."""

    def keep(self, message: EventMessage, payload: bytes) -> None:
        """Keep a message that was published, for listeners who missed it."""
        if message.sequence != self._last + 1:
            self._kept.clear()
            self._kept_cost = 0
        self._last = message.sequence
        self._kept.append(_Kept(message.sequence, message.cost, payload, self._kept_bytes))
        self._kept_cost += message.cost
        self._kept_bytes += _MESSAGE_COST_BYTES + len(payload)
        while self._kept_cost > EVENT_BACKLOG_MAX:
            self._kept_cost -= self._kept.popleft().cost

    def asked(self, who: list[bytes], start: int, origin: Origin) -> None:
        """Note that `who` (its name, and what is to stand before an answer) wants everything from
        that number on."""
        own = sum(one.who[0] == who[0] for one in self._waiting)
        if len(self._waiting) < EVENT_REPLAYS_MAX and own < EVENT_ANSWERS_MAX:
            self._waiting.append(_Question(who, start, origin))
            return
        self.dropped += 1
        if not self._logged:
            self._logged = True
            log.warning(
                "a question of a listener to events is not answered: %d wait, %d of them its own; "
                "%d answers of %d bytes were not taken yet",
                len(self._waiting),
                own,
                len(self._going),
                sum(answer.size_bytes for answer in self._going),
            )

    def renew(self, snapshot: Snapshot) -> None:
        """Replace the snapshot of what is there."""
        packed = pack_snapshot(snapshot.time_s, snapshot.keys, self._medium)
        parts = [(snapshot.sequence, payload) for payload in packed]
        size_bytes = sum(_MESSAGE_COST_BYTES + len(payload) for _, payload in parts)
        self._snapshot = snapshot.sequence, parts, size_bytes
        self._coming = False
        self._fresh = True

    def give(self, send: Send, send_last: SendLast, now: float) -> None:
        """Answer all who can be answered now, and hang up on who keeps others from it."""
        self._going = [answer for answer in self._going if not answer.tracker.done]
        waiting = [question for question in self._waiting if not question.origin.gone]
        if not self._going and not waiting:
            self._logged = False
        own = Counter(answer.who[0] for answer in self._going)
        going_bytes = sum(answer.size_bytes for answer in self._going)
        full = self.stuck = False
        self._waiting = []
        for question in waiting:
            contents = None
            if full or own[question.who[0]] >= EVENT_ANSWERS_MAX:
                self.stuck = True
            elif contents := self._contents(question.start):
                wanted = going_bytes + contents.size_bytes
                if self._going and wanted > EVENT_ANSWER_BYTES_MAX:
                    full = self.stuck = True
                    contents = None
            if contents is None:
                self._waiting.append(question)
                continue
            tracker = self._answer(question.who, contents, send, send_last)
            going = _Going(question.who, contents.size_bytes, tracker, question.origin, now)
            self._going.append(going)
            own[question.who[0]] += 1
            going_bytes += contents.size_bytes
        self._fresh = False
        if full or len(self._waiting) >= EVENT_REPLAYS_MAX:
            self._make_room(now)

    def _make_room(self, now: float) -> None:
        """Hang up on those who had the time to take their answers."""
        for answer in self._going:
            if now - answer.since_s >= EVENT_ANSWER_TAKEN_S:
                answer.origin.hang_up()

    def _contents(self, start: int) -> _Contents | None:
        """Return what answers who wants all from number `start` on; `None` while a snapshot is to
        come."""
        if start and self._reaches(start):
            return _Contents([], start, self._bytes_since(start))
        if self._snapshot is not None:
            sequence, parts, size_bytes = self._snapshot
            # One that is old would need very many messages after it.
            few = self._last - sequence <= EVENT_MESSAGES_WAITING_MAX
            if self._fresh or (few and self._reaches(sequence + 1)):
                size_bytes += self._bytes_since(sequence + 1)
                return _Contents(parts, sequence + 1, size_bytes)
        if not self._coming:
            self.needs_snapshot = self._coming = True
        return None

    @property
    def _oldest(self) -> int:
        return self._kept[0].sequence if self._kept else self._last + 1

    def _reaches(self, start: int) -> bool:
        """Return whether all from that number on is kept."""
        return self._oldest <= start <= self._last + 1

    def _bytes_since(self, start: int) -> int:
        """Return what the messages that are kept from that number on take while they wait."""
        if start > self._last:
            return 0
        first = self._kept[max(start - self._oldest, 0)]
        return self._kept_bytes - first.bytes_before

    def _answer(
        self, who: list[bytes], contents: _Contents, send: Send, send_last: SendLast
    ) -> Tracker:
        count = min(max(self._last + 1 - contents.start, 0), len(self._kept))
        since = [(one.sequence, one.payload) for one in islice(reversed(self._kept), count)]
        for sequence, payload in [*contents.parts, *reversed(since)]:
            send([*who, self._topic, sequence_bytes(sequence), payload])
        return send_last([*who, b"", END, b""])
