"""Tells a node of this host what an engine's requests found, so that operators see it there."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from connector import metrics
from connector.metrics import Counts
from kvstore import Explanation

if TYPE_CHECKING:
    from connector.scheduler.lazy_store import LazyStore


class NodeReport:
    """Adds up tokens by name (kvstore/core/outgoing/watched.py) until a node has them.

    Thread-safe.
    """

    def __init__(self, store: LazyStore, counts: Counts) -> None:
        self._store = store
        self._counts = counts
        self._lock = threading.Lock()
        self._unsent: dict[str, int] = {}

    def add(self, ended: Explanation) -> None:
        """Add the tokens of a request that has ended."""
        tokens = {
            "asked_tokens": ended.possible_tokens,
            "engine_tokens": ended.local_tokens,
            "hit_tokens": ended.hit_tokens,
        }
        missed = ended.possible_tokens - ended.local_tokens - ended.hit_tokens
        if missed:
            why = metrics.LAST_TOKEN if missed == 1 else metrics.NOT_ASKED
            why = why if ended.first_missing is None else ended.first_missing.reason.value
            self._counts.add(metrics.MISSED_TOKENS, missed, why)
            tokens[f"missed_tokens:{why}"] = missed
        self._add(tokens)

    def _add(self, tokens: Mapping[str, int]) -> None:
        with self._lock:
            for name, count in tokens.items():
                self._unsent[name] = self._unsent.get(name, 0) + count

    def send(self) -> None:
        """Send the sums to a node. Without a node that can take them, the next call sends them."""
        store = self._store.opened
        if store is None:
            return
        with self._lock:
            sums, self._unsent = self._unsent, {}
        if sums and not store.report(sums):
            self._add(sums)
