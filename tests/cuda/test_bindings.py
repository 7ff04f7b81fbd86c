"""What the bindings do with the driver's answers, and with a driver that is a stand-in for one;
the real one is in tests/gpu/."""

import enum
import types
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from cuda_python import cuda_bindings
from nixl_places import needs_nixl

from kvstore.cuda.bindings import open_device
from kvstore.errors import DeviceError, NoSpaceError, UsageError

TESTS = Path(__file__).parents[1]
RELAXED = 2
CAPTURE_SAFE = {
    "cuInit",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRetain",
}


class Result(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NOT_READY = 600


class Driver:
    """Answers every call with success and what is in `results`, and remembers the calls."""

    CUresult = Result
    CUstreamCaptureMode = types.SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED=RELAXED)
    CUstream_flags = types.SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUevent_flags = types.SimpleNamespace(CU_EVENT_DISABLE_TIMING=2)
    CU_MEMHOSTREGISTER_PORTABLE = 1
    CUdevice_attribute = MagicMock()
    CUmemAllocationType = CUmemLocationType = CUmemAllocationHandleType = MagicMock()
    CUmemAllocationGranularity_flags = CUmemAccess_flags = MagicMock()
    CUmemAllocationProp = CUmemLocation = CUmemAccessDesc = MagicMock

    def __init__(self):
        self.calls = []
        self.contexts = []
        self.mode = 0
        self.errors = {}
        self.results = {
            "cuDeviceGetCount": 2,
            "cuDeviceGet": 1,
            "cuDevicePrimaryCtxRetain": "context",
            "cuDeviceGetAttribute": 1,
            "cuMemGetAllocationGranularity": 4096,
            "cuMemCreate": "memory",
            "cuMemAddressReserve": 0x7000,
            "cuStreamCreate": "stream",
            "cuEventCreate": "event",
        }

    def cuDeviceGetUuid(self, device):  # noqa: N802
        raw = bytes(16)
        return Result.CUDA_SUCCESS, types.SimpleNamespace(getPtr=lambda: raw)

    def cuCtxPushCurrent(self, context):  # noqa: N802
        self.contexts.append(context)
        return (Result.CUDA_SUCCESS,)

    def cuCtxPopCurrent(self):  # noqa: N802
        return Result.CUDA_SUCCESS, self.contexts.pop()

    def cuThreadExchangeStreamCaptureMode(self, mode):  # noqa: N802
        before, self.mode = self.mode, mode
        return Result.CUDA_SUCCESS, before

    def __getattr__(self, name):
        if not name.startswith("cu") or name.endswith("_v2"):
            raise AttributeError(name)

        def call(*args):
            alone = self.mode == RELAXED and self.contexts == ["context"]
            assert alone or name in CAPTURE_SAFE, f"{name} would end others' captures"
            self.calls.append((name, *args))
            error = self.errors.get(name, Result.CUDA_SUCCESS)
            return (error, self.results.get(name)) if name in self.results else (error,)

        call.__name__ = name
        return call

    def said(self, name):
        return [call[1:] for call in self.calls if call[0] == name]


@pytest.fixture
def driver():
    return Driver()


def test_calls_are_made_on_the_device_and_the_threads_own_state_is_put_back(driver):
    device = open_device(1, driver)
    device.allocate(4096)
    stream = device.stream()
    stream.copy([(0x7000, 0x9000, 10), (0x7010, 0x9010, 20)])
    assert driver.said("cuMemcpyAsync") == [
        (0x7000, 0x9000, 10, "stream"),
        (0x7010, 0x9010, 20, "stream"),
    ]
    driver.errors["cuMemcpyAsync"] = Result.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(DeviceError, match="cuMemcpyAsync: CUDA_ERROR_INVALID_VALUE"):
        stream.copy([(0x7000, 0x9000, 10)])
    assert (driver.contexts, driver.mode) == ([], 0)


def test_a_device_without_room_is_no_space_for_what_is_allocated_there_alone(driver):
    device = open_device(0, driver)
    driver.errors = dict.fromkeys(
        ("cuMemCreate", "cuMemHostRegister", "cuDevicePrimaryCtxRetain"),
        Result.CUDA_ERROR_OUT_OF_MEMORY,
    )
    with pytest.raises(NoSpaceError):
        device.allocate(1)
    with pytest.raises(DeviceError, match="cuMemHostRegister: CUDA_ERROR_OUT_OF_MEMORY"):
        device.register_host(4096, 4096)
    with pytest.raises(DeviceError, match="cuDevicePrimaryCtxRetain"):
        open_device(0, driver)


def test_an_event_that_is_not_reached_is_no_error_and_a_failed_one_is(driver):
    event = open_device(0, driver).stream().record()
    driver.errors["cuEventQuery"] = Result.CUDA_ERROR_NOT_READY
    assert not event.done()
    driver.errors["cuEventQuery"] = Result.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(DeviceError, match="cuEventQuery"):
        event.done()
    driver.errors.clear()
    assert event.done()
    del event
    assert driver.said("cuEventDestroy") == [("event",)]


def test_memory_of_others_is_not_exported_and_the_refusal_names_why(driver):
    with pytest.raises(UsageError, match="memory of others"):
        open_device(0, driver).export(0x1234)


def test_a_device_without_shared_memory_has_no_pool(driver):
    driver.results["cuDeviceGetAttribute"] = 0
    with pytest.raises(DeviceError, match="by descriptor"):
        open_device(0, driver).allocate(1)


def test_a_device_that_is_not_there_is_refused_by_number(driver):
    with pytest.raises(DeviceError, match="no CUDA device 2"):
        open_device(2, driver)


def test_without_a_driver_the_real_bindings_say_so():
    cuda_bindings("driver")
    if Path("/dev/nvidiactl").exists():
        pytest.skip("there is a device: tests/gpu/ has the real one")
    with pytest.raises(DeviceError, match="no CUDA driver"):
        open_device()


@pytest.mark.long
def test_the_real_bindings_take_every_call_and_the_suites_of_a_device_pass(fake_driver):
    """Two processes and all, over tests/support/device/fake_driver.cpp."""
    between_processes = TESTS / "gpu" / "test_gpu_vram.py"
    fake_driver.run(
        Path(__file__).with_name("on_fake_driver.py"),
        Path(__file__).with_name("on_fake_driver_node.py"),
        TESTS / "gpu" / "test_bindings_contract.py",
        f"{between_processes}::test_all_blocks_of_another_process_arrive_byte_for_byte",
        f"{between_processes}::test_blocks_that_are_overwritten_meanwhile_are_misses_never_others",
        f"{between_processes}::test_the_benchmark_runs",
    )


@pytest.mark.long
def test_the_stand_in_for_a_driver_takes_and_refuses_what_drivers_do(fake_driver):
    fake_driver.run(Path(__file__).with_name("on_fake_driver_answers.py"))


@needs_nixl
@pytest.mark.long
def test_what_comes_through_nixl_goes_to_memory_of_the_real_bindings(fake_driver):
    fake_driver.run(Path(__file__).with_name("on_fake_driver_nixl.py"))
