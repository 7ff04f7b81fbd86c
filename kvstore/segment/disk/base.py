"""Defines the file that a disk device lies in, as little of it as the device needs.

`file.py` is the real one (O_DIRECT), kvstore/testing/sim/models/disk.py a model that loses power;
tests/contract/block_file.py is what both promise.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from typing_extensions import Buffer


class BlockFile(Protocol):
    """A file of fixed size in pages of 4 KiB. Offsets, sizes and addresses of memory are multiples
    of a page. Several threads may use it at once."""

    @property
    def name(self) -> str:
        """The path, for messages."""
        ...

    @property
    def size_bytes(self) -> int:
        """The size that it was opened with."""
        ...

    def read(self, offset: int, into: memoryview) -> None:
        """Fill `into` with what was written there last. Raises `OSError`, also where the file ends
        before."""
        ...

    def write(self, offset: int, parts: Sequence[Buffer]) -> None:
        """Write the parts one behind the other. After a power loss any of their pages may be there,
        in part or not at all, until `sync` has returned. Raises `OSError`; then too any may be
        there, and never a byte behind the end."""
        ...

    def sync(self) -> None:
        """Make durable all that was written before. Raises `OSError`: then nobody can tell what is
        durable, and the next call would not say it again."""
        ...

    def trouble(self) -> str | None:
        """Return what is wrong with the file itself: it was removed, replaced or cut."""
        ...

    def close(self) -> None:
        """Close it. Safe to call twice; everything else raises `OSError` afterwards."""
        ...


def aligned(size_bytes: int) -> memoryview:
    """Return zeroed memory that begins with a page."""
    return memoryview(mmap.mmap(-1, size_bytes))
