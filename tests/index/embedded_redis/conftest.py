"""A run directory in which a Redis may be started."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis_servers import kill

from kvstore.index.embedded_redis import server as module
from kvstore.index.embedded_redis import supervisor as supervisor


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """A short path: a Unix socket has to fit below it."""
    path = Path(tempfile.mkdtemp(prefix="kvr-"))
    yield path
    details = module._details(path / "redis")
    for name in ("supervisor", "pid"):
        kill(int(details.get(name, 0)) or 1 << 22)
    shutil.rmtree(path, ignore_errors=True)
