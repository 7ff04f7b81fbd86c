"""What reaches nodes of other hosts, without a session around it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvstore.client.nodes.directory import NodeDirectory
from kvstore.client.nodes.remote import RemoteNodes
from kvstore.index.base import Index
from kvstore.segment.layout import Layout
from kvstore.transport.registry import Transports
from kvstore.transport.stream.security import StreamSecurity
from kvstore.transport.stream.transport import NAME as STREAM
from kvstore.transport.stream.transport import StreamTransport

NOWHERE = Path("/nonexistent")


def parts_of(
    index: Index,
    names: Sequence[str] = (STREAM,),
    run_dir: Path = NOWHERE,
    key_prefix: str = "kv:default",
) -> tuple[NodeDirectory, Transports]:
    """Those that `index` names, and of this host those of `run_dir`; and the ways to them."""
    ways = Transports(names, StreamTransport(StreamSecurity()), Layout)
    return NodeDirectory(run_dir, index, key_prefix, offered=ways.of), ways


def remote_nodes(
    index: Index, timeout_s: float, names: Sequence[str] = (STREAM,), *where: Any
) -> RemoteNodes:
    """What reads from them."""
    return RemoteNodes(*parts_of(index, names, *where), timeout_s)
