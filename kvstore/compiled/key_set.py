"""Keeps sets of keys that say how many leading ones of a prompt's blocks are in them.

In a `set` of Python's a look-up is three lines of memory, one after the other: the table's, the
key's, that of its hash. Of 2,000 keys that is most of what a router's answer costs once the caches
are cold (docs/decisions/0088). The compiled one has the keys in its table, and those of the next
keys are on their way while one is looked at; keys may come as bytes, without an object each.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from pathlib import Path
from struct import Struct
from typing import Protocol

from kvstore.compiled import part
from kvstore.errors import UsageError
from kvstore.types import KEY_BYTES, Key

MODULE = "kvstore.compiled._key_set"
SOURCE = Path(__file__).with_suffix(".c")
SECRET_BYTES = 80
"""Bytes of the secret for the hash of one set: whoever stores blocks chooses keys, and must not
choose their places."""
LOOKED_AT_ONCE = 64
"""Keys that Python looks up in one call, which takes half the time of single calls."""
_ONE = Struct(f"{KEY_BYTES}s")


class KeySet(Protocol):
    """Holds keys. One thread may change it while others look: what it moves meanwhile may count as
    there or not, what it does not move counts.

    Every method raises `TypeError` for what is not bytes and `ValueError` for bytes that are no
    key, and has changed nothing then, nor when it raises `MemoryError`.
    """

    def update(self, keys: Iterable[Key], /) -> None:
        """Add each that is not there."""

    def difference_update(self, keys: Iterable[Key], /) -> None:
        """Take out each that is there."""

    def clear(self) -> None:
        """Take out all, and give their memory back."""

    def tolist(self) -> list[Key]:
        """Return all, in any order."""

    def leading(self, keys: Sequence[Key] | bytes, start: int, /) -> int:
        """Return how many of `keys` from number `start` on are leading ones in the set. `keys` may
        be the bytes of all, one after the other. What follows the first that is missing may be
        looked at, or not."""

    def __len__(self) -> int: ...
    def __contains__(self, key: Key, /) -> bool: ...


class PythonKeySet:
    """Holds keys in a `set` of Python's."""

    def __init__(self) -> None:
        self._keys: set[Key] = set()

    def update(self, keys: Iterable[Key], /) -> None:
        self._keys.update(_checked(keys))

    def difference_update(self, keys: Iterable[Key], /) -> None:
        self._keys.difference_update(_checked(keys))

    def clear(self) -> None:
        self._keys.clear()

    def tolist(self) -> list[Key]:
        return list(self._keys)

    def leading(self, keys: Sequence[Key] | bytes, start: int, /) -> int:
        if start < 0:
            raise ValueError("the first key has number 0")
        count = count_keys(keys)
        for at in range(start, count, LOOKED_AT_ONCE):
            if isinstance(keys, bytes):
                some = split_keys(keys[at * KEY_BYTES : (at + LOOKED_AT_ONCE) * KEY_BYTES])
            else:
                some = keys[at : at + LOOKED_AT_ONCE]
            if not self._keys.issuperset(some):  # which may have what is no key
                there = takewhile(self._keys.__contains__, _checked(some))
                return at - start + sum(1 for _ in there)
        return max(count - start, 0)

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: Key, /) -> bool:
        return _checked([key])[0] in self._keys


def count_keys(keys: Sequence[Key] | bytes) -> int:
    """Return how many keys there are. Raises `UsageError` where bytes of all are not whole keys."""
    if not isinstance(keys, bytes):
        return len(keys)
    if len(keys) % KEY_BYTES:
        raise UsageError("keys", len(keys), f"must have {KEY_BYTES} bytes each")
    return len(keys) // KEY_BYTES


def split_keys(keys: Sequence[Key] | bytes) -> Sequence[Key]:
    """Return an object for each key. Raises `UsageError` as `count_keys` does."""
    if not isinstance(keys, bytes):
        return keys
    count_keys(keys)
    return [key for (key,) in _ONE.iter_unpack(keys)]


def _checked(keys: Iterable[Key]) -> list[Key]:
    each = list(keys)
    for wrong in {*map(type, each)} - {bytes}:
        if not issubclass(wrong, bytes):
            raise TypeError(f"a key is bytes, not {wrong.__name__}")
    for size in {*map(len, each)} - {KEY_BYTES}:
        raise ValueError(f"a key has {KEY_BYTES} bytes, not {size}")
    return each


def maker(wanted: str | None, module: str = MODULE) -> Callable[[], KeySet]:
    """Return what makes an empty set, of Python's or compiled, with `wanted` in `KVSTORE_COMPILED`.
    Raises `ImportError` where that is `yes` and there is no compiled part that fits."""
    compiled = part.load(wanted, module, SOURCE)
    if compiled is None:
        return PythonKeySet

    def make() -> KeySet:
        made: KeySet = compiled.KeySet(os.urandom(SECRET_BYTES))
        return made

    return make


new_key_set = maker(part.wanted())
"""Makes a set of the kind that this process uses."""
