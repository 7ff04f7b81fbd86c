"""SGLang is imported once for all servers of a run, and some of them serve several files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from sglang_server import SGLangServer, SGLangServers
from tiny_models import ModelShape, build_model

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangServers]:
    with SGLangServers(tmp_path_factory.mktemp("sglang")) as made:
        yield made


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("model") / "m", ModelShape(weights_std=0.2))


@pytest.fixture(scope="session")
def without(servers: SGLangServers, model: Path) -> SGLangServer:
    """A server without a store."""
    return servers.start(model).wait()
