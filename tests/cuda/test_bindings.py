"""What the bindings do with the runtime's answers; the real runtime is in tests/gpu/."""

import enum
import inspect
import re
import types
from pathlib import Path

import pytest

from kvstore.cuda.bindings import open_device
from kvstore.errors import DeviceError, NoSpaceError, UsageError

CAPTURE_SAFE = {
    "cudaGetDeviceCount",
    "cudaGetDeviceProperties",
    "cudaGetLastError",
    "cudaEventDestroy",
}


class Error(enum.IntEnum):
    cudaSuccess = 0  # noqa: N815
    cudaErrorInvalidValue = 1  # noqa: N815
    cudaErrorMemoryAllocation = 2  # noqa: N815
    cudaErrorNotReady = 600  # noqa: N815


class Runtime:
    """Answers every call with success and what is in `results`, and remembers the calls."""

    cudaError_t = Error  # noqa: N815
    cudaMemcpyKind = types.SimpleNamespace(cudaMemcpyDefault=4)  # noqa: N815
    cudaStreamCaptureMode = types.SimpleNamespace(cudaStreamCaptureModeRelaxed=2)  # noqa: N815
    cudaIpcMemLazyEnablePeerAccess = 1  # noqa: N815
    cudaHostRegisterPortable, cudaHostRegisterReadOnly = 1, 8  # noqa: N815
    cudaStreamNonBlocking, cudaEventDisableTiming = 1, 2  # noqa: N815

    def __init__(self):
        self.calls = []
        self.current = 0
        self.mode = 0
        self.errors = {}
        properties = types.SimpleNamespace(uuid=types.SimpleNamespace(bytes=bytes(range(16))))
        self.results = {
            "cudaGetDeviceCount": 2,
            "cudaGetDeviceProperties": properties,
            "cudaMalloc": 0x7000,
            "cudaIpcGetMemHandle": types.SimpleNamespace(reserved=b"h" * 64),
            "cudaIpcOpenMemHandle": 0x9000,
            "cudaStreamCreateWithFlags": "stream",
            "cudaEventCreateWithFlags": "event",
        }

    def cudaIpcMemHandle_t(self):  # noqa: N802
        return types.SimpleNamespace(reserved=b"")

    def cudaGetDevice(self):  # noqa: N802
        return Error.cudaSuccess, self.current

    def cudaSetDevice(self, ordinal):  # noqa: N802
        self.current = ordinal
        return (Error.cudaSuccess,)

    def cudaThreadExchangeStreamCaptureMode(self, mode):  # noqa: N802
        before, self.mode = self.mode, mode
        return Error.cudaSuccess, before

    def __getattr__(self, name):
        def call(*args):
            assert self.mode == 2 or name in CAPTURE_SAFE, f"{name} would end others' captures"
            self.calls.append((name, self.current, *args))
            error = self.errors.get(name, Error.cudaSuccess)
            return (error, self.results[name]) if name in self.results else (error,)

        call.__name__ = name
        return call

    def said(self, name):
        return [call[1:] for call in self.calls if call[0] == name]


@pytest.fixture
def runtime():
    return Runtime()


def test_calls_are_made_on_the_device_and_the_callers_own_is_put_back(runtime):
    device = open_device(1, runtime)
    memory = device.allocate(4096)
    assert runtime.said("cudaMalloc") == [(1, 4096)]
    stream = device.stream()
    stream.copy([(0x7000, 0x9000, 10), (0x7010, 0x9010, 20)])
    assert runtime.said("cudaMemcpyAsync") == [
        (1, 0x7000, 0x9000, 10, 4, "stream"),
        (1, 0x7010, 0x9010, 20, 4, "stream"),
    ]
    device.free(memory)
    assert (runtime.current, runtime.mode) == (0, 0)


def test_a_refused_call_is_named_and_the_last_error_taken_back(runtime):
    device = open_device(0, runtime)
    runtime.errors["cudaHostRegister"] = Error.cudaErrorInvalidValue
    with pytest.raises(DeviceError, match="cudaHostRegister: cudaErrorInvalidValue"):
        device.register_host(4096, 4096)
    assert runtime.said("cudaGetLastError") == [(0,)]


def test_a_device_without_room_is_no_space(runtime):
    device = open_device(0, runtime)
    runtime.errors["cudaMalloc"] = Error.cudaErrorMemoryAllocation
    with pytest.raises(NoSpaceError):
        device.allocate(1)


def test_an_event_that_is_not_reached_is_no_error_and_a_failed_one_is(runtime):
    event = open_device(0, runtime).stream().record()
    runtime.errors["cudaEventQuery"] = Error.cudaErrorNotReady
    assert not event.done()
    runtime.errors["cudaEventQuery"] = Error.cudaErrorInvalidValue
    with pytest.raises(DeviceError, match="cudaEventQuery"):
        event.done()
    runtime.errors.clear()
    assert event.done()


def test_a_handle_is_opened_with_peer_access_and_ones_own_is_not_opened(runtime):
    device = open_device(0, runtime)
    assert device.open(b"t" * 64) == 0x9000
    ((_, raw, flags),) = runtime.said("cudaIpcOpenMemHandle")
    assert (raw.reserved, flags) == (b"t" * 64, 1)
    device.close(0x9000)
    assert runtime.said("cudaIpcCloseMemHandle") == [(0, 0x9000)]
    memory = device.allocate(100)
    assert device.open(device.export(memory)) == memory
    device.close(memory)
    assert len(runtime.said("cudaIpcOpenMemHandle")) == len(runtime.said("cudaIpcCloseMemHandle"))


def test_memory_of_others_is_not_exported_and_the_refusal_names_why(runtime):
    with pytest.raises(UsageError, match="expandable_segments"):
        open_device(0, runtime).export(0x1234)


def test_another_visible_device_is_asked_about_and_a_hidden_one_is_not(runtime):
    device = open_device(0, runtime)
    runtime.results["cudaDeviceCanAccessPeer"] = 0
    properties = types.SimpleNamespace(uuid=types.SimpleNamespace(bytes=b"o" * 16))
    runtime.results["cudaGetDeviceProperties"] = properties
    assert device.reaches(device.uuid)
    assert not device.reaches((b"o" * 16).hex())
    assert runtime.said("cudaDeviceCanAccessPeer") == [(0, 0, 1)]
    assert device.reaches("hidden")


def test_a_device_that_is_not_there_is_refused_by_number(runtime):
    with pytest.raises(DeviceError, match="no CUDA device 2"):
        open_device(2, runtime)


def test_without_a_driver_the_real_bindings_say_which_call_was_refused():
    pytest.importorskip("cuda.bindings.runtime", reason="cuda-python is not installed")
    if Path("/dev/nvidiactl").exists():
        pytest.skip("there is a device: tests/gpu/ has the real one")
    with pytest.raises(DeviceError, match="cudaGetDeviceCount: cudaError"):
        open_device()


def test_every_call_is_one_that_the_real_bindings_have():
    real = pytest.importorskip("cuda.bindings.runtime", reason="cuda-python is not installed")
    source = Path(inspect.getfile(open_device)).read_text()
    named = set(re.findall(r"\bcuda[A-Z]\w+", source))
    places = (real, real.cudaError_t, real.cudaMemcpyKind, real.cudaStreamCaptureMode)
    assert [n for n in sorted(named) if not any(hasattr(place, n) for place in places)] == []
