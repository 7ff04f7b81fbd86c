"""Hands KV of whole prompts from a producer to a consumer, who finds it by its tokens.

This is the older interface for disaggregated prefill: `insert` on one side, a blocking
`drop_select` on the other. An entry is a message (tensor_messages.py) under the buffer's name
and its number, with a small message beside it that holds the tokens to match. Several producers
have a row of entries each, which the one consumer looks through in turn. There is one consumer,
for two could take the same entry: across hosts the store has nothing that only one gets.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

from connector.limits import LOOKUP_ENTRIES_MAX, LOOKUP_PRODUCERS_MAX, TRANSFER_TIMEOUT_S
from connector.transfer import tensor_messages
from connector.transfer.tensor_messages import TensorMessage, ValueStore
from kvstore import DeadlineError, UsageError


class KVEntry(NamedTuple):
    """Holds one entry as it was inserted; tensors, or None where None was."""

    tokens: Any
    roi: Any
    key: Any
    value: Any
    hidden: Any


@dataclass(slots=True)
class _Inserted:
    number: int
    head: TensorMessage
    body: TensorMessage


class LookupBuffer:
    """Implements one end of a lookup buffer. Not thread-safe.

    `name` names the buffer in the client's namespace and must be new. The end
    with `producer=True` inserts, the other drops. There may be several producers, each with a
    `number` of its own, of which the consumer says in `producers` how many. At most
    `entries_max` entries and `bytes_max` bytes of each are in it; an insert then waits.
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
        device: Any = "cpu",
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
        self._inserted: deque[_Inserted] = deque()
        self._heads: dict[int, Any] = {}
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
        tokens: Any,
        roi: Any,
        key: Any,
        value: Any,
        hidden: Any,
        timeout_s: float | None = None,
    ) -> None:
        """Offer the KV of `tokens` (1-d, integers) to the consumer.

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
        body = tensor_messages.send(self._client, name, tensors, deadline)
        try:
            # Last: whoever sees the head can have the entry.
            head = tensor_messages.send(self._client, f"{name}/head", [selected], deadline)
        except BaseException:
            tensor_messages.release(self._client, body)
            raise
        self._inserted.append(_Inserted(self._next, head, body))
        self._next += 1

    def _has_room(self, size_bytes: int) -> bool:
        self._give_back()
        held_bytes = sum(entry.head.size_bytes + entry.body.size_bytes for entry in self._inserted)
        return not self._inserted or (
            len(self._inserted) < self._entries_max and held_bytes + size_bytes <= self._bytes_max
        )

    def _give_back(self) -> None:
        """Drop the entries that the consumer says it has."""
        if not self._inserted:
            return
        words = [self._word(entry.number) for entry in self._inserted]
        got = self._client.get_many(list(words))
        kept: deque[_Inserted] = deque()
        for entry, word in zip(self._inserted, got, strict=True):
            if word is None:
                kept.append(entry)
            else:
                tensor_messages.release(self._client, entry.head)
                tensor_messages.release(self._client, entry.body)
        self._inserted = kept

    # Consumer

    def drop_select(
        self, tokens: Any = None, roi: Any = None, timeout_s: float | None = None
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

    def _take(self, wanted: Any) -> KVEntry | None:
        for _ in range(len(self._rows)):
            row = self._rows[0]
            self._rows.rotate(-1)
            entry = row._take_own(wanted)
            if entry is not None:
                return entry
        return None

    def _take_own(self, wanted: Any) -> KVEntry | None:
        self._look()
        for number, selected in list(self._heads.items()):
            if wanted is not None and not _common_prefix(selected, wanted):
                continue
            content = tensor_messages.receive(self._client, self._entry(number))
            # An entry that is gone although its head is there was lost with its node.
            self._drop(number)
            if content is not None:
                return KVEntry(*(t if t is None else t.to(self._device) for t in content.tensors))
        return None

    def _look(self) -> None:
        """Learn of new entries; one that is missing before a newer one was lost."""
        owed, self._owed = self._owed, []
        for number in owed:
            self._drop(number)
        numbers = range(self._next, self._next + LOOKUP_ENTRIES_MAX)
        newest = tensor_messages.newest(self._client, [f"{self._entry(n)}/head" for n in numbers])
        for number in numbers[: newest + 1]:
            content = tensor_messages.receive(self._client, f"{self._entry(number)}/head")
            self._next = number + 1
            if content is None:
                self._drop(number)
            else:
                self._heads[number] = content.tensors[0]

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
            tensor_messages.release(self._client, entry.head)
            tensor_messages.release(self._client, entry.body)
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

    def _word(self, number: int) -> str:
        return f"{self._base}/{number}/dropped"


def _selected(tokens: Any, roi: Any) -> Any:
    """The tokens under the mask, 64-bit in CPU memory; None for no tokens."""
    import torch as untyped_torch

    torch: Any = untyped_torch
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


def _shown(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return type(value).__name__ if shape is None else f"{value.dtype} {tuple(shape)}"


def _common_prefix(one: Any, other: Any) -> bool:
    """Whether the shorter is not empty and the longer begins with it."""
    shorter = min(len(one), len(other))
    return shorter > 0 and bool((one[:shorter] == other[:shorter]).all())
