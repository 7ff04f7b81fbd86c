"""What maps the segments of nodes of this host, which a test makes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mapping_parts import Index, Node, NodeOf, Spied

from kvstore.client.nodes.directory import NodeDirectory


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeOf]:
    made: list[Node] = []

    def make(node_id: int, **changes: Any) -> Node:
        made.append(Node(tmp_path, node_id, **changes))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def machine() -> Spied:
    return Spied()


@pytest.fixture
def nodes(tmp_path: Path, machine: Spied) -> Iterator[NodeDirectory]:
    made = NodeDirectory(tmp_path, Index(), "kv:t", machine=machine)  # type: ignore[arg-type]
    yield made
    made.close()


@pytest.fixture
def asked(nodes: NodeDirectory, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The nodes that the index is asked about."""
    seen: list[int] = []
    known = nodes._index.node

    def node_of(node_id: int) -> bytes | None:
        seen.append(node_id)
        return known(node_id)

    monkeypatch.setattr(nodes._index, "node", node_of)
    return seen
