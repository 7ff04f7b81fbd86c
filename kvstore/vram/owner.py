"""Decides whose VRAM a process saves to: that of a node of this host, or its own."""

from __future__ import annotations

from typing import Any

from kvstore.client.nodes.saving.vram_saver import VramSaver
from kvstore.client.session import BlockSession
from kvstore.cuda.base import CudaDevice
from kvstore.vram.pool import VramPool


def vram_for_saves(
    store: BlockSession, device: CudaDevice, size_bytes: int, **options: Any
) -> VramPool | VramSaver:
    """Return a saver to the node of this host that owns VRAM of `device`, where there is one: what
    is saved there outlives this process. Else a pool of `size_bytes` inside this process, made with
    `options`.

    Raises what `VramPool` raises.
    """
    timeout_s, checksums = store.limits.request_timeout_s, store.verify == "always"
    saver = VramSaver(store.nodes, device, timeout_s, checksums=checksums)
    if saver.found():
        return saver
    return VramPool(store, device, size_bytes, **options)
