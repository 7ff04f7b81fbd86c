"""Negative control: a connector that reports every load as good and writes zeros."""

from __future__ import annotations

from functools import partial
from typing import Any

from connector.adapters.vllm import KVStoreConnector


class GarbageConnector(KVStoreConnector):
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        assert self._w._blocks
        for blocks in self._w._blocks:
            blocks.scatter = partial(_scatter_zeros, blocks.scatter)  # type: ignore[method-assign]


def _scatter_zeros(scatter: Any, payload: memoryview, *where: Any) -> None:
    scatter(memoryview(bytes(len(payload))), *where)
