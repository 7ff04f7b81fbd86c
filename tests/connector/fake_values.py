"""A store of values in this process's memory that evicts, declines and loses when told to."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

from kvstore import PutResult, PutStatus
from kvstore.spi import NodeUnavailableError


class FakePin:
    def __init__(self, store: FakeValues, key: str) -> None:
        self._store, self._key = store, key

    def close(self) -> None:
        with self._store.lock:
            count = self._store.pins.get(self._key, 0)
            if count > 1:
                self._store.pins[self._key] = count - 1
            else:
                self._store.pins.pop(self._key, None)


class FakeValues:
    """`tensor_messages.ValueStore`. At most `capacity` values; the oldest unpinned one goes."""

    def __init__(self, capacity: int = 1000) -> None:
        self.lock = threading.RLock()
        self.capacity = capacity
        self.values: dict[str, Any] = {}
        self.pins: dict[str, int] = {}
        self.value_bytes_max = 1 << 40
        """Larger tensors are declined; what is said in bytes is small."""
        self.lose_next_put = 0
        """That many puts are evicted before they can be pinned."""
        self.gone = False

    def put_many(
        self, items: Iterable[tuple[str | bytes, Any]], *, replace: bool = False
    ) -> list[PutResult]:
        with self.lock:
            if self.gone:
                return [PutResult(PutStatus.REJECTED, "node gone") for _ in items]
            if replace:
                items = [*items]
                for key, _ in items:
                    self.values.pop(str(key), None)
            return [self._put(str(key), value) for key, value in items]

    def _put(self, key: str, value: Any) -> PutResult:
        if key in self.values:
            return PutResult(PutStatus.EXISTS)
        if not isinstance(value, bytes) and len(value) > self.value_bytes_max:
            return PutResult(PutStatus.REJECTED, f"must be 1 to {self.value_bytes_max}")
        if len(self.values) >= self.capacity:
            victim = next((k for k in self.values if k not in self.pins), None)
            if victim is None:
                return PutResult(PutStatus.REJECTED, "all is pinned")
            del self.values[victim]
        if self.lose_next_put:
            self.lose_next_put -= 1
        else:
            self.values[key] = value if isinstance(value, bytes) else value.clone()
        return PutResult(PutStatus.STORED)

    def get(self, key: str | bytes, out: Any = None) -> Any:
        with self.lock:
            value = self.values.get(str(key))
            if value is None or out is None:
                return value
            out[: len(value)].copy_(value)
            return out[: len(value)]

    def get_many(
        self, keys: Sequence[str | bytes], *, out: Sequence[Any] | None = None
    ) -> list[Any]:
        return [self.get(key, None if out is None else out[i]) for i, key in enumerate(keys)]

    def pin(self, key: str | bytes) -> FakePin | None:
        with self.lock:
            if self.gone:
                raise NodeUnavailableError("node gone")
            if key not in self.values:
                return None
            self.pins[str(key)] = self.pins.get(str(key), 0) + 1
            return FakePin(self, str(key))

    def delete(self, key: str | bytes) -> bool:
        with self.lock:
            if self.gone:
                raise NodeUnavailableError("node gone")
            return self.values.pop(str(key), None) is not None
