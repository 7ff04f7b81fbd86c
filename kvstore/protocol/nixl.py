"""Encodes how a client reads a node's memory through NIXL, as told over an authenticated stream.

The metadata lets whoever has it read that memory (and write it, where it is
mapped so): it is given to clients that proved the secret, and never to the index.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from kvstore.protocol.stream import WireError

NAME_CHARS_MAX = 128
METADATA_BYTES_MAX = 64 << 10
PROBE_BYTES = 4096
DEVICES_MAX = 1 << 16
_ADDRESS_MAX = 1 << 62
"""Far above what a process can map; with an offset in a segment still 64 bits."""


class Endpoint(NamedTuple):
    """What a reader's agent needs to know of an owner's. Addresses are the owner's own."""

    agent: str
    """The agent's name, another one for each start: `NODE_ID#EPOCH.START`."""
    metadata: bytes
    head_at: int
    """Where the segment's header file is mapped."""
    data_at: int
    """Where its payload is mapped."""
    probe_at: int
    probe: bytes
    """What must be read there, before anything else is."""
    device: int = -1
    """Which of the owner's devices payload and probe are on; -1: they are in host memory."""


def unpack_endpoint(answers: Sequence[Any]) -> Endpoint | None:
    """None when the node has none to give now (it says so by an empty list).

    Raises `WireError`.
    """
    if not answers:
        return None
    if len(answers) not in (len(Endpoint._fields) - 1, len(Endpoint._fields)):
        raise WireError(f"a NIXL endpoint of {len(answers)} fields")
    way = Endpoint(*answers)
    addresses = way.head_at, way.data_at, way.probe_at
    right = (
        isinstance(way.agent, str)
        and 0 < len(way.agent) <= NAME_CHARS_MAX
        and isinstance(way.metadata, bytes)
        and 0 < len(way.metadata) <= METADATA_BYTES_MAX
        and all(type(at) is int and 0 < at < _ADDRESS_MAX for at in addresses)
        and isinstance(way.probe, bytes)
        and len(way.probe) == PROBE_BYTES
        and type(way.device) is int
        and -1 <= way.device < DEVICES_MAX
    )
    if not right:
        raise WireError("an invalid NIXL endpoint")
    return way
