"""Wraps a store so that saves go to VRAM of this process first and are read there in place, as is
what came there from other hosts.

`buffer`s are then `DeviceRange`s, too: only for copiers that take both, which are those of KV
on a CUDA device. Everything else of a `BlockStore` is as it was.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from connector.limits import RESET_WAIT_S
from kvstore import KVStoreError, Namespace, PutResult, PutStatus, ResetResult, Retained
from kvstore.spi import (
    AnyReservation,
    BlockRef,
    BlockSession,
    BlockView,
    CudaDevice,
    DeviceBlock,
    DeviceReservation,
    Key,
    LookupResult,
    Missing,
    MissQuery,
    PoolMapping,
    PrefixMatch,
    Tier,
    VramPool,
    VramSaver,
    vram_for_saves,
)

log = logging.getLogger(f"kvstore.{__name__}")


class VramView:
    """Implements `BlockView` with a `DeviceRange` for a buffer."""

    def __init__(self, block: DeviceBlock) -> None:
        self._block = block
        self.buffer = block.memory
        self.valid = block.valid


class VramStore:
    """Implements `BlockStore` over a session that has a device. Closes it."""

    def __init__(
        self, store: BlockSession, device: CudaDevice, size_bytes: int, **options: Any
    ) -> None:
        """Open VRAM. With `size_bytes` 0 it is only read. Otherwise saves go to the node of this
        host that owns VRAM of this device; where there is none, `size_bytes` are kept here, and
        `options` are those of `VramPool`.

        A pool that cannot be made is logged and left out: saves go to host memory then.
        """
        self._store = store
        self._viewed_bytes = 0
        self.pool: VramPool | VramSaver | None = None
        try:
            if size_bytes:
                self.pool = vram_for_saves(store, device, size_bytes, **options)
        except KVStoreError as e:
            log.warning("no blocks are kept in VRAM: %s", e)

    # --- reading ----------------------------------------------------------------

    def view(self, found: BlockRef) -> BlockView | None:
        (view,) = self.views([found], None)
        return view

    def views(
        self, found: Sequence[BlockRef], staging: memoryview | None, timeout_s: float | None = None
    ) -> Iterator[BlockView | None]:
        blocks = [self._store.device_view(one) for one in found]
        elsewhere = [one for one, block in zip(found, blocks, strict=True) if block is None]
        others = self._store.views_on_device(elsewhere, staging, timeout_s)
        for block in blocks:
            if block is not None:
                self._viewed_bytes += block.memory.size_bytes
            yield next(others) if block is None else VramView(block)

    def match(self, keys: Sequence[Key], timeout_s: float | None = None) -> PrefixMatch:
        return self._store.match(keys, timeout_s)

    def lookup(self, keys: Sequence[Key], timeout_s: float | None = None) -> LookupResult:
        return self._store.lookup(keys, timeout_s)

    def tiers(self, found: Sequence[BlockRef]) -> list[Tier]:
        return self._store.tiers(found)

    def sources(self, found: Sequence[BlockRef]) -> list[str]:
        return self._store.sources(found)

    def report(self, counts: Mapping[str, int]) -> bool:
        return self._store.report(counts)

    def touch(self, keys: Sequence[Key], *, saved: bool = False, left: bool = False) -> None:
        self._store.touch(keys, saved=saved, left=left)
        if self.pool is not None and not left:
            self.pool.touch(keys, saved=saved)

    def were_read(self, keys: Sequence[Key]) -> list[bool | None]:
        return self._store.were_read(keys)

    def pin(self, keys: Sequence[Key]) -> list[BlockRef | None]:
        return self._store.pin(keys)

    def unpin(self, found: Sequence[BlockRef]) -> None:
        self._store.unpin(found)

    def read_bytes(self) -> Mapping[str, int]:
        read = self._store.read_bytes()
        return {**read, "cuda_ipc": read.get("cuda_ipc", 0) + self._viewed_bytes}

    def open_vram(self) -> frozenset[tuple[int, int]]:
        """See `BlockSession.open_vram`."""
        return self._store.open_vram()

    def mappings(self) -> Sequence[PoolMapping]:
        return self._store.mappings()

    # --- saving -----------------------------------------------------------------

    def reserve(
        self, keys: Sequence[Key], size_bytes: int, namespace_id: int
    ) -> Sequence[AnyReservation | PutResult]:
        if self.pool is None:
            return self._store.reserve(keys, size_bytes, namespace_id)
        answers: dict[Key, AnyReservation | PutResult] = dict(
            zip(keys, self.pool.reserve(keys, size_bytes, namespace_id), strict=True)
        )
        left = [key for key, answer in answers.items() if _is_rejected(answer)]
        with ExitStack() as undo:
            granted = [a for a in answers.values() if isinstance(a, DeviceReservation)]
            undo.callback(self.abort, granted)
            below = self._store.reserve(left, size_bytes, namespace_id) if left else []
            undo.pop_all()
        answers |= zip(left, below, strict=True)
        return [answers[key] for key in keys]

    def commit(self, reservations: Sequence[AnyReservation]) -> list[PutResult]:
        return self._store.commit(reservations)  # each goes to who granted it

    def abort(self, reservations: Sequence[AnyReservation]) -> None:
        self._store.abort(reservations)

    def reset(self, namespace_ids: Sequence[int], timeout_s: float = RESET_WAIT_S) -> ResetResult:
        return self._store.reset(namespace_ids, timeout_s)  # the pool hears of it as nodes do

    def retain(self, keys: Sequence[Key], for_s: int, tenant: str = "") -> list[Retained]:
        """See `BlockStore.retain`; a block that is in VRAM alone is not retained: it goes down, and
        may be retained then."""
        return self._store.retain(keys, for_s, tenant)

    def drop(self, keys: Sequence[Key]) -> list[bool]:
        """See `BlockStore.drop`; of the pool in VRAM too, as far as the index names it."""
        return self._store.drop(keys)

    def clear(self, namespace_id: int) -> int:
        cleared = self.pool.clear(namespace_id) if self.pool is not None else 0
        return cleared + self._store.clear(namespace_id)

    # --- the rest ---------------------------------------------------------------

    def register_namespaces(self, namespaces: Iterable[Namespace]) -> None:
        known = list(namespaces)
        self._store.register_namespaces(known)
        if self.pool is not None:
            self.pool.register_namespaces(known)

    def why_missing(self, question: MissQuery) -> Missing:
        return self._store.why_missing(question)

    def close(self) -> None:
        """Close the store; nothing may be copied any more. Blocks go down to host memory first,
        for a few seconds at most."""
        if self.pool is not None:
            self.pool.stop()
        self._store.close()


def _is_rejected(answer: AnyReservation | PutResult) -> bool:
    return isinstance(answer, PutResult) and answer.status is PutStatus.REJECTED
