"""Encodes how a client maps a node's VRAM over NVLink, as told over an authenticated stream.

Whoever has the handle and a channel to the same NVLink domain can read that memory, and write it:
it is given to clients that proved the secret, and never to the index.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from kvstore.protocol.stream import WireError

NAME_BYTES = 16
HANDLE_BYTES = 64
_SIZE_MAX = 1 << 48


class FabricMemory(NamedTuple):
    """One allocation of a node, as other hosts of its NVLink domain open it."""

    name: bytes
    size_bytes: int
    handle: bytes


def unpack_fabric(answers: Sequence[Any]) -> FabricMemory | None:
    """None when the node has none to give (it says so by an empty list).

    Raises `WireError`.
    """
    if not answers:
        return None
    if len(answers) != len(FabricMemory._fields):
        raise WireError(f"memory of a fabric in {len(answers)} fields")
    memory = FabricMemory(*answers)
    right = (
        isinstance(memory.name, bytes)
        and len(memory.name) == NAME_BYTES
        and type(memory.size_bytes) is int
        and 0 < memory.size_bytes <= _SIZE_MAX
        and isinstance(memory.handle, bytes)
        and len(memory.handle) == HANDLE_BYTES
    )
    if not right:
        raise WireError("invalid memory of a fabric")
    return memory
