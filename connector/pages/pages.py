"""Saves and loads pages that an engine names and lays out itself, each as a whole.

It is for engines that hand over a hash and the memory of a page (or chunk) instead of
block tables. A payload is the page's parts one after the other, in the order in
which the engine lists them; what the order is belongs into the namespace.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import ExitStack
from functools import lru_cache
from itertools import groupby

from connector.limits import (
    LOAD_STAGING_BYTES,
    PAGE_PARTS_MAX,
    SAVE_BATCH_BLOCKS,
    SAVE_BATCH_BYTES,
)
from kvstore import Namespace, PeerError, PutResult, PutStatus, UsageError
from kvstore.spi import BlockRef, HostBlockStore, Key, Reservation, copy_bytes, in_batches

Parts = Sequence[memoryview]
"""A page's memory: contiguous ranges, each of format 'B'."""
_Wanted = tuple[Key, Parts, int]
"""A page to save: key, memory, size in bytes."""


@lru_cache(maxsize=1024)
def _array_type(size_bytes: int) -> type[ctypes.Array[ctypes.c_uint8]]:
    return ctypes.c_uint8 * size_bytes


def memory_at(address: int, size_bytes: int) -> memoryview:
    """Return a writable view of memory that the caller keeps alive. Raises `UsageError` for no
    memory."""
    if address <= 0 or size_bytes <= 0:
        raise UsageError("memory", (address, size_bytes), "must be an address and a size above 0")
    return memoryview(_array_type(size_bytes).from_address(address)).cast("B")


def pages_at(addresses: Sequence[int], sizes_bytes: Sequence[int], pages: int) -> list[Parts]:
    """Cut the engine's list of ranges, page after page, into `pages` equal numbers of them."""
    each = len(addresses) // pages if pages else 0
    if len(addresses) != len(sizes_bytes) or each * pages != len(addresses) or (pages and not each):
        raise UsageError(
            "pages",
            (len(addresses), len(sizes_bytes), pages),
            "must be as many sizes as addresses, the same number for each page",
        )
    if each > PAGE_PARTS_MAX:
        raise UsageError("pages", each, f"at most {PAGE_PARTS_MAX} ranges a page")
    return [
        [memory_at(addresses[j], sizes_bytes[j]) for j in range(i * each, (i + 1) * each)]
        for i in range(pages)
    ]


def size_of(parts: Parts) -> int:
    """Return bytes of all parts together."""
    return sum(part.nbytes for part in parts)


def gather(payload: memoryview, parts: Parts) -> None:
    """Copy the parts, one after the other, over a payload of exactly their size."""
    at = 0
    for part in parts:
        copy_bytes(payload[at : at + part.nbytes], part)
        at += part.nbytes


def scatter(payload: memoryview, parts: Parts) -> None:
    """Copy a payload over the parts, which have exactly its size together."""
    at = 0
    for part in parts:
        copy_bytes(part, payload[at : at + part.nbytes])
        at += part.nbytes


class Pages:
    """Keeps the pages of one namespace in a store. As safe to call from several threads as the
    store.

    A peer's fault is never raised: what could not be saved or loaded is False.
    """

    def __init__(self, store: HostBlockStore, namespace: Namespace) -> None:
        self.store = store
        self.namespace = namespace
        store.register_namespaces([namespace])

    def keys(self, names: Sequence[bytes]) -> list[Key]:
        """Return one key per name. It depends on nothing else: an engine asks for the same page
        alone and in the middle of a batch."""
        return [self.namespace.value_key(name) for name in names]

    def run_length(self, names: Sequence[bytes]) -> int:
        """Return how many leading pages the index knows; one round trip."""
        return len(self.store.match(self.keys(names)))

    def save(self, names: Sequence[bytes], pages: Sequence[Parts]) -> list[PutResult]:
        """Return what became of each page; see `is_there`.

        After the first failure of the node the rest is given up: an engine's
        thread waits for one deadline, not for one for each batch.
        """
        keys = self.keys(names)
        wanted = list(zip(keys, pages, map(size_of, pages), strict=True))
        results: list[PutResult] = []
        try:
            for size_bytes, alike in groupby(wanted, _size_bytes):
                for batch in in_batches(
                    list(alike), SAVE_BATCH_BLOCKS, _size_bytes, SAVE_BATCH_BYTES
                ):
                    results += self._save(batch, size_bytes)
        except PeerError as e:
            failed = PutResult(PutStatus.REJECTED, str(e))
            results += [failed] * (len(keys) - len(results))
        return results

    def _save(self, batch: Sequence[_Wanted], size_bytes: int) -> list[PutResult]:
        answers = self.store.reserve([key for key, _, _ in batch], size_bytes, self.namespace.id)
        granted = [(i, a) for i, a in enumerate(answers) if isinstance(a, Reservation)]
        reservations = [reservation for _, reservation in granted]
        with ExitStack() as undo:
            undo.callback(self.store.abort, reservations)
            for i, reservation in granted:
                gather(reservation.buffer, batch[i][1])
            undo.pop_all()
        committed = iter(self.store.commit(reservations) if reservations else ())
        return [a if isinstance(a, PutResult) else next(committed) for a in answers]

    def load_run(self, names: Sequence[bytes], pages: Sequence[Parts]) -> list[bool]:
        """Read the leading pages that are there; one index round trip.

        What a page's memory holds where the answer is False is undefined.
        """
        found = self.store.match(self.keys(names))
        loaded = self.read(found, pages[: len(found)])
        self.store.touch([f.key for f, ok in zip(found, loaded, strict=True) if ok])
        return loaded + [False] * (len(names) - len(loaded))

    def read(self, found: Sequence[BlockRef | None], pages: Sequence[Parts]) -> list[bool]:
        """Copy, then check, each page by itself. False where there was nothing to be found, where
        it is gone by now, or not of its parts' size.

        What other hosts have is read together, `LOAD_STAGING_BYTES` at a time.
        """
        loaded = [False] * len(pages)
        wanted = [(i, f, pages[i]) for i, f in enumerate(found) if f is not None]
        for batch in in_batches(wanted, SAVE_BATCH_BLOCKS, _read_bytes, LOAD_STAGING_BYTES):
            views = self.store.views([ref for _, ref, _ in batch], None)
            for (i, _, parts), view in zip(batch, views, strict=True):
                if view is not None and view.buffer.nbytes == size_of(parts):
                    scatter(view.buffer, parts)
                    loaded[i] = view.valid()
        return loaded


def is_there(result: PutResult) -> bool:
    """Return whether the engine need not save this page: it is in the store, or somebody else is
    saving it. To say no to the latter would make an engine give up the pages after it."""
    return bool(result) or result.status is PutStatus.IN_PROGRESS


def _size_bytes(wanted: _Wanted) -> int:
    return wanted[2]


def _read_bytes(wanted: tuple[int, BlockRef, Parts]) -> int:
    return size_of(wanted[2])
