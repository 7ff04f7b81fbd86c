"""A directory for disk devices: a real one, on a file system with O_DIRECT."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from batch_readers import compiled_module
from mounts import mounts as mounts

from kvstore.errors import UsageError
from kvstore.segment.disk import format as disk_format
from kvstore.segment.disk import images, table
from kvstore.segment.disk.file import open_file


@pytest.fixture
def disk_dir() -> Iterator[Path]:
    where = Path(tempfile.mkdtemp(dir="/var/tmp", prefix="kvstore-disk-"))
    try:
        try:
            open_file(where, 1 << 20, forced=True).close()
        except UsageError as error:
            pytest.skip(f"/var/tmp: {error}")
        (where / "kvstore.disk").unlink()
        yield where
    finally:
        shutil.rmtree(where)


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The compiled part for images, of its source as it is now."""
    return compiled_module(images.SOURCE, tmp_path_factory.mktemp("built"))


@pytest.fixture(params=["Python", "compiled"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test with the compiled part, and without it."""
    compiled = None if request.param == "Python" else request.getfixturevalue("built")
    for module in (disk_format, table):
        monkeypatch.setattr(module, "COMPILED", compiled)
    return str(request.param)
