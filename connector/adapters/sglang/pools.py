"""Saves and loads pages of one of SGLang's host pools: the KV pool, or one beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from connector.pages.pages import Pages, Parts, is_there, memory_at, pages_at
from kvstore import Namespace, UsageError
from kvstore.spi import BlockRef, HostBlockStore, Key

if TYPE_CHECKING:
    import torch
    from sglang.srt.mem_cache.memory_pool_host import HostKVCache

MARKER = b"\x01"
"""Stands for a page of a pool that has no memory of its own (DeepSeek-V4's): only the fact that the
page was saved matters."""


class PoolMemory(NamedTuple):
    """Memory of some pages: the pool's own, or what SGLang copies from or to."""

    pieces: list[list[Parts]]
    """For each piece of a page, the parts of each page."""
    flat: Sequence[torch.Tensor] = ()
    """Tensors that contain the parts, when these are not in the pool."""


class PageForm(NamedTuple):
    """What SGLang tells a storage of a page of some pool."""

    sizes_bytes: list[int]
    """Size of each part."""
    flat: bool = False
    """Whether SGLang copies each page whole, because its memory cannot be named."""
    empty: bool = False
    """Whether there is no memory: DeepSeek-V4's pool of whole tokens only counts them."""


class PoolPages:
    """Keeps pages of one host pool, under SGLang's hashes, in as many pieces as there are
    `namespaces`: one, or one for each group of heads that ranks of other sizes have as theirs.

    Thread-safe as `Pages` is. A peer's fault is False.
    """

    def __init__(
        self,
        store: HostBlockStore,
        pool: HostKVCache,
        namespaces: Sequence[Namespace],
        form: PageForm,
    ) -> None:
        self.namespaces = list(namespaces)
        self.page_tokens = int(getattr(pool, "page_size", 1) or 1)
        self._pool = pool
        self._form = form
        self._store = store
        self._pieces = [Pages(store, namespace) for namespace in namespaces]

    def keys(self, names: Sequence[bytes]) -> list[Key]:
        """Return all pieces of the first page, then of the second."""
        by_piece = [piece.keys(names) for piece in self._pieces]
        return [keys[i] for i in range(len(names)) for keys in by_piece]

    def whole(self, pieces_there: Sequence[object]) -> list[bool]:
        """Return whether all pieces of each page are there, from an answer for each of `keys`."""
        each = len(self._pieces)
        return [all(pieces_there[i : i + each]) for i in range(0, len(pieces_there), each)]

    def run_length(self, names: Sequence[bytes]) -> int:
        """Return how many leading pages can be read from here; one index round trip."""
        return len(self._store.match(self.keys(names))) // len(self._pieces)

    def save(self, names: Sequence[bytes], host_indices: torch.Tensor) -> list[bool]:
        """Return whether each page is in the store now."""
        memory = self._memory(host_indices, len(names), filled=True)
        saved = [True] * len(names)
        for piece, pages in zip(self._pieces, memory.pieces, strict=True):
            results = piece.save(names, pages)
            saved = [ok and is_there(result) for ok, result in zip(saved, results, strict=True)]
        return saved

    def load(self, names: Sequence[bytes], host_indices: torch.Tensor, *, run: bool) -> list[bool]:
        """Return whether each page is in its place and whole; one index round trip. With `run` only
        those of the leading run are loaded. What a page's memory holds otherwise is undefined."""
        each, keys = len(self._pieces), self.keys(names)
        found: list[BlockRef | None]
        if run:
            found = [*self._store.match(keys)]
            found = found[: len(found) // each * each]
        else:
            found = [*self._store.lookup(keys)]
        if not found:
            return [False] * len(names)
        count, tokens = len(found) // each, len(host_indices) // len(names)
        memory = self._memory(host_indices[: count * tokens], count, filled=False)
        parts = [piece[i] for i in range(count) for piece in memory.pieces]
        loaded = self.whole(self._pieces[0].read(found, parts))
        for i, page in enumerate(memory.flat):
            if loaded[i]:
                self._pool.set_from_flat_data_page(int(host_indices[i * tokens]), page)
        touched = [key for i, key in enumerate(keys[: len(found)]) if loaded[i // each]]
        self._store.touch(touched)
        return loaded + [False] * (len(names) - count)

    def _memory(self, host_indices: torch.Tensor, count: int, *, filled: bool) -> PoolMemory:
        if self._form.empty:
            return PoolMemory([[[memoryview(bytearray(MARKER))] for _ in range(count)]])
        if self._form.flat:
            tokens = len(host_indices) // max(1, count)
            pages = [
                self._pool.get_data_page(int(host_indices[i * tokens]), flat=True).contiguous()
                if filled
                else self._pool.get_dummy_flat_data_page()
                for i in range(count)
            ]
            return PoolMemory([[tensor_parts(page) for page in pages]], pages)
        each = len(self._pieces)
        addresses, sizes_bytes = (
            self._pool.get_page_buffer_meta(host_indices)
            if each == 1
            else self._pool.get_split_heads_page_buffer_meta(host_indices, each)
        )
        parts = pages_at(addresses, sizes_bytes, count * each)
        return PoolMemory([parts[i::each] for i in range(each)])


def tensor_parts(tensor: torch.Tensor) -> Parts:
    """Return a flat page's bytes. Raises `UsageError` unless it is contiguous and in host
    memory."""
    if tensor is None or tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise UsageError("page", type(tensor).__name__, "must be a contiguous CPU tensor")
    return [memory_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())]


def page_form(pool: HostKVCache, first_page: torch.Tensor) -> PageForm:
    """Ask the pool, with the indices of a page. Raises `UsageError` for one whose pages SGLang
    keeps from storages, or that are on other ranks: of these a save would save nothing."""
    if int(getattr(pool, "shard_size", 1)) != 1:
        raise UsageError("pool", type(pool).__name__, "must not be sharded by pages between ranks")
    try:
        meta = pool.get_page_buffer_meta(first_page)
        if meta is None:
            return PageForm([len(MARKER)], empty=True)
        return PageForm([int(size_bytes) for size_bytes in meta[1]])
    except (NotImplementedError, ValueError, AttributeError):
        return PageForm([flat_size(pool)], flat=True)


def flat_size(pool: HostKVCache) -> int:
    """Return bytes of a page that SGLang copies whole. Raises `UsageError` where it does not."""
    try:
        page = pool.get_data_page(0, flat=True)
    except (NotImplementedError, ValueError, AttributeError, TypeError) as e:
        why_not = str(e) or type(e).__name__
        raise UsageError(
            "pool",
            type(pool).__name__,
            f"must have pages that a storage can keep, and has none here: {why_not}",
        ) from e
    return int(page.numel() * page.element_size())
