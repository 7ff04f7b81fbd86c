"""A store for routers: what engines save to, and what the router asks."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from stores import PATIENT, NodeProcess

from connector.router import prefix
from kvstore.spi import BlockSession, Locator

PATIENCE_S = 20.0


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is late because this machine is busy; tests about what is late set their own."""
    monkeypatch.setattr(prefix, "LOOKUP_TIMEOUT_S", PATIENCE_S)
    if find_spec("aiohttp") is not None:
        monkeypatch.setattr("connector.router.server.PROBE_TIMEOUT_S", PATIENCE_S)


@pytest.fixture
def store(node: NodeProcess) -> Iterator[BlockSession]:
    session = BlockSession(**node.client_options)  # type: ignore[arg-type]
    yield session
    session.close()


@pytest.fixture
def locator(node: NodeProcess, tmp_path: Path) -> Locator:
    """As on a host without a node. The router closes it."""
    run_dir = tmp_path / "run"
    return Locator(node.redis.url, key_prefix=node.key_prefix, run_dir=run_dir, limits=PATIENT)


@pytest.fixture
def no_index(tmp_path: Path) -> Locator:
    """A store whose Redis is away."""
    return Locator("redis://127.0.0.1:1", run_dir=tmp_path / "run")
