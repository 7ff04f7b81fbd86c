"""One suite for `KVBlocks`: numpy's, and the kernel's on a device made of host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from contract.kvblocks import KVBlocksContract
from host_device import HostDevice

from connector.blocks import KVBlocks
from connector.cuda.blocks import DeviceBlocks
from connector.cuda.plan import layout_of
from connector.host_blocks import HostBlocks

if TYPE_CHECKING:
    from kv_cases import Case

pytest.importorskip("numpy")


class TestHostBlocks(KVBlocksContract):
    def blocks(self, case: Case, seed: int) -> KVBlocks:
        return HostBlocks(case.layers, case.shape.geometry, case.shape.block_tokens)


class TestDeviceBlocks(KVBlocksContract):
    def blocks(self, case: Case, seed: int) -> KVBlocks:
        layout = layout_of(case.layers, case.shape.geometry, case.shape.block_tokens)
        # Room for little more than one payload of a reader with more heads: many rounds.
        device = HostDevice(
            seed,
            staging_bytes=2 * max(layout.payload_bytes, 256),
            pages_max=2 * layout.pages_per_payload,
        )
        return DeviceBlocks(layout, device)
