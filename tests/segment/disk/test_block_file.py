"""The contract of a disk device's file: the real one, and the model that loses power."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from contract.block_file import SIZE, BlockFileContract
from disk_parts import file_of

from kvstore.segment.disk.base import BlockFile
from kvstore.testing.sim.models.disk import SimDisk


class TestDirectFile(BlockFileContract):
    @pytest.fixture
    def file(self, disk_dir: Path) -> Iterator[BlockFile]:
        file = file_of(disk_dir, SIZE)
        yield file
        file.close()


class TestSimDisk(BlockFileContract):
    @pytest.fixture
    def file(self) -> BlockFile:
        return SimDisk(SIZE, random.Random(1))
