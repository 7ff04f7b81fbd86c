"""The device, for tests that are marked `gpu`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from cuda_python import cuda_bindings


@pytest.fixture(scope="session")
def cuda() -> Any:
    """The context of device 0, with the kernel."""
    torch = pytest.importorskip("torch")
    cuda_bindings("driver")
    from connector.copiers.cuda.queue import Cuda

    return Cuda(torch.device("cuda", 0))


@pytest.fixture(scope="session")
def device(cuda: Any) -> Iterator[Any]:
    from connector.copiers.cuda.page_lock import LockedPool
    from connector.copiers.cuda.queue import QueuedDevice

    pool = LockedPool(cuda, tuple, lambda size_bytes, failure: None)
    made = QueuedDevice(cuda, 64 << 20, 1 << 14, pool)
    yield made
    made.close()
