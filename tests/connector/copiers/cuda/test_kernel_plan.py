"""What the kernel is told: widths, tables and batches. No torch, no device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from each_input import each
from hypothesis import given
from hypothesis import strategies as st
from kv_cases import Case, shapes

from connector.copiers.base import Gather, HeadPart, Scatter
from connector.copiers.cuda.kernel_plan import (
    LAYER,
    PAGE_BYTES,
    PAGE_FIELDS,
    STAGING_ALIGNMENT_BYTES,
    WORDS_PER_CHUNK,
    CopyPart,
    HostPlace,
    LayerAddress,
    PagedLayout,
    apart,
    batches,
    layout_of,
    staging_buffer_bytes,
    word_bytes,
)
from connector.limits import DEVICE_BLOCKS_MAX, DEVICE_STAGING_BYTES
from kvstore import InternalError

OTHERS: dict[str, Any] = {
    "pages": 32,
    "heads": 4,
    "channel_bytes": 256,
    "page_tokens": 8,
    "pages_per_block": 2,
    "payload_tokens": 64,
}


def layout(**changed: object) -> PagedLayout:
    layers = [LayerAddress(1 << 20, 65536, 2048, 256), LayerAddress(1 << 21, 65536, 2048, 256)]
    return PagedLayout(layers, **{**OTHERS, **changed})


@each("layers", [1, 3, 7, 8, 30, 61, 62, 80, 122, 200, 1000])
def test_whole_payloads_fill_a_staging_buffer_but_for_an_eighth(layers: int) -> None:
    """What it costs the driver is the same for every buffer."""
    wide = {"heads": 1, "channel_bytes": 1152}
    made = layout(**wide)
    made = PagedLayout([made.layers[0]] * layers, **OTHERS | wide)
    size_bytes = staging_buffer_bytes([layout(), made])
    assert DEVICE_STAGING_BYTES <= size_bytes < 2 * DEVICE_STAGING_BYTES
    whole = size_bytes // made.payload_bytes * made.payload_bytes
    assert whole == 0 or whole >= DEVICE_STAGING_BYTES * 7 / 8


def payload(layout: PagedLayout, heads: int = 4) -> memoryview:
    return memoryview(bytearray(len(layout.layers) * heads * layout.head_bytes))


class TestWords:
    @each(
        ("multiples", "expected"),
        [((256, 4096), 16), ((256, 4104), 8), ((36, 4096), 4), ((256, 4098), 2), ((9, 16), 1)],
    )
    def test_the_widest_word_that_fits_everything_is_used(
        self, multiples: tuple[int, ...], expected: int
    ) -> None:
        assert word_bytes(multiples) == expected

    @given(shapes(), st.integers(0, 1 << 16))
    def test_trap_every_token_of_every_layer_starts_at_a_multiple_of_the_word(
        self, shape, seed: int
    ) -> None:
        case = Case(shape, seed)
        made = layout_of(case.layers, shape.geometry, shape.block_tokens)
        assert made.channel_bytes % made.word_bytes == 0
        for layer in case.layers:
            array = layer.array
            for index in np.ndindex(array.shape[:3]):
                place = array[index].__array_interface__["data"][0]
                assert place % made.word_bytes == 0

    def test_one_layer_at_an_odd_address_narrows_all(self) -> None:
        odd = [
            LayerAddress(1 << 20, 65536, 2048, 256),
            LayerAddress((1 << 21) + 4, 65536, 2048, 256),
        ]
        made = PagedLayout(
            odd,
            pages=32,
            heads=4,
            channel_bytes=256,
            page_tokens=8,
            pages_per_block=2,
            payload_tokens=64,
        )
        assert made.word_bytes == 4


class TestPieces:
    def test_a_whole_payload_is_one_range(self) -> None:
        made = layout()
        out = payload(made)
        piece = made.gathered(Gather([0, 1, 2, 3], out), 1000, range(2))
        assert piece.host == HostPlace(1000, len(out), 1, len(out))
        assert (piece.skip, piece.head, piece.heads) == (0, 0, 4)

    def test_one_layer_is_its_part(self) -> None:
        made = layout()
        piece = made.gathered(Gather([0, 1, 2, 3], payload(made)), 1000, range(1, 2))
        layer_bytes = 4 * 64 * 256
        assert piece.host == HostPlace(1000 + layer_bytes, layer_bytes, 1, layer_bytes)

    def test_some_heads_are_a_range_of_each_layer(self) -> None:
        made = layout()
        item = Scatter(payload(made, 8), 1, [5], HeadPart(8, 3, 2, 2))
        piece = made.scattered(item, 1000, range(2))
        head_bytes = 64 * 256
        assert piece.host == HostPlace(1000 + 3 * head_bytes, 2 * head_bytes, 2, 8 * head_bytes)
        assert (piece.skip, piece.head, piece.heads) == (1, 2, 2)

    @each(
        "item",
        [
            Gather([0, 1, 2, 3], memoryview(bytearray(100))),
            Gather([0, 1, 2], payload(layout())),
            Gather([0, 1, 2, 16], payload(layout())),
            Gather([0, 1, 2, -1], payload(layout())),
            Scatter(payload(layout()), 1, [0, 1, 2, 3]),
            Scatter(payload(layout()), -1, [0]),
            Scatter(payload(layout()), 0, [16]),
            Scatter(payload(layout(), 8), 0, [0]),
            Scatter(payload(layout(), 8), 0, [0], HeadPart(8, 6, 0, 4)),
            Scatter(payload(layout(), 8), 0, [0], HeadPart(8, 0, 3, 2)),
            Scatter(payload(layout(), 8), 0, [0], HeadPart(8, 0, 0, 0)),
        ],
    )
    def test_trap_what_would_go_astray_on_a_device_is_refused(self, item) -> None:
        made = layout()
        take = made.gathered if isinstance(item, Gather) else made.scattered
        with pytest.raises(InternalError):
            take(item, 1000, range(2))

    @pytest.mark.parametrize("layer", [-1, 2])
    def test_a_layer_that_is_not_there_is_refused(self, layer: int) -> None:
        made = layout()
        with pytest.raises(InternalError, match="layer"):
            made.layer_runs(layer, 1 << 20)

    def test_layers_go_in_runs_that_fit_the_room_and_one_at_least(self) -> None:
        made, each = layout(), 4 * 64 * 256
        assert made.layer_runs(None, 2 * each) == [range(2)]
        assert made.layer_runs(None, 2 * each - 1) == [range(1), range(1, 2)]
        assert made.layer_runs(None, 1) == [range(1), range(1, 2)]
        assert made.layer_runs(1, 2 * each) == [range(1, 2)]


@each(
    ("changes", "strides", "in_pieces"),
    [
        ({}, (65536, 4096), True),
        ({"token_order": False}, (65536, 4096), False),
        ({"heads": 2, "channel_bytes": 2048}, (65536, 2048), False),
        ({"pages_per_block": 2, "payload_tokens": 64}, (65536, 4096), True),
        ({"pages_per_block": 2, "payload_tokens": 64}, (131072, 4096), False),  # other layers' lie
        ({}, (131072, 4096), True),  # between, which one page does not mind
        ({}, (131072, 8192), False),
        ({"page_tokens": 8}, (32768, 4096), False),  # 32 KiB
    ],
)
def test_an_engine_block_is_a_piece_where_its_bytes_lie_as_in_the_payload(
    changes: dict[str, Any], strides: tuple[int, int], in_pieces: bool
) -> None:
    page, token = strides
    fields = {"heads": 1, "channel_bytes": 4096, "page_tokens": 16, "pages_per_block": 1}
    made = PagedLayout(
        [LayerAddress(1 << 20, page, token, token), LayerAddress(1 << 24, page, token, token)],
        **OTHERS | fields | {"token_order": True} | changes,
    )
    assert made.in_pieces == in_pieces


class TestTables:
    def test_rows_say_where_each_kernel_block_goes(self) -> None:
        made = layout()
        table = memoryview(bytearray(100 * PAGE_BYTES))
        two = CopyPart(HostPlace(0, 1, 1, 1), [5, 3], 1, 2, 2)
        one = CopyPart(HostPlace(0, 1, 1, 1), [7], 0, 0, 4)
        assert made.write_pages(table, [(4096, two), (8192, one)]) == 6
        rows = np.frombuffer(table, PAGE_FIELDS)[:6]
        assert rows["packed"].tolist() == [4096] * 4 + [8192] * 2
        assert rows["block"].tolist() == [10, 11, 6, 7, 14, 15]
        assert rows["token"].tolist() == [16, 24, 32, 40, 0, 8]
        assert rows["head"].tolist() == [2] * 4 + [0] * 2
        assert rows["heads"].tolist() == [2] * 4 + [4] * 2

    def test_a_layers_row_is_its_place_and_strides(self) -> None:
        made = layout()
        rows = list(LAYER.iter_unpack(made.layer_table()))
        assert rows == [tuple(place) for place in made.layers]

    def test_the_grid_is_bounded_and_chunks_cover_every_word(self) -> None:
        made = layout()
        for layers in (range(2), range(1, 2)):
            launch = made.launch(scatter=False, layer_table=512, layers=layers, pages=6, heads=4)
            words = 4 * 8 * 256 // 16
            assert launch.chunks * WORDS_PER_CHUNK >= words
            assert launch.blocks == min(DEVICE_BLOCKS_MAX, 6 * len(layers) * launch.chunks)
            assert launch.layers == len(layers)
            assert launch.layer_table == 512 + layers.start * LAYER.size
        assert launch.kernel == "gather16"

    def test_trap_more_than_the_kernel_counts_is_refused(self) -> None:
        large = layout(channel_bytes=1 << 20, pages=1 << 30)
        chunks = 4 * 8 * (1 << 20) // large.word_bytes // WORDS_PER_CHUNK
        last = (1 << 31) // chunks // 2
        common = {"scatter": False, "layer_table": 0, "layers": range(2), "heads": 4}
        assert large.launch(pages=last, **common).chunks == chunks  # type: ignore[arg-type]
        with pytest.raises(InternalError, match="one launch"):
            large.launch(pages=last + 1, **common)  # type: ignore[arg-type]

    def test_a_large_state_is_cut_into_chunks(self) -> None:
        state = PagedLayout(
            [LayerAddress(0, 1 << 22, 1 << 22, 1 << 22)],
            pages=4,
            heads=1,
            channel_bytes=1 << 22,
            page_tokens=1,
            pages_per_block=1,
            payload_tokens=1,
        )
        launch = state.launch(scatter=True, layer_table=0, layers=range(1), pages=1, heads=1)
        assert launch.chunks == (1 << 22) // 16 // WORDS_PER_CHUNK
        assert launch.blocks == DEVICE_BLOCKS_MAX


def piece(size_bytes: int, blocks: int = 1) -> CopyPart:
    return CopyPart(HostPlace(0, size_bytes, 1, size_bytes), [0] * blocks, 0, 0, 1)


class TestBatches:
    @given(st.lists(st.tuples(st.integers(1, 1000), st.integers(1, 4)), max_size=30))
    def test_every_piece_is_in_one_batch_in_order_and_none_overlap(
        self, sizes: list[tuple[int, int]]
    ) -> None:
        pieces = [piece(*size) for size in sizes]
        made = list(batches(pieces, 2, 1024, 16))
        assert [id(p) for batch in made for _, p in batch] == list(map(id, pieces))
        for batch in made:
            assert batch
            assert sum(len(p.block_ids) * 2 for _, p in batch) <= 16
            end = 0
            for offset, its in batch:
                assert offset >= end
                assert offset % STAGING_ALIGNMENT_BYTES == 0
                end = offset + its.host.size_bytes
            assert end <= 1024

    @pytest.mark.parametrize("wrong", [piece(1025), piece(1, 9)])
    def test_a_piece_that_fits_no_staging_is_refused(self, wrong: CopyPart) -> None:
        with pytest.raises(InternalError, match="staging"):
            list(batches([piece(1), wrong], 2, 1024, 16))


@given(
    st.integers(0, 500),
    st.integers(1, 90),
    st.integers(1, 6),
    st.integers(0, 40),
    st.integers(1, 300),
)
def test_a_place_apart_is_the_same_bytes_in_order_and_no_piece_crosses_a_part(
    address, row_bytes, rows, gap, part_bytes
):
    base = 7
    place = HostPlace(base + address, row_bytes, rows, row_bytes + gap)
    expected = [
        place.address + row * place.pitch_bytes + byte
        for row in range(rows)
        for byte in range(row_bytes)
    ]
    seen = []
    for packed, piece in apart(place, base, part_bytes):
        assert packed == len(seen)
        last = piece.address + (piece.rows - 1) * piece.pitch_bytes + piece.row_bytes - 1
        assert (piece.address - base) // part_bytes == (last - base) // part_bytes
        seen += [
            piece.address + row * piece.pitch_bytes + byte
            for row in range(piece.rows)
            for byte in range(piece.row_bytes)
        ]
    assert seen == expected
