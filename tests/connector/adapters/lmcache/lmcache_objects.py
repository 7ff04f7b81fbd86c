"""LMCache's own objects, keys and loader, for tests of the adapters."""

from __future__ import annotations

import json
import os
import select
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stores import NodeProcess

PATIENCE_S = 20.0
SIZE = 64 << 10
ROOT = Path(__file__).parents[4]
PATIENT = {"request_timeout_s": 10.0, "stream_timeout_s": 10.0}
"""Limits for tests that are about answers, not about their speed on a busy machine."""


def spec(node: NodeProcess, **params: Any) -> dict[str, Any]:
    """What `--l2-adapter` takes."""
    return spec_of({**node.engine_settings, **params})


def spec_of(params: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "plugin",
        "module_path": "connector.adapters.lmcache",
        "class_name": "KVStoreL2Adapter",
        "adapter_params": {"weights_id": "w", **params},
    }


def adapter_of(node: NodeProcess, **params: Any) -> Any:
    """As LMCache makes it from its command line."""
    from argparse import Namespace

    from lmcache.v1.distributed.l2_adapters import create_l2_adapter
    from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config

    command_line = Namespace(l2_adapter=[json.dumps(spec(node, **params))])
    config = parse_args_to_l2_adapters_config(command_line)
    return create_l2_adapter(config.adapters[0], l1_memory_desc=None)


def object_keys(count: int, **changes: Any) -> list[Any]:
    from lmcache.v1.distributed.api import ObjectKey

    fields = {"model_name": "m", "kv_rank": 0, **changes}
    return [ObjectKey(chunk_hash=os.urandom(16), **fields) for _ in range(count)]


def objects(fills: Sequence[int], size: int = SIZE, dtype: str = "uint8") -> list[Any]:
    import torch
    from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

    made = []
    for fill in fills:
        raw = torch.full((size,), fill, dtype=torch.uint8)
        kind = getattr(torch, dtype)
        metadata = MemoryObjMetadata(
            shape=torch.Size([size // kind.itemsize]),
            dtype=kind,
            address=0,
            phy_size=size,
            fmt=MemoryFormat.KV_2LTD,
            ref_count=1,
        )
        made.append(TensorMemoryObj(raw_data=raw, metadata=metadata, parent_allocator=None))
    return made


def signalled(fd: int) -> None:
    """Wait for the descriptor as LMCache's controllers do."""
    from lmcache.v1.platform import consume_fd

    poller = select.poll()
    poller.register(fd, select.POLLIN)
    assert poller.poll(PATIENCE_S * 1000), "no event"
    consume_fd(fd)


def bits(bitmap: Any, count: int) -> list[bool]:
    assert bitmap is not None
    return [bitmap.test(i) for i in range(count)]


def store(adapter: Any, keys: list[Any], objs: list[Any]) -> Any:
    number = adapter.submit_store_task(keys, objs)
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        signalled(adapter.get_store_event_fd())
        results = adapter.pop_completed_store_tasks()
        if number in results:
            return results[number]
    raise AssertionError("not stored in time")


def look_up(adapter: Any, keys: list[Any]) -> list[bool]:
    number = adapter.submit_lookup_and_lock_task(keys, {})
    signalled(adapter.get_lookup_and_lock_event_fd())
    found = bits(adapter.query_lookup_and_lock_result(number), len(keys))
    assert adapter.query_lookup_and_lock_result(number) is None, "a result is given out once"
    return found


def load(adapter: Any, keys: list[Any], objs: list[Any]) -> list[bool]:
    number = adapter.submit_load_task(keys, objs)
    signalled(adapter.get_load_event_fd())
    return bits(adapter.query_load_result(number), len(keys))


def fills(objs: list[Any]) -> list[int]:
    """The byte each object is filled with, all of it."""
    values = [set(bytes(obj.byte_array)) for obj in objs]
    assert all(len(value) == 1 for value in values)
    return [value.pop() for value in values]
