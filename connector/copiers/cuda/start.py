"""Makes the copiers for KV on a device: the kernel's, or torch's where it cannot be compiled."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from connector.copiers.base import KVMemory
from connector.copiers.cuda.copier import DeviceCopier
from connector.copiers.cuda.kernel_plan import layout_of, staging_buffer_bytes
from connector.copiers.cuda.page_lock import LockedPool
from connector.copiers.cuda.torch_copier import TorchCopier
from connector.limits import DEVICE_PAGES_MAX, PAGE_LOCK_BYTES_MAX
from kvstore import KVStoreError

if TYPE_CHECKING:
    import torch

    from connector.layout.geometry import KVGeometry
    from kvstore.spi import PoolMapping

log = logging.getLogger(f"kvstore.{__name__}")

Group = tuple[Sequence["torch.Tensor"], "KVGeometry", int]
"""Layer tensors, their geometry, tokens of a store block."""


def device_memory(
    groups: Sequence[Group],
    mappings: Callable[[], Sequence[PoolMapping]],
    count: Callable[[int, str], None],
    page_lock_bytes_max: int = PAGE_LOCK_BYTES_MAX,
) -> KVMemory:
    """See `connector.copiers.registered.kv_memory`. All groups are on one CUDA device."""
    from connector.copiers.cuda.queue import Cuda, QueuedDevice

    try:
        cuda = Cuda(groups[0][0][0].device)
        layouts = [layout_of(*group) for group in groups]
        pool = LockedPool(cuda, mappings, count, bytes_max=page_lock_bytes_max)
        device = QueuedDevice(
            cuda,
            staging_buffer_bytes(layouts),
            max(DEVICE_PAGES_MAX, *(layout.pages_per_payload for layout in layouts)),
            pool,
        )
    except (KVStoreError, RuntimeError) as e:  # torch's own, such as no room for staging
        log.warning("KV is copied by torch, payload after payload, which is slower: %s", e)
        return KVMemory([TorchCopier(*group) for group in groups], lambda: None)
    copiers = [
        DeviceCopier(layout, device, keep=layers)
        for layout, (layers, _, _) in zip(layouts, groups, strict=True)
    ]
    pool.start()
    return KVMemory(list(copiers), device.close, groups[0][0][0].device.index, pool.holding)
