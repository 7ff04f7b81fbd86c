"""Where windows are saved, from what the engine keeps and what they weigh."""

from __future__ import annotations

import pytest

from connector.build import EngineShape, GroupShape, window_interval
from connector.layout.geometry import KVGeometry
from connector.layout.topology import TpKVTopology
from connector.settings import ConnectorSettings


def interval(engine: int | None, window_layers: int) -> int | None:
    """Of an engine with one layer of full attention and so many with a window."""
    groups = tuple(
        GroupShape(
            geometry=KVGeometry(layers=layers, heads=1, channel_bytes=8, engine_block_tokens=4),
            topology=TpKVTopology.of(),
            number=number,
            window_tokens=window,
        )
        for number, (layers, window) in enumerate([(1, None), (window_layers, 4)])
    )
    shape = EngineShape(groups=groups, workers=1, model={}, window_interval_tokens=engine)
    return window_interval(shape, shape.layout(ConnectorSettings()))


def test_windows_that_outweigh_attention_are_saved_where_the_engine_keeps_them() -> None:
    """Everywhere they would take the whole store: 83 times attention's bytes in DeepSeek-V4."""
    assert interval(0, 83) == 0
    assert interval(0, 9) == 0


def test_light_windows_are_saved_everywhere_although_the_engine_keeps_those_at_ends() -> None:
    """0 is vLLM's default, which says nothing about a store that others share."""
    assert interval(0, 8) is None


@pytest.mark.parametrize("layers", [1, 83])
@pytest.mark.parametrize("engine", [None, 64])
def test_an_interval_that_somebody_chose_is_kept(engine: int | None, layers: int) -> None:
    assert interval(engine, layers) == engine
