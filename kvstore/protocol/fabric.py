"""Encodes how a client maps a node's VRAM over NVLink, as told over an authenticated stream.

Whoever has the handle and a channel to the same NVLink domain can read that memory, and write it:
it is given to clients that proved the secret, and never to the index.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvstore.errors import shown
from kvstore.protocol.stream import WireError

NAME_BYTES = 16
HANDLE_BYTES = 64
_SIZE_MAX = 1 << 48


class FabricMemory(NamedTuple):
    """One allocation of a node, as other hosts of its NVLink domain open it."""

    name: bytes
    size_bytes: int
    handle: bytes


def unpack_fabric(answers: Sequence[object]) -> FabricMemory | None:
    """None when the node has none to give (it says so by an empty list).

    Raises `WireError`.
    """
    if not answers:
        return None
    if len(answers) != len(FabricMemory._fields):
        raise WireError(f"memory of a fabric in {len(answers)} fields")
    name, size_bytes, handle = answers
    if not isinstance(name, bytes) or len(name) != NAME_BYTES:
        raise WireError(f"memory of a fabric whose name is not {NAME_BYTES} bytes")
    if type(size_bytes) is not int or not 0 < size_bytes <= _SIZE_MAX:
        raise WireError(f"memory of a fabric of size_bytes={shown(size_bytes, 40)}")
    if not isinstance(handle, bytes) or len(handle) != HANDLE_BYTES:
        raise WireError(f"memory of a fabric whose handle is not {HANDLE_BYTES} bytes")
    return FabricMemory(name, size_bytes, handle)
