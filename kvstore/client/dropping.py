"""Drops blocks by their keys, on this host and on the hosts that the index names."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.client.nodes.remote import RemoteNodes
from kvstore.client.nodes.saving.host_writer import HostWriter
from kvstore.client.reader import Reader
from kvstore.errors import NodeUnavailableError, PeerError
from kvstore.types import Key


def drop_everywhere(
    reader: Reader, writer: HostWriter, remote: RemoteNodes, keys: Sequence[Key]
) -> list[bool]:
    """As `BlockStore.drop`. Of other hosts each block costs one request to the node that has it."""
    elsewhere = reader.search(keys).remote
    for key in keys:
        reader.forget(key)
    failure: PeerError | None = None
    dropped = [False] * len(keys)
    try:
        dropped = writer.drop(keys)
    except NodeUnavailableError as e:
        if len(elsewhere) < len(keys):
            failure = e
    silent: set[int] = set()
    """Nodes that did not answer: they are not asked for the rest."""
    for i, location in elsewhere.items():
        if location.node_id in silent:
            continue
        try:
            dropped[i] |= remote.drop(keys[i], location)
        except PeerError as e:
            failure = failure or e
            silent.add(location.node_id)
    if failure is not None:
        raise failure
    return dropped
