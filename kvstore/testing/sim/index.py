"""An index that fails, forgets and lies on request, around the model."""

from __future__ import annotations

import random
from collections.abc import Sequence

from kvstore.errors import IndexUnavailableError
from kvstore.index.base import KeyRecord, Record
from kvstore.index.memory import MemoryIndex
from kvstore.types import Key

HISTORY_MAX = 4


class SimIndex(MemoryIndex):
    """`MemoryIndex` with three switches."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(now=lambda: 0.0)
        self._rng = rng
        self.unavailable = False
        self.lying = False
        self._history: dict[Key, list[Record]] = {}

    def match(self, keys: Sequence[Key]) -> list[Record]:
        self._fail_maybe()
        if self.lying:
            run: list[Record] = []
            for record in self.lookup(keys):
                if record is None:
                    break
                run.append(record)
            return run
        return super().match(keys)

    def lookup(self, keys: Sequence[Key]) -> list[Record | None]:
        self._fail_maybe()
        truth = super().lookup(keys)
        return [self._lie(k, r) for k, r in zip(keys, truth, strict=True)] if self.lying else truth

    def _lie(self, key: Key, truth: Record | None) -> Record | None:
        kind = self._rng.randrange(5)
        if kind == 0:
            return None
        if kind == 1 and self._history:
            return self._rng.choice(self._rng.choice(list(self._history.values())))
        if kind == 2 and key in self._history:
            return self._rng.choice(self._history[key])
        if kind == 3 and truth is not None:
            damaged = bytearray(truth)
            damaged[self._rng.randrange(len(damaged))] ^= 1 << self._rng.randrange(8)
            return bytes(damaged)
        return truth

    def publish(self, records: Sequence[KeyRecord]) -> Sequence[KeyRecord]:
        # An error after the command was carried out looks the same to the caller.
        if self.unavailable and self._rng.random() < 0.5:
            raise IndexUnavailableError("simulated")
        super().publish(records)
        for key, record in records:
            kept = self._history.setdefault(key, [])
            kept.append(record)
            del kept[:-HISTORY_MAX]
        self._fail_maybe()
        return []

    def remove(self, records: Sequence[KeyRecord]) -> int:
        if self.unavailable and self._rng.random() < 0.5:
            raise IndexUnavailableError("simulated")
        dropped = super().remove(records)
        self._fail_maybe()
        return dropped

    def incarnation(self) -> str:
        self._fail_maybe()
        return super().incarnation()

    def lose_everything(self) -> None:
        super().lose_everything()
        self._incarnation = f"{self._rng.getrandbits(64):016x}"

    def truth(self) -> dict[Key, Record]:
        return dict(self._records)

    def _fail_maybe(self) -> None:
        if self.unavailable:
            raise IndexUnavailableError("simulated")
