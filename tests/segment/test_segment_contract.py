"""The contract of kvstore/segment/base.py, on shared memory and on the simulator's model of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from contract.segment import BLOCK, Pair, SegmentContract

from kvstore.segment.shm import AttachedShm, OwnedShm
from kvstore.testing.sim.memory import SimSegment


class TestShm(SegmentContract):
    @pytest.fixture
    def pair(self, tmp_path: Path) -> Pair:
        owner = OwnedShm(tmp_path / "segment", BLOCK)
        return owner, AttachedShm(owner.data_path, owner.head_path)


class TestSimulated(SegmentContract):
    @pytest.fixture
    def pair(self) -> Pair:
        segment = SimSegment(BLOCK)
        return segment, segment
