"""Keeps the index in a dict: the model that the real ones are compared with."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence

from kvstore.index.base import KeyedRecord, KeyRecord, Place, Record
from kvstore.index.checks import check_announcement, check_keys, check_node_id, check_records
from kvstore.machine import REAL, Clock
from kvstore.types import Key


class MemoryIndex:
    """An `Index` in this process. Never unavailable; forgets everything with the process."""

    def __init__(self, *, now: Clock = REAL.monotonic) -> None:
        """`now` gives seconds and decides when announcements vanish."""
        self._now = now
        self._lock = threading.Lock()
        self._records: dict[Key, Record] = {}
        self._nodes: dict[int, tuple[float, bytes]] = {}
        self._incarnation = secrets.token_hex(8)

    def __len__(self) -> int:
        return len(self._records)

    def match(self, keys: Sequence[Key]) -> list[Record]:
        check_keys(keys)
        run: list[Record] = []
        with self._lock:
            for key in keys:
                record = self._records.get(key)
                if record is None:
                    break
                run.append(record)
        return run

    def lookup(self, keys: Sequence[Key]) -> list[Record | None]:
        check_keys(keys)
        with self._lock:
            return list(map(self._records.get, keys))

    def publish(self, records: Sequence[KeyedRecord]) -> Sequence[KeyedRecord]:
        check_records(records)
        with self._lock:
            self._records.update(records)
        return []

    def remove(self, records: Sequence[KeyedRecord]) -> int:
        check_records(records)
        dropped = 0
        with self._lock:
            for key, record in records:
                if self._records.get(key) == record:
                    del self._records[key]
                    dropped += 1
        return dropped

    def announce(self, node_id: int, announcement: bytes, ttl_s: float) -> None:
        check_node_id(node_id)
        check_announcement(announcement, ttl_s)
        with self._lock:
            self._nodes[node_id] = (self._now() + ttl_s, announcement)

    def renew(self, node_id: int, ttl_s: float) -> bool:
        check_node_id(node_id)
        check_announcement(b"", ttl_s)
        with self._lock:
            announcement = self._live_nodes().get(node_id)
            if announcement is not None:
                self._nodes[node_id] = (self._now() + ttl_s, announcement)
            return announcement is not None

    def withdraw(self, node_id: int) -> None:
        check_node_id(node_id)
        with self._lock:
            self._nodes.pop(node_id, None)

    def node(self, node_id: int) -> bytes | None:
        check_node_id(node_id)
        with self._lock:
            return self._live_nodes().get(node_id)

    def nodes(self) -> dict[int, bytes]:
        with self._lock:
            return self._live_nodes()

    def scan(self, place: Place) -> tuple[Place, list[KeyRecord]]:
        with self._lock:
            return (0, 0), [KeyRecord(key, record) for key, record in self._records.items()]

    def ping(self) -> None:
        return None

    def identity(self) -> str:
        return ""

    def incarnation(self) -> str:
        with self._lock:
            return self._incarnation

    def lose_everything(self) -> None:
        """Lose what Redis loses by FLUSHALL: records and announcements go, the incarnation
        changes."""
        with self._lock:
            self._records.clear()
            self._nodes.clear()
            self._incarnation = secrets.token_hex(8)

    def close(self) -> None:
        return None

    def _live_nodes(self) -> dict[int, bytes]:
        now = self._now()
        self._nodes = {i: entry for i, entry in self._nodes.items() if entry[0] > now}
        return {i: announcement for i, (_, announcement) in self._nodes.items()}
