"""Finds the entries of a lookup buffer by their tokens, through keys that are made of prefixes.

A producer keeps posting lists: which of its entries begin with a prefix, under a key that is the
hash of that prefix (`kvstore.Namespace`). Prefixes have the lengths of a ladder, 0, 1, 64, 4096
and so on. An entry is in the list of each of its own: in that of the longest as one that `ends`
before the next rung, in the others as one that goes `on`. All entries that match some tokens are
therefore in the lists of what `ends` at each prefix of theirs, and of what goes `on` from the
longest: one question, however many entries there are.

A list is one value, written anew when an entry comes. The version before stays until the one
after, under the other of two names, so that who reads meanwhile finds one of them. What a list
says is a hint: an entry that was dropped is in it until it is written again.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from connector.transfer import tensor_messages
from connector.transfer.tensor_messages import TensorMessage, ValueStore
from kvstore import Namespace
from kvstore.spi import Key

if TYPE_CHECKING:
    import torch

RUNG_FACTOR = 64
"""Factor between the lengths of prefixes that have a list: an entry of 2,000 tokens is in three."""
_NAMESPACE = Namespace({"keys of": "token prefixes in a lookup buffer"})
_VERSION = struct.Struct("<Q")
_POSTING = struct.Struct("<QI32s")
_WORDS = 2
"""32-bit words of one token: tokens have 64 bits here, the store's keys are made of 32-bit ones."""


class TokenPrefixes:
    """Names the prefixes of `tokens` (1-d, int64, CPU) by their keys; each is hashed once."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self.length = len(tokens)
        self.raw = array("q", tokens.tolist()).tobytes()
        self._words = array("I", self.raw)
        self._keys: dict[int, Key] = {}

    def key(self, length: int) -> Key:
        """Return the key of the first `length` tokens, at least one."""
        known = self._keys.get(length)
        if known is None:
            words = length * _WORDS
            (known,) = _NAMESPACE.block_keys(self._words[:words], words)
            self._keys[length] = known
        return known

    def rungs(self) -> Iterator[int]:
        """Yield the lengths of the prefixes that have lists, the empty one first."""
        yield 0
        rung = 1
        while rung <= self.length:
            yield rung
            rung *= RUNG_FACTOR

    def lists_of_entry(self) -> list[str]:
        """Return the names of the lists that an entry of these tokens is in."""
        *passed, last = self.rungs()
        return [*(self._list("on", rung) for rung in passed), self._list("ends", last)]

    def lists_of_query(self) -> list[str]:
        """Return the names of the lists that contain all entries which match these tokens."""
        rungs = [*self.rungs()][1:]
        return [
            *(self._list("ends", rung) for rung in rungs),
            *(self._list("on", rung) for rung in rungs[-1:]),
        ]

    def _list(self, kind: str, rung: int) -> str:
        return f"{kind}/{self.key(rung).hex()}" if rung else kind


LISTS_OF_ALL = ["ends", "on"]
"""Names of the lists that every entry is in."""


class Posting(NamedTuple):
    """Describes one entry as far as that is possible without its tokens."""

    number: int
    tokens: int
    """Number of its tokens."""
    key: bytes
    """Key of all its tokens; zeros where there are none."""

    def matches(self, wanted: TokenPrefixes | None) -> bool | None:
        """Return whether the shorter of the two begins the longer; None: only the entry's tokens
        can tell."""
        if wanted is None:
            return True
        if self.tokens > wanted.length:
            return None
        return self.tokens > 0 and wanted.key(self.tokens) == self.key


class PostingLists:
    """Keeps the lists of one producer's entries in the store, pinned."""

    def __init__(self, store: ValueStore, base: str) -> None:
        self._store = store
        self._base = base
        self._lists: dict[str, dict[int, Posting]] = {}
        self._lists_of: dict[int, list[str]] = {}
        self._sides: dict[str, int] = {}
        """List -> which of its two keys was written last."""
        self._version = 0
        """The version for all lists: of two, the later one counts."""
        self._due: set[str] = set()
        """Lists that are to be written."""
        self._held = TensorMessage(base)

    def add(self, number: int, prefixes: TokenPrefixes, deadline: float) -> None:
        """Let an entry be found. Raises as `tensor_messages.replace`; then it may or may not be."""
        length = prefixes.length
        posting = Posting(number, length, prefixes.key(length) if length else b"")
        self._lists_of[number] = prefixes.lists_of_entry()
        for name in self._lists_of[number]:
            self._lists.setdefault(name, {})[number] = posting
            self._due.add(name)
        self._write(deadline)

    def forget(self, number: int) -> None:
        """Take an entry out: lists that have no other are released, the rest are correct once they
        are written again."""
        for name in self._lists_of.pop(number, ()):
            self._lists[name].pop(number)
            if not self._lists[name]:
                del self._lists[name]
                self._due.discard(name)
                self._sides.pop(name, None)
                keys = _both_keys(self._base, name)
                tensor_messages.release(self._store, self._held, keys)

    def names(self) -> dict[str, str]:
        """Return the keys of what was written last, and which list each is."""
        return {_both_keys(self._base, name)[side]: name for name, side in self._sides.items()}

    def write_again(self, lost: Iterable[str]) -> None:
        """Write those of these lists again that the store has lost. Raises as `add`."""
        self._due.update(self._lists.keys() & lost)
        self._write(deadline=0.0)

    def _write(self, deadline: float) -> None:
        if not self._due:
            return
        self._version += 1
        head = _VERSION.pack(self._version)
        sides = {name: 1 - self._sides.get(name, 1) for name in self._due}
        values = {
            _both_keys(self._base, name)[side]: head
            + b"".join(_POSTING.pack(*posting) for posting in self._lists[name].values())
            for name, side in sides.items()
        }
        tensor_messages.replace(self._store, self._held, values, deadline)
        self._sides.update(sides)
        self._due.clear()

    def close(self) -> None:
        """Take all lists back."""
        tensor_messages.release(self._store, self._held)


def look_up(
    store: ValueStore, bases: Sequence[str], wanted: TokenPrefixes | None
) -> list[list[Posting]]:
    """Return the entries under each of `bases` that may match, the oldest first; one question."""
    lists = LISTS_OF_ALL if wanted is None else wanted.lists_of_query()
    keys = [key for base in bases for name in lists for key in _both_keys(base, name)]
    values = store.get_many(list(keys)) if keys else []
    newest = [_newest(*values[i : i + 2]) for i in range(0, len(values), 2)]
    return [
        sorted(chain.from_iterable(newest[i * len(lists) : (i + 1) * len(lists)]))
        for i in range(len(bases))
    ]


def _newest(*versions: object) -> list[Posting]:
    """Return the postings of the newer one of a list's two versions that a producer wrote."""
    there = [version for version in versions if isinstance(version, bytes) and _whole(version)]
    newest = max(there, key=_VERSION.unpack_from, default=bytes(_VERSION.size))
    return [Posting(*fields) for fields in _POSTING.iter_unpack(newest[_VERSION.size :])]


def _whole(version: bytes) -> bool:
    postings = len(version) - _VERSION.size
    return postings >= 0 and postings % _POSTING.size == 0


def _both_keys(base: str, name: str) -> list[str]:
    """Return the two keys that the versions of a list have in turn."""
    return [f"{base}/{name}/{side}" for side in (0, 1)]
