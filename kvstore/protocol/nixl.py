"""Encodes how a client reads a node's memory through NIXL, as told over an authenticated stream.

The metadata lets whoever has it read that memory (and write it, where it is
mapped so): it is given to clients that proved the secret, and never to the index.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvstore.errors import shown
from kvstore.protocol.stream import WireError

NAME_CHARS_MAX = 128
METADATA_BYTES_MAX = 64 << 10
PROBE_BYTES = 4096
DEVICES_MAX = 1 << 16
_ADDRESS_MAX = 1 << 62
"""Far above what a process can map; with an offset in a segment the sum still has 64 bits."""


class Endpoint(NamedTuple):
    """What a reader's agent needs to know of an owner's. Addresses are the owner's own."""

    agent: str
    """The agent's name, a new one for each start: `NODE_ID#EPOCH.START`."""
    metadata: bytes
    head_at: int
    """Where the segment's header file is mapped."""
    data_at: int
    """Where the segment's payload is mapped."""
    probe_at: int
    probe: bytes
    """The bytes that must be read there before anything else is."""
    device: int = -1
    """The owner's device with payload and probe; -1: they are in host memory."""


def unpack_endpoint(answers: Sequence[object]) -> Endpoint | None:
    """Return the endpoint; None when the node has none to give now, which it expresses by an empty
    list. Raises `WireError`."""
    if not answers:
        return None
    if len(answers) not in (len(Endpoint._fields) - 1, len(Endpoint._fields)):
        raise WireError(f"a NIXL endpoint of {len(answers)} fields")
    agent, metadata, head_at, data_at, probe_at, probe, device, *_ = (*answers, -1)
    if not isinstance(agent, str) or not 0 < len(agent) <= NAME_CHARS_MAX:
        raise WireError("a NIXL endpoint whose agent has no name")
    return Endpoint(
        agent,
        _bytes("metadata", metadata, 1, METADATA_BYTES_MAX),
        _number("head_at", head_at, 1, _ADDRESS_MAX),
        _number("data_at", data_at, 1, _ADDRESS_MAX),
        _number("probe_at", probe_at, 1, _ADDRESS_MAX),
        _bytes("probe", probe, PROBE_BYTES, PROBE_BYTES),
        _number("device", device, -1, DEVICES_MAX),
    )


def _number(field: str, value: object, low: int, below: int) -> int:
    if type(value) is not int or not low <= value < below:
        raise WireError(f"a NIXL endpoint with {field}={shown(value, 40)}")
    return value


def _bytes(field: str, value: object, low: int, most: int) -> bytes:
    if not isinstance(value, bytes) or not low <= len(value) <= most:
        raise WireError(f"a NIXL endpoint whose {field} is not {low} to {most} bytes")
    return value
