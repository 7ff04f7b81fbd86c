"""A segment of 32 pages, as its node and a reader on this host have it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from batch_parts import SIZE
from batch_readers import READERS, reader_of

from kvstore.segment.attached import AttachedShm
from kvstore.segment.batch_read import BatchReader
from kvstore.segment.header import Superblock
from kvstore.segment.shm import OwnedShm


@pytest.fixture(params=READERS)
def reader(request: pytest.FixtureRequest) -> BatchReader:
    return reader_of(request.param)


@pytest.fixture
def owned(tmp_path: Path) -> Iterator[OwnedShm]:
    segment = OwnedShm(tmp_path / "s", Superblock(7, 1, 0, SIZE))
    yield segment
    segment.close()


@pytest.fixture
def shm(owned: OwnedShm) -> Iterator[AttachedShm]:
    attached = AttachedShm(owned.data_path, owned.head_path)
    yield attached
    attached.close()
