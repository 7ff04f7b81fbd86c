"""Run by test_queue.py, in a process whose libcuda.so.1 is tests/support/fake_driver.cpp.

`CudaQueue` is what runs on a device; torch is made of numpy here, for it has no
device to offer.
"""

from __future__ import annotations

import sys
import threading
import types
from typing import Any

import numpy as np
import pytest
from contract.kvblocks import KVBlocksContract
from kv_cases import Case, Shape

from connector.copiers.base import Gather, HeadPart, KVCopier, Scatter
from connector.copiers.cuda.copier import DeviceCopier
from connector.copiers.cuda.kernel_plan import KERNELS, layout_of
from connector.copiers.cuda.page_lock import LockedPool
from kvstore import DeviceRange


class Tensor:
    def __init__(self, array: Any) -> None:
        self._array = array

    def data_ptr(self) -> int:
        return int(self._array.ctypes.data)

    def numpy(self) -> Any:
        return self._array

    def to(self, device: object) -> Tensor:
        return Tensor(self._array.copy())


class Event:
    def __init__(self, blocking: bool) -> None:
        assert blocking, "a thread that waits must not spin"

    def record(self, stream: object) -> None:
        pass

    def synchronize(self) -> None:
        pass


STREAM = types.SimpleNamespace(synchronize=lambda: None)


@pytest.fixture(scope="module")
def cuda() -> Any:
    torch: Any = types.ModuleType("torch")
    torch.uint8 = np.uint8
    torch.empty = lambda count, **_: Tensor(np.full(count, 0xA5, np.uint8))
    torch.frombuffer = lambda data, dtype: Tensor(np.frombuffer(data, dtype))
    torch.cuda = types.SimpleNamespace(
        get_device_capability=lambda device: (9, 0),
        current_stream=lambda device: STREAM,
        Event=Event,
    )
    from connector.copiers.cuda import queue

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "torch", torch)
        # NVRTC looks into the driver, and finds out that this is none (see test_nvrtc.py).
        patch.setattr(queue, "compiled", lambda capability: b"\x7fELF")
        yield queue.Cuda(types.SimpleNamespace(index=0))


class TestCudaQueue(KVBlocksContract):
    @pytest.fixture(autouse=True)
    def _device(self, cuda: Any) -> None:
        from connector.copiers.cuda.queue import CudaDevice

        pool = LockedPool(cuda, tuple, lambda size_bytes, failure: None)
        type(self).device = CudaDevice(cuda, 4 << 20, 1 << 10, pool)

    def blocks(self, case: Case, seed: int) -> KVCopier:
        layout = layout_of(case.layers, case.shape.geometry, case.shape.block_tokens)
        return DeviceCopier(layout, self.device)

    def test_payloads_may_lie_on_the_device_itself(self) -> None:
        case, other = Case(Shape(), 1), Case(Shape(), 2)
        expected = case.payload([3, 5])
        room = np.zeros_like(expected)
        place = DeviceRange(room.ctypes.data, room.size, 0)
        self.blocks(case, 0).gather_many([Gather([3, 5], place)])
        assert np.array_equal(room, expected)
        part = HeadPart(2, 1, 0, 1)
        self.blocks(other, 0).scatter_many([Scatter(place, 1, [4], part)])
        same = Case(Shape(), 2)
        same.put(expected, 1, [4], part, None)
        assert np.array_equal(other.storages, same.storages)


@pytest.mark.parametrize(
    ("result", "failure"), [("0", ""), ("2", "out_of_memory"), ("801", "not_supported")]
)
def test_the_driver_says_whether_memory_is_locked(
    cuda: Any, monkeypatch: pytest.MonkeyPatch, result: str, failure: str
) -> None:
    monkeypatch.setenv("FAKE_LOCK_RESULT", result)
    for writable in (True, False):
        assert cuda.lock(4096, 4096, writable) == failure
        cuda.unlock(4096)


def test_a_range_that_is_locked_is_not_locked_again(cuda: Any) -> None:
    assert cuda.lock(4096, 4096, True) == ""
    assert cuda.lock(8000, 4096, True) == "host_memory_already_registered"
    cuda.unlock(4096)


def test_trap_every_kernel_is_loaded_before_the_engine_computes(cuda: Any) -> None:
    """Loading one may wait for all that runs on the device."""
    assert set(cuda.kernels) == set(KERNELS)


def test_trap_the_engines_thread_keeps_its_context_and_capture_mode(cuda: Any) -> None:
    from connector.copiers.cuda.queue import CudaQueue

    found: list[Any] = []

    def work() -> None:
        CudaQueue(cuda, 1 << 20, 1 << 10)
        mode = cuda.driver.cuThreadExchangeStreamCaptureMode(
            cuda.driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        )[1]
        found.append((int(cuda.driver.cuCtxGetCurrent()[1]), int(mode)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [(0, 0)]
