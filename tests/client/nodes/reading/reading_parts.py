"""Transports that answer as they were told, and what is asked of them, for tests of a reader."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from stores import announcement

from kvstore.client.nodes.known import KnownNode
from kvstore.client.nodes.remote import RemoteNodes
from kvstore.nodedir import Announcement
from kvstore.transport.base import Outcome, Read, Transport, Wanted
from kvstore.transport.stream.transport import CHECKSUM_REASON
from kvstore.transport.stream.transport import NAME as STREAM
from kvstore.types import Key, Location

NOW = 1024.0
WORDS = {
    node_id: announcement(node_id=node_id, transports={STREAM: "tcp://there:7400"})
    for node_id in (7, 8)
}
HIT, MISS, FAILED = Outcome(Read.HIT), Outcome(Read.MISS), Outcome(Read.FAILED, "broken")
DAMAGED = Outcome(Read.MISS, CHECKSUM_REASON)


class Clock:
    """Stands still unless somebody moves it."""

    now = NOW

    def monotonic(self) -> float:
        return self.now


Told = list[tuple[int, list[object], float]]


class Way:
    """A transport that answers as it was told, and remembers what it was asked by when."""

    name = ""
    checks_bytes = False

    def __init__(self, answers: dict[int, Outcome] | None = None) -> None:
        self._answers = answers or {}
        self.asked: list[tuple[list[int], float]] = []
        self.meanwhile: Callable[[], None] = lambda: None

    def read(self, word: Any, batch: Sequence[Wanted], deadline: float) -> list[Outcome]:
        self.asked.append(([one.key[0] for one in batch], deadline))
        self.meanwhile()
        return [self._answers.get(one.key[0], HIT) for one in batch]

    def close(self) -> None:
        pass


def wanted(number: int, node_id: int = 7, checksum: int = 1, length: int = 100) -> Wanted:
    location = Location(node_id, 1, 0, 0, 1, 0, length, checksum)
    return Wanted(bytes([number]) * 32, location, (memoryview(bytearray(length)),))


def by(nodes: RemoteNodes, *ways: tuple[str, Way]) -> None:
    for name, way in ways:
        way.name, way.checks_bytes = name, name == STREAM
    nodes._ways = lambda known, word: [way for _, way in ways]  # type: ignore


def ways(nodes: RemoteNodes, word: Announcement) -> list[Transport]:
    """How a node that announces this is read."""
    heard = KnownNode(1)
    heard.offered = nodes.transports.of(word)
    return nodes._ways(heard, word)


def known(nodes: RemoteNodes, node_id: int = 7) -> KnownNode:
    assert nodes.node(node_id, 1, NOW) is not None
    found = nodes.directory.get(node_id)
    assert found is not None
    return found


def keys(*numbers: int) -> bytes:
    return b"".join(bytes([number]) * 32 for number in numbers)


class Vram:
    """The nodes in VRAM that `words` are of."""

    def __init__(self, *words: Announcement) -> None:
        self._words = {word.node_id: word for word in words}
        self.way = Way()

    def node(self, node_id: int, epoch: int, now: float) -> Announcement | None:
        return self._words.get(node_id)

    def read(self, word: Announcement, batch: Sequence[Wanted], deadline: float) -> Any:
        return self.way.read(word, batch, deadline)

    def there(self, word: Announcement, blocks: Sequence[tuple[Key, Location]]) -> list[bool]:
        return [location.length == 1 for _, location in blocks]

    def close(self) -> None:
        pass


def there(nodes: RemoteNodes, *asked: Wanted) -> list[bool]:
    return nodes.there([(one.key, one.location) for one in asked])
