"""The contract of a segment on shared memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from contract.segment import BLOCK, Pair, SegmentContract

from kvstore.segment.attached import AttachedShm
from kvstore.segment.shm import OwnedShm


class TestShm(SegmentContract):
    @pytest.fixture
    def pair(self, tmp_path: Path) -> Pair:
        owner = OwnedShm(tmp_path / "segment", BLOCK)
        return owner, AttachedShm(owner.data_path, owner.head_path)
