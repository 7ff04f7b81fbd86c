"""Computes the arguments of the paged-copy kernel: addresses, tables, sizes. Needs no device."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from connector.copiers.base import Gather, HeadPart, Payload, Scatter
from connector.limits import (
    DEVICE_BLOCKS_MAX,
    DEVICE_DIRECT_BYTES_MIN,
    DEVICE_PIECE_BYTES_MIN,
    DEVICE_STAGING_BYTES,
)
from kvstore import InternalError
from kvstore.spi import DeviceRange

if TYPE_CHECKING:
    import torch

    from connector.layout.geometry import KVGeometry

WORDS_BYTES = (16, 8, 4, 2, 1)
"""Widths in bytes for which the kernel exists; a device needs addresses aligned to the width."""
KERNELS = tuple(f"{way}{width}" for way in ("gather", "scatter") for width in WORDS_BYTES)
"""Names in paged_copy.cu; see `Launch.kernel`."""
THREADS = 256
WORDS_PER_CHUNK = 4096
"""kWordsPerChunk of paged_copy.cu."""
STAGING_ALIGNMENT_BYTES = 256
WORDS_PER_PAGE_MAX = 1 << 30
"""The kernel counts the words of one page and layer in 32 bits."""
TASKS_MAX = 1 << 31
"""The kernel counts the work of its thread blocks, a chunk each, in 32 bits."""
LAYER = struct.Struct("<Qqqq")
PAGE_FIELDS = [
    ("packed", "<u8"),
    ("block", "<i8"),
    ("token", "<u4"),
    ("head", "<u4"),
    ("heads", "<u4"),
    ("unused", "<u4"),
]
"""`Page` of paged_copy.cu, as numpy names it."""
PAGE_BYTES = 32


class LayerAddress(NamedTuple):
    """Says where one layer's KV `[block, head, token, C]` is, in bytes; C is contiguous."""

    address: int
    block_stride: int
    head_stride: int
    token_stride: int


class HostPlace(NamedTuple):
    """Says what of a payload is copied: `rows` ranges, a constant distance apart."""

    address: int
    row_bytes: int
    rows: int
    pitch_bytes: int
    on_device: bool = False
    """Whether it is memory of the device itself."""

    @property
    def size_bytes(self) -> int:
        return self.rows * self.row_bytes


def apart(place: HostPlace, base: int, part_bytes: int) -> Iterator[tuple[int, HostPlace]]:
    """Cut `place` into pieces that cross no `part_bytes` from `base` on; yield each with its
    position when packed.

    Memory is page-locked part by part, and no DMA may cross two of them.
    """
    packed = row = 0
    while row < place.rows:
        start = place.address + row * place.pitch_bytes
        room = part_bytes - (start - base) % part_bytes
        rows = 0
        if room >= place.row_bytes:
            rows = min((room - place.row_bytes) // max(place.pitch_bytes, 1) + 1, place.rows - row)
            yield packed, place._replace(address=start, rows=rows)
            packed += rows * place.row_bytes
        else:
            rows, done = 1, 0
            while done < place.row_bytes:
                room = part_bytes - (start + done - base) % part_bytes
                size = min(room, place.row_bytes - done)
                yield packed + done, place._replace(address=start + done, row_bytes=size, rows=1)
                done += size
            packed += place.row_bytes
        row += rows


class CopyPart(NamedTuple):
    """Describes one payload's share of a launch. Packed into staging its rows follow each other."""

    host: HostPlace
    block_ids: Sequence[int]
    skip: int
    """Engine blocks of the payload before the first of `block_ids`."""
    head: int
    """The engine's head that corresponds to the piece's first one."""
    heads: int


class Launch(NamedTuple):
    """Describes one run of the kernel over the first `pages` rows of a table."""

    scatter: bool
    word_bytes: int
    layer_table: int
    """Device address of the first layer's row."""
    layers: int
    pages: int
    payload_tokens: int
    page_tokens: int
    channel_words: int
    chunks: int
    blocks: int
    """Thread blocks of the grid."""

    @property
    def kernel(self) -> str:
        return f"{'scatter' if self.scatter else 'gather'}{self.word_bytes}"

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the fields of `Shape` of paged_copy.cu, in their order."""
        return (
            self.layers,
            self.pages,
            self.payload_tokens,
            self.page_tokens,
            self.channel_words,
            self.chunks,
        )


class PagedLayout:
    """Describes one KV cache group in a device's memory, and the payloads made of it."""

    def __init__(
        self,
        layers: Sequence[LayerAddress],
        *,
        pages: int,
        heads: int,
        channel_bytes: int,
        page_tokens: int,
        pages_per_block: int,
        payload_tokens: int,
        token_order: bool = False,
    ) -> None:
        """Take a page as what `LayerAddress.block_stride` strides over: an engine block, or one of
        the `pages_per_block` kernel blocks that it consists of. `pages` counts a layer's.
        `token_order`: payloads are in this order to be copied layer by layer without the kernel."""
        import numpy as np

        self._np = np
        self.layers = tuple(layers)
        self.engine_blocks = pages // pages_per_block
        self.heads = heads
        self.channel_bytes = channel_bytes
        self.page_tokens = page_tokens
        self.pages_per_block = pages_per_block
        self.payload_tokens = payload_tokens
        self.blocks_per_payload = payload_tokens // (page_tokens * pages_per_block)
        self.head_bytes = payload_tokens * channel_bytes
        """Bytes of one head of one layer in a payload."""
        self.layer_bytes = heads * self.head_bytes
        """Bytes of one layer in a payload."""
        self.payload_bytes = len(layers) * self.layer_bytes
        self.in_one_piece = self._in_one_piece()
        """Whether a payload is one engine block as it lies in the engine's memory, and large enough
        for a DMA of its own: then neither kernel nor staging is needed."""
        self.block_bytes = heads * page_tokens * pages_per_block * channel_bytes
        """Bytes of one layer of an engine block."""
        self.in_pieces = token_order and self._in_pieces()
        """Whether each layer of an engine block is one piece in the payload and in the engine's
        memory, and large enough for a DMA of its own."""
        self.pages_per_payload = self.blocks_per_payload * pages_per_block
        self.word_bytes = word_bytes([channel_bytes, *(n for place in layers for n in place)])
        if heads * page_tokens * channel_bytes // self.word_bytes > WORDS_PER_PAGE_MAX:
            raise InternalError(f"an engine block of {heads} heads is too large for the kernel")

    def _in_one_piece(self) -> bool:
        page_bytes = self.page_tokens * self.channel_bytes * self.heads
        first = self.layers[0]
        return (
            self.payload_tokens == self.page_tokens
            and self.payload_bytes >= DEVICE_DIRECT_BYTES_MIN
            and all(
                place == first._replace(address=first.address + number * page_bytes)
                for number, place in enumerate(self.layers)
            )
            and (first.token_stride == self.channel_bytes or self.page_tokens == 1)
            and (first.head_stride == self.page_tokens * self.channel_bytes or self.heads == 1)
        )

    def _in_pieces(self) -> bool:
        page_bytes = self.page_tokens * self.channel_bytes
        return (
            self.heads == 1
            and self.block_bytes >= DEVICE_PIECE_BYTES_MIN
            and all(
                (place.token_stride == self.channel_bytes or self.page_tokens == 1)
                and (place.block_stride == page_bytes or self.pages_per_block == 1)
                for place in self.layers
            )
        )

    def direct(self, piece: CopyPart, layers: range) -> Iterator[tuple[HostPlace, int]]:
        """Yield what of `piece` a DMA each can move, and its address in the engine's memory: the
        one engine block that it is, or each layer of each (`in_one_piece`, `in_pieces`)."""
        if self.in_one_piece and layers == range(len(self.layers)):
            for block in piece.block_ids:
                yield piece.host, self.layers[0].address + block * self.layers[0].block_stride
            return
        size = self.block_bytes
        for number, layer in enumerate(layers):
            layer_address = self.layers[layer]
            begin = piece.host.address + number * self.layer_bytes
            for at, block in enumerate(piece.block_ids, piece.skip):
                place = HostPlace(begin + at * size, size, 1, size, piece.host.on_device)
                yield (
                    place,
                    layer_address.address
                    + block * self.pages_per_block * layer_address.block_stride,
                )

    def goes_direct(self, layer: int | None) -> bool:
        """Return whether whole payloads, or that layer of them, need neither kernel nor staging."""
        return self.in_pieces or (self.in_one_piece and layer is None)

    def layer_table(self) -> bytes:
        """Return the table of layers, a row for each: `Layer` of paged_copy.cu."""
        return b"".join(LAYER.pack(*place) for place in self.layers)

    def layer_runs(self, layer: int | None, room_bytes: int) -> list[range]:
        """Return the layers that are copied, in runs of which a payload's share has at most
        `room_bytes`, one layer at least. Raises `InternalError` when `layer` is none of them."""
        if layer is not None and not 0 <= layer < len(self.layers):
            raise InternalError(f"no layer {layer} of {len(self.layers)}")
        first, end = (0, len(self.layers)) if layer is None else (layer, layer + 1)
        each = max(1, room_bytes // self.layer_bytes)
        return [range(start, min(start + each, end)) for start in range(first, end, each)]

    def gathered(self, item: Gather, address: int, layers: range) -> CopyPart:
        """Plan a gather to `address`, that of `item.out`. Raises `InternalError` for what would be
        copied to a wrong place."""
        self._check(len(item.out), self.heads, item.block_ids, 0)
        if len(item.block_ids) != self.blocks_per_payload:
            raise InternalError(f"{len(item.block_ids)} engine blocks do not fill a payload")
        piece = self._piece(address, HeadPart(self.heads, 0, 0, self.heads), layers, item.out)
        return piece._replace(block_ids=item.block_ids)

    def scattered(self, item: Scatter, address: int, layers: range) -> CopyPart:
        """Plan a scatter from `address`, that of `item.payload`. Raises `InternalError` like
        `gathered`."""
        part = item.part or HeadPart(self.heads, 0, 0, self.heads)
        self._check(len(item.payload), part.payload_heads, item.block_ids, item.skip)
        if (
            min(part.source, part.target, part.heads - 1) < 0
            or part.source + part.heads > part.payload_heads
            or part.target + part.heads > self.heads
        ):
            raise InternalError(f"{part} does not fit {self.heads} heads")
        piece = self._piece(address, part, layers, item.payload)
        return piece._replace(block_ids=item.block_ids, skip=item.skip)

    def _check(self, size_bytes: int, heads: int, block_ids: Sequence[int], skip: int) -> None:
        # A device does not see the end of an array: here is where a wrong number must be found.
        if size_bytes != len(self.layers) * heads * self.head_bytes:
            raise InternalError(f"a payload of {heads} heads does not have {size_bytes} bytes")
        if not 0 <= skip <= self.blocks_per_payload - len(block_ids):
            raise InternalError(f"{len(block_ids)} engine blocks after {skip} are too many")
        if block_ids and not 0 <= min(block_ids) <= max(block_ids) < self.engine_blocks:
            raise InternalError(f"engine blocks {block_ids} are not among {self.engine_blocks}")

    def _piece(self, address: int, part: HeadPart, layers: range, where: Payload) -> CopyPart:
        layer_bytes = part.payload_heads * self.head_bytes
        address += layers.start * layer_bytes + part.source * self.head_bytes
        row_bytes = part.heads * self.head_bytes
        if part.heads == part.payload_heads:
            host = HostPlace(address, len(layers) * row_bytes, 1, len(layers) * row_bytes)
        else:
            host = HostPlace(address, row_bytes, len(layers), layer_bytes)
        host = host._replace(on_device=isinstance(where, DeviceRange))
        return CopyPart(host, (), 0, part.target, part.heads)

    def write_pages(self, table: memoryview, staged: Sequence[tuple[int, CopyPart]]) -> int:
        """Write rows for pieces that are packed at those addresses; return how many."""
        np = self._np
        rows = np.frombuffer(table, PAGE_FIELDS)
        inner = np.arange(self.pages_per_block)
        end = 0
        for address, piece in staged:
            begin, end = end, end + len(piece.block_ids) * self.pages_per_block
            ids = np.asarray(piece.block_ids, np.int64)[:, None] * self.pages_per_block + inner
            mine = rows[begin:end]
            mine["packed"], mine["block"] = address, ids.ravel()
            first = piece.skip * self.pages_per_block
            mine["token"] = np.arange(first, first + end - begin) * self.page_tokens
            mine["head"], mine["heads"], mine["unused"] = piece.head, piece.heads, 0
        return end

    def launch(
        self, *, scatter: bool, layer_table: int, layers: range, pages: int, heads: int
    ) -> Launch:
        """Return the launch. `layer_table` is where the device has `layer_table()`, `heads` the
        most of a piece."""
        words = heads * self.page_tokens * (self.channel_bytes // self.word_bytes)
        chunks = -(-words // WORDS_PER_CHUNK)
        tasks = len(layers) * pages * chunks
        if tasks > TASKS_MAX:
            raise InternalError(f"{pages} engine blocks are too many for one launch")
        return Launch(
            scatter,
            self.word_bytes,
            layer_table + layers.start * LAYER.size,
            len(layers),
            pages,
            self.payload_tokens,
            self.page_tokens,
            self.channel_bytes // self.word_bytes,
            chunks,
            min(DEVICE_BLOCKS_MAX, tasks),
        )


def layout_of(
    layers: Sequence[torch.Tensor], geometry: KVGeometry, block_tokens: int
) -> PagedLayout:
    """Return the layout of layer tensors that `connector.copiers.registered.kv_memory` accepts."""
    places = []
    for layer in layers:
        size = layer.element_size()
        places.append(LayerAddress(layer.data_ptr(), *(n * size for n in layer.stride()[:3])))
    page_tokens = int(layers[0].shape[2])
    return PagedLayout(
        places,
        pages=min(int(layer.shape[0]) for layer in layers),
        heads=geometry.heads,
        channel_bytes=geometry.channel_bytes,
        page_tokens=page_tokens,
        pages_per_block=geometry.engine_block_tokens // page_tokens,
        payload_tokens=block_tokens,
        token_order=geometry.folded_heads > 1,
    )


def word_bytes(multiples: Sequence[int]) -> int:
    """Return the widest word that divides all of them; staging is aligned to more."""
    return next(n for n in WORDS_BYTES if not any(value % n for value in multiples))


def staging_buffer_bytes(layouts: Sequence[PagedLayout]) -> int:
    """Return the size of one staging buffer for payloads of all `layouts`.

    A buffer costs the same calls of the driver whatever is in it. Where whole payloads would leave
    more than an eighth of it empty, as one of 4.3 MiB does, it is as large as one more of them.
    """
    size_bytes = DEVICE_STAGING_BYTES
    for layout in layouts:
        each = -(-layout.payload_bytes // STAGING_ALIGNMENT_BYTES) * STAGING_ALIGNMENT_BYTES
        whole = DEVICE_STAGING_BYTES // each
        sparse = whole > 0 and whole * each * 8 < DEVICE_STAGING_BYTES * 7
        size_bytes = max(size_bytes, layout.layer_bytes, (whole + 1) * each if sparse else 0)
    return size_bytes


def batches(
    pieces: Sequence[CopyPart], pages_per_block: int, staging_bytes: int, pages_max: int
) -> Iterator[list[tuple[int, CopyPart]]]:
    """Yield runs of pieces that fit one staging buffer and one table, with their offsets in
    staging.

    Raises `InternalError` for a piece that fits none.
    """
    batch: list[tuple[int, CopyPart]] = []
    at = pages = 0
    for piece in pieces:
        size_bytes, its_pages = piece.host.size_bytes, len(piece.block_ids) * pages_per_block
        if size_bytes > staging_bytes or its_pages > pages_max:
            raise InternalError(f"{size_bytes} bytes of {its_pages} pages fit no staging buffer")
        if batch and (at + size_bytes > staging_bytes or pages + its_pages > pages_max):
            yield batch
            batch, at, pages = [], 0, 0
        batch.append((at, piece))
        at += -(-size_bytes // STAGING_ALIGNMENT_BYTES) * STAGING_ALIGNMENT_BYTES
        pages += its_pages
    if batch:
        yield batch
