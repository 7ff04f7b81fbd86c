"""One suite for `KVCopier`: numpy's, and the kernel's on a device made of host memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from host_device import HostDevice

from connector.copiers.base import KVCopier
from connector.copiers.cuda.copier import DeviceCopier
from connector.copiers.cuda.kernel_plan import layout_of
from connector.copiers.host import HostCopier
from contract.kvblocks import KVBlocksContract

if TYPE_CHECKING:
    from kv_cases import Case

pytest.importorskip("numpy")


@pytest.fixture(autouse=True, scope="module")
def _small_ones_go_by_dma_alone_too() -> Iterator[None]:
    """Where they lie in one piece."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("connector.copiers.cuda.kernel_plan.DEVICE_DIRECT_BYTES_MIN", 1)
        yield


class TestHostBlocks(KVBlocksContract):
    def blocks(self, case: Case, seed: int) -> KVCopier:
        return HostCopier(case.layers, case.shape.geometry, case.shape.block_tokens)


class TestDeviceBlocks(KVBlocksContract):
    def blocks(self, case: Case, seed: int) -> KVCopier:
        layout = layout_of(case.layers, case.shape.geometry, case.shape.block_tokens)
        # Room for little more than one payload of a reader with more heads: many rounds.
        device = HostDevice(
            seed,
            staging_bytes=2 * max(layout.payload_bytes, 256),
            pages_max=2 * layout.pages_per_payload,
        )
        return DeviceCopier(layout, device)
