"""Connectors that do wrong, always or when they are told to."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from connector.adapters.vllm.connector import KVStoreConnector
from connector.copiers.base import Scatter

SWITCH = "KVSTORE_TEST_FAULT"


def blocks_of(connector: KVStoreConnector) -> Sequence[Any]:
    """Return what moves the blocks of each group."""
    blocks = connector._w._blocks
    assert blocks
    return blocks


class GarbageConnector(KVStoreConnector):
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        for blocks in blocks_of(self):
            blocks.scatter_many = partial(_zeros, blocks.scatter_many)  # type: ignore[method-assign]


def _zeros(scatter_many: Any, items: Sequence[Scatter], layer: int | None = None) -> None:
    scatter_many([i._replace(payload=memoryview(bytes(len(i.payload)))) for i in items], layer)


class SwitchedConnector(KVStoreConnector):
    """Layer by layer, and right unless the file that `SWITCH` names says otherwise.

    "zeros": writes zeros. "vanish": every block leaves the node, for good, after
    the third layer was copied and before it is checked.
    """

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        (blocks,) = blocks_of(self)
        blocks.scatter_many = partial(self._scatter, blocks.scatter_many)  # type: ignore[method-assign]

    def _scatter(
        self, scatter_many: Any, items: Sequence[Scatter], layer: int | None = None
    ) -> None:
        fault = Path(os.environ[SWITCH]).read_text()
        if fault == "zeros":
            _zeros(scatter_many, items, layer)
            return
        scatter_many(items, layer)
        store = self._w._store.get()
        assert store is not None
        if fault == "vanish" and layer == 2:
            for namespace in self._w._layout.all_namespaces():
                store.clear(namespace.id)
