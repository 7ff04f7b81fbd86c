"""A segment's memory as any process of its user may map it, also to write what its owner would not.

`kvstore/segment/header.py` says what lies where.
"""

from __future__ import annotations

import mmap
from pathlib import Path

from kvstore.segment.header import hints_in
from kvstore.segment.shm import OwnedHeads, OwnedShm


def memory_of(path: Path) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)


def head_of(segment: OwnedHeads) -> mmap.mmap:
    """Return the superblock, the headers and the hints."""
    return memory_of(segment.head_path)


def hints_in_head(segment: OwnedHeads) -> memoryview:
    return hints_in(head_of(segment), segment.superblock)


def data_of(segment: OwnedShm) -> mmap.mmap:
    return memory_of(segment.data_path)
