"""The kernel's copier over a device made of host memory: order, errors, the size of a batch."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from each_input import each
from host_device import HostDevice
from kv_cases import Case, Shape, Strided

from connector.copiers.base import Gather, HeadPart, Scatter
from connector.copiers.cuda import copier, kernel_plan
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


@each("seed", range(5))
@each("direction", ["gather", "scatter"])
@each("number", [0, 1, 7, 11])
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


def test_trap_some_heads_of_one_payload_beside_all_of_another_end_where_they_end() -> None:
    """One launch has as many chunks as the largest needs: those of the others are empty there."""
    shape = Shape(layers=2, heads=8, channels=2048, page_tokens=8, blocks_per_payload=1)
    case, other = Case(shape, 1), Case(shape, 2)
    expected = Case(shape, 2)
    payload = case.payload([3])
    whole, one = HeadPart(8, 0, 0, 8), HeadPart(8, 5, 2, 1)
    device = HostDevice(1)
    items = [
        Scatter(memoryview(payload.reshape(-1)), 0, [block], part)
        for block, part in ((0, whole), (4, one))
    ]
    blocks(other, device).scatter_many(items)
    for item in items:
        expected.put(payload, 0, list(item.block_ids), item.part or whole, None)
    assert device.launches == 1
    assert np.array_equal(other.storages, expected.storages)


@pytest.mark.parametrize("number", [0, 1])
def test_trap_a_wait_that_fails_does_not_leave_the_other_stream_running(number: int) -> None:
    case, device = Case(SHAPE, 0), HostDevice(3, staging_bytes=2 * SIZE)
    items, _ = gathers(6)
    lane = device.saving
    first, second = (lane.copies, lane.kernels)[:: 1 - 2 * number]
    whole = first.wait

    def broken() -> None:
        whole()
        raise RuntimeError("the device is lost")

    first.wait = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="lost"):
        blocks(case, device).gather_many(items)
    assert not second.pending


def copied(seed: int, forget: Callable[[HostDevice], None]) -> bool:
    """Whether nine payloads come out right and go in right, through few buffers and rows."""
    case, other = Case(SHAPE, seed), Case(SHAPE, seed + 100)
    device = HostDevice(seed, staging_bytes=2 * SIZE, pages_max=10, buffers=2)
    forget(device)
    items, outs = gathers(9)
    blocks(case, device).gather_many(items)
    expected = [case.payload(list(i.block_ids)).tobytes() for i in items]
    scatters = [
        Scatter(memoryview(e), 0, i.block_ids) for i, e in zip(items, expected, strict=True)
    ]
    blocks(other, device).scatter_many(scatters)
    found = [other.payload(list(i.block_ids)).tobytes() for i in items]
    return outs == expected == found


@pytest.mark.parametrize("lane", ["saving", "loading"])
@pytest.mark.parametrize("stream", ["kernels", "copies"])
def test_trap_each_wait_between_the_streams_is_needed(lane: str, stream: str) -> None:
    """The model tells: without one of them bytes are wrong, with all of them never."""

    def forget(device: HostDevice) -> None:
        getattr(getattr(device, lane), stream).follow = lambda mark: None

    assert all(copied(seed, lambda device: None) for seed in range(20))
    # It ends with the first that goes wrong: on a busy machine that was none of twenty, once.
    assert not all(copied(seed, forget) for seed in range(400))


def test_trap_rows_of_the_table_are_not_used_again_before_they_were_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kind = copier._Turns
    whole = kind._wait
    monkeypatch.setattr(kind, "__exit__", lambda turns, *_: whole(turns))
    monkeypatch.setattr(kind, "_wait", lambda turns: None)
    assert not all(copied(seed, lambda device: None) for seed in range(20))


def test_a_payload_larger_than_a_buffer_goes_some_layers_at_a_time() -> None:
    case, other = Case(SHAPE, 1), Case(SHAPE, 2)
    each = SIZE // SHAPE.layers
    device = HostDevice(1, staging_bytes=2 * each)
    items, outs = gathers(2)
    blocks(case, device).gather_many(items)
    assert [bytes(o) for o in outs] == [case.payload(list(i.block_ids)).tobytes() for i in items]
    assert device.launches == 3, "two layers of each payload, then the last one of both"
    part = HeadPart(SHAPE.heads, 1, 0, 1)
    blocks(other, device).scatter_many([Scatter(memoryview(outs[0]), 0, [7, 3], part)])
    same = Case(SHAPE, 2)
    same.put(case.payload([0, 1]), 0, [7, 3], part, None)
    assert np.array_equal(other.storages, same.storages)


ONE_PIECE = Shape(
    layers=4, heads=2, channels=256, page_tokens=8, blocks_per_payload=1, order=(1, 0, 2, 3)
)
"""All layers of an engine block behind each other, as vLLM's BLHNC: 16 KiB."""


@pytest.mark.parametrize(
    ("other", "launches"),
    [
        ({}, 0),
        ({"blocks_per_payload": 2}, 1),  # heads of two engine blocks alternate
        ({"order": (0, 1, 2, 3)}, 1),  # a piece for each layer
        ({"order": (1, 0, 3, 2)}, 1),  # heads within tokens
        ({"padding": 16}, 1),
        ({"heads": 1, "order": (1, 0, 3, 2)}, 0),
    ],
)
def test_a_payload_that_is_one_piece_of_the_engines_memory_needs_no_kernel(
    monkeypatch: pytest.MonkeyPatch, other: dict[str, Any], launches: int
) -> None:
    shape = replace(ONE_PIECE, **other)
    monkeypatch.setattr(kernel_plan, "DEVICE_DIRECT_BYTES_MIN", 8 << 10)
    case, target, expected = Case(shape, 1), Case(shape, 2), Case(shape, 2)
    device = HostDevice(1)
    ids = [list(range(i, i + shape.blocks_per_payload)) for i in (3, 0)]
    outs = [bytearray(case.payload(i).size) for i in ids]
    blocks(case, device).gather_many(
        [Gather(i, memoryview(o)) for i, o in zip(ids, outs, strict=True)]
    )
    assert outs == [case.payload(i).tobytes() for i in ids]
    assert device.launches == launches
    # Some heads of one payload, all of another, nothing of a third: the first has to be spread,
    # unless its one head is all there is.
    part = HeadPart(shape.heads, shape.heads - 1, 0, 1)
    blocks(target, device).scatter_many(
        [
            Scatter(memoryview(outs[0]), 0, [1, 2][: shape.blocks_per_payload], part),
            Scatter(memoryview(outs[1]), 0, [4, 5][: shape.blocks_per_payload]),
            Scatter(memoryview(outs[1]), shape.blocks_per_payload, []),
        ]
    )
    whole = HeadPart(shape.heads, 0, 0, shape.heads)
    expected.put(case.payload(ids[0]), 0, [1, 2][: shape.blocks_per_payload], part, None)
    expected.put(case.payload(ids[1]), 0, [4, 5][: shape.blocks_per_payload], whole, None)
    assert np.array_equal(target.storages, expected.storages)
    assert device.launches == launches + (shape.heads > 1)


def test_trap_a_part_that_is_all_heads_is_the_whole_payload(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker names the heads of every load, also where it takes all of them."""
    monkeypatch.setattr(kernel_plan, "DEVICE_DIRECT_BYTES_MIN", 1)
    case, target, device = Case(ONE_PIECE, 1), Case(ONE_PIECE, 2), HostDevice(1)
    whole = HeadPart(ONE_PIECE.heads, 0, 0, ONE_PIECE.heads)
    payload = case.payload([3])
    blocks(target, device).scatter_many([Scatter(memoryview(payload.reshape(-1)), 0, [5], whole)])
    assert device.launches == 0
    assert np.array_equal(target.payload([5]), payload)


def test_small_payloads_in_one_piece_are_gathered_all_the_same() -> None:
    case, device = Case(ONE_PIECE, 1), HostDevice(1)
    out = bytearray(case.payload([3]).size)
    blocks(case, device).gather_many([Gather([3], memoryview(out))])
    assert device.launches == 1
    assert out == case.payload([3]).tobytes()


def test_the_calling_thread_waits_once_however_many_buffers_a_call_fills() -> None:
    case, device = Case(SHAPE, 1), HostDevice(1, staging_bytes=SIZE, buffers=4)
    waits = []
    for stream in (device.saving.kernels, device.saving.copies):
        whole = stream.wait
        stream.wait = lambda whole=whole: (waits.append(None), whole())  # type: ignore[method-assign,misc]
    items, _ = gathers(20)
    blocks(case, device).gather_many(items)
    assert device.launches == 20
    assert len(waits) == 2, "for both streams, at the end"


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
