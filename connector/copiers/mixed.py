"""Copies layers of several shapes as one payload: one run of layers after another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from connector.copiers.base import Gather, HeadPart, KVCopier, Ready, Scatter
from kvstore.spi import DeviceRange

if TYPE_CHECKING:
    from connector.copiers.base import Payload
    from connector.layout.geometry import KVGeometry


class MixedCopier:
    """Implements `KVCopier` over the copiers of a geometry's runs, in their order.

    Each run of a payload is laid out `[layer][head][token][C]` with the run's own heads and C.
    Heads of a `HeadPart` are those of the geometry; each run has its own share of as many.
    """

    def __init__(
        self, copiers: Sequence[KVCopier], geometry: KVGeometry, block_tokens: int
    ) -> None:
        self._copiers = copiers
        self._geometry = geometry
        self._block_tokens = block_tokens
        self.batch_blocks = min(copier.batch_blocks for copier in copiers)

    def gather_many(self, items: Sequence[Gather], layer: int | None = None) -> None:
        self._check(layer)
        heads = self._geometry.heads
        for copier, _, begin, end in self._runs(heads):
            copier.gather_many([Gather(i.block_ids, _cut(i.out, begin, end)) for i in items])

    def scatter_many(self, items: Sequence[Scatter], layer: int | None = None) -> None:
        self._check(layer)
        whole = self._geometry.heads
        for number, copier in enumerate(self._copiers):
            mine = []
            for item in items:
                heads = whole if item.part is None else item.part.payload_heads
                _, own, begin, end = list(self._runs(heads))[number]
                part = item.part and HeadPart(*(n * own // whole for n in item.part))
                mine.append(item._replace(payload=_cut(item.payload, begin, end), part=part))
            copier.scatter_many(mine)

    def _runs(self, heads: int) -> Iterator[tuple[KVCopier, int, int, int]]:
        """Yield each copier, its heads on this worker, and where it is in a payload of `heads`."""
        begin = 0
        for copier, run in zip(self._copiers, self._geometry.runs, strict=True):
            size_bytes = self._geometry.run_bytes(run, self._block_tokens)
            share = heads * run.heads // self._geometry.heads
            end = begin + len(run.layers) * share * size_bytes
            yield copier, run.heads, begin, end
            begin = end

    def _check(self, layer: int | None) -> None:
        assert layer is None, "layer by layer is refused at start where layers have several shapes"

    def mark_ready(self) -> Ready | None:
        return self._copiers[0].mark_ready()

    def wait_ready(self, token: Ready | None) -> None:
        self._copiers[0].wait_ready(token)


def _cut(payload: Payload, begin: int, end: int) -> Payload:
    if isinstance(payload, DeviceRange):
        return DeviceRange(payload.address + begin, end - begin, payload.device)
    return payload[begin:end]
