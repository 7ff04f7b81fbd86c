"""Run by test_queue.py, in a process whose libcuda.so.1 is fake_driver.cpp.

`CudaLane` is what runs on a device; torch is made of numpy here, for it has no
device to offer, but that its memory on the device is the driver's.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest
from contract.kvblocks import KVBlocksContract
from cuda.bindings import driver
from kv_cases import Case, Shape

from connector.copiers.base import Gather, HeadPart, KVCopier, Scatter
from connector.copiers.cuda.copier import DeviceCopier
from connector.copiers.cuda.kernel_plan import (
    KERNELS,
    LayerAddress,
    PagedLayout,
    layout_of,
    staging_buffer_bytes,
)
from connector.copiers.cuda.page_lock import LockedPool, address_of
from connector.limits import DEVICE_PAGES_MAX, DEVICE_STAGING_BYTES
from connector.worker import copy_guard
from kvstore.cli.checks.base import ask_python
from kvstore.cli.checks.software import _TRY_BATCHES, TRY_TIMEOUT_S
from kvstore.cuda.batch import batch_copies
from kvstore.cuda.bindings import open_device
from kvstore.spi import DeviceRange


class Tensor:
    def __init__(self, array: Any) -> None:
        self._array = array

    def data_ptr(self) -> int:
        return int(self._array.ctypes.data)

    def numpy(self) -> Any:
        return self._array

    def to(self, device: object) -> Tensor:
        return Tensor(self._array.copy())


class OnDevice:
    """Memory that the driver knows as the device's."""

    def __init__(self, count: int) -> None:
        with open_device(0).current():
            self._address = open_device(0).call(driver.cuMemAlloc, count)
        ctypes.memset(int(self._address), 0xA5, count)

    def data_ptr(self) -> int:
        return int(self._address)


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
    torch.empty = lambda count, device=None, **_: (
        OnDevice(count) if device else Tensor(np.full(count, 0xA5, np.uint8))
    )
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


class TestCudaLane(KVBlocksContract):
    @pytest.fixture(autouse=True)
    def _device(self, cuda: Any) -> None:
        from connector.copiers.cuda.queue import QueuedDevice

        pool = LockedPool(cuda, tuple, lambda size_bytes, failure: None)
        type(self).device = QueuedDevice(cuda, 1 << 20, 1 << 10, pool)

    def blocks(self, case: Case, seed: int) -> KVCopier:
        layout = layout_of(case.layers, case.shape.geometry, case.shape.block_tokens)
        return DeviceCopier(layout, self.device)

    def test_payloads_may_lie_on_the_device_itself(self) -> None:
        case, other = Case(Shape(), 1), Case(Shape(), 2)
        expected = case.payload([3, 5])
        room = OnDevice(expected.size)
        place = DeviceRange(room.data_ptr(), expected.size, 0)
        self.blocks(case, 0).gather_many([Gather([3, 5], place)])
        assert ctypes.string_at(room.data_ptr(), expected.size) == expected.tobytes()
        part = HeadPart(2, 1, 0, 1)
        self.blocks(other, 0).scatter_many([Scatter(place, 1, [4], part)])
        same = Case(Shape(), 2)
        same.put(expected, 1, [4], part, None)
        assert np.array_equal(other.storages, same.storages)


def batches() -> tuple[int, int]:
    """Calls of cuMemcpyBatchAsync so far, and their copies."""
    found = ctypes.c_int(), ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").fake_batches(*map(ctypes.byref, found))
    return found[0].value, found[1].value


def saved_and_loaded(
    cuda: Any,
    forget: Callable[[Any], None] = lambda device: None,
    *,
    locked: bool = False,
) -> bool:
    """Whether forty payloads go there and back, through few and small buffers; from and to memory
    that is `locked`, where they are."""
    from connector.copiers.cuda.queue import QueuedDevice

    shape = Shape(layers=3, engine_blocks=80)
    case, other = Case(shape, 1), Case(shape, 2)
    payload_bytes = case.payload([0, 1]).size
    pool = LockedPool(cuda, tuple, lambda size_bytes, failure: None)
    device = QueuedDevice(cuda, 4 * payload_bytes, 1 << 10, pool, buffers=2)
    forget(device)
    room = mmap.mmap(-1, 40 * payload_bytes)
    if locked:
        assert cuda.lock(address_of(memoryview(room)), len(room), True) == ""
    outs = [memoryview(room)[i * payload_bytes :][:payload_bytes] for i in range(40)]
    ids = [[2 * i, 2 * i + 1] for i in range(40)]
    expected = [case.payload(two).tobytes() for two in ids]
    copiers = [
        DeviceCopier(layout_of(x.layers, shape.geometry, shape.block_tokens), device)
        for x in (case, other)
    ]
    copiers[0].gather_many([Gather(*pair) for pair in zip(ids, outs, strict=True)])
    good = outs == expected
    for out, value in zip(outs, expected, strict=True):
        out[:] = value
    copiers[1].scatter_many([Scatter(v, 0, two) for v, two in zip(outs, ids, strict=True)])
    if locked:
        cuda.unlock(address_of(memoryview(room)))
    return good and [other.payload(two).tobytes() for two in ids] == expected


def test_the_copies_of_a_batch_are_one_call(cuda: Any) -> None:
    before = batches()
    assert saved_and_loaded(cuda)
    calls, copies = (now - then for now, then in zip(batches(), before, strict=True))
    assert (calls, copies) == (20, 80), "ten batches of four each way"


@pytest.mark.parametrize(
    ("lane", "stream"),
    [(lane, stream) for lane in ("saving", "loading") for stream in ("kernels", "copies")],
)
def test_trap_a_stream_that_does_not_wait_for_the_other_gives_wrong_bytes(
    cuda: Any, lane: str, stream: str
) -> None:
    def forget(device: Any) -> None:
        getattr(getattr(device, lane), stream).follow = lambda mark: None

    assert not all(saved_and_loaded(cuda, forget) for _ in range(5))


def test_a_batch_that_the_driver_refuses_is_copied_one_by_one(
    cuda: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FAKE_REFUSES_BATCHES", "yes")
    before = batches()
    assert saved_and_loaded(cuda)
    assert batches() == before
    assert [r.message for r in caplog.records].count(
        "the driver refuses 4 copies at once: CUDA_ERROR_INVALID_VALUE"
    ) == 1, "and it is said once"


def test_a_call_of_the_driver_that_hangs_is_noticed_from_another_thread(
    cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_guard, "COPY_STUCK_S", 0.05)
    monkeypatch.setenv("FAKE_BATCH_MS", "2000")
    guard = copy_guard.CopyGuard()

    def copies() -> None:
        with guard.copying():
            saved_and_loaded(cuda)

    thread = threading.Thread(target=copies)
    thread.start()
    while thread.is_alive() and not (took_s := guard.stuck_s()):
        time.sleep(0.01)
    monkeypatch.setenv("FAKE_BATCH_MS", "0")  # its first call hangs, no other
    assert 0.05 < took_s < 1.5, "the call that hangs keeps no other thread of the process"
    thread.join()


def test_a_driver_before_12_8_has_no_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked() -> tuple[bool, str]:
        """What `kvstore doctor` finds out."""
        return ask_python(sys.executable, _TRY_BATCHES, TRY_TIMEOUT_S)

    assert batch_copies(driver) is not None
    assert asked() == (True, "yes")
    for version in ("12040", "12070"):
        monkeypatch.setenv("FAKE_DRIVER_VERSION", version)
        assert batch_copies(driver) is None
        assert asked() == (True, "no")


def test_without_batches_every_copy_is_a_call(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_device(0), "batch", None)
    before = batches()
    assert saved_and_loaded(cuda)
    assert batches() == before


class Cost(NamedTuple):
    """What one call of a copier costs the thread that makes it."""

    driver: int
    """Calls of the driver."""
    functions: int
    """Calls of functions, ours and built-in ones."""


def cost_of(work: Callable[[], object]) -> Cost:
    driver, functions = ctypes.CDLL("libcuda.so.1"), 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal functions
        functions += event in ("call", "c_call")

    work()  # what is made once is made now
    before = driver.fake_calls()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return Cost(driver.fake_calls() - before, functions)


def costs(cuda: Any, shape: Shape, blocks: int, *, in_one_piece: bool = False) -> list[Cost]:
    """Of saving and of loading that many store blocks."""
    from connector.copiers.cuda.queue import QueuedDevice

    pages, channel_bytes = blocks * shape.blocks_per_payload, shape.channels
    page_bytes = shape.page_tokens * shape.heads * channel_bytes
    room = OnDevice(shape.layers * pages * page_bytes)
    # vLLM's BLHNC, where a block is one piece, or its LBNHC.
    layer_stride, page_stride = page_bytes, shape.layers * page_bytes
    head_stride, token_stride = shape.page_tokens * channel_bytes, channel_bytes
    if not in_one_piece:
        layer_stride, page_stride = pages * page_bytes, page_bytes
        head_stride, token_stride = channel_bytes, shape.heads * channel_bytes
    layout = PagedLayout(
        [
            LayerAddress(room.data_ptr() + i * layer_stride, page_stride, head_stride, token_stride)
            for i in range(shape.layers)
        ],
        pages=pages,
        heads=shape.heads,
        channel_bytes=channel_bytes,
        page_tokens=shape.page_tokens,
        pages_per_block=1,
        payload_tokens=shape.block_tokens,
    )
    assert layout.in_one_piece == in_one_piece
    pool = LockedPool(cuda, tuple, lambda size_bytes, failure: None)
    copier = DeviceCopier(
        layout, QueuedDevice(cuda, staging_buffer_bytes([layout]), DEVICE_PAGES_MAX, pool)
    )
    payload = memoryview(bytearray(layout.payload_bytes))
    tables = [list(range(pages))[i::blocks] for i in range(blocks)]
    gathers = [Gather(table, payload) for table in tables]
    scatters = [Scatter(payload, 0, table) for table in tables]
    return [
        cost_of(lambda: copier.gather_many(gathers)),
        cost_of(lambda: copier.scatter_many(scatters)),
    ]


CALLS_A_BUFFER_MAX = 7
"""The kernel's table, the kernel, the DMAs, and the events by which two streams take turns."""
CALLS_AT_THE_END_MAX = 4
"""An event and a wait for each of the two streams."""
CALLS_A_MIB_MAX = 1.0
FUNCTIONS_A_BLOCK_MAX = 75
LLAMA_8B = Shape(layers=32, heads=8, channels=512, page_tokens=16, blocks_per_payload=1)
LLAMA_70B_TP8 = Shape(layers=80, heads=1, channels=512, page_tokens=16)
MLA = Shape(layers=61, heads=1, channels=1152, page_tokens=16, blocks_per_payload=4)
"""4.3 MiB, of which one fits 8 MiB."""


@pytest.fixture
def moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_MOVES_NOTHING", "yes")


@pytest.mark.usefixtures("moves_nothing")
@pytest.mark.parametrize(("shape", "blocks"), [(LLAMA_8B, 32), (LLAMA_70B_TP8, 48), (MLA, 15)])
def test_calls_of_the_driver_for_a_mib_keep_to_their_budget(
    cuda: Any, shape: Shape, blocks: int
) -> None:
    block_bytes = shape.layers * shape.heads * shape.block_tokens * shape.channels
    buffers = -(-blocks // max(2, DEVICE_STAGING_BYTES // block_bytes))
    for cost in costs(cuda, shape, blocks):
        assert cost.driver <= CALLS_A_BUFFER_MAX * buffers + CALLS_AT_THE_END_MAX
        assert cost.driver <= CALLS_A_MIB_MAX * blocks * block_bytes / (1 << 20)


@pytest.mark.usefixtures("moves_nothing")
def test_calls_of_the_driver_do_not_depend_on_how_many_blocks_are_in_a_buffer(cuda: Any) -> None:
    in_a_buffer = [costs(cuda, LLAMA_70B_TP8, blocks) for blocks in (1, 6)]
    assert [cost.driver for cost in in_a_buffer[0]] == [cost.driver for cost in in_a_buffer[1]]


@pytest.mark.usefixtures("moves_nothing")
def test_blocks_in_one_piece_are_one_call_of_the_driver_and_the_end(cuda: Any) -> None:
    for cost in costs(cuda, LLAMA_8B, 32, in_one_piece=True):
        assert cost.driver <= 1 + CALLS_AT_THE_END_MAX


@pytest.mark.usefixtures("moves_nothing")
def test_functions_called_for_a_block_keep_to_their_budget(cuda: Any) -> None:
    few, many = (costs(cuda, LLAMA_70B_TP8, blocks) for blocks in (24, 48))
    for less, more in zip(few, many, strict=True):
        assert (more.functions - less.functions) / 24 <= FUNCTIONS_A_BLOCK_MAX


@pytest.mark.parametrize("low", [False, True])
def test_our_streams_go_first_or_last_as_an_operator_says(
    cuda: Any, monkeypatch: pytest.MonkeyPatch, low: bool
) -> None:
    from connector.copiers.cuda import queue

    monkeypatch.setattr(cuda, "low_priority", low)
    lane = queue.CudaLane(cuda, 2, 1 << 20, 1 << 10)
    with cuda.scope():
        _, lowest, highest = driver.cuCtxGetStreamPriorityRange()
        assert highest < lowest
        for stream in (lane.kernels, lane.copies):
            assert cuda.call(driver.cuStreamGetPriority, stream.handle) == (
                lowest if low else highest
            )


@contextmanager
def device_anew() -> Iterator[None]:
    """Have the device look for its call for many copies again, and once more afterwards."""
    vars(open_device(0)).pop("batch", None)
    try:
        yield
    finally:
        vars(open_device(0)).pop("batch", None)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("FAKE_HOST_POINTERS", "0"),
        ("FAKE_DRIVER_VERSION", "12070"),
        ("KVSTORE_CUDA_COPIES", "single"),
    ],
)
def test_a_device_that_takes_no_addresses_of_locked_memory_or_an_operator_is_given_single_copies(
    cuda: Any, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    before = batches()
    with device_anew():
        assert saved_and_loaded(cuda, locked=True)
    assert batches() == before


@pytest.mark.parametrize(("most", "calls"), [(3, 40), (4, 20)])
def test_one_call_has_at_most_so_many_copies(
    cuda: Any, monkeypatch: pytest.MonkeyPatch, most: int, calls: int
) -> None:
    from kvstore.cuda import bindings

    monkeypatch.setattr(bindings, "CUDA_BATCH_COPIES_MAX", most)
    before = batches()
    with device_anew():
        assert saved_and_loaded(cuda)
    # Of four copies three go together and one is left, which is a call of its own.
    assert batches()[0] - before[0] == min(calls, 20)


@pytest.mark.parametrize("order", ["stream", "any"])
@pytest.mark.parametrize("overlap", [False, True])
def test_attributes_of_batches_are_settings_and_what_is_saved_is_read_in_its_turn(
    cuda: Any, monkeypatch: pytest.MonkeyPatch, order: str, overlap: bool
) -> None:
    """A staging buffer is filled by a kernel before it: read at any time it has other bytes."""
    from kvstore.cuda import batch

    words = [batch.ANY_ORDER] * (order == "any") + [batch.OVERLAP] * overlap
    monkeypatch.setenv(batch.VARIABLE, ",".join(words))
    seen = set()
    real = batch.BatchCopies.__call__

    def noted(self: Any, copies: Any, stream: int, *, complete: bool = False) -> int:
        answer = real(self, copies, stream, complete=complete)
        attributes = ctypes.c_int(), ctypes.c_int()
        ctypes.CDLL("libcuda.so.1").fake_batch_attributes(*map(ctypes.byref, attributes))
        seen.add((complete, *(one.value for one in attributes)))
        return answer

    monkeypatch.setattr(batch.BatchCopies, "__call__", noted)
    with device_anew():
        assert all(saved_and_loaded(cuda) for _ in range(3))
    expected = {"stream": 1, "any": 3}[order]
    assert seen == {(False, 1, int(overlap)), (True, expected, int(overlap))}


@pytest.mark.parametrize("answer", ["stage", "refuse"])
@pytest.mark.parametrize("locked", [False, True])
def test_memory_that_is_not_locked_yet_is_copied_whatever_the_driver_makes_of_it(
    cuda: Any, monkeypatch: pytest.MonkeyPatch, answer: str, locked: bool
) -> None:
    monkeypatch.setenv("FAKE_UNLOCKED_BATCHES", answer)
    before = batches()
    assert saved_and_loaded(cuda, locked=locked)
    together = locked or answer == "stage"
    assert batches()[0] - before[0] == (20 if together else 0)


@pytest.mark.parametrize(
    ("result", "failure"), [("0", ""), ("2", "out_of_memory"), ("801", "not_supported")]
)
def test_the_driver_says_whether_memory_is_locked(
    cuda: Any, monkeypatch: pytest.MonkeyPatch, result: str, failure: str
) -> None:
    monkeypatch.setenv("FAKE_LOCK_RESULT", result)
    monkeypatch.setenv("FAKE_LOCKS_READ_ONLY", "1")
    memory = mmap.mmap(-1, 4096)
    address = address_of(memoryview(memory))
    for writable in (True, False):
        assert cuda.lock(address, 4096, writable) == failure
        cuda.unlock(address)


def test_a_range_that_is_locked_is_not_locked_again(cuda: Any) -> None:
    memory = mmap.mmap(-1, 3 * 4096)
    address = address_of(memoryview(memory))
    assert cuda.lock(address, 4096, True) == ""
    assert cuda.lock(address + 4000, 4096, True) == "host_memory_already_registered"
    cuda.unlock(address)


def test_trap_every_kernel_is_loaded_before_the_engine_computes(cuda: Any) -> None:
    """Loading one may wait for all that runs on the device."""
    assert set(cuda.kernels) == set(KERNELS)


def test_trap_the_engines_thread_keeps_its_context_and_capture_mode(cuda: Any) -> None:
    from connector.copiers.cuda.queue import CudaLane

    found: list[Any] = []

    def work() -> None:
        CudaLane(cuda, 2, 1 << 20, 1 << 10)
        mode = cuda.driver.cuThreadExchangeStreamCaptureMode(
            cuda.driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        )[1]
        found.append((int(cuda.driver.cuCtxGetCurrent()[1]), int(mode)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [(0, 0)]
