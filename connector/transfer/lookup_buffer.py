"""Hands KV of whole prompts from a producer to a consumer, who finds it by its tokens.

This is the older interface for disaggregated prefill: `insert` on one side, a blocking
`drop_select` on the other. An entry is a message (tensor_messages.py) under the buffer's name
and its number, with a small message beside it that holds the tokens to match, its head. Several
producers have a row of entries each, which every consumer looks through in turn.

Of several consumers one gets an entry: beside it lies its turn, a value that whoever wants the
entry deletes first. The one node that has it says to one of them that it was there, on whatever
hosts they are. An answer that is lost costs the entry: it is taken at most once, never twice.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from connector.limits import LOOKUP_ENTRIES_MAX, LOOKUP_PRODUCERS_MAX, TRANSFER_TIMEOUT_S
from connector.transfer import tensor_messages
from connector.transfer.tensor_messages import TensorMessage, ValueStore
from kvstore import DeadlineError, PeerError, UsageError

NEWS_EVERY_ENTRIES = LOOKUP_ENTRIES_MAX // 2
"""Inserts after which a producer says anew which entries it has, for consumers that were away."""

if TYPE_CHECKING:
    import torch


class KVEntry(NamedTuple):
    """Holds one entry as it was inserted; tensors, or None where None was."""

    tokens: torch.Tensor
    roi: torch.Tensor | None
    key: torch.Tensor | None
    value: torch.Tensor | None
    hidden: torch.Tensor | None


@dataclass(slots=True)
class _Inserted:
    number: int
    messages: tuple[TensorMessage, ...]
    """Its body, its turn, its head."""
    size_bytes: int
    taken_at: float | None = None
    """When its turn was first seen to be gone."""


class LookupBuffer:
    """Implements one end of a lookup buffer. Not thread-safe.

    `name` names the buffer in the client's namespace and must be new. The end
    with `producer=True` inserts, the others drop. There may be several producers, each with a
    `number` of its own, of which every consumer says in `producers` how many; consumers may be
    any number and come and go. At most `entries_max` entries and `bytes_max` bytes of each
    producer are in it; an insert then waits. An entry that a consumer took and has not read
    within `timeout_s` of its producer is given back: that consumer died.
    `device` is where the tensors of an entry go.
    """

    def __init__(
        self,
        client: ValueStore,
        name: str,
        *,
        producer: bool,
        number: int = 0,
        producers: int = 1,
        timeout_s: float = TRANSFER_TIMEOUT_S,
        bytes_max: float = 1e9,
        entries_max: int = LOOKUP_ENTRIES_MAX,
        device: str | torch.device = "cpu",
    ) -> None:
        if not 0 < entries_max <= LOOKUP_ENTRIES_MAX:
            raise UsageError("entries_max", entries_max, f"must be from 1 to {LOOKUP_ENTRIES_MAX}")
        if not 0 <= number < LOOKUP_PRODUCERS_MAX:
            raise UsageError("number", number, f"must be from 0 to {LOOKUP_PRODUCERS_MAX - 1}")
        if not 0 < producers <= LOOKUP_PRODUCERS_MAX:
            raise UsageError("producers", producers, f"must be from 1 to {LOOKUP_PRODUCERS_MAX}")
        self._client = client
        self._base = f"lookup/{tensor_messages.check_name(name)}"
        if number:
            self._base += f"/of/{number}"
        self._producer = producer
        self._timeout_s = timeout_s
        self._bytes_max = tensor_messages.check_bytes_max(bytes_max)
        self._entries_max = entries_max
        self._device = device
        self._next = 0
        """Producer: number of the next entry. Consumer: of the next head to look for."""
        self._news: TensorMessage | None = None
        """Producer: what it said last of its entries."""
        self._news_at = 0
        """Producer: number of the next entry then."""
        self._inserted: deque[_Inserted] = deque()
        self._heads: dict[int, torch.Tensor] = {}
        """Consumer: tokens to match of the entries that are known and not dropped, in order."""
        self._dropped: deque[TensorMessage] = deque()
        """Consumer: its words about what it dropped, kept until the producer has seen them."""
        self._owed: list[int] = []
        """Consumer: entries it has dropped, about which the store has not taken the word yet."""
        self._closed = False
        self._rows: deque[LookupBuffer] = deque([self])
        """Consumer: one for each producer; the one it took from last is at the end."""
        if not producer:
            for of in range(1, producers):
                row = LookupBuffer(client, name, producer=False, number=of, device=device)
                self._rows.append(row)

    # Producer

    def insert(
        self,
        tokens: torch.Tensor,
        roi: torch.Tensor | None,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        hidden: torch.Tensor | None,
        timeout_s: float | None = None,
    ) -> None:
        """Offer the KV of `tokens` (1-d, integers) to the consumers.

        `roi` is a boolean mask over `tokens` of those that `drop_select` compares;
        None is all. `key`, `value` and `hidden` are tensors or None, of any shape.
        Raises `DeadlineError` when the buffer stays full (nothing was inserted)
        and `UsageError` for tensors that do not fit together or into it.
        """
        self._check_side(producer=True)
        selected = _selected(tokens, roi)
        if selected is None:
            raise UsageError("tokens", None, "must be a tensor: an entry is found by its tokens")
        tensors = [tokens, roi, key, value, hidden]
        size_bytes = tensor_messages.size_of([*tensors, selected])
        if size_bytes > self._bytes_max:
            raise UsageError("entry", f"{size_bytes} bytes", f"at most {self._bytes_max}")
        deadline = self._deadline(timeout_s)
        if tensor_messages.until(deadline, lambda: self._has_room(size_bytes) or None) is None:
            raise DeadlineError(f"{self._base}: timed out: full, no entry was dropped")
        name = self._entry(self._next)
        sent: list[TensorMessage] = []
        try:
            # The head last: whoever sees it can have the entry.
            for part, of in ((name, tensors), (self._turn(self._next), []), (_head(name), None)):
                content = [selected] if of is None else of
                sent.append(tensor_messages.send(self._client, part, content, deadline))
        except BaseException:
            self._release(sent)
            raise
        size_bytes = sum(message.size_bytes for message in sent)
        self._inserted.append(_Inserted(self._next, tuple(sent), size_bytes))
        self._next += 1
        if self._next >= self._news_at + NEWS_EVERY_ENTRIES:
            self._tell_news()

    def _tell_news(self) -> None:
        """Say which entries there are, and the number of the next: once in a while, so that who
        looks from there on sees all that came since."""
        if self._news is not None:
            tensor_messages.release(self._client, self._news)
        said = json.dumps([self._next, [entry.number for entry in self._inserted]]).encode()
        self._news = tensor_messages.hold(self._client, f"{self._base}/news", said)
        if self._news is not None:
            self._news_at = self._next

    def _has_room(self, size_bytes: int) -> bool:
        self._give_back()
        held_bytes = sum(entry.size_bytes for entry in self._inserted)
        return not self._inserted or (
            len(self._inserted) < self._entries_max and held_bytes + size_bytes <= self._bytes_max
        )

    def _give_back(self) -> None:
        """Drop the entries that a consumer says it has, or took and never read."""
        if not self._inserted:
            return
        numbers = [entry.number for entry in self._inserted]
        asked = [*map(self._word, numbers), *map(self._turn, numbers)]
        got = self._client.get_many(list(asked))
        now = time.monotonic()
        kept: deque[_Inserted] = deque()
        for i, entry in enumerate(self._inserted):
            if got[len(numbers) + i] is not None:
                entry.taken_at = None
            elif entry.taken_at is None:
                entry.taken_at = now
            abandoned = entry.taken_at is not None and now - entry.taken_at > self._timeout_s
            if got[i] is None and not abandoned:
                kept.append(entry)
            else:
                self._release(entry.messages)
        self._inserted = kept

    def _release(self, messages: Iterable[TensorMessage]) -> None:
        for message in reversed([*messages]):
            tensor_messages.release(self._client, message)

    # Consumer

    def drop_select(
        self,
        tokens: torch.Tensor | None = None,
        roi: torch.Tensor | None = None,
        timeout_s: float | None = None,
    ) -> KVEntry | None:
        """Take the oldest entry whose tokens match out of the buffer, waiting for one.

        The tokens under `roi` (1-d boolean mask, None: all) match an entry's when
        the shorter of the two is not empty and the longer begins with it; `tokens`
        None matches every entry. Of several producers' entries it is the oldest of one of
        them, in turn. None: no entry matched before the deadline, a miss.
        """
        self._check_side(producer=False)
        wanted = _selected(tokens, roi)
        return tensor_messages.until(self._deadline(timeout_s), lambda: self._take(wanted))

    def _take(self, wanted: torch.Tensor | None) -> KVEntry | None:
        for _ in range(len(self._rows)):
            row = self._rows[0]
            self._rows.rotate(-1)
            entry = row._take_own(wanted)
            if entry is not None:
                return entry
        return None

    def _take_own(self, wanted: torch.Tensor | None) -> KVEntry | None:
        self._look()
        for number, selected in list(self._heads.items()):
            if wanted is not None and not _common_prefix(selected, wanted):
                continue
            if not self._claim(number):
                continue
            content = tensor_messages.receive(self._client, self._entry(number))
            # An entry that is gone although its head is there was lost with its node.
            self._drop(number)
            if content is not None:
                return KVEntry(*(t if t is None else t.to(self._device) for t in content.tensors))
        return None

    def _claim(self, number: int) -> bool:
        """Return whether the entry is this consumer's alone. False is another's, or nobody can tell
        now: then it is asked for again."""
        try:
            return self._client.delete(self._turn(number))
        except PeerError:
            return False

    def _look(self) -> None:
        """Learn of new entries, and of those that others took; one that is missing before a
        newer one was lost, or is another's."""
        owed, self._owed = self._owed, []
        for number in owed:
            self._drop(number)
        known = list(self._heads)
        words = [f"{self._base}/news", *map(self._word, known)]
        news, *taken = self._client.get_many(list(words))
        for number, word in zip(known, taken, strict=True):
            if word is not None:
                del self._heads[number]
        for number in self._numbers_to_look_for(news):
            content = tensor_messages.receive(self._client, _head(self._entry(number)))
            self._next = max(self._next, number + 1)
            if content is not None:
                self._heads[number] = content.tensors[0]
            elif self._claim(number):
                self._drop(number)

    def _numbers_to_look_for(self, news: bytes | None) -> list[int]:
        """Of entries that this consumer does not know, up to the newest that is there."""
        numbers: list[int] = []
        if news is not None:
            start, there = json.loads(bytes(news))
            if start > self._next:  # others took so much meanwhile
                numbers = [number for number in there if number >= self._next]
                self._next = start
        numbers += range(self._next, self._next + LOOKUP_ENTRIES_MAX)
        names = [_head(self._entry(number)) for number in numbers]
        return numbers[: tensor_messages.newest(self._client, names) + 1]

    def _drop(self, number: int) -> None:
        """Forget an entry and tell the producer."""
        self._heads.pop(number, None)
        word = tensor_messages.hold(self._client, self._word(number), b"1")
        if word is None:
            self._owed.append(number)
        else:
            self._dropped.append(word)
        # The producer has at most so many entries, and looks for words before each new one.
        while len(self._dropped) > LOOKUP_ENTRIES_MAX:
            tensor_messages.release(self._client, self._dropped.popleft())

    # Both

    def close(self, timeout_s: float = 0.0) -> None:
        """Producer: wait up to `timeout_s` for the entries to be dropped, then take back the
        rest. Safe to call twice."""
        if self._closed:
            return
        self._closed = True

        def empty() -> bool | None:
            self._give_back()
            return None if self._inserted else True

        tensor_messages.until(time.monotonic() + timeout_s, empty)
        for entry in self._inserted:
            self._release(entry.messages)
        if self._news is not None:
            tensor_messages.release(self._client, self._news)
        for word in self._dropped:
            tensor_messages.leave(word)
        self._inserted.clear()
        self._heads.clear()
        for row in self._rows:
            row.close()

    def _check_side(self, *, producer: bool) -> None:
        if self._closed:
            raise UsageError("lookup buffer", self._base, "is closed")
        if self._producer is not producer:
            which = "producer" if producer else "consumer"
            raise UsageError("producer", self._producer, f"only the {which} can do this")

    def _deadline(self, timeout_s: float | None) -> float:
        return time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)

    def _entry(self, number: int) -> str:
        return f"{self._base}/{number}"

    def _turn(self, number: int) -> str:
        return f"{self._base}/{number}/turn"

    def _word(self, number: int) -> str:
        return f"{self._base}/{number}/dropped"


def _head(entry: str) -> str:
    return f"{entry}/head"


def _selected(tokens: torch.Tensor | None, roi: torch.Tensor | None) -> torch.Tensor | None:
    """Return the tokens under the mask, 64-bit in CPU memory; None for no tokens."""
    import torch

    if tokens is None:
        if roi is not None:
            raise UsageError("roi", "a mask", "must be None when tokens is None")
        return None
    if not isinstance(tokens, torch.Tensor) or tokens.dim() != 1 or tokens.is_floating_point():
        raise UsageError("tokens", _shown(tokens), "must be a 1-d tensor of integers")
    if roi is None:
        return tokens.to("cpu", torch.int64)
    if (
        not isinstance(roi, torch.Tensor)
        or roi.dtype != torch.bool
        or tuple(roi.shape) != tuple(tokens.shape)
    ):
        raise UsageError(
            "roi", _shown(roi), f"must be a boolean mask over the {len(tokens)} tokens"
        )
    return tokens.to("cpu", torch.int64)[roi.to("cpu")]


def _shown(value: object) -> str:
    shape = getattr(value, "shape", None)
    if shape is None:
        return type(value).__name__
    return f"{getattr(value, 'dtype', '')} {tuple(shape)}"


def _common_prefix(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether the shorter is not empty and the longer begins with it."""
    shorter = min(len(one), len(other))
    return shorter > 0 and bool((one[:shorter] == other[:shorter]).all())
