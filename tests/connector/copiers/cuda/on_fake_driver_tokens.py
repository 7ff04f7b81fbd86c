"""Run by test_queue.py beside on_fake_driver.py: payloads in the order of tokens."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from kv_cases import Shape
from on_fake_driver import OnDevice, batches
from on_fake_driver import cuda as cuda  # the fixture

from connector.copiers.base import Gather, HeadPart, Scatter
from connector.copiers.cuda.copier import DeviceCopier
from connector.copiers.cuda.kernel_plan import LayerAddress, PagedLayout, staging_buffer_bytes
from connector.copiers.cuda.page_lock import LockedPool
from connector.limits import DEVICE_PAGES_MAX


def token_order(
    cuda: Any, shape: Shape, blocks: int, layer_stride: int, page_stride: int, *, fill: bytes = b""
) -> tuple[PagedLayout, DeviceCopier, OnDevice]:
    """Pages of all heads within a token, such as vLLM's LBNHC has, for payloads in this order."""
    from connector.copiers.cuda.queue import QueuedDevice

    room = OnDevice(shape.layers * blocks * shape.blocks_per_payload * shape.page_bytes)
    ctypes.memmove(room.data_ptr(), fill, len(fill))
    layout = PagedLayout(
        [
            LayerAddress(
                room.data_ptr() + i * layer_stride,
                page_stride,
                shape.page_bytes,
                shape.heads * shape.channels,
            )
            for i in range(shape.layers)
        ],
        pages=blocks * shape.blocks_per_payload,
        heads=1,
        channel_bytes=shape.heads * shape.channels,
        page_tokens=shape.page_tokens,
        pages_per_block=1,
        payload_tokens=shape.block_tokens,
        token_order=True,
    )
    pool = LockedPool(cuda, tuple, lambda size_bytes, failure: None)
    device = QueuedDevice(cuda, staging_buffer_bytes([layout]), DEVICE_PAGES_MAX, pool)
    return layout, DeviceCopier(layout, device), room


@pytest.mark.parametrize("blocks_first", [False, True])
def test_in_the_order_of_tokens_a_layer_and_engine_block_is_a_dma_and_nothing_is_launched(
    cuda: Any, monkeypatch: pytest.MonkeyPatch, blocks_first: bool
) -> None:
    shape = Shape(layers=3, heads=8, channels=512, page_tokens=16, blocks_per_payload=4)
    blocks, per = 5, shape.blocks_per_payload
    size, pages = shape.page_bytes, blocks * per
    strides = (size, shape.layers * size) if blocks_first else (pages * size, size)
    written = np.random.default_rng(1).integers(0, 256, (shape.layers, pages, size), np.uint8)
    fill = (written.swapaxes(0, 1) if blocks_first else written).tobytes()
    layout, copier, _ = token_order(cuda, shape, blocks, *strides, fill=fill)
    assert (layout.in_pieces, layout.in_one_piece) == (True, False)
    launched: list[object] = []
    monkeypatch.setattr(copier, "_launch", lambda *of, **more: launched.append(of))
    tables = [[int(x) for x in row] for row in np.arange(pages).reshape(per, blocks).T]
    outs = [bytearray(layout.payload_bytes) for _ in tables]
    before = batches()
    copier.gather_many([Gather(*pair) for pair in zip(tables, map(memoryview, outs), strict=True)])
    calls, copies = (now - then for now, then in zip(batches(), before, strict=True))
    assert (calls, copies) == (1, shape.layers * pages)
    assert outs == [written[:, table].tobytes() for table in tables]

    _, loader, there = token_order(cuda, shape, blocks, *strides)
    monkeypatch.setattr(loader, "_launch", lambda *of, **more: launched.append(of))
    before = batches()
    part = HeadPart(1, 0, 0, 1)
    items = [
        Scatter(memoryview(out), 1, table[1:], part)
        for out, table in zip(outs, tables, strict=True)
    ]
    loader.scatter_many(items)
    calls, copies = (now - then for now, then in zip(batches(), before, strict=True))
    assert (calls, copies) == (1, shape.layers * (pages - blocks)), "all but each one's first"
    loader.scatter_many([Scatter(memoryview(outs[0]), 0, tables[0][:1], part)], layer=2)
    expected = np.full_like(written, 0xA5)
    loaded = [page for table in tables for page in table[1:]]
    expected[:, loaded] = written[:, loaded]
    expected[2, tables[0][0]] = written[2, tables[0][0]]
    memory = expected.swapaxes(0, 1) if blocks_first else expected
    assert ctypes.string_at(there.data_ptr(), written.nbytes) == memory.tobytes()
    assert not launched


def test_small_pages_in_the_order_of_tokens_go_by_the_kernel(cuda: Any) -> None:
    """Two heads of a rank: 16 KiB, which the bus moves before the next DMA is begun."""
    shape = Shape(layers=3, heads=2, channels=512, page_tokens=16, blocks_per_payload=4)
    size, pages = shape.page_bytes, 2 * shape.blocks_per_payload
    written = np.random.default_rng(1).integers(0, 256, (shape.layers, pages, size), np.uint8)
    layout, copier, _ = token_order(cuda, shape, 2, pages * size, size, fill=written.tobytes())
    assert not layout.in_pieces
    out = bytearray(layout.payload_bytes)
    copier.gather_many([Gather([7, 0, 3, 2], memoryview(out))])
    assert out == written[:, [7, 0, 3, 2]].tobytes()
