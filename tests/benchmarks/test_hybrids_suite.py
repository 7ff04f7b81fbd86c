"""Suite `hybrids`: bytes of states are counted, and a prompt that comes again is found."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.hybrids.layouts import LAYOUTS
from benchmarks.hybrids.replay import Engine

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def vllm() -> None:
    pytest.importorskip("vllm")


@pytest.fixture
def qwen(tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(LAYOUTS["Qwen3.5"](), 64 << 30, tmp_path)
    yield engine
    engine.close()


def test_bytes_of_states_are_counted_in_the_store_and_in_the_live_set(qwen: Engine) -> None:
    attention, *states = qwen.sizes
    assert len(states) == 3
    tokens = 4 * qwen.layout.block_tokens
    assert qwen.ask([7] * (tokens + 5)) == 0
    assert qwen.needed_bytes(tokens + 5) == 4 * attention + sum(states)
    assert qwen.store.used_bytes == qwen.saved_bytes == qwen.needed_bytes(tokens + 5)
    assert qwen.ask([7] * (tokens + 5)) == tokens
