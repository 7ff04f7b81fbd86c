"""The kernel's copier over a device made of host memory: order, errors, the size of a batch."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from host_device import HostDevice
from kv_cases import Case, Shape, Strided

from connector.copiers.base import Gather, Scatter
from connector.copiers.cuda.copier import DeviceCopier
from connector.copiers.cuda.kernel_plan import layout_of

SHAPE = Shape(layers=3, engine_blocks=64)
SIZE = int(np.prod(SHAPE.payload_shape))


def blocks(case: Case, device: HostDevice) -> DeviceCopier:
    layout = layout_of(case.layers, case.shape.geometry, case.shape.block_tokens)
    return DeviceCopier(layout, device)


def gathers(count: int) -> tuple[list[Gather], list[bytearray]]:
    outs = [bytearray(SIZE) for _ in range(count)]
    return [Gather([2 * i, 2 * i + 1], memoryview(o)) for i, o in enumerate(outs)], outs


def test_a_step_is_one_launch_as_long_as_staging_has_room() -> None:
    case, device = Case(SHAPE, 1), HostDevice(1)
    items, outs = gathers(20)
    blocks(case, device).gather_many(items)
    assert device.launches == 1
    scatters = [Scatter(memoryview(o), 0, i.block_ids) for i, o in zip(items, outs, strict=True)]
    blocks(case, device).scatter_many(scatters, layer=2)
    assert device.launches == 2


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("direction", ["gather", "scatter"])
@pytest.mark.parametrize("number", [0, 1, 7, 11])
def test_trap_when_a_call_fails_nothing_of_it_runs_any_more(
    seed: int, direction: str, number: int
) -> None:
    """The caller gives the memory back then: a copy that is still under way would be of
    somebody else's block."""
    case, device = Case(SHAPE, seed), HostDevice(seed, staging_bytes=3 * SIZE)
    copier = blocks(case, device)
    items, outs = gathers(9)
    calls: list[None] = []

    def fail() -> None:
        calls.append(None)
        if len(calls) > number:
            raise RuntimeError("the driver says no")

    device.before_start = fail
    scatters = [Scatter(memoryview(o), 0, i.block_ids) for i, o in zip(items, outs, strict=True)]
    copy = copier.gather_many if direction == "gather" else copier.scatter_many
    with pytest.raises(RuntimeError, match="says no"):
        copy(items if direction == "gather" else scatters)
    assert not device.busy


def test_trap_a_wait_that_fails_does_not_leave_the_other_queue_running() -> None:
    case, device = Case(SHAPE, 0), HostDevice(3, staging_bytes=2 * SIZE)
    items, _ = gathers(6)
    first, second = device.saving

    def broken() -> None:
        first.pending.clear()
        raise RuntimeError("the device is lost")

    first.wait = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="lost"):
        blocks(case, device).gather_many(items)
    assert not second.pending


def test_host_memory_is_used_where_the_device_reaches_it() -> None:
    """A second mapping of the same memory, which is the one that is page-locked."""
    case, device = Case(SHAPE, 1), HostDevice(1)
    both = bytearray(2 * SIZE)
    device.distance = SIZE
    blocks(case, device).gather_many([Gather([5, 9], memoryview(both)[:SIZE])])
    assert both[SIZE:] == case.payload([5, 9]).tobytes()
    assert not any(both[:SIZE])
    target = Case(SHAPE, 2)
    blocks(target, device).scatter_many([Scatter(memoryview(both)[:SIZE], 0, [3, 8])])
    assert np.array_equal(target.payload([3, 8]), case.payload([5, 9]))


def test_work_that_was_started_before_is_over_when_ready_is_waited_for() -> None:
    device = HostDevice(0)
    copier = blocks(Case(SHAPE, 1), device)
    done: list[int] = []
    device.compute.extend(lambda i=i: done.append(i) for i in range(3))  # type: ignore[misc]
    ready = copier.mark_ready()
    device.compute.append(lambda: done.append(3))
    copier.wait_ready(ready)
    assert done == [0, 1, 2]


def test_one_thread_saves_while_another_loads() -> None:
    """Each has queues of its own."""
    one, other, device = Case(SHAPE, 1), Case(SHAPE, 2), HostDevice(5, staging_bytes=2 * SIZE)
    copier, loader = blocks(one, device), blocks(other, device)
    items, outs = gathers(8)
    payload = Case(SHAPE, 3).payload([0, 1]).tobytes()
    scatters = [Scatter(memoryview(payload), 0, [2 * i, 2 * i + 1]) for i in range(8)]

    def again(copy: Callable[[Any], None], what: Any) -> None:
        for _ in range(20):
            copy(what)

    with ThreadPoolExecutor(2) as pool:
        saving = pool.submit(again, copier.gather_many, items)
        loading = pool.submit(again, loader.scatter_many, scatters)
    saving.result()
    loading.result()
    for item, out in zip(items, outs, strict=True):
        assert out == one.payload(list(item.block_ids)).tobytes()
        assert other.payload(list(item.block_ids)).tobytes() == payload


def test_offsets_beyond_32_bits_are_right(tmp_path: Path) -> None:
    """Tokens, heads, blocks and layers lie GiB apart, in a file of holes."""
    tokens, token, head, page, layer = 80, 1 << 26, 1 << 34, 1 << 36, 1 << 40
    with (tmp_path / "sparse").open("w+b") as file:
        file.truncate(2 * layer)
        raw = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)
    arrays = [
        np.ndarray((6, 2, tokens, 16), np.uint8, raw, n * layer, (page, head, token, 1))
        for n in range(2)
    ]
    shape = Shape(page_tokens=tokens)
    layout = layout_of([Strided(a, raw) for a in arrays], shape.geometry, shape.block_tokens)
    copier = DeviceCopier(layout, HostDevice(1))
    written = np.random.default_rng(1).integers(0, 256, (2, 2, 2, tokens, 16), np.uint8)
    for array, of_layer in zip(arrays, written, strict=True):
        array[5], array[3] = of_layer
    out = memoryview(bytearray(written.nbytes))
    copier.gather_many([Gather([5, 3], out)])
    # From [layer][block][head][token] to [layer][head][block, token].
    assert bytes(out) == written.swapaxes(1, 2).tobytes()
    copier.scatter_many([Scatter(out, 0, [4, 2])])
    for array, of_layer in zip(arrays, written, strict=True):
        assert np.array_equal(np.stack([array[4], array[2]]), of_layer)
