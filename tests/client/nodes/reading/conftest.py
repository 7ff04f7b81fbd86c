"""A reader of two nodes on other hosts, whose clock stands still."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from reading_parts import (
    WORDS,
    Clock,
    Told,
)
from remote_parts import remote_nodes

from kvstore.client.nodes import remote as remote_module
from kvstore.client.nodes.remote import RemoteNodes
from kvstore.errors import NodeUnavailableError
from kvstore.index.memory import MemoryIndex
from kvstore.nodedir import Announcement


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(remote_module, "time", clock)
    return clock


@pytest.fixture
def nodes(clock: Clock) -> Iterator[RemoteNodes]:
    index = MemoryIndex()
    for node_id, word in WORDS.items():
        index.announce(node_id, word.pack(), 600.0)
    made = remote_nodes(index, 1.0)
    yield made
    made.close()


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    """What nodes are told beside the reads: by node id, the message, until when."""
    seen: Told = []

    def tell(stream: Any, word: Announcement, message: list[object], deadline: float) -> None:
        seen.append((word.node_id, message, deadline))

    monkeypatch.setattr(remote_module, "tell", tell)
    return seen


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], float]]:
    """What was asked of streams. They have blocks of 100 bytes; node 8 does not answer."""
    asked: list[tuple[list[int], float]] = []

    def look(stream: Any, word: Announcement, blocks: Any, deadline: float) -> list[bool]:
        asked.append(([key[0] for key, _ in blocks], deadline))
        if word.node_id == 8:
            raise NodeUnavailableError("silent")
        return [location.length == 100 for _, location in blocks]

    monkeypatch.setattr(remote_module, "look", look)
    return asked
