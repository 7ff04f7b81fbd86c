"""Hands KV of whole prompts from a producer to a consumer, who finds it by its tokens.

This is the older interface for disaggregated prefill: `insert` on one side, a blocking
`drop_select` on the other. An entry is a message (tensor_messages.py) under the buffer's name
and its number. Its producer lists it under keys made of its tokens' prefixes
(posting_lists.py), so that a consumer finds it in one question of the index, among however many.

Of several consumers one gets an entry: beside it lies its turn, a value that whoever wants the
entry deletes first. The one node that has it says to one of them that it was there, on whatever
hosts they are. An answer that is lost costs the entry: it is taken at most once, never twice.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from connector.limits import LOOKUP_ENTRIES_MAX, LOOKUP_PRODUCERS_MAX, TRANSFER_TIMEOUT_S
from connector.transfer import posting_lists, tensor_messages
from connector.transfer.posting_lists import PostingLists, TokenPrefixes
from connector.transfer.tensor_messages import TensorMessage, ValueStore
from kvstore import DeadlineError, PeerError, UsageError

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
class _Row:
    """Keeps what a consumer has said to one producer."""

    base: str
    dropped: deque[TensorMessage] = field(default_factory=deque)
    """Messages about what it dropped, kept until the producer has seen them."""
    owed: list[str] = field(default_factory=list)
    """Entries that it has dropped, whose message the store has not taken yet."""


@dataclass(slots=True)
class _Inserted:
    number: int
    messages: tuple[TensorMessage, ...]
    """Its body; then its tokens to match and its turn."""
    size_bytes: int
    taken_at: float | None = None
    """Time at which its turn was first missing."""


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
        base = f"lookup/{tensor_messages.check_name(name)}"
        bases = [base, *(f"{base}/of/{of}" for of in range(1, LOOKUP_PRODUCERS_MAX))]
        self._client = client
        self._base = bases[number]
        """Producer: first part of the keys of its entries."""
        self._producer = producer
        self._timeout_s = timeout_s
        self._bytes_max = tensor_messages.check_bytes_max(bytes_max)
        self._entries_max = entries_max
        self._device = device
        self._next = 0
        """Producer: number of the next entry; none is used twice."""
        self._inserted: deque[_Inserted] = deque()
        self._lists = PostingLists(client, self._base)
        self._rows = deque(map(_Row, bases[:producers]))
        """Consumer: one row for each producer; the one it took from last is at the end."""
        self._closed = False

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
        prefixes = TokenPrefixes(selected)
        number, self._next = self._next, self._next + 1
        entry = _entry(self._base, number)
        beside = {_head(entry): prefixes.raw} if prefixes.length else {}
        sent: list[TensorMessage] = []
        with ExitStack() as undo:
            undo.callback(self._release, sent)
            undo.callback(self._lists.forget, number)
            sent.append(tensor_messages.send(self._client, entry, tensors, deadline))
            sent.append(TensorMessage(entry))
            values = {**beside, _turn(entry): b"1"}
            tensor_messages.keep(self._client, sent[-1], values, deadline)
            # Listed last: whoever finds it can have it.
            self._lists.add(number, prefixes, deadline)
            undo.pop_all()
        self._inserted.append(_Inserted(number, tuple(sent), size_bytes))

    def _has_room(self, size_bytes: int) -> bool:
        self._give_back()
        held_bytes = sum(entry.size_bytes for entry in self._inserted)
        return not self._inserted or (
            len(self._inserted) < self._entries_max and held_bytes + size_bytes <= self._bytes_max
        )

    def _give_back(self) -> None:
        """Drop the entries that a consumer says it has, or took and never read; list anew what was
        in lists that were lost with a node."""
        if not self._inserted:
            return
        entries = [_entry(self._base, entry.number) for entry in self._inserted]
        lists = self._lists.names()
        asked = [*map(_word, entries), *map(_turn, entries), *lists]
        got = self._client.get_many(list(asked))
        there = {name for name, value in zip(asked, got, strict=True) if value is not None}
        now = time.monotonic()
        kept: deque[_Inserted] = deque()
        for name, entry in zip(entries, self._inserted, strict=True):
            if _turn(name) in there:
                entry.taken_at = None
            elif entry.taken_at is None:
                entry.taken_at = now
            abandoned = entry.taken_at is not None and now - entry.taken_at > self._timeout_s
            if _word(name) in there or abandoned:
                self._lists.forget(entry.number)
                self._release(entry.messages)
            else:
                kept.append(entry)
        self._inserted = kept
        with suppress(PeerError):  # else the next time
            self._lists.write_again({lists[name] for name in lists.keys() - there})

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
        selected = _selected(tokens, roi)
        wanted = None if selected is None else TokenPrefixes(selected)
        return tensor_messages.until(self._deadline(timeout_s), lambda: self._take(wanted))

    def _take(self, wanted: TokenPrefixes | None) -> KVEntry | None:
        for row in self._rows:
            owed, row.owed = row.owed, []
            for entry in owed:
                self._drop(row, entry)
        for row, entry in self._free(wanted):
            if not self._claim(entry):
                continue
            content = tensor_messages.receive(self._client, entry)
            # An entry that is gone although its turn is there was lost with its node.
            self._drop(row, entry)
            if content is not None:
                while self._rows[-1] is not row:
                    self._rows.rotate(-1)
                return KVEntry(*(t if t is None else t.to(self._device) for t in content.tensors))
        return None

    def _free(self, wanted: TokenPrefixes | None) -> Iterator[tuple[_Row, str]]:
        """Yield the entries that match and that nobody has taken yet, in the order in which they
        are to be taken, in two questions for all."""
        rows = [*self._rows]
        listed = posting_lists.look_up(self._client, [row.base for row in rows], wanted)
        found: list[tuple[_Row, str, bool | None]] = []
        for row, postings in zip(rows, listed, strict=True):
            for posting in postings:
                matches = posting.matches(wanted)
                if matches is not False:
                    found.append((row, _entry(row.base, posting.number), matches))
        turns = [_turn(entry) for _, entry, _ in found]
        heads = [_head(entry) for _, entry, matches in found if matches is None]
        got = self._client.get_many([*turns, *heads]) if found else []
        tokens = iter(got[len(turns) :])
        for (row, entry, matches), turn in zip(found, got, strict=False):
            begins = matches or _begins(next(tokens), wanted)
            if begins and turn is not None:
                yield row, entry

    def _claim(self, entry: str) -> bool:
        """Return whether the entry is this consumer's alone. False is another's, or nobody can tell
        now: then it is asked for again."""
        try:
            return self._client.delete(_turn(entry))
        except PeerError:
            return False

    def _drop(self, row: _Row, entry: str) -> None:
        """Tell the producer that it has its room again."""
        word = tensor_messages.hold(self._client, _word(entry), b"1")
        if word is None:
            row.owed.append(entry)
        else:
            row.dropped.append(word)
        # The producer has at most so many entries, and looks for words before each new one.
        while len(row.dropped) > LOOKUP_ENTRIES_MAX:
            tensor_messages.release(self._client, row.dropped.popleft())

    # Both

    def close(self, timeout_s: float = 0.0) -> None:
        """Close it. A producer waits up to `timeout_s` for the entries to be dropped, then takes
        back the rest. Safe to call twice."""
        if self._closed:
            return
        self._closed = True

        def empty() -> bool | None:
            self._give_back()
            return None if self._inserted else True

        tensor_messages.until(time.monotonic() + timeout_s, empty)
        for entry in self._inserted:
            self._release(entry.messages)
        self._inserted.clear()
        self._lists.close()
        for row in self._rows:
            for word in row.dropped:
                tensor_messages.leave(word)

    def _check_side(self, *, producer: bool) -> None:
        if self._closed:
            raise UsageError("lookup buffer", self._base, "is closed")
        if self._producer is not producer:
            which = "producer" if producer else "consumer"
            raise UsageError("producer", self._producer, f"only the {which} can do this")

    def _deadline(self, timeout_s: float | None) -> float:
        return time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)


def _entry(base: str, number: int) -> str:
    return f"{base}/{number}"


def _turn(entry: str) -> str:
    return f"{entry}/turn"


def _word(entry: str) -> str:
    return f"{entry}/dropped"


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


def _begins(entry: object, wanted: TokenPrefixes | None) -> bool:
    """Return whether the tokens of a longer entry begin with these; not when they are lost."""
    return isinstance(entry, bytes) and wanted is not None and entry.startswith(wanted.raw)
