"""Connectors that do wrong, always or when they are told to."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

from connector.adapters.vllm import KVStoreConnector

SWITCH = "KVSTORE_TEST_FAULT"


class GarbageConnector(KVStoreConnector):
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        assert self._w._blocks
        for blocks in self._w._blocks:
            blocks.scatter = partial(_scatter_zeros, blocks.scatter)  # type: ignore[method-assign]


def _scatter_zeros(scatter: Any, payload: memoryview, *where: Any) -> None:
    scatter(memoryview(bytes(len(payload))), *where)


class SwitchedConnector(KVStoreConnector):
    """Layer by layer, and right unless the file that `SWITCH` names says otherwise.

    "zeros": writes zeros. "vanish": every block leaves the node, for good, after
    the third layer was copied and before it is checked.
    """

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        assert self._w._blocks
        (blocks,) = self._w._blocks
        blocks.scatter = partial(self._scatter, blocks.scatter)  # type: ignore[method-assign]

    def _scatter(self, scatter: Any, payload: memoryview, *where: Any) -> None:
        fault = Path(os.environ[SWITCH]).read_text()
        if fault == "zeros":
            _scatter_zeros(scatter, payload, *where)
            return
        scatter(payload, *where)
        store = self._w._store.get()
        assert store is not None
        if fault == "vanish" and where[-1] == 2:
            for namespace in self._w._layout.all_namespaces():
                store.clear(namespace.id)
