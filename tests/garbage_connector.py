"""Negative control: a connector that reports every load as good and writes zeros."""

from __future__ import annotations

from typing import Any

from connector.adapters.vllm import KVStoreConnector


class GarbageConnector(KVStoreConnector):
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        blocks = self._w._blocks
        assert blocks is not None
        scatter = blocks.scatter

        def zeros(payload: memoryview, skip: int, block_ids: Any) -> None:
            scatter(memoryview(bytes(len(payload))), skip, block_ids)

        blocks.scatter = zeros  # type: ignore[method-assign]
