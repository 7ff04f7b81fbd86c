"""Both ends of a LookupBuffer over the model of a store, and short ways to use them."""

from __future__ import annotations

from typing import Any

import pytest
from connector_parts import PATIENCE_S
from fake_values import FakeValues

from connector.transfer.lookup_buffer import LookupBuffer

torch = pytest.importorskip("torch")

SOON_S = 0.05


def pair(store: Any = None, **options: Any) -> tuple[LookupBuffer, LookupBuffer]:
    store = store or FakeValues()
    options = {"timeout_s": PATIENCE_S, **options}
    return (
        LookupBuffer(store, "b", producer=True, **options),
        LookupBuffer(store, "b", producer=False, **options),
    )


def tokens(*ids: int) -> Any:
    return torch.tensor(ids, dtype=torch.int64)


def mask(text: str) -> Any:
    return torch.tensor([c == "x" for c in text])


def insert(buffer: LookupBuffer, *ids: int, roi: Any = None, **options: Any) -> None:
    buffer.insert(tokens(*ids), roi, torch.full((2, 2), ids[0]), None, None, **options)


def taken(buffer: LookupBuffer, *ids: int, roi: Any = None, timeout_s: float = 0.0) -> int | None:
    """The first token of the entry that a query takes."""
    entry = buffer.drop_select(tokens(*ids) if ids else None, roi, timeout_s)
    return None if entry is None else int(entry.key[0, 0])


def shared(one: list[int], other: list[int]) -> bool:
    """vLLM's rule."""
    shorter = min(len(one), len(other))
    return shorter > 0 and one[:shorter] == other[:shorter]


def several(count: int, store: Any) -> tuple[list[LookupBuffer], LookupBuffer]:
    producers = [LookupBuffer(store, "b", producer=True, number=i) for i in range(count)]
    return producers, LookupBuffer(store, "b", producer=False, producers=count)


def consumers_of(count: int, store: Any) -> list[LookupBuffer]:
    return [LookupBuffer(store, "b", producer=False) for _ in range(count)]
