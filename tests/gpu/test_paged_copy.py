"""The kernel on a real device: byte for byte what the host does, and beside the engine's work."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
from contract.kvblocks import KVBlocksContract
from kv_cases import Case, Shape

from connector.copiers.base import Gather, HeadPart, KVCopier, Scatter
from connector.copiers.cuda.copier import DeviceCopier
from connector.copiers.cuda.kernel_plan import layout_of
from connector.copiers.cuda.torch_copier import TorchCopier
from kvstore.spi import DeviceRange

torch: Any = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

PATIENCE_S = 30.0
SLEEP_CYCLES = 3_000_000_000
"""Over a second of any device that there is."""


def on_device(case: Case) -> tuple[list[Any], list[Any]]:
    """The case's memory and its layers there, byte by byte, aligned as they are here."""
    storages, layers = [], []
    for raw in case.storages:
        start = -raw.ctypes.data % 16  # where the first element is, see Case
        room = torch.empty(len(raw) + 16, dtype=torch.uint8, device="cuda")
        storage = room[-start % 16 :][: len(raw)]
        storage.copy_(torch.from_numpy(raw))
        storages.append(storage)
    for number, layer in enumerate(case.layers):
        place = number if case.shape.apart else 0
        array = layer.array
        first = layer.data_ptr() - case.storages[place].ctypes.data
        layers.append(
            storages[place].as_strided(
                (*array.shape[:3], array.shape[3] * array.itemsize),
                (*array.strides[:3], 1),
                storages[place].storage_offset() + first,
            )
        )
    torch.cuda.synchronize()
    return storages, layers


class OnDevice(KVBlocksContract):
    def copier(self, layers: list[Any], shape: Shape) -> KVCopier:
        raise NotImplementedError

    def blocks(self, case: Case, seed: int) -> KVCopier:
        storages, layers = on_device(case)
        case.__dict__["there"] = storages
        return self.copier(layers, case.shape)

    def sync(self, case: Case) -> None:
        torch.cuda.synchronize()
        for here, there in zip(case.storages, case.__dict__["there"], strict=True):
            here[:] = there.cpu().numpy()


class TestContract(OnDevice):
    @pytest.fixture(autouse=True)
    def _device(self, device: Any) -> None:
        type(self).device = device

    def copier(self, layers: list[Any], shape: Shape) -> KVCopier:
        layout = layout_of(layers, shape.geometry, shape.block_tokens)
        return DeviceCopier(layout, self.device, keep=layers)


class TestWithoutTheKernel(OnDevice):
    def copier(self, layers: list[Any], shape: Shape) -> KVCopier:
        return TorchCopier(layers, shape.geometry, shape.block_tokens)


NHD, HND = (0, 1, 3, 2), (0, 1, 2, 3)
REAL = {
    "llama-8b": Shape(32, 8, 256, 2, 16, 1, 16, 64, NHD),
    "llama-8b-hnd": Shape(32, 8, 256, 2, 16, 1, 16, 64, HND),
    "llama-70b-tp8": Shape(80, 1, 256, 2, 16, 1, 16, 64, NHD),
    "qwen-fp8": Shape(28, 4, 256, 1, 16, 1, 16, 64, NHD),
    "mla": Shape(61, 1, 576, 2, 64, 1, 4, 16, NHD),
    "mla-fp8-656": Shape(61, 1, 656, 1, 64, 1, 4, 16, NHD),
    "kernel-blocks-of-64-in-128": Shape(8, 8, 256, 2, 64, 2, 2, 16, HND),
    "layers-apart": Shape(8, 8, 256, 2, 16, 1, 16, 64, NHD, apart=True),
    "odd-address": Shape(4, 4, 128, 1, 16, 1, 16, 64, NHD, offset=3),
    "state": Shape(4, 1, 1 << 20, 1, 1, 1, 1, 16, HND),
}


@pytest.mark.parametrize("name", REAL)
def test_real_geometries_go_there_and_back_byte_by_byte(name: str, device: Any) -> None:
    shape = REAL[name]
    case, other = Case(shape, 1), Case(shape, 2)
    generator = np.random.default_rng(3)
    each = shape.blocks_per_payload
    count = min(4, shape.engine_blocks // each)
    tables = generator.permutation(shape.engine_blocks)[: count * each].reshape(count, each)
    outs = [np.empty(case.payload(t.tolist()).shape, np.uint8) for t in tables]
    views = [memoryview(out.reshape(-1)) for out in outs]

    def blocks(of: Case) -> tuple[DeviceCopier, list[Any]]:
        storages, layers = on_device(of)
        layout = layout_of(layers, shape.geometry, shape.block_tokens)
        return DeviceCopier(layout, device, keep=layers), storages

    source, _ = blocks(case)
    source.gather_many([Gather(t.tolist(), v) for t, v in zip(tables, views, strict=True)])
    for table, out in zip(tables, outs, strict=True):
        assert np.array_equal(out, case.payload(table.tolist()))
    target, there = blocks(other)
    last = shape.heads - 1
    part = HeadPart(shape.heads, last, 0, 1)
    scatters = [Scatter(v, 0, t.tolist()) for t, v in zip(tables[:-1], views, strict=False)]
    scatters.append(Scatter(views[-1], each - 1, tables[-1][-1:].tolist(), part))
    target.scatter_many(scatters)
    whole = HeadPart(shape.heads, 0, 0, shape.heads)
    for item, out in zip(scatters, outs, strict=True):
        other.put(out, item.skip, list(item.block_ids), item.part or whole, None)
    for here, its in zip(other.storages, there, strict=True):
        assert np.array_equal(here, its.cpu().numpy())


def test_payloads_may_lie_on_the_device_itself(device: Any) -> None:
    """As those in VRAM do: all of one is gathered, some heads of it are scattered."""
    shape = REAL["kernel-blocks-of-64-in-128"]
    case, other = Case(shape, 1), Case(shape, 2)
    (_, layers), (there, targets) = on_device(case), on_device(other)
    source, target = (
        DeviceCopier(layout_of(kv, shape.geometry, shape.block_tokens), device, keep=kv)
        for kv in (layers, targets)
    )
    expected = case.payload([3, 5])
    room = torch.zeros(expected.size, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    place = DeviceRange(room.data_ptr(), expected.size, 0)
    source.gather_many([Gather([3, 5], place)])
    assert np.array_equal(room.cpu().numpy(), expected.reshape(-1))
    part = HeadPart(shape.heads, 3, 0, 2)
    target.scatter_many([Scatter(place, 1, [7], part)])
    other.put(expected, 1, [7], part, None)
    for here, its in zip(other.storages, there, strict=True):
        assert np.array_equal(here, its.cpu().numpy())


@pytest.fixture
def llama(device: Any) -> tuple[DeviceCopier, list[Any], Case]:
    case = Case(REAL["llama-8b"], 1)
    _, layers = on_device(case)
    layout = layout_of(layers, case.shape.geometry, case.shape.block_tokens)
    return DeviceCopier(layout, device, keep=layers), layers, case


def test_copies_wait_for_no_compute_that_they_were_not_told_of(llama: Any) -> None:
    blocks, _, case = llama
    ids = list(range(16))
    out = np.empty(case.payload(ids).shape, np.uint8)
    blocks.gather_many([Gather(ids, memoryview(out.reshape(-1)))])
    torch.cuda._sleep(SLEEP_CYCLES)
    end = torch.cuda.Event()
    end.record()
    blocks.gather_many([Gather(ids, memoryview(out.reshape(-1)))])
    blocks.scatter_many([Scatter(memoryview(out.reshape(-1)), 0, ids)])
    assert not end.query(), "the copies waited for the compute stream"
    assert np.array_equal(out, case.payload(ids))
    torch.cuda.synchronize()


def test_trap_what_the_forward_wrote_is_what_is_saved(llama: Any) -> None:
    blocks, layers, case = llama
    ids = list(range(16))
    out = np.empty(case.payload(ids).shape, np.uint8)
    for layer in layers:
        layer.fill_(0)  # its kernel is loaded: that waits for all that runs
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    for number, layer in enumerate(layers):
        layer.fill_(number + 1)
    ready = blocks.mark_ready()
    assert not ready.query(), "the forward still runs"
    blocks.wait_ready(ready)
    blocks.gather_many([Gather(ids, memoryview(out.reshape(-1)))])
    for number in range(case.shape.layers):
        assert (out[number] == number + 1).all()


def test_trap_a_graph_can_be_captured_while_blocks_are_copied(llama: Any) -> None:
    """Calls of other threads end a capture unless these say that they are none of its business."""
    blocks, _, case = llama
    ids = list(range(16))
    out = np.empty(case.payload(ids).shape, np.uint8)
    stop, failed, rounds = threading.Event(), [], []

    def copy() -> None:
        try:
            while not stop.is_set():
                blocks.gather_many([Gather(ids, memoryview(out.reshape(-1)))])
                rounds.append(1)
        except Exception as e:
            failed.append(e)

    x = torch.ones(1024, 1024, device="cuda")
    (x @ x).sum()
    torch.cuda.synchronize()
    thread = threading.Thread(target=copy)
    thread.start()
    try:
        for _ in range(20):
            graph, before = torch.cuda.CUDAGraph(), len(rounds)
            with torch.cuda.graph(graph):
                y = x
                for _ in range(200):
                    y = y @ x / 1024
                give_up_at = time.monotonic() + PATIENCE_S
                while len(rounds) < before + 2 and not failed:
                    assert time.monotonic() < give_up_at, "copies wait for the capture"
            graph.replay()
    finally:
        stop.set()
        thread.join(PATIENCE_S)
    assert not failed
    torch.cuda.synchronize()
    assert torch.allclose(y, x)
